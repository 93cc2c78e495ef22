"""Configuration and its replay, retiring and renewing, step by step with puppets."""

import asyncio

import pytest

from pool import pool as pool_module
from pool.control import Renewed
from pool.row import LONG_BYTES
from tests.pool.puppet import Stand, finish


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


async def test_a_process_that_does_not_take_its_configuration_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CONFIGURE_TIMEOUT_S", 0.05)
    async with Stand(1) as stand:
        stand.pool.configure(1, b"x")
        await asyncio.sleep(0.4)
        assert stand.kills() == [0]
        await stand.die(0)
        await finish(stand)
        assert stand.puppets[0].kept == {1: b"x"} and stand.pool.processes_alive == 1
