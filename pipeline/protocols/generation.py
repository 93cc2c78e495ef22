"""From a request's body to the last byte of its answer: the way every API that generates goes.

An `Api` reads bodies and writes answers in its own shape; the order of the steps, the time limit, what a failure
becomes before and after the first output, and the counting are the same for all and live here.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from aiohttp import web

from engines.base import EngineError, EngineRequest, Event
from engines.dispatch import Dispatcher
from engines.generation import Generation
from pipeline.admission import Bodies
from pipeline.catalog import Catalog
from pipeline.config import Config
from pipeline.errors import GatewayError, engine_failure
from pipeline.explain import MediaTold
from pipeline.metrics import Metrics
from pipeline.plan import MediaPlan, ServedModel, check_text
from pipeline.prepare import Preparation, Prepared
from pipeline.protocols.http import EventStream, comment_frame, read_body
from pipeline.protocols.parts import as_json, check_content_type
from pipeline.protocols.together import Together
from pipeline.reply import Tally
from pipeline.ticket import SHUTTING_DOWN, STAGES, Ticket

_log = logging.getLogger("mediagate.generation")

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"  # a session's key, for policies that keep sessions together

EXPLAIN_HEADER = "X-Mediagate-Explain"  # "1": a stream begins with a comment that tells what was done

ServingModel = Callable[[str], ServedModel]  # Catalog.serving: raises GatewayError for a model that is not served


class Answer(Protocol):
    """What one request's choices have said so far, in the shape of its API.

    `stream` yields whole frames, the closing ones not included; it calls `first_out` when the engine's first event is
    here.  `closing`, `failing`: the last frames of a stream that is complete, or that cannot go on.
    """

    @property
    def tally(self) -> Tally: ...
    async def whole(self, events: AsyncIterator[Event]) -> bytes: ...
    def stream(self, events: AsyncIterator[Event], first_out: Callable[[], None]) -> AsyncIterator[bytes]: ...
    def closing(self) -> Sequence[bytes]: ...
    def failing(self, error: GatewayError) -> Sequence[bytes]: ...


class Detached(ABC):
    """What an Answer is as well that goes on after its request was answered."""

    @abstractmethod
    def queued(self) -> bytes:
        """The answer to the request.  GatewayError when there are too many such."""

    @abstractmethod
    def runs_in(self, task: asyncio.Task[None]) -> None:
        """Cancelling the task ends it."""

    @abstractmethod
    def failed(self, error: GatewayError) -> None: ...


class Asked(msgspec.Struct, frozen=True):
    """A body as it was understood.  `answer(request)` begins the answer to what the engine is sent for it, and holds
    `kept_bytes` until its end.  `more`: plans of further prompts, whose requests come behind the first one's.
    `history_bytes`: JSON of earlier requests that the plan is made of as well.
    """

    model: ServedModel
    plan: MediaPlan
    answer: Callable[..., Answer]
    kept_bytes: int = 0
    history_bytes: int = 0
    more: Sequence[MediaPlan] = ()


class Api(Protocol):
    """One route's shape.  `endpoint`: its name in metrics; `keepalive`: the frame of a stream whose engine is silent.

    `read` raises GatewayError; `serving` looks models up, so that an API decides what is told first.
    """

    @property
    def endpoint(self) -> str: ...
    @property
    def keepalive(self) -> bytes: ...
    def read(self, body: bytearray, serving: ServingModel) -> Asked: ...


def prompt_bytes(request: EngineRequest) -> int:
    """What a prompt takes in memory, about: its text, its ids four bytes each, and what of URLs is not in spans."""
    urls = sum(len(piece) for one in request.references for piece in one.url if isinstance(piece, bytes))
    return len(request.original_text) + 4 * len(request.input_ids) + urls


class InTime:
    """Until `deadline` of the loop's clock; then 504 with the limit in words."""

    def __init__(self, deadline: float, limit_s: float) -> None:
        self._timeout = asyncio.timeout_at(deadline)
        self._limit_s = limit_s

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    def disarm(self) -> None:
        """From now on somebody else looks at the clock."""
        self._timeout.reschedule(None)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(exc_type, exc_val, exc_tb)
        except TimeoutError:
            raise too_long(self._limit_s) from None


def too_long(limit_s: float) -> GatewayError:
    return GatewayError("request_timeout", f"the request took longer than {limit_s:g} s")


class Stations(msgspec.Struct, frozen=True):
    """What the routes of all APIs share.  `reply_headers(request, ticket)`: what every answer carries.  `go_on(ticket,
    work)`: a task for work that outlives its request's answer, with what the ticket holds.
    """

    config: Config
    bodies: Bodies
    catalog: Catalog
    preparation: Preparation
    dispatcher: Dispatcher
    metrics: Metrics
    reply_headers: Callable[[web.Request, Ticket], Mapping[str, str]]
    go_on: Callable[[Ticket, Coroutine[Any, Any, None]], asyncio.Task[None]]


