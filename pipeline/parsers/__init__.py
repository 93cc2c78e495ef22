"""What a model's output says besides text: calls of functions and reasoning, one format a file.

The names are SMG's.  Which is used for a model: the flag, else the worker's label, else what the model is called, else
`passthrough`, which finds nothing.  Everything here is pure and knows no API.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from pipeline.parsers.call_parser import CallParser
from pipeline.parsers.glm_calls import GlmCalls
from pipeline.parsers.headed_calls import Deepseek31Calls, DeepseekV3Calls, KimiK2Calls
from pipeline.parsers.hermes import HermesCalls
from pipeline.parsers.json_calls import JsonCalls, LlamaCalls
from pipeline.parsers.minimax_m3 import MinimaxM3Calls
from pipeline.parsers.pythonic import PythonicCalls
from pipeline.parsers.qwen_xml import QwenXmlCalls
from pipeline.parsers.tagged_calls import (
    DeepseekV4Calls,
    DeepseekV32Calls,
    DeepseekV41Calls,
    KimiK3Calls,
    MinimaxM2Calls,
)
from pipeline.parsers.thinking import KIMI_K3, MINIMAX_M3, THINK, Tags

PASSTHROUGH = "passthrough"
CallFormat = Literal[
    "qwen",
    "qwen_xml",
    "qwen_coder",
    "nemotron",
    "json",
    "llama",
    "pythonic",
    "glm45_moe",
    "glm47_moe",
    "minimax_m2",
    "minimax_m3",
    "kimik2",
    "kimi_k3",
    "deepseek",
    "deepseek31",
    "deepseek32",
    "deepseek_v4",
    "deepseek_v41",
    "passthrough",
]
ThinkingFormat = Literal[
    "qwen3",
    "qwen3_thinking",
    "deepseek_r1",
    "deepseek_v31",
    "deepseek_v4",
    "glm45",
    "minimax",
    "minimax_m3",
    "kimi_thinking",
    "kimi_k25",
    "kimi_k3",
    "passthrough",
]

_CALLS: Mapping[str, Callable[[Mapping[str, Any]], CallParser]] = {
    "qwen": lambda functions: HermesCalls(),
    "qwen_xml": QwenXmlCalls,
    "qwen_coder": QwenXmlCalls,
    "nemotron": QwenXmlCalls,
    "json": JsonCalls,
    "llama": LlamaCalls,
    "pythonic": PythonicCalls,
    "glm45_moe": GlmCalls,
    "glm47_moe": GlmCalls,
    "minimax_m2": MinimaxM2Calls,
    "minimax_m3": MinimaxM3Calls,
    "kimik2": lambda functions: KimiK2Calls(),
    "kimi_k3": KimiK3Calls,
    "deepseek": lambda functions: DeepseekV3Calls(),
    "deepseek31": lambda functions: Deepseek31Calls(),
    "deepseek32": DeepseekV32Calls,
    "deepseek_v4": DeepseekV4Calls,
    "deepseek_v41": DeepseekV41Calls,
}
_TAGS: Mapping[str, Tags] = {"minimax_m3": MINIMAX_M3, "kimi_k3": KIMI_K3}
# Formats whose output begins inside reasoning, unless the prompt shows that it does not.
_INSIDE = frozenset({"qwen3_thinking", "deepseek_r1", "minimax", "kimi_thinking"})

# Names of models, lower case, to formats: the first that is found decides.
_CALLS_BY_NAME = (
    (re.compile(r"qwen3[._][56]|qwen3.?coder"), "qwen_xml"),
    (re.compile(r"nemotron"), "nemotron"),
    (re.compile(r"qwen|hermes"), "qwen"),
    (re.compile(r"glm.?4[._]?[56]"), "glm45_moe"),
    (re.compile(r"glm.?(4[._]?7|5)"), "glm47_moe"),
    (re.compile(r"minimax.?m3"), "minimax_m3"),
    (re.compile(r"minimax.?m2"), "minimax_m2"),
    (re.compile(r"kimi.?k3"), "kimi_k3"),
    (re.compile(r"kimi.?k2"), "kimik2"),
    (re.compile(r"deepseek.?v?4[._]?1"), "deepseek_v41"),
    (re.compile(r"deepseek.?v?4"), "deepseek_v4"),
    (re.compile(r"deepseek.?v?3[._]?2"), "deepseek32"),
    (re.compile(r"deepseek.?v?3[._]?1"), "deepseek31"),
    (re.compile(r"deepseek.?(v?3|r1)"), "deepseek"),
    (re.compile(r"llama.?4"), "pythonic"),
    (re.compile(r"llama.?3"), "llama"),
)
_THINKING_BY_NAME = (
    (re.compile(r"deepseek.?r1"), "deepseek_r1"),
    (re.compile(r"qwen3.*thinking"), "qwen3_thinking"),
    (re.compile(r"qwen"), "qwen3"),
    (re.compile(r"deepseek.?v?3[._]?[12]"), "deepseek_v31"),
    (re.compile(r"deepseek.?v?4"), "deepseek_v4"),
    (re.compile(r"glm.?(4[._]?[567]|5)"), "glm45"),
    (re.compile(r"minimax.?m3"), "minimax_m3"),
    (re.compile(r"minimax.?m"), "minimax"),
    (re.compile(r"kimi.*thinking"), "kimi_thinking"),
    (re.compile(r"kimi.?k3"), "kimi_k3"),
    (re.compile(r"kimi.?k2[._]?5"), "kimi_k25"),
)


def call_parser(name: str, functions: Mapping[str, Any]) -> CallParser | None:
    """A parser for one output; None for a format in which nothing is found.  `functions`: parameter schemas by name."""
    make = _CALLS.get(name)
    return None if make is None else make(functions)


def thinking_tags(name: str) -> Tags:
    """What stands around reasoning in that format."""
    return _TAGS.get(name, THINK)


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
