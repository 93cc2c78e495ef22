"""What `/openapi.json` says of the answers is so: each of many kinds is decoded with its type, which knows no further
members; and schemathesis makes requests from the document (`tools/fuzz_openapi.py`).
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from pipeline.protocols.described import (
    chat,
    completions,
    messages,
    models,
    response_events,
    responses,
    tokens,
    workers,
)
from pipeline.protocols.described.errors import Error, MessagesError
from pipeline.protocols.described.operation import Operation
from tests.e2e.running import CHAT, MODEL, Answer, Running, image_part, picture, question, running, text_part, until
from tools import fuzz_openapi

CALL = '[[say <tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>]]'
THOUGHT = "[[say <think>hm</think>Yes.]]"
LOOK: dict[str, Any] = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": LOOK}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running("--reasoning-parser=qwen3") as found:
        yield found


def is_what_is_said(answer: Answer, about: Operation) -> Any:
    assert answer.status == about.status, answer.body
    assert about.headers.keys() <= {name.title() for name in answer.headers}
    return msgspec.json.decode(answer.body, type=about.gives)


def events(answer: Answer, about: Operation) -> list[Any]:
    """The stream's events, each as one of the types the document names."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.body
    lines = [line for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    payloads = [line.removeprefix("data: ") for line in lines]
    if about.last is not None:
        assert payloads.pop() == about.last
    return [_one_of(payload, about.events) for payload in payloads]


def _one_of(payload: str, kinds: tuple[Any, ...]) -> Any:
    faults = []
    for kind in kinds:
        try:
            return msgspec.json.decode(payload, type=kind)
        except msgspec.ValidationError as error:
            faults.append(f"{kind.__name__}: {error}")
    raise AssertionError(f"{payload} is none of {faults}")


CHATS: Mapping[str, dict[str, Any]] = {
    "words": question("hi", stop=["prompt"]),
    "picture": question([image_part(picture()), text_part("?")]),
    "several": question("hi", n=3, logprobs=True, top_logprobs=2),
    "a call": question(CALL, tools=[TOOL]),
    "a thought": question(THOUGHT),
    "cut": question("hi", max_tokens=2),
}


@pytest.mark.parametrize("name", CHATS)
def test_chat(gateway: Running, name: str) -> None:
    whole = is_what_is_said(gateway.call("POST", CHAT, CHATS[name]), chat.CHAT)
    streamed = events(gateway.call("POST", CHAT, {**CHATS[name], "stream": True}), chat.CHAT)
    counted = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert len(events(gateway.call("POST", CHAT, {**CHATS[name], **counted}), chat.CHAT)) == len(streamed) + 1
    message = whole.choices[0].message
    if name == "a call":
        assert message.tool_calls and any(event.choices[0].delta.tool_calls for event in streamed)
    if name == "a thought":
        assert message.reasoning_content == "hm"


@pytest.mark.parametrize(
    "fields", [{}, {"thinking": {"type": "adaptive"}}, {"tools": [{"name": "look", "input_schema": {}}]}]
)
@pytest.mark.parametrize("text", ["hi", CALL, THOUGHT])
def test_messages(gateway: Running, text: str, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": text}], **fields}
    is_what_is_said(gateway.call("POST", "/v1/messages", body), messages.MESSAGES)
    assert len(events(gateway.call("POST", "/v1/messages", {**body, "stream": True}), messages.MESSAGES)) > 4
    is_what_is_said(gateway.call("POST", "/v1/messages/count_tokens", body), messages.COUNT_TOKENS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [{"type": "function", **LOOK}]},
        {"max_output_tokens": 2},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ],
)
@pytest.mark.parametrize("text", ["hi", CALL, THOUGHT])
def test_responses(gateway: Running, text: str, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": text, **fields}
    made = is_what_is_said(gateway.call("POST", "/v1/responses", body), responses.RESPONSES)
    streamed = gateway.call("POST", "/v1/responses", {**body, "stream": True})
    told = events(streamed, responses.RESPONSES)
    assert [event.sequence_number for event in told] == list(range(len(told)))
    last = response_events.CutShort if "max_output_tokens" in fields else response_events.Completed
    assert isinstance(told[0], response_events.Created) and isinstance(told[-1], last)
    assert told[-1].response.output == [
        event.item for event in told if isinstance(event, response_events.ItemDone)
    ] and len(told[-1].response.output) == len(made.output)
    path = f"/v1/responses/{made.id}"
    is_what_is_said(gateway.call("GET", path), responses.GET_RESPONSE)
    is_what_is_said(gateway.call("GET", f"{path}/input_items?order=asc&limit=1"), responses.INPUT_ITEMS)
    is_what_is_said(gateway.call("DELETE", path), responses.DELETE_RESPONSE)


@pytest.mark.parametrize("fields", [{}, {"echo": True, "n": 2}, {"logprobs": 2}, {"max_tokens": 1}])
def test_completions(gateway: Running, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "prompt": "one two", **fields}
    is_what_is_said(gateway.call("POST", "/v1/completions", body), completions.COMPLETIONS)
    assert events(gateway.call("POST", "/v1/completions", {**body, "stream": True}), completions.COMPLETIONS)


def test_tokens(gateway: Running) -> None:
    for prompt in ("hello", ["hello", "you"]):
        told = gateway.call("POST", "/v1/tokenize", {"model": MODEL, "prompt": prompt})
        ids = is_what_is_said(told, tokens.TOKENIZE).tokens
        is_what_is_said(gateway.call("POST", "/v1/detokenize", {"model": MODEL, "tokens": ids}), tokens.DETOKENIZE)


def test_models_and_health(gateway: Running) -> None:
    for path, about in (
        ("/v1/models", models.MODELS),
        (f"/v1/models/{MODEL}", models.MODEL),
        ("/get_model_info", models.MODEL_INFO),
        ("/get_server_info", models.SERVER_INFO),
        ("/readiness", models.READINESS),
        ("/openapi.json", models.DOCUMENT),
    ):
        is_what_is_said(gateway.call("GET", path), about)
    for path in ("/health", "/liveness"):
        assert gateway.call("GET", path).headers["content-type"].startswith("text/plain")


def test_workers(gateway: Running) -> None:
    listed = is_what_is_said(gateway.call("GET", "/workers"), workers.LIST_WORKERS)
    is_what_is_said(gateway.call("GET", f"/workers/{listed.workers[0].id}"), workers.GET_WORKER)
    spec = {"url": "grpc://127.0.0.1:9"}
    added = is_what_is_said(gateway.call("POST", "/workers", spec), workers.ADD_WORKER)
    again = gateway.call("POST", "/workers", spec)
    assert again.status == 409 and msgspec.json.decode(again.body, type=workers.ADD_WORKER.others[409])
    is_what_is_said(gateway.call("DELETE", f"/workers/{added.worker_id}"), workers.REMOVE_WORKER)


# A request to every route that is answered with success, by the document's own words; None: without a body.
WAYS: Mapping[str, Any] = {
    "GET /": None,
    "GET /openapi.json": None,
    "GET /health": None,
    "GET /liveness": None,
    "GET /readiness": None,
    "GET /health_generate": None,
    "GET /get_server_info": None,
    "GET /get_model_info": None,
    "GET /v1/models": None,
    "GET /v1/models/{id}": None,
    "POST /v1/chat/completions": question("hi"),
    "POST /v1/completions": {"model": MODEL, "prompt": "hi"},
    "POST /v1/messages": {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "POST /v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "POST /v1/responses": {"model": MODEL, "input": "hi"},
    "GET /v1/responses/{id}": None,
    "GET /v1/responses/{id}/input_items": None,
    "DELETE /v1/responses/{id}": None,
    "POST /v1/responses/{id}/cancel": None,
    "POST /v1/conversations": {"items": [{"role": "user", "content": "hi"}], "metadata": {"a": "b"}},
    "GET /v1/conversations/{id}": None,
    "POST /v1/conversations/{id}": {"metadata": {"c": "d"}},
    "DELETE /v1/conversations/{id}": None,
    "GET /v1/conversations/{id}/items": None,
    "POST /v1/conversations/{id}/items": {"items": [{"role": "user", "content": "and"}]},
    "GET /v1/conversations/{id}/items/{item_id}": None,
    "DELETE /v1/conversations/{id}/items/{item_id}": None,
    "POST /generate": {"model": MODEL, "text": "hi"},
    "POST /v1/tokenize": {"model": MODEL, "prompt": "hi"},
    "POST /v1/detokenize": {"model": MODEL, "tokens": [1, 2]},
    "POST /parse/function_call": {"text": "hi", "tools": [TOOL], "tool_call_parser": "qwen"},
    "POST /parse/reasoning": {"text": "<think>a</think>b", "reasoning_parser": "qwen3"},
    "GET /workers": None,
    "POST /workers": {"url": "grpc://127.0.0.1:7"},
    "GET /workers/{id}": None,
    "PATCH /workers/{id}": {"priority": 60},
    "PUT /workers/{id}": {"url": "grpc://127.0.0.1:8"},
    "DELETE /workers/{id}": None,
    "GET /loads": None,
    "GET /get_loads": None,
    "POST /flush_cache": None,
}
UNDER_WAY = {"model": MODEL, "input": "[[fault slow=20000]]", "background": True}


@pytest.fixture(scope="module")
def document(gateway: Running) -> dict[str, Any]:
    found: dict[str, Any] = gateway.call("GET", "/openapi.json").json
    return found


def test_every_route_has_its_way(document: dict[str, Any]) -> None:
    told = {f"{verb.upper()} {path}" for path, verbs in document["paths"].items() for verb in verbs}
    assert told == WAYS.keys()


@pytest.mark.parametrize("way", WAYS)
def test_every_route_answers_as_the_document_says(gateway: Running, document: dict[str, Any], way: str) -> None:
    verb, path = way.split()
    with _there(gateway, path) as place:
        answer = gateway.call(verb, place, WAYS[way])
    assert answer.status < 300, answer.body
    said = document["paths"][path][verb.lower()]["responses"][str(answer.status)]
    assert "x-request-id" in answer.headers and "x-request-id" in said["headers"]
    kind = answer.headers["content-type"].partition(";")[0]
    schema = said["content"][kind]["schema"]
    value = answer.json if kind == "application/json" else answer.body.decode()
    jsonschema_rs.validator_for({**schema, "components": document["components"]}).validate(value)


@contextlib.contextmanager
def _there(gateway: Running, path: str) -> Iterator[str]:
    """The path with ids of what is there, and what was registered for it gone again."""
    if "{" not in path:
        yield path
        return
    if path.startswith("/v1/models"):
        yield path.format(id=MODEL)
    elif path.startswith("/workers"):
        worker = gateway.call("POST", "/workers", {"url": "grpc://127.0.0.1:8"}).json["worker_id"]
        yield path.format(id=worker)
        gateway.call("DELETE", f"/workers/{worker}")
        until(lambda: gateway.call("GET", f"/workers/{worker}").status == 404, what="the worker is gone")
    elif path.startswith("/v1/responses"):
        asked = UNDER_WAY if path.endswith("/cancel") else WAYS["POST /v1/responses"]
        yield path.format(id=gateway.call("POST", "/v1/responses", asked).json["id"])
    else:
        made = gateway.call("POST", "/v1/conversations", WAYS["POST /v1/conversations"]).json["id"]
        items = gateway.call("GET", f"/v1/conversations/{made}/items").json["data"]
        yield path.format(id=made, item_id=items[0]["id"])


def test_refusals(gateway: Running) -> None:
    for path, kind in ((CHAT, Error), ("/v1/messages", MessagesError)):
        answer = gateway.call("POST", path, {"model": MODEL})
        assert answer.status == 400 and msgspec.json.decode(answer.body, type=kind)


def test_a_stream_that_breaks_off(gateway: Running) -> None:
    fault = "[[fault break=INTERNAL after=3]]"
    body = {"model": MODEL, "max_tokens": 99, "stream": True}
    chats = events(gateway.call("POST", CHAT, question(fault, stream=True)), chat.CHAT)
    assert isinstance(chats[-1], chat.StreamError)
    whole = {**body, "messages": [{"role": "user", "content": fault}]}
    assert isinstance(events(gateway.call("POST", "/v1/messages", whole), messages.MESSAGES)[-1], messages.MessageError)
    asked = {"model": MODEL, "input": fault, "stream": True}
    *_, last = events(gateway.call("POST", "/v1/responses", asked), responses.RESPONSES)
    assert isinstance(last, response_events.Failed) and last.response.error.code == "worker_stream_failed"


def test_schemathesis_finds_nothing() -> None:
    """A few hundred requests; a minute's and longer runs are made by hand."""
    code, report = fuzz_openapi.run("--seed", "5", "--max-examples", "6", "--phases", "fuzzing")
    assert code == 0 and "No issues found" in report, report


def test_schemathesis_would_find_an_answer_that_is_not_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a document that lies."""

    def lying(document: dict[str, Any]) -> dict[str, Any]:
        del document["components"]["schemas"]["ModelCard"]["properties"]["multimodal"]
        return document

    monkeypatch.setattr(fuzz_openapi, "narrowed", lying)
    code, report = fuzz_openapi.run(
        "--seed", "5", "--max-examples", "1", "--phases", "fuzzing", "--include-path", "/v1/models"
    )
    assert code == 1 and "'multimodal' was unexpected" in report
