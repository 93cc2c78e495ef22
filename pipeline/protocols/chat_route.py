"""The chat completions route: from the request's body to the last byte of its answer, in the order of SMG's checks."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web

from engines.base import EngineError, EngineRequest, Event
from engines.dispatch import Dispatcher, Generation
from pipeline.admission import Bodies
from pipeline.catalog import Catalog
from pipeline.config import Config
from pipeline.errors import GatewayError, engine_failure
from pipeline.metrics import Metrics
from pipeline.plan import ServedModel
from pipeline.prepare import Preparation, Prepared
from pipeline.protocols import chat
from pipeline.protocols.chat_reply import DONE, Answer, stream_error
from pipeline.protocols.http import EventStream, read_body
from pipeline.protocols.parts import check_content_type
from pipeline.ticket import Ticket

ENDPOINT = "chat_completions"
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"  # a session's key, for policies that keep sessions together


def media_key(request: EngineRequest) -> str | None:
    """Without a session's key the same media go to the same worker, which may have them in its encoder cache."""
    return "".join(item.content_hash for batch in request.media for item in batch.items) or None


class ChatRoute:
    """`reply_headers(ticket)`: what every answer carries."""

    def __init__(
        self,
        config: Config,
        bodies: Bodies,
        catalog: Catalog,
        preparation: Preparation,
        dispatcher: Dispatcher,
        metrics: Metrics,
        reply_headers: Callable[[Ticket], Mapping[str, str]],
    ) -> None:
        self._config = config
        self._bodies = bodies
        self._catalog = catalog
        self._preparation = preparation
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._reply_headers = reply_headers

    async def handle(self, request: web.Request, ticket: Ticket) -> web.StreamResponse:
        check_content_type(request.headers.get("Content-Type", ""))
        deadline = asyncio.get_running_loop().time() + self._config.server.request_timeout_s
        async with self._in_time(deadline):
            model, asked, prepared = await self._prepare(request, ticket)
        self._metrics.request_routed(model.model, ENDPOINT, prepared.request.stream)
        answer = Answer(model, asked, prepared.request)
        ticket.dispatched()

        def media_free(consumed: bool) -> None:
            ticket.worker = generation.worker.url if generation.worker is not None else ""
            ticket.media_free(consumed)

        generation = self._dispatcher.generate(
            prepared.request,
            routing_key=request.headers.get(ROUTING_KEY_HEADER) or media_key(prepared.request),
            remake=prepared.remake,
            on_media_read=ticket.media_read,
            on_media_free=media_free,
        )
        try:
            if prepared.request.stream:
                return await self._stream(request, ticket, answer, generation, deadline)
            return await self._whole(ticket, answer, generation, deadline)
        except EngineError as error:
            failure = engine_failure(error)
            self._metrics.router_error(model.model, ENDPOINT, failure.code)
            raise failure from None
        finally:
            await generation.aclose()
            usage = answer.tally.usage
            ticket.completion_tokens = usage.completion_tokens
            self._metrics.tokens(model.model, ENDPOINT, usage.prompt_tokens, usage.completion_tokens)

    @contextlib.asynccontextmanager
    async def _in_time(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise self._too_long() from None

    def _too_long(self) -> GatewayError:
        return GatewayError(
            "request_timeout", f"the request took longer than {self._config.server.request_timeout_s:g} s"
        )

    async def _prepare(self, request: web.Request, ticket: Ticket) -> tuple[ServedModel, chat.ChatRequest, Prepared]:
        """The body lives only in here: data URLs are views of it until their bytes are in spans."""
        with ticket.stage("admit"):
            body, grant = await read_body(request, self._bodies, self._config.server.max_payload_bytes)
        try:
            try:
                asked = chat.read(body)
            except chat.MalformedPart as error:
                self._catalog.serving(error.model)  # an unknown model is told before a bad part (order of SMG's checks)
                raise
            model = self._catalog.serving(asked.model)
            ticket.model = model.model
            plan = chat.plan_of(asked, model.sampling_defaults)
            ticket.items = len(plan.parts)
            return model, asked, await self._preparation.run(model, plan, ticket)
        finally:
            grant.release()

    async def _whole(
        self, ticket: Ticket, answer: Answer, generation: Generation, deadline: float
    ) -> web.StreamResponse:
        async with self._in_time(deadline):
            with ticket.stage("engine"):
                body = await answer.whole(self._timed(ticket, generation))
        ticket.add("send", generation.send_s)
        return web.Response(body=body, content_type="application/json")

    async def _timed(self, ticket: Ticket, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        begun = time.perf_counter()
        first = True
        async for event in events:
            if first:
                self._metrics.first_token(ticket.model, ENDPOINT, time.perf_counter() - begun)
                first = False
            yield event

    async def _stream(
        self, request: web.Request, ticket: Ticket, answer: Answer, generation: Generation, deadline: float
    ) -> web.StreamResponse:
        """Before the engine's first output a failure is an ordinary HTTP error; afterwards it is an event of the
        stream.
        """
        begun = time.perf_counter()

        def first_out() -> None:
            ticket.add("send", generation.send_s)
            ticket.add("engine", time.perf_counter() - begun)

        chunks = answer.stream(self._timed(ticket, generation), first_out)
        async with self._in_time(deadline):
            first = await anext(chunks)
        stream = EventStream(request, ticket, self._reply_headers(ticket), self._config.server.sse_keepalive_s)
        failure: GatewayError | None = None
        async with stream:
            try:
                async with asyncio.timeout_at(deadline):
                    await stream.data(first)
                    async for chunk in chunks:
                        await stream.data(chunk)
            except EngineError as error:
                failure = engine_failure(error)
            except TimeoutError:
                failure = self._too_long()
            if failure is not None:
                ticket.code = failure.code
                self._metrics.router_error(ticket.model, ENDPOINT, failure.code)
                await stream.finish(stream_error(failure), DONE)
            else:
                await stream.finish(DONE)
        return stream.response
