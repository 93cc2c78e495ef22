"""Clients that do not read their stream: cut after a while, and only they."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from pipeline.protocols import http
from pipeline.protocols.http import EventStream
from pipeline.ticket import Ticket

FRAME = b"data: " + b"x" * 65536 + b"\n\n"
STALL_S = 0.4


class Server:
    """Streams without end to whoever asks; `ends` tells how each answer ended."""

    def __init__(self, keepalive_s: float, pause_s: float) -> None:
        self._keepalive_s, self._pause_s = keepalive_s, pause_s
        self.ends: list[str] = []
        self.tickets: list[Ticket] = []
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        ticket = Ticket("r", "/")
        self.tickets.append(ticket)
        try:
            async with EventStream(request, ticket, {}, self._keepalive_s) as stream:
                while True:
                    await stream.write(FRAME if not self._pause_s else b"data: a\n\n")
                    await asyncio.sleep(self._pause_s)
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        except ConnectionError:
            self.ends.append("cut")
            raise


async def serving(server: Server) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = site.port
    return runner


@pytest.fixture
async def endless(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(http, "WRITE_STALL_S", STALL_S)
    server = Server(keepalive_s=0.1, pause_s=0)
    runner = await serving(server)
    yield server
    await runner.cleanup()


async def connect(server: Server) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    return client


async def until(server: Server, count: int) -> None:
    async with asyncio.timeout(20):
        while len(server.ends) < count:
            await asyncio.sleep(0.02)


async def test_who_reads_nothing_is_cut(endless: Server) -> None:
    with await connect(endless):
        began = asyncio.get_running_loop().time()
        await until(endless, 1)
        assert asyncio.get_running_loop().time() - began >= STALL_S
    assert endless.tickets[0].message == f"the client read nothing of its answer for {STALL_S:g} s"


async def test_who_reads_slowly_is_not(endless: Server) -> None:
    """A few kilobytes now and then: the socket is not writable again for several times the patience."""
    loop = asyncio.get_running_loop()
    with await connect(endless) as client:
        began = loop.time()
        while loop.time() < began + 6 * STALL_S:
            assert await loop.sock_recv(client, 4096)
            await asyncio.sleep(STALL_S / 10)
        assert endless.ends == []
    await until(endless, 1)
    assert endless.tickets[0].message == ""


async def test_a_stream_that_is_quiet_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says nothing for longer than the patience with clients: pings only."""
    monkeypatch.setattr(http, "WRITE_STALL_S", 0.2)
    server = Server(keepalive_s=0.1, pause_s=0.8)
    runner = await serving(server)
    loop = asyncio.get_running_loop()
    with await connect(server) as client:
        found = b""
        async with asyncio.timeout(20):
            while found.count(b"data: a\n\n") < 2:
                found += await loop.sock_recv(client, 4096)
    assert found.count(b": ping\n\n") >= 3
    await until(server, 1)
    await runner.cleanup()
