"""What a request asks for, the same for every API: template messages and media items in prompt order, and the first
checks.

A protocol file turns its JSON into a `MediaPlan`; from there on nothing knows which API was spoken.  The checks here
need no byte of any media: does the model take media at all, this modality, this many.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines.base import Modality, Sampling
from pipeline import models, parsers
from pipeline.bundle import Bundle
from pipeline.errors import GatewayError
from pipeline.models.base import Anchor, Family, Hints, Vocabulary

# fps and size limits of content-part hints (SMG v1.11.0, "Frame Sampling")
LONG_SIDE_STEP = 28
CLIP_LONG_SIDES = (150, 3584)
CLIP_RATES = (0.2, 5.0)

UNKNOWN_WINDOW = 1 << 22  # tokens, for a model whose window nobody tells
MOST_BYTES_PER_TOKEN = 64  # ordinary text has three to six
LEAST_TEXT_BYTES = 4 << 20


class MediaPart(msgspec.Struct, frozen=True):
    """One media item as the client named it.

    `url`: the URL's bytes, JSON escapes resolved; a view of the request body when there were none.  `is_bare_base64`:
    they are the payload itself instead, of the type `media_type` as the client says.  `hints`: what the part asks of
    it.
    """

    modality: Modality
    url: memoryview | bytes
    hints: Hints = Hints()
    is_bare_base64: bool = False
    media_type: str = ""


class MediaPlan(msgspec.Struct, frozen=True):
    """Everything the pipeline needs of a request.

    `messages`: for the chat template, with a part of type "image" (video, audio) where a media item stands.  `parts`:
    the items in the same order.  `template_variables`: merged last into the template's variables.  `continuation`: the
    beginning of the answer, behind the rendered prompt.  `text`, `ids`: the prompt itself, instead of messages.
    """

    model: str
    messages: Sequence[Mapping[str, Any]]
    parts: tuple[MediaPart, ...]
    sampling: Sampling
    stream: bool
    template_variables: Mapping[str, Any] = {}
    continuation: str = ""
    text: str | None = None
    ids: Sequence[int] | None = None


class ServedModel(msgspec.Struct, frozen=True):
    """A model the fleet serves, loaded: bundle, family and what the family knows about this checkpoint.

    `guards`: anchors of modalities the model is not served with, which no prompt may hold.
    `key`: under which pool processes know the family's settings; 0 and `family` None for a model without media.
    `limits`: most items of one request by modality (flag, variable or the family's own); `limit_source` says in words
    where each came from.
    """

    model: str
    bundle: Bundle
    family: Family | None
    settings: Any = None
    key: int = 0
    anchors: Mapping[Modality, Anchor] = {}
    guards: Mapping[Modality, Anchor] = {}
    feature_tokens: Mapping[Modality, int] = {}
    limits: Mapping[Modality, int] = {}
    limit_source: Mapping[Modality, str] = {}
    vocabulary: Vocabulary | None = None
    max_context: int | None = None
    sampling_defaults: Mapping[str, Any] = {}
    call_format: str = parsers.PASSTHROUGH
    thinking_format: str = parsers.PASSTHROUGH


def check_items(model: ServedModel, parts: Sequence[MediaPart], engine_limits: Mapping[Modality, int]) -> None:
    """Refuse media the model cannot take, before anything is fetched.

    `engine_limits`: what the model's engine workers take at most (label `mm_item_limits`).  Raises
    `invalid_multimodal_request`.
    """
    if not parts:
        return
    family = model.family
    if family is None:
        raise GatewayError(
            "invalid_multimodal_request",
            f"Invalid multimodal request: model {model.model} has no multimodal processor; "
            f"the families that exist are {', '.join(models.names())}",
        )
    for modality, count in Counter(part.modality for part in parts).items():
        word = modality.value
        if modality not in model.anchors:
            raise GatewayError(
                "invalid_multimodal_request",
                f"Invalid multimodal request: invalid media request for model {family.name}: "
                f"modality {word} is not supported by model spec {family.name}",
            )
        limit, source = model.limits[modality], model.limit_source[modality]
        engine_limit = engine_limits.get(modality)
        if engine_limit is not None and engine_limit < limit:
            limit, source = engine_limit, "the engine"
        if count > limit:
            raise GatewayError(
                "invalid_multimodal_request",
                f"Invalid multimodal request: model spec {family.name} supports at most {limit} {word} inputs; "
                f"got {count} ({source})",
            )


def check_hints(parts: Sequence[MediaPart]) -> None:
    """Refuse hints outside their range; raises `multimodal_processing_failed` with the item's index."""
    for index, part in enumerate(parts):
        wrong = _wrong_clip_hint(part.hints) if part.modality is Modality.VIDEO else _wrong_hint(part.hints)
        if wrong is not None:
            raise GatewayError("multimodal_processing_failed", wrong, item=index)


def _wrong_hint(hints: Hints) -> str | None:
    cap = hints.max_long_side
    if cap is not None and (cap <= 0 or cap % LONG_SIDE_STEP):
        return f"max_long_side_pixel must be a positive multiple of {LONG_SIDE_STEP}, got {cap}"
    return None


def _wrong_clip_hint(hints: Hints) -> str | None:
    cap, (least, most) = hints.max_long_side, CLIP_LONG_SIDES
    if hints.fps is not None and not CLIP_RATES[0] <= hints.fps <= CLIP_RATES[1]:
        return f"fps must be between {CLIP_RATES[0]:g} and {CLIP_RATES[1]:g}, got {hints.fps:g}"
    if cap is not None and (cap % LONG_SIDE_STEP or not least <= cap <= most):
        return f"video max_long_side_pixel must be a multiple of {LONG_SIDE_STEP} within {least}..={most}, got {cap}"
    return None


def check_text(model: ServedModel, nbytes: int) -> None:
    """Refuse text that is far beyond the model's window, before a prompt is made of it; `nbytes` of JSON, media URLs
    not counted.
    """
    window = model.max_context or UNKNOWN_WINDOW
    limit = max(MOST_BYTES_PER_TOKEN * window, LEAST_TEXT_BYTES)
    if nbytes > limit:
        raise GatewayError(
            "context_length_exceeded",
            f"This model's maximum context length is {window} tokens. However, your request has {nbytes} bytes "
            f"of text, more than {limit}. Please reduce the length of the input.",
        )


def check_length(model: ServedModel, tokens: int) -> None:
    """Refuse a prompt longer than the model's window; `tokens` counts expanded placeholders."""
    window = model.max_context or UNKNOWN_WINDOW
    if tokens > window:
        raise GatewayError(
            "context_length_exceeded",
            f"This model's maximum context length is {window} tokens. "
            f"However, your request has {tokens} input tokens. Please reduce the length of the input.",
        )
