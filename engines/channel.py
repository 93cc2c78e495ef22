"""The connections of one worker, and calls over them.

A worker has one control channel (health, information, abort, loads, tokenizer), so that a health check never waits
behind fifty megabytes of pixels, and a few sending channels for generations; the one with the fewest unsent bytes is
taken, so small requests pass large ones.  Channels connect when they are first used and again after a loss.

Every foreign error becomes `engines.base.EngineError` here: the status an engine gives is kept, a lost connection is
UNAVAILABLE, a local time-out of a unary call DEADLINE_EXCEEDED.  No gRPC deadline is sent, nothing is retried.
`engines.scatter` sends the messages, `engines.link` is the connection.
"""

import asyncio
import functools
import os
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, NoReturn, Self, TypeVar, cast
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError, Message
from grpclib.client import Stream as Call
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import Buffer
from h2.errors import ErrorCodes
from h2.exceptions import H2Error

from engines.base import EngineError
from engines.link import CallWrapper, EngineChannel, EngineProtocol
from engines.scatter import MAX_MESSAGE_BYTES, Drain, send_message
from engines.wire import Part, nbytes_of

Reply = TypeVar("Reply", bound=Message)

SENDING_CHANNELS = 3
MOST_REPLY_BYTES = 64 << 20
"""A longer reply is none: an answer of 256 thousand tokens with twenty rivals each is shorter."""
_MESSAGE_CHARACTERS = 1000


class Unreadable(Exception):
    """An answer that grpclib does not foresee: a reply of more than MOST_REPLY_BYTES, headers without a status."""


# what grpclib raises for an answer it cannot take apart: cut short, compressed, no message of that type
_BROKEN_ANSWER = (AssertionError, NotImplementedError, DecodeError, struct.error, Unreadable)


class Address(NamedTuple):
    """Where a worker listens."""

    host: str
    port: int
    is_tls: bool


def parse_url(url: str) -> Address:
    """`grpc://host:port`, `grpcs://host:port` (TLS) or `host:port`; ValueError for anything else."""
    scheme, separator, _ = url.partition("://")
    if separator and scheme not in ("grpc", "grpcs"):
        raise ValueError(f"scheme {scheme!r} is not supported, only grpc and grpcs")
    parts = urlsplit(url if separator else f"grpc://{url}")
    if not parts.hostname or parts.port is None or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError("a worker URL is grpc://host:port or grpcs://host:port")
    return Address(parts.hostname, parts.port, scheme == "grpcs" and bool(separator))


def worker_tls(authorities: Sequence[str] = (), certificate: tuple[str, str] | None = None) -> ssl.SSLContext:
    """For grpcs URLs: the system's certificate authorities and those of the PEM files `authorities`, HTTP/2 by ALPN.

    `certificate`: paths of the certificate and of its key that a worker is shown when it asks for one.  OSError
    (ssl.SSLError is one) for files that cannot be used.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    for path in authorities:
        context.load_verify_locations(path)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


@functools.cache
def default_tls() -> ssl.SSLContext:
    """As long as nobody says otherwise; reading the system's authorities takes a while."""
    return worker_tls()


class Stream(Generic[Reply]):
    """One call: `async with` sends the request, iterating gives the replies.

    `sent` is set when no buffer of the request is needed any more: after sending, or, when the call ends before,
    after what is already in the socket's queue has drained (the connection is aborted when that takes over
    `engines.link.DRAIN_LIMIT_S`).  It is set for every stream that was entered, whatever happens; only then may the
    buffers be given to somebody else. Leaving before the last reply resets the stream.  Errors of sending and reading
    are EngineError; `started` says whether a reply had come before.
    """

    def __init__(
        self,
        channel: EngineChannel,
        path: str,
        parts: Sequence[Part],
        reply_type: type[Reply],
        metadata: Mapping[str, str] | None,
        *,
        worker: str,
        scatter: bool,
    ) -> None:
        self.sent = Drain()
        self.started = False
        self._channel = channel
        self._parts = parts
        self._worker = worker
        self._scatter = scatter
        self._is_over = False
        self._call: Call[bytes, Reply] | None = channel.request(
            path, Cardinality.UNARY_STREAM, bytes, reply_type, metadata=metadata
        )

    async def __aenter__(self) -> Self:
        call, parts = cast("Call[bytes, Reply]", self._call), self._parts
        self._parts = ()
        await call.__aenter__()
        call._wrapper = CallWrapper()
        try:
            await call.send_request()
            call._stream.recv_data = functools.partial(  # type: ignore[method-assign]
                _receive, call._stream.buffer
            )
            await self._send(call, parts)
        except BaseException as error:
            await self._fail(error)
        return self

    async def _send(self, call: "Call[bytes, Reply]", parts: Sequence[Part]) -> None:
        nbytes = nbytes_of(parts)
        if nbytes > MAX_MESSAGE_BYTES:
            message = f"a message of {nbytes} bytes is over protobuf's limit of {MAX_MESSAGE_BYTES}"
            raise EngineError("INVALID_ARGUMENT", message, worker=self._worker)
        self._channel.unsent_bytes += nbytes
        try:
            await send_message(call, parts, self.sent, scatter=self._scatter)
        finally:
            self._channel.unsent_bytes -= nbytes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Reply:
        call = self._call
        if call is None or self._is_over:
            raise StopAsyncIteration
        try:
            reply = await call.recv_message()
            if reply is None:
                await call.recv_trailing_metadata()
        except (LookupError, TypeError, ValueError) as error:
            await self._fail(Unreadable(repr(error)))
        except BaseException as error:
            await self._fail(error)
        if reply is None:
            self._is_over = True
            raise StopAsyncIteration
        self.started = True
        return reply

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self._end(None)

    async def _fail(self, error: BaseException) -> NoReturn:
        """End the call and raise what `error` means."""
        try:
            await self._end(error)
        except GRPCError as status:  # the stream was cut off, but its status had come before
            error = status
        translated = translate(error)
        if translated is None:
            raise error
        raise EngineError(*translated, started=self.started, worker=self._worker) from error

    async def _end(self, error: BaseException | None) -> None:
        """Reset the stream unless it is over, let go of grpclib's call.  Never waits; may raise GRPCError."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            if not call._send_request_done:
                return
            stream = call._stream
            if stream.closable:
                stream.reset_nowait(ErrorCodes.CANCEL)
                stream.connection.flush()  # also when the transport is paused: the frame waits there
            call._cancel_done = True
            await call.__aexit__(type(error) if error else None, error, None)
        finally:
            self._settle_drain(call)

    def _settle_drain(self, call: "Call[bytes, Reply]") -> None:
        if self.sent.is_set():
            return
        protocol = call._stream._transport.get_protocol() if call._send_request_done else None
        if isinstance(protocol, EngineProtocol) and protocol.feeder.holds(self.sent):
            protocol.limit_drain(self.sent)
        else:
            self.sent.set()


async def _receive(buffer: Buffer, nbytes: int) -> bytes:
    """As `grpclib.protocol.Stream.recv_data`, which lets a peer announce four gigabytes and waits for them."""
    if nbytes > MOST_REPLY_BYTES:
        raise Unreadable(f"a reply of {nbytes} bytes, more than {MOST_REPLY_BYTES}")
    return await buffer.read(nbytes)


def translate(error: BaseException) -> tuple[str, str] | None:
    """gRPC status name and message (trimmed, no addresses) of a foreign error; None for what is no engine's error."""
    if isinstance(error, GRPCError):
        return error.status.name, _trim(error.message or "") or error.status.name
    if isinstance(error, StreamTerminatedError | H2Error):
        return "UNAVAILABLE", _trim(str(error)) or "connection lost"
    if isinstance(error, OSError):
        return "UNAVAILABLE", f"worker cannot be reached: {_reason(error)}"
    if isinstance(error, _BROKEN_ANSWER):
        return "INTERNAL", f"the worker's answer cannot be read: {_trim(str(error)) or type(error).__name__}"
    return None


