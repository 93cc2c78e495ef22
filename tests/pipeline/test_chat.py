"""Chat requests: what the recorded gateway accepts and refuses, by status, code and parameter."""

import json
from typing import Any

import pytest

from engines.base import Modality
from pipeline.errors import GatewayError
from pipeline.plan import MediaPlan
from pipeline.protocols import chat

USER = [{"role": "user", "content": "hi"}]
F = {"type": "function", "function": {"name": "f"}}


def plan(body: dict[str, Any], defaults: dict[str, Any] | None = None) -> MediaPlan:
    return chat.plan_of(chat.read(json.dumps(body).encode()), defaults or {})


def refusal(body: dict[str, Any] | bytes) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        if isinstance(body, bytes):
            chat.read(body)
        else:
            plan({"model": "m", "messages": USER, **body})
    return caught.value


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "empty_array", "messages"),
        ({"messages": [{"role": "bogus", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "missing_required_parameter", "messages[0].tool_call_id"),
        ({"temperature": 3}, "decimal_above_max_value", "temperature"),
        ({"temperature": -1}, "decimal_below_min_value", "temperature"),
        ({"top_p": 0}, "decimal_below_min_value", "top_p"),
        ({"n": 11}, "integer_above_max_value", "n"),
        ({"n": 0}, "integer_below_min_value", "n"),
        ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
        ({"max_tokens": "a"}, "invalid_type", "max_tokens"),
        ({"max_tokens": 2**32}, "integer_above_max_value", "max_tokens"),  # no engine's message holds it
        ({"max_completion_tokens": 2**32}, "integer_above_max_value", "max_completion_tokens"),
        ({"min_tokens": 2**32}, "integer_above_max_value", "min_tokens"),
        ({"top_k": 2**32}, "integer_above_max_value", "top_k"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "array_above_max_length", "stop"),
        ({"stop": [""]}, "invalid_value", "stop[0]"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"top_logprobs": 3}, "top_logprobs_requires_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options_requires_stream", "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
            "invalid_value",
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "invalid_value", "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "invalid_value", "ebnf"),
        ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
        ({"tool_choice": "required"}, "tool_choice_requires_tools", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice_requires_tools", "tool_choice"),
        ({"function_call": {"name": "f"}}, "tool_choice_requires_tools", "function_call"),
        ({"tools": [F], "tool_choice": {"function": {"name": "g"}}}, "tool_choice_function_not_found", "tool_choice"),
        ({"tools": [F], "tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "custom"}}, "invalid_value", "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice"),
        ({"tools": [F], "tool_choice": 5}, "invalid_type", "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [F, {"type": "function"}]}, "missing_required_parameter", "tools[1].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_value", "tools[0]"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "invalid_type", "functions[0].parameters"),
        (
            {
                "tools": [F],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            },
            "tool_choice_function_not_found",
            "tool_choice",
        ),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "decimal_above_max_value", "logit_bias[...]"),
        ({"min_tokens": 9, "max_tokens": 8}, "integer_above_max_value", "min_tokens"),
        ({"seed": 1.5}, "invalid_type", "seed"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, Any], code: str, param: str | None) -> None:
    error = refusal(fields)
    assert (error.status, error.code, error.param) == (400, code, param)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{nope", "invalid_json", None),
        (b"", "invalid_json", None),
        (b'{"model": "\xff", "messages": []}', "invalid_json", None),
        (b'{"model": "m"}', "missing_required_parameter", "messages"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', "missing_required_parameter", "model"),
        (b"[]", "invalid_type", None),
        (b'{"model": "m", "messages": [{"role": "user", "tool_calls": [{"x": ' + b"[" * 100_000, "invalid_json", None),
    ],
)
def test_bodies_that_do_not_parse(body: bytes, code: str, param: str | None) -> None:
    error = refusal(body)
    assert (error.status, error.code, error.param) == (400, code, param)


def test_words_that_are_allowed_are_told() -> None:
    error = refusal({"messages": [{"role": "human", "content": "hi"}]})
    assert error.message == (
        "Invalid JSON data: messages[0].role: Invalid enum value 'human', "
        "expected one of assistant, developer, function, system, tool, user"
    )


@pytest.mark.parametrize("at", [0, 1, 65_534, 65_535, 65_536, 65_537, 131_071, 199_998])
def test_an_escape_is_found_anywhere_in_a_long_url(at: int) -> None:
    """It is looked for in pieces; JavaScript writes `\\/`, which is a slash."""
    url = b"a" * at + b"\\/" + b"b" * (200_000 - at - 2)
    content = b'[{"type": "image_url", "image_url": {"url": "URL"}}]'
    body = b'{"model": "m", "messages": [{"role": "user", "content": ' + content + b"}]}"
    (part,) = chat.plan_of(chat.read(body.replace(b"URL", url)), {}).parts
    assert bytes(part.url) == url.replace(b"\\/", b"/")
    (part,) = chat.plan_of(chat.read(body.replace(b"URL", url.replace(b"\\", b"/"))), {}).parts
    assert isinstance(part.url, memoryview)  # of the body: nothing was copied


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (b"a\\ud800b", b"\\ud800"),
        (b"\\uDC00", b"\\uDC00"),
        (b"\\ud83d\\ude00\\ud83d", b"\\ud83d"),
        (b"\\\\ud800\\ud801\\u0041 and more text", b"\\ud801"),
    ],
)
def test_half_a_surrogate_pair_is_called_so(text: bytes, half: bytes) -> None:
    """Anywhere, also where only Raw is kept: the parser's own words are of an end that comes too early."""
    bodies = (
        b'{"model": "m", "messages": [{"role": "user", "content": "HERE"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "HERE"}}]}]}',
    )
    for body in bodies:
        whole = body.replace(b"HERE", text)
        error = refusal(whole)
        assert (error.status, error.code) == (400, "invalid_json")
        told = f"the string around byte {whole.rindex(half)} holds {half.decode()}, half of a surrogate pair, "
        assert error.message.endswith(f"{told}which no text can hold")


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"", "it is empty"), (b" \n", "it is empty"), (b'{"model": "\\\\ud800"', "Input data was truncated")],
)
def test_why_a_body_is_no_json(body: bytes, why: str) -> None:
    assert refusal(body).message == f"JSON syntax error: Failed to parse the request body as JSON: {why}"


