"""Formats of calls besides the common ones: the same two calls in each, and nothing lost of what is none."""

import json
import lzma
import re
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import parsers
from pipeline.bundle import load_bundle
from pipeline.parsers.events import Arguments, Begun, Broken, CallEvent, Ended, Text
from pipeline.parsers.output import CallBegun, CallGrown, Output
from pipeline.parsers.thinking import KIMI_K3, MINIMAX_M3, Tags, prompt_end
from pipeline.template import ChatTemplate
from tests.pipeline.bundles import unpack_bundle
from tests.pipeline.test_parsers import FUNCTIONS, cut, read, split

DATA = Path(__file__).resolve().parents[1] / "data" / "golden"
A_LIST = '{"a":"the sky","n":3}'
K3 = '<|open|>call tool="{}" index="1"<|sep|>{}<|close|>call<|sep|>'
M3 = "]<]minimax[>["
V3 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
WRITTEN = {  # the calls f(a="the sky", n=3) and g() as each format has them
    "llama": '<|python_tag|>{"name": "f", "parameters": {"a": "the sky", "n": 3}}; {"name": "g", "parameters": {}}',
    "pythonic": "[f(a='the sky', n=3), g()]",
    "glm45_moe": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>the sky</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>"
    ),
    "glm47_moe": (
        "<tool_call>f<arg_key>a</arg_key><arg_value>the sky</arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"
        "</tool_call><tool_call>g</tool_call>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">the sky</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax_m3": (
        f'{M3}<tool_call>\n{M3}<invoke name="f">\n{M3}<a>the sky{M3}</a>\n{M3}<n>3{M3}</n>\n{M3}</invoke>\n'
        f'{M3}<invoke name="g">{M3}</invoke>\n{M3}</tool_call>'
    ),
    "kimik2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "the sky", "n": 3}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        "<|open|>tools<|sep|>"
        + K3.format(
            "f",
            '<|open|>argument key="a" type="string"<|sep|>the sky<|close|>argument<|sep|>'
            '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>',
        )
        + K3.format("g", "")
        + "<|close|>tools<|sep|>"
    ),
    "deepseek": V3.format(
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "the sky", "n": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
    ),
    "deepseek31": V3.format(
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "the sky", "n": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    ),
}
DSML = (
    '<D|block>\n<D|invoke name="f">\n<D|parameter name="a" string="true">the sky</D|parameter>\n'
    '<D|parameter name="n" string="false">3</D|parameter>\n</D|invoke>\n<D|invoke name="g">\n</D|invoke>\n</D|block>'
)
WRITTEN["deepseek32"] = DSML.replace("block", "function_calls").replace("D|", "｜DSML｜")
WRITTEN["deepseek_v4"] = DSML.replace("block", "tool_calls").replace("D|", "｜DSML｜")
WRITTEN["deepseek_v41"] = DSML.replace("block", "calls").replace("D|", "｜DSML｜ ")
OTHERS = sorted(WRITTEN)
TWO_CALLS = [Begun("f"), Arguments(A_LIST), Ended(), Begun("g"), Arguments("{}"), Ended()]


def calls_of(events: Iterable[CallEvent]) -> list[CallEvent]:
    return [event for event in events if not isinstance(event, Text)]


def test_every_format_is_tried() -> None:
    assert {*OTHERS, "qwen", "qwen_xml", "json"} == set(parsers._CALLS) - {"qwen_coder", "nemotron"}


@pytest.mark.parametrize("name", OTHERS)
def test_two_calls_of_every_format(name: str) -> None:
    text = f"Let me see.\n{WRITTEN[name]}"
    make = partial(parsers.call_parser, name, FUNCTIONS)
    assert calls_of(read(make, [text])) == TWO_CALLS
    assert read(make, [text])[0] == Text("Let me see.\n")
    assert calls_of(read(make, list(text))) == TWO_CALLS


@pytest.mark.parametrize("name", OTHERS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_no_format_depends_on_the_cut_or_loses_what_it_cannot_read(name: str, data: st.DataObject) -> None:
    """The calls with pieces left out, put twice, or cut off."""
    pieces = [piece for piece in re.split(r"([<>\n,:]|\"|\]|(?<=>)(?=<))", WRITTEN[name]) if piece]
    kept = data.draw(st.lists(st.integers(0, 6), min_size=len(pieces), max_size=len(pieces)))
    if data.draw(st.booleans()):
        kept = [max(1, one) for one in kept]
    text = "".join(piece * (0 if one == 0 else 2 if one == 6 else 1) for piece, one in zip(pieces, kept, strict=True))
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    make = partial(parsers.call_parser, name, FUNCTIONS)
    whole = read(make, [text])
    assert read(make, list(text)) == whole
    assert read(make, cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=9)))) == whole
    for event, after in pairwise(whole):
        if isinstance(event, Arguments) and after == Ended():
            assert isinstance(json.loads(event.text), dict)
    if not any(isinstance(event, Ended) for event in whole):
        shown = "".join(event.text for event in whole if isinstance(event, Text | Broken))
        assert without_blocks(shown) == without_blocks(text)