def _trim(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MESSAGE_CHARACTERS else text[: _MESSAGE_CHARACTERS - 1] + "…"


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return getattr(error, "verify_message", "") or error.reason or "TLS failed"
    if isinstance(error, TimeoutError):
        return "timed out"
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return "connection failed"


class WorkerChannels:
    """All connections to one worker.  Make it inside a running loop; `close` it in the end.

    `scatter` False sends everything by grpclib's own path; `tls` replaces the default context of a grpcs URL.
    ValueError for a URL that is none.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        sending_channels: int = SENDING_CHANNELS,
        scatter: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url
        self._scatter = scatter
        self._is_closed = False
        address = parse_url(url)
        context = (tls or default_tls()) if address.is_tls else None
        self._control, *self._senders = (
            EngineChannel(address.host, address.port, tls=context, connect_timeout_s=connect_timeout_s)
            for _ in range(1 + sending_channels)
        )

    async def unary(
        self,
        path: str,
        request: Message,
        reply_type: type[Reply],
        *,
        timeout_s: float,
        metadata: Mapping[str, str] | None = None,
    ) -> Reply:
        """Call `path` ("/package.Service/Method") on the control channel and return the reply; EngineError."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self.server_stream(path, request, reply_type, metadata=metadata) as stream:
                    replies: list[Reply] = []
                    async for reply in stream:
                        replies.append(reply)
                        if len(replies) > 1:
                            break
        except TimeoutError:
            raise EngineError("DEADLINE_EXCEEDED", f"no answer within {timeout_s:g} s", worker=self.url) from None
        if len(replies) != 1:
            raise EngineError("INTERNAL", f"{len(replies)} replies to a unary call", worker=self.url)
        return replies[0]

    def server_stream(
        self, path: str, request: Message, reply_type: type[Reply], *, metadata: Mapping[str, str] | None = None
    ) -> Stream[Reply]:
        """A call with many replies on the control channel (GetTokenizer, SubscribeKvEvents)."""
        self._refuse_when_closed()
        parts = [request.SerializeToString()]
        return Stream(self._control, path, parts, reply_type, metadata, worker=self.url, scatter=False)

    def stream(
        self, path: str, parts: Sequence[Part], reply_type: type[Reply], *, metadata: Mapping[str, str] | None = None
    ) -> Stream[Reply]:
        """A generation: `parts` joined are the request message; they are sent as they lie (`Stream.sent`)."""
        self._refuse_when_closed()
        channel = min(self._senders, key=lambda sender: sender.unsent_bytes)
        return Stream(channel, path, parts, reply_type, metadata, worker=self.url, scatter=self._scatter)

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost()` when a control connection made from now on is gone: the engine may be another one then."""
        self._control.on_lost = on_lost

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the messages that are being sent."""
        return sum(sender.unsent_bytes for sender in self._senders)

    def close(self) -> None:
        """Close every connection; calls under way end with UNAVAILABLE.  Harmless when repeated."""
        self._is_closed = True
        for channel in (self._control, *self._senders):
            channel.close()

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise EngineError("UNAVAILABLE", "the worker's channels are closed", worker=self.url)
