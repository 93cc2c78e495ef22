"""What every parser of tool calls is."""

from typing import ClassVar

from pipeline.parsers.events import CallEvent, Text
from pipeline.parsers.script import Script


class CallParser(Script[CallEvent]):
    """One output being read.  `markers`: texts it needs to see even if the vocabulary has them as special tokens."""

    markers: ClassVar[tuple[str, ...]] = ()

    def _pass(self, text: str) -> None:
        self._mark()  # what was told as text need not be remembered
        self._say(Text(text))
