"""The Responses API from outside: the events of a stream in order, conversations, what is kept and for whom."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.running import MODEL, Answer, Running, data_url, picture, running
from tests.pipeline.bundles import unpack_bundle

RESPONSES = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    with running("--pool-processes=1", engine=("--bundle", str(bundle), "--tokens-per-chunk", "2")) as found:
        yield found


def ask(gateway: Running, given: Any, **fields: Any) -> Answer:
    return gateway.call("POST", RESPONSES, {"model": MODEL, "input": given, **fields})


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


def image() -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(picture())}


def events(answer: Answer) -> list[dict[str, Any]]:
    """The events' bodies; each has its name in its head, and they are numbered from 0."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.body
    found = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}" and body["sequence_number"] == len(found)
        found.append(body)
    return found


def plain(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def follow(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as their own events put them together; one is open at a time, and each event names the open one."""
    done: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    said = ""
    for event in told[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            assert item is None
            item, said = event["item"], ""
            continue
        assert item is not None
        assert event.get("item_id", item["id"]) == item["id"]
        if kind.endswith(".delta"):
            said += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == said
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == said
        elif kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            done.append(event["item"])
            item = None
    return done


def both(gateway: Running, words: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole answer and the events of the same, which end in the same output."""
    whole = ask(gateway, f"[[say {words}]]", **fields).json
    told = events(ask(gateway, f"[[say {words}]]", stream=True, **fields))
    last = told[-1]["response"]
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == f"response.{whole['status']}" and last["status"] == whole["status"]
    items = follow(told)
    assert last["output"] == items
    assert [plain(item) for item in items] == [plain(item) for item in whole["output"]]
    assert last["usage"] == whole["usage"]
    assert told[0]["response"]["id"] == last["id"] and last["id"].startswith("resp_")
    return whole, told


def test_reasoning_words_and_calls_are_items_in_turn(gateway: Running) -> None:
    whole, told = both(gateway, f"<think>hm</think>Wait.{CALL}{CALL}", tools=[WEATHER])
    call = {"type": "function_call", "name": "weather", "arguments": '{"city":"Paris"}', "status": "completed"}
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert whole["output"][1]["content"] == [{"type": "output_text", "text": "Wait.", "annotations": []}]
    assert plain(whole["output"][2]) == plain(whole["output"][3]) == call
    assert [item["id"].split("_")[0] for item in whole["output"]] == ["rs", "msg", "fc", "fc"]
    names = [event["type"].removeprefix("response.") for event in told[2:-1]]
    once = [name for at, name in enumerate(names) if name != names[at - 1] or not name.endswith(".delta")]
    spoken = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    assert once == [
        "output_item.added",
        *(name.format("reasoning_text") for name in spoken),
        "output_item.done",
        "output_item.added",
        *(name.format("output_text") for name in spoken),
        "output_item.done",
        *(
            ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
            * 2
        ),
    ]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 1


def test_a_limit_makes_it_incomplete(gateway: Running) -> None:
    whole, told = both(gateway, "one two three four", max_output_tokens=2)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"} == told[-1]["response"]["incomplete_details"]
    assert whole["status"] == "incomplete" and whole["usage"]["output_tokens"] == 2


def test_what_the_answer_tells_of_its_request(gateway: Running) -> None:
    fields = {"instructions": "Be brief", "metadata": {"a": "b"}, "temperature": 0.5, "user": "u", "tools": [WEATHER]}
    told = ask(gateway, "hi", **fields).json
    assert {name: told[name] for name in ("instructions", "metadata", "temperature", "user")} == {
        name: fields[name] for name in ("instructions", "metadata", "temperature", "user")
    }
    assert (told["tools"][0]["name"], told["tool_choice"], told["parallel_tool_calls"]) == ("weather", "auto", True)


def test_a_conversation_goes_on_with_its_pictures(gateway: Running) -> None:
    first = ask(gateway, [message(image(), text("[[say Seen.]]"))]).json
    second = ask(gateway, "[[say More.]]", previous_response_id=first["id"], instructions="Be brief").json
    sent = gateway.seen("generate")[-1]
    picture_mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert sent["message"]["tokenized"]["original_text"] == (
        "<|im_start|>system\nBe brief<|im_end|>\n"
        f"<|im_start|>user\n{picture_mark}[[say Seen.]]<|im_end|>\n<|im_start|>assistant\nSeen.<|im_end|>\n"
        "<|im_start|>user\n[[say More.]]<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(sent["media"]) == 1
    third = ask(gateway, "[[say End.]]", previous_response_id=second["id"], stream=True)
    last = events(third)[-1]["response"]
    assert last["previous_response_id"] == second["id"]
    prompt = gateway.seen("generate")[-1]["message"]["tokenized"]["original_text"]
    assert "Be brief" not in prompt and "More.<|im_end|>" in prompt and picture_mark in prompt
    assert gateway.call("GET", f"{RESPONSES}/{last['id']}").json["output"] == last["output"]


def test_what_is_kept_can_be_read_and_deleted(gateway: Running) -> None:
    made = ask(gateway, [message(text("a")), message(image(), text("[[say b]]"))]).json
    path = f"{RESPONSES}/{made['id']}"
    assert gateway.call("GET", path).json == made and made["store"] is True
    page = gateway.call("GET", f"{path}/input_items?order=asc&limit=1").json
    assert (page["object"], page["has_more"], len(page["data"])) == ("list", True, 1)
    assert page["data"][0]["content"] == [text("a")] and page["data"][0]["type"] == "message"
    rest = gateway.call("GET", f"{path}/input_items?order=asc&after={page['last_id']}").json
    assert (rest["has_more"], rest["data"][0]["content"][0]["image_url"]) == (False, data_url(picture()))
    assert [item["id"] for item in gateway.call("GET", f"{path}/input_items").json["data"]] == [
        rest["last_id"],
        page["first_id"],
    ]
    assert gateway.call("GET", f"{path}/input_items?limit=0").error == (400, "invalid_value")
    assert gateway.call("GET", f"{path}/input_items?order=up").error == (400, "invalid_value")
    assert gateway.call("POST", f"{path}/cancel").error == (400, "response_already_completed")
    assert gateway.call("DELETE", path).json == {"id": made["id"], "object": "response", "deleted": True}
    for method, route in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
        assert gateway.call(method, route).error == (404, "not_found")
    assert ask(gateway, "hi", previous_response_id=made["id"]).error == (400, "previous_response_not_found")


def test_what_is_not_to_be_kept_is_not(gateway: Running) -> None:
    made = ask(gateway, "hi", store=False).json
    assert made["store"] is False
    assert gateway.call("GET", f"{RESPONSES}/{made['id']}").error == (404, "not_found")


def test_a_failure_before_and_amid_a_stream() -> None:
    with running("--disable-retries") as gateway:
        early = ask(gateway, "[[fault refuse=INTERNAL]]", stream=True)
        assert early.error == (500, "start_generation_failed")
        told = events(ask(gateway, "[[fault break=INTERNAL after=2]]", stream=True))
        last = told[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "worker_stream_failed"
        assert (
            [item["status"] for item in last["response"]["output"]]
            == ["in_progress"]
            == [item["status"] for item in follow(told)]
        )
        assert gateway.call("GET", f"{RESPONSES}/{last['response']['id']}").error == (404, "not_found")


def test_kept_responses_ask_for_the_key() -> None:
    with running("--api-key=k") as gateway:
        key = {"Authorization": "Bearer k"}
        made = gateway.call("POST", RESPONSES, {"model": MODEL, "input": "hi"}, key).json
        path = f"{RESPONSES}/{made['id']}"
        for method, route in (
            ("GET", path),
            ("DELETE", path),
            ("GET", f"{path}/input_items"),
            ("POST", f"{path}/cancel"),
        ):
            assert gateway.call(method, route).error == (401, "invalid_api_key")
        assert gateway.call("GET", path, headers=key).json == made


@pytest.mark.parametrize("flag", ["--history-backend=none", "--history-memory-max-bytes=200"])
def test_an_answer_says_when_it_is_not_kept(flag: str) -> None:
    with running("--pool-processes=1", flag) as gateway:
        made = ask(gateway, "hi" * 50, store=True).json
        assert made["store"] is False
        assert gateway.call("GET", f"{RESPONSES}/{made['id']}").error == (404, "not_found")
        assert ask(gateway, "hi", previous_response_id=made["id"]).error == (400, "previous_response_not_found")
