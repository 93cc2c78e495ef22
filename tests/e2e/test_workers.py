"""The routes of engine workers from outside, in SMG 1.13's shapes: registrations that change, names, loads, caches."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.running import Running, running, until

FIRST, SECOND = "model-one", "model-two"
NOBODY = str(uuid.UUID(int=0))
HERMES = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    engines = [("--model-name", FIRST), ("--model-name", SECOND, "--label", "tool_parser=qwen")]
    flags = ("--model-alias", f"nick={FIRST}", "--model-alias", f"{SECOND}={FIRST}", f"spare={FIRST}")
    with running("--pool-processes=1", *flags, engines=engines) as found:
        until(lambda: all(worker["status"] == "ready" for worker in found.workers()), what="both workers")
        yield found


def worker(gateway: Running, model: str) -> dict[str, Any]:
    (found,) = gateway.call("GET", f"/workers?model={model}").json["workers"]
    return dict(found)


def change(gateway: Running, verb: str, body: Any, model: str = FIRST) -> dict[str, Any]:
    """The worker as it is once a change was accepted."""
    worker_id = worker(gateway, model)["id"]
    answer = gateway.call(verb, f"/workers/{worker_id}", body)
    assert answer.status == 202, answer.body
    message = "Worker update queued for background processing"
    assert answer.json == {"status": "accepted", "worker_id": worker_id, "message": message}
    found: dict[str, Any] = gateway.call("GET", f"/workers/{worker_id}").json
    until(lambda: gateway.call("GET", f"/workers/{worker_id}").json["is_healthy"], what="introduced again")
    return found | gateway.call("GET", f"/workers/{worker_id}").json


@pytest.mark.parametrize("name", ["nick", "spare", FIRST])
def test_a_model_by_any_of_its_names(gateway: Running, name: str) -> None:
    """Answers say what it is called; the engine is asked for nothing else."""
    before = len(gateway.engines[0].seen("generate"))
    assert gateway.chat("hi", model=name).json["model"] == FIRST
    text = {"model": name, "prompt": "hi", "max_tokens": 4}
    assert gateway.call("POST", "/v1/completions", text).json["model"] == FIRST
    message = {"model": name, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert gateway.call("POST", "/v1/messages", message).json["model"] == FIRST
    assert gateway.call("POST", "/v1/responses", {"model": name, "input": "hi"}).json["model"] == FIRST
    assert gateway.call("POST", "/v1/tokenize", {"model": name, "prompt": "hi"}).status == 200
    assert gateway.call("GET", f"/v1/models/{name}").json["id"] == FIRST
    assert gateway.call("GET", f"/get_model_info?model={name}").json["id"] == FIRST
    assert len(gateway.engines[0].seen("generate")) == before + 4
    assert worker(gateway, name)["models"][0]["aliases"] == ["model-two", "nick", "spare"]


def test_a_model_s_own_name_comes_before_an_alias(gateway: Running) -> None:
    assert gateway.chat("hi", model=SECOND).json["model"] == SECOND
    assert worker(gateway, SECOND)["model_id"] == SECOND
    cards = sorted(gateway.call("GET", "/v1/models").json["data"], key=lambda card: str(card["id"]))
    for card, name in zip(cards, (FIRST, SECOND), strict=True):
        assert card.items() >= {"id": name, "object": "model", "created": 0, "owned_by": "self_hosted"}.items()
    assert gateway.chat("hi", model="nobody").error == (404, "model_not_found")


def test_what_is_shown_changes_at_once(gateway: Running) -> None:
    found = change(gateway, "PATCH", {"priority": 70, "cost": 2.5, "unknown": 1})
    assert (found["priority"], found["cost"]) == (70, 2.5)
    assert change(gateway, "PATCH", {})["priority"] == 70


def test_labels_are_added_and_take_effect(gateway: Running) -> None:
    """The worker is introduced again: its model's format of calls is another one afterwards."""
    told = f"[[say {HERMES}]]"
    assert gateway.chat(told, model=SECOND, tools=[WEATHER]).json["choices"][0]["finish_reason"] == "tool_calls"
    found = change(gateway, "PATCH", {"labels": {"tool_parser": "passthrough", "zone": "a"}}, SECOND)
    assert found["labels"]["zone"] == "a" and found["labels"]["served_model_name"] == SECOND
    assert gateway.chat(told, model=SECOND, tools=[WEATHER]).json["choices"][0]["finish_reason"] == "stop"


def test_requests_wait_while_a_worker_is_introduced_again(gateway: Running) -> None:
    worker_id = worker(gateway, FIRST)["id"]
    for number in range(5):
        assert gateway.call("PATCH", f"/workers/{worker_id}", {"labels": {"n": str(number)}}).status == 202
        assert gateway.chat("hi", model=FIRST).status == 200


