"""Anthropic's SDK on messages, as its documentation shows: whole, streamed, with pictures, tools that answer with
screenshots, thinking, schemas, counting.
"""

import json
from typing import Any

import anthropic
import pytest

from tests.e2e.running import MODEL, Running
from tests.sdk.questions import ARGUMENTS, CALL, FORECAST, ROME, SCREEN_BASE64, SEEN, Weather, say
from tests.sdk.sides import events, of, opened

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SCREEN_BASE64}}


def question(*blocks: Any, **fields: Any) -> dict[str, Any]:
    content = blocks[0] if len(blocks) == 1 else list(blocks)
    return {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": content}], **fields}


async def test_words_usage_and_ids(claude: Any) -> None:
    answer = await of(claude.messages.create(**question(say("Hello."), system="Be kind.")))
    assert answer.content[0].text == "Hello." and answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens > 0 and answer._request_id == answer.id


async def test_a_picture_whole_and_streamed(claude: Any) -> None:
    asked = question(PICTURE, {"type": "text", "text": "What is this?"})
    whole = await of(claude.messages.create(**asked))
    assert SEEN in whole.content[0].text
    async with opened(claude.messages.stream(**asked)) as stream:
        text = "".join(await events(stream.text_stream))
        final = await of(stream.get_final_message())
    assert text == final.content[0].text == whole.content[0].text and final.usage == whole.usage
    told = await events(await of(claude.messages.create(**asked, stream=True)))
    assert told[0].message.usage.input_tokens == whole.usage.input_tokens
    assert [event.type for event in told if event.type != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_counting_counts_what_is_charged(claude: Any) -> None:
    asked = question(PICTURE, {"type": "text", "text": "What is this?"}, system="Be kind.", tools=[TOOL])
    answer = await of(claude.messages.create(**asked))
    del asked["max_tokens"]
    assert (await of(claude.messages.count_tokens(**asked))).input_tokens == answer.usage.input_tokens


async def test_a_tool_is_called_and_answers_with_a_screenshot(claude: Any) -> None:
    asked = {"model": MODEL, "max_tokens": 100, "tools": [TOOL]}
    first = await of(claude.messages.create(**question(say(f"Let me see. {CALL}")) | asked))
    words, call = first.content
    assert first.stop_reason == "tool_use" and words.text == "Let me see. " and call.input == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [PICTURE, {"type": "text", "text": "sunny"}]}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = await of(claude.messages.create(messages=messages, **asked))
    assert SEEN in second.content[0].text


async def test_the_stream_helper_puts_blocks_together(claude: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = question(say(f"<think>Hm.</think>Wait. {CALL}"), tools=[TOOL], thinking=thinking)
    async with opened(claude.messages.stream(**asked)) as stream:
        kinds = [event.type for event in await events(stream)]
        final = await of(stream.get_final_message())
    thought, words, call = final.content
    assert (thought.thinking, words.text, call.input) == ("Hm.", "Wait. ", ARGUMENTS)
    assert final.stop_reason == "tool_use" and kinds.count("content_block_stop") == 3 and "input_json" in kinds


@pytest.mark.parametrize("choice", ["any", "tool"])
async def test_a_tool_that_must_be_called(claude: Any, gateway: Running, choice: str) -> None:
    named = {"name": "weather"} if choice == "tool" else {}
    held = json.dumps(ARGUMENTS if choice == "tool" else [{"name": "weather", "parameters": ARGUMENTS}])
    asked = question(say(held), tools=[TOOL], tool_choice={"type": choice, **named})
    (call,) = (await of(claude.messages.create(**asked))).content
    assert call.name == "weather" and call.input == ARGUMENTS
    assert gateway.seen("generate")[-1]["message"]["sampling_params"]["json_schema"]


async def test_an_answer_in_a_shape(claude: Any, gateway: Running) -> None:
    for messages in (claude.messages, claude.beta.messages):
        answer = await of(messages.parse(**question(say(FORECAST)), output_format=Weather))
        assert answer.parsed_output == ROME
        schema = json.loads(gateway.seen("generate")[-1]["message"]["sampling_params"]["json_schema"])
        assert schema["required"] == ["city", "days"]
    async with opened(claude.messages.stream(**question(say(FORECAST)), output_format=Weather)) as stream:
        assert (await of(stream.get_final_message())).parsed_output == ROME


async def test_the_tool_runner_sends_the_whole_conversation(claude: Any, gateway: Running) -> None:
    """It asks the server to keep the conversation first; being refused it goes on without that."""
    is_sync = isinstance(claude, anthropic.Anthropic)

    def weather(city: str, days: int) -> Any:
        """The weather of a city."""
        return [PICTURE, {"type": "text", "text": f"sunny in {city} for {days} days"}]

    async def later(city: str, days: int) -> Any:
        """The weather of a city."""
        return weather(city, days)

    later.__name__ = "weather"
    tool = anthropic.beta_tool(weather) if is_sync else anthropic.beta_async_tool(later)
    told = await events(claude.beta.messages.tool_runner(**question(say(CALL)), tools=[tool]))
    assert [message.stop_reason for message in told] == ["tool_use", "end_turn"]
    assert SEEN in told[-1].content[0].text
    sent = gateway.seen("generate")[-1]["message"]["tokenized"]["original_text"]
    assert "[[say <tool_call>" in sent and "sunny in Paris for 3 days" in sent


async def test_a_stop_sequence_and_the_limit(claude: Any) -> None:
    stopped = await of(claude.messages.create(**question(say("one. two"), stop_sequences=["."])))
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", ".", "one")
    cut = await of(claude.messages.create(**question(say("one two three")) | {"max_tokens": 2}))
    assert cut.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "model_not_found"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "integer_below_min_value"),
        (question("[[fault refuse=RESOURCE_EXHAUSTED]]"), anthropic.RateLimitError, "start_generation_failed"),
        (question("[[fault refuse=INTERNAL]]"), anthropic.InternalServerError, "start_generation_failed"),
    ],
)
async def test_errors_are_the_sdks_own(claude: Any, fields: dict[str, Any], kind: type, code: str) -> None:
    with pytest.raises(kind) as raised:
        await of(claude.messages.create(**question("hi") | fields))
    assert raised.value.body["error"]["code"] == code
    assert raised.value.request_id == raised.value.body["request_id"]


async def test_a_wrong_key(claude: Any) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        await of(claude.with_options(api_key="wrong").messages.create(**question("hi")))


async def test_an_error_in_mid_stream(claude: Any) -> None:
    stream = await of(claude.messages.create(**question("[[fault break=INTERNAL]]"), stream=True))
    with pytest.raises(anthropic.APIStatusError) as raised:
        await events(stream)
    assert raised.value.body["error"]["code"] == "worker_stream_failed"


async def test_models(claude: Any) -> None:
    assert [model.id for model in (await of(claude.models.list())).data] == [MODEL]
