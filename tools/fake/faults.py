"""Scripted trouble for tests: how one request goes wrong, written into its prompt or given for every request.

A marker anywhere in the prompt, `[[fault refuse=UNAVAILABLE times=2]]`, or the option `--fault "refuse=UNAVAILABLE"`.
Words:

  refuse=STATUS     that gRPC status before the first token; `message=TEXT` (no blanks) as its details
  break=STATUS      that status after `after=N` tokens (default 1), or after `choices=N` whole choices
  silent            never answers; `after=N`: stops answering after N tokens
  drop              the TCP connection is shut down, after `after=N` tokens (default 0)
  exit              the process ends at once, after `after=N` tokens (default 0)
  slow=MS           waits before the first token
  times=N           only the first N requests with exactly this marker; the others are answered
"""

import dataclasses
import re
from collections import Counter

import grpc

_MARKER = re.compile(r"\[\[fault ([^\]]*)\]\]")
_STATUSES = {status.name: status for status in grpc.StatusCode if status is not grpc.StatusCode.OK}
_KINDS = ("refuse", "break", "silent", "drop", "exit", "slow")


class FaultError(ValueError):
    """The words of a fault make no sense."""


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    status: grpc.StatusCode | None = None
    message: str = "engine says no"
    after: int = 0
    choices: int = 0
    delay_s: float = 0.0
    times: int | None = None


def parse(words: str) -> Fault:
    """Raises FaultError."""
    pairs = [word.partition("=")[::2] for word in words.split()]
    kinds = [name for name, _ in pairs if name in _KINDS]
    if len(kinds) != 1:
        raise FaultError(f"exactly one of {', '.join(_KINDS)} in {words!r}")
    settings = dict(pairs)
    unknown = set(settings) - {*_KINDS, "message", "after", "choices", "times"}
    if unknown:
        raise FaultError(f"unknown word {sorted(unknown)[0]!r} in {words!r}")
    kind = kinds[0]
    try:
        status = _STATUSES[settings[kind]] if kind in ("refuse", "break") else None
        delay_s = float(settings[kind]) / 1000 if kind == "slow" else 0.0
        after = int(settings.get("after", kind == "break"))
        choices = int(settings.get("choices", 0))
        times = int(settings["times"]) if "times" in settings else None
    except (KeyError, ValueError) as error:
        raise FaultError(f"bad value in {words!r}: {error}") from None
    return Fault(kind, status, settings.get("message", Fault.message), after, choices, delay_s, times)


class Script:
    """Which fault the next request meets; counts the uses of every marker."""

    def __init__(self, always: str = "") -> None:
        self._always = always
        self._used: Counter[str] = Counter()
        if always:
            parse(always)

    def next(self, prompt: str) -> Fault | None:
        """Raises FaultError for a marker that cannot be read."""
        found = _MARKER.search(prompt)
        words = found[1] if found else self._always
        if not words:
            return None
        fault = parse(words)
        self._used[words] += 1
        if fault.times is not None and self._used[words] > fault.times:
            return None
        return fault