def test_a_registration_is_replaced_as_a_whole(gateway: Running) -> None:
    url = worker(gateway, FIRST)["url"]
    change(gateway, "PATCH", {"priority": 70, "labels": {"zone": "b"}})
    models = [{"id": FIRST, "aliases": ["another"], "context_length": 1000}]
    found = change(gateway, "PUT", {"url": url, "cost": 3, "models": models})
    assert (found["priority"], found["cost"]) == (50, 3.0) and "zone" not in found["labels"]
    assert found["models"][0]["context_length"] == 1000
    assert gateway.chat("hi", model="another").json["model"] == FIRST
    assert gateway.chat("word " * 2000, model="another").error == (400, "context_length_exceeded")
    change(gateway, "PUT", {"url": url})
    assert gateway.chat("hi", model="another").error == (404, "model_not_found")


@pytest.mark.parametrize(
    ("verb", "place", "body", "status", "code"),
    [
        ("PATCH", NOBODY, {"priority": 1}, 404, "WORKER_NOT_FOUND"),
        ("PUT", NOBODY, {"url": "grpc://127.0.0.1:1"}, 404, "WORKER_NOT_FOUND"),
        ("PATCH", "", {"priority": "high"}, 400, "BAD_REQUEST"),
        ("PATCH", "", b"{", 400, "BAD_REQUEST"),
        ("PUT", "", {"priority": 1}, 400, "BAD_REQUEST"),
        ("PUT", "", {"url": "grpc://127.0.0.1:1"}, 400, "BAD_REQUEST"),
        ("PUT", "", {"url": "http://127.0.0.1:1"}, 400, "BAD_REQUEST"),
    ],
)
def test_changes_that_cannot_be(gateway: Running, verb: str, place: str, body: Any, status: int, code: str) -> None:
    before = worker(gateway, FIRST)
    answer = gateway.call(verb, f"/workers/{place or before['id']}", body)
    assert (answer.status, answer.json["code"]) == (status, code) and answer.json["error"]
    assert answer.headers["x-smg-error-code"] == code
    assert worker(gateway, FIRST) == before


def test_loads_and_caches(gateway: Running) -> None:
    told = gateway.call("GET", "/loads").json
    assert [row["worker"] for row in told["loads"]] == [engine.url for engine in gateway.engines]
    assert told["dp_rank_count"] == 2 and told["loads"][0]["max_running_requests"] == 256
    assert told["aggregate"]["total_reqs"] == 0 and told["aggregate"]["avg_token_usage"] == 0.0
    flushed = gateway.call("POST", "/flush_cache")
    assert flushed.status == 200 and flushed.json == {
        "status": "success",
        "message": "Successfully flushed cache on all 2 workers",
        "workers_flushed": 2,
        "total_http_workers": 0,
        "total_grpc_workers": 2,
        "total_zmq_workers_skipped": 0,
        "total_workers": 2,
    }


def test_engines_are_asked_how_they_are() -> None:
    with running("--pool-processes=1") as gateway:
        assert gateway.call("GET", "/health_generate").status == 200
        gateway.engine.stop()
        answer = gateway.call("GET", "/health_generate")
        assert (answer.status, answer.body) == (503, b"no engine worker is healthy")


def test_a_worker_that_does_not_answer_is_told_apart(gateway: Running) -> None:
    """It is not in `/loads`, and its cache was not flushed; the others' answers come all the same."""
    added = gateway.call("POST", "/workers", {"url": "grpc://127.0.0.1:9"}).json["worker_id"]
    assert len(gateway.call("GET", "/loads").json["loads"]) == 2
    answer = gateway.call("POST", "/flush_cache")
    assert answer.status == 206 and answer.json["status"] == "partial_success"
    assert answer.json["message"] == "Cache flush: 2 succeeded, 1 failed"
    assert answer.json["successful"] == [engine.url for engine in gateway.engines]
    assert [row["worker"] for row in answer.json["failed"]] == ["grpc://127.0.0.1:9"]
    assert gateway.call("DELETE", f"/workers/{added}").status == 202
    until(lambda: len(gateway.workers()) == 2, what="the worker is gone")
    assert gateway.call("PATCH", f"/workers/{added}", {"priority": 1}).status == 404


def test_a_misspelt_role_is_told_with_those_there_are(gateway: Running) -> None:
    answer = gateway.call("POST", "/workers", {"url": "grpc://127.0.0.1:1", "worker_type": "prefil"})
    assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
    assert answer.json["error"] == (
        "invalid worker: worker_type: Invalid enum value 'prefil', expected one of decode, encode, prefill, regular"
    )
