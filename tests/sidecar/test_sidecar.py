"""The sidecar as a process against a real Redis: its answers against the published sidecar's, and what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis_asyncio
from smg_grpc_servicer import mm_sidecar_protocol as published
from smg_grpc_servicer.vllm.mm_processor import MmProcessorUnavailable, RedisMediaProcessor

from tests.sidecar.media_host import MediaHost
from tests.sidecar.records import Record, record
from tests.sidecar.running import Sidecar, Worker, fingerprint_of, sidecar, until
from tools.redis_server import RedisServer

GOOD = ("picture", "photo", "two pictures", "the same picture twice", "clip", "picture and clip")
# What ours says where the published one says something else.  Theirs: every fetch and every decoding is
# `fetch_failed`; counts and anchors that do not fit are `processor_error`, which gateways repeat in vain, and an anchor
# too many is let through.
REFUSED = {
    "late": "expired",
    "other model": "fingerprint_mismatch",
    "other scheme": "scheme_not_accepted",
    "no file": "scheme_not_accepted",
    "nobody there": "fetch_unavailable",
    "no picture": "decode_failed",
    "no base64": "decode_failed",
    "fewer anchors": "placeholder_mismatch",
    "more anchors": "placeholder_mismatch",
    "too many": "limit_exceeded",
    "another modality": "limit_exceeded",
    "sound": "limit_exceeded",
}


def same_answer(got: published.JobResult, wanted: published.JobResult) -> None:
    """Everything but hashes and times: prompt, placeholders, and every tensor with its field, to the byte."""
    assert (got.ok, got.code, got.fingerprint) == (True, "", wanted.fingerprint)
    assert got.prompt_token_ids == wanted.prompt_token_ids
    assert got.mm_placeholders == wanted.mm_placeholders
    assert got.mm_kwargs.keys() == wanted.mm_kwargs.keys() == got.mm_hashes.keys()
    for modality, blobs in wanted.mm_kwargs.items():
        ours = [msgspec.msgpack.decode(blob) for blob in got.mm_kwargs[modality]]
        assert ours == [msgspec.msgpack.decode(blob) for blob in blobs]


def answers_of_the_record(said: Record, redis: RedisServer) -> None:
    worker = Worker(redis, fingerprint_of(said))
    good = [exchange for exchange in said.exchanges if exchange.case in GOOD]
    assert len(good) >= 4
    for exchange in good:
        got = worker.asked(worker.job(exchange.job))
        same_answer(got, published.decode_result(exchange.result))
        hashes = [one for some in got.mm_hashes.values() for one in some]
        assert len(set(hashes)) == (1 if exchange.case == "the same picture twice" else len(hashes))
    worker.close()


def test_answers_are_the_published_sidecar_s(serving: Sidecar, redis: RedisServer) -> None:
    answers_of_the_record(record("qwen3_vl"), redis)


@pytest.mark.parametrize("name", ["qwen3_vl_normalised", "llama4"])
def test_answers_are_the_published_sidecar_s_for_other_workers(name: str, redis: RedisServer, folder: Path) -> None:
    with sidecar(redis, record(name), folder):
        answers_of_the_record(record(name), redis)


def test_the_hello_is_the_published_one(serving: Sidecar, worker: Worker) -> None:
    hello = {name.decode(): value.decode() for name, value in worker.redis.hgetall(worker.keys.hello).items()}
    wanted = record("qwen3_vl").hello
    assert hello.keys() == wanted.keys()
    assert {key for key in hello if hello[key] != wanted[key]} <= {"started_at"}
    assert 0 < worker.redis.ttl(worker.keys.hello) <= published.HELLO_TTL_S


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, serving: Sidecar, worker: Worker) -> None:
    exchange = record("qwen3_vl").of(case)
    more = {"deadline_ms": 1} if case == "late" else {}
    got = worker.asked(worker.job(exchange.job, **more))
    assert (got.ok, got.code) == (False, REFUSED[case])
    assert got.message and len(got.message) <= 1000
    theirs = published.decode_result(exchange.result)
    if theirs.code in published.CLIENT_ERROR_CODES and case != "nobody there":
        assert got.code in published.CLIENT_ERROR_CODES  # what theirs calls final is final


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/picture.png", ""),
        ("/status/404", "fetch_failed"),
        ("/status/403", "fetch_failed"),
        ("/status/408", "fetch_unavailable"),
        ("/status/429", "fetch_unavailable"),
        ("/status/503", "fetch_unavailable"),
    ],
)
def test_a_failed_fetch_keeps_its_cause(
    path: str, code: str, serving: Sidecar, worker: Worker, media_host: MediaHost
) -> None:
    job = worker.job(record("qwen3_vl").of("picture").job)
    (item,) = job.items
    got = worker.asked(msgspec.structs.replace(job, items=[published.JobItem(item.modality, media_host.url(path))]))
    assert got.code == code
    if not code:
        same_answer(got, published.decode_result(record("qwen3_vl").of("picture").result))


def test_another_version_is_named(serving: Sidecar, worker: Worker) -> None:
    got = worker.asked(worker.job(record("qwen3_vl").of("picture").job, v=2))
    assert (got.code, got.code in published.CLIENT_ERROR_CODES) == ("schema_mismatch", False)


def test_jobs_that_cannot_be_read_cost_nothing(serving: Sidecar, worker: Worker) -> None:
    whole = published.encode_job(worker.job(record("qwen3_vl").of("picture").job))
    bad = [b"", b"\x00", whole[: len(whole) // 2], b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff", whole[::-1]]
    before = serving.metric('mediagate_sidecar_jobs_dropped_total{reason="malformed"}')
    for message in bad:
        worker.redis.lpush(worker.keys.jobs, message)
    assert worker.asked(worker.job(record("qwen3_vl").of("picture").job)).ok
    assert serving.metric('mediagate_sidecar_jobs_dropped_total{reason="malformed"}') - before == len(bad)
    assert "picture" not in serving.log.read_text().split("dropped")[-1].splitlines()[0]


def test_health(serving: Sidecar, worker: Worker) -> None:
    assert [serving.ask(path)[0] for path in ("/health", "/liveness", "/readiness")] == [200, 200, 200]
    assert worker.asked(worker.job(record("qwen3_vl").of("picture").job)).ok
    until(lambda: serving.metric("mediagate_sidecar_jobs_running") == 0, "end of the job")
    assert serving.metric('mediagate_sidecar_jobs_total{outcome="ok"}') >= 1
    assert serving.metric("mediagate_sidecar_redis_connected") == 1
    assert serving.metric('mediagate_ring_used_bytes{ring="outputs"}') == 0
    assert serving.metric('mediagate_ring_used_bytes{ring="inputs"}') == 0


def test_answers_expire(serving: Sidecar, worker: Worker) -> None:
    job_id = worker.put(worker.job(record("qwen3_vl").of("picture").job))
    until(lambda: worker.redis.ttl(worker.keys.result(job_id)) > 0, "answer that expires")
    assert worker.redis.ttl(worker.keys.result(job_id)) <= published.RESULT_TTL_S
    assert worker.get(job_id) is not None


class _Engine:
    """What the published worker asks of its engine before it is given an answer."""

    model_config = SimpleNamespace(get_multimodal_config=lambda: SimpleNamespace(get_limit_per_prompt=lambda kind: 999))


async def test_the_published_worker_is_served(serving: Sidecar, redis: RedisServer) -> None:
    """Its own client, waiting and error classes; only what it makes of tensors needs torch and is left out."""
    said = record("qwen3_vl")
    client: Any = redis_asyncio.from_url(redis.url, decode_responses=False, socket_timeout=None)
    worker = RedisMediaProcessor(_Engine(), fingerprint_of(said), client=client, timeout_ms=20_000)
    worker._rebuild = lambda result, text, arrival: result  # type: ignore[method-assign]
    assert await worker.probe()
    assert worker.accepted_schemes == {"http", "https", "data"}

    async def asked(case: str) -> Any:
        job = published.decode_job(said.of(case).job)
        return await worker.process(job.prompt_token_ids, job.prompt, job.items, 0.0)

    same_answer(await asked("two pictures"), published.decode_result(said.of("two pictures").result))
    with pytest.raises(ValueError, match="decode_failed"):
        await asked("no picture")
    with pytest.raises(MmProcessorUnavailable, match="fetch_unavailable"):
        await asked("nobody there")
    await client.aclose()
