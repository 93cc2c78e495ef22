"""Sidecars that come, share, end and are killed; a Redis that goes away; jobs and answers that are too large."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from smg_grpc_servicer import mm_sidecar_protocol as published

from pipeline.ceiling import FRONTEND_BYTES
from tests.sidecar.media_host import MediaHost
from tests.sidecar.records import record
from tests.sidecar.running import Sidecar, Worker, fingerprint_of, flags_of, until
from tools.launch import ROOT
from tools.redis_server import RedisServer, redis_server

PICTURE = record("qwen3_vl").of("picture").job
MODEL = record("qwen3_vl").hello["model"]
DROPPED = 'mediagate_sidecar_jobs_dropped_total{reason="too_large"}'


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def pair(own_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    """Two sidecars of one worker, one job each at a time; tests end them and put others in their place."""
    folder = tmp_path_factory.mktemp("pair")
    flags = ["--redis-url", own_redis.url, *flags_of(record("qwen3_vl"), folder), "--mm-allow-private-media-hosts"]
    flags += [
        "--mm-pixel-cache-mb",
        "16",
        "--concurrency",
        "1",
        "--shutdown-grace-period-secs",
        "1",
        "--max-job-bytes",
        "300000",
    ]
    limits = {"SMG_VLLM_MM_MAX_RESULT_BYTES": "600000"}
    both = [Sidecar(flags, folder / f"{name}.log", environment=limits, wait=False) for name in ("one", "two")]
    try:
        for running in both:
            running.wait_until_ready()
        yield both
    finally:
        for running in both:
            running.stop()


@pytest.fixture
def worker(own_redis: RedisServer) -> Iterator[Worker]:
    made = Worker(own_redis, fingerprint_of(record("qwen3_vl")))
    yield made
    made.close()


def fetching(worker: Worker, url: str, **more: int) -> published.Job:
    job = worker.job(PICTURE, **more)
    return msgspec.structs.replace(job, items=[published.JobItem("image", url)])


def served_by(running: Sidecar) -> float:
    return running.metric('mediagate_sidecar_jobs_total{outcome="ok"}')


def test_two_share_one_queue(pair: list[Sidecar], worker: Worker) -> None:
    before = [served_by(running) for running in pair]
    ids = [worker.put(worker.job(PICTURE)) for _ in range(24)]
    answers = [worker.get(job_id) for job_id in ids]
    assert all(answer is not None and answer.ok for answer in answers)

    def shares() -> list[float]:
        return [served_by(running) - had for running, had in zip(pair, before, strict=True)]

    until(lambda: sum(shares()) == 24, "count of 24")  # a job is counted when its answer is out
    assert min(shares()) > 0


def test_the_start_is_told_in_lines_that_can_be_read(pair: list[Sidecar]) -> None:
    lines = [line.partition(" logger=")[0] for line in pair[0].log.read_text().splitlines()]
    told = [line.partition(" INFO ")[2] for line in lines if " INFO " in line]
    assert [line for line in told if line.startswith("settings: --redis-url=set (flag), ")]
    (workers,) = [line for line in told if line.startswith("serves workers that were started with ")]
    assert f"model={MODEL}, vllm_version=" in workers
    assert f"health and metrics on http://127.0.0.1:{pair[0].port}" in told
    assert not [line for line in told if "{'" in line or len(line) > 1000]


def test_a_picture_that_was_made_is_not_made_again(pair: list[Sidecar], worker: Worker) -> None:
    """Each of the two has a cache of its own: three jobs of a picture hit one of them."""

    def hits() -> float:
        return sum(running.metric('mediagate_pixel_cache_hits_total{model="' + MODEL + '"}') for running in pair)

    before = hits()
    answers = [worker.asked(worker.job(PICTURE)) for _ in range(3)]
    assert hits() > before
    assert answers[0].mm_kwargs == answers[1].mm_kwargs == answers[2].mm_kwargs


def test_one_that_is_busy_leaves_the_rest_to_the_other(
    pair: list[Sidecar], worker: Worker, media_host: MediaHost
) -> None:
    slow = worker.put(fetching(worker, media_host.url("/slow")))
    assert media_host.asked.acquire(timeout=20)
    for _ in range(5):
        assert worker.asked(worker.job(PICTURE)).ok
    media_host.release.set()
    answer = worker.get(slow)
    assert answer is not None and answer.ok


def test_a_job_larger_than_is_read_is_told_so(pair: list[Sidecar], worker: Worker) -> None:
    before = sum(running.metric(DROPPED) for running in pair)
    url = "data:image/png;base64," + "A" * 400_000
    answer = worker.asked(fetching(worker, url))
    assert answer.code == "limit_exceeded" and "300000 bytes" in answer.message
    worker.redis.lpush(worker.keys.jobs, b"\x00" * 1_000_000)  # has no id to answer to
    assert worker.asked(worker.job(PICTURE)).ok
    assert sum(running.metric(DROPPED) for running in pair) == before + 2


def test_an_answer_larger_than_the_limit_is_not_made(pair: list[Sidecar], worker: Worker) -> None:
    answer = worker.asked(worker.job(record("qwen3_vl").of("photo").job))
    assert answer.code == "result_too_large" and "600000" in answer.message


def hostile(worker: Worker) -> list[bytes]:
    """Jobs no worker writes: each costs what it is, and no more."""
    whole = msgspec.msgpack.decode(PICTURE)
    now_ms = int(time.time() * 1000)

    def with_(**changes: object) -> bytes:
        fresh = {"job_id": f"{len(made):032x}", "enqueued_ms": now_ms, "deadline_ms": now_ms + 5000}
        return msgspec.msgpack.encode(whole | fresh | changes)

    made: list[bytes] = []
    made.append(with_(prompt_token_ids=[151655] * 90_000))  # nothing but anchors
    made.append(with_(prompt_token_ids=[0xFFFFFFFF] * 50_000))
    made.append(with_(items=[{"modality": "image", "url": f"http://10.0.0.{n}/a"} for n in range(900)]))
    made.append(with_(items=[{"modality": "image", "url": "data:image/png;base64," + "A" * 200_000}]))
    made.append(with_(items=[{"modality": "image", "url": "data:," + "%41" * 50_000}]))
    made.append(with_(items=[{"modality": "video", "url": "http://[::1%25lo]/a"}]))
    made.append(with_(items=[{"modality": "image", "url": "\x00" * 1000}], deadline_ms=(1 << 53) - 1))
    made.append(with_(fingerprint=dict.fromkeys(whole["fingerprint"], "x" * 4000)))
    made.append(b"\x91" * 200_000)
    made.append(b"\xdd\xff\xff\xff\xff" + b"\x00" * 1000)
    made.append(b"x" * 2_000_000)
    return made


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_a_hostile_publisher_costs_no_memory(pair: list[Sidecar], worker: Worker) -> None:
    fronts = [front_process(running.process.pid) for running in pair]
    for _ in range(15):
        worker.redis.lpush(worker.keys.jobs, *hostile(worker))
    until(lambda: worker.redis.llen(worker.keys.jobs) == 0, "end of the queue")
    assert worker.asked(worker.job(PICTURE)).ok
    assert all(anonymous_bytes(pid) < FRONTEND_BYTES for pid in fronts)
    for running in pair:
        assert running.process.poll() is None
        until(lambda: running.metric('mediagate_ring_used_bytes{ring="inputs"}') == 0, "empty arena")  # noqa: B023


def front_process(supervisor: int) -> int:
    """The child that is called so (`pool.child`)."""
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        if "front" in Path(f"/proc/{pid}/comm").read_text():
            return int(pid)
    raise AssertionError("no front process")


def test_a_deadline_ends_the_work(pair: list[Sidecar], worker: Worker, media_host: MediaHost) -> None:
    late = fetching(worker, media_host.url("/slow"), deadline_ms=int(time.time() * 1000) + 700)
    assert worker.asked(late).code == "expired"
    assert worker.asked(worker.job(PICTURE)).ok


def test_a_redis_that_restarts_is_found_again(folder: Path) -> None:
    with redis_server() as server:
        running = Sidecar(["--redis-url", server.url, *flags_of(record("qwen3_vl"), folder)], folder / "log")
        try:
            server.stop()
            until(lambda: running.ask("/readiness")[0] == 503, "unready sidecar")
            assert running.ask("/health")[0] == 200
            server.start()
            until(lambda: running.ask("/readiness")[0] == 200, "ready sidecar")
            worker = Worker(server, fingerprint_of(record("qwen3_vl")))
            until(lambda: bool(worker.redis.exists(worker.keys.hello)), "hello")
            assert worker.asked(worker.job(PICTURE)).ok
            worker.close()
        finally:
            running.stop()


def test_ends_in_order_and_gives_back(
    pair: list[Sidecar], worker: Worker, media_host: MediaHost, own_redis: RedisServer
) -> None:
    """The first is asked to end while it waits for a host: its job goes to the second.  That one is killed with its
    own job: the job is lost, as the protocol has it, and its worker waits in vain.
    """
    first, second = pair
    held = worker.put(fetching(worker, media_host.url("/slow")))
    assert media_host.asked.acquire(timeout=20)
    holder, other = (first, second) if first.metric("mediagate_sidecar_jobs_running") else (second, first)
    begun = time.monotonic()
    holder.process.send_signal(signal.SIGTERM)
    assert media_host.asked.acquire(timeout=20)  # the other one fetches
    assert holder.process.wait(20) == 0
    assert time.monotonic() - begun < 15
    media_host.release.set()
    answer = worker.get(held)
    assert answer is not None and answer.ok
    assert worker.redis.llen(worker.keys.jobs) == 0

    media_host.release.clear()
    lost = worker.put(fetching(worker, media_host.url("/slow")))
    assert media_host.asked.acquire(timeout=20)
    other.kill()
    media_host.release.set()
    assert worker.get(lost, wait_s=1) is None
    assert worker.redis.llen(worker.keys.jobs) == 0


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ([], 1, "Is needed"),
        (["--model", "m", "--enforce-eager"], 2, "unrecognized arguments"),
    ],
)
def test_starts_that_are_refused(flags: list[str], status: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "gateway.py", "sidecar", *flags], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status and words in done.stderr


def test_a_model_whose_media_no_worker_is_sent_is_refused(own_redis: RedisServer, folder: Path) -> None:
    said = msgspec.structs.replace(record("qwen3_vl"), bundle="phi3_v")
    running = Sidecar(["--redis-url", own_redis.url, *flags_of(said, folder)], folder / "log", wait=False)
    try:
        assert running.process.wait(60) == 1
        assert "cannot be served by this sidecar" in running.log.read_text()
    finally:
        running.stop()
