"""One try to get a generation from one engine worker: place the tensors, send, read, and clean up whatever happens.

Rule: an attempt leaves nothing behind.  Its names in shared memory are withdrawn when it failed, its stream is reset
when it is left early, and the engine is told to abort whenever the gateway drops a generation that the engine has not
ended itself. `engines.dispatch` decides who is tried, `engines.generation` how often.

A decode leg is dropped late: an engine that is torn off in the middle of a hand-over may crash or leak, so its stream
stays open in the background until it has begun to answer, DEFERRED_ABORT_S at most.  An encode leg's answer does not
say that its item was read: whoever goes on iterating says so.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from engines.base import EngineError, EngineRequest, Event, Observer
from engines.breaker import Trial
from engines.engine import Engine
from engines.scatter import Drain
from engines.transport import Placement, Transport
from engines.worker import Worker

if TYPE_CHECKING:
    from engines.channel import Stream

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0
READ_POLL_S = 0.005
READER_PATIENCE_S = 2.0
"""A reader that has not taken its tensors by then no longer counts as one that will soon (see `on_media_read`)."""
DEFERRED_ABORT_S = 30.0
LAST_WORD_S = 2.0
"""How long an engine that has ended every choice may take to end the call as well."""

# UNAVAILABLE with these words first says nothing about the worker: a media host is down that a client named, or too
# many requests came at once
_BLAMELESS = ("media_refs[", "worker is saturated")

_MESSAGES_A_TURN = 32  # messages that are there already are read without waiting: other requests must get their turn


class Surroundings(Protocol):
    """What attempts share; `engines.dispatch.Dispatcher` is one."""

    @property
    def transport(self) -> Transport: ...

    @property
    def observer(self) -> Observer: ...

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, beyond the attempt."""
        ...


def _nothing() -> None:
    return None


