"""What the JSON of all APIs has in common: raw pieces of the body without a copy, and one wording for what does not
parse.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, inspect

from pipeline.errors import GatewayError

T = TypeVar("T")

UINT32 = 2**32 - 1  # what engines' messages hold

RawText = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "string"})]
"""A string that stays raw JSON: one of megabytes is looked at once, and copied once, into its span."""

_PIECE = 1 << 16
_SURROGATES = re.compile(rb"(?P<pair>\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F]..", re.DOTALL)
_ESCAPES_LOOKED_AT = 10_000
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_BOUND = re.compile(r"Expected `(?P<kind>[^`]+)` (?P<relation>[<>]=?) (?P<bound>\S+)")
_STEP = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")
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
    if not _has_escape(inner):
        return inner
    return msgspec.json.decode(raw, type=str).encode()


def _has_escape(text: memoryview) -> bool:
    """In pieces that stay in the cache; a search in the view itself goes byte by byte and takes ten times as long."""
    return any(b"\\" in text[at : at + _PIECE].tobytes() for at in range(0, len(text), _PIECE))


def decode_body(decoder: "msgspec.json.Decoder[T]", body: bytes | bytearray) -> T:
    """Decode a request body; what is wrong becomes a GatewayError with the field's path (api.md 6.3)."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise describe(str(error), lambda path: _value_in_body(body, path), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GatewayError(
            "invalid_json", f"JSON syntax error: Failed to parse the request body as JSON: {_no_json(body, error)}"
        ) from None
    except RecursionError:
        raise GatewayError("invalid_json", "JSON syntax error: the request body is nested too deeply") from None


def _no_json(body: bytes | bytearray, error: Exception) -> str:
    """Why a body is no JSON: msgspec's words, where those do not send its author looking elsewhere."""
    if not body or body.isspace():
        return "it is empty"
    at = _half_pair(body)
    if at is None:
        return str(error)
    half = body[at : at + 6].decode(errors="replace")
    return f"the string around byte {at} holds {half}, half of a surrogate pair, which no text can hold"


def _half_pair(body: bytes | bytearray) -> int | None:
    """Where the first escape of a UTF-16 surrogate without its other half is; the beginning of the body is enough."""
    at = -1
    for _ in range(_ESCAPES_LOOKED_AT):
        at = body.find(b"\\u", at + 1)
        if at < 0:
            return None
        before = body[max(0, at - 64) : at]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:  # the backslash is itself escaped
            continue
        found = _SURROGATES.match(body, at)
        if found is None:
            continue
        if found["pair"] is None:
            return at
        at = found.end() - 1
    return None


