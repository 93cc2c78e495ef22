"""Arguments that a model writes as plain text, as JSON of the type the function's schema asks for.

Formats with tags (Qwen3-Coder, GLM, MiniMax) say `<parameter=days>3</parameter>`; only the schema knows whether that
is a number or a text.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

_DEEPEST = 8  # alternatives within alternatives
_SCALARS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types a parameter's schema allows; empty when it does not say (not near its surface, at least)."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(one for one in stated if isinstance(one, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(one) for one in schema["enum"])
    found = [types_of(one, depth + 1) for name in ("anyOf", "oneOf") for one in _listed(schema.get(name))]
    return frozenset().union(*found) if all(found) else frozenset()


def alternatives(schema: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schema and what it may be instead, by `anyOf` and `oneOf`."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    yield schema
    for name in ("anyOf", "oneOf"):
        for one in _listed(schema.get(name)):
            yield from alternatives(one, depth + 1)


def parameter_types(function: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """The same for one parameter of a function's schema."""
    properties = (function or {}).get("properties")
    return types_of(properties.get(name)) if isinstance(properties, Mapping) else frozenset()


def json_value(text: str, types: frozenset[str]) -> str:
    """`text` as compact JSON.  Only what is unmistakably of an allowed type is anything but a string."""
    if types == {"string"}:
        return quoted(text)
    bare = text.strip()
    word = _SCALARS.get(bare.lower())
    if word is not None and (not types or ("null" if word == "null" else "boolean") in types):
        return word
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return quoted(text)
    kind = _type_of(value)
    if types and kind not in types and not (kind == "integer" and "number" in types):
        return quoted(text)
    return bare if kind in ("integer", "number") else msgspec.json.encode(value).decode()


class ArgumentPieces:
    """One argument as its text arrives, handed on as JSON: a string piece by piece, anything else when it is whole."""

    def __init__(self, types: frozenset[str], sink: Callable[[str], None]) -> None:
        self._types = types
        self._sink = sink
        self._pieces: list[str] = []
        if types == {"string"}:
            sink('"')

    def add(self, text: str) -> None:
        if self._types == {"string"}:
            self._sink(escaped(text))
        else:
            self._pieces.append(text)

    def close(self) -> None:
        self._sink('"' if self._types == {"string"} else json_value("".join(self._pieces), self._types))


def quoted(text: str) -> str:
    """A JSON string."""
    return msgspec.json.encode(text).decode()


def escaped(text: str) -> str:
    """The inside of a JSON string: pieces joined are the whole."""
    return quoted(text)[1:-1]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
