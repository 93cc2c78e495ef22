"""Answers of `/v1/responses` and its kept responses, and what is said of the routes."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from pipeline.protocols.described.operation import (
    BODY_REFUSALS,
    ENGINE_REFUSALS,
    EXPLAIN,
    MEDIA_REFUSALS,
    PROMPT_REFUSALS,
    ROUTING_KEY,
    TOOL_REFUSALS,
    Operation,
    Parameter,
    Told,
)
from pipeline.protocols.described.response_events import RESPONSE_EVENTS
from pipeline.protocols.described.response_items import Failure, Incomplete, OutputItem, ResponseUsage
from pipeline.protocols.responses import ResponsesRequest


class ReasoningTold(Told, frozen=True):
    effort: str | None
    summary: None


class ConversationTold(Told, frozen=True):
    id: str


class Response(Told, frozen=True):
    """What was asked, and the output's items."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    background: bool
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: Failure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: None
    prompt_cache_retention: None
    reasoning: ReasoningTold
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    safety_identifier: None
    frequency_penalty: float
    presence_penalty: float
    metadata: dict[str, Any]
    conversation: ConversationTold | UnsetType = UNSET


class Deleted(Told, frozen=True):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Told, frozen=True):
    """`data`: items as they were sent, each with an id."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


LIST_PARAMETERS = (
    Parameter("order", "Newest first, or oldest first.", Literal["desc", "asc"]),
    Parameter("limit", "Most items in the answer; 20 when absent.", Annotated[int, Meta(ge=1, le=100)]),
    Parameter("after", "Begin behind the item of this id."),
)

RESPONSES = Operation(
    tag="Generation",
    summary="Response in the shape of OpenAI's Responses API",
    text="Kept in memory for `previous_response_id` unless `store` is false.",
    takes=ResponsesRequest,
    gives=Response,
    events=RESPONSE_EVENTS,
    refuses=(
        *BODY_REFUSALS,
        "input_items_empty",
        "convert_request_failed",
        "previous_response_not_found",
        "conversation_not_found",
        "background_responses_limit_reached",
        "mutually_exclusive_parameters",
        *TOOL_REFUSALS,
        *PROMPT_REFUSALS,
        *MEDIA_REFUSALS,
        *ENGINE_REFUSALS,
    ),
    parameters=(ROUTING_KEY, EXPLAIN),
)
GET_RESPONSE = Operation(tag="Generation", summary="A kept response", gives=Response, refuses=("not_found",))
DELETE_RESPONSE = Operation(tag="Generation", summary="Forgets a response", gives=Deleted, refuses=("not_found",))
CANCEL_RESPONSE = Operation(
    tag="Generation",
    summary="Cancels a response",
    text="One with `background` that is not over; of one that was cancelled the same is told again.",
    gives=Response,
    refuses=("not_found", "response_already_completed"),
)
INPUT_ITEMS = Operation(
    tag="Generation",
    summary="The input of a kept response",
    gives=InputItems,
    refuses=("not_found", "invalid_value"),
    parameters=LIST_PARAMETERS,
)
