"""One HTTP/2 connection to an engine worker: grpclib's channel, with what it leaves to be desired.

grpclib 0.4.9 and h2 are kept for connections, settings, windows and all frames that are not plain; the calls are ours
(`engines.call`), and so are the frames that every call is made of (`engines.frames`).  Corrected here, each because it
was seen to hurt:
* an answer that is complete survives a RST_STREAM, GOAWAY or lost connection behind it (grpclib drops it), and stops
  a send that still waits for a window;
* a GOAWAY without an error lets the calls under way finish (grpclib ends them: every rolling restart of an engine
  would break its generations); new calls get a new connection;
* whoever waits for a connection that dies is woken, also before a stream exists;
* a connection that has used all its stream numbers is left for another one (grpclib: no call succeeds any more);
* keepalive pings go out every 30 s when nothing was heard, also when idle (grpclib: at most two, 300 s apart), and a
  silent peer is aborted (grpclib: closed, which waits for the unsent bytes for ever);
* callers share one attempt to connect, with a time limit.

The connection is writable only while the transport's buffer is empty: see `engines.scatter`.  `engines.channel` uses
this.
"""

import asyncio
import functools
import logging
import socket
import ssl
import weakref
from collections.abc import Callable
from typing import cast

from grpclib.client import Channel, Handler
from grpclib.config import Configuration
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import EventsProcessor, H2Protocol
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import FrameTooLargeError
from hyperframe.frame import Frame, GoAwayFrame

from engines.call import Call
from engines.frames import FrameReader, Headers
from engines.scatter import Drain, Feeder

log = logging.getLogger(__name__)

STREAM_WINDOW_BYTES = 16 << 20  # inbound, per stream
CONNECTION_WINDOW_BYTES = 32 << 20  # inbound, all streams
KEEPALIVE_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0
TCP_KEEPALIVE_S = 60
DRAIN_LIMIT_S = 5.0
"""How long buffers of a call that is over may stay in the transport before the connection is aborted."""

CLOSE_LIMIT_S = 1.0
"""How long a closed connection may go on sending what was written before."""


class NotGrpc(ConnectionError):
    """Something else listens there; the text says what."""


def _foreign(data: bytes) -> str | None:
    """What another server than an engine answers to HTTP/2's preface, in words; None for frames that are only bad."""
    if data.startswith((b"HTTP/1.", b"<")):
        return "an HTTP/1 server listens there and no gRPC engine (vLLM's needs --grpc)"
    if data.startswith(b"\x15\x03"):  # an alert
        return "a TLS server listens there: its URL is grpcs://, not grpc://"
    return None


_SHUTTING_DOWN = "The worker closes the connection"


class Events(EventsProcessor):
    """What a connection does with what it hears."""

    def __init__(self, protocol: "EngineProtocol") -> None:
        super().__init__(protocol.handler, protocol.connection)
        self._protocol = protocol
        self.calls: dict[int, Call] = {}
        """By stream; grpclib's own `streams` stay empty."""
        self._closed_because: str | None = None
        self._is_retiring = False

    def process(self, event: Event) -> None:
        if event.__class__ in getattr(self, "processors", ()):  # what HTTP/2 says to ignore is no error
            super().process(event)

    @property
    def is_open(self) -> bool:
        return self._closed_because is None

    def check_open(self) -> None:
        """StreamTerminatedError when the connection takes no call any more."""
        if self._closed_because is not None:
            raise StreamTerminatedError(self._closed_because)
        if self._is_retiring:
            raise StreamTerminatedError(_SHUTTING_DOWN)

    def enter(self, call: Call) -> None:
        """From now on `call` is told what its stream receives."""
        self.calls[call.id] = call

    def leave(self, call: Call) -> None:
        self.calls.pop(call.id, None)
        self.connection.stream_close_waiter.set()
        self._close_when_done()

    def retire(self) -> None:
        """Take no new calls, and end with the last one."""
        self._is_retiring = True
        self.handler.close()  # the channel makes another connection for new calls
        self.connection.stream_close_waiter.set()
        self._close_when_done()

    def process_response_received(self, event: ResponseReceived) -> None:
        if (call := self.calls.get(event.stream_id)) is not None:
            call.opened(_headers(event))

    def process_trailers_received(self, event: TrailersReceived) -> None:
        if (call := self.calls.get(event.stream_id)) is not None:
            call.trailers = _headers(event)

    def process_data_received(self, event: DataReceived) -> None:
        if (call := self.calls.get(event.stream_id)) is not None:
            call.arrived(event.data, event.flow_controlled_length)
        else:
            self.connection.ack(event.stream_id, event.flow_controlled_length)

    def process_connection_terminated(self, event: ConnectionTerminated) -> None:
        """GOAWAY: without an error the streams that the peer has seen go on, and the connection ends with the last."""
        if event.error_code is not ErrorCodes.NO_ERROR:
            super().process_connection_terminated(event)
            return
        for stream_id, call in self.calls.items():
            if stream_id > (event.last_stream_id or 0):
                call.terminate(_SHUTTING_DOWN)
        self.retire()

    def _close_when_done(self) -> None:
        if self._is_retiring and not self.calls:
            self.close(_SHUTTING_DOWN)

    def process_window_updated(self, event: WindowUpdated) -> None:
        self._protocol.feeder.wake()

    def process_remote_settings_changed(self, event: RemoteSettingsChanged) -> None:
        self._protocol.feeder.wake()

    def process_stream_ended(self, event: StreamEnded) -> None:
        if (call := self.calls.get(event.stream_id)) is not None:
            call.ended()

    def process_stream_reset(self, event: StreamReset) -> None:
        """Behind a complete answer it only means "send no more"."""
        if (call := self.calls.get(event.stream_id)) is not None:
            call.terminate(f"Stream reset by remote party, error_code: {event.error_code}")

    def close(self, reason: str = "Connection closed") -> None:
        """End the connection; complete answers stay readable, all other calls get StreamTerminatedError(reason)."""
        self._closed_because = self._closed_because or reason
        super().close(reason)
        for call in self.calls.values():
            call.terminate(reason)
        self._protocol.limit_close()
        # who waits for the socket or for a free stream goes on, and learns from `check_open` that it is too late
        self.connection._connection.streams.clear()
        self.connection.write_ready.set()
        self.connection.stream_close_waiter.set()


