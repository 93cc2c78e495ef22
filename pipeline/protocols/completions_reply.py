"""Answers of `POST /v1/completions`: engine events to one JSON object, or to a stream of chunks that ends with the
usage, asked for or not, as SMG's does.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from engines.base import EngineRequest, Event
from pipeline.errors import GatewayError
from pipeline.parsers.output import Words
from pipeline.plan import ServedModel
from pipeline.protocols.chat_reply import DONE, ending_json, stream_error
from pipeline.protocols.choice import Reading, Speech
from pipeline.protocols.completions import CompletionRequest
from pipeline.protocols.http import data_frame
from pipeline.protocols.parts import as_json
from pipeline.reply import LogprobEntry, Tally, Usage


class CompletionAnswer(Speech):
    """What all choices have said so far, those of the first prompt first; reasoning stays in the text."""

    def __init__(self, model: ServedModel, asked: CompletionRequest, requests: Sequence[EngineRequest]) -> None:
        request = requests[0]
        reading = Reading(
            count=asked.choices * len(requests),
            separates=False,
            no_stop_trim=bool(asked.no_stop_trim),
            skip_special_tokens=asked.skip_special_tokens is not False,
            top_logprobs=asked.logprobs,
        )
        super().__init__(model, request, reading)
        self.tally = Tally(sum(len(one.input_ids) for one in requests))
        # of each choice
        self._echoes = [one.original_text if asked.echo else "" for one in requests for _ in range(asked.choices)]
        self._tells_logprobs = asked.logprobs is not None
        self._offsets = list(map(len, self._echoes))  # characters told
        self._head = {
            "id": request.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": "default",
        }

    def _hear(self, event: Event) -> tuple[str, list[LogprobEntry]]:
        said, entries = self.read(event)
        return "".join(one.text for one in said if isinstance(one, Words)), entries

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        """Everything at once.  Leaves the loop as soon as every choice has ended; the caller closes the generation."""
        texts = [""] * len(self.choices)
        entries: list[list[LogprobEntry]] = [[] for _ in self.choices]
        async for event in events:
            text, due = self._hear(event)
            texts[event.index] += text
            entries[event.index] += due
            if self.ended:
                break
        said = [echo + text for echo, text in zip(self._echoes, texts, strict=True)]
        choices = [self._choice(index, text, entries[index]) for index, text in enumerate(said)]
        for choice, reader in zip(choices, self.choices, strict=True):
            choice.update(ending_json(reader.ending))
        return as_json({**self._head, "choices": choices, "usage": usage_json(self.usage)})

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        """Frames up to the usage.  `first_out` is called when the engine's first event is here."""
        greeted: set[int] = set()
        async for event in events:
            if not greeted:
                first_out()
            if event.index not in greeted:
                greeted.add(event.index)
                if echo := self._echoes[event.index]:
                    yield self._chunk([self._choice(event.index, echo, [])])
            text, due = self._hear(event)
            if text or due:
                yield self._chunk([self._choice(event.index, text, due)])
            if self.ended:
                break
        for index, choice in enumerate(self.choices):
            yield self._chunk([{**self._choice(index, "", []), **ending_json(choice.ending)}])
        yield self._chunk([], usage=usage_json(self.usage))

    def closing(self) -> Sequence[bytes]:
        return (data_frame(DONE),)

    def failing(self, error: GatewayError) -> Sequence[bytes]:
        return (data_frame(stream_error(error)), data_frame(DONE))

    def _choice(self, index: int, text: str, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": text, "index": index, "finish_reason": None}
        if self._tells_logprobs:
            choice["logprobs"] = self._logprobs(index, entries)
        return choice

    def _logprobs(self, index: int, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        """The older shape: four lists; an offset is where a token begins in the choice's text, the echo included."""
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(entry.text)
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{rival.text: rival.logprob for rival in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _chunk(self, choices: list[dict[str, Any]], **members: Any) -> bytes:
        return data_frame(as_json({**self._head, "choices": choices, **members}))


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