def converted(value: Any, kind: type[T], path: str) -> T:
    """A decoded value as a form of its own; what is wrong is told with its path below `path`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = describe(str(error), lambda path: _value_at(value, path), kind)
        param = ".".join(part for part in (path, found.param) if part)
        raise GatewayError(found.code, f"{path}: {found.message}", param=param) from None


def describe(text: str, value_at: Callable[[str], Any], kind: Any) -> GatewayError:
    """Turn msgspec's sentence into our error: code by kind of fault, `param` from its path.

    `value_at(path)` finds what the client sent there, UNSET when that is not known.  `kind`: what it was to be.
    """
    match = _PATH.match(text)
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if absent := _MISSING.search(what):
        return _missing(path, absent["name"])
    if length := _LENGTH.search(what):
        return _wrong_length(path, length, value_at(path))
    if bound := _BOUND.search(what):
        return _out_of_range(path, bound, value_at(path))
    if what.startswith("Invalid enum value") or "Invalid value" in what:
        words = ", ".join(sorted(_words(_shape(kind), _STEP.findall(path))))
        expected = f", expected one of {words}" if words else ""
        return GatewayError("invalid_value", f"Invalid JSON data: {path}: {what}{expected}", param=path)
    return GatewayError("invalid_type", f"Invalid JSON data: {path or 'the body'}: {what}", param=path or None)


@functools.lru_cache(maxsize=64)
def _shape(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _words(shape: inspect.Type, steps: Sequence[tuple[str, str]]) -> set[str]:
    """The words a type allows at a path: (member, "") and ("", index) steps."""
    if isinstance(shape, inspect.UnionType):
        return {word for one in shape.types for word in _words(one, steps)}
    if isinstance(shape, inspect.Metadata):
        return _words(shape.type, steps)
    if not steps:
        return set(map(str, shape.values)) if isinstance(shape, inspect.LiteralType) else set()
    (member, _), *rest = steps
    if isinstance(shape, inspect.StructType) and member:
        return {word for field in shape.fields if field.encode_name == member for word in _words(field.type, rest)}
    if isinstance(shape, inspect.ListType) and not member:
        return _words(shape.item_type, rest)
    return _words(shape.value_type, rest) if isinstance(shape, inspect.DictType) else set()


def _wrong_length(path: str, limit: re.Match[str], value: Any) -> GatewayError:
    what = "characters" if limit["kind"] == "str" else "elements"
    has = f"{len(value)} {what}" if isinstance(value, list | str | dict) else f"a number of {what}"
    if limit["relation"] == ">=":
        code, why = "empty_array", f"less than the minimum of {limit['bound']}"
    else:
        code, why = "array_above_max_length", f"more than the maximum of {limit['bound']}"
    return GatewayError("invalid_value" if limit["kind"] == "str" else code, f"{path}: {has}, {why}", param=path)


def _out_of_range(path: str, limit: re.Match[str], value: Any) -> GatewayError:
    number = "integer" if limit["kind"].startswith("int") else "decimal"
    shown = str(value)[:40] if isinstance(value, int | float) else "a value"
    bound = limit["bound"].removesuffix(".0")
    if limit["relation"].startswith("<"):
        return GatewayError(f"{number}_above_max_value", f"{path}: {shown} is above the maximum of {bound}", param=path)
    why = f"is below the minimum of {bound}" if limit["relation"] == ">=" else f"must be more than {bound}"
    return GatewayError(f"{number}_below_min_value", f"{path}: {shown} {why}", param=path)


def _value_in_body(body: bytes | bytearray, path: str) -> Any:
    """Decodes the one field the path begins with; what else there is (pictures) is only passed over."""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    try:
        field = msgspec.json.decode(body, type=_only(name))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UNSET
    return _value_at({name: getattr(field, name)}, path)


@functools.lru_cache(maxsize=256)
def _only(name: str) -> type[msgspec.Struct]:
    """`name` is a field of ours, never a client's word."""
    return msgspec.defstruct("Only", [(name, Any, UNSET)])


def _value_at(value: Any, path: str) -> Any:
    """What stands at `messages[0].content`; UNSET where there is no such thing, or the path says `[...]`."""
    for name, index in _STEP.findall(path):
        try:
            value = value[int(index)] if index else value[name]
        except (LookupError, TypeError, ValueError):
            return UNSET
    return value


def unsupported(place: str, kind: str, why: str = "") -> GatewayError:
    """A part, block or item of a kind that is not taken there; `why` when elsewhere, or made otherwise, it is."""
    told = f" ({why})" if why else ""
    return GatewayError(
        "unsupported_content_part", f'{place}: unsupported type "{kind[:80]}" for gRPC backends{told}', param=place
    )


def called_otherwise(kind: str, ours: Mapping[str, str]) -> str:
    """Why a type is not known that another API calls so; `ours`: the name here, by the names elsewhere."""
    return f'this API calls it "{ours[kind]}"' if kind in ours else ""


def no_media_of(role: str) -> str:
    """Why a medium is refused in a message of that role: chat templates would drop it in silence."""
    return f"a message of the role {role} takes no media"


def missing(place: str) -> GatewayError:
    """A member that is not there; `place` is its path."""
    within, _, name = place.rpartition(".")
    return _missing(within, name)


def _missing(within: str, name: str) -> GatewayError:
    where = f"{within}: " if within else ""
    param = f"{within}.{name}" if within else name
    return GatewayError("missing_required_parameter", f"Invalid JSON data: {where}missing field `{name}`", param=param)


def check_content_type(value: str) -> None:
    if value.split(";", 1)[0].strip().lower() != "application/json":
        raise GatewayError("json_parse_error", "Expected request with `Content-Type: application/json`")


def as_json(value: Any) -> bytes:
    return msgspec.json.encode(value)
