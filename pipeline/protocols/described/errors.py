"""Error bodies, by the function that builds them (`pipeline.protocols.refusals`)."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pipeline.protocols.described.operation import Told
from pipeline.protocols.refusals import ErrorBody, anthropic_error, openai_error


class ErrorFacts(Told, frozen=True):
    """`code` is the contract, `type` what SDKs branch on.  `param`: the field that is wrong."""

    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    code: str
    message: str
    param: str | None


class Error(Told, frozen=True):
    error: ErrorFacts


class Unsupported(Told, frozen=True):
    """Where Anthropic's SDK looks for what it must do without."""

    error_code: str
    unsupported: list[str]


class MessagesErrorFacts(Told, frozen=True):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
    ]
    message: str
    code: str
    param: str | None
    details: Unsupported | UnsetType = UNSET


class MessagesError(Told, frozen=True):
    """Anthropic's shape, with `code` and `param`."""

    type: Literal["error"]
    error: MessagesErrorFacts
    request_id: str


ERROR_TYPES: Mapping[ErrorBody, Any] = {openai_error: Error, anthropic_error: MessagesError}
