"""One output as a client is told it: reasoning, words of the answer, calls of functions.

A call is told when it is whole.  Only one whose arguments grow beyond `patience` characters is told while it is still
being written, as a client that waits for a long one wants to see it move; should such a call break, what was told
stands.  Whatever is no call after all stays in the answer, as the model wrote it; text behind a whole call is dropped,
which is mostly white space.
"""

import secrets

import msgspec

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.events import Arguments, Begun, Broken, CallEvent, Ended, Text
from pipeline.parsers.thinking import Answered, Tag, ThinkingSplitter, Thought

PATIENCE = 128  # characters of arguments; most calls are shorter


class Words(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """Call `index` (from 0) of this function."""

    index: int
    call_id: str
    name: str


class CallGrown(msgspec.Struct, frozen=True):
    """More of its arguments, compact JSON."""

    index: int
    arguments: str


Said = Thought | Words | CallBegun | CallGrown


class Output:
    """`thinking`, `calls`: None where nothing is looked for.  `separates`: reasoning is told apart; else it stays in
    the text with its tags, and no call is looked for in it.  `one_call`: further ones are dropped.  `patience`: None
    for endless.
    """

    def __init__(
        self,
        thinking: ThinkingSplitter | None,
        calls: CallParser | None,
        *,
        separates: bool = True,
        one_call: bool = False,
        patience: int | None = PATIENCE,
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._separates = separates
        self._one_call = one_call
        self._patience = patience
        self._said: list[Said] = []
        self._name = ""  # of the call being written
        self._arguments: list[str] = []
        self._held = 0  # characters of it that nobody was told
        self._is_told = False
        self._drops = False  # text, because it follows a whole call
        self._begun = 0  # calls told
        self.made = 0  # calls that are whole
        self.is_half_told = False  # a call was told that will never be whole

    def feed(self, text: str) -> list[Said]:
        if self._thinking is None:
            self._read(text)
        else:
            self._split(self._thinking.feed(text))
        return self._told()

    def finish(self) -> list[Said]:
        if self._thinking is not None:
            self._split(self._thinking.finish())
        if self._calls is not None:
            self._hear(self._calls.finish())
        self.is_half_told |= self._is_told
        return self._told()

    def finish_reason(self, engines: str) -> str:
        """The engine's reason, or that calls were made."""
        return "tool_calls" if self.made and not self.is_half_told and engines in ("stop", "length") else engines

    def is_answer(self, place: int) -> bool | None:
        """Whether the output's character at `place` is no reasoning; None while that is open."""
        return True if self._thinking is None or not self._separates else self._thinking.is_answer(place)

    def _told(self) -> list[Said]:
        self._flush()
        said, self._said = self._said, []
        return said

    def _split(self, events: "list[Thought | Tag | Answered]") -> None:
        for event in events:
            if isinstance(event, Answered):
                self._read(event.text)
            elif not self._separates:
                self._speak(event.text)
            elif isinstance(event, Thought):
                self._said.append(event)

    def _read(self, text: str) -> None:
        if self._calls is None:
            self._speak(text)
        else:
            self._hear(self._calls.feed(text))

    def _speak(self, text: str) -> None:
        if not text:
            return
        last = self._said[-1] if self._said else None
        if isinstance(last, Words):
            self._said[-1] = Words(last.text + text)
        else:
            self._said.append(Words(text))

    def _hear(self, events: list[CallEvent]) -> None:
        for event in events:
            match event:
                case Text(text):
                    if not self._drops:
                        self._speak(text)
                case Begun(name):
                    self._name, self._arguments, self._held, self._is_told = name, [], 0, False
                case Arguments(text):
                    self._grow(text)
                case Ended():
                    self._end()
                case Broken(text):
                    self._flush()
                    self.is_half_told |= self._is_told
                    self._is_told, self._arguments, self._drops = False, [], False
                    self._speak(text)

    @property
    def _is_superfluous(self) -> bool:
        return self._one_call and self.made > 0

    def _grow(self, text: str) -> None:
        self._arguments.append(text)
        self._held += len(text)
        if self._patience is not None and self._held > self._patience:
            self._tell()

    def _end(self) -> None:
        self._tell()
        self._flush()
        self.made += 0 if self._is_superfluous else 1
        self._is_told, self._arguments, self._drops = False, [], True

    def _tell(self) -> None:
        if self._is_told or self._is_superfluous:
            return
        self._said.append(CallBegun(self._begun, f"call_{secrets.token_hex(12)}", self._name))
        self._begun, self._is_told = self._begun + 1, True

    def _flush(self) -> None:
        """The arguments of a call that is told, as far as they are here."""
        if self._is_told and self._arguments:
            self._said.append(CallGrown(self._begun - 1, "".join(self._arguments)))
            self._arguments = []