BLOCK_TAGS = re.compile(
    r"\s|</?minimax:tool_call>|\]<\]minimax\[>\[</?tool_call>|<\|tool_calls_section_(begin|end)\|>"
    r"|<\|(open|close)\|>tools<\|sep\|>|<｜tool▁calls▁(begin|end)｜>|</?｜DSML｜ ?(function_calls|tool_calls|calls)>"
)


def without_blocks(text: str) -> str:
    """What surrounds calls may vanish when there are none in it."""
    return BLOCK_TAGS.sub("", text)


RECORDED = [json.loads(line) for line in lzma.decompress((DATA / "calls.jsonl.xz").read_bytes()).splitlines()]


@pytest.mark.parametrize("name", sorted({case["format"] for case in RECORDED}))
def test_calls_that_another_program_finds(name: str) -> None:
    """Random arguments in every format: SMG's own wheel was asked what it finds."""
    cases = [case for case in RECORDED if case["format"] == name]
    assert len(cases) == 15
    for case in cases:
        make = partial(parsers.call_parser, name, case["functions"])
        for pieces in ([case["text"]], list(case["text"])):
            output = Output(None, make(), patience=None)
            found: list[list[Any]] = []
            for said in [said for piece in pieces for said in output.feed(piece)] + output.finish():
                match said:
                    case CallBegun(_, _, called):
                        found.append([called, ""])
                    case CallGrown(index, arguments):
                        found[index][1] += arguments
            assert [[called, json.loads(arguments)] for called, arguments in found] == case["calls"], case["text"]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return load_bundle(unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))).template


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(calls=st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=4), min_size=1, max_size=3))
def test_what_the_model_s_own_template_writes_is_read_back(qwen: ChatTemplate, calls: list[dict[str, Any]]) -> None:
    """The template shows a model its earlier calls as it was trained to write them."""
    asked = [{"role": "user", "content": "go"}]
    turn = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": call}} for call in calls]
    prompt = qwen.render(asked)
    whole = qwen.render([*asked, {"role": "assistant", "content": "", "tool_calls": turn}], add_generation_prompt=False)
    assert whole.startswith(prompt) and whole.endswith("<|im_end|>\n")
    events = read(partial(parsers.call_parser, "qwen", {}), [whole[len(prompt) :].removesuffix("<|im_end|>\n")])
    found = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    assert found == calls and sum(isinstance(event, Ended) for event in events) == len(calls)


def test_elements_in_elements() -> None:
    """Objects and lists of MiniMax-M3, by their schema where that says something."""
    inner = f"{M3}<item>1{M3}</item>{M3}<item>x{M3}</item>"
    text = (
        f'{M3}<tool_call>{M3}<invoke name="h">{M3}<list>{inner}{M3}</list>{M3}<at>{M3}<x>1{M3}</x>{M3}<y> 2 {M3}</y>'
        f"{M3}</at>{M3}<empty>{M3}</empty>{M3}</invoke>{M3}</tool_call>"
    )
    at = {"type": "object", "properties": {"y": {"type": "string"}}}
    schema: dict[str, Any] = {"properties": {"at": at, "list": {"type": "array"}}}
    found = read(lambda: parsers.call_parser("minimax_m3", {"h": schema}), [text])
    assert found == [Begun("h"), Arguments('{"list":[1,"x"],"at":{"x":1,"y":" 2 "},"empty":""}'), Ended()]


