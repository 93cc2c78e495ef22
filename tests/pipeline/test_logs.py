"""Logs: the same keys in three formats, and nothing in them that does not belong there."""

import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import logs
from pipeline.config import Log
from pipeline.ticket import Ticket

logger = logging.getLogger("mediagate.test")
Speak = Callable[..., io.StringIO]


@pytest.fixture
def speak() -> Iterator[Speak]:
    """Logging set up on a string; everything is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def start(log: Log | None = None, environ: dict[str, str] | None = None) -> io.StringIO:
        stream = io.StringIO()
        logs.set_up(log or Log(), environ or {}, stream)
        return stream

    yield start
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("mediagate", "pool", "engines", "pipeline"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def ticket() -> Ticket:
    made = Ticket("chatcmpl-abc", "/v1/chat/completions")
    made.model, made.items, made.media_bytes, made.prompt_tokens, made.completion_tokens = "qwen3-vl", 2, 41000, 75, 3
    made.add("decode", 0.0041)
    made.add("send", 0.003)
    return made


def test_human_lines(speak: Speak) -> None:
    out = speak()
    logs.event(logger, logging.INFO, "worker ready", url="grpc://a:1", load=3, note="two words", gone=None, ok=True)
    line = out.getvalue()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO worker ready url=grpc://a:1 load=3 note=\"two words\" ok=true\n",
        line,
    )


def test_objects_have_the_same_keys(speak: Speak) -> None:
    out = speak(Log(json=True))
    logs.event(logger, logging.WARNING, "worker ready", url="grpc://a:1", load=3, note='a "b"', gone=None, ok=True)
    row = json.loads(out.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row.pop("time"))
    assert row == {
        "level": "WARN", "event": "worker ready", "url": "grpc://a:1", "load": 3, "note": 'a "b"', "ok": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 3)],
)
def test_the_journal_gets_a_priority_and_no_time(speak: Speak, tmp_path: Path, level: int, priority: int) -> None:
    with open(tmp_path / "journal", "w+") as stream:
        facts = os.fstat(stream.fileno())
        speak()
        logs.set_up(Log(level="debug"), {"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino}"}, stream)
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            logger.log(level, "it happened", exc_info=True)
        stream.seek(0)
        lines = stream.read().splitlines()
    assert re.match(rf"<{priority}>[A-Z]+ it happened logger=mediagate.test$", lines[0])
    assert len(lines) > 4 and all(line.startswith(f"<{priority}>") for line in lines)


def test_a_pipe_is_not_the_journal_whatever_the_variable_says(tmp_path: Path) -> None:
    assert not logs.is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})
    with open(tmp_path / "file", "w") as stream:
        assert not logs.is_journal(stream, {"JOURNAL_STREAM": "1:2"})
        assert not logs.is_journal(stream, {})


@pytest.mark.parametrize(
    ("level", "heard"),
    [("debug", ["d", "i", "w", "e"]), ("info", ["i", "w", "e"]), ("warn", ["w", "e"]), ("error", ["e"])],
)
def test_levels(speak: Speak, level: Any, heard: list[str]) -> None:
    out = speak(Log(level=level))
    for letter, number in (("d", 10), ("i", 20), ("w", 30), ("e", 40)):
        logger.log(number, letter)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == heard


def test_libraries_never_speak_below_warn(speak: Speak) -> None:
    """hpack's debug lines hold every header of every call."""
    out = speak(Log(level="debug"))
    for name in ("hpack.hpack", "grpclib", "aiohttp.access", "asyncio"):
        logging.getLogger(name).debug("authorization: Bearer s3cret")
        logging.getLogger(name).info("authorization: Bearer s3cret")
    assert out.getvalue() == ""
    logging.getLogger("asyncio").warning("slow callback")
    assert "slow callback" in out.getvalue()
    for name in ("pool.pool", "engines.dispatch", "pipeline.x"):
        logging.getLogger(name).debug("ours")
    assert out.getvalue().count("ours") == 3


def test_setting_up_twice_does_not_double_lines(speak: Speak) -> None:
    speak()
    out = speak()
    logger.info("once")
    assert out.getvalue().count("once") == 1


def test_access_line(speak: Speak) -> None:
    out = speak(Log(json=True))
    logs.access_line(ticket(), 200, "")
    row = json.loads(out.getvalue())
    assert row.pop("total_ms") >= 0
    del row["time"]
    assert row == {
        "level": "INFO", "event": "request", "id": "chatcmpl-abc", "route": "/v1/chat/completions", "status": 200,
        "model": "qwen3-vl", "items": 2, "media_bytes": 41000, "prompt_tokens": 75, "completion_tokens": 3,
        "decode_ms": 4.1, "send_ms": 3.0,
    }  # fmt: skip
    out = speak()
    logs.access_line(ticket(), 400, "multimodal_processing_failed")
    assert " status=400 code=multimodal_processing_failed " in out.getvalue()
    out = speak(Log(level="warn"))
    logs.access_line(ticket(), 200, "")
    assert out.getvalue() == ""