@pytest.mark.parametrize(
    ("part", "named", "where", "why"),
    [
        ({"type": "file", "file": {"file_data": "x"}}, "file", "", ""),
        ({"type": "image", "image": "data:,"}, "image", "", 'this API calls it "image_url"'),
        ({"type": "input_image", "image_url": "data:,"}, "input_image", "", 'this API calls it "image_url"'),
        ({"type": "input_text", "text": "x"}, "input_text", "", 'this API calls it "text"'),
        ({"type": "refusal", "refusal": "x"}, "refusal", "", ""),
        ({"text": "x"}, "<missing>", ".type", "messages[0].content[1]: missing field `type`"),
        ({"type": 5}, "<missing>", ".type", "HERE: Expected `str`, got `int`"),
        ("bare", "<missing>", "", "HERE: Expected `object`, got `str`"),
        ({"type": "image_url"}, "image_url", ".image_url", "HERE is missing"),
        ({"type": "image_url", "image_url": None}, "image_url", ".image_url", "HERE is missing"),
        (
            {"type": "image_url", "image_url": 7},
            "image_url",
            ".image_url",
            "HERE: Expected `str | object | null`, got `int`",
        ),
        (
            {"type": "image_url", "image_url": {}},
            "image_url",
            ".image_url.url",
            "messages[0].content[1].image_url: missing field `url`",
        ),
        ({"type": "image_url", "image_url": {"url": 5}}, "image_url", ".image_url.url", "HERE must be a string"),
        (
            {"type": "image_url", "image_url": {"url": "http://a/b", "max_long_side_pixel": "28"}},
            "image_url",
            ".image_url.max_long_side_pixel",
            "HERE: Expected `int | null`, got `str`",
        ),
        ({"type": "text"}, "text", ".text", "HERE is missing"),
        ({"type": "text", "text": 5}, "text", ".text", "HERE: Expected `str | null`, got `int`"),
    ],
)
def test_parts_that_are_not_known(part: Any, named: str, where: str, why: str) -> None:
    error = refusal({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]})
    assert (error.status, error.code) == (400, "unsupported_content_part")
    assert error.param == f"messages[0].content[1]{where}"
    told = f" ({why.replace('HERE', error.param)})" if why else ""
    assert error.message == f'Unsupported chat content part type "{named}" for gRPC backends{told}'


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"max_tokens": 0}, "integer_below_min_value", "max_tokens: 0 is below the minimum of 1"),
        ({"n": 11}, "integer_above_max_value", "n: 11 is above the maximum of 10"),
        ({"temperature": 2.5}, "decimal_above_max_value", "temperature: 2.5 is above the maximum of 2"),
        ({"top_p": 0}, "decimal_below_min_value", "top_p: 0 must be more than 0"),
        ({"stop_token_ids": [1, -4]}, "integer_below_min_value", "stop_token_ids[1]: -4 is below the minimum of 0"),
        ({"logit_bias": {"5": 101}}, "decimal_above_max_value", "logit_bias[...]: a value is above the maximum of 100"),
        ({"stop": ["a"] * 5}, "array_above_max_length", "stop: 5 elements, more than the maximum of 4"),
        ({"messages": []}, "empty_array", "messages: 0 elements, less than the minimum of 1"),
        (
            {"max_tokens": 10**60},
            "integer_above_max_value",
            f"max_tokens: {'1' + '0' * 39} is above the maximum of 4294967295",
        ),
    ],
)
def test_a_number_out_of_range_is_told_with_its_limit(fields: dict[str, Any], code: str, message: str) -> None:
    error = refusal({"messages": USER, **fields})
    assert (error.code, error.message) == (code, message)
    assert error.param == message.split(":")[0]


