"""Operations: what happens to a gateway in a bad week, each scenario played from outside.

The field cases' scenarios are named in `FIELD`, with the test that plays each; those that had none are here, and with
them the ends of an engine and of a pool process at every stage, clients that try again without pause, and a gateway
that is killed under load and started again.
"""

import concurrent.futures
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.running import Answer, Running, image_part, picture, question, running, text_part, until
from tests.e2e.test_shared_memory import SHM, digests

ROOT = Path(__file__).resolve().parents[2]
PHOTO = picture(540, 960, kind="JPEG")
LARGE = picture(1080, 1920, kind="JPEG")  # its tensor takes 50 MB, more than sockets hold
MIB = 1 << 20

FIELD = {
    "budget_full": "tests/e2e/test_limits.py::test_a_busy_budget",
    "dev_shm_full": "tests/e2e/test_shared_memory.py::test_a_small_or_read_only_dev_shm",
    "kill_9_then_restart": "tests/e2e/test_scenarios.py::test_killed_under_load_and_started_again",
    "larger_than_budget": "tests/e2e/test_limits.py::test_media_above_the_budget_in_flight",
    "memory_stays_flat": "tests/e2e/test_memory.py::test_four_times_as_many_pictures_take_no_more_memory",
    "no_base64_in_logs": "tests/e2e/test_scenarios.py::test_a_broken_payload_of_megabytes_leaves_no_trace_in_the_log",
    "no_secrets_in_logs": "tests/e2e/test_scenarios.py::test_signed_urls_and_keys_stay_out_of_logs_and_answers",
    "release_on_every_path": "tests/e2e/test_scenarios.py::test_the_budget_is_whole_again_whatever_happened",
    "small_behind_big": "tests/hostile/test_fairness.py::test_a_large_request_gets_its_turn",
    "worker_killed_mid_stream": "tests/e2e/test_scenarios.py::test_the_engine_dies",
    "worker_never_reads": "tests/e2e/test_scenarios.py::test_segments_of_failed_requests_go_away",
}


@pytest.mark.parametrize("name", FIELD)
def test_every_field_scenario_is_played(name: str) -> None:
    path, _, test = FIELD[name].partition("::")
    assert f"def {test}(" in (ROOT / path).read_text()


# -- logs


@pytest.fixture(scope="module")
def talkative() -> Iterator[Running]:
    with running("--log-level=debug") as gateway:
        yield gateway


def test_a_broken_payload_of_megabytes_leaves_no_trace_in_the_log(talkative: Running) -> None:
    payload = "QUJDREVG" * (5 * MIB // 8)
    before = len(talkative.log())
    answer = talkative.chat([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}}])
    assert answer.error == (400, "multimodal_processing_failed")
    assert len(answer.body) < 2048
    grown = talkative.log()[before:]
    assert len(grown) < 64 << 10
    assert payload[:40] not in grown + answer.body.decode()


def test_signed_urls_and_keys_stay_out_of_logs_and_answers(talkative: Running) -> None:
    url = "http://127.0.0.1:9/a.png?X-Amz-Signature=abcdef0123&X-Amz-Credential=AKIAXXXX"
    body = question([{"type": "image_url", "image_url": {"url": url}}])
    answer = talkative.call("POST", "/v1/chat/completions", body, {"Authorization": "Bearer sk-somebody"})
    assert answer.error == (400, "multimodal_processing_failed")
    until(lambda: talkative.access(answer.headers["x-request-id"]))
    for secret in ("abcdef0123", "AKIAXXXX", "sk-somebody"):
        assert secret not in talkative.log() + answer.body.decode()


# -- budgets


