"""Messages requests: what is accepted and refused, and what a chat template is given for them."""

import json
from typing import Any

import pytest

from pipeline.errors import GatewayError
from pipeline.plan import MediaPlan
from pipeline.protocols import messages

USER = [{"role": "user", "content": "hi"}]
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def plan(body: dict[str, Any], defaults: dict[str, Any] | None = None) -> MediaPlan:
    given = {"model": "m", "max_tokens": 9, "messages": USER, **body}
    return messages.plan_of(messages.read(json.dumps(given).encode()), defaults or {})


def refusal(body: dict[str, Any]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        plan(body)
    return caught.value


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "empty_array", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages[0].content"),
        ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
        ({"max_tokens": 2**32}, "integer_above_max_value", "max_tokens"),
        ({"max_tokens": None}, "invalid_type", "max_tokens"),
        ({"temperature": 1.1}, "decimal_above_max_value", "temperature"),
        ({"top_p": 0}, "decimal_below_min_value", "top_p"),
        ({"stop_sequences": [""]}, "invalid_value", "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 65}, "array_above_max_length", "stop_sequences"),
        ({"thinking": {"type": "perhaps"}}, "invalid_value", "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "missing_required_parameter", "thinking.budget_tokens"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking_budget_exceeds_max_tokens",
            "thinking.budget_tokens",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice_requires_tools", "tool_choice"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice_function_not_found",
            "tool_choice",
        ),
        ({"tools": [{"input_schema": {}}]}, "invalid_value", "tools[0]"),
        (user({"type": "bogus"}), "unsupported_content_part", "messages[0].content[0]"),
        (user({"type": "document", "source": PICTURE["source"]}), "unsupported_content_part", "messages[0].content[0]"),
        (user({"type": "tool_use", "id": "t", "name": "f"}), "unsupported_content_part", "messages[0].content[0]"),
        (
            user({"type": "image", "source": {"type": "file", "file_id": "f"}}),
            "unsupported_content_part",
            "messages[0].content[0].source",
        ),
        (user({"type": "image"}), "missing_required_parameter", "messages[0].content[0].source"),
        (
            user({"type": "image", "source": {"type": "url"}}),
            "missing_required_parameter",
            "messages[0].content[0].source.url",
        ),
        (user({"type": "text"}), "missing_required_parameter", "messages[0].content[0].text"),
        (user({"text": "x"}), "missing_required_parameter", "messages[0].content[0].type"),
        (user("bare"), "invalid_type", "messages[0].content[0]"),
        (
            user({"type": "tool_result", "content": "x"}),
            "missing_required_parameter",
            "messages[0].content[0].tool_use_id",
        ),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}),
            "unsupported_content_part",
            "messages[0].content[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [PICTURE]}]},
            "unsupported_content_part",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "system", "content": [PICTURE]}]},
            "unsupported_content_part",
            "messages[0].content[0]",
        ),
        ({"system": [PICTURE]}, "unsupported_content_part", "system[0]"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(fields)
    assert (error.status, error.code, error.param) == (400, code, param)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            user({"type": "image_url"}),
            'messages[0].content[0]: unsupported type "image_url" for gRPC backends (this API',
        ),
        (
            {"messages": [{"role": "assistant", "content": [PICTURE]}]},
            "(a message of the role assistant takes no media)",
        ),
        ({"system": [PICTURE]}, "(a message of the role system takes no media)"),
        (
            user({"type": "image", "source": {"type": "base64", "data": 5}}),
            "messages[0].content[0].source.data: Expected `str`",
        ),
        ({"thinking": {"type": "on"}}, "Invalid enum value 'on', expected one of adaptive, disabled, enabled"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "expected one of assistant, system, user"),
    ],
)
def test_why_it_is_refused(fields: dict[str, Any], why: str) -> None:
    assert why in refusal(fields).message


def test_max_tokens_is_required() -> None:
    with pytest.raises(GatewayError) as caught:
        messages.read(json.dumps({"model": "m", "messages": USER}).encode())
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "max_tokens")


def test_a_count_needs_no_max_tokens() -> None:
    prompt = messages.read_prompt(json.dumps({"model": "m", "messages": USER, "system": "s"}).encode())
    assert [turn["role"] for turn in messages.prompt_plan(prompt).messages] == ["system", "user"]


def test_parts_stay_in_the_written_order_and_payloads_are_views() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "http://h/a.png"}}
    found = plan(user({"type": "text", "text": "a"}, PICTURE, {"type": "text", "text": "b"}, url))
    (turn,) = found.messages
    assert [part["type"] for part in turn["content"]] == ["text", "image", "text", "image"]
    assert [(bytes(part.url), part.is_bare_base64) for part in found.parts] == [
        (b"AAAA", True),
        (b"http://h/a.png", False),
    ]
    assert all(isinstance(part.url, memoryview) for part in found.parts)


def test_tool_results_are_messages_of_their_own_with_their_pictures() -> None:
    turns = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "g"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}, PICTURE]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "done", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    found = plan({"messages": turns})
    asked, called, first, second, last = found.messages
    assert called["reasoning_content"] == "hm" and called["content"] == [{"type": "text", "text": "Wait."}]
    assert [call["function"] for call in called["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "g", "arguments": {}},
    ]
    assert (first["role"], first["tool_call_id"]) == ("tool", "t1")
    assert first["content"] == [{"type": "text", "text": "x"}, {"type": "image"}]
    assert (second["tool_call_id"], second["content"]) == ("t2", "done")
    assert last == {"role": "user", "content": [{"type": "text", "text": "And?"}]}
    assert len(found.parts) == 1 and asked["content"] == "go"


def test_empty_content_is_an_empty_turn() -> None:
    assert plan(user()).messages == [{"role": "user", "content": []}]


def test_sampling_defaults() -> None:
    bare = plan({}).sampling
    assert (bare.temperature, bare.top_p, bare.max_tokens, bare.stop) == (1.0, None, 9, ())
    workers = plan({"top_p": 0.5}, {"temperature": 0.7, "top_p": 0.8, "min_p": 0.1}).sampling
    assert (workers.temperature, workers.top_p, workers.min_p) == (0.7, 0.5, 0.1)
    assert plan({"stop_sequences": ["a", "b", "c", "d", "e"]}).sampling.stop == ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(("kind", "told"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_the_template_s_switch(kind: str, told: bool) -> None:
    thinking = {"type": kind, "budget_tokens": 5} if kind == "enabled" else {"type": kind}
    assert plan({"thinking": thinking}).template_variables == {"enable_thinking": told}
    assert plan({}).template_variables == {}


def test_tools_are_shown_without_those_of_another_s() -> None:
    tools = [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}},
        {"type": "bash_20250124", "name": "b"},
    ]
    shown = plan({"tools": tools}).template_variables["tools"]
    assert [tool["function"] for tool in shown] == [{"name": "f", "description": "d", "parameters": {"type": "object"}}]
