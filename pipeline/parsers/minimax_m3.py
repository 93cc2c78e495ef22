"""Calls as MiniMax-M3 writes them: a mark in front of every tag, an element for each argument, elements inside it for
objects and lists.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="look">
    ]<]minimax[>[<at>the sky]<]minimax[>[</at>
    ]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>
"""

import re
from collections.abc import Mapping
from typing import Any

from pipeline.parsers.blocks import CallBlocks
from pipeline.parsers.events import Arguments, Begun
from pipeline.parsers.json_script import DEEPEST
from pipeline.parsers.script import Steps
from pipeline.parsers.typed_value import alternatives, json_value, quoted, types_of

MARK = "]<]minimax[>["
_OPEN, _CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
_CALL, _CALL_END = f"{MARK}<invoke name=", f"{MARK}</invoke>"
_ITEM = "item"  # what the elements of a list are called
_NAME = re.compile(r"[^/\s].*")
_EMPTY = {"array": "[]", "object": "{}"}
_NO_CONTAINER = frozenset({"string", "boolean", "null", "integer", "number"})  # those are written as elements


class MinimaxM3Calls(CallBlocks):
    """`functions`: parameter schemas by name."""

    markers = (MARK,)

    def __init__(self, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self._functions = functions

    @property
    def _marks(self) -> tuple[str, str, str]:
        return _OPEN, _CLOSE, _CALL

    def _call(self) -> Steps[bool]:
        head: list[str] = []
        if (yield from self._until(">", head.append, instead=("<", "\n"))) != ">":
            return False
        name = "".join(head).strip().strip("\"'")
        if not name:
            return False
        self._say(Begun(name))
        self._say(Arguments("{"))
        schema = self._functions.get(name)
        comma = ""
        while True:
            yield from self._blanks()
            if (yield from self._literal(_CALL_END)):
                self._say(Arguments("}"))
                return True
            key = yield from self._tag()
            if key is None:
                return False
            value = yield from self._element(key, _property(schema, key), 0)
            if value is None:
                return False
            self._say(Arguments(f"{comma}{quoted(key)}:{value}"))
            comma = ","

    def _tag(self) -> Steps[str | None]:
        """An opening tag's name."""
        if not (yield from self._literal(f"{MARK}<")):
            return None
        pieces: list[str] = []
        yield from self._until(">", pieces.append, instead=("<", "\n"))
        name = "".join(pieces)
        return name if _NAME.fullmatch(name) else None

    def _element(self, name: str, schema: Any, depth: int) -> Steps[str | None]:
        """What stands up to the end tag of `name`, as JSON: a text, or the elements in it."""
        text: list[str] = []
        members: list[tuple[str, str]] = []
        if depth > DEEPEST // 4:
            return None
        while (yield from self._before((MARK,), text.append)):
            if (yield from self._literal(f"{MARK}</{name}>")):
                return _joined("".join(text), members, schema)
            inner = yield from self._tag()
            if inner is None:
                return None
            below = _items(schema) if inner == _ITEM else _property(schema, inner)
            value = yield from self._element(inner, below, depth + 1)
            if value is None:
                return None
            members.append((inner, value))
        return None


def _joined(text: str, members: list[tuple[str, str]], schema: Any) -> str:
    types = types_of(schema)
    if members:
        if "array" in types or all(name == _ITEM for name, _ in members):
            return f"[{','.join(value for _, value in members)}]"
        return f"{{{','.join(f'{quoted(name)}:{value}' for name, value in members)}}}"
    if not text.strip() and "string" not in types:  # a list or object without elements
        for kind, empty in _EMPTY.items():
            if kind in types:
                return empty
    return json_value(text, types or _NO_CONTAINER)


def _property(schema: Any, name: str) -> Any:
    """The schema of a member, in any of the alternatives that `schema` has."""
    found = list(alternatives(schema))
    for one in found:
        properties = one.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    return next((one["additionalProperties"] for one in found if "additionalProperties" in one), None)


def _items(schema: Any) -> Any:
    return next((one["items"] for one in alternatives(schema) if "items" in one), None)