def test_a_picture_in_an_assistant_turn_is_refused() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    error = refusal({"messages": [{"role": "assistant", "content": content}]})
    assert (error.code, error.param) == ("unsupported_content_part", "messages[0].content[0]")
    assert error.message.endswith('"image_url" for gRPC backends (a message of the role assistant takes no media)')


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_pictures_in_every_other_role_keep_the_written_order(role: str) -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "http://h/one.png", "detail": "bogus"}, "uuid": "x"},
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": "http://h/two.png"},
    ]
    found = plan({"model": "m", "messages": [{"role": role, "content": content, "tool_call_id": "c"}], "foo": 1})
    shown = found.messages[0]["content"]
    assert [part["type"] for part in shown] == ["text", "image", "text", "image"]
    assert [bytes(part.url) for part in found.parts] == [b"http://h/one.png", b"http://h/two.png"]
    assert {part.modality for part in found.parts} == {Modality.IMAGE}


def test_escapes_in_a_url_are_resolved_and_plain_ones_are_views() -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":['
    body += rb'{"type":"image_url","image_url":{"url":"http:\/\/h\/\u00e9"}},'
    body += rb'{"type":"image_url","image_url":{"url":"http://h/plain"}}]}]}'
    escaped, plain = chat.plan_of(chat.read(body), {}).parts
    assert bytes(escaped.url) == "http://h/é".encode()
    assert isinstance(plain.url, memoryview) and plain.url.obj is not None and bytes(plain.url) == b"http://h/plain"


def test_hints_travel_with_their_part() -> None:
    url = {"url": "http://h/a", "max_long_side_pixel": 280, "fps": 1.5}
    found = plan({"model": "m", "messages": [{"role": "user", "content": [{"type": "video_url", "video_url": url}]}]})
    assert (found.parts[0].hints.max_long_side, found.parts[0].hints.fps) == (280, 1.5)


def test_workers_defaults_fill_what_the_client_left_out() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    bare = plan({"model": "m", "messages": USER}, defaults).sampling
    assert (bare.temperature, bare.top_p, bare.top_k, bare.min_p) == (0.7, 0.8, 20, None)
    given = plan({"model": "m", "messages": USER, "temperature": 0, "top_k": -1}, defaults).sampling
    assert (given.temperature, given.top_p, given.top_k) == (0, 0.8, -1)


def test_logprobs_alone_ask_for_one() -> None:
    assert plan({"model": "m", "messages": USER, "logprobs": True}).sampling.logprobs == 1
    assert plan({"model": "m", "messages": USER, "logprobs": True, "top_logprobs": 0}).sampling.logprobs == 1
    assert plan({"model": "m", "messages": USER, "logprobs": True, "top_logprobs": 7}).sampling.logprobs == 7
    assert plan({"model": "m", "messages": USER, "logprobs": None}).sampling.logprobs is None


def test_history_tool_calls_become_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = plan({"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}, *USER]})
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    broken = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    error = refusal({"messages": [{"role": "assistant", "content": None, "tool_calls": [broken]}, *USER]})
    assert error.message.startswith("messages[0].tool_calls[0]: ")
    assert error.code == "process_messages_failed"


def test_max_completion_tokens_wins() -> None:
    assert plan({"model": "m", "messages": USER, "max_tokens": 5, "max_completion_tokens": 7}).sampling.max_tokens == 7


def sound(data: Any, **others: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, **others}}


@pytest.mark.parametrize("others", [{}, {"format": "wav"}, {"format": None}, {"format": "something new", "more": 1}])
def test_input_audio_is_base64_as_it_stands_in_the_body(others: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [sound("UklGRg==", **others)]}]}).encode()
    [part] = chat.plan_of(chat.read(body), {}).parts
    assert (part.modality, part.is_bare_base64) == (Modality.AUDIO, True)
    assert isinstance(part.url, memoryview) and part.url == b"UklGRg=="


def test_input_audio_may_be_a_data_url_or_hold_escapes() -> None:
    content = [sound("data:audio/wav;base64,UklGRg=="), sound("Ukl/GRg=")]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).replace("Ukl/", "Ukl\\/")
    url, escaped = chat.plan_of(chat.read(body.encode()), {}).parts
    assert not url.is_bare_base64 and bytes(url.url) == b"data:audio/wav;base64,UklGRg=="
    assert escaped.is_bare_base64 and bytes(escaped.url) == b"Ukl/GRg="


