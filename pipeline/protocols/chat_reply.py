"""Answers of `POST /v1/chat/completions`: engine events to one JSON object, or to a stream of chunks.

The shapes are SMG 1.13's as recorded: one role chunk for each choice with the engine's first output, deltas with either
text, reasoning or a call, all finishing chunks at the end, then usage when asked for, then `[DONE]`.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from engines.base import EngineRequest, Event
from pipeline.errors import GatewayError
from pipeline.parsers.output import CallBegun, CallGrown, Said, Words
from pipeline.parsers.thinking import Thought
from pipeline.plan import ServedModel
from pipeline.protocols.chat import ChatRequest
from pipeline.protocols.choice import Reading, Speech
from pipeline.protocols.parts import as_json
from pipeline.reply import Ending, LogprobEntry, TokenText, Usage

DONE = b"[DONE]"


class Answer(Speech):
    """What all choices of one request have said so far.  `continuation`: the beginning of the answer in the prompt."""

    def __init__(self, model: ServedModel, chat: ChatRequest, request: EngineRequest, continuation: str = "") -> None:
        super().__init__(model, request, reading_of(chat), continuation)
        self._chat = chat
        self._head = {
            "id": request.request_id,
            "created": int(time.time()),
            "model": chat.model,
            "system_fingerprint": "default",
        }

    async def whole(self, events: AsyncIterator[Event]) -> bytes:
        """Everything at once.  Leaves the loop as soon as every choice has ended; the caller closes the generation."""
        said: list[list[Said]] = [[] for _ in self.choices]
        entries: list[list[LogprobEntry]] = [[] for _ in self.choices]
        async for event in events:
            more, due = self.read(event)
            said[event.index] += more
            entries[event.index] += due
            if self.ended:
                break
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, said[index], entries[index]) for index in range(len(self.choices))],
            "usage": usage_json(self.usage),
            "service_tier": "default",  # SMG's chunks have none
        }
        return as_json(body)

    def _choice(self, index: int, said: list[Said], entries: list[LogprobEntry]) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": message_json(said),
            "logprobs": logprobs_json(entries) if self._chat.logprobs else None,
        }
        return {**choice, **ending_json(self.choices[index].ending)}

    async def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]:
        """Payloads of the chunks, `[DONE]` not included.  `first_out` is called when the engine's first event is
        here.
        """
        options = self._chat.stream_options
        continuous = options is not None and bool(options.continuous_usage_stats)
        greeted: set[int] = set()
        async for event in events:
            if not greeted:
                first_out()
            if event.index not in greeted:
                greeted.add(event.index)
                yield self._chunk(event.index, {"role": "assistant", "content": "", "refusal": None}, None, continuous)
            for delta, entries in deltas(*self.read(event)):
                logprobs = logprobs_json(entries) if self._chat.logprobs and "content" in delta else None
                yield self._chunk(event.index, delta, logprobs, continuous)
            if self.ended:
                break
        for index, choice in enumerate(self.choices):
            yield self._chunk(index, {}, None, continuous, ending_json(choice.ending))
        if options is not None and options.include_usage:
            yield as_json({**self._chunk_head(), "choices": [], "usage": usage_json(self.usage)})

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
            chunk["usage"] = usage_json(self.usage)
        return as_json(chunk)


def reading_of(chat: ChatRequest) -> Reading:
    return Reading(
        use=chat.tool_use,
        count=chat.choices,
        separates=chat.separate_reasoning is not False,
        no_stop_trim=bool(chat.no_stop_trim),
        skip_special_tokens=chat.skip_special_tokens is not False,
        top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


def message_json(said: Iterable[Said]) -> dict[str, Any]:
    """The message of a choice that is whole; its content is null when there is only reasoning or calls."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for one in said:
        match one:
            case Words(text):
                content.append(text)
            case Thought(text):
                reasoning.append(text)
            case CallBegun(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallGrown(index, arguments):
                calls[index]["function"]["arguments"] += arguments
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(content) if content or not (reasoning or calls) else None,
        "refusal": None,
        "annotations": [],
    }
    if calls:
        message["tool_calls"] = calls
    message["reasoning_content"] = "".join(reasoning) if reasoning else None
    return message


def deltas(
    said: Iterable[Said], entries: Sequence[LogprobEntry]
) -> Iterator[tuple[dict[str, Any], Sequence[LogprobEntry]]]:
    """A delta for each thing said; the entries go with the first words, or with none."""
    for one in said:
        if isinstance(one, Words):
            yield {"content": one.text}, entries
            entries = ()
        else:
            yield delta_json(one), ()
    if entries:
        yield {"content": ""}, entries


def delta_json(said: Thought | CallBegun | CallGrown) -> dict[str, Any]:
    match said:
        case Thought(text):
            return {"reasoning_content": text}
        case CallBegun(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallGrown(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


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
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def logprobs_json(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    return {"content": entries_json(entries), "refusal": None}


def entries_json(entries: Sequence[LogprobEntry]) -> list[dict[str, Any]]:
    return [{**_token_json(entry), "top_logprobs": [_token_json(rival) for rival in entry.top]} for entry in entries]


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
