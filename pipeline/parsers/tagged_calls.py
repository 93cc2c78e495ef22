"""Calls as tags with attributes, every argument a text between two tags: MiniMax-M2, DeepSeek from V3.2 on, Kimi-K3.

    <minimax:tool_call>
    <invoke name="look">
    <parameter name="at">the sky</parameter>
    </invoke>
    </minimax:tool_call>

The dialects differ in how tags are spelled and in whether an argument's tag tells its type.
"""

import html
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from pipeline.parsers.blocks import CallBlocks
from pipeline.parsers.events import Arguments, Begun
from pipeline.parsers.script import Steps
from pipeline.parsers.typed_value import ArgumentPieces, parameter_types, quoted

_ATTRIBUTE = re.compile(r'([a-z]+)="([^"]*)"')
_STRING: frozenset[str] = frozenset({"string"})
_ANY: frozenset[str] = frozenset()


class Dialect(msgspec.Struct, frozen=True):
    """Spellings.  `name`, `key`: attributes of a call's and of an argument's tag; `kind`: the attribute that tells an
    argument's type, `text`: its value for a string; without it the function's schema decides.
    """

    block: str
    block_end: str
    call: str
    call_end: str
    argument: str
    argument_end: str
    head_end: str = ">"
    name: str = "name"
    key: str = "name"
    kind: str = ""
    text: str = ""


MINIMAX_M2 = Dialect(
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    *("<invoke ", "</invoke>"),
    *("<parameter ", "</parameter>"),
)
DEEPSEEK_V4 = Dialect(
    *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    *("<｜DSML｜invoke ", "</｜DSML｜invoke>"),
    *("<｜DSML｜parameter ", "</｜DSML｜parameter>"),
    kind="string",
    text="true",
)
DEEPSEEK_V32 = msgspec.structs.replace(
    DEEPSEEK_V4, block="<｜DSML｜function_calls>", block_end="</｜DSML｜function_calls>"
)

DEEPSEEK_V41 = msgspec.structs.replace(
    DEEPSEEK_V4,
    block="<｜DSML｜ calls>",
    block_end="</｜DSML｜ calls>",
    call="<｜DSML｜ invoke ",
    call_end="</｜DSML｜ invoke>",
    argument="<｜DSML｜ parameter ",
    argument_end="</｜DSML｜ parameter>",
)
KIMI_K3 = Dialect(
    *("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    *("<|open|>call ", "<|close|>call<|sep|>"),
    *("<|open|>argument ", "<|close|>argument<|sep|>"),
    head_end="<|sep|>",
    name="tool",
    key="key",
    kind="type",
    text="string",
)


class TaggedCalls(CallBlocks):
    """A block of calls.  `functions`: parameter schemas by name."""

    dialect: ClassVar[Dialect]

    def __init__(self, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self._functions = functions

    @property
    def _marks(self) -> tuple[str, str, str]:
        return self.dialect.block, self.dialect.block_end, self.dialect.call

    def _call(self) -> Steps[bool]:
        dialect = self.dialect
        name = (yield from self._attributes()).get(dialect.name)
        if not name:
            return False
        self._say(Begun(name))
        self._say(Arguments("{"))
        comma = ""
        while True:
            yield from self._blanks()
            if (yield from self._literal(dialect.call_end)):
                self._say(Arguments("}"))
                return True
            if not (yield from self._literal(dialect.argument)):
                return False
            head = yield from self._attributes()
            key = head.get(dialect.key)
            if key is None:
                return False
            self._say(Arguments(f"{comma}{quoted(key)}:"))
            types = parameter_types(self._functions.get(name), key)
            if dialect.kind in head:
                types = _STRING if head[dialect.kind] == dialect.text else types - _STRING or _ANY
            if not (yield from self._argument(types)):
                return False
            comma = ","

    def _attributes(self) -> Steps[dict[str, str]]:
        """To the end of a tag; empty for what is none."""
        pieces: list[str] = []
        end = self.dialect.head_end
        if (yield from self._until(end, pieces.append, instead=("\n",))) != end:
            return {}
        return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall("".join(pieces))}

    def _argument(self, types: frozenset[str]) -> Steps[bool]:
        pieces = ArgumentPieces(types, lambda text: self._say(Arguments(text)))
        if not (yield from self._until(self.dialect.argument_end, pieces.add)):
            return False
        pieces.close()
        return True


class MinimaxM2Calls(TaggedCalls):
    dialect = MINIMAX_M2
    markers = (MINIMAX_M2.block, MINIMAX_M2.block_end)


class DeepseekV4Calls(TaggedCalls):
    dialect = DEEPSEEK_V4
    markers = ("｜DSML｜",)


class DeepseekV32Calls(TaggedCalls):
    dialect = DEEPSEEK_V32
    markers = ("｜DSML｜",)


class DeepseekV41Calls(TaggedCalls):
    dialect = DEEPSEEK_V41
    markers = ("｜DSML｜",)


class KimiK3Calls(TaggedCalls):
    dialect = KIMI_K3
    markers = ("<|open|>", "<|close|>", "<|sep|>")