def test_sounds_stand_where_they_were_written() -> None:
    content = [{"type": "text", "text": "a"}, sound("UklG"), {"type": "audio_url", "audio_url": {"url": "http://h/a"}}]
    found = plan({"model": "m", "messages": [{"role": "user", "content": content}]})
    assert found.messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "audio"}, {"type": "audio"}]
    assert [part.is_bare_base64 for part in found.parts] == [True, False]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio"},
        {"type": "input_audio", "input_audio": None},
        {"type": "input_audio", "input_audio": {"format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": None}},
        {"type": "input_audio", "input_audio": {"data": 5}},
        {"type": "input_audio", "input_audio": "UklGRg=="},
    ],
)
def test_input_audio_without_data_is_named(part: dict[str, Any]) -> None:
    error = refusal({"messages": [{"role": "user", "content": [part]}]})
    assert error.code == "unsupported_content_part"
    assert '"input_audio"' in error.message


def test_functions_are_shown_in_the_order_models_know() -> None:
    given = {"strict": True, "parameters": {"type": "object"}, "name": "f", "description": "d", "other": 1}
    shown = plan({"model": "m", "messages": USER, "tools": [{"type": "function", "function": given}, F]})
    tools = shown.template_variables["tools"]
    assert list(tools[0]["function"].items()) == [
        ("name", "f"),
        ("description", "d"),
        ("parameters", {"type": "object"}),
        ("strict", True),
    ]
    assert tools[1] == {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert "tools" not in plan({"model": "m", "messages": USER, "tools": [F], "tool_choice": "none"}).template_variables


def test_what_a_call_must_look_like() -> None:
    def schema(name: str, parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def required(*tools: Any, **fields: Any) -> Any:
        body = {"model": "m", "messages": USER, "tools": tools, "tool_choice": "required", **fields}
        constraint = plan(body).sampling.constraint
        assert constraint is not None and constraint.kind == "json_schema"
        return json.loads(constraint.text)

    found = required(schema("f", {"$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x"}), schema("g", {}))
    assert found["$defs"] == {"x": {"type": "string"}}
    assert found["items"]["anyOf"][0]["properties"]["parameters"] == {"$ref": "#/$defs/x"}
    assert "maxItems" not in found and required(F, parallel_tool_calls=False)["maxItems"] == 1
    assert "$defs" not in required(schema("f", {"$defs": [1]}))
    conflict = [schema("f", {"$defs": {"x": {}}}), schema("g", {"$defs": {"x": {"type": "null"}}})]
    assert refusal({"tools": conflict, "tool_choice": "required"}).code == "invalid_value"
    for depth in range(100, 1200, 7):  # wherever the interpreter's own limit stands
        body = {"model": "m", "messages": USER, "tools": [schema("f", {"HERE": 0})], "tool_choice": "required"}
        text = json.dumps(body).replace('{"HERE": 0}', '{"a":' * depth + "{}" + "}" * depth)
        try:
            chat.read(text.encode())
        except GatewayError as error:
            assert error.status == 400


def test_calls_come_before_a_format() -> None:
    fields = {"tools": [F], "tool_choice": "required", "response_format": {"type": "json_object"}}
    constraint = plan({"model": "m", "messages": USER, **fields}).sampling.constraint
    assert constraint is not None and json.loads(constraint.text)["type"] == "array"
    unforced = plan({"model": "m", "messages": USER, **fields, "tool_choice": "auto"}).sampling.constraint
    assert unforced is not None and unforced.text == '{"type":"object"}'


def test_effort_is_the_template_s_and_can_switch_thinking_off() -> None:
    def variables(**fields: Any) -> Any:
        return plan({"model": "m", "messages": USER, **fields}).template_variables

    assert variables(reasoning_effort="high") == {"reasoning_effort": "high"}
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert variables(reasoning_effort="none") == off
    kept = variables(reasoning_effort="minimal", chat_template_kwargs={"enable_thinking": True})
    assert kept == {**off, "reasoning_effort": "minimal", "enable_thinking": True}
    assert variables(reasoning_effort=None) == {}


def test_the_last_message_continued_is_no_message_of_the_template() -> None:
    content = [{"type": "text", "text": "The "}, {"type": "text", "text": "sky"}]
    turns = [*USER, {"role": "assistant", "content": content}]
    found = plan({"model": "m", "messages": turns, "continue_final_message": True})
    assert found.continuation == "The sky" and len(found.messages) == 1
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns[-1] = {"role": "assistant", "content": "x", "tool_calls": [call]}
    assert refusal({"messages": turns, "continue_final_message": True}).param == "continue_final_message"
