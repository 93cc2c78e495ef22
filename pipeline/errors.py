"""Every error a client can be told: one table of codes, one exception, one translation of foreign errors.

A code decides the HTTP status; the status decides the `type` (OpenAI's kinds, as SMG 1.13 sends them).  Text for
clients never holds payloads, internal addresses or stack traces; whoever raises cuts URLs with `shorten_url`.
"""

import re
from typing import Any, ClassVar, Literal

from engines.base import (
    EngineError,
    MessageTooLarge,
    ModalityRefused,
    NoWorker,
    PairRefused,
    ParameterRefused,
    SchemeRefused,
)
from engines.leg import Role

# code -> status.  docs/errors.md is generated from this table; a test holds both, and the raised codes, together.
STATUS_OF_CODE = {
    # media
    "unsupported_content_part": 400,
    "invalid_multimodal_request": 400,
    "multimodal_prompt_contract_mismatch": 400,
    "multimodal_processing_failed": 400,
    "multimodal_not_supported": 400,
    "multimodal_worker_processing_unsupported_model": 400,
    "multimodal_hint_unsupported_in_worker_mode": 400,
    "media_ref_too_large": 400,
    "media_ref_scheme_not_accepted": 400,
    "no_media_ref_capable_worker": 503,
    "multimodal_payload_too_large": 413,
    "multimodal_inflight_budget": 429,
    # the request
    "malformed_request": 400,
    "expectation_failed": 417,
    "invalid_json": 400,
    "json_parse_error": 400,
    "missing_required_parameter": 400,
    "invalid_type": 400,
    "invalid_value": 400,
    "empty_array": 400,
    "array_above_max_length": 400,
    "integer_above_max_value": 400,
    "integer_below_min_value": 400,
    "decimal_above_max_value": 400,
    "decimal_below_min_value": 400,
    "top_logprobs_requires_logprobs": 400,
    "stream_options_requires_stream": 400,
    "tool_choice_requires_tools": 400,
    "thinking_budget_exceeds_max_tokens": 400,
    "thread_unsupported_request": 400,
    "tokenizer_not_found": 400,
    "input_items_empty": 400,
    "convert_request_failed": 400,
    "resolve_input_failed": 400,
    "previous_response_not_found": 400,
    "mutually_exclusive_parameters": 400,
    "response_already_completed": 400,
    "tool_choice_function_not_found": 400,
    "unsupported_parameter": 400,
    "process_messages_failed": 400,
    "context_length_exceeded": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "conversation_not_found": 404,
    "unknown_url": 404,
    "method_not_allowed": 405,
    "request_body_too_large": 413,
    # the gateway's state
    "admission_queue_full": 429,
    "background_responses_limit_reached": 429,
    "admission_queue_timeout": 503,
    "no_available_workers": 503,
    "no_models_available": 503,
    "no_workers": 503,
    "tokenizer_not_ready": 503,
    "shutting_down": 503,
    "request_timeout": 504,
    "internal_error": 500,
    # a pair of engine workers
    "runtime_pd_not_supported": 400,
    "no_compatible_pd_pair": 503,
    "pd_decode_language_model_only_mrope": 400,
    "pd_decode_language_model_only_media_refs": 400,
    "pd_decode_language_model_only_n_samples": 400,
    "pd_decode_missing_kv_transfer_params": 502,
    # the engine: status comes from ENGINE_STATUS
    "start_generation_failed": 500,
    "worker_stream_failed": 500,
    "prefill_worker_failed_to_start": 500,
    "prefill_stream_error": 500,
    "decode_worker_failed_to_start": 500,
}

# Codes whose status is the engine's.
ENGINE_CODES = frozenset(
    {
        "start_generation_failed",
        "worker_stream_failed",
        "prefill_worker_failed_to_start",
        "prefill_stream_error",
        "decode_worker_failed_to_start",
    }
)

# gRPC status of an engine -> (HTTP status, whether another attempt may help).  SMG 1.13's table.
ENGINE_STATUS = {
    "INVALID_ARGUMENT": (400, False),
    "FAILED_PRECONDITION": (400, False),
    "OUT_OF_RANGE": (400, False),
    "UNAUTHENTICATED": (401, False),
    "PERMISSION_DENIED": (403, False),
    "NOT_FOUND": (404, False),
    "ABORTED": (409, False),
    "ALREADY_EXISTS": (409, False),
    "RESOURCE_EXHAUSTED": (429, True),
    "UNAVAILABLE": (503, True),
    "DEADLINE_EXCEEDED": (504, True),
    "CANCELLED": (502, True),
    "UNKNOWN": (500, True),
    "DATA_LOSS": (500, False),
    "INTERNAL": (500, False),
    "UNIMPLEMENTED": (501, False),
}

