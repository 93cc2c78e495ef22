"""Responses requests: what is accepted and refused, and what a chat template is given for their items."""

import json
from typing import Any

import msgspec
import pytest

from pipeline.errors import GatewayError
from pipeline.plan import MediaPlan
from pipeline.protocols import responses
from pipeline.protocols.responses import Item

PICTURE = {"type": "input_image", "image_url": "http://h/a.png", "detail": "low"}


def plan(body: dict[str, Any], history: list[Item] | None = None, defaults: dict[str, Any] | None = None) -> MediaPlan:
    given = {"model": "m", "input": "hi", **body}
    return responses.plan_of(responses.read(json.dumps(given).encode()), history or [], defaults or {})


def refusal(body: dict[str, Any]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        plan(body)
    return caught.value


def user(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "input_items_empty", "input"),
        ({"input": None}, "invalid_type", "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"content": "x"}]}, "missing_required_parameter", "input[0].role"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "unsupported_content_part", "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_content_part", "input[0]"),
        (user({"type": "input_file", "file_data": "x"}), "unsupported_content_part", "input[0].content[0]"),
        (user({"type": "input_image", "file_id": "f"}), "unsupported_content_part", "input[0].content[0].file_id"),
        (
            user({"type": "input_image", "image_url": {"url": "x"}}),
            "unsupported_content_part",
            "input[0].content[0].image_url",
        ),
        (user({"type": "image_url"}), "unsupported_content_part", "input[0].content[0]"),
        (user({"type": "refusal", "refusal": "no"}), "unsupported_content_part", "input[0].content[0]"),
        (user({"type": "input_text"}), "missing_required_parameter", "input[0].content[0].text"),
        (user({"text": "x"}), "missing_required_parameter", "input[0].content[0].type"),
        ({"input": [{"role": "assistant", "content": [PICTURE]}]}, "unsupported_content_part", "input[0].content[0]"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "missing_required_parameter", "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "process_messages_failed", None),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "missing_required_parameter",
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [PICTURE]}]},
            "convert_request_failed",
            "input[0].output",
        ),
        ({"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
        ({"temperature": 2.1}, "decimal_above_max_value", "temperature"),
        ({"top_p": 0}, "decimal_below_min_value", "top_p"),
        ({"background": True, "stream": True}, "unsupported_parameter", "background"),
        ({"conversation": "c", "previous_response_id": "r"}, "mutually_exclusive_parameters", "conversation"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"top_logprobs": 2, "tools": [{"type": "function", "name": "f"}]}, "unsupported_parameter", "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice_requires_tools", "tool_choice"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice_function_not_found",
            "tool_choice",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "invalid_value", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "missing_required_parameter", "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], code: str, param: str | None) -> None:
    error = refusal(fields)
    assert (error.status, error.code, error.param) == (400, code, param)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "input_image"}, "(input[0].content[0].image_url is missing)"),
        ({"type": "input_image", "image_url": {"url": "x"}}, "(input[0].content[0].image_url must be a string,"),
        ({"type": "input_image", "image_url": None}, "(input[0].content[0].image_url must be a string,"),
        ({"type": "input_image", "file_id": "f"}, "(files are not kept here: give image_url,"),
        ({"type": "image_url", "image_url": {"url": "x"}}, '(this API calls it "input_image")'),
    ],
)
def test_a_picture_that_cannot_be_read_is_told_by_its_member(part: dict[str, Any], why: str) -> None:
    assert why in refusal(user(part)).message


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"input": [{"type": "input_text", "text": "hi"}]}, "(it belongs into the `content` of a message)"),
        ({"input": [PICTURE]}, "(it belongs into the `content` of a message)"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "; here it stands beside the type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "expected one of assistant, developer, system, user"),
    ],
)
def test_what_another_api_would_take_is_told_so(fields: dict[str, Any], why: str) -> None:
    assert refusal(fields).message.endswith(why)


def test_a_picture_in_an_assistant_s_turn_is_told_so() -> None:
    error = refusal({"input": [{"role": "assistant", "content": [PICTURE]}]})
    assert error.message.endswith("(a message of the role assistant takes no media)")


def test_a_text_is_a_user_s_turn_behind_the_instructions() -> None:
    found = plan({"instructions": "Be brief"})
    assert found.messages == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hi"}]


def test_parts_stay_in_the_written_order() -> None:
    found = plan(user({"type": "input_text", "text": "a"}, PICTURE, {"type": "input_text", "text": "b"}, PICTURE))
    assert [part["type"] for part in found.messages[0]["content"]] == ["text", "image", "text", "image"]
    assert [bytes(part.url) for part in found.parts] == [b"http://h/a.png"] * 2
    assert all(isinstance(part.url, memoryview) for part in found.parts)


def test_a_turn_of_the_assistant_is_put_together() -> None:
    items = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "function_call", "call_id": "c3", "name": "h", "arguments": "{}"},
    ]
    system, asked, turn, first, second, other = plan({"input": items}).messages
    assert (system["role"], asked["content"]) == ("system", "go")
    assert turn["reasoning_content"] == "hm" and turn["content"] == [{"type": "text", "text": "Wait."}]
    assert [call["function"] for call in turn["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "g", "arguments": {}},
    ]
    assert [(one["role"], one["tool_call_id"]) for one in (first, second)] == [("tool", "c1"), ("tool", "c2")]
    assert second["content"] == [{"type": "text", "text": "y"}]
    assert [call["id"] for call in other["tool_calls"]] == ["c3"]


def test_an_assistant_s_turn_always_has_content() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    found = plan({"input": [call]})
    assert found.messages[0]["content"] == ""


def test_two_answers_in_a_row_stay_two() -> None:
    found = plan({"input": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]})
    assert [turn["content"] for turn in found.messages] == ["a", "b"]


def test_history_comes_first_and_instructions_before_it() -> None:
    history = [Item(role="user", content="one"), Item(role="assistant", content="two")]
    found = plan({"input": "three", "instructions": "i"}, history)
    assert [turn["content"] for turn in found.messages] == ["i", "one", "two", "three"]


def test_what_is_kept_is_read_again() -> None:
    body = user(PICTURE, {"type": "input_text", "text": "a", "unknown": 1})
    items = responses.read(json.dumps({"model": "m", **body}).encode()).items
    kept = msgspec.json.encode(items)
    again = msgspec.json.decode(kept, type=list[Item])
    assert plan({"input": "x"}, again).parts[0].url == b"http://h/a.png"
    assert b"null" not in kept


def test_sampling_formats_and_template_variables() -> None:
    bare = plan({}).sampling
    assert (bare.temperature, bare.top_p, bare.max_tokens, bare.constraint) == (1.0, None, None, None)
    assert plan({}, defaults={"temperature": 0.7, "top_k": 20}).sampling.temperature == 0.7
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    held = plan({"text": {"format": schema}}).sampling.constraint
    assert held is not None and (held.kind, held.text) == ("json_schema", '{"type":"object"}')
    assert plan({"text": {"format": {"type": "text"}}}).sampling.constraint is None
    shown = plan({"tools": [{**FUNCTION, "description": "d"}], "reasoning": {"effort": "none"}}).template_variables
    assert shown["tools"][0]["function"] == {"name": "f", "description": "d", "parameters": {}}
    assert (shown["reasoning_effort"], shown["enable_thinking"]) == ("none", False)
