"""What the pool decides, step by step with puppets: who gets which job, what a death means, when pins end."""

import asyncio

import pytest

from pool.arena import Arena
from pool.mapping import PAGE, Mapping
from pool.messages import BodyTooLarge, Configured, Ending
from pool.pool import JobCrashed, JobFailed, JobLost, JobOverran, PoolClosed
from pool.ring import CELLS
from pool.row import LONG_BYTES
from pool.spans import LeaseError
from tests.pool.puppet import Stand, finish
from tests.pool.shop import Echo


def arena() -> Arena:
    return Arena(Mapping(64 * PAGE), 0, 64 * PAGE, keep_bytes=64 * PAGE)


async def test_idle_processes_first_then_one_ahead() -> None:
    async with Stand(2) as stand:
        jobs = [stand.submit(text) for text in "abcdef"]
        await stand.turn()
        first, second = stand.puppets
        assert first.take() and second.take()
        assert (first.job.text, second.job.text) == ("a", "b")
        assert stand.pool.busy == 2 and stand.pool.queued == 4
        assert len(stand.pool._queue) == 2
        first.answer()
        assert first.take() and first.job.text == "c", "it does not wait for the loop"
        await stand.turn()
        assert len(stand.pool._queue) == 1
        outcome = await jobs[0]
        assert (outcome.result.text, outcome.run_s, outcome.minor_faults, outcome.slot) == ("a", 0.25, 7, 0)
        await finish(stand)
        assert [job.result().result.text for job in jobs] == list("abcdef")


async def test_idle_processes_take_over_what_waits_elsewhere() -> None:
    async with Stand(2) as stand:
        jobs = [stand.submit(text) for text in "abc"]
        await stand.turn()
        long, short = stand.puppets
        assert long.take() and short.take()
        short.answer()
        await jobs[1]
        await stand.turn()
        assert short.take() and short.job.text == "c", "it stays behind the long job"
        assert not long.slot.submission_bell.answer()
        short.answer()
        long.answer()
        await asyncio.gather(*jobs)


async def test_what_was_begun_is_not_taken_over() -> None:
    async with Stand(2) as stand:
        jobs = [stand.submit(text) for text in "abc"]
        await stand.turn()
        first, second = stand.puppets
        first.take(), second.take()
        first.answer(rings=False)
        assert first.take() and first.job.text == "c"
        first.ring()
        second.answer()
        await stand.turn()
        assert not second.take(), "the job would run twice"
        first.answer()
        await asyncio.gather(*jobs)


async def test_errors_of_the_workshop() -> None:
    async with Stand(1) as stand:
        for ending, error in (
            (Ending.FAILED, JobFailed),
            (Ending.CRASHED, JobCrashed),
            (Ending.OVERRAN, JobOverran),
        ):
            job = stand.submit("why")
            await stand.turn()
            stand.puppets[0].take()
            stand.puppets[0].answer(ending)
            with pytest.raises(error) as raised:
                await job
            if ending is not Ending.OVERRAN:
                assert "why" in str(raised.value)
        assert raised.value and stand.pool.statistics.overran == 1
        assert stand.pool.statistics.failed == stand.pool.statistics.crashed == 1


async def test_a_death_repeats_the_running_job_and_blames_nobody_else() -> None:
    async with Stand(1) as stand:
        jobs = [stand.submit(text) for text in "abc"]
        await stand.turn()
        puppet = stand.puppets[0]
        for _ in range(2):
            puppet.take()
            assert puppet.job.text == "a"
            await stand.die(0)
        with pytest.raises(JobLost):
            await jobs[0]
        puppet.take()
        assert puppet.job.text == "b", "the order is kept"
        await stand.die(0)  # the first death of b
        await finish(stand)
        assert [job.result().result.text for job in jobs[1:]] == ["b", "c"]
        assert stand.pool.statistics.lost == 1 and stand.pool.statistics.repeated == 2
        assert stand.pool.statistics.deaths == 3


async def test_death_of_an_idle_process() -> None:
    async with Stand(1) as stand:
        await stand.die(0)
        job = stand.submit("a")
        await finish(stand)
        assert (await job).result.text == "a" and stand.pool.statistics.repeated == 0


async def test_death_before_the_job_was_begun_counts_for_nobody() -> None:
    async with Stand(1) as stand:
        job = stand.submit("a")
        await stand.turn()
        for _ in range(5):
            await stand.die(0)
        await finish(stand)
        assert (await job).result.text == "a"


