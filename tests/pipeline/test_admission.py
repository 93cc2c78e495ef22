"""Admission: first come first served, nothing lost, whatever is cancelled when."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.admission import Backlog, Bodies, Gate, InflightMedia, Slots
from pipeline.errors import GatewayError


class Rejections(list[str]):
    def __call__(self, reason: str) -> None:
        self.append(reason)


def ignore(gate: Gate) -> None:
    """No metrics here."""


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_newcomer_does_not_overtake_a_larger_waiter() -> None:
    gate = Gate(10)
    first = await gate.take(8, 1)
    large = asyncio.create_task(gate.take(9, 1))
    await settle()
    small = asyncio.create_task(gate.take(1, 1))
    await settle()
    assert not large.done() and not small.done() and gate.waiting == 10
    first.release()
    await settle()
    assert large.done() and small.done()
    (await large).release()
    (await small).release()
    assert gate.held == 0 and gate.waiting == 0


async def test_releasing_twice_gives_back_once() -> None:
    gate = Gate(10)
    grant = await gate.take(6, 1)
    grant.release()
    grant.release()
    assert gate.held == 0


async def test_a_cancelled_waiter_lets_those_behind_it_in() -> None:
    gate = Gate(10)
    held = await gate.take(5, 1)
    large = asyncio.create_task(gate.take(8, 10))
    await settle()
    small = asyncio.create_task(gate.take(4, 10))
    await settle()
    large.cancel()
    await settle()
    assert small.done() and gate.held == 9 and gate.waiting == 0
    (await small).release()
    held.release()
    assert gate.held == 0


async def test_cancelled_in_the_turn_it_is_granted() -> None:
    gate = Gate(1)
    held = await gate.take(1, 1)
    waiter = asyncio.create_task(gate.take(1, 10))
    await settle()
    held.release()  # grants the waiter ...
    waiter.cancel()  # ... which is cancelled before it runs
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert gate.held == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 10)),
            st.tuples(st.just("release"), st.integers(0, 9)),
            st.tuples(st.just("cancel"), st.integers(0, 9)),
        ),
        max_size=40,
    )
)
def test_the_sum_held_never_exceeds_the_limit(steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        gate = Gate(10)
        tasks: list[asyncio.Task[object]] = []
        granted_order: list[int] = []
        for action, value in steps:
            if action == "take":
                number = len(tasks)

                async def take(amount: int = value, number: int = number) -> object:
                    grant = await gate.take(amount, 1000)
                    granted_order.append(number)
                    return grant

                tasks.append(asyncio.create_task(take()))
            elif tasks:
                task = tasks[value % len(tasks)]
                if action == "cancel":
                    task.cancel()
                elif task.done() and not task.cancelled():
                    task.result().release()  # type: ignore[attr-defined]
            await settle()
            assert 0 <= gate.held <= 10
            assert granted_order == sorted(granted_order)
        for task in tasks:
            task.cancel()
        await settle()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result().release()  # type: ignore[attr-defined]
        assert gate.held == 0 and gate.waiting == 0 and gate.waiters == 0

    asyncio.run(play())


async def test_slots_refuse_a_full_queue_and_a_long_wait() -> None:
    rejected = Rejections()
    slots = Slots(1, 1, 0.05, rejected, ignore)
    held = await slots.enter()
    queued = asyncio.create_task(slots.enter())
    await settle()
    with pytest.raises(GatewayError) as full:
        await slots.enter()
    assert (full.value.status, full.value.code, full.value.headers["Retry-After"]) == (429, "admission_queue_full", "2")
    with pytest.raises(GatewayError) as timeout:
        await queued
    assert (timeout.value.status, timeout.value.code) == (503, "admission_queue_timeout")
    assert rejected == ["full", "timeout"]
    held.release()
    (await slots.enter()).release()


async def test_a_queue_of_zero_refuses_at_once() -> None:
    slots = Slots(1, 0, 60, Rejections(), ignore)
    held = await slots.enter()
    with pytest.raises(GatewayError):
        await slots.enter()
    held.release()


async def test_a_body_larger_than_the_sum_is_refused_at_once() -> None:
    bodies = Bodies(1000, 60, Rejections())
    with pytest.raises(GatewayError) as error:
        await bodies.enter(1001)
    assert (error.value.status, error.value.code) == (413, "request_body_too_large")
    assert "1001" in error.value.message and "1000" in error.value.message


async def test_chunked_bodies_take_pieces_and_never_wait() -> None:
    rejected = Rejections()
    bodies = Bodies(3 << 20, 60, rejected)
    one, two = await bodies.enter(None), await bodies.enter(None)
    bodies.grow(one, 100)
    assert bodies.gate.held == Bodies.PIECE
    bodies.grow(one, 200)
    assert bodies.gate.held == Bodies.PIECE
    bodies.grow(two, 2 << 20)
    assert bodies.gate.held == 3 << 20
    with pytest.raises(GatewayError) as error:
        bodies.grow(one, (1 << 20) + 1)
    assert (error.value.status, error.value.code) == (429, "admission_queue_full")
    two.release()
    bodies.grow(one, (1 << 20) + 1)
    one.release()
    assert bodies.gate.held == 0


async def test_a_holder_grows_before_those_who_wait_for_it_to_end() -> None:
    bodies = Bodies(10, 60, Rejections())
    body = await bodies.enter(6)
    waiting = asyncio.create_task(bodies.enter(5))
    await settle()
    fetched = bodies.begin()
    bodies.grow(fetched, 4)
    assert bodies.gate.held == 10 and not waiting.done()
    with pytest.raises(GatewayError):
        bodies.grow(fetched, 5)
    body.release()
    fetched.release()
    (await waiting).release()
    assert bodies.gate.held == 0


async def test_media_over_the_whole_budget_are_413_at_once() -> None:
    rejected = Rejections()
    media = InflightMedia(1000, 0.05, rejected, ignore)
    with pytest.raises(GatewayError) as error:
        await media.enter(1001)
    assert (error.value.status, error.value.code) == (413, "multimodal_payload_too_large")
    assert rejected == ["multimodal_too_large"]


async def test_media_wait_for_room_and_the_queue_holds_one_budget() -> None:
    """As SMG, measured: the second waits and gets 429, a third that would overfill the queue gets it at once."""
    rejected = Rejections()
    media = InflightMedia(1000, 0.05, rejected, ignore)
    first = await media.enter(900)
    second = asyncio.create_task(media.enter(900))
    await settle()
    with pytest.raises(GatewayError) as third:
        await media.enter(900)
    assert (third.value.status, third.value.code) == (429, "multimodal_inflight_budget")
    with pytest.raises(GatewayError):
        await second
    assert rejected == ["multimodal_inflight"] * 2
    first.release()
    (await media.enter(1000)).release()
    assert media.gate.held == 0


async def test_without_a_limit_media_are_only_counted() -> None:
    media = InflightMedia(None, 1, Rejections(), ignore)
    grant = await media.enter(10**12)
    assert media.gate.held == 10**12
    grant.release()


async def test_tensors_are_made_ahead_for_each_worker_but_not_endlessly() -> None:
    backlog = Backlog(100)
    first, second = await backlog.enter("m", 2, 90), await backlog.enter("m", 2, 110)
    third = asyncio.create_task(backlog.enter("m", 2, 60))
    other = await backlog.enter("another model", 1, 100)
    await settle()
    assert not third.done()
    first.release()
    await settle()
    for grant in (await third, second, other):
        grant.release()


async def test_a_request_above_the_backlog_goes_alone() -> None:
    backlog = Backlog(100)
    small = await backlog.enter("m", 1, 10)
    large = asyncio.create_task(backlog.enter("m", 1, 5000))
    await settle()
    assert not large.done()
    small.release()
    (await large).release()


async def test_without_a_bound_nothing_waits() -> None:
    backlog = Backlog(None)
    for grant in [await backlog.enter("m", 1, 10**12) for _ in range(3)]:
        grant.release()
