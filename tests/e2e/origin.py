"""A media host whose replies are described as data, on a thread of its own, for gateways that run as processes.

A reply is a mapping: `status`, `headers`, `body` or `file` (below tests/data), `mode`, and what the mode needs.  The
connections themselves are those of tests/pipeline/origin.py.
"""

import asyncio
import contextlib
import gzip
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.pipeline.origin import Exchange
from tests.pipeline.origin import Origin as Sockets
from tests.pipeline.origin import running as sockets

DATA = Path(__file__).parent.parent / "data"
BLOCK = bytes(65536)

Reply = Mapping[str, Any]


class MediaHost:
    """`serve` adds replies by raw request target; `hits` counts requests by target, `sent` body bytes by target."""

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.heads: dict[str, Mapping[str, str]] = {}
        self.base = ""
        self._sockets: Sockets | None = None

    def serve(self, replies: Mapping[str, Reply], below: str = "") -> str:
        """Answer `below` + target by each reply; gives the address that targets are appended to."""
        assert self._sockets is not None
        for target, reply in replies.items():
            self._sockets.routes[below + target] = self._speaker(reply, self.base + below)
        return self.base + below

    def _speaker(self, reply: Reply, base: str) -> Any:
        async def speak(exchange: Exchange) -> None:
            self.hits[exchange.target] += 1
            self.heads[exchange.target] = exchange.headers
            await Speaker(exchange, reply, base, self.sent).speak()

        return speak

    async def run(self, started: threading.Event, loop_of: list[Any]) -> None:
        async with sockets() as self._sockets:
            self.base = f"http://127.0.0.1:{self._sockets.port}"
            stopped = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(_but_cancellation)
            loop_of += [loop, stopped]
            started.set()
            await stopped.wait()


class Speaker:
    """Says one reply, however wrong it is."""

    def __init__(self, exchange: Exchange, reply: Reply, base: str, sent: Counter[str]) -> None:
        self._exchange = exchange
        self._reply = reply
        self._sent = sent
        self._body = (DATA / reply["file"]).read_bytes() if "file" in reply else str(reply.get("body", "")).encode()
        self._fields = {name: text.replace("{{origin}}", base) for name, text in reply.get("headers", {}).items()}

    async def speak(self) -> None:
        needed = self._reply.get("require_header")
        if needed is not None and needed.lower() not in self._exchange.headers:
            await self._exchange.answer(403, b"header rule")
            return
        await getattr(self, f"_{self._reply.get('mode', 'normal')}")()

    async def _head(self, **fields: str) -> None:
        named = self._fields | {name.replace("_", "-"): text for name, text in fields.items()}
        lines = "".join(f"{name}: {text}\r\n" for name, text in named.items())
        await self._exchange.send(f"HTTP/1.1 {self._reply.get('status', 200)} X\r\n{lines}\r\n".encode())

    async def _send(self, data: bytes) -> None:
        await self._exchange.send(data)
        self._sent[self._exchange.target] += len(data)

    def _leave(self) -> None:
        self._exchange.writer.close()

    async def _normal(self) -> None:
        if self._reply.get("status") == 204:
            await self._head()
            return
        await self._head(Content_Length=str(len(self._body)))
        await self._send(self._body)

    async def _delay(self) -> None:
        await asyncio.sleep(self._reply["seconds"])
        await self._normal()

    async def _hang(self) -> None:
        await self._exchange.gone()

    async def _slow(self) -> None:
        await self._head(Content_Length=str(len(self._body)))
        for at in range(len(self._body)):
            await self._send(self._body[at : at + 1])
            await asyncio.sleep(1 / self._reply["bytes_per_s"])

    async def _short_body(self) -> None:
        await self._head(Content_Length=str(len(self._body)))
        await self._send(self._body[: len(self._body) // 2])
        self._leave()

    async def _until_close(self) -> None:
        await self._head(Connection="close")
        await self._send(self._body)
        self._leave()

    async def _chunks(self, upto: int) -> None:
        await self._head(Transfer_Encoding="chunked")
        step = max(1, len(self._body) // 5)
        for at in range(0, upto, step):
            await self._exchange.chunk(self._body[at : min(at + step, upto)])

    async def _chunked(self) -> None:
        await self._chunks(len(self._body))
        await self._exchange.send(b"0\r\n\r\n")

    async def _chunked_cut(self) -> None:
        await self._chunks(len(self._body) // 2)
        self._leave()

    async def _gzip(self) -> None:
        packed = gzip.compress(self._body, mtime=0)
        await self._head(Content_Encoding="gzip", Content_Length=str(len(packed)))
        await self._send(packed)

    async def _gzip_bomb(self) -> None:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        packed = b"".join(packer.compress(bytes(1_000_000)) for _ in range(self._reply["bytes"] // 1_000_000))
        packed += packer.flush()
        await self._head(Content_Encoding="gzip", Content_Length=str(len(packed)))
        await self._send(packed)

    async def _zeros(self) -> None:
        await self._head(Content_Length=str(self._reply["bytes"]))
        for at in range(0, self._reply["bytes"], len(BLOCK)):
            await self._send(BLOCK[: self._reply["bytes"] - at])

    async def _zeros_chunked(self) -> None:
        await self._head(Transfer_Encoding="chunked")
        for at in range(0, self._reply["bytes"], len(BLOCK)):
            part = BLOCK[: self._reply["bytes"] - at]
            await self._send(b"%x\r\n%s\r\n" % (len(part), part))
        await self._exchange.send(b"0\r\n\r\n")

    async def _endless(self) -> None:
        await self._head(Transfer_Encoding="chunked")
        while True:  # until the other side has had enough
            await self._send(b"%x\r\n%s\r\n" % (len(BLOCK), BLOCK))


def _but_cancellation(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio 3.11 reports connections that are cancelled at the end as errors."""
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


@contextlib.contextmanager
def media_host() -> Iterator[MediaHost]:
    host = MediaHost()
    started, loop_of = threading.Event(), list[Any]()
    thread = threading.Thread(target=lambda: asyncio.run(host.run(started, loop_of)), name="media-host")
    thread.start()
    assert started.wait(10)
    try:
        yield host
    finally:
        loop, stopped = loop_of
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        assert not thread.is_alive()
