"""The connections of one worker, and calls over them.

A worker has one control channel (health, information, abort, loads, tokenizer), so that a health check never waits
behind fifty megabytes of pixels, and a few sending channels for generations; the one with the fewest unsent bytes is
taken, so small requests pass large ones.  Channels connect when they are first used and again after a loss.

Every foreign error becomes `engines.base.EngineError` here: the status an engine gives is kept, a lost connection is
UNAVAILABLE, a local time-out of a unary call DEADLINE_EXCEEDED.  No gRPC deadline is sent, nothing is retried.
`engines.call` is the call, `engines.scatter` sends large messages, `engines.link` is the connection.
"""

import asyncio
import functools
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, NoReturn, Self, TypeVar, cast
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError, Message
from grpclib.exceptions import GRPCError, StreamTerminatedError
from h2.exceptions import H2Error

from engines.base import EngineError
from engines.call import Call, Unreadable
from engines.link import EngineChannel, NotGrpc
from engines.scatter import MAX_MESSAGE_BYTES, Drain
from engines.wire import Part, nbytes_of

Reply = TypeVar("Reply", bound=Message)

SENDING_CHANNELS = 3
_MESSAGE_CHARACTERS = 1000


_BROKEN_ANSWER = (DecodeError, Unreadable)


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
    is_more = parts.path.strip("/") or set("?#@").intersection(url) or any(map(str.isspace, url))
    if not parts.hostname or parts.port is None or is_more:
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
    are EngineError; `started` says whether a reply had come before, and `is_undelivered`, when the call is over, that
    the engine has seen nothing of it.
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
    ) -> None:
        self.sent = Drain()
        self.started = False
        self.is_undelivered = False
        self._channel = channel
        self._parts = parts
        self._reply_type = reply_type
        self._worker = worker
        self._call: Call | None = Call(channel, path, tuple(metadata.items()) if metadata else ())

    async def __aenter__(self) -> Self:
        await self.send()
        return self

    async def send(self) -> None:
        """For whoever cannot use `async with`, and closes the stream whatever comes."""
        call, parts = cast(Call, self._call), self._parts
        self._parts = ()
        try:
            await self._send(call, parts)
        except BaseException as error:
            self._fail(error)

    async def _send(self, call: Call, parts: Sequence[Part]) -> None:
        nbytes = nbytes_of(parts)
        if nbytes > MAX_MESSAGE_BYTES:
            message = f"a message of {nbytes} bytes is over protobuf's limit of {MAX_MESSAGE_BYTES}"
            raise EngineError("INVALID_ARGUMENT", message, worker=self._worker)
        self._channel.unsent_bytes += nbytes
        try:
            await call.send(parts, self.sent)
        finally:
            self._channel.unsent_bytes -= nbytes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Reply:
        call = self._call
        if call is None:
            raise StopAsyncIteration
        try:
            data = await call.reply()
            reply = None if data is None else self._reply_type.FromString(data)
        except BaseException as error:
            self._fail(error)
        if reply is None:
            self.close()
            raise StopAsyncIteration
        self.started = True
        return reply

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.close()

    def linger(self, limit_s: float, on_odd: Callable[[str], None]) -> None:
        """No reply is wanted any more: the engine may end the call as it likes, within `limit_s`, while nobody waits.
        `on_odd` is told when that was not with a good status.
        """
        call = self._let_go()
        if call is None:
            return

        def left(error: Exception | None) -> None:
            if error is not None:
                on_odd((translate(error) or ("", str(error)))[1])

        call.linger(limit_s, left)

    def _fail(self, error: BaseException) -> NoReturn:
        """End the call and raise what `error` means."""
        call = self._call
        self.close()
        if isinstance(error, StreamTerminatedError) and call is not None:
            error = call.status() or error  # the stream was cut off, but its status had come before
        translated = translate(error)
        if translated is None:
            raise error
        raise EngineError(*translated, started=self.started, worker=self._worker) from error

    def close(self) -> None:
        """Reset the stream unless it is over.  Never waits; harmless when repeated."""
        call = self._let_go()
        if call is not None:
            call.close()

    def _let_go(self) -> Call | None:
        call, self._call = self._call, None
        if call is not None:
            self.is_undelivered = not call.id
            call.settle(self.sent)
        return call


def translate(error: BaseException) -> tuple[str, str] | None:
    """gRPC status name and message (trimmed, no addresses) of a foreign error; None for what is no engine's error."""
    if isinstance(error, GRPCError):
        return error.status.name, _trim(error.message or "") or error.status.name
    if isinstance(error, StreamTerminatedError | H2Error):
        return "UNAVAILABLE", _trim(str(error)) or "connection lost"
    if isinstance(error, NotGrpc):
        return "UNAVAILABLE", str(error)
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
        if error.reason == "WRONG_VERSION_NUMBER":
            return "no TLS server listens there: its URL is grpc://, not grpcs://"
        return getattr(error, "verify_message", "") or error.reason or "TLS failed"
    if isinstance(error, TimeoutError):
        return "timed out"
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return "connection failed"


class WorkerChannels:
    """All connections to one worker.  Make it inside a running loop; `close` it in the end.

    `tls` replaces the default context of a grpcs URL.  ValueError for a URL that is none.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        sending_channels: int = SENDING_CHANNELS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url
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
        return Stream(self._control, path, parts, reply_type, metadata, worker=self.url)

    def stream(
        self, path: str, parts: Sequence[Part], reply_type: type[Reply], *, metadata: Mapping[str, str] | None = None
    ) -> Stream[Reply]:
        """A generation: `parts` joined are the request message; they are sent as they lie (`Stream.sent`)."""
        self._refuse_when_closed()
        channel = min(self._senders, key=lambda sender: sender.unsent_bytes)
        return Stream(channel, path, parts, reply_type, metadata, worker=self.url)

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
