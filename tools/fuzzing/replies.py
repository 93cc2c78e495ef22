"""What an engine may say back, by a message generator and by spoiled bytes, through everything that reads it.

Right is an answer that is JSON (or frames of JSON), or an EngineError.  `engine.py` does the same over the wire.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.base import EngineError, EngineRequest, Event, Sampling
from engines.vllm import VllmReplies
from pipeline.protocols.chat import ChatRequest, Message
from pipeline.protocols.chat_reply import Answer
from tools.fuzzing.mutate import number, spoil
from tools.fuzzing.rig import Wrong
from tools.fuzzing.served import MODEL, demo_model

_REASONS = ("stop", "length", "abort", "error", "", "\0", "tool_calls", "x" * 5000)


def token(chance: random.Random) -> int:
    """Mostly of the vocabulary; else anything that fits into the field."""
    return chance.randrange(120) if chance.random() < 0.8 else number(chance) & 0xFFFFFFFF


def logprobs(chance: random.Random, tokens: Sequence[int]) -> pb.OutputLogProbs:
    count = len(tokens) if chance.random() < 0.7 else chance.randrange(6)
    value = (0.0, -1.5, float("nan"), float("inf"), float("-inf"), 3e38, -1e-45)
    rivals = [
        pb.TopLogProbs(
            token_ids=[token(chance) for _ in range(chance.randrange(4))],
            values=[chance.choice(value) for _ in range(chance.randrange(4))],
        )
        for _ in range(count if chance.random() < 0.7 else chance.randrange(4))
    ]
    ids = [token(chance) for _ in range(count)]
    values = [chance.choice(value) for _ in range(count if chance.random() < 0.9 else chance.randrange(6))]
    return pb.OutputLogProbs(token_ids=ids, token_logprobs=values, top_logprobs=rivals)


def message(chance: random.Random, choices: int) -> pb.GenerateResponse:
    """A chunk or an end; seldom neither."""
    if chance.random() < 0.02:
        return pb.GenerateResponse()
    tokens = [token(chance) for _ in range(chance.choice((0, 1, 1, 1, 2, 8, 300)))]
    facts: dict[str, Any] = {
        "index": chance.randrange(choices) if chance.random() < 0.97 else number(chance) & 0xFFFFFFFF,
        "prompt_tokens": number(chance) & 0x7FFFFFFF if chance.random() < 0.1 else 5,
        "completion_tokens": number(chance) & 0x7FFFFFFF if chance.random() < 0.2 else len(tokens),
        "cached_tokens": number(chance) & 0x7FFFFFFF if chance.random() < 0.1 else 0,
    }
    if chance.random() < 0.3:
        facts["output_logprobs"] = logprobs(chance, tokens)
    if chance.random() < 0.8:
        return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=tokens, **facts))
    if chance.random() < 0.3:
        facts[chance.choice(("matched_token_id", "matched_stop_str"))] = None
        facts = {
            name: (token(chance) if name == "matched_token_id" else chance.choice(_REASONS)) if value is None else value
            for name, value in facts.items()
        }
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(output_ids=tokens, finish_reason=chance.choice(_REASONS), **facts)
    )


def stream(chance: random.Random, choices: int) -> list[bytes]:
    """Messages as bytes; in some streams one of them is spoiled."""
    found = [message(chance, choices).SerializeToString() for _ in range(chance.choice((0, 1, 2, 5, 20)))]
    if chance.random() < 0.5:  # most endings in order, so that whole answers are seen as well
        for index in range(choices):
            end = pb.GenerateComplete(output_ids=[token(chance)], finish_reason="stop", index=index)
            found.append(pb.GenerateResponse(complete=end).SerializeToString())
    if found and chance.random() < 0.4:
        at = chance.randrange(len(found))
        found[at] = spoil(chance, found[at])
    return found


class Replies:
    """Streams into answers, whole and streamed."""

    name = "replies"
    may_die = False

    def prepare(self) -> None:
        self._model = demo_model()
        self._loop = asyncio.new_event_loop()

    def feed(self, chance: random.Random) -> str:
        choices, is_stream = chance.choice((1, 1, 2, 5)), chance.random() < 0.5
        sampling = Sampling(
            n=choices,
            max_tokens=chance.choice((None, 5, 400)),
            stop=chance.choice(((), ("a",), ("\ufffd", "he"))),
            ignore_eos=chance.random() < 0.3,
            min_tokens=chance.choice((0, 3)),
            logprobs=chance.choice((None, 3)),
        )
        asked = ChatRequest(
            model=MODEL,
            messages=[Message(role="user", content="x")],
            n=choices,
            stream=is_stream,
            logprobs=sampling.logprobs is not None,
            top_logprobs=sampling.logprobs,
        )
        request = EngineRequest("id", MODEL, [1, 2, 3], "x", sampling, is_stream)
        answer = Answer(self._model, asked, request)
        events = _events(VllmReplies(request), stream(chance, choices))
        try:
            return self._loop.run_until_complete(_read(answer, events, is_stream))
        except EngineError as error:
            if len(error.message) > 2000:
                raise Wrong(f"an error of {len(error.message)} characters") from None
            return f"{error.status}"


async def _events(replies: VllmReplies, messages: Sequence[bytes]) -> AsyncIterator[Event]:
    for data in messages:
        try:
            parsed = pb.GenerateResponse.FromString(data)
        except DecodeError:  # the channel's business
            raise EngineError("INTERNAL", "no message") from None
        yield replies.event(parsed)
        if replies.all_finished:
            return
    replies.end()


async def _read(answer: Answer, events: AsyncIterator[Event], is_stream: bool) -> str:
    if is_stream:
        async for chunk in answer.stream(events, lambda: None):
            msgspec.json.decode(chunk)
        return "streamed"
    body = await answer.whole(events)
    msgspec.json.decode(body)
    return "whole"
