"""What the pool decides, step by step with puppets: who gets which job, what a death means, when pins end."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.arena import Arena
from pool.control import Renewed
from pool.mapping import PAGE, Mapping
from pool.messages import BodyTooLarge, Ending
from pool.pool import JobCrashed, JobFailed, JobLost, JobOverran, PoolClosed
from pool.row import LONG_BYTES
from pool.spans import LeaseError
from tests.pool.puppet import Stand
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


async def test_configuration_comes_before_later_jobs_and_is_replayed() -> None:
    big = bytes(range(256)) * (LONG_BYTES // 256 * 2 + 5)
    async with Stand(2) as stand:
        running = stand.submit("a")
        await stand.turn()
        stand.puppets[0].take()
        stand.pool.configure(1, b"old")
        stand.pool.configure(2, big)
        stand.pool.configure(1, b"new")
        await finish(stand)
        await running
        for puppet in stand.puppets:
            assert puppet.kept == {1: b"new", 2: big}
        await stand.die(1)
        assert stand.pool.processes_alive == 1
        await finish(stand)
        assert stand.puppets[1].kept == {1: b"new", 2: big} and stand.pool.processes_alive == 2


async def test_no_job_overtakes_its_configuration() -> None:
    async with Stand(1) as stand:
        stand.pool.configure(1, b"x" * (2 * LONG_BYTES))
        job = stand.submit("a")
        puppet = stand.puppets[0]
        for _ in range(2):
            await stand.turn()
            assert puppet.take()
            puppet.answer()
        await stand.turn()
        assert puppet.take() and puppet.job.text == "a" and len(puppet.kept[1]) == 2 * LONG_BYTES
        puppet.answer()
        await job


async def test_death_while_learning() -> None:
    async with Stand(1) as stand:
        stand.pool.configure(1, b"x" * (3 * LONG_BYTES))
        stand.pool.configure(2, b"y")
        job = stand.submit("a")
        await stand.turn()
        puppet = stand.puppets[0]
        puppet.take()
        puppet.answer()
        await stand.turn()
        puppet.take()  # the second of three pieces
        await stand.die(0)
        await finish(stand)
        assert puppet.kept == {1: b"x" * (3 * LONG_BYTES), 2: b"y"}
        assert (await job).result.text == "a"


async def test_retire_waits_and_loses_nothing() -> None:
    async with Stand(2) as stand:
        jobs = [stand.submit(text) for text in "abcdef"]
        await stand.turn()
        first, second = stand.puppets
        first.take(), second.take()
        retiring = asyncio.ensure_future(stand.pool.retire(0))
        await stand.turn()
        assert not first.slot.submission_bell.answer(), "what was not begun goes elsewhere"
        assert stand.kills() == []
        first.answer()
        await stand.turn()
        assert stand.kills() == [0] and not first.take()
        await stand.die(0)
        await retiring
        await finish(stand)
        assert [job.result().result.text for job in jobs] == list("abcdef")
        assert stand.pool.statistics.repeated == 0


async def test_retiring_given_up() -> None:
    async with Stand(1) as stand:
        job = stand.submit("a")
        await stand.turn()
        stand.puppets[0].take()
        retiring = asyncio.ensure_future(stand.pool.retire(0))
        await stand.turn()
        retiring.cancel()
        await asyncio.wait([retiring])
        later = stand.submit("b")
        await finish(stand)
        await asyncio.gather(job, later)
        assert stand.kills() == []


async def test_renewing_goes_one_by_one_and_again_when_asked_again() -> None:
    async with Stand(2) as stand:
        stand.pool.on_renew()
        order: list[int] = []
        for turn in range(4):
            await stand.turn()
            killed = stand.kills()
            assert len(killed) == 1
            order += killed
            if turn == 1:
                stand.pool.on_renew()
            await stand.die(killed[0])
            await finish(stand)
        await stand.turn()
        assert order == [0, 1, 0, 1]
        assert [type(message) for message in stand.take_sent()] == [Renewed]


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


async def test_a_result_of_another_type() -> None:
    async with Stand(1) as stand:
        job = stand.submit("a")
        await stand.turn()
        stand.puppets[0].take()
        stand.pool._results = stand.pool._failures  # expects a text
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


async def finish(stand: Stand) -> None:
    """Let the puppets do all there is to do."""
    idle = 0
    while idle < 3:
        is_busy = False
        for puppet in stand.puppets:
            if puppet.is_alive and (puppet.current is not None or puppet.take()):
                puppet.answer()
                is_busy = True
        await stand.turn()
        idle = 0 if is_busy else idle + 1


steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "submit",
                "submit",
                "submit",
                "take",
                "take",
                "answer",
                "answer",
                "silent",
                "ring",
                "cancel",
                "die",
                "turn",
            ]
            + ["configure", "retire", "release", "die", "die"]
        ),
        st.integers(0, 100),
    ),
    max_size=80,
)


class Play:
    """Random events on a pool of two puppets; what must hold is checked after each of them."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.room = arena()
        self.jobs: dict[str, tuple[asyncio.Task[Any], Any]] = {}
        self.begun: dict[str, list[int]] = {}  # job -> processes that work on it now
        self.released: set[str] = set()
        self.retiring: list[asyncio.Task[None]] = []
        self.version = 0

    async def step(self, what: str, number: int) -> None:
        puppet = self.stand.puppets[number % 2]
        await getattr(self, what)(puppet, number)
        if number % 4:  # else several events fall into one turn of the loop
            await self.stand.turn()
        self.check()

    async def submit(self, puppet: Any, number: int) -> None:
        lease = self.room.try_reserve([PAGE])
        if lease is not None:
            name = f"job{len(self.jobs)}"
            self.jobs[name] = self.stand.submit(name, [lease]), lease

    async def take(self, puppet: Any, number: int) -> None:
        if not puppet.unrung and puppet.take() and hasattr(puppet.current, "job_id"):
            name = puppet.job.text
            lease = self.jobs[name][1]
            assert lease.pins == 1, "a process works on unpinned spans"
            self.begun.setdefault(name, []).append(puppet.slot.index)
            assert len(self.begun[name]) == 1, "two processes work on one job"

    def _ended(self, puppet: Any) -> None:
        for processes in self.begun.values():
            if puppet.slot.index in processes:
                processes.remove(puppet.slot.index)

    async def answer(self, puppet: Any, number: int) -> None:
        if puppet.current is not None and not puppet.unrung:
            self._ended(puppet)
            puppet.answer(list(Ending)[number % 4])

    async def silent(self, puppet: Any, number: int) -> None:
        if puppet.current is not None and not puppet.unrung and hasattr(puppet.current, "job_id"):
            self._ended(puppet)
            puppet.answer(rings=False)

    async def ring(self, puppet: Any, number: int) -> None:
        if puppet.unrung:
            puppet.ring()

    async def cancel(self, puppet: Any, number: int) -> None:
        pending = [task for task, _ in self.jobs.values() if not task.done()]
        if pending:
            pending[number % len(pending)].cancel()

    async def die(self, puppet: Any, number: int) -> None:
        self._ended(puppet)
        puppet.unrung = 0
        await self.stand.die(puppet.slot.index)

    async def turn(self, puppet: Any, number: int) -> None:
        await self.stand.turn()

    async def configure(self, puppet: Any, number: int) -> None:
        self.version += 1
        self.stand.pool.configure(number % 3, str(self.version).encode())

    async def retire(self, puppet: Any, number: int) -> None:
        self.retiring.append(asyncio.ensure_future(self.stand.pool.retire(puppet.slot.index)))

    async def release(self, puppet: Any, number: int) -> None:
        held = [name for name in self.jobs if name not in self.released]
        if held:
            name = held[number % len(held)]
            if self.jobs[name][0].done():
                self.jobs[name][1].release()
                self.released.add(name)

    def check(self) -> None:
        for name, processes in self.begun.items():
            if processes:
                assert self.jobs[name][1].pins == 1, "unpinned while a process works on it"
        draining = [name for name in self.released if self.jobs[name][1].pins]
        assert self.room.used == PAGE * (len(self.jobs) - len(self.released) + len(draining))

    async def finish(self) -> None:
        for puppet in self.stand.puppets:
            if puppet.unrung:
                puppet.ring()
        for _ in range(100):
            await self._finish_round()
            if all(task.done() for task in self.retiring):
                break
        await self._finish_round()
        for name, (task, lease) in self.jobs.items():
            assert task.done(), f"{name} was never answered"
            if not task.cancelled() and task.exception() is None:
                assert task.result().result.text == name
            assert lease.pins == 0
            if name not in self.released:
                lease.release()
        assert self.room.used == 0
        assert self.stand.pool.processes_alive == 2 and self.stand.pool.queued == 0
        expected = {key: item.payload for key, item in self.stand.pool._configurations.items()}
        assert all(puppet.kept == expected for puppet in self.stand.puppets)

    async def _finish_round(self) -> None:
        await finish(self.stand)
        for slot in dict.fromkeys(self.stand.kills()):
            await self.stand.die(slot)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_random_events_lose_no_job_and_no_span(sequence: list[tuple[str, int]]) -> None:
    async def run() -> None:
        async with Stand(2) as stand:
            play = Play(stand)
            for step in sequence:
                await play.step(*step)
            await play.finish()

    asyncio.run(run())
