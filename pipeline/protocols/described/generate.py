"""Answers of `POST /generate`, and what is said of the route."""

from typing import Any

from msgspec import UNSET, UnsetType

from pipeline.protocols.described.chat import StreamError
from pipeline.protocols.described.operation import (
    BODY_REFUSALS,
    ENGINE_REFUSALS,
    PROMPT_REFUSALS,
    ROUTING_KEY,
    Operation,
    Told,
)
from pipeline.protocols.generate import GenerateRequest


class EndReason(Told, frozen=True):
    """`length`: tokens, when there were no more allowed."""

    type: str
    length: int | UnsetType = UNSET


class MetaInfo(Told, frozen=True):
    """`finish_reason` is a word in a stream, null before the end.  Log-probabilities: `[value, token id, null]`."""

    id: str
    finish_reason: EndReason | str | None
    prompt_tokens: int
    weight_version: str
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    output_token_logprobs: list[list[Any]] | UnsetType = UNSET
    output_top_logprobs: list[list[list[Any]]] | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    matched_stop: str | int | UnsetType = UNSET


class Generated(Told, frozen=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GeneratedChunk(Told, frozen=True):
    """`text`: all of it so far; `output_ids`: those that are new."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int


GENERATE = Operation(
    tag="Generation",
    summary="A text or token ids gone on with, in SGLang's form",
    text="No template and no media: the prompt goes to the engine as it is.",
    takes=GenerateRequest,
    gives=list[Generated],
    events=(GeneratedChunk, StreamError),
    refuses=(*BODY_REFUSALS, *PROMPT_REFUSALS, *ENGINE_REFUSALS, "resolve_input_failed"),
    parameters=(ROUTING_KEY,),
)
