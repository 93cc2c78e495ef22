"""OpenAI's SDK on the Responses API: items, pictures, functions, schemas, and conversations that the gateway keeps."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.e2e.running import MODEL, Running, data_url, until
from tests.sdk.questions import ARGUMENTS, CALL, FORECAST, ROME, SCREEN, SEEN, Weather, say
from tests.sdk.sides import events, of, opened

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": False,
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def screenshot() -> list[dict[str, Any]]:
    picture = {"type": "input_image", "image_url": data_url(SCREEN), "detail": "auto"}
    return [{"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, picture]}]


async def test_words_and_usage(chatgpt: Any) -> None:
    answer = await of(chatgpt.responses.create(model=MODEL, input=say("Hello."), instructions="Be kind."))
    assert answer.output_text == "Hello." and answer.status == "completed" and answer.error is None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_a_picture_whole_and_streamed(chatgpt: Any) -> None:
    whole = await of(chatgpt.responses.create(model=MODEL, input=screenshot()))
    assert SEEN in whole.output_text
    told = await events(await of(chatgpt.responses.create(model=MODEL, input=screenshot(), stream=True)))
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == whole.output_text
    assert told[-1].type == "response.completed" and told[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in told] == list(range(len(told)))


async def test_a_function_is_called_and_answered(chatgpt: Any) -> None:
    asked = await of(chatgpt.responses.create(model=MODEL, input=say(CALL), tools=[TOOL], tool_choice="auto"))
    (call,) = asked.output
    assert call.type == "function_call" and call.name == "weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_items = await of(
        chatgpt.responses.create(
            model=MODEL, input=[{"role": "user", "content": say(CALL)}, call, result], tools=[TOOL]
        )
    )
    by_id = await of(chatgpt.responses.create(model=MODEL, input=[result], tools=[TOOL], previous_response_id=asked.id))
    assert by_items.usage.input_tokens == by_id.usage.input_tokens > asked.usage.input_tokens
    assert "sunny" in by_items.output_text and by_id.output_text == by_items.output_text


async def test_the_stream_helper_puts_items_together(chatgpt: Any) -> None:
    async with opened(chatgpt.responses.stream(model=MODEL, input=say(f"Wait. {CALL}"), tools=[TOOL])) as stream:
        kinds = [event.type for event in await events(stream)]
        final = await of(stream.get_final_response())
    words, call = final.output
    assert words.content[0].text == "Wait. " and json.loads(call.arguments) == ARGUMENTS
    assert kinds.count("response.function_call_arguments.done") == 1 and kinds[-1] == "response.completed"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_in_a_shape(chatgpt: Any, gateway: Running, is_streamed: bool) -> None:
    asked = {"model": MODEL, "input": say(FORECAST), "text_format": Weather}
    if is_streamed:
        async with opened(chatgpt.responses.stream(**asked)) as stream:
            await events(stream)
            answer = await of(stream.get_final_response())
    else:
        answer = await of(chatgpt.responses.parse(**asked))
    assert answer.output_parsed == ROME
    assert '"days"' in gateway.seen("generate")[-1]["message"]["sampling_params"]["json_schema"]


async def test_reasoning_is_an_item(chatgpt: Any) -> None:
    asked = {"model": MODEL, "reasoning": {"effort": "low", "summary": "auto"}}
    answer = await of(chatgpt.responses.create(input=say("<think>Hm.</think>Yes."), **asked))
    assert [item.type for item in answer.output] == ["reasoning", "message"] and answer.output_text == "Yes."
    assert answer.output[0].content[0].text == "Hm."


async def test_a_conversation_with_a_picture_is_kept(chatgpt: Any) -> None:
    first = await of(chatgpt.responses.create(model=MODEL, input=screenshot()))
    second = await of(chatgpt.responses.create(model=MODEL, input="And now?", previous_response_id=first.id))
    assert SEEN in second.output_text and second.previous_response_id == first.id
    assert (await of(chatgpt.responses.retrieve(first.id))).output_text == first.output_text
    items = [item async for item in page_of(await of(chatgpt.responses.input_items.list(first.id)))]
    assert [part.type for part in items[0].content] == ["input_text", "input_image"]
    with pytest.raises(openai.BadRequestError) as raised:
        await of(chatgpt.responses.cancel(first.id))
    assert raised.value.code == "response_already_completed"
    await of(chatgpt.responses.delete(first.id))
    with pytest.raises(openai.NotFoundError):
        await of(chatgpt.responses.retrieve(first.id))
    with pytest.raises(openai.BadRequestError) as raised:
        await of(chatgpt.responses.create(model=MODEL, input="And?", previous_response_id=second.id))
    assert raised.value.code == "previous_response_not_found"


async def page_of(page: Any) -> Any:
    """Every item, over pages, by either client."""
    for item in page.data:
        yield item
    while page.has_next_page():
        page = await of(page.get_next_page())
        for item in page.data:
            yield item


async def test_input_items_over_pages(chatgpt: Any) -> None:
    given = [{"role": "user", "content": f"number {number}"} for number in range(5)]
    answer = await of(chatgpt.responses.create(model=MODEL, input=given))
    first = await of(chatgpt.responses.input_items.list(answer.id, limit=2, order="asc"))
    found = [item.content async for item in page_of(first)]
    assert [content if isinstance(content, str) else content[0].text for content in found] == [
        message["content"] for message in given
    ]


async def test_a_conversation_grows_with_every_response(chatgpt: Any) -> None:
    conversation = await of(chatgpt.conversations.create(metadata={"topic": "pictures"}))
    for asked in (screenshot(), "And now?"):
        answer = await of(chatgpt.responses.create(model=MODEL, input=asked, conversation=conversation.id))
        assert SEEN in answer.output_text and answer.conversation.id == conversation.id
    aside = await of(
        chatgpt.responses.create(model=MODEL, input="Not kept.", conversation=conversation.id, store=False)
    )
    assert aside.usage.input_tokens > answer.usage.input_tokens
    page = await of(chatgpt.conversations.items.list(conversation.id, order="asc", limit=3))
    items = [item async for item in page_of(page)]
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant"]
    assert [part.type for part in items[0].content] == ["input_text", "input_image"]
    assert items[2].content[0].text == "And now?"


async def test_a_conversation_s_items_come_and_go(chatgpt: Any) -> None:
    hello = {"type": "message", "role": "user", "content": "Hello."}
    conversation = await of(chatgpt.conversations.create(items=[hello]))
    added = await of(
        chatgpt.conversations.items.create(
            conversation.id, items=[{"type": "message", "role": "assistant", "content": "Hi."}]
        )
    )
    (item,) = added.data
    assert item.content[0].type == "output_text" and item.status == "completed"
    found = await of(chatgpt.conversations.items.retrieve(item.id, conversation_id=conversation.id))
    assert found.id == item.id
    await of(chatgpt.conversations.items.delete(item.id, conversation_id=conversation.id))
    left = await of(chatgpt.conversations.items.list(conversation.id))
    assert [one.content[0].text for one in left.data] == ["Hello."]
    await of(chatgpt.conversations.update(conversation.id, metadata={"a": "b"}))
    assert (await of(chatgpt.conversations.retrieve(conversation.id))).metadata == {"a": "b"}
    assert (await of(chatgpt.conversations.delete(conversation.id))).deleted
    with pytest.raises(openai.NotFoundError):
        await of(chatgpt.conversations.retrieve(conversation.id))
    with pytest.raises(openai.NotFoundError) as gone:
        await of(chatgpt.responses.create(model=MODEL, input="hi", conversation=conversation.id))
    assert gone.value.code == "conversation_not_found"


SLOW = "[[fault slow=700]] words"


def idle(gateway: Running) -> None:
    """What the requests held was given back."""
    until(lambda: not any(map(gateway.metric, ("smg_admission_inflight ", "mediagate_inflight_bytes "))), what="idle")


async def over(chatgpt: Any, response_id: str) -> Any:
    """The response once it no longer runs."""
    for _ in range(200):
        found = await of(chatgpt.responses.retrieve(response_id))
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"still {found.status}")


async def test_a_response_in_the_background(chatgpt: Any, gateway: Running) -> None:
    begun = await of(chatgpt.responses.create(model=MODEL, input=[*screenshot(), user(SLOW)], background=True))
    assert begun.status == "queued" and begun.background and begun.output == [] and begun.usage is None
    assert (await of(chatgpt.responses.retrieve(begun.id))).status == "in_progress"
    assert len((await of(chatgpt.responses.input_items.list(begun.id))).data) == 2
    found = await over(chatgpt, begun.id)
    assert found.status == "completed" and SEEN in found.output_text and found.usage.output_tokens > 0
    idle(gateway)
    again = await of(chatgpt.responses.create(model=MODEL, input="Go on.", previous_response_id=begun.id))
    assert SEEN in again.output_text


async def test_one_in_the_background_is_cancelled_or_forgotten(chatgpt: Any, gateway: Running) -> None:
    asked = {"model": MODEL, "input": "[[fault slow=20000]] words", "background": True}
    begun = await of(chatgpt.responses.create(**asked))
    cancelled = await of(chatgpt.responses.cancel(begun.id))
    assert cancelled.status == "cancelled" and cancelled.output == []
    assert await of(chatgpt.responses.cancel(begun.id)) == cancelled == await of(chatgpt.responses.retrieve(begun.id))
    begun = await of(chatgpt.responses.create(**asked))
    await of(chatgpt.responses.delete(begun.id))
    with pytest.raises(openai.NotFoundError):
        await of(chatgpt.responses.retrieve(begun.id))
    idle(gateway)


async def test_one_in_the_background_that_fails(chatgpt: Any) -> None:
    begun = await of(chatgpt.responses.create(model=MODEL, input="[[fault refuse=INTERNAL]]", background=True))
    found = await over(chatgpt, begun.id)
    assert found.status == "failed" and found.error.code == "start_generation_failed"
    with pytest.raises(openai.BadRequestError) as nowhere:
        await of(chatgpt.responses.create(model=MODEL, input="hi", background=True, store=False))
    assert nowhere.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError) as malformed:
        await of(chatgpt.responses.create(model=MODEL, input="<|image_pad|>", background=True))
    assert malformed.value.code == "multimodal_prompt_contract_mismatch"


async def test_log_probabilities(chatgpt: Any) -> None:
    asked = {"model": MODEL, "input": say("<think>hm</think>one two"), "top_logprobs": 2}
    whole = await of(chatgpt.responses.create(include=["message.output_text.logprobs"], **asked))
    rows = whole.output[1].content[0].logprobs
    assert "".join(row.token for row in rows) == whole.output_text == "one two"
    assert all(len(row.top_logprobs) == 2 for row in rows) and whole.top_logprobs == 2
    told = await events(await of(chatgpt.responses.create(stream=True, **asked)))
    deltas = [row for event in told if event.type == "response.output_text.delta" for row in event.logprobs]
    assert [(row.token, row.logprob) for row in deltas] == [(row.token, row.logprob) for row in rows]
    (done,) = [event for event in told if event.type == "response.output_text.done"]
    assert len(done.logprobs) == len(rows)


async def test_the_limit_makes_it_incomplete(chatgpt: Any) -> None:
    answer = await of(chatgpt.responses.create(model=MODEL, input=say("one two three"), max_output_tokens=2))
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


async def test_an_error_in_mid_stream(chatgpt: Any) -> None:
    stream = await of(chatgpt.responses.create(model=MODEL, input="[[fault break=INTERNAL]]", stream=True))
    told = await events(stream)
    assert told[-1].type == "response.failed" and told[-1].response.error.code == "worker_stream_failed"


async def test_errors_are_the_sdks_own(chatgpt: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await of(chatgpt.responses.create(model="nobody", input="hi"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        await of(chatgpt.responses.create(model=MODEL, input=[]))
    assert empty.value.code == "input_items_empty"
    with pytest.raises(openai.BadRequestError) as hosted:
        await of(chatgpt.responses.create(model=MODEL, input="hi", tools=[{"type": "web_search"}]))
    assert hosted.value.code == "unsupported_parameter"
