"""What `/openapi.json` says of a route beside what the route itself tells (path, key, kind of its error bodies).

Bodies that come in are the types they are decoded with.  Answers are built as dictionaries where speed counts; their
types stand in this folder, one file an API, and tests hold every answer against them.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Tag = Literal["Generation", "Tokens", "Models", "Workers", "Gateway"]


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what the gateway answers with: these members and no others."""


class Parameter(msgspec.Struct, frozen=True):
    """A query parameter or header of a request.  `kind`: its type, a bound or a Literal included."""

    name: str
    text: str
    kind: Any = str
    place: Literal["query", "header"] = "query"


class Operation(msgspec.Struct, frozen=True):
    """One method of one path.

    `takes`: the type of its JSON body, if it has one.  `gives`: the type of the answer of `status`; a text type for
    text (`media_type`).  `events`: the types of a stream's events, for a route that streams when asked to; `last`: what
    ends it and is no JSON.
    `others`: answers of further statuses that are not the route's error body.  `refuses`: codes of
    `pipeline.errors` beyond those that every route of its kind has.
    """

    tag: Tag
    summary: str
    gives: Any
    text: str = ""
    takes: Any = None
    status: int = 200
    media_type: str = "application/json"
    events: tuple[Any, ...] = ()
    last: str | None = None
    others: Mapping[int, Any] = {}
    refuses: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    headers: Mapping[str, str] = {}


# What reading a JSON body may find wrong with it.
BODY_REFUSALS = (
    "malformed_request",
    "expectation_failed",
    "invalid_json",
    "json_parse_error",
    "missing_required_parameter",
    "invalid_type",
    "invalid_value",
    "empty_array",
    "array_above_max_length",
    "integer_above_max_value",
    "integer_below_min_value",
    "decimal_above_max_value",
    "decimal_below_min_value",
    "request_body_too_large",
    "request_timeout",
)
# What a prompt may meet on its way to an engine; its media's own come on top.
PROMPT_REFUSALS = (
    "model_not_found",
    "tokenizer_not_ready",
    "context_length_exceeded",
    "multimodal_prompt_contract_mismatch",
    "unsupported_parameter",
)
MEDIA_REFUSALS = (
    "unsupported_content_part",
    "process_messages_failed",
    "invalid_multimodal_request",
    "multimodal_processing_failed",
    "multimodal_payload_too_large",
    "multimodal_not_supported",
    # where an engine's worker is to process them
    "multimodal_worker_processing_unsupported_model",
    "multimodal_hint_unsupported_in_worker_mode",
    "media_ref_too_large",
    "media_ref_scheme_not_accepted",
    "no_media_ref_capable_worker",
)
TOOL_REFUSALS = ("tool_choice_requires_tools", "tool_choice_function_not_found")
ENGINE_REFUSALS = (
    "no_available_workers",
    "start_generation_failed",
    "worker_stream_failed",
    "multimodal_inflight_budget",
    "runtime_pd_not_supported",
    "no_compatible_pd_pair",
    "pd_decode_language_model_only_mrope",
    "pd_decode_language_model_only_media_refs",
    "pd_decode_language_model_only_n_samples",
    "pd_decode_missing_kv_transfer_params",
    "prefill_worker_failed_to_start",
    "prefill_stream_error",
    "decode_worker_failed_to_start",
)

ROUTING_KEY = Parameter(
    "X-SMG-Routing-Key",
    "Requests with the same key go to the same worker, under policies that look at it.",
    place="header",
)
EXPLAIN = Parameter(
    "X-Mediagate-Explain",
    "With `1` a stream begins with the comment `: mediagate {...}`: what was done with each medium, and the "
    "milliseconds of each stage. Not with `--no-page`.",
    place="header",
)
