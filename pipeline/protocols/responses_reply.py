"""Answers of `POST /v1/responses`: engine events to one response object, or to a stream of numbered events.

The order is SMG 1.13's as recorded: created, in progress, then each item from its `added` to its `done`, then exactly
one of completed, incomplete and failed.  An item is closed before the next one opens, calls included.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from engines.base import EngineRequest, Event
from pipeline.errors import GatewayError
from pipeline.parsers.output import CallBegun, CallGrown, Said
from pipeline.parsers.thinking import Thought
from pipeline.plan import ServedModel
from pipeline.protocols.chat_reply import entries_json
from pipeline.protocols.choice import Reading, Speech
from pipeline.protocols.http import named_frame
from pipeline.protocols.parts import as_json
from pipeline.protocols.responses_store import Kept, ResponseStore
from pipeline.reply import Ending, LogprobEntry, Usage
from pipeline.ticket import new_id

_OBJECTS = msgspec.json.Decoder(list[msgspec.Raw])


class Asking(msgspec.Struct, frozen=True):
    """What the answer tells of its request.  `input`: its items as JSON, when the response is to be kept."""

    model: str
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: str | None
    effort: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: Sequence[Any]
    top_logprobs: int
    top_p: float
    user: str | None
    metadata: dict[str, Any]
    input: bytes | None
    background: bool = False


class ResponseAnswer(Speech):
    """What has been said so far, in items; it is put into `store` when it is complete."""

    def __init__(
        self, model: ServedModel, request: EngineRequest, reading: Reading, asking: Asking, store: ResponseStore
    ) -> None:
        super().__init__(model, request, reading)
        self._asking = asking
        self._store = store
        self.id = new_id("resp_")
        self._created = int(time.time())
        self._items = Items(tells_logprobs=reading.top_logprobs is not None)
        self._number = 0

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        """Everything at once.  Leaves the loop as soon as the answer has ended; the caller closes the generation."""
        async for event in events:
            for _ in self._hear(event):
                pass
            if self.ended:
                break
        for _ in self._items.close():
            pass
        return self._keep()

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        """Frames up to the last item's end."""
        begun = False
        async for event in events:
            if not begun:
                begun = True
                first_out()
                head = {"id": self.id, "object": "response", "status": "in_progress"}
                whole_head = {
                    "created_at": self._created,
                    "background": False,
                    "model": self._asking.model,
                    "output": [],
                }
                yield self._frame("response.created", response={**head, **whole_head})
                yield self._frame("response.in_progress", response=head)
            for kind, members in self._hear(event):
                yield self._frame(kind, **members)
            if self.ended:
                break
        for kind, members in self._items.close():
            yield self._frame(kind, **members)

    def _hear(self, event: Event) -> "Iterator[Told]":
        said, entries = self.read(event)
        self._items.entries += entries
        for one in said:
            yield from self._items.say(one)

    def closing(self) -> Sequence[bytes]:
        self._keep()
        whole = self.response()
        return (self._frame(f"response.{whole['status']}", response={name: whole[name] for name in self._told}),)

    def failing(self, error: GatewayError) -> Sequence[bytes]:
        frames = [self._frame(kind, **members) for kind, members in self._items.close("in_progress")]
        told = {"code": error.code, "message": f"Stream error: {error.message}"}
        response = self.response("failed", told)
        names = (*self._told, "error")
        return (*frames, self._frame("response.failed", response={name: response[name] for name in names}))

    @property
    def _told(self) -> tuple[str, ...]:
        """Members of the last event's response, as recorded; why it is incomplete comes with it."""
        continued = ("previous_response_id",) if self._asking.previous_response_id is not None else ()
        return (*_LAST_MEMBERS, *continued, *(("incomplete_details",) if self._reason is not None else ()))

    def _frame(self, kind: str, **members: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return named_frame(kind, as_json(numbered))

    @property
    def _ending(self) -> Ending | None:
        return self.choices[0].ending

    @property
    def _reason(self) -> str | None:
        is_cut = self._ending is not None and self._ending.finish_reason == "length"
        return "max_output_tokens" if is_cut else None

    def _keep(self) -> bytes:
        """The response as JSON; kept unless the client did not want that."""
        body = as_json(self.response())
        if self._asking.input is not None:
            output = as_json(self._items.output)
            self._store.put(self.id, Kept(body, self._asking.input, output, self._asking.previous_response_id))
            if self._asking.conversation is not None:
                said = [bytes(item) for items in (self._asking.input, output) for item in _OBJECTS.decode(items)]
                self._store.extend(self._asking.conversation, said)
        return body

    def response(self, status: str | None = None, error: dict[str, str] | None = None) -> dict[str, Any]:
        """The response object; `status` unless it is by itself complete or incomplete."""
        asking, reason = self._asking, self._reason if status is None else None
        conversation = {} if asking.conversation is None else {"conversation": {"id": asking.conversation}}
        is_over = status not in ("queued", "in_progress")
        return {
            **conversation,
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if is_over else None,
            "background": asking.background,
            "status": status or ("completed" if reason is None else "incomplete"),
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": asking.instructions,
            "max_output_tokens": asking.max_output_tokens,
            "max_tool_calls": None,
            "model": asking.model,
            "output": self._items.output,
            "parallel_tool_calls": asking.parallel_tool_calls,
            "previous_response_id": asking.previous_response_id,
            "prompt_cache_key": None,
            "prompt_cache_retention": None,
            "reasoning": {"effort": asking.effort, "summary": None},
            "service_tier": "default",
            "store": asking.input is not None,
            "temperature": asking.temperature,
            "text": asking.text,
            "tool_choice": asking.tool_choice,
            "tools": asking.tools,
            "top_logprobs": asking.top_logprobs,
            "top_p": asking.top_p,
            "truncation": "disabled",
            "usage": usage_json(self.usage) if status is None or status == "failed" else None,
            "user": asking.user,
            "safety_identifier": None,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "metadata": asking.metadata,
        }


_LAST_MEMBERS = (
    *("id", "object", "created_at", "status", "background", "model", "output", "usage", "max_output_tokens"),
    *("temperature", "parallel_tool_calls", "store", "tools", "metadata", "tool_choice"),
)

Told = tuple[str, dict[str, Any]]  # an event's name and members


class Items:
    """The output's items, one open at a time.  `output`: those that are closed.  `entries`: log-probabilities of the
    text that no event has told yet.
    """

    def __init__(self, *, tells_logprobs: bool = False) -> None:
        self.output: list[dict[str, Any]] = []
        self.entries: list[LogprobEntry] = []
        self._tells_logprobs = tells_logprobs
        self._logprobs: list[dict[str, Any]] = []  # of the open message
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []

    def say(self, said: Said) -> Iterator[Told]:
        match said:
            case CallBegun(_, call_id, name):
                yield from self.close()
                yield from self._begin({**call_json(name, call_id), "status": "in_progress"})
            case CallGrown(_, arguments):
                self._pieces.append(arguments)
                yield "response.function_call_arguments.delta", {**self._place(), "delta": arguments}
            case Thought(text):
                yield from self._speak("reasoning", "reasoning_text", text)
            case _:
                yield from self._speak("message", "output_text", said.text)

    def close(self, status: str = "completed") -> Iterator[Told]:
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(self._pieces)
        self._pieces = []
        place = {"output_index": len(self.output), "item_id": item["id"]}
        if item["type"] == "function_call":
            yield "response.function_call_arguments.done", {**place, "arguments": text}
            done = {**item, "arguments": text, "status": status}
        else:
            kind = _PART_OF[item["type"]]
            self._due(kind)
            logprobs = self._all(kind)
            yield f"response.{kind}.done", {**place, "content_index": 0, "text": text, **logprobs}
            part = {**_part(kind, text), **logprobs}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
            done = {**item, "content": [part], "status": status}
        yield "response.output_item.done", {"output_index": len(self.output), "item": done}
        self.output.append(done)

    def _speak(self, item_kind: str, part_kind: str, text: str) -> Iterator[Told]:
        if self._open is None or self._open["type"] != item_kind:
            yield from self.close()
            yield from self._begin(_EMPTY_ITEMS[item_kind](new_id(_PREFIXES[item_kind])))
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": _part(part_kind, "")}
        self._pieces.append(text)
        place = {**self._place(), "content_index": 0}
        yield f"response.{part_kind}.delta", {**place, "delta": text, **self._due(part_kind)}

    def _due(self, part_kind: str) -> dict[str, Any]:
        """Log-probabilities that came with the text, for its event."""
        if not self._tells_logprobs or part_kind != "output_text":
            return {}
        due, self.entries = entries_json(self.entries), []
        self._logprobs += due
        return {"logprobs": due}

    def _all(self, part_kind: str) -> dict[str, Any]:
        if not self._tells_logprobs or part_kind != "output_text":
            return {}
        told, self._logprobs = self._logprobs, []
        return {"logprobs": told}

    def _begin(self, item: dict[str, Any]) -> Iterator[Told]:
        self._open = item
        yield "response.output_item.added", {"output_index": len(self.output), "item": item}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"output_index": len(self.output), "item_id": self._open["id"]}


_PART_OF = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg_", "reasoning": "rs_"}
_EMPTY_ITEMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "message": lambda item_id: {"id": item_id, "type": "message", "role": "assistant", "content": []},
    "reasoning": lambda item_id: {"id": item_id, "type": "reasoning", "summary": [], "content": []},
}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": []} if kind == "output_text" else part


def call_json(name: str, call_id: str) -> dict[str, Any]:
    return {"id": new_id("fc_"), "type": "function_call", "call_id": call_id, "name": name, "arguments": ""}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
