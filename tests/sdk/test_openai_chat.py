"""OpenAI's SDK on chat completions, as its documentation shows: whole, streamed, with pictures, functions, schemas."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.running import MODEL, Running, data_url
from tests.sdk.questions import ARGUMENTS, CALL, FORECAST, ROME, SCREEN, SEEN, Weather, say
from tests.sdk.sides import events, of, opened

TOOL = openai.pydantic_function_tool(Weather, name="weather")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def screenshot() -> list[dict[str, Any]]:
    picture = {"type": "image_url", "image_url": {"url": data_url(SCREEN), "detail": "high"}}
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]


async def test_words_and_usage(chatgpt: Any) -> None:
    answer = await of(chatgpt.chat.completions.create(model=MODEL, messages=user(say("Hello.")), max_tokens=50))
    assert answer.choices[0].message.content == "Hello." and answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id == answer.id


async def test_a_picture_whole_and_streamed(chatgpt: Any) -> None:
    whole = await of(chatgpt.chat.completions.create(model=MODEL, messages=screenshot()))
    said = whole.choices[0].message.content
    assert SEEN in said
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = await events(await of(chatgpt.chat.completions.create(model=MODEL, messages=screenshot(), **options)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == said
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


async def test_a_function_is_called_and_answered_with_a_screenshot(chatgpt: Any, gateway: Running) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "parallel_tool_calls": False}
    answer = await of(chatgpt.chat.completions.create(messages=user(say(CALL)), tool_choice="auto", **asked))
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == ARGUMENTS
    picture = {"type": "image_url", "image_url": {"url": data_url(SCREEN)}}
    result = {"role": "tool", "tool_call_id": call.id, "content": [picture, {"type": "text", "text": "sunny"}]}
    again = await of(chatgpt.chat.completions.create(messages=[*user("Go."), message, result], **asked))
    assert SEEN in again.choices[0].message.content
    sent = gateway.seen("generate")[-1]["message"]["tokenized"]["original_text"]
    assert '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}' in sent and "sunny" in sent


async def test_the_stream_helper_puts_calls_together(chatgpt: Any) -> None:
    asked = {"model": MODEL, "messages": user(say(f"Wait. {CALL}{CALL}")), "tools": [TOOL]}
    async with opened(chatgpt.chat.completions.stream(**asked)) as stream:
        kinds = [event.type for event in await events(stream)]
        final = await of(stream.get_final_completion())
    message = final.choices[0].message
    assert message.content == "Wait. "
    assert [call.function.parsed_arguments for call in message.tool_calls] == [Weather(**ARGUMENTS)] * 2
    assert kinds.count("tool_calls.function.arguments.done") == 2 and kinds.count("content.done") == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_in_a_shape(chatgpt: Any, gateway: Running, is_streamed: bool) -> None:
    asked = {"model": MODEL, "messages": user(say(FORECAST)), "response_format": Weather}
    if is_streamed:
        async with opened(chatgpt.chat.completions.stream(**asked)) as stream:
            await events(stream)
            answer = await of(stream.get_final_completion())
    else:
        answer = await of(chatgpt.chat.completions.parse(**asked))
    assert answer.choices[0].message.parsed == ROME
    schema = gateway.seen("generate")[-1]["message"]["sampling_params"]["json_schema"]
    assert json.loads(schema)["required"] == ["city", "days"]


async def test_log_probabilities(chatgpt: Any) -> None:
    asked = {"messages": user(say("one two")), "logprobs": True, "top_logprobs": 2}
    answer = await of(chatgpt.chat.completions.create(model=MODEL, **asked))
    rows = answer.choices[0].logprobs.content
    assert "".join(row.token for row in rows) == "one two" and all(len(row.top_logprobs) == 2 for row in rows)


async def test_reasoning_beside_the_answer(chatgpt: Any) -> None:
    words = say("<think>Hm.</think>Yes.")
    asked = {"model": MODEL, "messages": user(words), "reasoning_effort": "low"}
    message = (await of(chatgpt.chat.completions.create(**asked))).choices[0].message
    assert message.content == "Yes." and message.reasoning_content == "Hm."


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "decimal_above_max_value"),
        ({"messages": []}, openai.BadRequestError, "empty_array"),
        ({"messages": user("[[fault refuse=RESOURCE_EXHAUSTED]]")}, openai.RateLimitError, "start_generation_failed"),
        ({"messages": user("[[fault refuse=INTERNAL]]")}, openai.InternalServerError, "start_generation_failed"),
    ],
)
async def test_errors_are_the_sdks_own(chatgpt: Any, fields: dict[str, Any], kind: type, code: str) -> None:
    with pytest.raises(kind) as raised:
        await of(chatgpt.chat.completions.create(**{"model": MODEL, "messages": user("hi"), **fields}))
    assert raised.value.code == code and raised.value.request_id


async def test_a_wrong_key(chatgpt: Any) -> None:
    other = chatgpt.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError) as raised:
        await of(other.chat.completions.create(model=MODEL, messages=user("hi")))
    assert raised.value.code == "invalid_api_key"


async def test_an_error_in_mid_stream(chatgpt: Any) -> None:
    stream = await of(
        chatgpt.chat.completions.create(model=MODEL, messages=user("[[fault break=INTERNAL]]"), stream=True)
    )
    with pytest.raises(openai.APIError) as raised:
        await events(stream)
    assert raised.value.code == "worker_stream_failed"


async def test_models_and_completions(chatgpt: Any) -> None:
    listed = await of(chatgpt.models.list())
    assert [model.id for model in listed.data] == [MODEL]
    assert (await of(chatgpt.models.retrieve(MODEL))).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await of(chatgpt.models.retrieve("nobody"))
    whole = await of(chatgpt.completions.create(model=MODEL, prompt=say("x y"), max_tokens=9, echo=True))
    assert whole.choices[0].text == say("x y") + "x y"
    several = await of(chatgpt.completions.create(model=MODEL, prompt=[say("x"), say("y")]))
    assert [choice.text for choice in several.choices] == ["x", "y"]
    chunks = await events(await of(chatgpt.completions.create(model=MODEL, prompt=say("x y"), stream=True)))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "x y"
