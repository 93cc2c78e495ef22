"""Logs: one line an event, on stderr, with the same keys for people, for collectors and for the journal.

    2026-11-29T13:56:49.123Z INFO request id=chatcmpl-... route=/v1/chat/completions status=200 total_ms=15.4

`--log-json` writes one object a line.  When stderr is the journal (JOURNAL_STREAM names it) the time is left out and
the severity goes in front as `<N>`.  Nothing that passes here may carry a payload or a secret: data URLs and the
queries of URLs are cut out of every text, long values are shortened, line breaks cannot start a line of their own.
"""

import functools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

import msgspec

from pipeline.config import Log

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
_NAMES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN"}
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}  # syslog's, as sd-daemon(3)
# Ours; libraries speak at WARN and above only (hpack at DEBUG prints every header, keys included).
_OURS = ("mediagate", "pool", "engines", "pipeline")
_MAX_VALUE = 300
_MAX_MESSAGE = 2000
_MAX_TRACEBACK = 16_000
_NUMBERS = frozenset((int, float))
_LONG_WORD = 100

_DATA_URL = re.compile(r"data:[^\s,;\"']{0,100}(?:;[^\s,\"']{0,100})?,[^\s\"'<>)]*", re.IGNORECASE)
_LEAST_BASE64 = 200
_BASE64 = re.compile(rf"[A-Za-z0-9+/_-]{{{_LEAST_BASE64},}}={{0,2}}")
_QUERY = re.compile(r"(\bhttps?://[^\s?#\"'<>]*)[?#][^\s\"'<>)]*", re.IGNORECASE)
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#\"'<>]*@", re.IGNORECASE)
_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f]+")

_access = logging.getLogger("mediagate.access")
_timing = logging.getLogger("mediagate.timing")


def event(logger: logging.Logger, level: int, name: str, /, **keys: Any) -> None:
    """Log the event `name` with its keys; None values are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, name, extra={"keys": keys})


class Reported(Protocol):
    """What the access line reads of a request's ticket."""

    request_id: str
    route: str
    model: str
    worker: str
    message: str
    reader: str
    items: int
    media_bytes: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def elapsed_s(self) -> float: ...

    def stage_ms(self) -> Mapping[str, float]: ...


def access_line(ticket: Reported, status: int, code: str) -> None:
    """The one line of every request.  Stages that run in parallel are sums over the items."""
    if not _access.isEnabledFor(logging.INFO):
        return
    keys: dict[str, Any] = {
        "id": ticket.request_id,
        "route": ticket.route,
        "status": status,
        "code": code or None,
        "message": ticket.message or None,
        "model": ticket.model or None,
        "worker": ticket.worker or None,
        "prefill": ticket.reader if ticket.reader != ticket.worker else None,
        "items": ticket.items,
        "media_bytes": ticket.media_bytes,
        "prompt_tokens": ticket.prompt_tokens,
        "completion_tokens": ticket.completion_tokens,
        "total_ms": round(ticket.elapsed_s * 1e3, 1),
        **ticket.stage_ms(),
    }
    event(_access, logging.INFO, "request", **keys)


def mm_timing(
    request_id: str,
    *,
    counts: Mapping[str, int],
    frames: int,
    fetch_decode_s: float,
    config_lookup_s: float,
    preprocess_s: float,
    token_expand_s: float,
    total_s: float,
    original_tokens: int,
    expanded_tokens: int,
) -> None:
    """The line of --log-mm-timing for one multimodal request, with SMG's keys.

    `counts` is items by modality ("image", "video", "audio"); `frames` those of all clips together.
    """
    present = ", ".join(modality.capitalize() for modality in ("image", "video", "audio") if counts.get(modality))
    event(
        _timing,
        logging.INFO,
        "smg_mm_timing process_multimodal_plan",
        id=request_id,
        modalities=f"[{present}]",
        image_count=counts.get("image", 0),
        audio_count=counts.get("audio", 0),
        video_count=counts.get("video", 0),
        video_frame_count=frames,
        media_fetch_decode_ms=round(fetch_decode_s * 1e3, 3),
        config_lookup_ms=round(config_lookup_s * 1e3, 3),
        preprocess_ms=round(preprocess_s * 1e3, 3),
        token_expand_ms=round(token_expand_s * 1e3, 3),
        total_ms=round(total_s * 1e3, 3),
        original_tokens=original_tokens,
        expanded_tokens=expanded_tokens,
    )


