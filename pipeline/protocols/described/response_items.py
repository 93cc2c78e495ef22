"""What a response of `/v1/responses` and the events of its stream both tell."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pipeline.protocols.described.chat import AnswerLogprob
from pipeline.protocols.described.operation import Told

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Told, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[AnswerLogprob] | UnsetType = UNSET


class ReasoningText(Told, frozen=True, tag="reasoning_text"):
    text: str


class OutputMessage(Told, frozen=True, tag="message"):
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus | UnsetType = UNSET


class OutputReasoning(Told, frozen=True, tag="reasoning"):
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus | UnsetType = UNSET


class OutputCall(Told, frozen=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Told, frozen=True):
    cached_tokens: int


class OutputDetails(Told, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Told, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Incomplete(Told, frozen=True):
    reason: Literal["max_output_tokens"]


class Failure(Told, frozen=True):
    code: str
    message: str
