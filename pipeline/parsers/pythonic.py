"""Calls as a Python list, which Llama 4 writes: `[look(at="the sky", days=[1, 2]), wait()]`.

A list is read to its end before anything is said of it: only then it is sure that it is one.
"""

import ast
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.events import Arguments, Begun, Broken, Ended
from pipeline.parsers.script import Steps

_START, _END = "<|python_start|>", "<|python_end|>"
_UP_TO_A_SIGN = re.compile(r"[^\[\](){}'\"]*")
_UP_TO_A_QUOTE = re.compile(r"[^'\"\\]*")
_CLOSES = {"[": "]", "(": ")", "{": "}"}
_LONGEST = 1 << 20  # characters of a list


class PythonicCalls(CallParser):
    """`functions`: the request's, by name; a list that calls anything else is text."""

    markers = (_START, _END)

    def __init__(self, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self._functions = functions

    def _read(self) -> Steps[None]:
        while opening := (yield from self._before((_START, "["), self._pass)):
            self._mark()
            if opening == _START:
                self._take(len(_START))
                yield from self._blanks()
            calls = None
            if (yield from self._peek()) == "[":
                calls = self._calls((yield from self._list()))
            if calls is None:
                self._say(Broken(self._since_mark()))
                continue
            for name, arguments in calls:
                self._say(Begun(name))
                self._say(Arguments(arguments))
                self._say(Ended())
            if opening == _START:
                yield from self._literal(_END)

    def _list(self) -> Steps[str]:
        """A bracket and what is in it; shorter when the text ends or brackets do not match."""
        closers = ["]"]
        pieces = [self._take(1)]
        size = 0
        while closers and size < _LONGEST:
            pieces.append((yield from self._run(_UP_TO_A_SIGN)))
            sign = yield from self._peek()
            if not sign:
                break
            pieces.append(self._take(1))
            if sign in _CLOSES:
                closers.append(_CLOSES[sign])
            elif sign in "'\"":
                pieces.append((yield from self._quoted(sign)))
            elif closers.pop() != sign:
                break
            size += len(pieces[-1]) + len(pieces[-2])
        return "".join(pieces)

    def _quoted(self, quote: str) -> Steps[str]:
        pieces = []
        while True:
            pieces.append((yield from self._run(_UP_TO_A_QUOTE)))
            sign = yield from self._peek()
            if not sign:
                return "".join(pieces)
            pieces.append(self._take(1))
            if sign == quote:
                return "".join(pieces)
            if sign == "\\" and (yield from self._peek()):
                pieces.append(self._take(1))

    def _calls(self, text: str) -> list[tuple[str, str]] | None:
        try:
            parsed = ast.parse(text, mode="eval").body
            if not isinstance(parsed, ast.List) or not parsed.elts:
                return None
            return [self._one(element) for element in parsed.elts]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None

    def _one(self, element: ast.expr) -> tuple[str, str]:
        """Raises ValueError for what calls no function of the request with literal keyword arguments."""
        if not isinstance(element, ast.Call) or element.args:
            raise ValueError("no call with keywords")
        name = ast.unparse(element.func)
        if name not in self._functions:
            raise ValueError("no function of the request")
        arguments = {}
        for keyword in element.keywords:
            if keyword.arg is None:
                raise ValueError("a mapping instead of keywords")
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        return name, msgspec.json.encode(arguments).decode()
