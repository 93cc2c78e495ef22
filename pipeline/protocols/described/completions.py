"""Answers of `POST /v1/completions`, and what is said of the route."""

from typing import Literal

from msgspec import UNSET, UnsetType

from pipeline.protocols.completions import CompletionRequest
from pipeline.protocols.described.chat import LAST, CachedTokens, StreamError
from pipeline.protocols.described.operation import (
    BODY_REFUSALS,
    ENGINE_REFUSALS,
    EXPLAIN,
    PROMPT_REFUSALS,
    ROUTING_KEY,
    Operation,
    Told,
)


class TextUsage(Told, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TextLogprobs(Told, frozen=True):
    """Four lists, an entry for each token; `text_offset`: where it begins in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Told, frozen=True):
    text: str
    index: int
    finish_reason: str | None
    logprobs: TextLogprobs | UnsetType = UNSET
    matched_stop: str | int | UnsetType = UNSET


class TextCompletion(Told, frozen=True):
    """A chunk of a stream has the same shape, and no usage but the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: TextUsage | UnsetType = UNSET


COMPLETIONS = Operation(
    tag="Generation",
    summary="A text gone on with",
    text="No template and no media: the prompt goes to the engine as it is.",
    takes=CompletionRequest,
    gives=TextCompletion,
    events=(TextCompletion, StreamError),
    last=LAST,
    refuses=(*BODY_REFUSALS, *PROMPT_REFUSALS, *ENGINE_REFUSALS),
    parameters=(ROUTING_KEY, EXPLAIN),
)
