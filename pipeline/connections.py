"""Connections of clients: the listener, how long one may be silent, and what becomes of one that does not speak HTTP.

aiohttp 3.14 closes a connection on which no whole head came for a time.  Three things it leaves are mended here:
* a head that has begun has a limit of its own, so that thousands of clients that send a byte now and then are gone
  after `head_s` each, with a 408;
* a body whose chunks cannot be read ends at once (aiohttp lets the handler wait for bytes that never come);
* what is no HTTP is answered in our own words and counted.

It is a subclass of aiohttp's protocol and reads its private state: the pin in setup.cfg changes with
tests/hostile/test_connections.py.
"""

import asyncio
import itertools
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from pipeline.errors import GatewayError
from pipeline.protocols.http import unreadable

FOREVER_S = 1e9
TLS_GOODBYE_S = 2.0  # a client that does not say it either is gone then

Refuse = Callable[[web.Request, GatewayError], web.StreamResponse]


class Patience(msgspec.Struct, frozen=True):
    """`head_s`: from the first byte of a head to its last, and for a TLS handshake; `idle_s`: without a request.
    Seconds, 0 = without end."""

    head_s: float
    idle_s: float


class Listener(web.BaseSite):
    """A site of `runner` (set up already) whose connections are `Connection`s; `tls` None is plain HTTP.

    `cut(reason)` is told of every connection that patience ended: "head" or "idle".  `refuse` makes the answer to what
    is no HTTP.  `settings` are those of aiohttp's RequestHandler.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        patience: Patience,
        cut: Callable[[str], None],
        refuse: Refuse,
        tls: ssl.SSLContext | None = None,
        backlog: int = 1024,
        **settings: Any,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=backlog)
        self._host, self._port = host, port
        self._patience = patience
        self._cut, self._refuse = cut, refuse
        self._settings = settings

    @property
    def name(self) -> str:
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """OSError when the address cannot be had."""
        await super().start()
        is_tls = self._ssl_context is not None
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._patience.head_s or FOREVER_S if is_tls else None,
            ssl_shutdown_timeout=TLS_GOODBYE_S if is_tls else None,
        )

    def _connection(self) -> "Connection":
        server = self._runner.server
        assert server is not None
        return Connection(server, self._patience, self._cut, self._refuse, **self._settings)


class Connection(RequestHandler):
    """One client, as long as its connection lasts."""

    def __init__(
        self, server: web.Server, patience: Patience, cut: Callable[[str], None], refuse: Refuse, **settings: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=patience.idle_s or FOREVER_S, **settings)
        self._head_s = patience.head_s
        self._cut, self._refuse = cut, refuse
        self._head_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # of the request whose head came last

    def data_received(self, data: bytes) -> None:
        known = len(self._messages)
        super().data_received(data)
        if len(self._messages) > known:
            self._look_at(list(itertools.islice(self._messages, known, None)))
        self._watch_head()

    def _look_at(self, messages: list[tuple[Any, StreamReader]]) -> None:
        for message, body in messages:
            if not isinstance(message, _ErrInfo):
                self._body = body
            elif self._body is not None and not self._body.is_eof():
                self._messages.pop()  # the error is not a request of its own: it is the end of the one before
                self._spoil(self._body, message.exc)

    def _spoil(self, body: StreamReader, error: BaseException) -> None:
        """The rest of the body cannot be read, nor anything behind it: `serve.Doorkeeper` closes behind the answer."""
        if body.exception() is None:
            body.set_exception(error)

    def _watch_head(self) -> None:
        """Start the clock when a head has begun, stop it when it is whole or the connection is gone.

        A head that begins while an earlier request is answered has the patience of an idle connection.
        """
        waiting = not self._request_count or (self._waiter is not None and not self._waiter.done())
        if not waiting or self.transport is None:
            self._forget_head()
        elif self._head_timer is None and self._head_s:
            self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport is None:
            return
        self._cut("head")
        self.transport.write(_TOO_LATE)
        self.force_close()

    def _process_keepalive(self) -> None:
        was_open = self.transport is not None
        super()._process_keepalive()
        if was_open and self.transport is None:
            self._cut("idle")

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _make_error_handler(self, err_info: _ErrInfo) -> Callable[[Any], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = self._refuse(request, unreadable(err_info.exc))
            response.force_close()
            return response

        return answer


def _too_late() -> bytes:
    body = msgspec.json.encode(
        GatewayError("request_timeout", "the head of the request comes too slowly", status=408).body()
    )
    head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


_TOO_LATE = _too_late()