def test_the_budget_is_whole_again_whatever_happened() -> None:
    """A third good, a third that cannot be decoded, a third cut by the client; then as many as fit, at once."""
    good, broken = image_part(PHOTO), image_part(PHOTO[: len(PHOTO) // 2])
    budget = 3 * 34 * 60 * 1536 * 4  # of three requests with PHOTO
    with running(f"--multimodal-max-inflight-bytes={budget}") as gateway:

        def ask(number: int) -> str:
            if number % 3 == 1:
                return str(gateway.chat([broken]).status)
            if number % 3 == 0:
                status = gateway.chat([good]).status
                if status == 429:  # at once: without a pause a client uses up its turns while others hold the budget
                    time.sleep(0.2)
                return str(status)
            with gateway.open_chat([good], stream=number % 2 == 0):
                time.sleep(random.Random(number).uniform(0, 0.1))
            return "left"

        with concurrent.futures.ThreadPoolExecutor(12) as clients:
            found = list(clients.map(ask, range(90)))
        assert {*found[1::3]} == {"400"}
        assert {*found[0::3]} <= {"200", "429"} and found.count("200") > 5
        gateway.given_back()
        assert gateway.metric("mediagate_inflight_bytes") == 0
        with concurrent.futures.ThreadPoolExecutor(3) as clients:
            slow = text_part("[[fault slow=300]]")
            assert {answer.status for answer in clients.map(gateway.chat, [[good, slow]] * 3)} == {200}


def test_clients_that_try_again_without_pause() -> None:
    """Eight clients and room for three; whoever is refused asks again at once.  All are served, nothing is left."""
    with running("--max-concurrent-requests=1", "--queue-size=2") as gateway:

        def insist(number: int) -> list[int]:
            statuses: list[int] = []
            for turn in range(3):
                content = [image_part(PHOTO), text_part(f"{number} {turn} [[fault slow=20]]")]
                while not statuses or statuses[-1] != 200:
                    statuses.append(gateway.chat(content).status)
                statuses.append(0)
            return statuses

        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            found = [status for statuses in clients.map(insist, range(8)) for status in statuses]
        assert {*found} <= {0, 200, 429} and found.count(200) == 24 and found.count(429) > 8
        assert gateway.metric('smg_admission_queue_rejected_total{reason="full"}') == found.count(429)
        gateway.given_back()


# -- engines


Ask = Callable[[str], "concurrent.futures.Future[Answer]"]  # a request with a large picture and these words


def _before_it_is_called(gateway: Running, ask: Ask) -> Answer:
    gateway.engine.kill()
    return ask("?").result()


def _while_it_is_sent_tensors(gateway: Running, ask: Ask) -> Answer:
    with gateway.engine.frozen():
        asked = ask("?")
        until(lambda: gateway.held().get(f"load {gateway.engine.url}"))
        time.sleep(0.2)  # the sockets' buffers are full now
        assert not asked.done()
        gateway.engine.kill()
    return asked.result()


def _before_the_first_token(gateway: Running, ask: Ask) -> Answer:
    before = len(gateway.seen("generate"))
    asked = ask("[[fault silent]]")
    until(lambda: len(gateway.seen("generate")) > before)
    gateway.engine.kill()
    return asked.result()


def _in_mid_answer(gateway: Running, ask: Ask) -> Answer:
    before = len(gateway.seen("generate"))
    asked = ask("[[fault silent after=8]]")
    until(lambda: len(gateway.seen("generate")) > before)
    until(lambda: "outputs" not in gateway.held(), what="the first tokens have come")
    gateway.engine.kill()
    return asked.result()


STAGES = {
    "before it is called": _before_it_is_called,
    "while it is sent tensors": _while_it_is_sent_tensors,
    "before the first token": _before_the_first_token,
    "in mid answer": _in_mid_answer,
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_dies(stage: str) -> None:
    """The client is told once and clearly, nothing is held, and the engine that comes back is used again."""
    flags = ["--retry-max-retries=1", "--disable-circuit-breaker", "--pool-ring-bytes=536870912"]
    with running(*flags) as gateway, concurrent.futures.ThreadPoolExecutor(1) as client:
        for stream in (True,) if stage == "in mid answer" else (False, True):

            def ask(words: str, stream: bool = stream) -> "concurrent.futures.Future[Answer]":
                return client.submit(gateway.chat, [image_part(LARGE), text_part(words)], stream=stream)

            answer = STAGES[stage](gateway, ask)
            if stage == "in mid answer":
                *said, failure, done = answer.events
                assert said and failure["error"]["code"] == "worker_stream_failed" and done == "[DONE]"
            else:
                assert answer.status in (500, 503)
                assert answer.error[1] in ("start_generation_failed", "worker_stream_failed", "no_available_workers")
                assert "127.0.0.1" not in answer.message
            gateway.given_back()
            gateway.engine.start()
            until(gateway.ready)
            assert gateway.chat([image_part(PHOTO)]).status == 200


def test_segments_of_failed_requests_go_away() -> None:
    """An engine that fails without reading them, again and again."""
    flags = (*SHM, "--retry-max-retries=1", "--disable-circuit-breaker")
    with running(*flags, engine=("--keep-names", "--fault=refuse=INTERNAL")) as gateway:
        for number in range(12):
            assert gateway.chat([image_part(picture(300, 400, seed=number))]).status == 500
        gateway.given_back()
        (front,) = gateway.pids("front")
        kept = [name for name in os.listdir("/dev/shm") if f"-{front}-" in name]
        assert sum(os.stat(f"/dev/shm/{name}").st_blocks for name in kept) == 0


# -- pool processes


@contextlib.contextmanager
def stopped_pool(gateway: Running) -> Iterator[list[int]]:
    pids = [pid for name in ("pool0", "pool1") for pid in gateway.pids(name)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def pool() -> Iterator[Running]:
    with running("--pool-job-timeout-secs=30") as gateway:
        yield gateway


def kill_and_wait(gateway: Running, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not {*gateway.pids("pool0"), *gateway.pids("pool1")} & {*pids})
    until(lambda: gateway.metric("mediagate_pool_processes ") == 2)


def test_a_pool_process_dies_with_a_span_that_is_held(pool: Running) -> None:
    """The request waits for its job: another process does it, into the same span."""
    with concurrent.futures.ThreadPoolExecutor(1) as client, stopped_pool(pool) as pids:
        asked = client.submit(pool.chat, [image_part(PHOTO)])
        until(lambda: pool.held().get("busy processes"))
        assert pool.held().get("inputs")
        kill_and_wait(pool, pids)
        assert asked.result().status == 200
    pool.given_back()


def test_a_pool_process_dies_with_a_span_that_drains(pool: Running) -> None:
    """The client has left, the process may still write: the span is nobody else's until the process is gone."""
    slow = image_part(picture(1800, 1800))  # its decoding takes a while
    for _ in range(20):  # until a process is stopped in the middle of its job
        client = pool.open_chat([slow])
        until(lambda: pool.held().get("outputs"))
        with stopped_pool(pool) as pids:
            client.close()
            until(lambda: "slots" not in pool.held())
            is_draining = bool(pool.held().get("outputs"))
            if is_draining:
                kill_and_wait(pool, pids)
        pool.given_back()
        if is_draining:
            return
    raise AssertionError("no process was ever stopped in the middle of its job")


def test_a_pool_process_dies_when_its_span_is_being_sent(pool: Running) -> None:
    """The tensor is written, the engine does not read yet: what arrives in the end are the same bytes."""
    assert pool.chat([image_part(LARGE)]).status == 200
    with concurrent.futures.ThreadPoolExecutor(1) as client:
        with pool.engine.frozen():
            asked = client.submit(pool.chat, [image_part(LARGE)])
            until(lambda: pool.held().get("outputs") and "busy processes" not in pool.held())
            kill_and_wait(pool, [*pool.pids("pool0"), *pool.pids("pool1")])
        assert asked.result().status == 200
    assert len({*digests(pool.engine)[-2:]}) == 1
    pool.given_back()


def test_pool_processes_die_with_spans_that_are_free(pool: Running) -> None:
    kill_and_wait(pool, [*pool.pids("pool0"), *pool.pids("pool1")])
    assert pool.chat([image_part(PHOTO)]).status == 200
    pool.given_back()


# -- the gateway


def test_killed_under_load_and_started_again() -> None:
    """SIGKILL with segments that nobody reads: on the same port it is back, without them, and others' are untouched."""
    alive, foreign = f"/dev/shm/smg-tokenspeed-{os.getpid()}-scenario", "/dev/shm/scenario-of-somebody"
    for path in (alive, foreign):
        Path(path).write_bytes(b"not ours")
    try:
        with running(*SHM, engine=("--keep-names", "--fault=silent")) as first:
            clients = [first.open_chat([image_part(picture(300, 400, seed=seed))]) for seed in range(20)]
            until(lambda: len(first.seen("generate")) == 20)
            (front,) = first.pids("front")
            left = [name for name in os.listdir("/dev/shm") if f"-{front}-" in name]
            assert len(left) >= 20
            os.kill(first.gateway.pid, signal.SIGKILL)
            first.gateway.process.wait(20)
            for client in clients:
                client.close()
            until(lambda: not Path(f"/proc/{front}").exists())
            ports = ("--port", str(first.gateway.port), "--prometheus-port", str(first.gateway.metrics_port))
            with running(*SHM, *ports, engines=[], wait=False) as second:
                second.gateway.port = first.gateway.port
                second.gateway.wait_until("/liveness")
                assert not [name for name in os.listdir("/dev/shm") if f"-{front}-" in name]
                assert Path(alive).exists() and Path(foreign).exists()
                assert "removed segments of gateways that are gone" in second.log()
    finally:
        for path in (alive, foreign):
            Path(path).unlink()