def _headers(event: ResponseReceived | TrailersReceived) -> Headers:
    return tuple((str(name), str(value)) for name, value in event.headers or ())


def _receive_goaway(h2: H2Connection, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
    """h2 takes every GOAWAY for the end of the connection; one without an error announces it."""
    if frame.error_code != ErrorCodes.NO_ERROR:
        return h2._receive_goaway_frame(frame)
    event = ConnectionTerminated()
    event.error_code, event.last_stream_id = ErrorCodes.NO_ERROR, frame.last_stream_id
    return [], [event]


class EngineProtocol(H2Protocol):
    """The protocol of one connection: write limits, keepalive, drain."""

    h2: H2Connection
    feeder: Feeder
    processor: Events
    on_lost: Callable[[], None] | None = None
    foreign: str | None = None  # what the peer is, if it is no engine
    _frames: FrameReader
    _transport: asyncio.Transport

    def __init__(self, handler: Handler, config: Configuration, h2_config: H2Configuration) -> None:
        super().__init__(handler, config, h2_config)
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._pinged = float("-inf")
        self._is_lost = False
        self._ping_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = cast(asyncio.Transport, transport)
        _set_tcp_keepalive(self._transport.get_extra_info("socket"))
        # pause at the first unsent byte, resume when none is left; a TLS transport pauses at `high`, not above it
        is_tls = self._transport.get_extra_info("ssl_object") is not None
        self._transport.set_write_buffer_limits(high=1 if is_tls else 0, low=0)
        self.feeder = Feeder(self.connection, self._transport)
        self.processor = Events(self)
        self.h2 = h2 = self.connection._connection
        h2._frame_dispatch_table[GoAwayFrame] = functools.partial(_receive_goaway, h2)
        self._frames = FrameReader(h2, self.processor.calls, self._receive_by_h2, self.feeder.wake)
        self._ping_timer = self._loop.call_later(KEEPALIVE_S, self._check_alive)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._frames.read(data)
        except Exception as error:  # grpclib foresees what breaks the protocol's rules, and no more
            self.foreign = _foreign(data)
            if self.foreign is None:
                log.warning("an engine's frames cannot be read: %r", error)
            self.processor.close(self.foreign or "The worker's frames cannot be read")
            self._transport.abort()

    def _receive_by_h2(self, data: bytes) -> bool:
        super().data_received(data)
        if not self.processor.is_open:
            return False
        self._check_frame_length()
        return True

    def write(self, data: bytes) -> None:
        """Whole frames, now; the caller has seen that the connection is writable."""
        self._transport.write(data)

    def _check_frame_length(self) -> None:
        """h2 looks at the length of a frame when all of it is there: noise would be waited for, up to 16 MiB of it."""
        pending = self.connection._connection.incoming_buffer
        length = int.from_bytes(pending._data[:3])
        if len(pending._data) >= 3 and length > pending.max_frame_size:
            raise FrameTooLargeError(f"a frame of {length} bytes")

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._transport.get_write_buffer_size():
            self.feeder.drained()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_lost = True
        super().connection_lost(exc)
        for timer in (self._ping_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self.feeder.lost()
        if self.on_lost is not None:
            self.on_lost()

    def limit_drain(self, drain: Drain) -> None:
        """Abort the connection, with all its calls, when `drain` is not set within DRAIN_LIMIT_S."""
        timer = self._loop.call_later(DRAIN_LIMIT_S, self._transport.abort)
        drain.add_done_callback(timer.cancel)

    def limit_close(self) -> None:
        """A closed transport sends what is left, but not for ever."""
        if not self._is_lost and self._close_timer is None:
            self._close_timer = self._loop.call_later(CLOSE_LIMIT_S, self._transport.abort)

    def _check_alive(self) -> None:
        now = self._loop.time()
        if self._pinged > self._heard:
            self.processor.close("No answer to a keepalive ping")
            self._transport.abort()
            return
        silent = now - self._heard
        if self._transport.is_closing():
            return
        if silent < KEEPALIVE_S:
            self._ping_timer = self._loop.call_later(KEEPALIVE_S - silent, self._check_alive)
            return
        self._pinged = now
        self.connection._connection.ping(bytes(8))
        self.connection.flush()
        self._ping_timer = self._loop.call_later(KEEPALIVE_TIMEOUT_S, self._check_alive)


def _set_tcp_keepalive(sock: socket.socket | None) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_KEEPALIVE_S)


class EngineChannel(Channel):
    """A channel that connects when a call needs it, again after every loss; concurrent callers share the attempt.

    `connected` raises OSError (ConnectionError, TimeoutError, ssl.SSLError, socket.gaierror included).
    """

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        config = Configuration(
            http2_stream_window_size=STREAM_WINDOW_BYTES, http2_connection_window_size=CONNECTION_WINDOW_BYTES
        )
        super().__init__(host, port, ssl=tls, config=config)
        self._h2_config.header_encoding = "latin-1"  # an engine's words that are not ASCII must not end the connection
        self._connect_timeout_s = connect_timeout_s
        self._attempt: asyncio.Task[None] | None = None
        self._protocols: weakref.WeakSet[EngineProtocol] = weakref.WeakSet()  # those that retire, too
        self.unsent_bytes = 0
        """Bytes of the messages on their way out; kept by the calls."""
        self.on_lost: Callable[[], None] | None = None
        """Called when a connection made from now on is gone, whoever ended it."""

    @property
    def is_connected(self) -> bool:
        return self._connected

    def _protocol_factory(self) -> H2Protocol:
        protocol = EngineProtocol(Handler(), self._config, self._h2_config)
        protocol.on_lost = self.on_lost
        self._protocols.add(protocol)
        return protocol

    @property
    def scheme(self) -> str:
        return self._scheme

    @property
    def authority(self) -> str:
        return self._authority

    async def connected(self) -> EngineProtocol:
        if self._connected:
            return cast(EngineProtocol, self._protocol)
        if self._attempt is None:
            self._attempt = self._loop.create_task(self._connect_in_time())
            self._attempt.add_done_callback(self._attempt_over)
        attempt = self._attempt
        try:
            await asyncio.shield(attempt)
        except asyncio.CancelledError:
            if not attempt.cancelled():
                raise
            raise ConnectionError("Channel closed") from None
        if not self._connected:
            foreign = cast(EngineProtocol, self._protocol).foreign if self._protocol is not None else None
            raise ConnectionError("Connection lost") if foreign is None else NotGrpc(foreign)
        return cast(EngineProtocol, self._protocol)

    async def _connect_in_time(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                self._protocol = await self._create_connection()
        except TimeoutError:
            raise TimeoutError(f"No connection within {self._connect_timeout_s:g} s") from None

    def _attempt_over(self, attempt: asyncio.Task[None]) -> None:
        self._attempt = None
        if not attempt.cancelled():
            attempt.exception()  # retrieved, also when every caller has left

    def close(self) -> None:
        """End the connection and the attempt to make one; calls under way end with StreamTerminatedError."""
        if self._attempt is not None:
            self._attempt.cancel()
        for protocol in tuple(self._protocols):
            if hasattr(protocol, "processor"):  # connected
                protocol.processor.close()
        super().close()
