"""Answers of `POST /v1/messages` and of its counting of tokens, and what is said of the routes."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

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
from pipeline.protocols.messages import MessagesRequest, Prompt


class TextBlock(Told, frozen=True, tag="text"):
    text: str


class ThinkingBlock(Told, frozen=True, tag="thinking"):
    """`signature` is empty: only Anthropic's models sign."""

    thinking: str
    signature: str


class ToolUseBlock(Told, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(Told, frozen=True):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Told, frozen=True):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    inference_geo: str | UnsetType = UNSET


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnswerMessage(Told, frozen=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[AnswerBlock]
    model: str
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage
    container: None


class TextDelta(Told, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(Told, frozen=True, tag="thinking_delta"):
    thinking: str


class InputJsonDelta(Told, frozen=True, tag="input_json_delta"):
    partial_json: str


class MessageStart(Told, frozen=True, tag="message_start"):
    message: AnswerMessage


class ContentBlockStart(Told, frozen=True, tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class ContentBlockDelta(Told, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(Told, frozen=True, tag="content_block_stop"):
    index: int


class Stopped(Told, frozen=True):
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    container: None


class MessageDelta(Told, frozen=True, tag="message_delta"):
    delta: Stopped
    usage: MessageUsage


class MessageStop(Told, frozen=True, tag="message_stop"):
    """The last event."""


class Ping(Told, frozen=True, tag="ping"):
    """Keeps a quiet stream open."""


class BrokenMessage(Told, frozen=True):
    type: str
    message: str
    code: str


class MessageError(Told, frozen=True, tag="error"):
    """What a stream that has begun ends with when it cannot go on."""

    error: BrokenMessage


class TokenCount(Told, frozen=True):
    input_tokens: int


VERSION_HEADERS = "Anthropic's headers (`anthropic-version`, `anthropic-beta`) are accepted and not read."

MESSAGES = Operation(
    tag="Generation",
    summary="Message in Anthropic's shape",
    text=VERSION_HEADERS,
    takes=MessagesRequest,
    gives=AnswerMessage,
    events=(
        MessageStart,
        ContentBlockStart,
        ContentBlockDelta,
        ContentBlockStop,
        MessageDelta,
        MessageStop,
        Ping,
        MessageError,
    ),
    refuses=(
        *BODY_REFUSALS,
        "thinking_budget_exceeds_max_tokens",
        "thread_unsupported_request",
        *TOOL_REFUSALS,
        *PROMPT_REFUSALS,
        *MEDIA_REFUSALS,
        *ENGINE_REFUSALS,
    ),
    parameters=(ROUTING_KEY, EXPLAIN),
)
COUNT_TOKENS = Operation(
    tag="Tokens",
    summary="Tokens a message would be charged for, its media expanded",
    text=f"Media are fetched and measured; no engine is asked. {VERSION_HEADERS}",
    takes=Prompt,
    gives=TokenCount,
    refuses=(*BODY_REFUSALS, "thread_unsupported_request", *TOOL_REFUSALS, *PROMPT_REFUSALS, *MEDIA_REFUSALS),
)
