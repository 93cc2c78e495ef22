"""Calls that stand together in a block, between marks of their own: what Kimi, DeepSeek and MiniMax have in common."""

from abc import abstractmethod

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.events import Broken, Ended
from pipeline.parsers.script import Steps


class CallBlocks(CallParser):
    """A subclass says what begins and ends a block and begins a call, and reads one call behind its mark."""

    @property
    @abstractmethod
    def _marks(self) -> tuple[str, str, str]:
        """The block's beginning, its end, a call's beginning."""

    @abstractmethod
    def _call(self) -> Steps[bool]:
        """One call from behind its mark; whether it is whole."""

    def _read(self) -> Steps[None]:
        opening, _, _ = self._marks
        while (yield from self._before((opening,), self._pass)):
            self._mark()
            self._take(len(opening))
            yield from self._block()

    def _block(self) -> Steps[None]:
        """To the end of the block, or to what does not belong in it."""
        _, end, call = self._marks
        while True:
            yield from self._blanks()
            if (yield from self._literal(end)) or (yield from self._peek()) == "":
                return
            whole = (yield from self._literal(call)) and (yield from self._call())
            self._say(Ended() if whole else Broken(self._since_mark()))
            if not whole:
                return
            self._mark()
