"""One HTTP/2 connection to an engine worker: grpclib's channel, with what it leaves to be desired.

grpclib 0.4.9 is kept for frames, headers and calls.  Corrected here, each because it was seen to hurt:
* an answer that is complete survives a RST_STREAM, GOAWAY or lost connection behind it (grpclib drops it), and stops
  a send that still waits for a window;
* a GOAWAY without an error lets the calls under way finish (grpclib ends them: every rolling restart of an engine
  would break its generations); new calls get a new connection;
* whoever waits for a connection that dies is woken, also before a stream exists;
* a task that grpclib has woken by cancelling it keeps no trace of that (`Task.cancelling`), and an outer cancellation
  wins;
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
from types import TracebackType
from typing import Any, cast

from grpclib.client import Channel, Handler
from grpclib.config import Configuration
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import EventsProcessor, H2Protocol
from grpclib.protocol import Stream as Http2Stream
from grpclib.utils import Wrapper
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event, RemoteSettingsChanged, StreamEnded, StreamReset, WindowUpdated
from h2.exceptions import FrameTooLargeError
from hyperframe.frame import Frame, GoAwayFrame

from engines.scatter import AnsweredEarly, Drain, Feeder

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


_SHUTTING_DOWN = "The worker closes the connection"


class CallWrapper(Wrapper):
    """grpclib's way to wake the tasks inside a call, without leaving them marked as cancelled.

    `cancel(error)` ends the call: every later step raises `error` too.  `interrupt()` ends only the step under way,
    with AnsweredEarly.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entered: dict[asyncio.Task[Any], int] = {}  # cancellation requests the task came with
        self._woken: set[asyncio.Task[Any]] = set()
        self._interrupted = False

    def __enter__(self) -> None:
        super().__enter__()
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._entered[task] = task.cancelling()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks.discard(task)
        before = self._entered.pop(task)
        interrupted, self._interrupted = self._interrupted, False
        if task in self._woken:
            self._woken.discard(task)
            if task.uncancel() > before:
                return  # cancelled from outside as well: that goes on
        elif exc_type is not None:
            return
        if self._error is not None:
            raise self._error
        if interrupted:
            raise AnsweredEarly

    def cancel(self, error: Exception) -> None:
        self._error = self._error or error
        self.cancelled = True
        self._wake()

    def interrupt(self) -> None:
        self._interrupted = bool(self._tasks)
        self._wake()

    def _wake(self) -> None:
        for task in self._tasks - self._woken:
            self._woken.add(task)
            task.cancel()


class Events(EventsProcessor):
    """What a connection does with what it hears."""

    def __init__(self, protocol: "EngineProtocol") -> None:
        super().__init__(protocol.handler, protocol.connection)
        self._protocol = protocol
        self._closed_because: str | None = None
        self._is_retiring = False

    def process(self, event: Event) -> None:
        if event.__class__ in getattr(self, "processors", ()):  # what HTTP/2 says to ignore is no error
            super().process(event)

    def register(self, stream: Http2Stream) -> Callable[[], None]:
        if self._closed_because is not None:  # nobody would ever wake it
            raise StreamTerminatedError(self._closed_because)
        if self._is_retiring:
            self.connection._connection.reset_stream(cast(int, stream.id))
            raise StreamTerminatedError(_SHUTTING_DOWN)
        release = super().register(stream)

        def release_stream() -> None:
            release()
            self._close_when_done()

        return release_stream

    def process_connection_terminated(self, event: ConnectionTerminated) -> None:
        """GOAWAY: without an error the streams that the peer has seen go on, and the connection ends with the last."""
        if event.error_code is not ErrorCodes.NO_ERROR:
            super().process_connection_terminated(event)
            return
        self._is_retiring = True
        self.handler.close()  # the channel makes another connection for new calls
        for stream_id, stream in self.streams.items():
            if stream_id > (event.last_stream_id or 0):
                stream.__terminated__(_SHUTTING_DOWN)
        self.connection.stream_close_waiter.set()
        self._close_when_done()

    def _close_when_done(self) -> None:
        if self._is_retiring and not self.streams:
            self.close(_SHUTTING_DOWN)

    def process_window_updated(self, event: WindowUpdated) -> None:
        super().process_window_updated(event)
        self._protocol.feeder.wake()

    def process_remote_settings_changed(self, event: RemoteSettingsChanged) -> None:
        super().process_remote_settings_changed(event)
        self._protocol.feeder.wake()

    def process_stream_ended(self, event: StreamEnded) -> None:
        super().process_stream_ended(event)
        self._protocol.feeder.answered(event.stream_id)

    def process_stream_reset(self, event: StreamReset) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is None or not is_answered(stream):  # behind a complete answer it only means "send no more"
            super().process_stream_reset(event)

    def close(self, reason: str = "Connection closed") -> None:
        """End the connection; complete answers stay readable, all other calls get StreamTerminatedError(reason)."""
        self._closed_because = self._closed_because or reason
        for stream in self.streams.values():
            if is_answered(stream):
                stream.wrapper = None
                stream.buffer._ack_callback = _acknowledge_nothing
        super().close(reason)
        self._protocol.limit_close()
        # who waits for the socket or for a free stream goes on, and learns from `register` that it is too late
        self.connection._connection.streams.clear()
        self.connection.write_ready.set()
        self.connection.stream_close_waiter.set()


def _receive_goaway(h2: H2Connection, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
    """h2 takes every GOAWAY for the end of the connection; one without an error announces it."""
    if frame.error_code != ErrorCodes.NO_ERROR:
        return h2._receive_goaway_frame(frame)
    event = ConnectionTerminated()
    event.error_code, event.last_stream_id = ErrorCodes.NO_ERROR, frame.last_stream_id
    return [], [event]


def is_answered(stream: Http2Stream) -> bool:
    """Whether the engine's answer is complete (END_STREAM came)."""
    return bool(stream.buffer._eof)


def _acknowledge_nothing(_nbytes: int) -> None:
    """The inbound window of a connection that is gone."""


class EngineProtocol(H2Protocol):
    """The protocol of one connection: write limits, keepalive, drain."""

    feeder: Feeder
    on_lost: Callable[[], None] | None = None
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
        h2 = self.connection._connection
        h2._frame_dispatch_table[GoAwayFrame] = functools.partial(_receive_goaway, h2)
        self._ping_timer = self._loop.call_later(KEEPALIVE_S, self._check_alive)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            super().data_received(data)
            self._check_frame_length()
        except Exception as error:  # grpclib foresees what breaks the protocol's rules, and no more
            log.warning("an engine's frames cannot be read: %r", error)
            self.processor.close("The worker's frames cannot be read")
            self._transport.abort()

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


class BytesCodec(ProtoCodec):
    """Protobuf, but a request that is already bytes goes out as it is."""

    def encode(self, message: Any, message_type: Any) -> bytes:
        if isinstance(message, bytes):
            return message
        return super().encode(message, message_type)


class EngineChannel(Channel):
    """A channel that connects when a call needs it, again after every loss; concurrent callers share the attempt.

    `__connect__` raises OSError (ConnectionError, TimeoutError, ssl.SSLError, socket.gaierror included).
    """

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        config = Configuration(
            http2_stream_window_size=STREAM_WINDOW_BYTES, http2_connection_window_size=CONNECTION_WINDOW_BYTES
        )
        super().__init__(host, port, ssl=tls, codec=BytesCodec(), config=config)
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

    async def __connect__(self) -> H2Protocol:
        if self._connected:
            return cast(H2Protocol, self._protocol)
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
            raise ConnectionError("Connection lost")
        return cast(H2Protocol, self._protocol)

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
