"""Bodies in and event streams out: what every route with media or tokens needs of HTTP."""

import array
import asyncio
import contextlib
import fcntl
import re
import termios
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np
from aiohttp import http_exceptions, web

from pipeline.admission import Bodies, Grant
from pipeline.errors import GatewayError
from pipeline.protocols.parts import as_json, check_content_type, decode_body
from pipeline.ticket import Ticket

T = TypeVar("T")

LAST_WRITE_S = 10.0

READ_BUFFER = 1 << 20  # of a body that has its room: it arrives in few pieces
WRITE_STALL_S = 60.0  # longest time in which a client takes nothing of a stream
BODY_STALL_S = 30.0  # longest pause within a body
BODY_GRACE_S = 60.0  # and beyond so long at least this many bytes a second:
SLOWEST_BODY = 8192

# What the JSON of one body may become in memory, about; in an ordinary request it is a thousandth of that.  A list of
# empty lists takes 25 times its own text, and a fault of the frontend is a fault for every client.
MOST_PARSED_BYTES = 64 << 20
_COSTS = (("[", 200), ("{", 200), ('"', 30), (",", 40), ("\\", 12))  # bytes of objects that a character may stand for
_CONTINUE = "100-continue"
_TOLD = "told to continue"
_SMALL_BODY = MOST_PARSED_BYTES // max(cost for _, cost in _COSTS)  # cannot become too much
_SHORT_COSTS = tuple((character.encode(), cost) for character, cost in _COSTS)
_SHORT_PIECE = 4096  # below it, setting up an array costs more than it saves
COMMENT_PING = b": ping\n\n"


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A whole answer; `body` as bytes is JSON already."""
    encoded = body if isinstance(body, bytes) else as_json(body)
    return web.Response(body=encoded, status=status, headers=headers, content_type="application/json")


def comment_frame(payload: bytes) -> bytes:
    """What clients of server-sent events skip; one line."""
    return b": " + payload + b"\n\n"


def data_frame(payload: bytes) -> bytes:
    """An event without a name, as OpenAI's older streams have it."""
    return b"data: " + payload + b"\n\n"