# a web address, or a data URL with its comma ("bad data: ..." is none)
_URL_IN_TEXT = re.compile(r"""https?://[^\s'"<>]+|data:[\w.+/-]*(?:;[^\s,;'"]+)*,[^\s'"<>]*""", re.IGNORECASE)

_KIND_OF_STATUS = {403: "permission_error", 429: "rate_limit_error"}


def kind_of_status(status: int) -> str:
    """The OpenAI `type` that SDKs branch on."""
    if status >= 500:
        return "server_error"
    return _KIND_OF_STATUS.get(status, "invalid_request_error")


def shorten_url(url: str, limit: int = 200) -> str:
    """A URL as it may appear in a message: no payload of a data URL, no query, at most `limit` characters."""
    if url[:5].lower() == "data:":
        return "data:..."
    bare = url.split("?", 1)[0].split("#", 1)[0]
    return bare if len(bare) <= limit else bare[:limit] + "..."


def without_payloads(text: str) -> str:
    """A foreign message with every URL in it shortened: an engine that fetches media itself quotes what it could not
    use.
    """
    return _URL_IN_TEXT.sub(lambda found: shorten_url(found[0]), text)


FetchCause = Literal["host_refused", "unavailable", "failed"]
"""Why a fetch came to nothing: by the media host policy, for now (another try may succeed), or for good."""


class GatewayError(Exception):
    """An answer that is not 200.

    `code` is a key of STATUS_OF_CODE.  `item` is the index of the media item concerned, in prompt order; it is put in
    front of the message.  `param` is the JSON path of the field concerned.  `retry_after_s` becomes the `Retry-After`
    header. `status` overrides the table where the engine's status decides (see ENGINE_STATUS).  `cause` tells a failed
    fetch apart where the code does not (the sidecar's protocol has finer ones).
    """

    MOST_CHARACTERS: ClassVar[int] = 1000  # a message may quote what a client sent, which has no end of its own

    def __init__(
        self,
        code: str,
        message: str,
        *,
        item: int | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        status: int | None = None,
        cause: FetchCause | None = None,
    ) -> None:
        self.code = code
        self.cause = cause
        self.status = status if status is not None else STATUS_OF_CODE[code]
        self.message = _cut(message if item is None else f"media item {item}: {message}", self.MOST_CHARACTERS)
        self.item = item
        self.param = None if param is None else _cut(param, self.MOST_CHARACTERS)
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    @property
    def headers(self) -> dict[str, str]:
        found = {"X-SMG-Error-Code": self.code}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.code == "invalid_api_key":
            found["WWW-Authenticate"] = 'Bearer realm="data-plane"'
        return found

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {
            "error": {
                "type": kind_of_status(self.status),
                "code": self.code,
                "message": self.message,
                "param": self.param,
            }
        }


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def model_not_found(model: str) -> GatewayError:
    return GatewayError(
        "model_not_found", f"No worker available for model '{model[:200]}'; GET /v1/models lists the models there are"
    )


def engine_failure(error: EngineError) -> GatewayError:
    """What a client is told when an engine refused, failed or could not be reached."""
    if isinstance(error, ModalityRefused):
        return GatewayError("multimodal_not_supported", error.message)
    if isinstance(error, ParameterRefused):
        return GatewayError("unsupported_parameter", error.message, param=error.parameter)
    if isinstance(error, SchemeRefused):
        return GatewayError("media_ref_scheme_not_accepted", error.message, item=error.item)
    if isinstance(error, MessageTooLarge):
        return GatewayError("multimodal_payload_too_large", error.message)
    if isinstance(error, NoWorker):
        return GatewayError("no_available_workers", error.message, retry_after_s=1)
    if isinstance(error, PairRefused):
        wait = 1 if STATUS_OF_CODE[error.code] == 503 else None
        return GatewayError(error.code, error.message, retry_after_s=wait)
    status, _ = ENGINE_STATUS.get(error.status, (500, False))
    retry_after_s = 1 if status in (429, 503) else None
    code, words = _code_and_words(error.role, error.started)
    wait = None if code == "worker_stream_failed" else retry_after_s
    return GatewayError(code, f"{words}: {without_payloads(error.message)}", status=status, retry_after_s=wait)


def _code_and_words(role: Role | None, started: bool) -> tuple[str, str]:
    """`role`: the leg of a pair that failed, None for a single worker.  `started`: it had begun to answer."""
    if role == "prefill":
        if started:
            return "prefill_stream_error", "Prefill stream error"
        return "prefill_worker_failed_to_start", "Prefill worker failed to start"
    if role == "encode":
        return "start_generation_failed", "Encode worker failed to start"
    if started:
        return "worker_stream_failed", "The engine failed"
    if role == "decode":
        return "decode_worker_failed_to_start", "Decode worker failed to start"
    return "start_generation_failed", "Failed to start generation"
