"""Media references through the whole gateway: usage as the worker tells it, its causes, changes of the fleet, and that
nothing stays behind.
"""

import concurrent.futures
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.origin import media_host
from tests.e2e.running import (
    MODEL,
    Answer,
    Running,
    data_url,
    image_part,
    picture,
    question,
    running,
    text_part,
    until,
)
from tests.e2e.test_messages import events as named_events
from tools.fake.servicer import REFERENCE_TOKENS

PROCESSOR = ("--label", "mm_processor=inprocess", "--label", "mm_media_ref_schemes=http,https,data")
RETRIES = ("--retry-max-retries=3", "--retry-initial-backoff-ms=5")
FILE = picture()
COUNTED = "smg_mm_processing_total{"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(*RETRIES, "--pool-processes=1", engine=PROCESSOR) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_held(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "gateway" in request.fixturenames:
        request.getfixturevalue("gateway").given_back()


def counted(gateway: Running, mode: str, reason: str) -> float:
    return gateway.metric(f'{COUNTED}mode="{mode}",model="{MODEL}",reason="{reason}"}}')


def prompt_tokens(record: dict[str, Any]) -> int:
    """What the stand-in says the prompt became."""
    found: int = sum(count for _, count in record["input_ids"]) + (REFERENCE_TOKENS - 1) * len(record["references"])
    return found


TWO = [text_part("one"), image_part(FILE), text_part("two"), image_part(FILE)]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_chat_is_what_the_worker_tells(gateway: Running, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = gateway.chat(TWO, stream=stream, **options)
    assert answer.status == 200
    usage = answer.events[-2]["usage"] if stream else answer.json["usage"]
    record = gateway.seen("generate")[-1]
    assert len(record["references"]) == 2 and record["media"] == []
    assert usage["prompt_tokens"] == prompt_tokens(record)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    until(lambda: gateway.access(answer.headers["x-request-id"]), what="the access line")
    (line,) = gateway.access(answer.headers["x-request-id"])
    assert f"prompt_tokens={prompt_tokens(record)} " in line


@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_messages(gateway: Running, stream: bool) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": data_url(FILE).partition(",")[2]}
    content = [{"type": "image", "source": source}, text_part("?")]
    body = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": content}], "stream": stream}
    answer = gateway.call("POST", "/v1/messages", body)
    record = gateway.seen("generate")[-1]
    assert record["references"] == [["image", data_url(FILE)]]
    if not stream:
        assert answer.json["usage"]["input_tokens"] == prompt_tokens(record)
        return
    events = dict(named_events(answer))
    assert events["message_start"]["message"]["usage"]["input_tokens"] == prompt_tokens(record)
    assert events["message_delta"]["usage"]["input_tokens"] == prompt_tokens(record)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_responses(gateway: Running, stream: bool) -> None:
    content = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": "http://host.example/a.png"}]
    body = {"model": MODEL, "input": [{"role": "user", "content": content}], "stream": stream}
    answer = gateway.call("POST", "/v1/responses", body)
    record = gateway.seen("generate")[-1]
    assert record["references"] == [["image", "http://host.example/a.png"]]
    told = named_events(answer)[-1][1]["response"] if stream else answer.json
    assert told["usage"]["input_tokens"] == prompt_tokens(record)


def test_nothing_is_fetched_and_nothing_decoded(gateway: Running) -> None:
    with media_host() as host:
        host.serve({"/a.png": {"file": "pictures/oracle/png_rgb_256.png"}})
        urls = [f"{host.base}/a.png", data_url(b"no picture at all")]
        assert ask(gateway, *urls).status == 200 and host.hits == {}
    assert [url for _, url in gateway.seen("generate")[-1]["references"]] == urls
    inspected = [line for line in gateway.metrics().splitlines() if 'stage="inspect"' in line]
    assert inspected == [] and counted(gateway, "worker", "auto_uniform") > 0


def ask(gateway: Running, *urls: str, text: str = "?", headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return gateway.call("POST", "/v1/chat/completions", question([*parts, text_part(text)], **fields), headers)


def test_a_large_data_url_arrives_as_it_was_written(gateway: Running) -> None:
    urls = [data_url(os.urandom(size)) for size in (4_000_000, 70_000)]
    assert ask(gateway, urls[0], urls[1], urls[0]).status == 200
    assert [url for _, url in gateway.seen("generate")[-1]["references"]] == [urls[0], urls[1], urls[0]]


def test_data_urls_wait_for_room() -> None:
    """Room for two of them at a time: the others wait, none is refused, and one that never fits is."""
    flags = ("--pool-ring-bytes=16777216", "--pool-processes=1", "--mm-processing=worker")
    with running(*flags, engine=(*PROCESSOR, "--latency-ms=100")) as gateway:
        urls = [data_url(os.urandom(1_400_000)) for _ in range(6)]
        with concurrent.futures.ThreadPoolExecutor(len(urls)) as clients:
            answers = list(clients.map(lambda url: ask(gateway, url), urls))
        assert [answer.status for answer in answers] == [200] * len(urls)
        assert sorted(one["references"][0][1] for one in gateway.seen("generate")) == sorted(urls)
        assert ask(gateway, data_url(os.urandom(3_500_000))).error == (413, "multimodal_payload_too_large")
        gateway.given_back()


# ---------------------------------------------------------------- causes


@pytest.mark.parametrize(
    ("status", "details", "http_status", "attempts"),
    [
        ("INVALID_ARGUMENT", "media_refs[0:fetch_failed:404", 400, 1),
        ("INVALID_ARGUMENT", "media_too_large:600000000_bytes", 400, 1),
        ("UNAVAILABLE", "worker_is_saturated", 503, 3),
        ("UNAVAILABLE", "sidecar_overloaded:256_jobs", 503, 3),
        ("UNAVAILABLE", "sidecar_timeout:no_result_for_job_1f", 503, 1),
    ],
)
def test_what_the_worker_says(gateway: Running, status: str, details: str, http_status: int, attempts: int) -> None:
    before = len(gateway.seen("generate"))
    answer = ask(gateway, data_url(FILE), text=f"[[fault refuse={status} message={details}]]")
    assert answer.error == (http_status, "start_generation_failed")
    assert answer.message == f"Failed to start generation: {details}"
    assert ("retry-after" in answer.headers) == (http_status == 503)
    asked = gateway.seen("generate")[before:]
    assert len(asked) == attempts
    assert all(one["references"] == [["image", data_url(FILE)]] for one in asked), "each attempt has the whole URL"


def test_no_payload_comes_back(gateway: Running) -> None:
    for quoted, told in [("data:image/png;base64,iVBORw0KGgo=", "data:..."), ("http://h/a?key=1", "http://h/a")]:
        answer = ask(gateway, data_url(FILE), text=f"[[fault refuse=INVALID_ARGUMENT message={quoted}]]")
        assert answer.message == f"Failed to start generation: {told}"


def test_a_client_that_leaves_takes_its_urls_along(gateway: Running) -> None:
    connection = gateway.open_chat([image_part(FILE), text_part("[[fault silent]]")])
    until(lambda: "inputs" in gateway.held(), what="the data URL in the input arena")
    connection.close()
    gateway.given_back()
    until(lambda: gateway.seen("abort"), what="the abort")


# ---------------------------------------------------------------- hosts


def test_our_list_of_domains_holds_for_references() -> None:
    flags = ("--mm-processing=worker", "--mm-allowed-media-domains=good.example,127.0.0.1")
    with running(*flags, engine=PROCESSOR) as gateway:
        assert ask(gateway, "http://good.example/a.png", data_url(FILE)).status == 200
        refused = ask(gateway, data_url(FILE), "http://evil.example/a.png")
        assert refused.error == (400, "multimodal_processing_failed")
        assert "media item 1: " in refused.message and "'evil.example' is not an allowed" in refused.message
        assert ask(gateway, "http://127.0.0.1:9/a.png").status == 200
        through_proxy = ask(gateway, "http://127.0.0.1:9/a.png", headers={"X-Forwarded-For": "198.51.100.7"})
        assert through_proxy.error == (400, "multimodal_processing_failed")
        assert len(gateway.seen("generate")) == 2


# ---------------------------------------------------------------- the fleet


def test_auto_follows_the_fleet_not_its_health() -> None:
    with running(*RETRIES, "--health-failure-threshold=1", engines=[PROCESSOR, PROCESSOR]) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        first, second = gateway.engines
        assert ask(gateway, data_url(FILE)).status == 200
        second.kill()
        until(lambda: not all(worker["is_healthy"] for worker in gateway.workers()))
        assert all(ask(gateway, data_url(FILE)).status == 200 for _ in range(3))
        assert counted(gateway, "worker", "auto_uniform") == 4
        assert all(one["references"] for one in first.seen("generate"))

        second.start()  # without a media processor
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        for _ in range(2):
            assert ask(gateway, data_url(FILE)).status == 200
        assert counted(gateway, "router", "auto_mixed") == 2
        assert all(one["media"] and not one["references"] for one in second.seen("generate"))

        (removed,) = [worker for worker in gateway.workers() if worker["url"] == second.url]
        gateway.call("DELETE", f"/workers/{removed['id']}")
        assert ask(gateway, data_url(FILE)).status == 200
        assert counted(gateway, "worker", "auto_uniform") == 5, "one on its way out does not count"
        gateway.given_back()


def test_worker_mode_in_a_mixed_fleet() -> None:
    with running("--mm-processing=worker", engines=[(), PROCESSOR]) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        plain, ready = gateway.engines
        assert [ask(gateway, data_url(FILE)).status for _ in range(4)] == [200] * 4
        assert len(ready.seen("generate")) == 4 and plain.seen("generate") == []
        ready.kill()
        until(lambda: not all(worker["is_healthy"] for worker in gateway.workers()))
        down = ask(gateway, data_url(FILE))
        assert down.error == (503, "no_available_workers") and down.headers["retry-after"] == "1"
        assert gateway.chat("text").status == 200
        (gone,) = [worker for worker in gateway.workers() if worker["url"] == ready.url]
        gateway.call("DELETE", f"/workers/{gone['id']}")
        nobody = ask(gateway, data_url(FILE))
        assert nobody.error == (503, "no_media_ref_capable_worker")
        assert "none advertises mm_processor" in nobody.message
        assert counted(gateway, "worker", "config") == 6
        assert json.dumps(gateway.held()) == "{}"
