"""Answers of `POST /generate`: a list with one object for each choice, or chunks that each hold the whole text so far.

`output_ids` are the engine's own, end tokens included; a chunk's are those that are new.  Log-probabilities are told as
SGLang does, in lists of `[log-probability, token id, null]`.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from engines.base import EngineRequest, Event, TokenLogprob
from pipeline.errors import GatewayError
from pipeline.parsers.output import Words
from pipeline.plan import ServedModel
from pipeline.protocols.chat_reply import DONE, stream_error
from pipeline.protocols.choice import Reading, Speech
from pipeline.protocols.generate import GenerateRequest
from pipeline.protocols.http import data_frame
from pipeline.protocols.parts import as_json
from pipeline.reply import Ending, finite


class Said:
    """What one choice has said so far."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class GenerateAnswer(Speech):
    """What all choices have said so far; reasoning stays in the text."""

    def __init__(self, model: ServedModel, asked: GenerateRequest, request: EngineRequest) -> None:
        params = asked.sampling_params
        reading = Reading(
            count=request.sampling.n,
            separates=False,
            no_stop_trim=bool(params.no_stop_trim),
            skip_special_tokens=params.skip_special_tokens is not False,
        )
        super().__init__(model, request, reading)
        self._id = asked.rid or request.request_id
        self._rivals = asked.logprobs
        self._said = [Said() for _ in self.choices]
        self._begun = time.perf_counter()

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        """Everything at once.  Leaves the loop as soon as every choice has ended; the caller closes the generation."""
        async for event in events:
            self._hear(event)
            if self.ended:
                break
        return as_json([self._result(index) for index in range(len(self.choices))])

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        """Frames up to each choice's ending."""
        is_first = True
        async for event in events:
            if is_first:
                first_out()
                is_first = False
            told = len(self._said[event.index].ids)
            if self._hear(event):
                yield self._chunk(event.index, told, None)
            if self.ended:
                break
        for index, choice in enumerate(self.choices):
            yield self._chunk(index, len(self._said[index].ids), choice.ending)

    def closing(self) -> Sequence[bytes]:
        return (data_frame(DONE),)

    def failing(self, error: GatewayError) -> Sequence[bytes]:
        return (data_frame(stream_error(error)), data_frame(DONE))

    def _hear(self, event: Event) -> bool:
        """Whether that added anything."""
        if self.choices[event.index].reader.ended:
            return False
        said, before = self._said[event.index], len(self._said[event.index].ids)
        text = "".join(one.text for one in self.read(event)[0] if isinstance(one, Words))
        said.text += text
        said.ids += event.token_ids
        said.logprobs += event.logprobs
        return bool(text) or len(said.ids) > before

    def _result(self, index: int) -> dict[str, Any]:
        said, ending = self._said[index], self.choices[index].ending
        reason: dict[str, Any] = {"type": ending.finish_reason if ending is not None else "abort"}
        if reason["type"] == "length":
            reason["length"] = len(said.ids)
        return {"text": said.text, "output_ids": said.ids, "meta_info": self._meta(index, reason, ending)}

    def _chunk(self, index: int, told: int, ending: Ending | None) -> bytes:
        said = self._said[index]
        reason = ending.finish_reason if ending is not None else None
        meta = self._meta(index, reason, ending)
        return data_frame(
            as_json({"text": said.text, "output_ids": said.ids[told:], "meta_info": meta, "index": index})
        )

    def _meta(self, index: int, reason: Any, ending: Ending | None) -> dict[str, Any]:
        said, usage = self._said[index], self.usage
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": reason,
            "prompt_tokens": usage.prompt_tokens,
            "weight_version": "default",
            "completion_tokens": len(said.ids),
            "cached_tokens": usage.cached_tokens,
            "reasoning_tokens": self.choices[index].thoughts.tokens,
        }
        if self._rivals is not None:
            meta["output_token_logprobs"] = [[finite(one.logprob), one.token_id, None] for one in said.logprobs]
            if self._rivals:
                meta["output_top_logprobs"] = [_rivals(one, self._rivals) for one in said.logprobs]
        if ending is not None:
            meta["e2e_latency"] = time.perf_counter() - self._begun
            if ending.matched_stop is not None:
                meta["matched_stop"] = ending.matched_stop
        return meta


def _rivals(told: TokenLogprob, most: int) -> list[list[Any]]:
    return [[finite(rival.logprob), rival.token_id, None] for rival in told.top[:most]]
