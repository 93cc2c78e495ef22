"""Answers of `POST /v1/messages`: engine events to one message, or to a stream of named events.

The order is Anthropic's: `message_start` with the engine's first output, each block's start, deltas and stop, then
`message_delta` and `message_stop`.  `message_start` tells the real number of input tokens, where SMG says 0.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from engines.base import EngineRequest, Event
from pipeline.errors import GatewayError
from pipeline.plan import ServedModel
from pipeline.protocols.http import named_frame
from pipeline.protocols.parts import as_json
from pipeline.protocols.refusals import anthropic_kind
from pipeline.reply import ChoiceReader, Ending, Tally, reply_rules

PING = named_frame("ping", as_json({"type": "ping"}))


class MessageAnswer:
    """What has been said so far."""

    def __init__(self, model: ServedModel, request: EngineRequest) -> None:
        self._reader = ChoiceReader(model.bundle.tokenizer, reply_rules(request.sampling, model.bundle.eos_ids))
        self.tally = Tally(len(request.input_ids))
        self._request = request
        self._blocks = 0
        self._is_open = False

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        """Everything at once.  Leaves the loop as soon as the answer has ended; the caller closes the generation."""
        text, ending = "", None
        async for event in events:
            self.tally.see(event)
            piece = self._reader.read(event)
            text += piece.text
            ending = piece.ending or ending
            if self._reader.ended:
                break
        content = [{"type": "text", "text": text}] if text else []
        usage = self.tally.usage
        message = self._message(content, usage.prompt_tokens, usage.completion_tokens)
        return as_json({**message, **stop_json(ending)})

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        """Frames up to `message_stop`."""
        begun, ending = False, None
        async for event in events:
            if not begun:
                begun = True
                first_out()
                yield frame("message_start", message=self._message([], self.tally.usage.prompt_tokens, 0))
            self.tally.see(event)
            piece = self._reader.read(event)
            for one in self._text(piece.text):
                yield one
            ending = piece.ending or ending
            if self._reader.ended:
                break
        for one in self._close():
            yield one
        usage = self.tally.usage
        counts = {"output_tokens": usage.completion_tokens, "input_tokens": usage.prompt_tokens, **_NO_CACHE}
        yield frame("message_delta", delta={**stop_json(ending), "container": None}, usage=counts)

    def closing(self) -> Sequence[bytes]:
        return (frame("message_stop"),)

    def failing(self, error: GatewayError) -> Sequence[bytes]:
        """An event of its own, and no `message_stop`."""
        told = {"type": anthropic_kind(error.status), "message": f"Stream error: {error.message}", "code": error.code}
        return (frame("error", error=told),)

    def _text(self, text: str) -> Iterator[bytes]:
        if not text:
            return
        if not self._is_open:
            self._is_open = True
            yield frame("content_block_start", index=self._blocks, content_block={"type": "text", "text": ""})
        yield frame("content_block_delta", index=self._blocks, delta={"type": "text_delta", "text": text})

    def _close(self) -> Iterator[bytes]:
        if self._is_open:
            yield frame("content_block_stop", index=self._blocks)
            self._is_open = False
            self._blocks += 1

    def _message(self, content: list[dict[str, Any]], input_tokens: int, output_tokens: int) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._request.model,
            **stop_json(None),
            "usage": {"input_tokens": input_tokens, "output_tokens": output_tokens, **_NO_CACHE, **_PLACE},
            "container": None,
        }


# What SMG 1.13 says of Anthropic's prompt cache and places, which an engine of one's own does not have.
_NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
_PLACE = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "service_tier": "standard",
    "inference_geo": "not_available",
}


def stop_json(ending: Ending | None) -> dict[str, Any]:
    """Why the answer ended; nothing yet for None."""
    reason = stop = None
    if ending is not None:
        stop = ending.matched_stop if isinstance(ending.matched_stop, str) else None
        reason = "max_tokens" if ending.finish_reason == "length" else "end_turn"
        reason = "stop_sequence" if stop is not None else reason
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}


def frame(kind: str, **members: Any) -> bytes:
    return named_frame(kind, as_json({"type": kind, **members}))
