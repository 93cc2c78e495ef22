"""Reasoning told apart from the answer: `<think>...</think>` for most models, other tags for some.

Whether the output begins inside is read from the rendered prompt, which ends in an unclosed tag or does not; that a
template knows a switch for thinking says nothing of its default.
"""

from collections.abc import Collection, Sequence

import msgspec

from pipeline.parsers.script import Script, Steps


class Tags(msgspec.Struct, frozen=True):
    """Around reasoning.  `wraps`: what stands around the answer, in models that put everything into channels."""

    open: str = "<think>"
    close: str = "</think>"
    wraps: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be seen even if the vocabulary has (parts of) them as special tokens."""
        return (self.open, self.close, *_PARTS) if self.wraps else (self.open, self.close)


_PARTS = ("<|open|>", "<|close|>", "<|sep|>")  # Kimi-K3 makes its tags of these
THINK = Tags()
MINIMAX_M3 = Tags("<mm:think>", "</mm:think>")
KIMI_K3 = Tags(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)


class Thought(msgspec.Struct, frozen=True):
    """Reasoning."""

    text: str


class Tag(msgspec.Struct, frozen=True):
    """A tag around it."""

    text: str


class Answered(msgspec.Struct, frozen=True):
    """The answer's own text."""

    text: str


ThinkingEvent = Thought | Tag | Answered


class ThinkingSplitter(Script[ThinkingEvent]):
    """One output.  `inside`: it begins in the middle of reasoning.  `is_json`: the engine is held to JSON, and some
    engines are from the first token on; then a first bracket tells that there will be no reasoning.

    `begin`, `end`: where in the output reasoning stands, tags included, as far as that is known.  Text after the
    closing tag is the answer, whatever tags it talks about.
    """

    def __init__(self, *, inside: bool, is_json: bool = False, tags: Tags = THINK) -> None:
        super().__init__()
        self._tags = tags
        self._inside = inside
        self._is_json = is_json
        self.begin: int | None = 0 if inside else None
        self.end: int | None = None

    def is_answer(self, place: int) -> bool | None:
        """Whether the character at `place` is the answer's; None while that is open."""
        if place >= self.consumed:
            return None
        return self.begin is None or place < self.begin or (self.end is not None and place >= self.end)

    def _read(self) -> Steps[None]:
        tags = self._tags
        if self._inside:
            yield from self._first_words()
        else:
            yield from self._answer_up_to(tags.open)
        if self.begin is not None and (yield from self._until(tags.close, self._think)):
            self._say(Tag(tags.close))
            self.end = self.consumed
        while wrap := (yield from self._before(tags.wraps, self._answer)):
            self._say(Tag(self._take(len(wrap))))

    def _answer_up_to(self, opening: str) -> Steps[None]:
        while found := (yield from self._before((opening, *self._tags.wraps), self._answer)):
            begin = self.consumed
            self._say(Tag(self._take(len(found))))
            if found == opening:
                self.begin = begin
                return

    def _first_words(self) -> Steps[None]:
        """A tag that repeats the prompt's is none of the reasoning; a bracket may be the answer already."""
        self._mark()
        yield from self._blanks()
        first = yield from self._peek()
        if self._is_json and first and first in "{[":
            self.begin = None
            self._answer(self._since_mark())
            return
        if (yield from self._literal(self._tags.open)):
            self._say(Tag(self._since_mark()))
        elif blanks := self._since_mark():
            self._think(blanks)

    def _think(self, text: str) -> None:
        self._mark()
        self._say(Thought(text))

    def _answer(self, text: str) -> None:
        self._mark()
        self._say(Answered(text))


class ThoughtCount:
    """Tokens of the reasoning, tags not included, by the tags' ids; none are counted when the vocabulary has no such
    tokens.
    """

    def __init__(self, open_id: int | None, close_id: int | None, *, inside: bool, ends: Collection[int]) -> None:
        self._open, self._close = open_id, close_id
        self._inside = inside and close_id is not None
        self._done = close_id is None
        self._ends = ends
        self.tokens = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        if self._done:
            return
        for token in token_ids:
            if token == self._close and self._inside:
                self._done = True
                return
            if token == self._open:
                self._inside = True
            elif self._inside and token not in self._ends:
                self.tokens += 1


def prompt_end(prompt: str, continuation: str = "", tags: Tags = THINK) -> bool | None:
    """Whether what the model writes next is reasoning; None when the prompt shows no tag at its end.

    `prompt` ends with `continuation`, the beginning of the answer that the client gave.  Only a tag at the very end of
    the template's part counts: users write tags too.
    """
    opened, closed = continuation.rfind(tags.open), continuation.rfind(tags.close)
    if opened != closed:
        return opened > closed
    rendered = prompt[: len(prompt) - len(continuation)].rstrip()
    for wrap in tags.wraps:
        if rendered.endswith(wrap):
            return False
    if rendered.endswith(tags.open):
        return True
    return False if rendered.endswith(tags.close) else None
