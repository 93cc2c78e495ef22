"""Events of a streamed answer of `/v1/responses`, in the order in which they come.

`response.created`, `response.in_progress`; for each item `response.output_item.added`, its parts and deltas,
`response.output_item.done`; then exactly one of `response.completed`, `response.incomplete` and `response.failed`.
"""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pipeline.protocols.described.chat import AnswerLogprob
from pipeline.protocols.described.operation import Told
from pipeline.protocols.described.response_items import (
    Failure,
    Incomplete,
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseUsage,
)


class Begun(Told, frozen=True):
    """A response before there is any output."""

    id: str
    object: Literal["response"]
    status: Literal["in_progress"]
    created_at: int
    background: bool
    model: str
    output: list[OutputItem]


class Going(Told, frozen=True):
    id: str
    object: Literal["response"]
    status: Literal["in_progress"]


class Over(Told, frozen=True):
    """What the last event tells of the response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed"]
    background: bool
    model: str
    output: list[OutputItem]
    usage: ResponseUsage
    max_output_tokens: int | None
    temperature: float
    parallel_tool_calls: bool
    store: bool
    tools: list[dict[str, Any]]
    metadata: dict[str, Any]
    tool_choice: Any
    previous_response_id: str | UnsetType = UNSET
    incomplete_details: Incomplete | UnsetType = UNSET
    error: Failure | UnsetType = UNSET


class _Numbered(Told, frozen=True):
    """`sequence_number` counts the stream's events from 0."""

    sequence_number: int


class Created(_Numbered, frozen=True, tag="response.created"):
    response: Begun


class InProgress(_Numbered, frozen=True, tag="response.in_progress"):
    response: Going


class ItemAdded(_Numbered, frozen=True, tag="response.output_item.added"):
    """The item has no content and no arguments yet."""

    output_index: int
    item: OutputItem


class ItemDone(_Numbered, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(_Numbered, frozen=True):
    output_index: int
    item_id: str


class _OfPart(_OfItem, frozen=True):
    content_index: int


class PartAdded(_OfPart, frozen=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfPart, frozen=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_OfPart, frozen=True, tag="response.output_text.delta"):
    """`logprobs`: of the tokens that this text and none before it came from, when the request includes them."""

    delta: str
    logprobs: list[AnswerLogprob] | UnsetType = UNSET


class TextDone(_OfPart, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: list[AnswerLogprob] | UnsetType = UNSET


class ReasoningDelta(_OfPart, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, frozen=True, tag="response.function_call_arguments.done"):
    arguments: str


class Completed(_Numbered, frozen=True, tag="response.completed"):
    response: Over


class CutShort(_Numbered, frozen=True, tag="response.incomplete"):
    response: Over


class Failed(_Numbered, frozen=True, tag="response.failed"):
    """The engine or the gateway failed after the answer had begun; open items are closed before."""

    response: Over


RESPONSE_EVENTS = (
    *(Created, InProgress, ItemAdded, PartAdded, TextDelta, TextDone, ReasoningDelta, ReasoningDone),
    *(ArgumentsDelta, ArgumentsDone, PartDone, ItemDone, Completed, CutShort, Failed),
)