def named_frame(name: str, payload: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


def parsed_bytes(piece: bytes | bytearray) -> int:
    """About how many bytes of objects a piece of JSON becomes, strings not counted; quick where it is base64."""
    if len(piece) < _SHORT_PIECE:
        return sum(cost * piece.count(code) for code, cost in _SHORT_COSTS)
    total = 0
    for character, cost in _COSTS:
        if (code := character.encode()) in piece:
            total += cost * int(np.count_nonzero(np.frombuffer(piece, np.uint8) == code[0]))
    return total


def check_expectation(request: web.Request) -> None:
    """A client that sends `Expect: 100-continue` is told so when its body has room (`read_body`), or refused before."""
    expected = request.headers.get("Expect")
    if expected is not None and expected.strip().lower() != _CONTINUE:
        raise GatewayError("expectation_failed", f"Expect: {expected[:40]!r} cannot be met, only 100-continue")


async def expect_nothing(request: web.Request) -> None:
    """In place of aiohttp's handler of `Expect`, which calls for the body before anybody has looked at the head."""


def is_awaited(request: web.Request) -> bool:
    """Whether the client waits to be told that its body is wanted; answered instead, it may send it or not."""
    return _TOLD not in request and "Expect" in request.headers and not request.content.is_eof()


async def _call_for(request: web.Request) -> None:
    if "Expect" not in request.headers:
        return
    if is_awaited(request) and request.version >= aiohttp.HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
    request[_TOLD] = True


def unreadable(error: BaseException) -> GatewayError:
    """The answer to what is no HTTP: a head, or the chunks of a body."""
    why = error.message if isinstance(error, http_exceptions.HttpProcessingError) else str(error)
    line = next((line for line in why.splitlines() if line.strip()), type(error).__name__)
    what = re.split(r"b(?:ytearray\(b)?['\"]", line)[0].strip(" :")  # without what was read
    return GatewayError("malformed_request", f"the request is not HTTP that can be read: {what[:200]}")


async def _next_piece(content: aiohttp.StreamReader, began: float, have: int) -> bytes:
    """What has arrived, b"" at the end.  A body that has begun holds its room: one that hardly comes is refused."""
    piece = content.read_nowait()
    if piece or content.at_eof():
        return piece
    latest = began + BODY_GRACE_S + have / SLOWEST_BODY
    try:
        async with asyncio.timeout(min(BODY_STALL_S, latest - asyncio.get_running_loop().time())):
            return await content.readany()
    except TimeoutError:
        raise GatewayError("request_timeout", "the request body comes too slowly", status=408) from None


async def read_body(request: web.Request, bodies: Bodies, limit: int) -> tuple[bytearray, Grant]:
    """The whole body, its bytes counted as they arrive; at most `limit`.  The grant is the caller's to release."""
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise GatewayError("json_parse_error", f"Content-Encoding {coding[:40]!r} is not accepted for request bodies")
    length = request.content_length
    if length is not None and length > limit:
        raise GatewayError(
            "request_body_too_large", f"the request body has {length} bytes, more than the limit of {limit}"
        )
    grant = await bodies.enter(length)
    if length is not None:  # until its bytes are counted a body has aiohttp's own small buffer
        request.content.set_read_chunk_size(READ_BUFFER)
    else:
        request.content.set_read_chunk_size(READ_BUFFER // 8)
    body = bytearray()
    parsed: int | None = None
    began = asyncio.get_running_loop().time()
    try:
        await _call_for(request)
        while piece := await _next_piece(request.content, began, len(body)):
            body += piece
            if len(body) > _SMALL_BODY:
                parsed = parsed_bytes(body) if parsed is None else parsed + parsed_bytes(piece)
                if parsed > MOST_PARSED_BYTES:
                    raise GatewayError("request_body_too_large", "the request body holds too many JSON values")
            if len(body) > limit:
                raise GatewayError(
                    "request_body_too_large", f"the request body is longer than the limit of {limit} bytes"
                )
            bodies.grow(grant, len(body))
    except (aiohttp.ClientError, http_exceptions.HttpProcessingError) as error:
        grant.release()
        raise unreadable(error) from None
    except BaseException:
        grant.release()
        raise
    return body, grant


async def read_json(request: web.Request, bodies: Bodies, limit: int, decoder: "msgspec.json.Decoder[T]") -> T:
    """A whole body, decoded; its bytes count until then.  For bodies that become small objects."""
    check_content_type(request.headers.get("Content-Type", ""))
    body, grant = await read_body(request, bodies, limit)
    try:
        return decode_body(decoder, body)
    finally:
        grant.release()


def unread_bytes(transport: asyncio.BaseTransport) -> int:
    """What the kernel holds of a connection until its peer has it."""
    held = array.array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
    return held[0]


class EventStream:
    """A `text/event-stream` answer.

    While the engine is silent, the frame `keepalive` keeps proxies from closing it.  A client that takes nothing for
    WRITE_STALL_S, although there is something for it, holds what engines wait for: its connection is cut.  One timer
    looks after both; it finds out when it fires, so a frame costs no timer.
    """

    def __init__(
        self,
        request: web.Request,
        ticket: Ticket,
        headers: Mapping[str, str],
        keepalive_s: float,
        keepalive: bytes = COMMENT_PING,
    ) -> None:
        self._request = request
        self._keepalive = keepalive
        self._ticket = ticket
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_since = self._loop.time()
        self._writing_since: float | None = None
        self._held: tuple[float | None, int] = (None, 0)  # the write last looked at, and what the client had not taken
        self._pinging: set[asyncio.Task[None]] = set()
        self.response = web.StreamResponse(headers=headers)
        if "Connection" in headers:
            self.response.force_close()
        self.response.content_type = "text/event-stream"
        self.response.charset = "utf-8"
        self.response.headers["Cache-Control"] = "no-cache"

    async def __aenter__(self) -> "EventStream":
        self._ticket.is_answering = True
        await self.response.prepare(self._request)
        self._look()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop_looking()
        for task in self._pinging:
            task.cancel()

    async def write(self, frame: bytes) -> None:
        self._writing_since = self._loop.time()
        await self.response.write(frame)
        self._writing_since = None
        self._quiet_since = self._loop.time()

    async def finish(self, *last: bytes) -> None:
        """The last frames and the end of the body; a client that does not read them is cut off after a while."""
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                for frame in last:
                    await self.write(frame)
                self._stop_looking()
                await self.response.write_eof()
        except TimeoutError:
            self._cut()

    def _look(self) -> None:
        now = self._loop.time()
        if self._writing_since is not None:
            due = self._writing_since + WRITE_STALL_S
            if now >= due:
                if not self._is_taken():
                    self._ticket.message = f"the client read nothing of its answer for {WRITE_STALL_S:g} s"
                    self._cut()
                    return
                due = now + WRITE_STALL_S
        elif self._keepalive_s > 0:
            due = self._quiet_since + self._keepalive_s
            if now >= due:
                self._ping()
                due = now + self._keepalive_s
        else:
            due = now + WRITE_STALL_S
        self._timer = self._loop.call_at(due, self._look)

    def _is_taken(self) -> bool:
        """Whether the client took anything of what the kernel holds since the last look at the same write.

        A socket is writable again only when a good part of its buffer is free, so that a slow client's write may take
        minutes.
        """
        transport = self._request.transport
        held = 0 if transport is None else unread_bytes(transport)
        before, self._held = self._held, (self._writing_since, held)
        return before[0] != self._writing_since or held < before[1]

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    def _ping(self) -> None:
        task = asyncio.ensure_future(self._send_ping())
        self._pinging.add(task)
        task.add_done_callback(self._pinging.discard)

    async def _send_ping(self) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # the client is gone: the handler is being cancelled
            await self.write(self._keepalive)
