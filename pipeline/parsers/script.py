"""Parsers written as if the whole text were there: a generator that stops wherever it needs more.

The methods with a leading underscore that are generators are the words of such a script (`yield from`); each waits
until it can decide by characters alone, or until the text is over.  So a parser reads from top to bottom like its
format's description, and cannot tell how its input was cut.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

EventT = TypeVar("EventT")
ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]  # yields when it needs more text

_BLANKS = re.compile(r"[ \t\r\n]*")


class Script(ABC, Generic[EventT]):
    """`_read` is the script; events are what it hands to `_say`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0  # what of the buffer is consumed
        self._gone = 0  # characters consumed before the buffer
        self._over = False
        self._raw: list[str] = []  # consumed since `_mark`
        self._events: list[EventT] = []
        self._program = self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """The script; whatever it leaves unread is lost."""

    def feed(self, text: str) -> list[EventT]:
        """What these characters made certain."""
        self._gone += self._at
        self._buffer, self._at = self._buffer[self._at :] + text, 0
        return self._resume()

    def finish(self) -> list[EventT]:
        """The text is over: what was held back.  The script is spent."""
        self._over = True
        return self._resume()

    @property
    def consumed(self) -> int:
        """Characters read and decided upon."""
        return self._gone + self._at

    def _resume(self) -> list[EventT]:
        next(self._program, None)
        events, self._events = self._events, []
        return events

    def _say(self, event: EventT) -> None:
        self._events.append(event)

    # ---- the words of a script

    def _mark(self) -> None:
        """From here on characters are remembered, for `_since_mark`."""
        self._raw = []

    def _since_mark(self) -> str:
        return "".join(self._raw)

    def _take(self, count: int) -> str:
        taken = self._buffer[self._at : self._at + count]
        self._at += count
        self._raw.append(taken)
        return taken

    def _peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, fewer at the end; nothing is consumed."""
        while len(self._buffer) - self._at < count and not self._over:
            yield
        return self._buffer[self._at : self._at + count]

    def _blanks(self) -> Steps[str]:
        """Consume white space (JSON's)."""
        return (yield from self._run(_BLANKS))

    def _run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume the longest run of `pattern`, a class of characters repeated from zero on."""
        found = []
        while True:
            match = pattern.match(self._buffer, self._at)
            assert match is not None
            found.append(self._take(match.end() - self._at))
            if self._at < len(self._buffer) or self._over:
                return "".join(found)
            yield

    def _literal(self, text: str) -> Steps[bool]:
        """Consume `text` if it is next."""
        for end in range(1, len(text) + 1):  # decided at the first character that differs, so nothing waits for more
            if (yield from self._peek(end)) != text[:end]:
                return False
        self._take(len(text))
        return True

    def _until(self, marker: str, sink: Callable[[str], None], *, instead: tuple[str, ...] = ()) -> Steps[str]:
        """As `_before`, and consume the marker."""
        found = yield from self._before((marker, *instead), sink)
        self._take(len(found))
        return found

    def _before(self, markers: tuple[str, ...], sink: Callable[[str], None]) -> Steps[str]:
        """Hand what stands before the first of `markers` to `sink` as it becomes certain; which one comes, "" when the
        text ended without any (so with no markers it hands on everything).
        """
        while True:
            first, one = len(self._buffer), ""
            for marker in markers:
                at = self._buffer.find(marker, self._at)
                if at >= 0 and (at, marker) < (first, one or marker):
                    first, one = at, marker
            if not one and not self._over:
                for marker in markers:
                    first = min(first, len(self._buffer) - self._beginning_of(marker))
            if first > self._at:
                sink(self._take(first - self._at))
            if one or self._over:
                return one
            yield

    def _rest(self, sink: Callable[[str], None]) -> Steps[None]:
        """Hand everything that still comes to `sink`."""
        while True:
            if self._at < len(self._buffer):
                sink(self._take(len(self._buffer) - self._at))
            if self._over:
                return
            yield

    def _beginning_of(self, marker: str) -> int:
        """Length of the longest end of the buffer that `marker` begins with (not the whole marker)."""
        buffer, size = self._buffer, len(self._buffer)
        start = buffer.find(marker[0], max(self._at, size - len(marker) + 1))
        while start >= 0:
            if marker.startswith(buffer[start:]):
                return size - start
            start = buffer.find(marker[0], start + 1)
        return 0
