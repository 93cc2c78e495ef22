"""Calls as GLM-4.5 to GLM-5 write them: a name, then keys and values in tags of their own.

    <tool_call>look
    <arg_key>at</arg_key>
    <arg_value>the sky</arg_value>
    </tool_call>

Newer models leave the line breaks out.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.events import Arguments, Begun, Broken, Ended
from pipeline.parsers.script import Steps
from pipeline.parsers.typed_value import ArgumentPieces, parameter_types, quoted

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmCalls(CallParser):
    """`functions`: parameter schemas by name."""

    markers = (OPEN, CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def __init__(self, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self._functions = functions

    def _read(self) -> Steps[None]:
        while (yield from self._before((OPEN,), self._pass)):
            self._mark()
            self._take(len(OPEN))
            whole = yield from self._call()
            self._say(Ended() if whole else Broken(self._since_mark()))

    def _call(self) -> Steps[bool]:
        name = yield from self._name()
        if not name:
            return False
        self._say(Begun(name))
        self._say(Arguments("{"))
        comma = ""
        while True:
            yield from self._blanks()
            if (yield from self._literal(CLOSE)):
                self._say(Arguments("}"))
                return True
            key: list[str] = []
            if not (yield from self._literal(_KEY)) or not (yield from self._until(_KEY_END, key.append)):
                return False
            yield from self._blanks()
            if not (yield from self._literal(_VALUE)):
                return False
            parameter = "".join(key).strip()
            self._say(Arguments(f"{comma}{quoted(parameter)}:"))
            types = parameter_types(self._functions.get(name), parameter)
            pieces = ArgumentPieces(types, lambda text: self._say(Arguments(text)))
            if not (yield from self._until(_VALUE_END, pieces.add)):
                return False
            pieces.close()
            comma = ","

    def _name(self) -> Steps[str]:
        """Up to the line's end or the next tag; "" for what is no name."""
        pieces: list[str] = []
        yield from self._blanks()
        if not (yield from self._before(("<", "\n"), pieces.append)):
            return ""
        name = "".join(pieces).strip()
        return name if name.isprintable() and " " not in name else ""
