"""What an error looks like on the wire, by API.  Codes and statuses are `pipeline.errors`'; only the body differs."""

from collections.abc import Callable
from typing import Any

from pipeline.errors import GatewayError

ErrorBody = Callable[[GatewayError, str], dict[str, Any]]  # the error and the request's id

# Anthropic's kinds, which its SDKs branch on (api.md 6.2); every other status of a client's fault is the first.
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {429: "rate_limit_error"}


def openai_error(error: GatewayError, request_id: str) -> dict[str, Any]:
    return error.body()


def anthropic_error(error: GatewayError, request_id: str) -> dict[str, Any]:
    """Anthropic's shape; `code` and `param` are in it as well, for whoever branches on ours."""
    told: dict[str, Any] = {
        "type": anthropic_kind(error.status),
        "message": error.message,
        "code": error.code,
        "param": error.param,
    }
    if error.code == "thread_unsupported_request":  # where its SDK looks for what it does without
        told["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", "error": told, "request_id": request_id}


def anthropic_kind(status: int) -> str:
    if status >= 500:
        return "api_error"
    return _KINDS.get(status, "invalid_request_error")
