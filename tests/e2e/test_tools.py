"""Calls, reasoning and constraints from outside: what the engine says is what the client is told, whole or streamed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import Answer, Running, running
from tests.pipeline.bundles import unpack_bundle

MODEL = "qwen3-vl-demo"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
LOOK = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def gateway(bundle: Path) -> Iterator[Running]:
    with running("--pool-processes=1", engine=("--bundle", str(bundle), "--tokens-per-chunk", "2")) as found:
        yield found


def say(gateway: Running, text: str, **fields: Any) -> Answer:
    return gateway.chat(f"[[say {text}]]", **fields)


def told(answer: Answer) -> dict[str, Any]:
    """The first choice's message and reason, put together from the chunks of a stream or read from a whole answer."""
    assert answer.status == 200, answer.body
    if not answer.headers["content-type"].startswith("text/event-stream"):
        choice = answer.json["choices"][0]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        for call in message.get("tool_calls", []):
            assert call["id"].startswith("call_") and len(call["id"]) == 29 and call["type"] == "function"
        found = {"content": message["content"], "reasoning": message["reasoning_content"], "calls": calls}
        return {**found, "reason": choice["finish_reason"]}
    content, reasoning, reason = "", "", None
    calls = []
    assert answer.events[-1] == "[DONE]"
    for event in answer.events[1:-1]:
        if not event["choices"]:
            continue
        choice = event["choices"][0]
        delta = choice["delta"]
        assert len(delta) == (0 if choice["finish_reason"] else 1), "a delta says one thing"
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
        reason = choice["finish_reason"]
    content_or_none = content if content or not (reasoning or calls) else None
    return {"content": content_or_none, "reasoning": reasoning or None, "calls": calls, "reason": reason}


def both(gateway: Running, text: str, **fields: Any) -> dict[str, Any]:
    """What is told, which is the same in both ways."""
    whole = told(say(gateway, text, **fields))
    assert told(say(gateway, text, stream=True, **fields)) == whole
    return whole


PARIS = ("weather", '{"city":"Paris","days":3}')


def test_a_call(gateway: Running) -> None:
    found = both(gateway, f"Let me see.\n{CALL}", tools=[WEATHER])
    assert found == {"content": "Let me see.\n", "reasoning": None, "calls": [PARIS], "reason": "tool_calls"}


def test_two_calls_and_only_the_first_without_parallel_ones(gateway: Running) -> None:
    text = f'{CALL}\n<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>\n'
    found = both(gateway, text, tools=[WEATHER, LOOK])
    assert found == {"content": None, "reasoning": None, "calls": [PARIS, ("look", "{}")], "reason": "tool_calls"}
    assert both(gateway, text, tools=[WEATHER, LOOK], parallel_tool_calls=False)["calls"] == [PARIS]


@pytest.mark.parametrize(
    "text", ['<tool_call>\n{"name": "weather", "arguments": {"city": "Par', "<tool_call>\n{bad}\n</tool_call>", "2 < 3"]
)
def test_what_is_no_call_stays_in_the_answer(gateway: Running, text: str) -> None:
    found = both(gateway, text, tools=[WEATHER])
    assert found == {"content": text, "reasoning": None, "calls": [], "reason": "stop"}


def test_a_long_call_is_told_while_it_is_written(gateway: Running) -> None:
    text = "word " * 200
    call = {"name": "weather", "arguments": {"city": text}}
    answer = say(gateway, f"<tool_call>\n{json.dumps(call)}\n</tool_call>", tools=[WEATHER], stream=True)
    deltas = [event["choices"][0]["delta"] for event in answer.events[:-1]]
    assert sum("tool_calls" in delta for delta in deltas) > 50
    assert told(answer)["calls"] == [("weather", json.dumps({"city": text}, separators=(",", ":")))]


def test_without_tools_or_with_none_of_them_everything_is_text(gateway: Running) -> None:
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert both(gateway, CALL, **fields) == {"content": CALL, "reasoning": None, "calls": [], "reason": "stop"}
        assert "# Tools" not in sent(gateway)["tokenized"]["original_text"]


def test_old_spellings(gateway: Running) -> None:
    assert both(gateway, CALL, functions=[WEATHER["function"]])["calls"] == [PARIS]
    assert '"name": "weather"' in sent(gateway)["tokenized"]["original_text"]
    assert both(gateway, CALL, functions=[WEATHER["function"]], function_call="none")["calls"] == []
    found = both(gateway, '{"city": "Paris"}', functions=[WEATHER["function"]], function_call={"name": "weather"})
    assert found["calls"] == [("weather", '{"city":"Paris"}')]


def sent(gateway: Running) -> dict[str, Any]:
    """The last message the engine got."""
    found: dict[str, Any] = gateway.seen("generate")[-1]["message"]
    return found


def schema_sent(gateway: Running) -> Any:
    return json.loads(sent(gateway)["sampling_params"]["json_schema"])


def test_a_call_that_must_be_made(gateway: Running) -> None:
    text = '[{"name": "weather", "parameters": {"city": "Paris", "days": 3}}, {"name": "look", "parameters": {}}]'
    found = both(gateway, text, tools=[WEATHER, LOOK], tool_choice="required")
    assert found == {"content": None, "reasoning": None, "calls": [PARIS, ("look", "{}")], "reason": "tool_calls"}
    schema = schema_sent(gateway)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    names = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
    assert names == [["weather"], ["look"]]
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == PARAMETERS
    assert all(one["required"] == ["name", "parameters"] for one in schema["items"]["anyOf"])


