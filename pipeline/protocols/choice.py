"""The choices of an answer as every API tells them: reasoning, words, calls of functions, and why each ended.

What is looked for depends on the model (its formats of calls and reasoning), the rendered prompt (whether the output
begins inside reasoning) and the request (`Reading`).  JSON is made of it in each API's own file.
"""

import functools
from collections.abc import Mapping, Sequence

import msgspec

from engines.base import EngineRequest, Event
from pipeline import parsers
from pipeline.parsers.output import PATIENCE, Output, Said
from pipeline.parsers.thinking import ThinkingSplitter, ThoughtCount, prompt_end
from pipeline.plan import ServedModel
from pipeline.reply import ChoiceReader, Ending, LogprobEntry, Tally, Usage, reply_rules
from pipeline.tokenizer import Tokenizer
from pipeline.tooluse import NO_TOOLS, ToolUse


class Reading(msgspec.Struct, frozen=True):
    """How a request wants its answer read.  `count`: choices.  `separates`: reasoning is told apart from the answer.
    `top_logprobs`: None for no log-probabilities.
    """

    use: ToolUse = NO_TOOLS
    count: int = 1
    separates: bool = True
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    top_logprobs: int | None = None


class Choice:
    """One choice: its text as tokens come, what that says, and its log-probabilities.

    Log-probabilities are the answer's: tokens of the reasoning have none; those of calls stay.
    """

    def __init__(self, reader: ChoiceReader, output: Output, thoughts: ThoughtCount) -> None:
        self.reader = reader
        self.output = output
        self.thoughts = thoughts
        self.ending: Ending | None = None
        self._waiting: list[LogprobEntry] = []

    def read(self, event: Event) -> tuple[list[Said], list[LogprobEntry]]:
        if self.reader.ended:
            return [], []
        self.thoughts.feed(event.token_ids)
        piece = self.reader.read(event)
        said = self.output.feed(piece.text)
        if piece.ending is not None:
            said += self.output.finish()
            reason = self.output.finish_reason(piece.ending.finish_reason)
            self.ending = msgspec.structs.replace(piece.ending, finish_reason=reason)
        return said, self._due(piece.logprobs)

    def _due(self, entries: Sequence[LogprobEntry]) -> list[LogprobEntry]:
        if not entries and not self._waiting:
            return []
        self._waiting += entries
        found: list[LogprobEntry] = []
        while self._waiting:
            is_answer = self.output.is_answer(self._waiting[0].place)
            if is_answer is None and self.ending is None:
                break
            entry = self._waiting.pop(0)
            if is_answer is not False:
                found.append(entry)
        return found


class Speech:
    """What all choices of one request have said so far.  `continuation`: the beginning of the answer in the prompt."""

    def __init__(self, model: ServedModel, request: EngineRequest, reading: Reading, continuation: str = "") -> None:
        # a worker that expands the prompt itself says how long it is
        self.tally = Tally(None if request.references else len(request.input_ids))
        self.choices = choices_of(model, request, reading, continuation)

    @property
    def ended(self) -> bool:
        return all(choice.reader.ended for choice in self.choices)

    @property
    def usage(self) -> Usage:
        thoughts = sum(choice.thoughts.tokens for choice in self.choices)
        return msgspec.structs.replace(self.tally.usage, reasoning_tokens=thoughts)

    def read(self, event: Event) -> tuple[list[Said], list[LogprobEntry]]:
        self.tally.see(event)
        return self.choices[event.index].read(event)


@functools.lru_cache(maxsize=64)
def _marker_ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> tuple[Mapping[str, int | None], frozenset[int]]:
    """The markers' ids, and those of them that the tokenizer takes for special."""
    ids = {marker: tokenizer.id_of(marker) for marker in markers}
    return ids, frozenset(tokenizer.special_ids.intersection(ids.values()))


def choices_of(model: ServedModel, request: EngineRequest, reading: Reading, continuation: str = "") -> list[Choice]:
    """A reader for each choice; whether it begins inside reasoning the prompt says."""
    tokenizer, use = model.bundle.tokenizer, reading.use
    parser = use.parser(model.call_format)
    thinks = model.thinking_format != parsers.PASSTHROUGH
    tags = parsers.thinking_tags(model.thinking_format)
    prompt_inside = prompt_end(request.original_text, continuation, tags)
    inside = thinks and parsers.begins_inside(model.thinking_format, prompt_inside)
    constraint = request.sampling.constraint
    is_json = constraint is not None and constraint.kind == "json_schema"
    markers = (*(parser.markers if parser is not None else ()), *(tags.markers if thinks else ()))
    ids, kept = _marker_ids(tokenizer, markers)
    rules = reply_rules(
        request.sampling,
        model.bundle.eos_ids,
        no_stop_trim=reading.no_stop_trim,
        skip_special_tokens=reading.skip_special_tokens,
        top_logprobs=reading.top_logprobs,
        kept=kept,
    )

    def choice() -> Choice:
        output = Output(
            ThinkingSplitter(inside=inside, is_json=is_json, tags=tags) if thinks else None,
            use.parser(model.call_format),
            separates=reading.separates,
            one_call=use.one_call,
            patience=PATIENCE if request.stream else None,
        )
        thoughts = ThoughtCount(ids.get(tags.open), ids.get(tags.close), inside=inside, ends=rules.end_ids)
        return Choice(ChoiceReader(tokenizer, rules), output, thoughts)

    return [choice() for _ in range(reading.count)]