@pytest.mark.parametrize(
    ("schema", "element", "value"),
    [
        ({"type": "object"}, "", "{}"),
        ({"type": ["array", "null"]}, " ", "[]"),
        ({"type": ["array", "string"]}, "", '""'),
        (
            {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            f"{M3}<item>1{M3}</item>",
            '["1"]',
        ),
        ({"anyOf": [{"type": "null"}, {"properties": {"k": {"type": "string"}}}]}, f"{M3}<k>1{M3}</k>", '{"k":"1"}'),
        ({"type": "object", "additionalProperties": {"type": "string"}}, f"{M3}<a b>1{M3}</a b>", '{"a b":"1"}'),
        ({}, "[1, 2]", '"[1, 2]"'),
        ({}, "1.50", "1.50"),
    ],
)
def test_what_an_element_of_minimax_m3_is(schema: dict[str, Any], element: str, value: str) -> None:
    text = f'{M3}<tool_call>{M3}<invoke name="h">{M3}<x>{element}{M3}</x>{M3}</invoke>{M3}</tool_call>'
    functions = {"h": {"properties": {"x": schema}}}
    found = read(lambda: parsers.call_parser("minimax_m3", functions), [text])
    assert found == [Begun("h"), Arguments(f'{{"x":{value}}}'), Ended()]


NO_LISTS = ["[1, 2]", "[f]", "[f(1)]", "[f(**{})]", "[f(a=b)]", "[unknown(a=1)]", "[f(a=1), 2]", "[f(a='x]", "[]"]


@pytest.mark.parametrize("text", [*NO_LISTS, "see [1] (f(a=1))", "[f(a=1)}"])
def test_lists_that_call_nothing_are_text(text: str) -> None:
    events = read(lambda: parsers.call_parser("pythonic", FUNCTIONS), [text])
    assert calls_of(events) == [event for event in events if isinstance(event, Broken)]
    assert "".join(event.text for event in events if isinstance(event, Text | Broken)) == text


def test_python_values() -> None:
    text = "[f(a='it\\'s ]', n=[1, {'k': None}, True], x=-1.5)]"
    found = read(lambda: parsers.call_parser("pythonic", FUNCTIONS), list(text))
    assert found == [Begun("f"), Arguments('{"a":"it\'s ]","n":[1,{"k":null},true],"x":-1.5}'), Ended()]
    marked = read(lambda: parsers.call_parser("pythonic", FUNCTIONS), ["<|python_start|>[g()]<|python_end|>"])
    assert marked == [Begun("g"), Arguments("{}"), Ended()]


@pytest.mark.parametrize(
    ("tags", "text", "inside", "thought", "answer"),
    [
        (MINIMAX_M3, "<mm:think>hmm</mm:think>A", False, "hmm", "A"),
        (KIMI_K3, "hmm<|close|>think<|sep|><|open|>response<|sep|>A<|close|>response<|sep|>", True, "hmm", "A"),
        (KIMI_K3, "A<|close|>response<|sep|><|close|>message<|sep|>", False, "", "A"),
        (KIMI_K3, "<|open|>think<|sep|>hmm<|close|>think<|sep|><|open|>response<|sep|>A", False, "hmm", "A"),
    ],
)
def test_other_tags(tags: Tags, text: str, inside: bool, thought: str, answer: str) -> None:
    for cuts in ((), range(len(text))):
        assert split(text, cuts, inside=inside, tags=tags) == (thought, answer)
    assert prompt_end(f"x{tags.open}", tags=tags) is True
    assert prompt_end("x<|open|>response<|sep|>", tags=KIMI_K3) is False


# ---- which format


@pytest.mark.parametrize(
    ("model", "calls", "thinking"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen", "qwen3"),
        ("Qwen3-VL-30B-A3B-Thinking", "qwen", "qwen3_thinking"),
        ("qwen3.5-397b", "qwen_xml", "qwen3"),
        ("qwen3_5", "qwen_xml", "qwen3"),
        ("Qwen/Qwen3-Coder-30B", "qwen_xml", "qwen3"),
        ("Qwen2.5-VL-7B", "qwen", "qwen3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek", "deepseek_r1"),
        ("llava-1.5", "passthrough", "passthrough"),
        ("zai-org/GLM-4.5-Air", "glm45_moe", "glm45"),
        ("zai-org/GLM-4.7", "glm47_moe", "glm45"),
        ("glm5_next", "glm47_moe", "glm45"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax_m2", "minimax"),
        ("minimax_m3_vl", "minimax_m3", "minimax_m3"),
        ("moonshotai/Kimi-K2.5", "kimik2", "kimi_k25"),
        ("moonshotai/Kimi-K2-Thinking", "kimik2", "kimi_thinking"),
        ("kimi_k3", "kimi_k3", "kimi_k3"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek", "passthrough"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek31", "deepseek_v31"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek32", "deepseek_v31"),
        ("deepseek-ai/DeepSeek-V4-Pro", "deepseek_v4", "deepseek_v4"),
        ("deepseek_v41", "deepseek_v41", "deepseek_v4"),
        ("meta-llama/Llama-4-Scout", "pythonic", "passthrough"),
        ("meta-llama/Llama-3.2-11B-Vision", "llama", "passthrough"),
    ],
)
def test_a_model_s_name_tells_its_formats(model: str, calls: str, thinking: str) -> None:
    assert (parsers.call_format([model]), parsers.thinking_format([model])) == (calls, thinking)
    assert parsers.call_format([None, "", "json", model]) == "json"
    assert parsers.thinking_format(["passthrough", model]) == "passthrough"


def test_what_finds_nothing() -> None:
    assert parsers.call_parser("passthrough", FUNCTIONS) is None