class Attempt:
    """`events` is iterated once, and closed.

    `reading` is called with the drain of the stream that reads the request's buffers; `read` when the worker has taken
    all tensors, or seems not to; `answered` once, when the engine has given its first event, so that it has everything
    it needs.  `attempt_id` is made here unless it is given: the legs of a pair share one.
    """

    def __init__(
        self,
        worker: Worker,
        request: EngineRequest,
        around: Surroundings,
        *,
        reading: Callable[[Drain], None],
        read: Callable[[], None] = _nothing,
        answered: Callable[[], None] = _nothing,
        attempt_id: str = "",
    ) -> None:
        self.id = attempt_id or f"{request.request_id}-{uuid7()}"
        self.send_s = 0.0  # until the whole message was handed to the connection
        self._worker = worker
        self._request = request
        self._around = around
        self._reading = reading
        self._read = read
        self._answered = answered
        self._role = request.leg.role if request.leg is not None else None
        self._is_dropped_late = self._role == "decode"
        self._is_left = False  # to the background
        self._is_sent = False  # the engine may know of it
        self._has_answered = False
        self._has_read = False  # what was placed for it
        self._is_ended = False  # by the engine: a status, or the end of the stream
        self._is_regular = False  # every choice has its end
        self._trial: Trial  # from the first step of `events` on

    async def events(self) -> AsyncGenerator[Event, None]:
        """The engine's events; EngineError with the worker's URL, `started` when an event was given before."""
        client, transport = self._begin(), self._around.transport
        placement: Placement | None = None
        stream: Stream[Any] | None = None
        try:
            placement = await transport.place(client.tensors(self._request), self._worker)
            stream = client.generate(self._request, self.id, placement.handles)
            replies = client.replies(self._request)
            await self._send(stream, placement)
            messages = 0
            message = await self._first(client, stream)
            while message is not None:
                messages += 1
                if messages % _MESSAGES_A_TURN == 0:
                    await asyncio.sleep(0)
                event = replies.event(message)
                if replies.all_finished:
                    self._ends_well(stream)
                if not self._has_answered:
                    self._engine_has_all(placement)
                yield event
                self._has_read = True
                if self._is_regular:
                    return
                message = await self._next(stream)
            replies.end()
        except EngineError as error:
            self._failed_with(error)
            raise
        finally:
            if not self._is_left:
                self._let_go(client, stream)
            if placement is not None:
                await transport.end(placement, consumed=self._has_read)

    def _begin(self) -> Engine:
        """From here on the worker is at work for us, until `_let_go`."""
        worker = self._worker
        if worker.client is None:
            error = EngineError("UNAVAILABLE", "the worker is not introduced yet", worker=worker.url)
            error.role, error.is_undelivered = self._role, True
            raise error
        worker.begin()
        self._trial = worker.breaker.begin()
        self._around.observer.worker_load(worker.url, worker.load)
        return worker.client

    def _failed_with(self, error: EngineError) -> None:
        worker = self._worker
        error.worker = error.worker or worker.url
        error.started = error.started or self._has_answered
        error.role = self._role
        is_blamed = self._is_sent and not error.message.startswith(_BLAMELESS)
        if is_blamed and self._trial.failed(error.status):
            self._around.observer.breaker_outcome(worker.url, failed=True)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has its end."""
        return self._is_regular

    @property
    def is_sent(self) -> bool:
        """Whether it reads the request's tensors, or has read them: its stream is known to `reading`."""
        return self._is_sent

    def has_nothing_to_lose(self) -> None:
        """No hand-over can be under way: a decode leg, too, is dropped at once."""
        self._is_dropped_late = False

    def _let_go(self, client: Engine, stream: "Stream[Any] | None") -> None:
        if stream is not None:
            stream.close()
        worker = self._worker
        self._trial.end()
        worker.finish()
        self._around.observer.worker_load(worker.url, worker.load)
        self._abort_if_dropped(client)

    async def _send(self, stream: "Stream[Any]", placement: Placement) -> None:
        began = time.monotonic()
        self._reading(stream.sent)
        self._is_sent = True
        try:
            await stream.send()
        except EngineError as error:
            self._is_ended = True
            error.is_undelivered = stream.is_undelivered
            raise
        if self._request.media:
            self._around.in_background(self._watch_reader(stream.sent, placement))
        self.send_s = time.monotonic() - began

    async def _watch_reader(self, sent: Drain, placement: Placement) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(READER_PATIENCE_S):
                await sent.wait()
                while placement.is_unread:
                    await asyncio.sleep(READ_POLL_S)
        self._read()

    async def _first(self, client: Engine, stream: "Stream[Any]") -> Any:
        """The engine's first message; a decode leg that is dropped before goes on waiting for it in the background."""
        if self._role != "decode":
            return await self._next(stream)
        first = asyncio.create_task(self._next(stream))
        try:
            return await asyncio.shield(first)
        except asyncio.CancelledError:
            if self._is_dropped_late and not first.done():
                self._is_left = True
                self._around.in_background(self._drop_late(client, first, stream))
            else:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            raise

    async def _drop_late(self, client: Engine, first: "asyncio.Task[Any]", stream: "Stream[Any]") -> None:
        try:
            await asyncio.wait({first}, timeout=DEFERRED_ABORT_S)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            self._let_go(client, stream)

    async def _next(self, stream: "Stream[Any]") -> Any:
        """The engine's next message; None at the end of the stream."""
        try:
            message = await anext(stream, None)
        except EngineError:
            self._is_ended = True
            raise
        self._is_ended = message is None
        return message

    def _engine_has_all(self, placement: Placement) -> None:
        self._has_answered = True
        self._trial.answered()
        self._answered()
        self._has_read = self._role != "encode"  # which has accepted it, and may not have read it yet
        if placement.own and self._has_read:
            self._around.in_background(self._around.transport.end(placement, consumed=True))

    def _ends_well(self, stream: "Stream[Any]") -> None:
        """A status after the last choice's end changes nothing any more."""
        self._is_regular = True
        stream.linger(LAST_WORD_S, self._ended_oddly)
        self._trial.finished()
        self._around.observer.breaker_outcome(self._worker.url, failed=False)

    def _ended_oddly(self, how: str) -> None:
        log.info("worker %s: %s after its answer was complete", self._worker.url, how)

    def _abort_if_dropped(self, client: Engine) -> None:
        is_dropped = not self._is_ended or self._has_answered
        if self._is_sent and is_dropped and not self._is_regular and self._role != "encode":
            self._around.in_background(self._abort(client))

    async def _abort(self, client: Engine) -> None:
        try:
            await client.abort(self.id, ABORT_TIMEOUT_S)
        except EngineError as error:
            log.info("worker %s: could not abort %s: %s", self._worker.url, self.id, error)


def uuid7() -> str:
    """RFC 9562 version 7: 48 bits of milliseconds, then 74 random bits; sorts by time.  (uuid.uuid7 comes with Python
    3.14.)
    """
    millis = time.time_ns() // 1_000_000
    bits = int.from_bytes(os.urandom(10))
    value = millis << 80 | 7 << 76 | (bits >> 62 & 0x0FFF) << 64 | 2 << 62 | bits & ((1 << 62) - 1)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
