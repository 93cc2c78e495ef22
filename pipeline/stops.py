"""Stop strings over text that arrives in pieces.

The match is the one a reader of single characters would meet first: the earliest end, and of several that end there
the longest. So the result does not depend on how the text was cut.  Text that may still become a stop string is held
back (the longest suffix of what came that begins one); a stop string never leaks, and nothing else waits.
`pipeline.reply` owns one per choice.
"""

from collections.abc import Sequence


class StopMatcher:
    """One output's search.  After a match it is spent."""

    def __init__(self, stops: Sequence[str], *, trim: bool = True) -> None:
        """`stops`: non-empty strings.  `trim` false keeps the matched string in the text."""
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._trim = trim
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown.  Sets `matched` when a stop string is complete; what follows it is dropped.

        `armed` false (fewer tokens than `min_tokens`): a string that ends in this text does not count, one that only
        begins in it may.
        """
        if not self._stops:
            return text
        if self.matched is not None or not text:
            return ""
        window = self._held + text
        if armed:
            found = self._find(window, len(self._held))
            if found is not None:
                end, stop = found
                self.matched = stop
                self._held = ""
                return window[: end - len(stop)] if self._trim else window[:end]
        held = self._longest_beginning(window)
        self._held = window[len(window) - held :]
        return window[: len(window) - held]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str, seen: int) -> tuple[int, str] | None:
        """The first match that ends after `seen` characters: (its end, the string)."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[0], best[2])

    def _longest_beginning(self, window: str) -> int:
        """Length of the longest suffix of `window` that a stop string begins with (not the whole string)."""
        return max(_overlap(window, stop) for stop in self._stops)


def _overlap(window: str, stop: str) -> int:
    start = window.find(stop[0], max(0, len(window) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(window[start:]):
            return len(window) - start
        start = window.find(stop[0], start + 1)
    return 0
