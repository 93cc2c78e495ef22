"""`POST /parse/function_call` and `/parse/reasoning`: the parsers of answers on a text of the client's own.  No engine
and no model is asked.  Shapes as in SMG.
"""

import asyncio
from typing import Any, get_args

import msgspec
from aiohttp import web

from pipeline import parsers
from pipeline.parsers.output import CallBegun, CallGrown, Output, Said, Words
from pipeline.parsers.thinking import ThinkingSplitter, Thought
from pipeline.protocols.chat_tools import ToolForm, tool_use
from pipeline.protocols.generation import Stations
from pipeline.protocols.http import json_reply, read_json
from pipeline.ticket import Ticket

BODY_LIMIT = 1 << 20
TURN_CHARACTERS = 4096  # read between two turns of the loop


class ParseCalls(msgspec.Struct, frozen=True):
    text: str
    tools: list[ToolForm]
    tool_call_parser: str


class ParseReasoning(msgspec.Struct, frozen=True):
    text: str
    reasoning_parser: str


_CALLS = msgspec.json.Decoder(ParseCalls)
_REASONING = msgspec.json.Decoder(ParseReasoning)


class ParseRoutes:
    def __init__(self, stations: Stations) -> None:
        self._stations = stations

    async def function_call(self, request: web.Request, ticket: Ticket) -> web.Response:
        """Calls of functions and the text around them.  `tools` tell the types of arguments in formats that do not; a
        function that is not among them is a call all the same.
        """
        asked = await read_json(request, self._stations.bodies, BODY_LIMIT, _CALLS)
        if asked.tool_call_parser not in get_args(parsers.CallFormat):
            return _unknown("tool parser", asked.tool_call_parser)
        schemas = {function.name: function.parameters for function in tool_use(asked.tools, "auto").callable}
        output = Output(None, parsers.call_parser(asked.tool_call_parser, schemas), patience=None)
        said = await _read(output, asked.text)
        return json_reply({"remaining_text": _words(said), "tool_calls": _calls(said), "success": True})

    async def reasoning(self, request: web.Request, ticket: Ticket) -> web.Response:
        asked = await read_json(request, self._stations.bodies, BODY_LIMIT, _REASONING)
        if asked.reasoning_parser not in get_args(parsers.ThinkingFormat):
            return _unknown("reasoning parser", asked.reasoning_parser)
        said = await _read(Output(_splitter(asked.reasoning_parser), None), asked.text)
        thoughts = "".join(one.text for one in said if isinstance(one, Thought))
        return json_reply({"normal_text": _words(said), "reasoning_text": thoughts, "success": True})


def _splitter(thinking_format: str) -> ThinkingSplitter | None:
    if thinking_format == parsers.PASSTHROUGH:
        return None
    inside = parsers.begins_inside(thinking_format, None)
    return ThinkingSplitter(inside=inside, tags=parsers.thinking_tags(thinking_format))


async def _read(output: Output, text: str) -> list[Said]:
    """All that a text says, read in pieces so that others have their turn."""
    found: list[Said] = []
    for begin in range(0, len(text), TURN_CHARACTERS):
        found += output.feed(text[begin : begin + TURN_CHARACTERS])
        await asyncio.sleep(0)
    return found + output.finish()


def _words(said: list[Said]) -> str:
    return "".join(one.text for one in said if isinstance(one, Words))


def _calls(said: list[Said]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for one in said:
        match one:
            case CallBegun(_, _, name):
                calls.append({"name": name, "arguments": ""})
            case CallGrown(index, arguments):
                calls[index]["arguments"] += arguments
    return [{"function": call} for call in calls]


def _unknown(what: str, name: str) -> web.Response:
    """SMG's body for these routes, with a code as everywhere."""
    code = "invalid_value"
    told = {"error": f"Unknown {what}: {name[:80]}", "success": False, "code": code}
    return json_reply(told, status=400, headers={"X-SMG-Error-Code": code})
