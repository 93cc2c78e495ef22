"""The way of an engine's first token to the client, timed by one clock: through a gateway, or without any.

A stand-in that stamps (`tools/fake_engine.py --stamp`) begins its answer with the moment it began.  Clients are as thin
as they can be, and look at the clock before anything else: a connection each, one stream after the other.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from grpclib.client import Channel, UnaryStreamMethod
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from tools.demo.flow import MODEL
from tools.fake_engine import BUNDLE
from tools.load.client import ROUTE

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
PROMPT = "Say something."
LAST_CHUNK = b"0\r\n\r\n"  # of a chunked body
LEAST_DIGITS = 8  # no shorter number is taken for a stamp
WAIT_S = 30


class Passage(NamedTuple):
    """Of one stream, milliseconds since the engine began: its first bytes, and its first words, with the client."""

    first_byte: float
    first_word: float


class Broken(Exception):
    """A stream that did not come whole, or came without a stamp."""


class Pace(NamedTuple):
    """`streams` in all, `clients` at a time, each begun after a pause of `pause_s` seconds on average."""

    clients: int
    streams: int
    pause_s: float
    seed: int = 1


async def through(host: str, port: int, pace: Pace) -> list[Passage]:
    """Chat streams through the gateway that listens there."""
    question = {"role": "user", "content": PROMPT}
    body = json.dumps({"model": MODEL, "messages": [question], "max_tokens": 200, "stream": True}).encode()
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(_Connection, host, port))[1] for _ in range(pace.clients)]
    try:
        return await _paced([lambda one=one: one.ask(request) for one in connections], pace)
    finally:
        for connection in connections:
            connection.close()


async def direct(port: int, pace: Pace) -> list[Passage]:
    """The same without a gateway: gRPC clients that read the engine's own messages."""
    tokenizer = Tokenizer.from_file(str(BUNDLE / "tokenizer.json"))
    channels = [Channel("127.0.0.1", port) for _ in range(pace.clients)]
    try:
        return await _paced([lambda one=one: _call(one, tokenizer) for one in channels], pace)
    finally:
        for channel in channels:
            channel.close()


async def _paced(asks: Sequence[Callable[[], Awaitable[Passage]]], pace: Pace) -> list[Passage]:
    chance = random.Random(pace.seed)
    numbers = iter(range(pace.streams))
    found: list[Passage] = []

    async def client(ask: Callable[[], Awaitable[Passage]]) -> None:
        for _ in numbers:
            await asyncio.sleep(chance.uniform(0, 2 * pace.pause_s))
            found.append(await ask())

    await asyncio.gather(*map(client, asks))
    return found


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._pieces: list[tuple[int, bytes]] = []
        self._whole: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's is none of asyncio's classes
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.monotonic_ns(), data))
        if data.endswith(LAST_CHUNK) and self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(Broken("the connection was closed"))

    async def ask(self, request: bytes) -> Passage:
        self._pieces.clear()
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(WAIT_S):
                await self._whole
        except TimeoutError:
            raise Broken(f"no whole answer in {WAIT_S} s: {self._pieces[:1]}") from None
        return passage(self._pieces)

    def close(self) -> None:
        self._transport.close()


def passage(pieces: Sequence[tuple[int, bytes]]) -> Passage:
    """Of an answer as it came: moments in nanoseconds, and bytes.  Raises Broken."""
    text, words_at = "", 0
    for moment, data in pieces:
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                said = _words(json.loads(line.removeprefix(b"data: ")))
                words_at = words_at or (moment if said else 0)
                text += said
    began = stamp_of(text)
    if began is None:
        raise Broken(f"no stamp in {b''.join(data for _, data in pieces)[:300]!r}")
    return Passage((pieces[0][0] - began) / 1e6, (words_at - began) / 1e6)


def _words(event: Any) -> str:
    choices = event.get("choices")
    return choices[0]["delta"].get("content") or "" if choices else ""


def stamp_of(text: str) -> int | None:
    """The moment at the beginning of an answer, in nanoseconds."""
    digits = text.partition(" ")[0]
    return int(digits) if digits.isdigit() and len(digits) >= LEAST_DIGITS else None


async def _call(channel: Channel, tokenizer: Tokenizer) -> Passage:
    tokens = pb.TokenizedInput(original_text=PROMPT, input_ids=tokenizer.encode(PROMPT).ids)
    request = pb.GenerateRequest(request_id=f"direct-{time.monotonic_ns()}", tokenized=tokens, stream=True)
    generate = UnaryStreamMethod(channel, GENERATE, pb.GenerateRequest, pb.GenerateResponse)
    moment, ids = 0, []
    async with generate.open(timeout=WAIT_S) as stream:
        await stream.send_message(request, end=True)
        async for reply in stream:
            moment = moment or time.monotonic_ns()
            ids += reply.chunk.token_ids
    began = stamp_of(tokenizer.decode(ids))
    if began is None:
        raise Broken(f"no stamp in {tokenizer.decode(ids)[:300]!r}")
    return Passage((moment - began) / 1e6, (moment - began) / 1e6)