def test_a_named_function(gateway: Running) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    found = both(gateway, '{"city": "Paris", "days": 3}', tools=[LOOK, WEATHER], tool_choice=choice)
    assert found == {"content": None, "reasoning": None, "calls": [PARIS], "reason": "tool_calls"}
    assert schema_sent(gateway) == PARAMETERS
    assert '"name": "look"' in sent(gateway)["tokenized"]["original_text"]  # all are shown


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(gateway: Running, mode: str, nested: bool) -> None:
    inner = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    choice = {"type": "allowed_tools", **({"allowed_tools": inner} if nested else inner)}
    text = CALL if mode == "auto" else f"[{CALL[12:-13]}]"
    assert both(gateway, text, tools=[LOOK, WEATHER], tool_choice=choice)["calls"] == [PARIS]
    assert '"name": "look"' not in sent(gateway)["tokenized"]["original_text"]
    assert ("json_schema" in sent(gateway)["sampling_params"]) == (mode == "required")


def test_reasoning_and_then_a_call(gateway: Running) -> None:
    found = both(gateway, f"<think>\nhmm\n</think>\n\n{CALL}", tools=[WEATHER])
    assert found == {"content": "\n\n", "reasoning": "\nhmm\n", "calls": [PARIS], "reason": "tool_calls"}


def test_reasoning_is_told_apart_and_counted(gateway: Running) -> None:
    text = "<think>\nhmm hmm\n</think>\n\nAnswer"
    assert both(gateway, text) == {"content": "\n\nAnswer", "reasoning": "\nhmm hmm\n", "calls": [], "reason": "stop"}
    usage = say(gateway, text).json["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"] - 3
    streamed = say(gateway, text, stream=True, stream_options={"include_usage": True}).events[-2]
    assert streamed["usage"] == usage
    assert both(gateway, text, separate_reasoning=False)["content"] == text
    assert both(gateway, "<think>\nhmm")["content"] is None


def test_logprobs_are_those_of_the_answer(gateway: Running) -> None:
    text = "<think>\nhmm\n</think>\n\nAnswer"
    choice = say(gateway, text, logprobs=True).json["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "\n\nAnswer"
    events = say(gateway, text, logprobs=True, stream=True).events[:-1]
    found = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": ()})["content"]]
    assert found == choice["logprobs"]["content"]


def test_constraints_reach_the_engine(gateway: Running) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    described = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields, kind, value in (
        ({"response_format": described}, "json_schema", '{"type":"object","properties":{"x":{"type":"string"}}}'),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"response_format": {"type": "text"}}, "top_p", 1.0),
    ):
        assert gateway.chat("hi", **fields).status == 200
        assert sent(gateway)["sampling_params"][kind] == value


def test_the_beginning_of_the_answer_is_the_end_of_the_prompt(gateway: Running) -> None:
    turns = [{"role": "user", "content": "[[say blue.]]"}, {"role": "assistant", "content": "The sky is "}]
    answer = gateway.chat("", messages=turns, continue_final_message=True)
    assert answer.text == "blue."
    prompt = sent(gateway)["tokenized"]["original_text"]
    assert prompt.endswith("<|im_start|>assistant\nThe sky is ") and prompt.count("assistant") == 1


def test_arguments_in_tags(bundle: Path) -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    flags = ("--pool-processes=1", "--tool-call-parser=qwen_xml", "--reasoning-parser=passthrough")
    with running(*flags, engine=("--bundle", str(bundle), "--tokens-per-chunk", "1")) as gateway:
        assert both(gateway, text, tools=[WEATHER])["calls"] == [PARIS]
        assert both(gateway, "<think>a</think>b")["content"] == "<think>a</think>b"


def test_outputs_that_begin_inside(bundle: Path) -> None:
    """The template decides, not that it knows a switch."""
    config = json.loads((bundle / "tokenizer_config.json").read_text())
    template = config["chat_template"] + (
        "{%- if add_generation_prompt -%}{%- if enable_thinking is defined and not enable_thinking -%}"
        "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- else -%}{{- '<think>\\n' -}}{%- endif -%}{%- endif -%}"
    )
    path = bundle.parent / "thinking.jinja"
    path.write_text(template)
    flags = ("--pool-processes=1", f"--chat-template={path}")
    with running(*flags, engine=("--bundle", str(bundle))) as gateway:
        text = "hmm\n</think>\n\nAnswer"
        assert both(gateway, text) == {"content": "\n\nAnswer", "reasoning": "hmm\n", "calls": [], "reason": "stop"}
        for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            assert both(gateway, "Answer", **fields)["content"] == "Answer"
        object_at_once = both(gateway, '{"x": 1}', response_format={"type": "json_object"})
        assert object_at_once["content"] == '{"x": 1}'


def test_tags_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    """DeepSeek's vocabulary has the tags of reasoning as special tokens, which are no text otherwise."""
    folder = unpack_bundle("deepseek_v41", tmp_path)
    flags = ("--bundle", str(folder), "--model-name", "deepseek-v4.1")
    call = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Paris'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    with running("--pool-processes=1", engine=flags) as gateway:
        found = both(gateway, f"<think>hmm</think>Well.{call}", model="deepseek-v4.1", tools=[WEATHER])
        calls = [("weather", '{"city":"Paris"}')]
        assert found == {"content": "Well.", "reasoning": "hmm", "calls": calls, "reason": "tool_calls"}
        usage = say(gateway, "<think>hmm hmm</think>Well.", model="deepseek-v4.1").json["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
