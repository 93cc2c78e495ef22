"""What a model's output says besides text: calls of functions and reasoning, one format a file.

The names are SMG's.  Which is used for a model: the flag, else the worker's label, else what the model is called, else
`passthrough`, which finds nothing.  Everything here is pure and knows no API.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.hermes import HermesCalls
from pipeline.parsers.json_calls import JsonCalls
from pipeline.parsers.qwen_xml import QwenXmlCalls

PASSTHROUGH = "passthrough"
CallFormat = Literal["qwen", "qwen_xml", "qwen_coder", "nemotron", "json", "passthrough"]
ThinkingFormat = Literal[
    "qwen3", "qwen3_thinking", "deepseek_r1", "deepseek_v31", "glm45", "minimax", "kimi_thinking", "passthrough"
]

_CALLS: Mapping[str, Callable[[Mapping[str, Any]], CallParser]] = {
    "qwen": lambda functions: HermesCalls(),
    "qwen_xml": QwenXmlCalls,
    "qwen_coder": QwenXmlCalls,
    "nemotron": QwenXmlCalls,
    "json": JsonCalls,
}
# Formats whose output begins inside reasoning, unless the prompt shows that it does not.
_INSIDE = frozenset({"qwen3_thinking", "deepseek_r1", "minimax", "kimi_thinking"})

# Names of models, lower case, to formats: the first that is found decides.
_CALLS_BY_NAME = (
    (re.compile(r"qwen3[._][56]|qwen3.?coder"), "qwen_xml"),
    (re.compile(r"nemotron"), "nemotron"),
    (re.compile(r"qwen"), "qwen"),
)
_THINKING_BY_NAME = (
    (re.compile(r"deepseek.?r1"), "deepseek_r1"),
    (re.compile(r"qwen3.*thinking"), "qwen3_thinking"),
    (re.compile(r"qwen"), "qwen3"),
    (re.compile(r"deepseek.?v?(3[._]?[12]|4)"), "deepseek_v31"),
    (re.compile(r"glm.?(4[._]?[567]|5)"), "glm45"),
    (re.compile(r"minimax.?m"), "minimax"),
    (re.compile(r"kimi.*thinking"), "kimi_thinking"),
)


def call_parser(name: str, functions: Mapping[str, Any]) -> CallParser | None:
    """A parser for one output; None for a format in which nothing is found.  `functions`: parameter schemas by name."""
    make = _CALLS.get(name)
    return None if make is None else make(functions)


def begins_inside(thinking: str, prompt_ends_inside: bool | None) -> bool:
    """Whether the output begins inside reasoning: as the prompt shows, else as the format has it."""
    return thinking in _INSIDE if prompt_ends_inside is None else prompt_ends_inside


def call_format(names: Iterable[str | None]) -> str:
    """The format of a model that goes by these names, the most telling first; a format's own name is one too."""
    return _chosen(names, get_args(CallFormat), _CALLS_BY_NAME)


def thinking_format(names: Iterable[str | None]) -> str:
    """The same for reasoning."""
    return _chosen(names, get_args(ThinkingFormat), _THINKING_BY_NAME)


def _chosen(names: Iterable[str | None], formats: tuple[str, ...], patterns: Any) -> str:
    for name in names:
        if not name:
            continue
        if name in formats:
            return name
        for pattern, found in patterns:
            if pattern.search(name.lower()):
                return str(found)
    return PASSTHROUGH
