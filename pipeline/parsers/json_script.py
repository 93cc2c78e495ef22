"""JSON read while it arrives: checked by RFC 8259 and passed on without the blanks between its tokens.

What is passed on is the model's own spelling of strings and numbers, so no digit of a number is lost.  The first
character that cannot belong to the value ends the reading.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.events import Arguments, Begun
from pipeline.parsers.script import Steps

DEEPEST = 128  # nested containers: no function has such arguments

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_WORDS = ("true", "false", "null")

Sink = Callable[[str], None]


class JsonScript(CallParser):
    """Words for JSON.  Each returns whether it was well formed; what came before the fault was passed on."""

    def _value(self, sink: Sink) -> Steps[bool]:
        """One value of any kind; blanks before it are skipped."""
        closers: list[str] = []
        while True:
            yield from self._blanks()
            first = yield from self._peek()
            if first in ("{", "["):
                if len(closers) >= DEEPEST:
                    return False
                closers.append("}" if first == "{" else "]")
                sink(self._take(1))
                yield from self._blanks()
                if (yield from self._peek()) != closers[-1]:
                    if first == "{" and not (yield from self._key(sink)):
                        return False
                    continue
            elif not (yield from self._scalar(first, sink)):
                return False
            proceed = yield from self._after_value(closers, sink)
            if proceed is not None:
                return proceed

    def _after_value(self, closers: list[str], sink: Sink) -> Steps[bool | None]:
        """Close what ends here.  True: the whole value is read; False: it is broken; None: another value follows."""
        while closers:
            yield from self._blanks()
            next_one = yield from self._peek()
            if next_one == closers[-1]:
                closers.pop()
                sink(self._take(1))
                continue
            if next_one != ",":
                return False
            sink(self._take(1))
            if closers[-1] == "}":
                yield from self._blanks()
                if not (yield from self._key(sink)):
                    return False
            return None
        return True

    def _key(self, sink: Sink) -> Steps[bool]:
        if not (yield from self._string(sink)):
            return False
        yield from self._blanks()
        if (yield from self._peek()) != ":":
            return False
        sink(self._take(1))
        return True

    def _scalar(self, first: str, sink: Sink) -> Steps[bool]:
        if first == '"':
            return (yield from self._string(sink))
        for word in _WORDS:
            if first == word[0]:
                if not (yield from self._literal(word)):
                    return False
                sink(word)
                return True
        if not first or first not in "-0123456789":
            return False
        number = yield from self._run(_NUMBER_CHARACTERS)
        sink(number)
        return _NUMBER.fullmatch(number) is not None

    def _string(self, sink: Sink) -> Steps[bool]:
        if (yield from self._peek()) != '"':
            return False
        sink(self._take(1))
        while True:
            if plain := (yield from self._plain()):
                sink(plain)
                continue
            next_one = yield from self._peek()
            if next_one == '"':
                sink(self._take(1))
                return True
            if next_one != "\\":
                return False
            escape = yield from self._peek(2)
            if escape[1:] == "u":
                escape = yield from self._peek(6)
                if not _HEX.fullmatch(escape[2:]):
                    return False
            elif escape[1:] not in tuple('"\\/bfnrt'):
                return False
            sink(self._take(len(escape)))

    def _plain(self) -> Steps[str]:
        """Characters of a string that need no look, as many as are here; "" when the next one does."""
        yield from self._peek()
        match = _PLAIN.match(self._buffer, self._at)
        assert match is not None
        return self._take(match.end() - self._at)

    def _text(self) -> Steps[str | None]:
        """A string's value; None when it is none."""
        pieces: list[str] = []
        if not (yield from self._string(pieces.append)):
            return None
        try:
            return msgspec.json.decode("".join(pieces), type=str)
        except (msgspec.DecodeError, UnicodeError):  # half of a surrogate pair
            return None


class CallObjects(JsonScript):
    """A word for `{"name": ..., "arguments": {...}}`.  `functions`: what may be called, None for anything."""

    def __init__(self, functions: Mapping[str, Any] | None) -> None:
        super().__init__()
        self._functions = functions

    def _call(self) -> Steps[bool]:
        """One such object, its keys in any order, "parameters" for "arguments", others ignored."""
        if (yield from self._peek()) != "{":
            return False
        self._take(1)
        name: str | None = None
        held: list[str] | None = None  # arguments, whole, that came before the name
        begun = False
        while True:
            yield from self._blanks()
            key = yield from self._text()
            yield from self._blanks()
            if key is None or not (yield from self._literal(":")):
                return False
            yield from self._blanks()
            if key == "name":
                if name is not None:
                    return False
                name = yield from self._text()
                if not name or (self._functions is not None and name not in self._functions):
                    return False
            elif key in ("arguments", "parameters"):
                if held is not None or begun:
                    return False
                if name is not None and (yield from self._peek()) == "{":
                    self._say(Begun(name))
                    begun = True
                    if not (yield from self._value(self._argue)):
                        return False
                else:
                    held = yield from self._object()
                    if held is None:
                        return False
            elif not (yield from self._value(_nowhere)):
                return False
            yield from self._blanks()
            if (yield from self._literal("}")):
                break
            if not (yield from self._literal(",")):
                return False
        if name is None:
            return False
        if not begun:
            self._say(Begun(name))
            self._argue("".join(held or ("{}",)))
        return True

    def _object(self) -> Steps[list[str] | None]:
        """Arguments that cannot be told yet: an object, one written as a string, or null for none."""
        pieces: list[str] = []
        first = yield from self._peek()
        if not (yield from self._value(pieces.append)):
            return None
        if first == "{":
            return pieces
        if first == "n":
            return ["{}"]
        if first != '"':
            return None
        try:
            inner = msgspec.json.decode(msgspec.json.decode("".join(pieces)), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        return [msgspec.json.encode(inner).decode()]

    def _argue(self, text: str) -> None:
        self._say(Arguments(text))


def _nowhere(text: str) -> None:
    """For values nobody asked for."""
