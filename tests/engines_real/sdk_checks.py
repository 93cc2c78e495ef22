"""The official SDKs against an engine that computes: the recorded answer by every API, and calls and shapes that the
engine is held to.  Each check is done by the synchronous client and by the asynchronous one.
"""

import asyncio
import base64
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel

from tests.engines_real.answers import DATA, EXPECTED, Answer, Differs, body, compare_answer, prompt_ids
from tests.engines_real.checks import Bench, Check
from tests.sdk.sides import events, of, opened
from tools.launch import Gateway

MODEL = "tiny-qwen3vl"
CASE = "image_shapes"
QUESTION = "What is in this picture?"
PICTURE = (DATA / "media" / "shapes_500x380.jpg").read_bytes()
PICTURE_TOKENS = 24 * 32 // 4
BASE64 = base64.b64encode(PICTURE).decode()
ANY = {"type": "any", "disable_parallel_tool_use": True}
GREEDY = {"extra_body": {"temperature": 0}}  # Anthropic's SDK has no temperature of its own any more
URL = f"data:image/jpeg;base64,{BASE64}"


class Weather(BaseModel, extra="forbid"):
    """Few words and no others, so that random weights find the end."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


SCHEMA = Weather.model_json_schema()


def _must(found: Any, what: str) -> None:
    if not found:
        raise Differs(what)


def _said(text: str, prompt_tokens: int, expected: str) -> None:
    _must(text == expected, f"{text!r}, by chat {expected!r}")
    wanted = len(prompt_ids(CASE))
    _must(prompt_tokens == wanted, f"{prompt_tokens} prompt tokens, expected {wanted}")


async def _expected(chat: Any) -> str:
    """What the engine says to the picture: its log-probabilities are the recorded ones."""
    answer = await of(chat.chat.completions.create(**body(CASE)))
    rows = answer.choices[0].logprobs.content
    text = answer.choices[0].message.content
    compare_answer(CASE, Answer(text, [row.logprob for row in rows], answer.usage.prompt_tokens))
    return str(text)


async def _chat(chat: Any, claude: Any) -> None:
    text = await _expected(chat)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = await events(await of(chat.chat.completions.create(**body(CASE), **options)))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    _said(streamed, last.usage.prompt_tokens, text)


async def _responses(chat: Any, claude: Any) -> None:
    text = await _expected(chat)
    picture = {"type": "input_image", "image_url": URL, "detail": "auto"}
    asked = [{"role": "user", "content": [picture, {"type": "input_text", "text": QUESTION}]}]
    limits = {"model": MODEL, "max_output_tokens": len(EXPECTED[CASE]["output_token_ids"]), "temperature": 0}
    whole = await of(chat.responses.create(input=asked, **limits))
    _said(whole.output_text, whole.usage.input_tokens, text)
    told = await events(await of(chat.responses.create(input=asked, stream=True, **limits)))
    _said(told[-1].response.output_text, told[-1].response.usage.input_tokens, text)
    again = await of(chat.responses.create(input="And?", previous_response_id=whole.id, **limits))
    _must(again.usage.input_tokens > whole.usage.input_tokens, "the conversation was not continued")


def _picture_block() -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": BASE64}}


async def _messages(chat: Any, claude: Any) -> None:
    text = await _expected(chat)
    messages = [{"role": "user", "content": [_picture_block(), {"type": "text", "text": QUESTION}]}]
    limits: dict[str, Any] = {"max_tokens": len(EXPECTED[CASE]["output_token_ids"]), **GREEDY}
    whole = await of(claude.messages.create(model=MODEL, messages=messages, **limits))
    _said(whole.content[0].text, whole.usage.input_tokens, text)
    async with opened(claude.messages.stream(model=MODEL, messages=messages, **limits)) as stream:
        final = await of(stream.get_final_message())
    _said(final.content[0].text, final.usage.input_tokens, text)
    counted = await of(claude.messages.count_tokens(model=MODEL, messages=messages))
    _must(counted.input_tokens == whole.usage.input_tokens, f"counted {counted.input_tokens} tokens")


async def _tools(chat: Any, claude: Any) -> None:
    """A call that must be made, then a screenshot as its result, by chat and by messages."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    asked: dict[str, Any] = {"model": MODEL, "tools": [tool], "parallel_tool_calls": False, "max_tokens": 60, **GREEDY}
    question = {"role": "user", "content": "Go."}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = await of(chat.chat.completions.create(messages=[question], tool_choice=choice, **asked))
        _must(answer.choices[0].finish_reason == "tool_calls", f"no call: {answer.choices[0]}")
        call = answer.choices[0].message.tool_calls[0]
        Weather(**json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "image_url", "image_url": {"url": URL}}]}
    await of(chat.chat.completions.create(messages=[question, answer.choices[0].message, result], **asked))
    mine: dict[str, Any] = {"model": MODEL, "max_tokens": 60, **GREEDY}
    mine["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    message = await of(claude.messages.create(messages=[question], tool_choice=ANY, **mine))
    _must([block.type for block in message.content] == ["tool_use"], f"no call: {message.content}")
    (block,) = message.content
    Weather(**block.input)
    shown = {"type": "tool_result", "tool_use_id": block.id, "content": [_picture_block()]}
    turns = [question, {"role": "assistant", "content": message.content}]
    blind = await of(claude.messages.create(messages=turns, **mine))
    seen = await of(claude.messages.create(messages=[*turns, {"role": "user", "content": [shown]}], **mine))
    tokens = seen.usage.input_tokens - blind.usage.input_tokens
    _must(tokens > PICTURE_TOKENS, f"a screenshot of {PICTURE_TOKENS} tokens made the prompt {tokens} longer")


async def _shapes(chat: Any, claude: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 60, **GREEDY}
    messages = [{"role": "user", "content": "Go."}]
    parsed = await of(chat.chat.completions.parse(messages=messages, response_format=Weather, **asked))
    _must(isinstance(parsed.choices[0].message.parsed, Weather), "chat: nothing parsed")
    response = await of(chat.responses.parse(model=MODEL, input="Go.", text_format=Weather, max_output_tokens=60))
    _must(isinstance(response.output_parsed, Weather), "responses: nothing parsed")
    message = await of(claude.messages.parse(messages=messages, output_format=Weather, **asked))
    _must(isinstance(message.parsed_output, Weather), "messages: nothing parsed")


Use = Callable[[Any, Any], Awaitable[None]]


def _by_both(use: Use, bench: Bench, gateway: Gateway, transport: str) -> None:
    address = f"http://{gateway.host}:{gateway.port}"
    settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 300}
    try:
        asyncio.run(_by_synchronous(use, address, settings))
        asyncio.run(_by_asynchronous(use, address, settings))
    except (openai.OpenAIError, anthropic.AnthropicError, ValueError) as error:
        raise Differs(f"{type(error).__name__}: {str(error)[:300]}") from None


async def _by_synchronous(use: Use, address: str, settings: dict[str, Any]) -> None:
    with (
        openai.OpenAI(base_url=f"{address}/v1", **settings) as chat,
        anthropic.Anthropic(base_url=address, **settings) as claude,
    ):
        await use(chat, claude)


async def _by_asynchronous(use: Use, address: str, settings: dict[str, Any]) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{address}/v1", **settings) as chat,
        anthropic.AsyncAnthropic(base_url=address, **settings) as claude,
    ):
        await use(chat, claude)


SDK_CHECKS: dict[str, Check] = {
    f"sdk {name}": functools.partial(_by_both, use)
    for name, use in {
        "chat": _chat,
        "responses": _responses,
        "messages": _messages,
        "tools": _tools,
        "shapes": _shapes,
    }.items()
}
