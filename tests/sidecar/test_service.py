"""The service with a queue and a pipeline that do what a test says: when it takes, announces, repeats, gives back."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest
from smg_grpc_servicer import mm_sidecar_protocol as published

from pipeline.metrics import Metrics
from pipeline.sidecar.fingerprint import Fingerprint
from pipeline.sidecar.protocol import Job, Keys, Refusal
from pipeline.sidecar.queue import JobQueue, QueueDown
from pipeline.sidecar.service import Service
from pipeline.sidecar.work import JobWork
from pipeline.ticket import Ticket
from tests.sidecar.records import record

FINGERPRINT = Fingerprint(*["x"] * 6, '{"*": {"count": 999}}')


def message(number: int = 1, *, deadline_s: float = 30) -> bytes:
    job = published.decode_job(record("qwen3_vl").of("other scheme").job)
    now_ms = int(time.time() * 1000)
    changes = {"job_id": f"{number:032x}", "enqueued_ms": now_ms, "deadline_ms": now_ms + int(deadline_s * 1000)}
    return published.encode_job(msgspec.structs.replace(job, **changes))


class FakeQueue:
    """`refusing`: how many answers are refused before one is taken; `is_down`: every call fails."""

    keys = Keys("test")
    most_job_bytes = 1 << 20

    def __init__(self) -> None:
        self.jobs: asyncio.Queue[bytes] = asyncio.Queue()
        self.answers: list[published.JobResult | bytes] = []
        self.given_back: list[bytes] = []
        self.hellos: list[dict[str, str]] = []
        self.refusing = 0
        self.is_down = False

    async def take(self) -> bytes | None:
        if self.is_down:
            raise QueueDown("down")
        try:
            return await asyncio.wait_for(self.jobs.get(), 0.05)
        except TimeoutError:
            return None

    async def give_back(self, job: bytes) -> None:
        self.given_back.append(bytes(job))

    async def answer(self, job_id: str, answer: bytes, *, within_s: float) -> None:
        if self.refusing:
            self.refusing -= 1
            raise QueueDown("OOM")
        try:
            self.answers.append(published.decode_result(bytes(answer)))
        except msgspec.DecodeError:
            self.answers.append(bytes(answer))

    async def announce(self, hello: dict[str, str]) -> None:
        self.hellos.append(hello)

    async def largest_value(self) -> int | None:
        return 12345


class FakeWork:
    fingerprint = FINGERPRINT
    most_answer_bytes = 1 << 30

    def __init__(self, run: Callable[[Job, Ticket], Awaitable[bytearray]]) -> None:
        self.run = run


async def good(job: Job, ticket: Ticket) -> bytearray:
    return bytearray(b"answer " + job.job_id[-1].encode())


class Bench:
    def __init__(self, run: Callable[[Job, Ticket], Awaitable[bytearray]] = good, *, jobs: int = 1) -> None:
        self.queue = FakeQueue()
        self.is_able = True
        self.metrics = Metrics()
        self.work = FakeWork(run)
        self.service = Service(
            cast(JobQueue, self.queue), cast(JobWork, self.work), self.metrics, lambda: self.is_able, jobs=jobs
        )

    async def __aenter__(self) -> "Bench":
        self.service.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.drained()

    async def drained(self, grace_s: float = 0.3, *, at_once: bool = False) -> None:
        quitting = asyncio.Event()
        if at_once:
            quitting.set()
        await self.service.drain(grace_s, quitting)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)


async def test_an_answer_that_is_refused_is_replaced_by_a_notice() -> None:
    async with Bench() as bench:
        bench.queue.refusing = 1
        bench.queue.jobs.put_nowait(message())
        await bench.until(lambda: bool(bench.queue.answers))
    (told,) = bench.queue.answers
    assert isinstance(told, published.JobResult)
    assert (told.ok, told.code) == (False, published.CODE_RESULT_PUSH_FAILED)


async def test_a_redis_that_takes_neither_does_not_end_it() -> None:
    async with Bench() as bench:
        bench.queue.refusing = 2
        bench.queue.jobs.put_nowait(message(1))
        bench.queue.jobs.put_nowait(message(2))
        await bench.until(lambda: bool(bench.queue.answers))
    assert bench.queue.answers == [b"answer 2"]


async def test_a_fault_is_told_without_its_text() -> None:
    async def faulty(job: Job, ticket: Ticket) -> bytearray:
        raise RuntimeError("secret")

    async with Bench(faulty) as bench:
        bench.queue.jobs.put_nowait(message())
        await bench.until(lambda: bool(bench.queue.answers))
    (told,) = bench.queue.answers
    assert isinstance(told, published.JobResult)
    assert told.code == "processor_error" and "secret" not in told.message


async def test_long_reasons_are_cut() -> None:
    async def refusing(job: Job, ticket: Ticket) -> bytearray:
        raise Refusal("decode_failed", "x" * 100_000)

    async with Bench(refusing) as bench:
        bench.queue.jobs.put_nowait(message())
        await bench.until(lambda: bool(bench.queue.answers))
    (told,) = bench.queue.answers
    assert isinstance(told, published.JobResult)
    assert len(told.message) == 1000


async def test_nothing_is_taken_or_announced_without_a_pool_process() -> None:
    bench = Bench()
    bench.is_able = False
    async with bench:
        bench.queue.jobs.put_nowait(message())
        await asyncio.sleep(0.3)
        assert not bench.queue.hellos and bench.queue.jobs.qsize() == 1
        bench.is_able = True
        await bench.until(lambda: bool(bench.queue.answers and bench.queue.hellos))
    assert bench.queue.hellos[0]["max_result_bytes"] == "12345"  # what Redis takes is less than ours


async def test_jobs_run_side_by_side_up_to_the_number() -> None:
    running, most = 0, 0

    async def counted(job: Job, ticket: Ticket) -> bytearray:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return bytearray(b"!")

    async with Bench(counted, jobs=3) as bench:
        for number in range(9):
            bench.queue.jobs.put_nowait(message(number))
        await bench.until(lambda: len(bench.queue.answers) == 9)
    assert most == 3


async def waits(job: Job, ticket: Ticket) -> bytearray:
    await asyncio.sleep(30)
    return bytearray()


async def test_what_does_not_end_within_the_grace_is_given_back() -> None:
    bench = Bench(waits, jobs=2)
    sent = [message(1), message(2)]
    async with bench:
        for one in sent:
            bench.queue.jobs.put_nowait(one)
        await bench.until(lambda: bench.service.running == 2)
        await bench.drained(0.1)
        assert bench.service.running == 0
    assert sorted(bench.queue.given_back) == sorted(sent)
    assert not bench.queue.answers


async def test_what_nobody_waits_for_is_not_given_back() -> None:
    async with Bench(waits) as bench:
        bench.queue.jobs.put_nowait(message(deadline_s=0.4))
        await bench.until(lambda: bench.service.running == 1)
        await asyncio.sleep(0.2)
        await bench.drained(0.25)
    assert not bench.queue.given_back


async def test_a_second_signal_does_not_wait_for_the_grace() -> None:
    async with Bench(waits) as bench:
        bench.queue.jobs.put_nowait(message())
        await bench.until(lambda: bench.service.running == 1)
        async with asyncio.timeout(5):
            await bench.drained(1000, at_once=True)
    assert len(bench.queue.given_back) == 1


async def test_a_job_that_ends_within_the_grace_is_answered() -> None:
    async def soon(job: Job, ticket: Ticket) -> bytearray:
        await asyncio.sleep(0.2)
        return bytearray(b"!")

    async with Bench(soon) as bench:
        bench.queue.jobs.put_nowait(message())
        await bench.until(lambda: bench.service.running == 1)
        await bench.drained(10)
    assert (bench.queue.answers, bench.queue.given_back) == ([b"!"], [])


async def test_a_redis_that_is_down_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with Bench() as bench:
        await bench.until(lambda: bench.service.is_connected)
        bench.queue.is_down = True
        await bench.until(lambda: not bench.service.is_connected)
        bench.queue.is_down = False
        await bench.until(lambda: bench.service.is_connected)
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
        "Redis is not there and is tried again reason=down"
    ]


async def test_a_fault_of_ours_does_not_end_the_service(caplog: pytest.LogCaptureFixture) -> None:
    async with Bench() as bench:
        await bench.until(lambda: bool(bench.queue.hellos))
        taking = bench.queue.take

        async def faulty() -> bytes | None:
            bench.queue.take = taking  # type: ignore[method-assign]
            raise RuntimeError("a fault")

        bench.queue.take = faulty  # type: ignore[method-assign]
        bench.queue.jobs.put_nowait(message())
        await bench.until(lambda: bool(bench.queue.answers))
    assert "a fault of the sidecar" in caplog.text