def scrub(text: str, limit: int = _MAX_MESSAGE) -> str:
    """`text` without payloads, credentials and queries of URLs, at most about `limit` characters."""
    text = text if len(text) <= 8 * limit else text[: 8 * limit]
    if not text.isascii():  # headers may hold lone surrogates, which no stream takes
        text = text.encode("utf-8", "backslashreplace").decode()
    if "," in text:
        text = _DATA_URL.sub("data:...", text)
    if "://" in text and ("?" in text or "#" in text or "@" in text):
        text = _USERINFO.sub(r"\1", _QUERY.sub(r"\1", text))
    if len(text) >= _LEAST_BASE64:
        text = _BASE64.sub("...", text)
    return text if len(text) <= limit else f"{text[:limit]}..."


def shown(value: Any) -> Any:
    """A value as a line may carry it: numbers and booleans as they are, everything else as a short text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    return scrub(str(value), _MAX_VALUE)


class _Lines(logging.Formatter):
    """`time level event key=value`; or, for the journal, `<N>level event key=value`."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        level = _NAMES.get(record.levelno, "ERROR")
        words = [] if self._journal else [_time(record)]
        words += [level, _one_line(scrub(record.getMessage()))]
        words += [
            f"{key}={value if value.__class__ in _NUMBERS else _word(value)}" for key, value in _keys(record).items()
        ]
        lines = [" ".join(words), *(f"  {line}" for line in _traceback(record).splitlines())]  # none begins like ours
        if not self._journal:
            return "\n".join(lines)
        priority = _PRIORITIES.get(record.levelno, 3)
        return "\n".join(f"<{priority}>{line}" for line in lines)


class _Objects(logging.Formatter):
    """One JSON object a line: time, level, event, then the same keys."""

    def format(self, record: logging.LogRecord) -> str:
        level = _NAMES.get(record.levelno, "ERROR")
        line = {"time": _time(record), "level": level, "event": scrub(record.getMessage())}
        traceback = _traceback(record)
        extra = {"traceback": traceback} if traceback else {}
        keys = {key: shown(value) for key, value in _keys(record).items()}
        return msgspec.json.encode({**keys, **line, **extra}).decode()


def _keys(record: logging.LogRecord) -> dict[str, Any]:
    found = {key: value for key, value in getattr(record, "keys", {}).items() if value is not None}
    return found or {"logger": record.name}


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@functools.lru_cache(maxsize=4)
def _second(since_epoch: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since_epoch))


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _word(value: Any) -> str:
    return _known_word(value) if value.__class__ is str and len(value) < _LONG_WORD else _quoted(shown(value))


@functools.lru_cache(maxsize=512)
def _known_word(text: str) -> str:
    """Models, workers and routes come again and again."""
    return _quoted(shown(text))


def _quoted(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or not record.exc_info[0]:
        return ""
    return scrub(logging.Formatter().formatException(record.exc_info), _MAX_TRACEBACK)


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether `stream` is the very connection to the journal that JOURNAL_STREAM names (systemd.exec(5))."""
    try:
        facts = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{facts.st_dev}:{facts.st_ino}"


def set_up(log: Log, environ: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Send every log line of this process to `stream` (stderr), as `log` says.  Repeatable; before the first fork."""
    stream = stream or sys.stderr
    for fact in ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks", "_srcfile"):
        setattr(logging, fact, None)  # no line tells it, and looking it up is a quarter of what a line costs
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Objects() if log.json else _Lines(journal=is_journal(stream, environ)))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    level = LEVELS[log.level]
    root.setLevel(max(level, logging.WARNING))
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
