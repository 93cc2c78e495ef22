"""Calls as bare JSON: one object with `name` and `arguments` (or `parameters`), or an array of them.

What a model writes whose output the engine holds to a list of calls (`tool_choice: required`), and some models of
themselves.  An object counts only if it names a function of the request, so an answer in JSON stays an answer.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.parsers.events import Arguments, Begun, Broken, Ended
from pipeline.parsers.json_script import CallObjects, JsonScript
from pipeline.parsers.script import Steps

_PYTHON_TAG = "<|python_tag|>"


class JsonCalls(CallObjects):
    """`functions`: the request's, by name."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        super().__init__(functions)

    def _read(self) -> Steps[None]:
        while opening := (yield from self._before(self._before_calls(), self._pass)):
            self._mark()
            if opening != "{":
                self._take(len(opening))
            yield from self._calls(is_list=opening == "[")

    def _before_calls(self) -> tuple[str, ...]:
        return ("{", "[")

    def _calls(self, *, is_list: bool) -> Steps[None]:
        more = True
        while more:
            yield from self._blanks()
            whole, more = (yield from self._call()), False
            if whole and is_list:
                yield from self._blanks()
                more = yield from self._literal(",")
                whole = more or (yield from self._literal("]")) or (yield from self._peek()) == ""
            self._say(Ended() if whole else Broken(self._since_mark()))
            more = more and whole
            self._mark()


class LlamaCalls(JsonCalls):
    """Llama 3: such objects, with a token in front and semicolons between them."""

    markers = (_PYTHON_TAG,)

    def _before_calls(self) -> tuple[str, ...]:
        return (_PYTHON_TAG, *super()._before_calls())


class WholeArguments(JsonScript):
    """The whole output is the arguments of one function: the engine is held to their schema."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _read(self) -> Steps[None]:
        self._mark()
        yield from self._blanks()
        whole = (yield from self._peek()) == "{"
        if whole:
            self._say(Begun(self._name))
            whole = yield from self._value(lambda text: self._say(Arguments(text)))
        self._say(Ended() if whole else Broken(self._since_mark()))
        yield from self._rest(self._pass)
