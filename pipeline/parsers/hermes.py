"""Calls in the Hermes format, which Qwen2.5 and most Qwen3 models write.

<tool_call>
{"name": "look", "arguments": {"at": "the sky"}}
</tool_call>
"""

from pipeline.parsers.events import Broken, Ended
from pipeline.parsers.json_script import CallObjects
from pipeline.parsers.script import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls(CallObjects):
    """Any function's name is taken: a model that makes one up is told so by whoever runs the calls."""

    markers = (OPEN, CLOSE)

    def __init__(self) -> None:
        super().__init__(None)

    def _read(self) -> Steps[None]:
        while (yield from self._until(OPEN, self._pass)):
            self._mark()
            yield from self._blanks()
            whole = yield from self._call()
            if whole:
                yield from self._blanks()
                whole = (yield from self._peek()) == "" or (yield from self._literal(CLOSE))
            self._say(Ended() if whole else Broken(OPEN + self._since_mark()))