async def test_death_between_answer_and_bell() -> None:
    async with Stand(1) as stand:
        job = stand.submit("a")
        await stand.turn()
        stand.puppets[0].take()
        stand.puppets[0].answer(rings=False)
        await stand.die(0)
        assert not job.done() and stand.pool.statistics.repeated == 1
        await finish(stand)
        assert (await job).result.text == "a" and stand.pool.statistics.done == 1


async def test_an_announced_answer_survives_its_process() -> None:
    async with Stand(1) as stand:
        job = stand.submit("a")
        await stand.turn()
        stand.puppets[0].take()
        stand.puppets[0].answer()
        await stand.die(0)  # before the loop has seen the bell
        assert (await job).result.text == "a" and stand.pool.statistics.repeated == 0


async def test_cancelled_in_the_queue_and_with_a_process() -> None:
    room = arena()
    async with Stand(1) as stand:
        leases = [await room.reserve([PAGE]) for _ in range(4)]
        jobs = [stand.submit(text, [lease]) for text, lease in zip("abcd", leases, strict=True)]
        await stand.turn()
        puppet = stand.puppets[0]
        puppet.take()
        assert [lease.pins for lease in leases] == [1, 1, 1, 1]
        jobs[3].cancel()  # in the queue
        jobs[1].cancel()  # with the process, not begun
        jobs[0].cancel()  # running
        await stand.turn()
        assert [lease.pins for lease in leases] == [1, 0, 1, 0]
        assert puppet.slot.board.is_withdrawn(0, puppet.current.job_id)
        leases[0].release()
        assert room.used == 4 * PAGE, "the process still writes into it"
        puppet.answer()
        await stand.turn()
        assert room.used == 3 * PAGE
        await finish(stand)
        assert (await jobs[2]).result.text == "c"
        for lease in leases[1:]:
            lease.release()
        assert room.used == 0 and stand.pool.statistics.withdrawn == 3


async def test_a_dropped_job_is_not_repeated() -> None:
    room = arena()
    async with Stand(1) as stand:
        lease = await room.reserve([PAGE])
        job = stand.submit("a", [lease])
        await stand.turn()
        stand.puppets[0].take()
        job.cancel()
        await stand.turn()
        lease.release()
        await stand.die(0)
        assert room.used == 0 and not stand.puppets[0].take()


async def test_pins_last_over_a_repetition() -> None:
    room = arena()
    async with Stand(1) as stand:
        lease = await room.reserve([PAGE])
        job = stand.submit("a", [lease])
        await stand.turn()
        stand.puppets[0].take()
        await stand.die(0)
        assert lease.pins == 1
        await finish(stand)
        await job
        assert lease.pins == 0
        lease.release()


async def test_a_released_lease_is_refused() -> None:
    room = arena()
    async with Stand(1) as stand:
        held, released = await room.reserve([PAGE]), await room.reserve([PAGE])
        released.release()
        with pytest.raises(LeaseError):
            await stand.pool.submit(Echo("a"), deadline_s=1, leases=[held, released])
        assert held.pins == 0 and stand.pool.queued == 0
        held.release()


async def test_overrun_is_killed_and_not_repeated() -> None:
    async with Stand(2, overrun_grace_s=0.05) as stand:
        job = stand.submit("a", deadline_s=0.1)
        others = [stand.submit(text) for text in "bcd"]
        await stand.turn()
        for puppet in stand.puppets:
            puppet.take()
        await asyncio.sleep(0.4)
        assert stand.kills() == [0]
        assert not job.done(), "the process may still write into the job's spans"
        await stand.die(0)
        with pytest.raises(JobOverran):
            await job
        await finish(stand)
        assert [other.result().result.text for other in others] == ["b", "c", "d"]
        assert stand.pool.statistics.repeated == 0


async def test_the_second_in_line_has_its_own_time() -> None:
    async with Stand(1, overrun_grace_s=0.0) as stand:
        first, second = stand.submit("a", deadline_s=60), stand.submit("b", deadline_s=0.3)
        await stand.turn()
        stand.puppets[0].take()
        await asyncio.sleep(0.5)
        assert stand.kills() == []
        await finish(stand)
        await asyncio.gather(first, second)


async def test_finished_while_being_killed() -> None:
    async with Stand(1, overrun_grace_s=0.0) as stand:
        job = stand.submit("a", deadline_s=0.05)
        await stand.turn()
        stand.puppets[0].take()
        await asyncio.sleep(0.3)
        assert stand.kills() == [0]
        stand.puppets[0].answer()
        assert (await job).result.text == "a"
        late = stand.submit("b")
        await stand.turn()
        assert not stand.puppets[0].take(), "a process that will be killed gets no job"
        await stand.die(0)
        await finish(stand)
        assert (await late).result.text == "b"


