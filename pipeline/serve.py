"""The HTTP surface: routes, request ids, authentication, bodies, error answers, access lines, drain.

A handler gets the aiohttp request and a Ticket; whatever it raises becomes one answer here.  No API's shape is known
here; a route says what its error bodies look like.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from pipeline.admission import Slots
from pipeline.config import Config
from pipeline.errors import GatewayError
from pipeline.logs import access_line
from pipeline.metrics import Metrics
from pipeline.protocols.described.operation import Operation
from pipeline.protocols.http import check_expectation, expect_nothing, is_awaited
from pipeline.protocols.parts import as_json
from pipeline.protocols.refusals import ErrorBody, openai_error
from pipeline.ticket import SHUTTING_DOWN, Ticket, new_id

_log = logging.getLogger("mediagate.http")

Handler = Callable[[web.Request, Ticket], Awaitable[web.StreamResponse]]

UNROUTED = "unrouted"  # stands for every path that is no route, in metrics
_PROXY_HEADERS = ("Forwarded", "X-Forwarded-For")


class Route:
    """One route: `path` is the template seen in metrics, `pattern` what the router matches, where that is more;
    `prefix` starts the ids it makes; `guarded` asks for the API key, which may come in the header `key_header` as well;
    `error_body` is the shape of its refusals; `id_header` is told the request's id beside `x-request-id`.  `about`:
    what `/openapi.json` says of it (`pipeline.protocols.described`).
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        about: Operation,
        prefix: str = "req-",
        guarded: bool = True,
        admitted: bool = False,
        key_header: str | None = None,
        id_header: str | None = None,
        error_body: ErrorBody = openai_error,
        pattern: str | None = None,
    ):
        self.method = method
        self.path = path
        self.handler = handler
        self.about = about
        self.prefix = prefix
        self.guarded = guarded
        self.admitted = admitted
        self.key_header = key_header
        self.id_header = id_header
        self.error_body = error_body
        self.pattern = pattern or path


