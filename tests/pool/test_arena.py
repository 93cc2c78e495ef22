"""The arena: order of addresses and of requests, cancellation, pages given back; and all of it at random against a
model.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.arena import Arena
from pool.mapping import PAGE, Mapping
from pool.spans import ArenaTooSmall, Lease
from tests.pool.test_mapping import shared_kib

PAGES = 16
START = PAGE * 3


def arena(pages: int = PAGES, keep: int = 0, linger_s: float = 0.0) -> Arena:
    return Arena(Mapping(START + pages * PAGE), START, pages * PAGE, keep_bytes=keep * PAGE, linger_s=linger_s)


def take(room: Arena, *pages: int) -> Lease:
    lease = room.try_reserve([count * PAGE for count in pages])
    assert lease is not None
    return lease


def pages_of(lease: Lease) -> list[int]:
    return [(span.offset - START) // PAGE for span in lease.spans]


def test_lowest_address_first_and_neighbours_join() -> None:
    room = arena()
    first, second, third = take(room, 2), take(room, 3), take(room, 4)
    assert [pages_of(lease) for lease in (first, second, third)] == [[0], [2], [5]]
    second.release()
    small = take(room, 1)
    assert pages_of(small) == [2]
    first.release()
    small.release()  # 0..5 is one piece again
    whole = take(room, 5)
    assert pages_of(whole) == [0]
    whole.release()
    third.release()
    everything = take(room, PAGES)
    everything.release()
    assert room.used == 0


def test_spans_come_together_or_not_at_all() -> None:
    room = arena()
    first = take(room, 4)
    second = take(room, 4)
    third = take(room, 4)
    second.release()
    assert room.try_reserve([3 * PAGE, 3 * PAGE, 3 * PAGE]) is None
    assert room.used == 8 * PAGE
    both = take(room, 3, 4)
    assert pages_of(both) == [4, 12] and both.nbytes == 7 * PAGE
    for lease in (first, third, both):
        lease.release()
    assert room.used == 0


def test_sizes() -> None:
    room = arena()
    lease = room.try_reserve([0, 1, PAGE, PAGE + 1])
    assert lease is not None
    assert [span.nbytes for span in lease.spans] == [0, 1, PAGE, PAGE + 1]
    assert pages_of(lease) == [0, 1, 2, 3] and room.used == lease.nbytes == 5 * PAGE
    lease.release()
    with pytest.raises(ValueError):
        room.try_reserve([-1])
    empty = room.try_reserve([])
    assert empty is not None and empty.spans == ()
    empty.release()


async def test_what_never_fits_is_refused_at_once() -> None:
    room = arena()
    lease = take(room, PAGES)
    for sizes in ([PAGES * PAGE + 1], [PAGE] * (PAGES + 1)):
        with pytest.raises(ArenaTooSmall) as refused:
            await room.reserve(sizes)
        assert (refused.value.needed, refused.value.size) == ((PAGES + 1) * PAGE, PAGES * PAGE)
        with pytest.raises(ArenaTooSmall):
            room.try_reserve(sizes)
    lease.release()


async def test_nobody_overtakes() -> None:
    room = arena()
    lease = take(room, 8)
    big = asyncio.create_task(room.reserve([12 * PAGE]))
    await asyncio.sleep(0)
    small = asyncio.create_task(room.reserve([PAGE]))
    await asyncio.sleep(0)
    assert room.waiting == 2 and room.try_reserve([PAGE]) is None
    lease.release()
    assert pages_of(await big) == [0] and pages_of(await small) == [12]
    for task in (big, small):
        task.result().release()
    assert room.used == room.waiting == 0


async def test_cancelling_the_first_lets_the_next_in() -> None:
    room = arena()
    lease = take(room, 8)
    big = asyncio.create_task(room.reserve([12 * PAGE]))
    small = asyncio.create_task(room.reserve([PAGE]))
    await asyncio.sleep(0)
    big.cancel()
    await asyncio.wait([big])
    assert pages_of(await small) == [8]
    small.result().release()
    lease.release()


async def test_cancelled_at_the_moment_of_being_served() -> None:
    room = arena()
    lease = take(room, PAGES)
    served = asyncio.create_task(room.reserve([PAGE]))
    next_one = asyncio.create_task(room.reserve([PAGES * PAGE]))
    await asyncio.sleep(0)
    lease.release()
    served.cancel()  # has its lease already, its task has not run
    await asyncio.wait([served])
    assert served.cancelled()
    (await next_one).release()
    assert room.used == 0


async def test_cancelled_before_the_release() -> None:
    room = arena()
    lease = take(room, PAGES)
    gone = asyncio.create_task(room.reserve([PAGE]))
    next_one = asyncio.create_task(room.reserve([PAGES * PAGE]))
    await asyncio.sleep(0)
    gone.cancel()
    lease.release()  # before the cancelled task has run
    (await next_one).release()
    assert gone.cancelled() and room.used == 0


def fill(lease: Lease) -> None:
    for index, span in enumerate(lease.spans):
        lease.view(index)[:] = b"x" * span.nbytes


async def test_a_giants_pages_go_back() -> None:
    room = arena(4096, keep=64, linger_s=0.02)
    before = shared_kib()
    lease = take(room, 4096)
    fill(lease)
    assert shared_kib() - before >= 16384
    lease.release()
    for _ in range(500):
        await asyncio.sleep(0.01)
        if shared_kib() - before <= 64 * 4 + 64:
            break
    kept = shared_kib() - before
    assert 256 <= kept <= 320
    assert room._ticking is None or not room._cold


async def test_a_steady_load_keeps_its_pages() -> None:
    room = arena(1024, keep=0, linger_s=1000.0)
    before = shared_kib()
    for _ in range(3):
        lease = take(room, 512)
        fill(lease)
        lease.release()
        room.cool()  # a tick while the pages are in regular use
    assert shared_kib() - before >= 2048
    room.cool()
    assert shared_kib() - before < 64
    assert room.cool()
    assert room._ticking is not None
    room._ticking.cancel()


async def test_used_pages_are_never_given_back() -> None:
    room = arena(64, keep=0, linger_s=1000.0)
    first = take(room, 32)
    fill(first)
    first.release()
    room.cool()  # cold from now on
    second = take(room, 8)
    fill(second)
    for _ in range(4):
        room.cool()
    assert bytes(second.view()) == b"x" * 8 * PAGE
    second.release()
    assert room._ticking is not None
    room._ticking.cancel()


def test_without_a_loop_nothing_ticks() -> None:
    room = arena(64)
    take(room, 32).release()
    assert room._ticking is None


steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "try", "release", "pin", "unpin", "cancel", "cool", "turn"]),
        st.integers(0, 1000),
        st.lists(st.integers(0, 9 * PAGE), min_size=1, max_size=3),
    ),
    max_size=60,
)


class Model:
    """Who asked, who holds what; checks after every step that nothing overlaps, nothing is lost and nobody overtook."""

    def __init__(self) -> None:
        self.room = arena(linger_s=1000.0)
        self.tasks: list[asyncio.Task[Lease]] = []  # every reservation that may still wait, in order of asking
        self.held: list[Lease] = []
        self.unpins: list[tuple[Lease, Callable[[], None]]] = []
        self.draining: list[Lease] = []
        self.stamps: dict[int, bytes] = {}
        self.counter = 0

    def own(self, lease: Lease) -> None:
        self.held.append(lease)
        self.counter += 1
        self.stamps[id(lease)] = self.counter.to_bytes(8, "little")
        for index, span in enumerate(lease.spans):
            if span.nbytes >= 8:
                lease.view(index)[:8] = self.stamps[id(lease)]

    def collect(self) -> None:
        """Granted reservations become held leases; the tasks that are granted must be the first of those waiting."""
        pending_seen = False
        waiting = []
        for task in self.tasks:
            if task.cancelled():
                continue
            if task.done():
                assert not pending_seen, "somebody overtook"
                self.own(task.result())
            else:
                pending_seen = True
                waiting.append(task)
        self.tasks = waiting

    def check(self) -> None:
        alive = self.held + [lease for lease in self.draining if lease.pins]
        self.draining = [lease for lease in self.draining if lease.pins]
        taken = sorted((s.offset, s.offset + max(1, -(-s.nbytes // PAGE)) * PAGE) for a in alive for s in a.spans)
        assert all(left[1] <= right[0] for left, right in zip(taken, taken[1:], strict=False)), "overlap"
        assert not taken or (taken[0][0] >= START and taken[-1][1] <= START + self.room.size)
        assert self.room.used == sum(b - a for a, b in taken), "bytes lost"
        assert self.room.waiting == len(self.tasks)
        for lease in alive:
            for span in lease.spans:
                if span.nbytes >= 8:
                    assert bytes(self.room._mapping.view(span.offset, 8)) == self.stamps[id(lease)], "overwritten"

    async def step(self, what: str, number: int, sizes: list[int]) -> None:
        if what == "reserve":
            self.reserve(sizes)
        elif what == "try":
            self.try_reserve(sizes)
        elif what == "release" and self.held:
            lease = self.held.pop(number % len(self.held))
            self.draining.append(lease)
            lease.release()
        elif what == "pin" and self.held:
            lease = self.held[number % len(self.held)]
            self.unpins.append((lease, lease.pin()))
        elif what == "unpin" and self.unpins:  # a job ended, or its process died
            self.unpins.pop(number % len(self.unpins))[1]()
        elif what == "cancel" and self.tasks:
            self.tasks[number % len(self.tasks)].cancel()
            return  # several events may fall into one turn of the loop
        elif what == "cool":
            self.room.cool()
        await self.turn()

    def reserve(self, sizes: list[int]) -> None:
        self.tasks.append(asyncio.ensure_future(self.room.reserve(sizes)))

    def try_reserve(self, sizes: list[int]) -> None:
        try:
            lease = self.room.try_reserve(sizes)
        except ArenaTooSmall:
            return
        if lease is not None:
            assert self.room.waiting == 0, "overtook"
            self.own(lease)

    async def turn(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.tasks = [task for task in self.tasks if not self._was_refused(task)]
        self.collect()
        self.check()

    @staticmethod
    def _was_refused(task: asyncio.Task[Any]) -> bool:
        return task.done() and not task.cancelled() and isinstance(task.exception(), ArenaTooSmall)

    async def finish(self) -> None:
        await self.turn()
        for _ in range(1000):
            if not (self.tasks or self.held or self.unpins):
                break
            for what in ("unpin", "release"):
                await self.step(what, 0, [])
        assert self.room.used == self.room.waiting == 0
        whole = take(self.room, PAGES)
        whole.release()
        if self.room._ticking is not None:
            self.room._ticking.cancel()


@settings(max_examples=150, deadline=None)
@given(steps)
def test_random_sequences_against_a_model(sequence: list[tuple[str, int, list[int]]]) -> None:
    async def run() -> None:
        model = Model()
        for step in sequence:
            await model.step(*step)
        await model.finish()

    asyncio.run(run())
