"""Calls as Qwen3-Coder, Qwen3.5 and Nemotron write them: tags, every argument as plain text.

<tool_call>
<function=look>
<parameter=at>
the sky
</parameter>
</function>
</tool_call>
"""

from collections.abc import Mapping
from typing import Any

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.events import Arguments, Begun, Broken, Ended
from pipeline.parsers.script import Steps
from pipeline.parsers.typed_value import ArgumentPieces, parameter_types, quoted

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class QwenXmlCalls(CallParser):
    """`functions`: parameter schemas by name.  The outer tag may be missing: these models forget it now and then."""

    markers = (OPEN, CLOSE)

    def __init__(self, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self._functions = functions

    def _read(self) -> Steps[None]:
        while opening := (yield from self._before((OPEN, _FUNCTION), self._pass)):
            self._mark()
            if opening == OPEN:
                self._take(len(OPEN))
                yield from self._blanks()
            whole = yield from self._call()
            if whole and opening == OPEN:
                yield from self._blanks()
                whole = (yield from self._peek()) == "" or (yield from self._literal(CLOSE))
            self._say(Ended() if whole else Broken(self._since_mark()))

    def _call(self) -> Steps[bool]:
        if not (yield from self._literal(_FUNCTION)):
            return False
        name = yield from self._name()
        if not name:
            return False
        self._say(Begun(name))
        self._say(Arguments("{"))
        count = 0
        while True:
            yield from self._blanks()
            if (yield from self._literal(_FUNCTION_END)):
                self._say(Arguments("}"))
                return True
            if not (yield from self._literal(_PARAMETER)):
                return False
            parameter = yield from self._name()
            if not parameter:
                return False
            self._say(Arguments(("," if count else "") + quoted(parameter) + ":"))
            if not (yield from self._argument(parameter_types(self._functions.get(name), parameter))):
                return False
            count += 1

    def _name(self) -> Steps[str]:
        """Up to the `>`; "" for what is no name."""
        pieces: list[str] = []
        if not (yield from self._until(">", pieces.append, instead=("<", "\n"))).startswith(">"):
            return ""
        return "".join(pieces).strip()

    def _argument(self, types: frozenset[str]) -> Steps[bool]:
        """One value, without the line breaks next to its tags; a text is told as it arrives."""
        yield from self._literal("\n")
        pieces = ArgumentPieces(types, lambda text: self._say(Arguments(text)))
        if not (yield from self._until(_PARAMETER_END, pieces.add, instead=("\n" + _PARAMETER_END,))):
            return False
        pieces.close()
        return True