def test_timing_line_has_the_peers_keys(speak: Speak) -> None:
    # seen from SMG 1.13.0 for one picture
    peer = (
        "smg_mm_timing process_multimodal_plan modalities=[Image] image_count=1 audio_count=0 video_count=0 "
        "video_frame_count=0 media_fetch_decode_ms=0.448779 config_lookup_ms=0.003625 preprocess_ms=1.360064 "
        "token_expand_ms=0.014141 total_ms=1.832408 original_tokens=12 expanded_tokens=75"
    )
    out = speak()
    logs.mm_timing(
        "chatcmpl-abc",
        counts={"image": 1},
        frames=0,
        fetch_decode_s=0.000448779,
        config_lookup_s=0.000003625,
        preprocess_s=0.001360064,
        token_expand_s=0.000014141,
        total_s=0.001832408,
        original_tokens=12,
        expanded_tokens=75,
    )
    line = out.getvalue()
    assert line.split(" INFO ")[1].startswith("smg_mm_timing process_multimodal_plan ")
    assert "id=chatcmpl-abc" in line
    rounded = re.sub(r"\d+\.\d+", lambda number: f"{round(float(number[0]), 3):g}", peer)
    assert [word for word in line.split()[2:] if not word.startswith("id=")] == rounded.split()


PAYLOAD = "iVBORw0KGgoAAAANSUhEUgAA" * 40


@pytest.mark.parametrize("log", [Log(level="debug"), Log(level="debug", json=True)])
@pytest.mark.parametrize(
    "text",
    [
        f"cannot read data:image/png;base64,{PAYLOAD}",
        f"cannot read 'DATA:image/png;charset=x;BASE64,{PAYLOAD}'",
        f"cannot read {PAYLOAD}==",
        f"cannot read data:,{PAYLOAD}",
    ],
)
def test_payloads_stay_out(speak: Speak, log: Log, text: str) -> None:
    out = speak(log)
    logger.info(text)
    logger.info("%s", text)
    logs.event(logger, logging.INFO, "failed", message=text, body=PAYLOAD.encode(), url=text)
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("failed")
    assert "iVBORw0KGgo" not in out.getvalue()
    assert "cannot read" in out.getvalue()
    assert f"<{len(PAYLOAD)} bytes>" in out.getvalue()


def test_queries_and_credentials_of_urls_stay_out(speak: Speak) -> None:
    out = speak()
    url = "https://user:pw@img.example/a.png?X-Amz-Signature=abc#frag"
    logger.info("fetching %s now", url)
    logs.event(logger, logging.INFO, "fetch", url=url)
    assert out.getvalue().count("https://img.example/a.png") == 2
    for secret in ("abc", "pw", "frag", "user"):
        assert secret not in out.getvalue()
    assert " now " in out.getvalue()
    logger.info("redis://:secret@h:1 and grpc://u:secret@h and https://u:sec@secret@h/x, write to me@h")
    assert (
        "secret" not in out.getvalue() and "redis://h:1 and grpc://h and https://h/x, write to me@h" in out.getvalue()
    )


def test_a_traceback_looks_like_no_line_of_ours(speak: Speak) -> None:
    out = speak()
    try:
        raise ValueError("said\n2026-11-29T13:56:49.123Z INFO request id=forged status=200\nmore")
    except ValueError:
        logger.exception("failed")
    _, *traceback = out.getvalue().splitlines()
    assert len(traceback) > 4 and all(line.startswith("  ") for line in traceback)


def test_long_values_are_cut(speak: Speak) -> None:
    out = speak()
    logs.event(logger, logging.INFO, "x", value="ab " * 1_000_000)
    logger.info("cd " * 1_000_000)
    assert len(out.getvalue()) < 4000


@settings(deadline=None)
@given(text=st.text(st.characters(), max_size=200), value=st.text(st.characters(), max_size=200))
def test_one_event_is_one_line_whatever_it_says(text: str, value: str) -> None:
    record = logging.LogRecord("mediagate.test", logging.INFO, __file__, 1, text, None, None)
    record.keys = {"value": value}
    plain = logs._Lines(journal=False).format(record)
    assert len(plain.splitlines()) == 1
    assert len(logs._Lines(journal=True).format(record).splitlines()) == 1
    as_json = logs._Objects().format(record)
    assert "\n" not in as_json and "\r" not in as_json
    assert json.loads(as_json)["level"] == "INFO"
    assert plain.encode() and as_json.encode()
