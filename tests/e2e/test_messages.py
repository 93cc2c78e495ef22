"""The Messages API from outside: a stream's events in order, errors in Anthropic's shape, its key, counting tokens."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.running import MODEL, Answer, Running, picture, running, until
from tests.pipeline.bundles import unpack_bundle

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
KEY = {"Authorization": "Bearer k"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running("--api-key=k", engine=("--text", "One. Two. Three.", "--tokens-per-chunk", "1")) as found:
        yield found


def block(file: bytes) -> dict[str, Any]:
    data = base64.b64encode(file).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def question(*blocks: Any, **fields: Any) -> dict[str, Any]:
    content = list(blocks) or "hi"
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": content}], **fields}


def ask(gateway: Running, *blocks: Any, **fields: Any) -> Answer:
    return gateway.call("POST", MESSAGES, question(*blocks, **fields), KEY)


def events(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == body["type"] for name, body in found)
    return found


def test_a_stream_says_the_same_as_a_whole_answer(gateway: Running) -> None:
    picture_block = block(picture())
    whole = ask(gateway, picture_block).json
    told = events(ask(gateway, picture_block, stream=True))
    names = [name for name, _ in told]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"} and len(names) > 8
    text = "".join(body["delta"]["text"] for name, body in told if name == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}] and text == "One. Two. Three."
    start, end = told[0][1]["message"], told[-2][1]
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 60
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0
    assert (whole["stop_reason"], end["delta"]["stop_reason"]) == ("end_turn", "end_turn")
    assert start["id"].startswith("msg_") and start["content"] == [] and start["stop_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"stop_sequences": ["q", "Two", "x", "y", "z"]}, "stop_sequence", "Two", "One. "),
        ({"max_tokens": 3}, "max_tokens", None, "One"),
    ],
)
def test_why_it_stopped(
    gateway: Running, stream: bool, fields: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    answer = ask(gateway, stream=stream, **fields)
    if stream:
        told = events(answer)
        ending = told[-2][1]["delta"]
        said = "".join(body["delta"]["text"] for name, body in told if name == "content_block_delta")
    else:
        ending = answer.json
        said = answer.json["content"][0]["text"]
    assert (ending["stop_reason"], ending["stop_sequence"], said) == (reason, sequence, text)


def test_tokens_are_counted_with_media_expanded_and_without_the_engine(gateway: Running) -> None:
    blocks = [{"type": "text", "text": "What?"}, block(picture())]
    used = ask(gateway, *blocks, system="Be brief").json["usage"]["input_tokens"]
    before = len(gateway.seen())
    body = question(*blocks, system="Be brief")
    del body["max_tokens"]
    counted = gateway.call("POST", COUNT, body, KEY)
    assert (counted.status, counted.json) == (200, {"input_tokens": used})
    text_only = gateway.call("POST", COUNT, question(system="Be brief"), KEY).json["input_tokens"]
    assert 0 < text_only < used - 50
    assert len(gateway.seen()) == before


def test_a_count_does_not_wait_for_a_healthy_engine() -> None:
    with running() as gateway:
        gateway.engine.stop()
        until(lambda: not gateway.ready(), what="the engine to be missed")
        answer = gateway.call("POST", COUNT, question(block(picture())))
        assert answer.status == 200 and answer.json["input_tokens"] > 60
        gateway.given_back()
        assert gateway.call("POST", MESSAGES, question()).json["error"]["type"] == "api_error"


WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def put_together(answer: Answer) -> dict[str, Any]:
    """A stream's blocks and reason, as a whole answer has them; blocks never overlap."""
    blocks: list[dict[str, Any]] = []
    is_open, told = False, events(answer)
    for name, body in told:
        if name == "content_block_start":
            assert not is_open and body["index"] == len(blocks)
            is_open = True
            blocks.append({**body["content_block"], "json": ""})
        elif name == "content_block_delta":
            assert is_open and body["index"] == len(blocks) - 1
            for word in ("text", "thinking"):
                blocks[-1][word] = blocks[-1].get(word, "") + body["delta"].get(word, "")
            blocks[-1]["json"] += body["delta"].get("partial_json", "")
        elif name == "content_block_stop":
            is_open = False
    return {"content": [plain(block) for block in blocks], "stop_reason": told[-2][1]["delta"]["stop_reason"]}


