"""Random sequences of everything that can happen to a pool, played with puppets and checked after every event."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pool.arena import Arena
from pool.mapping import PAGE, Mapping
from pool.messages import Ending
from tests.pool.puppet import Stand, finish

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
        self.room = Arena(Mapping(64 * PAGE), 0, 64 * PAGE, keep_bytes=64 * PAGE)
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
