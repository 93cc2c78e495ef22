"""Engines that fail: every kind of failure gives the client one clear answer, and nothing is held after it."""

import concurrent.futures
from collections.abc import Iterator

import pytest

from pipeline.errors import ENGINE_STATUS
from tests.e2e.running import Running, image_part, picture, running, text_part, until

RETRIES = "smg_worker_retries_total{"
ATTEMPTS = 3


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(
        f"--retry-max-retries={ATTEMPTS}",
        "--retry-initial-backoff-ms=5",
        "--request-timeout-secs=1",
        "--sse-keepalive-secs=0",
        "--disable-circuit-breaker",
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_held(gateway: Running) -> Iterator[None]:
    yield
    gateway.given_back()


def troubled(words: str) -> list[dict[str, object]]:
    """A question with a picture that makes the stand-in fail as `words` say."""
    return [image_part(picture()), text_part(f"[[fault {words}]]")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", ENGINE_STATUS)
def test_refused_before_the_first_token(gateway: Running, status: str, stream: bool) -> None:
    http_status, is_retried = ENGINE_STATUS[status]
    retries, begun = gateway.metric(RETRIES), len(gateway.seen("generate"))
    answer = gateway.chat(troubled(f"refuse={status} message=because-{status}"), stream=stream)
    assert answer.error == (http_status, "start_generation_failed")
    assert answer.message == f"Failed to start generation: because-{status}"
    assert answer.headers["content-type"] == "application/json"
    assert ("retry-after" in answer.headers) == (http_status in (429, 503))
    attempts = ATTEMPTS if is_retried else 1
    assert len(gateway.seen("generate")) - begun == attempts
    assert gateway.metric(RETRIES) - retries == attempts - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["refuse=UNAVAILABLE times=2", "drop times=1"])
def test_an_attempt_that_fails_is_repeated(gateway: Running, words: str, stream: bool) -> None:
    words += f" message={'streamed' if stream else 'whole'}"  # a marker of its own, as the stand-in counts their uses
    answer = gateway.chat(troubled(words), stream=stream)
    assert answer.status == 200
    assert (answer.streamed_text if stream else answer.text).startswith("I received 1 image")
    ids = [line["request_id"] for line in gateway.seen("generate")[-2:]]
    assert len(set(ids)) == 2 and len({one.rsplit("-", 5)[0] for one in ids}) == 1  # own ids, one request


@pytest.mark.parametrize("words", ["break=INTERNAL after=8", "break=UNAVAILABLE after=8", "drop after=8"])
def test_broken_in_mid_stream(gateway: Running, words: str) -> None:
    retries = gateway.metric(RETRIES)
    answer = gateway.chat(troubled(words), stream=True)
    assert answer.status == 200
    *said, failure, done = answer.events
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in said) == "I receiv"
    assert failure["error"]["code"] == "worker_stream_failed" and failure["error"]["type"] == "stream_error"
    assert failure["error"]["message"].startswith("Stream error: The engine failed: ")
    assert gateway.metric(RETRIES) == retries  # nothing is repeated once a token was there
    (line,) = gateway.access(answer.headers["x-request-id"])
    assert "status=200 code=worker_stream_failed" in line


def test_broken_between_two_whole_answers(gateway: Running) -> None:
    """n=2, not streamed: the stand-in sends the first choice and breaks; half an answer is none."""
    answer = gateway.chat(troubled("break=INTERNAL choices=1 after=0"), n=2)
    assert answer.error == (500, "worker_stream_failed")
    assert answer.message == "The engine failed: engine says no"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_never_answers(gateway: Running, stream: bool) -> None:
    answer = gateway.chat(troubled("silent"), stream=stream)
    assert answer.error == (504, "request_timeout")
    assert answer.message == "the request took longer than 1 s"
    request_id = answer.headers["x-request-id"]
    until(lambda: gateway.seen("abort") and request_id in gateway.seen("abort")[-1]["request_ids"][0])
    assert gateway.seen("cancelled")[-1]["request_id"].startswith(request_id)


def test_an_engine_that_falls_silent(gateway: Running) -> None:
    answer = gateway.chat(troubled("silent after=8"), stream=True)
    *_, failure, done = answer.events
    assert failure["error"]["code"] == "request_timeout" and done == "[DONE]"
    request_id = answer.headers["x-request-id"]
    until(lambda: gateway.seen("abort") and request_id in gateway.seen("abort")[-1]["request_ids"][0])


