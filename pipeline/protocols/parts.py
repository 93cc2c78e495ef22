"""What the JSON of all APIs has in common: raw pieces of the body without a copy, and one wording for what does not
parse.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.errors import GatewayError

T = TypeVar("T")

UINT32 = 2**32 - 1  # what engines' messages hold

RawText = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "string"})]
"""A string that stays raw JSON: one of megabytes is looked at once, and copied once, into its span."""

_BACKSLASH = re.compile(rb"\\")
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_BOUND = re.compile(r"Expected `(?P<kind>[^`]+)` (?P<relation>[<>]=?) (?P<bound>\S+)")
_LENGTH = re.compile(r"Expected `(?P<kind>[^`]+)` of length (?P<relation>[<>]=) (?P<bound>\d+)")


def raw_string(raw: msgspec.Raw | UnsetType) -> memoryview | bytes | None:
    """The bytes of a JSON string: a view of the body when it holds no escape, else decoded.  None when it is no
    string, or absent.
    """
    if raw is UNSET:
        return None
    view = memoryview(raw)
    if len(view) < 2 or view[0] != 0x22:
        return None
    inner = view[1:-1]
    if _BACKSLASH.search(inner) is None:
        return inner
    return msgspec.json.decode(raw, type=str).encode()


def decode_body(decoder: "msgspec.json.Decoder[T]", body: bytes | bytearray) -> T:
    """Decode a request body; what is wrong becomes a GatewayError with the field's path (api.md 6.3)."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise describe(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GatewayError(
            "invalid_json", f"JSON syntax error: Failed to parse the request body as JSON: {error}"
        ) from None
    except RecursionError:
        raise GatewayError("invalid_json", "JSON syntax error: the request body is nested too deeply") from None


def converted(value: Any, kind: type[T], path: str) -> T:
    """A decoded value as a form of its own; what is wrong is told with its path below `path`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = describe(str(error))
        param = ".".join(part for part in (path, found.param) if part)
        raise GatewayError(found.code, f"{path}: {found.message}", param=param) from None


def describe(text: str) -> GatewayError:
    """Turn msgspec's sentence into our error: code by kind of fault, `param` from its path."""
    match = _PATH.match(text)
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if missing := _MISSING.search(what):
        param = ".".join(part for part in (path, missing["name"]) if part)
        return GatewayError(
            "missing_required_parameter", f"Invalid JSON data: missing field `{missing['name']}`", param=param
        )
    if length := _LENGTH.search(what):
        code = "empty_array" if length["relation"] == ">=" else "array_above_max_length"
        if length["kind"] == "str":
            code = "invalid_value"
        return GatewayError(code, f"{path}: {what}", param=path)
    if bound := _BOUND.search(what):
        number = "integer" if bound["kind"].startswith("int") else "decimal"
        side = "above_max_value" if bound["relation"].startswith("<") else "below_min_value"
        return GatewayError(f"{number}_{side}", f"{path}: {what}", param=path)
    if what.startswith("Invalid enum value") or "Invalid value" in what:
        return GatewayError("invalid_value", f"Invalid JSON data: {path}: {what}", param=path)
    return GatewayError("invalid_type", f"Invalid JSON data: {path or 'the body'}: {what}", param=path or None)


def check_content_type(value: str) -> None:
    if value.split(";", 1)[0].strip().lower() != "application/json":
        raise GatewayError("json_parse_error", "Expected request with `Content-Type: application/json`")


def as_json(value: Any) -> bytes:
    return msgspec.json.encode(value)
