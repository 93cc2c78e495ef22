"""Answers of the routes that parse a text of the client's own, and what is said of them."""

from typing import Literal

from pipeline.protocols.described.operation import BODY_REFUSALS, Operation, Told
from pipeline.protocols.parse import ParseCalls, ParseReasoning


class FoundFunction(Told, frozen=True):
    """`arguments`: compact JSON."""

    name: str
    arguments: str


class FoundCall(Told, frozen=True):
    function: FoundFunction


class FoundCalls(Told, frozen=True):
    remaining_text: str
    tool_calls: list[FoundCall]
    success: Literal[True]


class FoundReasoning(Told, frozen=True):
    normal_text: str
    reasoning_text: str
    success: Literal[True]


class UnknownParser(Told, frozen=True):
    error: str
    success: Literal[False]
    code: Literal["invalid_value"]


FUNCTION_CALL = Operation(
    tag="Tokens",
    summary="Calls of functions in a text",
    takes=ParseCalls,
    gives=FoundCalls,
    others={400: UnknownParser},
    refuses=(*BODY_REFUSALS, "unsupported_parameter"),
)
REASONING = Operation(
    tag="Tokens",
    summary="Reasoning in a text",
    takes=ParseReasoning,
    gives=FoundReasoning,
    others={400: UnknownParser},
    refuses=BODY_REFUSALS,
)