def test_an_engine_that_hangs(gateway: Running) -> None:
    """Its process is stopped: what was sent to it is given back although it still does not read."""
    with gateway.engine.frozen():
        assert gateway.chat([image_part(picture(720, 1280, kind="JPEG"))]).error == (504, "request_timeout")
        gateway.given_back()


@pytest.mark.parametrize("sent", ["half of the body", "all but the last chunk"])
def test_a_client_that_stops_sending(gateway: Running, sent: str) -> None:
    head = gateway.head(1000, "stopped")
    if sent != "half of the body":
        head = head.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked") + b"3e8\r\n"
    with gateway.connect() as client:
        client.sendall(head + b" " * 500)
        client.settimeout(10)
        reply = client.recv(65536)
    assert reply.startswith(b"HTTP/1.1 504") and b"request_timeout" in reply


def test_an_engine_that_exits_and_comes_back() -> None:
    """What it says about itself is read again: the new one wants raw pixels and has a short window."""
    with running("--retry-max-retries=2", "--retry-initial-backoff-ms=5") as gateway:
        engine = gateway.engine
        assert "float32" in gateway.chat([image_part(picture())]).text
        answer = gateway.chat(troubled("exit"))
        assert answer.status == 503 and answer.error[1] in ("start_generation_failed", "no_available_workers")
        assert answer.headers["retry-after"] == "1"
        engine.wait()
        until(lambda: not gateway.ready())
        again = gateway.chat("hi")
        assert again.error == (503, "no_available_workers") and again.headers["retry-after"] == "1"
        assert gateway.call("GET", "/v1/models").json["data"][0]["id"] == "qwen3-vl-demo"
        engine.start("--label", "mm_device_do_normalize=true", "--label", "max_context_length=300")
        until(gateway.ready)
        assert "uint8" in gateway.chat([image_part(picture())]).text
        assert gateway.chat("word " * 400).error == (400, "context_length_exceeded")
        (worker,) = gateway.workers()
        assert worker["labels"]["mm_device_do_normalize"] == "true"
        gateway.given_back()


def test_an_engine_that_is_restarted_under_load() -> None:
    """Requests that meet the gap are answered 200 or 503 with Retry-After, and never with wrong pixels."""
    with (
        running("--retry-max-retries=2", "--retry-initial-backoff-ms=5") as gateway,
        concurrent.futures.ThreadPoolExecutor(8) as clients,
    ):
        content = [image_part(picture()), text_part("?")]
        asked = [clients.submit(gateway.chat, content) for _ in range(40)]
        gateway.engine.stop()
        gateway.engine.start("--label", "mm_device_do_normalize=true")
        asked += [clients.submit(gateway.chat, content) for _ in range(40)]
        for answer in [one.result() for one in asked]:
            assert answer.status in (200, 503), answer.body
            if answer.status == 503:
                assert answer.headers["retry-after"] == "1"
        assert not gateway.seen("refused")
        until(gateway.ready)
        assert "uint8" in gateway.chat(content).text
        gateway.given_back()


def test_a_worker_that_fails_everything_is_left_out() -> None:
    flags = ["--retry-max-retries=1", "--cb-failure-threshold=3", "--cb-timeout-duration-secs=1"]
    with running(*flags, "--cb-success-threshold=1") as gateway:
        for _ in range(3):
            assert gateway.chat(troubled("refuse=INTERNAL")).error == (500, "start_generation_failed")
        refused = gateway.chat("hi")
        assert refused.error == (503, "no_available_workers") and refused.headers["retry-after"] == "1"
        (worker,) = gateway.workers()
        assert worker["is_healthy"] and worker["circuit_breaker"] == {"state": "open", "failures": 3}
        series = f'worker="{gateway.engine.url}"'
        assert gateway.metric(f"smg_worker_cb_state{{{series}}}") == 1
        assert gateway.metric(f'smg_worker_cb_outcomes_total{{outcome="failure",{series}}}') == 3
        until(lambda: gateway.workers()[0]["circuit_breaker"]["state"] == "half_open")
        assert gateway.metric(f"smg_worker_cb_state{{{series}}}") == 2
        assert gateway.chat("hi").status == 200
        assert gateway.workers()[0]["circuit_breaker"] == {"state": "closed", "failures": 0}
