"""The frontend's link and the control socket, with the test at the supervisor's end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pool.arena import Arena
from pool.control import (
    Control,
    Died,
    Drain,
    Ping,
    Pong,
    Quit,
    Ready,
    Renew,
    Renewed,
    Reset,
    Status,
    control_pair,
    line,
)
from pool.link import FrontendLink
from pool.mapping import PAGE, Mapping
from pool.row import Row
from tests.pool.shop import Result


class Ends:
    def __init__(self) -> None:
        self.mapping = Mapping(Row.nbytes(1) + 2 * PAGE)
        self.row = Row(self.mapping, 0, 1)
        self.supervisor, self.control = control_pair()
        arena = Arena(self.mapping, Row.nbytes(1), PAGE, keep_bytes=PAGE)
        self.link = FrontendLink(self.mapping, self.row, arena, arena, self.control, Result)

    async def said(self) -> list[msgspec.Struct]:
        await asyncio.sleep(0.01)
        return self.supervisor.receive()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    ends.link.close()
    ends.supervisor.close()
    ends.control.close()
    ends.row.close()


async def test_pings_are_answered_by_the_loop(ends: Ends) -> None:
    ends.link.open()
    ends.link.open()
    ends.supervisor.send(Ping())
    assert await ends.said() == [Pong()]


async def test_texts_become_one_line(ends: Ends) -> None:
    ends.link.ready("a\nREADY=1\n b")
    ends.link.status("x" * 10_000)
    ready, status = await ends.said()
    assert ready == Ready("a READY=1 b")
    assert isinstance(status, Status) and len(status.text) == 500 and line("") == ""


@pytest.mark.parametrize("settle", [True, False])
async def test_asked_to_drain_before_anybody_listened(ends: Ends, settle: bool) -> None:
    ends.supervisor.send(Drain(settle))
    ends.link.open()
    await asyncio.sleep(0.01)
    heard: list[bool] = []
    ends.link.on_drain(heard.append)
    assert heard == [settle]


async def test_asked_to_quit(ends: Ends) -> None:
    heard: list[Any] = []
    ends.link.on_drain(heard.append)
    ends.link.on_quit(lambda: heard.append("quit"))
    ends.supervisor.send(Drain(True))
    ends.supervisor.send(Quit())
    await asyncio.sleep(0.01)
    assert heard == [True, "quit"]


async def test_a_death_before_there_is_a_pool_is_not_forgotten(ends: Ends) -> None:
    ends.link.open()
    ends.supervisor.send(Died(0, "killed"))
    ends.supervisor.send(Renew())
    assert await ends.said() == [Renewed()]
    pool = ends.link.pool()
    pool.start()
    assert await ends.said() == [Reset(0)]
    assert pool.statistics.deaths == 1
    with pytest.raises(RuntimeError):
        ends.link.pool()
    await pool.close()


async def test_a_supervisor_that_does_not_read(ends: Ends) -> None:
    for number in range(5000):
        ends.link.status(f"{number} {'x' * 400}")
    assert ends.control.has_unsent
    ends.link.open()
    ends.link.status("last")
    heard: list[msgspec.Struct] = []
    while len(heard) < 5001:
        heard += await ends.said()
    assert [int(message.text.split()[0]) for message in heard[:-1]] == list(range(5000))  # type: ignore[attr-defined]
    assert heard[-1] == Status("last") and not ends.control.has_unsent


async def test_the_other_end_is_gone(ends: Ends) -> None:
    ends.link.open()
    ends.supervisor.close()
    await asyncio.sleep(0.01)
    assert not ends.control.is_open
    ends.link.status("nobody hears it")
    assert not ends.control.has_unsent


def test_messages_arrive_in_order_and_whole() -> None:
    upper, lower = control_pair()
    sent: list[msgspec.Struct] = [Died(1, "how"), Drain(True), Ping(), Renew(), Quit()]
    for message in sent:
        upper.send(message)
    assert lower.receive() == sent and lower.receive() == []
    for end in (upper, lower):
        assert isinstance(end, Control)
        end.close()
