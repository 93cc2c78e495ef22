"""Answers of `POST /v1/chat/completions`: engine events to one JSON object, or to a stream of chunks.

The shapes are SMG 1.13's as recorded: one role chunk for each choice with the engine's first output, deltas with text,
all finishing chunks at the end, then usage when asked for, then `[DONE]`.
"""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from engines.base import EngineRequest, Event
from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols.chat import ChatRequest
from pipeline.protocols.parts import as_json
from pipeline.reply import ChoiceReader, Ending, LogprobEntry, Piece, Tally, TokenText, Usage, reply_rules

DONE = b"[DONE]"


class Answer:
    """What all choices of one request have said so far."""

    def __init__(self, model: ServedModel, chat: ChatRequest, request: EngineRequest) -> None:
        rules = reply_rules(
            request.sampling,
            model.bundle.eos_ids,
            no_stop_trim=bool(chat.no_stop_trim),
            skip_special_tokens=chat.skip_special_tokens is not False,
            top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        )
        self.readers = [ChoiceReader(model.bundle.tokenizer, rules) for _ in range(chat.choices)]
        self.tally = Tally(len(request.input_ids))
        self._chat = chat
        self._head = {
            "id": request.request_id,
            "created": int(time.time()),
            "model": chat.model,
            "system_fingerprint": "default",
        }

    @property
    def ended(self) -> bool:
        return all(reader.ended for reader in self.readers)

    def read(self, event: Event) -> Piece:
        self.tally.see(event)
        return self.readers[event.index].read(event)

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        """Everything at once.  Leaves the loop as soon as every choice has ended; the caller closes the generation."""
        texts = [""] * len(self.readers)
        entries: list[list[LogprobEntry]] = [[] for _ in self.readers]
        endings: list[Ending | None] = [None] * len(self.readers)
        async for event in events:
            piece = self.read(event)
            texts[event.index] += piece.text
            entries[event.index] += piece.logprobs
            endings[event.index] = piece.ending or endings[event.index]
            if self.ended:
                break
        choices = [
            self._choice(index, texts[index], entries[index], endings[index]) for index in range(len(self.readers))
        ]
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_json(self.tally.usage),
            "service_tier": "default",  # SMG's chunks have none
        }
        return as_json(body)

    def _choice(self, index: int, text: str, entries: list[LogprobEntry], ending: Ending | None) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": [],
            "reasoning_content": None,
        }
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs_json(entries) if self._chat.logprobs else None,
        }
        return {**choice, **ending_json(ending)}

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        """Payloads of the chunks, `[DONE]` not included.  `first_out` is called when the engine's first event is
        here.
        """
        options = self._chat.stream_options
        continuous = options is not None and bool(options.continuous_usage_stats)
        greeted: set[int] = set()
        endings: dict[int, Ending | None] = {}
        async for event in events:
            if not greeted:
                first_out()
            if event.index not in greeted:
                greeted.add(event.index)
                yield self._chunk(event.index, {"role": "assistant", "content": "", "refusal": None}, None, continuous)
            piece = self.read(event)
            if piece.text or piece.logprobs:
                entries = logprobs_json(piece.logprobs) if self._chat.logprobs else None
                yield self._chunk(event.index, {"content": piece.text}, entries, continuous)
            if piece.ending is not None:
                endings[event.index] = piece.ending
            if self.ended:
                break
        for index in range(len(self.readers)):
            yield self._chunk(index, {}, None, continuous, ending_json(endings.get(index)))
        if options is not None and options.include_usage:
            yield as_json({**self._chunk_head(), "choices": [], "usage": usage_json(self.tally.usage)})

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        with_usage: bool,
        ending: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **(ending or {"finish_reason": None})}
        chunk = {**self._chunk_head(), "choices": [choice]}
        if with_usage:
            chunk["usage"] = usage_json(self.tally.usage)
        return as_json(chunk)


def ending_json(ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"finish_reason": None}
    found: dict[str, Any] = {"finish_reason": ending.finish_reason}
    if ending.matched_stop is not None:
        found["matched_stop"] = ending.matched_stop
    return found


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def logprobs_json(entries: "list[LogprobEntry] | tuple[LogprobEntry, ...]") -> dict[str, Any]:
    content = [{**_token_json(entry), "top_logprobs": [_token_json(rival) for rival in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _token_json(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def stream_error(error: GatewayError) -> bytes:
    """What a client reads in a stream that has begun and cannot go on."""
    body = {
        "message": f"Stream error: {error.message}",
        "type": "stream_error",
        "code": error.code,
    }
    return as_json({"error": body})
