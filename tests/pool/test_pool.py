"""The pool with real processes: every kind of job and ending, cancellation, files, configuration."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from pool.messages import BodyTooLarge
from pool.pool import JobCrashed, JobFailed, JobOverran
from pool.row import LONG_BYTES
from tests.pool.shop import Echo, Fill, FillFile, Raise, Recall, Think
from tests.pool.stage import Scene, aside, play


async def raised(waiting: Awaitable[Any]) -> Exception:
    try:
        result = await waiting
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised: {result!r}")


async def many_jobs(scene: Scene) -> None:
    outcomes = await asyncio.gather(*(scene.pool.submit(Echo(str(i)), deadline_s=5) for i in range(500)))
    assert [outcome.result.text for outcome in outcomes] == [str(i) for i in range(500)]
    assert {outcome.slot for outcome in outcomes} == {0, 1, 2}
    assert {outcome.result.pid for outcome in outcomes} <= set(scene.pids())
    assert scene.pool.statistics.done == 500 and scene.pool.queued == scene.pool.busy == 0


def test_many_jobs(tmp_path: Path) -> None:
    play(many_jobs, tmp_path, "--processes=3")


async def figures(scene: Scene) -> None:
    await scene.up()
    jobs = [asyncio.ensure_future(scene.pool.submit(Echo("a", seconds=0.1), deadline_s=5)) for _ in range(2)]
    first, second = [await job for job in jobs]
    assert first.slot == second.slot == 0
    assert first.queued_s < 0.1 <= first.run_s < 1 and 0.09 <= second.queued_s < 1
    lease = await scene.link.outputs.reserve([64 * 4096])
    cold = await scene.pool.submit(Fill(lease.spans[0], 1), deadline_s=5, leases=[lease])
    warm = await scene.pool.submit(Fill(lease.spans[0], 1), deadline_s=5, leases=[lease])
    assert cold.minor_faults - warm.minor_faults >= 60, "spans that were touched are warm"
    lease.release()


def test_what_an_outcome_tells(tmp_path: Path) -> None:
    play(figures, tmp_path, "--processes=1")


async def long_texts(scene: Scene) -> None:
    for nbytes in (1, 3900, 4000, 4096, 100_000, LONG_BYTES - 100):
        outcome = await scene.pool.submit(Echo("x" * nbytes), deadline_s=5)
        assert outcome.result.text == "x" * nbytes
    assert "does not fit" in str(await raised(scene.pool.submit(Echo("x" * LONG_BYTES), deadline_s=5)))
    assert isinstance(await raised(scene.pool.submit(Echo("x" * LONG_BYTES), deadline_s=5)), BodyTooLarge)
    error = await raised(scene.pool.submit(Echo("x", LONG_BYTES), deadline_s=5))
    assert isinstance(error, JobCrashed) and error.kind == "BodyTooLarge"
    error = await raised(scene.pool.submit(Raise("job", "y" * 50_000), deadline_s=5))
    assert isinstance(error, JobFailed) and str(error) == "y" * 50_000
    assert scene.pool.statistics.deaths == 0


def test_long_texts(tmp_path: Path) -> None:
    play(long_texts, tmp_path)


async def misbehaviour(scene: Scene) -> None:
    for kind, expected in (("job", JobFailed), ("time", JobOverran)):
        assert type(await raised(scene.pool.submit(Raise(kind), deadline_s=5))) is expected
    for kind, name in (("value", "ValueError"), ("memory", "MemoryError"), ("exit", "SystemExit")):
        error = await raised(scene.pool.submit(Raise(kind, "z" * 10_000), deadline_s=5))
        assert isinstance(error, JobCrashed) and error.kind == name and len(str(error)) < 1000
    assert (await scene.pool.submit(Echo("still here"), deadline_s=5)).result.text == "still here"
    statistics = scene.pool.statistics
    assert (statistics.failed, statistics.crashed, statistics.overran, statistics.deaths) == (1, 3, 1, 0)


def test_a_process_survives_its_jobs(tmp_path: Path) -> None:
    played = play(misbehaviour, tmp_path, "--processes=1")
    assert "ValueError: zzz" in played.log, "the stack is in the log"
    assert 'File "' in played.log


async def deadlines(scene: Scene) -> None:
    before = time.monotonic()
    error = await raised(scene.pool.submit(Think(30), deadline_s=0.1))
    assert isinstance(error, JobOverran) and time.monotonic() - before < 5
    assert scene.pool.statistics.deaths == 0, "it looked at the clock"
    waiting = asyncio.ensure_future(scene.pool.submit(Think(30, looks=False), deadline_s=0.1))
    behind = asyncio.ensure_future(scene.pool.submit(Echo("behind"), deadline_s=5))
    error = await raised(waiting)
    assert isinstance(error, JobOverran)
    assert (await behind).result.text == "behind"
    statistics = scene.pool.statistics
    assert (statistics.deaths, statistics.repeated, statistics.overran) == (1, 0, 2)


def test_deadlines(tmp_path: Path) -> None:
    play(deadlines, tmp_path, "--processes=1")


async def cancellation(scene: Scene) -> None:
    await scene.up()
    leases = [await scene.link.outputs.reserve([4096]) for _ in range(4)]
    jobs = [Fill(leases[0].spans[0], 1, 0.3), *(Fill(lease.spans[0], 1) for lease in leases[1:])]
    tasks = [
        asyncio.ensure_future(scene.pool.submit(job, deadline_s=5, leases=[lease]))
        for job, lease in zip(jobs, leases, strict=True)
    ]
    await asyncio.sleep(0.1)
    for index in (0, 1, 3):
        tasks[index].cancel()
    await asyncio.wait(tasks[:2])
    assert [lease.pins for lease in leases] == [1, 0, 1, 0]
    leases[0].release()
    assert scene.link.outputs.used == 4 * 4096, "it is still written to"
    await tasks[2]
    assert scene.link.outputs.used == 3 * 4096
    assert [lease.view()[0] for lease in leases[1:]] == [0, 1, 0]
    for lease in leases[1:]:
        lease.release()
    # one that looks at its time ends early
    thinking = asyncio.ensure_future(scene.pool.submit(Think(30), deadline_s=60))
    await asyncio.sleep(0.05)
    thinking.cancel()
    assert (await scene.pool.submit(Echo("next"), deadline_s=5)).queued_s < 5
    assert scene.pool.statistics.withdrawn == 4 and scene.pool.statistics.deaths == 0


def test_cancellation(tmp_path: Path) -> None:
    play(cancellation, tmp_path, "--processes=1")


async def no_idling_behind_a_long_job(scene: Scene) -> None:
    await scene.up()
    long = [asyncio.ensure_future(scene.pool.submit(Think(2), deadline_s=5))]
    before = time.monotonic()
    await asyncio.gather(*(scene.pool.submit(Echo("a", seconds=0.01), deadline_s=5) for _ in range(20)))
    assert time.monotonic() - before < 1.5 and not long[0].done()
    await asyncio.gather(*long)


def test_nobody_waits_behind_a_long_job_while_others_idle(tmp_path: Path) -> None:
    play(no_idling_behind_a_long_job, tmp_path)


async def files(scene: Scene) -> None:
    store = scene.segments
    for value in (1, 2):
        segment = aside(store.take, 8192)
        assert segment is not None
        await scene.pool.submit(FillFile(segment.name, 8192, value), deadline_s=5)
        assert bytes(segment.view()) == bytes([value]) * 8192
        error = await raised(scene.pool.submit(FillFile(segment.name, segment.capacity + 1, value), deadline_s=5))
        assert isinstance(error, JobCrashed) and error.kind == "OSError"
        aside(segment.settle, consumed=value == 1)
    for name in (segment.name, "../etc/passwd", "mediagate-1-1"):
        error = await raised(scene.pool.submit(FillFile(name, 1, 1), deadline_s=5))
        assert isinstance(error, JobCrashed) and error.kind in ("FileNotFoundError", "OSError")


def test_files(tmp_path: Path) -> None:
    play(files, tmp_path, "--processes=1")


async def files_that_are_handed_on(scene: Scene) -> None:
    """Pool processes keep them mapped and they are used again all the same, until a reader keeps one."""
    await scene.up()
    store, data = scene.segments, b"\1" * 10_000
    first = aside(store.write, [data], handed_on=True)
    aside(first.settle, consumed=True)
    for value in range(2, 12):
        segment = aside(store.take_idle, 10_000)
        assert segment is not None and segment.name == first.name
        jobs = [FillFile(segment.name, 10_000, value)] * 4  # more than one process takes part
        await asyncio.gather(*(scene.pool.submit(job, deadline_s=5) for job in jobs))
        path = Path("/dev/shm", aside(segment.publish))
        assert aside(path.read_bytes) == bytes([value]) * 10_000
        kept = aside(os.open, path, os.O_RDONLY)
        aside(path.unlink)
        if value < 11:
            os.close(kept)
        if value == 5:
            for pid in scene.pids():
                os.kill(pid, signal.SIGKILL)
            await scene.until(lambda: scene.pool.statistics.deaths == 2)
            await scene.up()
        aside(segment.settle, consumed=True)
    assert store.count == 0 and aside(store.take_idle, 10_000) is None
    assert os.pread(kept, 10_001, 0) == bytes([11]) * 10_000
    os.close(kept)


def test_files_that_are_handed_on(tmp_path: Path) -> None:
    play(files_that_are_handed_on, tmp_path)


async def configuration(scene: Scene) -> None:
    payload = b"p" * (3 * LONG_BYTES) + b"the last"
    scene.pool.configure(1, payload)
    scene.pool.configure(2, b"")
    scene.pool.configure(3, b"bad one!")
    recalled = await asyncio.gather(*(scene.pool.submit(Recall(1), deadline_s=5) for _ in range(8)))
    assert {outcome.result.text for outcome in recalled} == {f"{len(payload)} the last"}
    assert (await scene.pool.submit(Recall(2), deadline_s=5)).result.text == "0 "
    assert (await scene.pool.submit(Recall(3), deadline_s=5)).result.text == "nothing"
    await scene.up()
    assert scene.pool.statistics.configurations_refused == 2
    scene.pool.configure(1, b"new value")
    assert (await scene.pool.submit(Recall(1), deadline_s=5)).result.text == "9 ew value"


def test_configuration(tmp_path: Path) -> None:
    play(configuration, tmp_path)
