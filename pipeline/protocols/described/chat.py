"""Answers of `POST /v1/chat/completions`, and what is said of the route."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pipeline.protocols.chat import ChatRequest
from pipeline.protocols.described.operation import (
    BODY_REFUSALS,
    ENGINE_REFUSALS,
    EXPLAIN,
    MEDIA_REFUSALS,
    PROMPT_REFUSALS,
    ROUTING_KEY,
    TOOL_REFUSALS,
    Operation,
    Told,
)


class CachedTokens(Told, frozen=True):
    cached_tokens: int
    audio_tokens: int | UnsetType = UNSET


class CompletionDetails(Told, frozen=True):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ChatUsage(Told, frozen=True):
    """`prompt_tokens`: of the prompt as the engine got it, media expanded."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class TokenLogprob(Told, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class AnswerLogprob(TokenLogprob, frozen=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Told, frozen=True):
    content: list[AnswerLogprob]
    refusal: None


class CalledFunction(Told, frozen=True):
    name: str
    arguments: str


class ChatToolCall(Told, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(Told, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning_content: str | None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Told, frozen=True):
    """`finish_reason`: stop, length, tool_calls, or the engine's own word.  `matched_stop`: the stop string, or the
    end token's id.
    """

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | UnsetType = UNSET


class ChatCompletion(Told, frozen=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    choices: list[ChatChoice]
    usage: ChatUsage


class CallFragment(Told, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCallDelta(Told, frozen=True):
    """The first delta of a call has its id and name, the others a piece of its arguments."""

    index: int
    function: CallFragment
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Told, frozen=True):
    """The first one of a choice has the role, the last one nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Told, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | UnsetType = UNSET


class ChatCompletionChunk(Told, frozen=True):
    """`usage`: in the last chunk when `stream_options` asks for it, or in every one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: ChatUsage | UnsetType = UNSET


class BrokenStream(Told, frozen=True):
    message: str
    type: Literal["stream_error"]
    code: str


class StreamError(Told, frozen=True):
    """What a stream that has begun ends with when it cannot go on."""

    error: BrokenStream


LAST = "[DONE]"

CHAT = Operation(
    tag="Generation",
    summary="Chat completion",
    text="Words, pictures, clips and sounds in; the engine's answer out, whole or streamed.",
    takes=ChatRequest,
    gives=ChatCompletion,
    events=(ChatCompletionChunk, StreamError),
    last=LAST,
    refuses=(
        *BODY_REFUSALS,
        "top_logprobs_requires_logprobs",
        "stream_options_requires_stream",
        *TOOL_REFUSALS,
        *PROMPT_REFUSALS,
        *MEDIA_REFUSALS,
        *ENGINE_REFUSALS,
    ),
    parameters=(ROUTING_KEY, EXPLAIN),
)
