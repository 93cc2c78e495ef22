"""One call of an engine's method: a request goes out, replies come in until the engine's status.

Theory of operation.  A `Call` is what a connection (`engines.link`) knows of it: the connection tells it what arrived
(`opened`, `arrived`, `trailers`, `ended`) or that nothing will any more (`terminate`), and what the reader has to see
wakes the one task that waits in here.  Bytes are kept as they arrived and cut into replies when those are asked for;
they are acknowledged to the peer when the reader has taken what was there, so a reader that is slow holds the engine
back, and costs at most a stream's window.

Errors are foreign ones: GRPCError for the engine's status, StreamTerminatedError for a stream or connection that ended
before, h2's, OSError from connecting, Unreadable for an answer that cannot be taken apart.  `engines.channel`
translates them.
"""

import asyncio
import functools
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.metadata import decode_grpc_message
from h2.connection import ConnectionState
from h2.errors import ErrorCodes

from engines import frames
from engines.scatter import SCATTER_MIN_BYTES, Drain, Outgoing
from engines.wire import Part, nbytes_of

if TYPE_CHECKING:
    from engines.link import EngineChannel, EngineProtocol

MOST_REPLY_BYTES = 64 << 20
"""A longer reply is none: an answer of 256 thousand tokens with twenty rivals each is shorter."""

_PREFIX = struct.Struct(">BL")  # of each message: whether it is compressed, and its length
_NOT_200 = {
    "400": Status.INTERNAL,
    "401": Status.UNAUTHENTICATED,
    "403": Status.PERMISSION_DENIED,
    "404": Status.UNIMPLEMENTED,
    "429": Status.UNAVAILABLE,
    "502": Status.UNAVAILABLE,
    "503": Status.UNAVAILABLE,
    "504": Status.UNAVAILABLE,
}
"""gRPC's own table for answers that never reached a gRPC server."""


OnLeft = Callable[[Exception | None], None]


class Unreadable(Exception):
    """An answer that is no gRPC: too long, compressed, cut short, without a status that can be read."""