class Doorkeeper:
    """What every request meets before and after its handler."""

    def __init__(self, config: Config, metrics: Metrics, slots: Slots) -> None:
        self._config = config
        self._metrics = metrics
        self._slots = slots
        self._serving: dict[asyncio.Task[Any], Ticket] = {}
        self._error_bodies: dict[str, ErrorBody] = {}  # by path, where it is not OpenAI's
        self._paths: set[str] = set()
        self.is_leaving = False  # connections are not kept for another request

    @property
    def inflight(self) -> int:
        """Requests that have no complete answer yet."""
        return len(self._serving)

    async def cut(self, wait_s: float) -> None:
        """End what is unfinished, with 503 where no answer has begun, else with an event of the stream; wait for what
        is given back then.
        """
        cut = dict(self._serving)
        for task, ticket in cut.items():
            ticket.is_cut = True
            task.cancel()
        if cut:
            await asyncio.wait(cut, timeout=wait_s)

    def ends_connection(self, request: web.Request) -> bool:
        """Whether nothing may come behind the answer.  Behind a body that cannot be read nothing else can be."""
        return self.is_leaving or request.content.exception() is not None or is_awaited(request)

    def request_id(self, request: web.Request, prefix: str) -> str:
        """The client's id when it is 1 to 128 visible ASCII characters, else a new one."""
        for name in self._config.server.request_id_headers:
            given = request.headers.get(name)
            if given and len(given) <= 128 and all(0x21 <= ord(letter) <= 0x7E for letter in given):
                return given
        return new_id(prefix)

    def check_key(self, request: web.Request, route: Route) -> None:
        key = self._config.server.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        found = [given.strip()] if scheme.lower() == "bearer" else []
        if route.key_header is not None and route.key_header in request.headers:
            found.append(request.headers[route.key_header].strip())
        if not found:
            where = f" or {route.key_header}" if route.key_header is not None else ""
            raise GatewayError(
                "invalid_api_key", f"No API key was sent: it goes into the header Authorization: Bearer KEY{where}."
            )
        if not any(hmac.compare_digest(one.encode(errors="surrogateescape"), key.encode()) for one in found):
            raise GatewayError("invalid_api_key", "Incorrect API key provided.")

    def wrap(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        self._paths.add(route.path)
        if route.error_body is not openai_error:
            self._error_bodies[route.path] = route.error_body

        async def answer(request: web.Request) -> web.StreamResponse:
            ticket = Ticket(self.request_id(request, route.prefix), route.path)
            ticket.id_header = route.id_header
            ticket.outside = any(name in request.headers for name in _PROXY_HEADERS)
            request["ticket"] = ticket
            self._metrics.http_started(route.path)
            task = asyncio.current_task()
            assert task is not None
            self._serving[task] = ticket
            status, code = 499, "client_closed_request"
            try:
                response = await self._handle(route, request, ticket)
                status, code = response.status, ticket.code
                return response
            except asyncio.CancelledError:
                if ticket.is_cut:
                    status, code = SHUTTING_DOWN.status, SHUTTING_DOWN.code
                raise
            finally:
                del self._serving[task]
                self._metrics.http_finished(request.method, route.path, status, code, ticket.elapsed_s)
                if not ticket.goes_on:
                    ticket.custody.close()
                    if route.admitted:
                        self._note_stages(ticket)
                        access_line(ticket, status, code)

        return answer

    def go_on(self, ticket: Ticket, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task for work that outlives its request's answer; what the ticket holds is given back when it ends, also
        when it is cancelled before it began.
        """
        ticket.goes_on = True
        task = asyncio.create_task(work)
        self._serving[task] = ticket

        def is_over(task: asyncio.Task[None]) -> None:
            del self._serving[task]
            ticket.custody.close()
            self._note_stages(ticket)
            access_line(ticket, 200, ticket.code)

        task.add_done_callback(is_over)
        return task

    def foreign_errors(self) -> Any:
        """Unknown paths and wrong methods in our own words."""

        @web.middleware
        async def answer(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            try:
                return await handler(request)
            except web.HTTPMethodNotAllowed as error:
                wrong = GatewayError(
                    "method_not_allowed", f"Method {request.method} is not allowed for {_path(request)}"
                )
                response = self._refuse_unrouted(wrong, request)
                response.headers["Allow"] = ",".join(sorted(error.allowed_methods))
                return response
            except web.HTTPNotFound:
                told = f"Invalid URL ({request.method} {_path(request)}){self._hint(request.path)}"
                unknown = GatewayError("unknown_url", told)
                return self._refuse_unrouted(unknown, request)

        return answer

    def refuse_unread(self, request: web.Request, error: GatewayError) -> web.StreamResponse:
        """The answer to what is no HTTP: there is no method and no path."""
        return self._refuse_unrouted(error, request)

    def _hint(self, path: str) -> str:
        """What the commonest mistakes of clients' base URLs are, and where metrics are."""
        bare = "/" + "/".join(word for word in path[:200].lower().split("/") if word)
        for meant in (bare, f"/v1{bare}", bare.removeprefix("/v1")):
            if meant in self._paths:
                return f"; did you mean {meant}?"
        return "; metrics have a port of their own, --prometheus-port" if bare == "/metrics" else ""

    def _refuse_unrouted(self, error: GatewayError, request: web.Request) -> web.StreamResponse:
        ticket = Ticket(self.request_id(request, "req-"), UNROUTED)
        self._metrics.http_started(UNROUTED)
        self._metrics.http_finished(request.method, UNROUTED, error.status, error.code, ticket.elapsed_s)
        bodies = [body for path, body in self._error_bodies.items() if f"{request.path}/".startswith(f"{path}/")]
        return self._refuse(error, request, ticket, bodies[0] if bodies else openai_error)

    def _note_stages(self, ticket: Ticket) -> None:
        """What a request waited for as a whole; decode and preprocess were noted by item, where they ran."""
        for stage in ("admit", "prompt", "fetch", "inspect", "wait", "send", "engine"):
            if stage in ticket.stages:
                self._metrics.stage(stage, "all", ticket.stages[stage])

    async def _handle(self, route: Route, request: web.Request, ticket: Ticket) -> web.StreamResponse:
        try:
            check_expectation(request)
            if route.guarded:
                self.check_key(request, route)
            if route.admitted:
                with ticket.stage("admit"):
                    ticket.custody.keep((await self._slots.enter()).release)
            return self._dress(await route.handler(request, ticket), request, ticket)
        except GatewayError as error:
            return self._refuse(error, request, ticket, route.error_body)
        except asyncio.CancelledError:
            if not ticket.is_cut or ticket.is_answering:
                raise
            ticket.take_back_cut()
            return self._refuse(SHUTTING_DOWN, request, ticket, route.error_body)
        except ConnectionError:
            raise  # the client is gone while it was written to: aiohttp closes what is left
        except Exception:
            _log.exception("request failed id=%s route=%s", ticket.request_id, route.path)
            fault = GatewayError("internal_error", "the gateway failed on this request")
            return self._refuse(fault, request, ticket, route.error_body)

    def _refuse(self, error: GatewayError, request: web.Request, ticket: Ticket, body: ErrorBody) -> web.StreamResponse:
        ticket.code, ticket.message = error.code, error.message
        if ticket.is_answering:  # a status line is out already: a cut connection is the only honest end
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError(error.message)
        return self._dress(error_response(error, body(error, ticket.request_id)), request, ticket)

    def _dress(self, response: web.StreamResponse, request: web.Request, ticket: Ticket) -> web.StreamResponse:
        if not response.prepared:
            response.headers.update(self.reply_headers(request, ticket))
            if "Connection" in response.headers:
                response.force_close()
        return response

    def reply_headers(self, request: web.Request, ticket: Ticket) -> CIMultiDict[str]:
        """What every answer's head has besides; with `Connection: close` the connection has to be closed, too."""
        headers = CIMultiDict({"x-request-id": ticket.request_id, "Server": "mediagate"})
        if ticket.id_header is not None:
            headers[ticket.id_header] = ticket.request_id
        if self._config.server.server_timing and ticket.stages:
            headers["Server-Timing"] = ticket.server_timing()
        if self.ends_connection(request):
            headers["Connection"] = "close"
        return headers


def _path(request: web.Request) -> str:
    return request.path[:200]


def error_response(error: GatewayError, body: dict[str, Any]) -> web.Response:
    return web.Response(status=error.status, body=as_json(body), headers=error.headers, content_type="application/json")


class Cors:
    """Answers preflights and marks every answer, streams included, for browsers of the allowed origins."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = origins

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not _is_preflight(request):
            return await handler(request)
        response = web.Response()
        if request.can_read_body:  # no browser's
            response.force_close()
        return response

    async def prepare_response(self, request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if origin is None or not ("*" in self._origins or origin in self._origins):
            return
        headers = response.headers
        headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
        headers["Access-Control-Expose-Headers"] = "x-request-id, x-smg-error-code, server-timing"
        headers["Vary"] = "Origin"
        if _is_preflight(request):
            headers["Access-Control-Allow-Methods"] = "GET,POST,PATCH,DELETE,OPTIONS"
            headers["Access-Control-Allow-Headers"] = (
                "content-type, authorization, x-api-key, anthropic-version, anthropic-beta"
            )
            headers["Access-Control-Max-Age"] = "3600"


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def application(config: Config, doorkeeper: Doorkeeper, routes: list[Route]) -> web.Application:
    cors = Cors(config.server.cors_allowed_origins) if config.server.cors_allowed_origins else None
    middlewares = [cors.middleware, doorkeeper.foreign_errors()] if cors else [doorkeeper.foreign_errors()]
    app = web.Application(middlewares=middlewares, client_max_size=config.server.max_payload_bytes)
    if cors:
        app.on_response_prepare.append(cors.prepare_response)
    for route in routes:
        app.router.add_route(route.method, route.pattern, doorkeeper.wrap(route), expect_handler=expect_nothing)
        if route.method == "GET":  # balancers probe with HEAD
            app.router.add_route("HEAD", route.pattern, doorkeeper.wrap(route), expect_handler=expect_nothing)
    return app
