"""A media host for tests, on raw sockets: it sends exactly the bytes a test says, however wrong they are."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from engines.base import Modality
from pipeline.errors import GatewayError
from pipeline.fetch import Fetched, Fetcher

BODY = os.urandom(200_000)

Serve = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request as it came, and the way to answer it."""

    def __init__(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, *rest = head.split("\r\n")
        self.method, self.target, self.version = line.split(" ")
        self.headers = {
            name.lower(): value.strip() for name, _, value in (field.partition(":") for field in rest if field)
        }
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        fields = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.send(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body)

    async def start_chunks(self) -> None:
        await self.send(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def gone(self) -> None:
        """Returns when the client has closed the connection."""
        while await self.reader.read(65536):
            pass


class Origin:
    """`routes` from raw request target to what serves it; what is not there gets 404."""

    def __init__(self) -> None:
        self.routes: dict[str, Serve] = {}
        self.requests: list[Exchange] = []
        self.connections = 0
        self.closed = asyncio.Event()  # a client has gone while it was being served
        self.port = 0

    def url(self, target: str = "/a", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{target}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                exchange = Exchange(head.decode("latin-1").removesuffix("\r\n\r\n"), reader, writer)
                self.requests.append(exchange)
                route = self.routes.get(exchange.target)
                if route is None:
                    await exchange.answer(404, b"no such thing")
                else:
                    await route(exchange)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def running(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Origin]:
    origin = Origin()
    server = await asyncio.start_server(origin.serve, host, 0, ssl=tls)
    origin.port = server.sockets[0].getsockname()[1]
    try:
        yield origin
    finally:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        serving = [task for task in others if "Origin.serve" in repr(task.get_coro())]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await server.wait_closed()


async def fetch(fetcher: Fetcher, url: str, **others: Any) -> Fetched:
    settings: dict[str, Any] = {"modality": Modality.IMAGE, "max_bytes": 1 << 20, "deadline_s": 5.0} | others
    fetched = await fetcher.fetch(url, **settings)
    assert fetched.nbytes == sum(map(len, fetched.pieces))
    return fetched


async def refusal(fetcher: Fetcher, url: str, **others: Any) -> str:
    with pytest.raises(GatewayError) as refused:
        await fetch(fetcher, url, **others)
    assert refused.value.code == "multimodal_processing_failed" and refused.value.status == 400
    return refused.value.message


def sends(body: bytes = BODY, status: int = 200, **headers: str) -> Callable[[Exchange], Awaitable[None]]:
    async def serve(exchange: Exchange) -> None:
        await exchange.answer(status, body, **headers)

    return serve


def redirects(location: str, status: int = 302) -> Callable[[Exchange], Awaitable[None]]:
    return sends(b"", status, Location=location)