class Call:
    """`send` once, then `reply` until it gives None, then `close`, which may come at any moment, or `linger`.

    `headers`, `trailers`: what the engine said before and behind its replies; None until it came.
    """

    def __init__(self, channel: "EngineChannel", path: str, metadata: frames.Headers) -> None:
        self.id = 0  # of its stream; 0 before there is one
        self.data_sent = 0
        self.headers: frames.Headers | None = None
        self.trailers: frames.Headers | None = None
        self._channel = channel
        self._path = path
        self._metadata = metadata
        self._protocol: EngineProtocol | None = None
        self._outgoing: Outgoing | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._rest = bytearray()  # what has arrived and was not yet asked for
        self._unacknowledged = 0
        self._is_ended = False
        self._error: Exception | None = None
        self._on_left: OnLeft | None = None
        self._patience: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ out

    async def send(self, parts: Sequence[Part], drain: Drain) -> None:
        """Send `parts` as the one message.  Returns when all of it is handed to the connection, also when the engine
        has answered before that: `reply` tells what it said.

        The buffers stay untouched until `drain` is set: by this method, or later by the connection while its feeder
        `holds` the drain.  After any error, and after a cancellation, the caller closes the call.  TypeError or
        BufferError for a buffer that is not contiguous.
        """
        block = frames.request_block(self._channel.scheme, self._channel.authority, self._path, self._metadata)
        small = _joined(parts) if nbytes_of(parts) < SCATTER_MIN_BYTES else None
        protocol = await self._place()
        h2 = protocol.h2
        stream = frames.open_stream(h2)  # from here to the write nothing may fail: the peer would not know the stream
        self.id, self._protocol = stream.stream_id, protocol
        protocol.processor.enter(self)
        head = h2.data_to_send() + frames.headers_frame(h2, stream, block)
        data = None if small is None else frames.last_data_frame(h2, stream, small)
        if data is not None:
            drain.set()  # `data` is a copy
            protocol.write(head + data)
            return
        protocol.write(head)
        await self._scatter(protocol, parts, drain)

    async def _place(self) -> "EngineProtocol":
        """A connection that can be written to and takes another stream."""
        while True:
            protocol = await self._channel.connected()
            connection = protocol.connection
            if protocol.h2.highest_outbound_stream_id >= frames.LAST_STREAM_ID:
                protocol.processor.retire()
                continue
            if not connection.write_ready.is_set():
                await connection.write_ready.wait()
            protocol.processor.check_open()
            if frames.has_room(protocol.h2):
                return protocol
            connection.stream_close_waiter.clear()
            await connection.stream_close_waiter.wait()
            protocol.processor.check_open()

    async def _scatter(self, protocol: "EngineProtocol", parts: Sequence[Part], drain: Drain) -> None:
        feeder = protocol.feeder
        self._outgoing = outgoing = Outgoing(self, parts, drain)
        feeder.add(outgoing)
        try:
            await outgoing.result
        finally:
            feeder.remove(outgoing)
            self._outgoing = None

    # ------------------------------------------------------------ in, told by the connection

    def opened(self, headers: frames.Headers) -> None:
        """The answer's first headers.  Its reader is only woken by what is wrong with them: there is nothing to read
        yet.
        """
        self.headers = headers
        try:
            refusal = _refusal(headers)
        except Unreadable as error:
            self._error = self._error or error
            self.wake()
            return
        if refusal is not None:
            self._error = self._error or GRPCError(*refusal)
            self.wake()

    def arrived(self, data: bytes, acknowledgeable: int) -> None:
        """Bytes of replies; `acknowledgeable`: what they took of the windows, padding included."""
        self._unacknowledged += acknowledgeable
        self._rest += data
        self.wake()

    def ended(self) -> None:
        """The answer is complete: nothing that happens to the connection changes it any more."""
        self._is_ended = True
        if self._outgoing is not None:
            self._outgoing.stop()
        self.wake()

    def terminate(self, reason: str) -> None:
        """Stream or connection are over; a complete answer stays readable."""
        if self._is_ended:
            return
        self._error = self._error or StreamTerminatedError(reason)
        if self._outgoing is not None:
            self._outgoing.fail(self._error)
        self.wake()

    __terminated__ = terminate  # grpclib's name

    def wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._on_left is not None:
            asyncio.get_running_loop().call_soon(self._leave)  # not while the connection reads

    # ------------------------------------------------------------ in, taken by the reader

    async def reply(self) -> bytes | None:
        """The next reply; None behind the last one, when the engine's status is OK."""
        while True:
            error = self._error
            is_readable = error is None or isinstance(error, StreamTerminatedError)  # what came before it went counts
            if is_readable and (reply := self._cut()) is not None:
                return reply
            if error is not None:
                raise error
            if self._is_ended:
                self._check_end()
                return None
            self._acknowledge()
            await self._arrival()

    def _cut(self) -> bytes | None:
        """The next whole reply of what has arrived; None when there is none yet."""
        rest = self._rest
        if len(rest) < _PREFIX.size:
            return None
        is_compressed, nbytes = _PREFIX.unpack_from(rest)
        if is_compressed:
            raise Unreadable("compressed, which was not asked for")
        if nbytes > MOST_REPLY_BYTES:
            raise Unreadable(f"a reply of {nbytes} bytes, more than {MOST_REPLY_BYTES}")
        end = _PREFIX.size + nbytes
        if len(rest) < end:
            return None
        reply = bytes(rest[_PREFIX.size : end])
        del rest[:end]
        return reply

    async def _arrival(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _acknowledge(self) -> None:
        nbytes, self._unacknowledged = self._unacknowledged, 0
        if nbytes and self._protocol is not None and not self._protocol.connection.is_closing():
            frames.acknowledge(self._protocol.connection, self.id, nbytes)

    def _check_end(self) -> None:
        if self._rest:
            raise Unreadable("cut short")
        status = _status(self.trailers or self.headers or ())
        if status != _OK:
            raise GRPCError(*status)

    # ------------------------------------------------------------ the end

    def status(self) -> GRPCError | None:
        """What the engine's headers or trailers say went wrong, when they have come."""
        if self.headers is None:
            return None
        said = _refusal(self.headers)
        if said is None and (self.trailers is not None or any(name == "grpc-status" for name, _ in self.headers)):
            said = _status(self.trailers or self.headers)
        return GRPCError(*said) if said is not None and said != _OK else None

    def close(self) -> None:
        """Reset the stream unless it is over, and give its place to others.  Never waits; harmless when repeated."""
        protocol, self._protocol = self._protocol, None
        if protocol is None:
            return
        if self._is_open(protocol):
            protocol.h2.reset_stream(self.id, error_code=ErrorCodes.CANCEL)
            protocol.connection.flush()  # also when the transport is paused: the frame waits there
        protocol.processor.leave(self)
        if self._unacknowledged and not protocol.connection.is_closing():
            frames.acknowledge(protocol.connection, self.id, self._unacknowledged)

    def linger(self, limit_s: float, on_left: "OnLeft") -> None:
        """Instead of `close`, behind the last reply that is wanted: the engine gets `limit_s` to end the call as it
        likes, and nobody waits for it.  `on_left` is called then, with what was odd about its last word.
        """
        self._on_left = on_left
        if self._is_ended or self._error is not None or self._rest:
            self._leave()
        else:
            self._patience = asyncio.get_running_loop().call_later(limit_s, self._leave)

    def _leave(self) -> None:
        on_left, self._on_left = self._on_left, None
        if on_left is None:
            return
        if self._patience is not None:
            self._patience.cancel()
        odd = self._last_word()
        self.close()
        on_left(odd)

    def _last_word(self) -> Exception | None:
        if self._error is not None:
            return self._error
        if self._rest:
            return Unreadable("more than was to come")
        if not self._is_ended:
            return StreamTerminatedError("silence")
        try:
            self._check_end()
        except (Unreadable, GRPCError) as error:
            return error
        return None

    def settle(self, drain: Drain) -> None:
        """Set `drain`, at once or when what the socket still holds has gone; `close` comes behind this."""
        protocol = self._protocol
        if drain.is_set():
            return
        if protocol is not None and protocol.feeder.holds(drain):
            protocol.limit_drain(drain)
        else:
            drain.set()

    def _is_open(self, protocol: "EngineProtocol") -> bool:
        h2 = protocol.h2
        if protocol.connection.is_closing() or h2.state_machine.state is ConnectionState.CLOSED:
            return False
        stream = h2.streams.get(self.id)
        return stream is not None and not stream.closed


def _joined(parts: Sequence[Part]) -> bytes:
    message = b"".join(parts)
    return _PREFIX.pack(0, len(message)) + message


_OK: tuple[Status, str | None] = (Status.OK, None)


@functools.lru_cache(maxsize=64)
def _refusal(headers: frames.Headers) -> tuple[Status, str | None] | None:
    """What the first headers of an answer say against it; None when a gRPC answer follows."""
    told = dict(headers)
    status = told.get(":status")
    if status is None:
        raise Unreadable("headers without a status")
    if status != "200":
        return _NOT_200.get(status, Status.UNKNOWN), f"Received :status = {status!r}"
    content_type = told.get("content-type")
    if content_type is None:
        return Status.UNKNOWN, "Missing content-type header"
    if content_type not in ("application/grpc", "application/grpc+proto"):
        return Status.UNKNOWN, f"Invalid content-type: {content_type!r}"
    return None


@functools.lru_cache(maxsize=64)
def _status(trailers: frames.Headers) -> tuple[Status, str | None]:
    """The engine's status and its words for it."""
    told = dict(trailers)
    number = told.get("grpc-status")
    if number is None:
        return Status.UNKNOWN, "Missing grpc-status header"
    try:
        status = Status(int(number))
    except ValueError:
        return Status.UNKNOWN, f"Invalid grpc-status: {number!r}"
    message = told.get("grpc-message")
    return (status, None) if status is Status.OK or message is None else (status, decode_grpc_message(message))