def plain(block: dict[str, Any]) -> dict[str, Any]:
    """A block without its id; the input that a stream spells is read."""
    if block["type"] == "tool_use":
        assert block["id"].startswith("toolu_")
        given = json.loads(block["json"]) if block.get("json") else block["input"]
        return {"type": "tool_use", "name": block["name"], "input": given}
    word = "thinking" if block["type"] == "thinking" else "text"
    return {"type": block["type"], word: block[word]}


def both(gateway: Running, text: str, **fields: Any) -> dict[str, Any]:
    """What is told, which is the same in both ways."""
    say = {"type": "text", "text": f"[[say {text}]]"}
    answer = gateway.call("POST", MESSAGES, question(say, **fields))
    assert answer.status == 200, answer.body
    whole = {
        "content": [plain(block) for block in answer.json["content"]],
        "stop_reason": answer.json["stop_reason"],
    }
    assert put_together(gateway.call("POST", MESSAGES, question(say, stream=True, **fields))) == whole
    return whole


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With a template that shows tools, and a model that reasons."""
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    with running("--pool-processes=1", engine=("--bundle", str(bundle), "--tokens-per-chunk", "2")) as found:
        yield found


def test_calls_are_blocks(thinker: Running) -> None:
    found = both(thinker, f"Let me see.{CALL}\n{CALL}", tools=[WEATHER])
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    assert found == {"content": [{"type": "text", "text": "Let me see."}, use, use], "stop_reason": "tool_use"}
    one = both(
        thinker, f"{CALL}\n{CALL}", tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert one["content"] == [use]
    none = both(thinker, CALL, tools=[WEATHER], tool_choice={"type": "none"})
    assert none == {"content": [{"type": "text", "text": CALL}], "stop_reason": "end_turn"}


def test_choices_of_tools_hold_the_engine(thinker: Running) -> None:
    for choice, text in (
        ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "Paris"}}]'),
        ({"type": "tool", "name": "weather"}, '{"city": "Paris"}'),
    ):
        found = both(
            thinker, text, tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}], tool_choice=choice
        )
        assert found["content"] == [{"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}]
        sent = thinker.seen("generate")[-1]["message"]
        assert "json_schema" in sent["sampling_params"]
        assert (
            '"weather"' in sent["tokenized"]["original_text"] and "web_search" not in sent["tokenized"]["original_text"]
        )


def test_reasoning_is_a_block_when_thinking_was_asked_for(thinker: Running) -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    thinking = {"type": "enabled", "budget_tokens": 5}
    assert both(thinker, text, thinking=thinking)["content"] == [
        {"type": "thinking", "thinking": "\nhm\n"},
        {"type": "text", "text": "\n\nYes."},
    ]
    assert both(thinker, text)["content"] == [{"type": "text", "text": text}]


def check_error(answer: Answer, status: int, kind: str, code: str) -> None:
    assert answer.status == status and answer.headers["x-smg-error-code"] == code
    body = answer.json
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert set(body["error"]) == {"type", "message", "code", "param"} and body["error"]["message"]
    assert body["request_id"] == answer.headers["x-request-id"]


REFUSED: list[tuple[str, str, Any, dict[str, str], int, str, str]] = [
    ("POST", MESSAGES, b"{", KEY, 400, "invalid_request_error", "invalid_json"),
    ("POST", MESSAGES, b"{}", {**KEY, "Content-Type": "text/plain"}, 400, "invalid_request_error", "json_parse_error"),
    ("POST", MESSAGES, question(), {}, 401, "authentication_error", "invalid_api_key"),
    ("POST", COUNT, question(), {"Authorization": "no"}, 401, "authentication_error", "invalid_api_key"),
    ("POST", COUNT, question(), {"x-api-key": "no"}, 401, "authentication_error", "invalid_api_key"),
    ("POST", COUNT, question(), {"x-api-key": "k\xff"}, 401, "authentication_error", "invalid_api_key"),
    ("POST", MESSAGES, question(model="nope"), KEY, 404, "not_found_error", "model_not_found"),
    ("POST", COUNT, question(model="nope"), KEY, 404, "not_found_error", "model_not_found"),
    ("POST", MESSAGES + "/nope", question(), KEY, 404, "not_found_error", "unknown_url"),
    ("GET", MESSAGES, None, KEY, 405, "invalid_request_error", "method_not_allowed"),
    ("POST", MESSAGES, question(block(b"GIF8")), KEY, 400, "invalid_request_error", "multimodal_processing_failed"),
    ("POST", COUNT, question(block(b"GIF8")), KEY, 400, "invalid_request_error", "multimodal_processing_failed"),
    ("POST", MESSAGES, question(top_k=2**32), KEY, 400, "invalid_request_error", "integer_above_max_value"),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "kind", "code"), REFUSED)
def test_every_error_is_anthropic_s(
    gateway: Running,
    method: str,
    path: str,
    body: Any,
    headers: dict[str, str],
    status: int,
    kind: str,
    code: str,
) -> None:
    check_error(gateway.call(method, path, body, headers), status, kind, code)


def test_the_key_in_anthropic_s_header_opens_these_routes_only(gateway: Running) -> None:
    key = {"x-api-key": "k"}
    assert gateway.call("POST", MESSAGES, question(), key).status == 200
    assert gateway.call("POST", COUNT, question(), key).status == 200
    assert gateway.call("GET", "/workers", headers=key).error == (401, "invalid_api_key")
    assert gateway.call("POST", "/v1/nope", {}, key).json.keys() == {"error"}


def test_a_body_above_the_limit_and_a_full_house() -> None:
    flags = ("--max-payload-size=2000", "--max-concurrent-requests=1", "--queue-size=0")
    with running(*flags, engine=("--latency-ms", "3000")) as gateway:
        large = question("x" * 3000)
        check_error(gateway.call("POST", MESSAGES, large), 413, "request_too_large", "request_body_too_large")
        with gateway.open_chat("hi"):
            until(lambda: gateway.seen("generate"), what="a request at the engine")
            answer = gateway.call("POST", MESSAGES, question())
            check_error(answer, 429, "rate_limit_error", "admission_queue_full")
            assert "retry-after" in answer.headers


def test_a_failure_before_and_amid_a_stream() -> None:
    with running("--disable-retries") as gateway:
        early = gateway.call(
            "POST", MESSAGES, question({"type": "text", "text": "[[fault refuse=INTERNAL]]"}, stream=True)
        )
        check_error(early, 500, "api_error", "start_generation_failed")
        late = gateway.call(
            "POST", MESSAGES, question({"type": "text", "text": "[[fault break=INTERNAL after=2]]"}, stream=True)
        )
        told = events(late)
        assert late.status == 200 and told[0][0] == "message_start"
        name, last = told[-1]
        assert name == "error" and (last["error"]["type"], last["error"]["code"]) == (
            "api_error",
            "worker_stream_failed",
        )
        assert "message_stop" not in [name for name, _ in told]


def test_a_silent_engine_s_stream_is_pinged_by_name() -> None:
    flags = ("--sse-keepalive-secs=0.2",)
    with running(*flags, engine=("--text", "abc", "--token-ms", "500", "--tokens-per-chunk", "1")) as gateway:
        told = events(gateway.call("POST", MESSAGES, question(stream=True)))
        assert ("ping", {"type": "ping"}) in told
        assert [name for name, _ in told if name != "ping"][-1] == "message_stop"
