"""Answers of `POST /v1/messages`: engine events to one message, or to a stream of named events.

The order is Anthropic's: `message_start` with the engine's first output, each block's start, deltas and stop, then
`message_delta` and `message_stop`.  `message_start` tells the real number of input tokens, where SMG says 0.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from engines.base import EngineRequest, Event
from pipeline.errors import GatewayError
from pipeline.parsers.output import CallBegun, CallGrown, Said, Words
from pipeline.parsers.thinking import Thought
from pipeline.plan import ServedModel
from pipeline.protocols.choice import Reading, Speech
from pipeline.protocols.http import named_frame
from pipeline.protocols.parts import as_json
from pipeline.protocols.refusals import anthropic_kind
from pipeline.reply import Ending

PING = named_frame("ping", as_json({"type": "ping"}))


class MessageAnswer(Speech):
    """What has been said so far, and which block is open."""

    def __init__(self, model: ServedModel, request: EngineRequest, reading: Reading) -> None:
        super().__init__(model, request, reading)
        self._request = request
        self._blocks = 0
        self._open: str | None = None  # the kind of the open block

    @property
    def _ending(self) -> Ending | None:
        return self.choices[0].ending

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        """Everything at once.  Leaves the loop as soon as the answer has ended; the caller closes the generation."""
        said: list[Said] = []
        async for event in events:
            said += self.read(event)[0]
            if self.ended:
                break
        usage = self.usage
        message = self._message(content_json(said), usage.prompt_tokens, usage.completion_tokens)
        return as_json({**message, **stop_json(self._ending)})

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        """Frames up to `message_stop`."""
        begun = False
        async for event in events:
            said = self.read(event)[0]
            if not begun:
                begun = True
                first_out()
                yield frame("message_start", message=self._message([], self.usage.prompt_tokens, 0))
            for one in said:
                for told in self._tell(one):
                    yield told
            if self.ended:
                break
        for told in self._close():
            yield told
        usage = self.usage
        counts = {"output_tokens": usage.completion_tokens, "input_tokens": usage.prompt_tokens, **_NO_CACHE}
        yield frame("message_delta", delta={**stop_json(self._ending), "container": None}, usage=counts)

    def closing(self) -> Sequence[bytes]:
        return (frame("message_stop"),)

    def failing(self, error: GatewayError) -> Sequence[bytes]:
        """An event of its own, and no `message_stop`."""
        told = {"type": anthropic_kind(error.status), "message": f"Stream error: {error.message}", "code": error.code}
        return (frame("error", error=told),)

    def _tell(self, said: Said) -> Iterator[bytes]:
        """Blocks never overlap: another kind, or another call, closes the one that is open."""
        match said:
            case CallBegun():
                yield from self._close()
                yield from self._begin("tool_use", block_json(said))
            case CallGrown(_, arguments):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            case Thought(text):
                yield from self._begin("thinking", block_json(Thought("")))
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Words(text):
                yield from self._begin("text", block_json(Words("")))
                yield self._delta({"type": "text_delta", "text": text})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        yield frame("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return frame("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield frame("content_block_stop", index=self._blocks)
            self._open = None
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


def block_json(said: Thought | Words | CallBegun) -> dict[str, Any]:
    match said:
        case Thought(text):
            return {"type": "thinking", "thinking": text, "signature": ""}  # only Anthropic's models sign
        case Words(text):
            return {"type": "text", "text": text}
        case CallBegun(_, call_id, name):
            return {"type": "tool_use", "id": call_id.replace("call_", "toolu_", 1), "name": name, "input": {}}


def content_json(said: Sequence[Said]) -> list[dict[str, Any]]:
    """The blocks of an answer that is whole: neighbours of a kind in one, arguments as the object they spell."""
    blocks: list[dict[str, Any]] = []
    for one in said:
        if isinstance(one, CallGrown):
            blocks[-1]["input"] = msgspec.Raw(one.arguments.encode())  # a call that is whole is told at once
            continue
        block = block_json(one)
        last = blocks[-1] if blocks else None
        if last is None or last["type"] != block["type"] or block["type"] == "tool_use":
            blocks.append(block)
        else:
            name = "thinking" if block["type"] == "thinking" else "text"
            last[name] += block[name]
    return blocks


def stop_json(ending: Ending | None) -> dict[str, Any]:
    """Why the answer ended; nothing yet for None."""
    reason = stop = None
    if ending is not None:
        stop = ending.matched_stop if isinstance(ending.matched_stop, str) else None
        reason = _REASONS.get(ending.finish_reason, "end_turn" if stop is None else "stop_sequence")
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}


_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def frame(kind: str, **members: Any) -> bytes:
    return named_frame(kind, as_json({"type": kind, **members}))