class FirstTimed:
    """Events as they come; `tell` gets the seconds until the first one.  No generator: a loop that is left early would
    leave it to the event loop to be closed, in a task of its own.
    """

    def __init__(self, events: AsyncIterator[Event], tell: Callable[[float], None]) -> None:
        self._events = events
        self._tell: Callable[[float], None] | None = tell
        self._begun = time.perf_counter()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        if self._tell is not None:
            self._tell(time.perf_counter() - self._begun)
            self._tell = None
        return event


class GenerationRoute:
    """The handler of one API's route."""

    def __init__(self, stations: Stations, api: Api) -> None:
        self._stations = stations
        self._config = stations.config
        self._metrics = stations.metrics
        self._api = api

    async def handle(self, request: web.Request, ticket: Ticket) -> web.StreamResponse:
        ticket.explains = self._config.server.page and request.headers.get(EXPLAIN_HEADER) == "1"
        check_content_type(request.headers.get("Content-Type", ""))
        ticket.routing_key = request.headers.get(ROUTING_KEY_HEADER)
        deadline = asyncio.get_running_loop().time() + self._config.server.request_timeout_s
        async with InTime(deadline, self._config.server.request_timeout_s) as limit:
            begin_answer, prepared, *more = await self._prepare(request, ticket)
            if prepared.request.stream:
                limit.disarm()
            return await self._answer(request, ticket, begin_answer, prepared, more, deadline)

    async def _answer(
        self,
        request: web.Request,
        ticket: Ticket,
        begin_answer: Callable[..., Answer],
        prepared: Prepared,
        more: Sequence[Prepared],
        deadline: float,
    ) -> web.StreamResponse:
        self._metrics.request_routed(ticket.model, self._api.endpoint, prepared.request.stream)
        answer = begin_answer(prepared.request, *(one.request for one in more))
        if isinstance(answer, Detached):
            return self._let_go(ticket, answer, prepared, deadline)
        generations = [self._generation(ticket, one) for one in (prepared, *more)]
        generation = Together(generations, prepared.request.sampling.n) if more else generations[0]
        try:
            if prepared.request.stream:
                return await self._stream(request, ticket, answer, generation, deadline, prepared.told)
            return await self._whole(ticket, answer, generation)
        except EngineError as error:
            raise self._failure(ticket, error) from None
        finally:
            await self._over(ticket, answer, generation)

    def _generation(self, ticket: Ticket, prepared: Prepared) -> Generation:
        ticket.dispatched()

        def media_free(consumed: bool) -> None:
            _note_workers(ticket, generation)
            ticket.media_free(consumed)

        generation = self._stations.dispatcher.generate(
            prepared.request,
            affinity=prepared.affinity,
            remake=prepared.remake,
            on_media_read=ticket.media_read,
            on_media_free=media_free,
        )
        return generation

    def _failure(self, ticket: Ticket, error: EngineError) -> GatewayError:
        failure = engine_failure(error)
        self._metrics.router_error(ticket.model, self._api.endpoint, failure.code)
        return failure

    async def _over(self, ticket: Ticket, answer: Answer, generation: Generation | Together) -> None:
        await generation.aclose()
        usage = answer.tally.usage
        ticket.completion_tokens = usage.completion_tokens
        ticket.prompt_tokens = usage.prompt_tokens or ticket.prompt_tokens
        self._metrics.tokens(ticket.model, self._api.endpoint, usage.prompt_tokens, usage.completion_tokens)

    def _let_go(self, ticket: Ticket, answer: Any, prepared: Prepared, deadline: float) -> web.StreamResponse:
        """Answers at once; the rest goes on in a task that holds what the request held."""
        body = answer.queued()
        answer.runs_in(self._stations.go_on(ticket, self._rest(ticket, answer, prepared, deadline)))
        return web.Response(body=body, content_type="application/json")

    async def _rest(self, ticket: Ticket, answer: Any, prepared: Prepared, deadline: float) -> None:
        generation = self._generation(ticket, prepared)
        failure: GatewayError | None = None
        try:
            async with InTime(deadline, self._config.server.request_timeout_s):
                await self._whole(ticket, answer, generation)
        except EngineError as error:
            failure = self._failure(ticket, error)
        except GatewayError as error:
            failure = error
        except Exception:
            _log.exception("background request failed id=%s", ticket.request_id)
            failure = GatewayError("internal_error", "the gateway failed on this request")
        finally:
            await self._over(ticket, answer, generation)
        if failure is not None:
            ticket.code, ticket.message = failure.code, failure.message
            answer.failed(failure)

    async def _prepare(
        self, request: web.Request, ticket: Ticket
    ) -> tuple[Callable[..., Answer], Prepared, *tuple[Prepared, ...]]:
        """The body lives only in here: data URLs are views of it until their bytes are in spans.

        What stays is the prompt, and its bytes stay counted to the end of the request.
        """
        with ticket.stage("admit"):
            body, grant = await read_body(request, self._stations.bodies, self._config.server.max_payload_bytes)
        try:
            asked = self._api.read(body, self._stations.catalog.serving)
            ticket.model = asked.model.model
            ticket.items = len(asked.plan.parts)
            media_bytes = sum(len(part.url) for part in asked.plan.parts)
            text_bytes = len(body) + asked.history_bytes - media_bytes
            check_text(asked.model, text_bytes // (1 + len(asked.more)))
            model, begin_answer, more, kept_bytes = asked.model, asked.answer, asked.more, asked.kept_bytes
            preparing = self._stations.preparation.run(asked.model, asked.plan, ticket)
            del asked  # its messages are gone as soon as they are a prompt
            prepared = [await preparing]
            for plan in more:
                prepared.append(await self._stations.preparation.run(model, plan, ticket))
            grant.shrink(sum(prompt_bytes(one.request) for one in prepared) + kept_bytes)
        except BaseException:
            grant.release()
            raise
        ticket.custody.keep(grant.release)
        return begin_answer, prepared[0], *prepared[1:]

    async def _whole(self, ticket: Ticket, answer: Answer, generation: Generation | Together) -> web.StreamResponse:
        begun = time.perf_counter()
        body = await answer.whole(self._timed(ticket, generation))
        _note_engine(ticket, generation, begun)
        return web.Response(body=body, content_type="application/json")

    def _timed(self, ticket: Ticket, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        return FirstTimed(events, lambda s: self._metrics.first_token(ticket.model, self._api.endpoint, s))

    async def _stream(
        self,
        request: web.Request,
        ticket: Ticket,
        answer: Answer,
        generation: Generation | Together,
        deadline: float,
        told: Sequence[MediaTold],
    ) -> web.StreamResponse:
        """Before the engine's first output a failure is an ordinary HTTP error; afterwards it is an event of the
        stream.
        """
        begun = time.perf_counter()

        def first_out() -> None:
            _note_engine(ticket, generation, begun)

        frames = answer.stream(self._timed(ticket, generation), first_out)
        async with InTime(deadline, self._config.server.request_timeout_s):
            first = await anext(frames)
        if ticket.explains:
            first = explanation(ticket, told) + first
        headers = self._stations.reply_headers(request, ticket)
        stream = EventStream(request, ticket, headers, self._config.server.sse_keepalive_s, self._api.keepalive)
        failure: GatewayError | None = None
        async with stream:
            try:
                async with asyncio.timeout_at(deadline):
                    await stream.write(first)
                    async for frame in frames:
                        await stream.write(frame)
            except EngineError as error:
                failure = engine_failure(error)
            except TimeoutError:
                failure = too_long(self._config.server.request_timeout_s)
            except asyncio.CancelledError:
                if not ticket.is_cut:
                    raise
                ticket.take_back_cut()
                failure = SHUTTING_DOWN
            if failure is not None:
                ticket.code, ticket.message = failure.code, failure.message
                self._metrics.router_error(ticket.model, self._api.endpoint, failure.code)
                await stream.finish(*answer.failing(failure))
            else:
                await stream.finish(*answer.closing())
        return stream.response


def explanation(ticket: Ticket, told: Sequence[MediaTold]) -> bytes:
    """What the gateway did up to the engine's first output: a comment, which clients of server-sent events skip.

    It tells a client of its own request alone: nothing of workers, of other requests, or of where tensors lie.
    """
    facts = {
        "media": told,
        "prompt_tokens": ticket.prompt_tokens,
        "tensor_bytes": ticket.tensor_bytes,
        "stages_ms": {name: round(ticket.stages[name] * 1e3, 2) for name in STAGES if name in ticket.stages},
        "total_ms": round(ticket.elapsed_s * 1e3, 2),
    }
    return comment_frame(b"mediagate " + as_json(facts))


def _note_workers(ticket: Ticket, generation: Generation | Together) -> None:
    ticket.worker = generation.worker.url if generation.worker is not None else ""
    ticket.reader = generation.taker.url if generation.taker is not None else ""


def _note_engine(ticket: Ticket, generation: Generation | Together, begun: float) -> None:
    _note_workers(ticket, generation)
    ticket.add("send", generation.send_s)
    ticket.add("engine", max(0.0, time.perf_counter() - begun - generation.send_s))