async def test_nonsense_from_a_process_ends_it() -> None:
    async with Stand(1) as stand:
        job = stand.submit("a")
        await stand.turn()
        puppet = stand.puppets[0]
        puppet.take()
        puppet.writer.put(b"\xc1 no message")
        await stand.turn()
        assert stand.kills() == [0]
        await stand.die(0)
        await finish(stand)
        assert (await job).result.text == "a"


async def test_an_answer_out_of_turn_ends_the_process() -> None:
    async with Stand(1) as stand:
        jobs = [stand.submit(text) for text in "ab"]
        await stand.turn()
        puppet = stand.puppets[0]
        puppet.take()
        puppet.current, kept = None, puppet.current
        puppet.take()
        puppet.answer()  # the second first
        await stand.turn()
        assert stand.kills() == [0] and kept is not None
        assert not any(job.done() for job in jobs)
        await stand.die(0)
        await finish(stand)
        await asyncio.gather(*jobs)


async def test_an_answer_to_nothing_ends_the_process() -> None:
    async with Stand(1) as stand:
        stand.puppets[0].put(Configured(1))
        await stand.turn()
        assert stand.kills() == [0]


async def test_overrun_without_having_begun_is_done_elsewhere() -> None:
    async with Stand(2, overrun_grace_s=0.0) as stand:
        job = stand.submit("a", deadline_s=0.2)
        while not (kills := stand.kills()):  # its process hangs before it takes the job
            await asyncio.sleep(0.01)
        assert kills == [0]
        assert stand.puppets[1].take() and stand.puppets[1].job.text == "a"
        stand.puppets[1].answer()
        assert (await job).result.text == "a"


async def test_a_result_of_another_type() -> None:
    async with Stand(1) as stand:
        job = stand.submit("a")
        await stand.turn()
        stand.puppets[0].take()
        stand.pool._endings._results = stand.pool._endings._failures  # expects a text
        stand.puppets[0].answer()
        with pytest.raises(JobCrashed) as raised:
            await job
        assert raised.value.kind == "ValidationError"


async def test_sizes() -> None:
    async with Stand(1) as stand:
        with pytest.raises(BodyTooLarge):
            await stand.pool.submit(Echo("x" * LONG_BYTES), deadline_s=1)
        assert stand.pool.queued == 0
        texts = ["x" * size for size in (10, 3900, 3990, 4000, 4096, 5000, LONG_BYTES - 100)]
        jobs = [stand.submit(text) for text in texts]
        await finish(stand)
        assert [job.result().result.text for job in jobs] == texts


async def test_a_damaged_ring_ends_the_process() -> None:
    async with Stand(1) as stand:
        stand.pool.seats[0]._writer.count = CELLS  # as if something had written over the reader's count
        job = stand.submit("a")
        await stand.turn()
        assert stand.kills() == [0]
        await stand.die(0)
        await finish(stand)
        assert (await job).result.text == "a"


async def test_whoever_follows_an_overrun_job_is_not_to_blame() -> None:
    async with Stand(1, overrun_grace_s=0.0) as stand:
        first, second = stand.submit("a", deadline_s=0.05), stand.submit("b")
        await stand.turn()
        puppet = stand.puppets[0]
        puppet.take()
        puppet.answer(rings=False)
        puppet.take()  # the next has begun, the frontend has not heard of the answer
        assert puppet.job.text == "b"
        await asyncio.sleep(0.3)
        assert stand.kills() == [0]
        puppet.slot.completion_bell.ring()
        await stand.die(0)
        assert (await first).result.text == "a"
        puppet.take()
        assert puppet.job.text == "b"
        await stand.die(0)
        assert not second.done(), "its first death"
        await finish(stand)
        assert (await second).result.text == "b"


async def test_close_tells_everybody() -> None:
    room = arena()
    stand = Stand(1)
    await stand.__aenter__()
    lease = await room.reserve([PAGE])
    jobs = [stand.submit(text, [lease]) for text in "abcd"]
    retiring = asyncio.ensure_future(stand.pool.retire(0))
    await stand.turn()
    await stand.pool.close()
    for waiting in (*jobs, retiring):
        with pytest.raises(PoolClosed):
            await waiting
    assert lease.pins == 0
    lease.release()
    with pytest.raises(PoolClosed):
        await stand.pool.submit(Echo("a"), deadline_s=1)
    await stand.pool.close()
    assert stand.pool._ticking is None or stand.pool._ticking.cancelled()
    stand.row.close()
