"""Calls whose name stands in front of JSON arguments, between tokens made for that: Kimi-K2, DeepSeek V3 and V3.1.

<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "the sky"}
<|tool_call_end|><|tool_calls_section_end|>
"""

import re
from typing import ClassVar

import msgspec

from pipeline.parsers.blocks import CallBlocks
from pipeline.parsers.events import Arguments, Begun
from pipeline.parsers.json_script import JsonScript
from pipeline.parsers.script import Steps


class Dialect(msgspec.Struct, frozen=True):
    """Tokens.  `name`: what of the text in front of the arguments is the function's name."""

    block: str
    block_end: str
    call: str
    head_end: str
    call_end: str
    name: str
    tail: str = ""


class HeadedCalls(CallBlocks, JsonScript):
    """A block of calls."""

    dialect: ClassVar[Dialect]

    @property
    def _marks(self) -> tuple[str, str, str]:
        return self.dialect.block, self.dialect.block_end, self.dialect.call

    def _call(self) -> Steps[bool]:
        dialect = self.dialect
        head: list[str] = []
        if not (yield from self._until(dialect.head_end, head.append)):
            return False
        name = re.fullmatch(dialect.name, "".join(head))
        yield from self._blanks()
        if name is None or (yield from self._peek()) != "{":
            return False
        self._say(Begun(name[1]))
        if not (yield from self._value(lambda text: self._say(Arguments(text)))):
            return False
        yield from self._blanks()
        if dialect.tail and not (yield from self._literal(dialect.tail)):
            return False
        return (yield from self._peek()) == "" or (yield from self._literal(dialect.call_end))


class KimiK2Calls(HeadedCalls):
    dialect = Dialect(
        block="<|tool_calls_section_begin|>",
        block_end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>",
        head_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        name=r"\s*(?:functions\.)?([^\s:]+)(?::\d+)?\s*",
    )
    markers = (dialect.block, dialect.block_end, dialect.call, dialect.head_end, dialect.call_end)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_SEP, _DEEPSEEK_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class Deepseek31Calls(HeadedCalls):
    dialect = Dialect(*_DEEPSEEK, head_end=_DEEPSEEK_SEP, call_end=_DEEPSEEK_END, name=r"\s*(\S+)\s*")
    markers = (*_DEEPSEEK, _DEEPSEEK_SEP, _DEEPSEEK_END)


class DeepseekV3Calls(HeadedCalls):
    """V3 and R1: the arguments stand in a code fence."""

    dialect = Dialect(
        *_DEEPSEEK,
        head_end="\n```json\n",
        call_end=_DEEPSEEK_END,
        name=rf"\s*function{re.escape(_DEEPSEEK_SEP)}(\S+)\s*",
        tail="```",
    )
    markers = Deepseek31Calls.markers
