"""One request's generation: attempts until one answers, and when its tensors are free.

Rule: until the first event nothing is lost, so a failed attempt is repeated with another request id, on another
worker if there is one; after the first event nothing is repeated.  Whatever way a generation ends (finished, failed,
closed, cancelled), load, segments, streams and the engine's own work are cleaned up, and the owner of the tensors is
told once.

A generation is served by one worker, or, in a gateway for disaggregated serving, by a pair (`engines.pairs`): then an
attempt is both legs (`engines.legs`), and no more than the decode leg when the prefill leg is done already.

Theory of operation.  The tensors belong to the caller; the gateway reads them while an attempt is sent, a reader of
shared memory until the engine has answered.  So they are *free* when a verdict exists (first event: consumed; over
without one: not consumed) and every stream that was opened has drained (`engines.scatter.Drain`):
`on_media_free(consumed)` is called then, exactly once, which may be after the generation was closed.  In a pair the
verdict falls when the prefill leg is done, if the decode leg needs no tensors; from then on an attempt that would need
them is not repeated.  Tensors are made for one form; workers of another form are used only when `remake` can make them
again.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engines.affinity import Affinity
from engines.attempt import Attempt
from engines.base import EngineError, EngineRequest, Event, Form, PairRefused
from engines.leg import Role
from engines.legs import Legs, PrefillFirst, legs_of
from engines.pairs import Pair, choose_decode, choose_encoders, choose_pair
from engines.scatter import Drain
from engines.worker import Worker

if TYPE_CHECKING:
    from engines.dispatch import Dispatcher

log = logging.getLogger(__name__)

RETRIED = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"})
"""Statuses of an engine after which another attempt may help; INTERNAL is not among them."""

_NOT_AGAIN = "sidecar_timeout"
"""UNAVAILABLE with these words first: the worker has spent the whole time it has for media on this input."""

OnMediaRead = Callable[[], None]
OnMediaFree = Callable[[bool], None]
Remake = Callable[[Form], Awaitable[EngineRequest]]


class Generation:
    """Events of one request: `async with` it and iterate, or `aclose` it in the end.

    `worker`: whose answer it is, of the latest attempt; `taker`: who was sent the tensors (the prefill worker of a
    pair).  `attempts`: how many were begun.  `send_s`: seconds the last one took to send.  Raises EngineError
    (NoWorker, PairRefused and ModalityRefused included) from the step that met it.
    """

    def __init__(
        self,
        dispatcher: "Dispatcher",
        request: EngineRequest,
        affinity: Affinity,
        remake: Remake | None,
        media: "Media",
    ) -> None:
        self.worker: Worker | None = None
        self.taker: Worker | None = None
        self.attempts = 0
        self.send_s = 0.0
        self._dispatcher = dispatcher
        self._request = request
        self._affinity = affinity
        self._remake = remake
        self._media = media
        self._legs: Legs | None = None
        self._failed: dict[Role, Worker] = {}
        self._events = self._run()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def aclose(self) -> None:
        """End it now: cancels the stream, aborts the engine's work, withdraws segments.  Harmless when it is over."""
        await self._events.aclose()
        self._media.over()  # also when no step was ever taken

    async def _run(self) -> AsyncGenerator[Event, None]:
        in_pairs = self._dispatcher.settings.in_pairs
        try:
            while True:
                attempt = await (self._pair_attempt() if in_pairs else self._attempt())
                self.attempts += 1
                try:
                    async with aclosing(attempt.events()) as events:
                        async for event in events:
                            self.send_s = attempt.send_s
                            yield event
                    return
                except EngineError as error:
                    await self._pause_or_raise(error)
        finally:
            self._media.over()

    async def _attempt(self) -> Attempt:
        request = self._request
        self.worker = self.taker = await self._dispatcher.choose(
            request, self._affinity, self.worker, any_form=self._remake is not None
        )
        await self._make_fit(self.worker)
        media = self._media
        return Attempt(
            self.worker,
            self._request,
            self._dispatcher,
            reading=media.reading,
            read=media.read,
            answered=media.consumed,
        )

    async def _pair_attempt(self) -> Legs:
        """A pair's legs, or once more the decode leg alone, on another worker."""
        dispatcher, request, legs = self._dispatcher, self._request, self._legs
        if isinstance(legs, PrefillFirst) and legs.may_decode_again:
            legs.decode_on(
                choose_decode(dispatcher, request, self._affinity, legs.pair.prefill, self._failed.get("decode"))
            )
        else:
            pair = await choose_pair(
                dispatcher, request, self._affinity, self._failed, any_form=self._remake is not None
            )
            self.taker = pair.prefill
            encoders = await self._encoders(pair)
            if not encoders:
                await self._make_fit(pair.prefill)
            legs = legs_of(pair, self._request, dispatcher, self._media, encoders)
        self._legs, self.worker = legs, legs.pair.decode
        return legs

    async def _encoders(self, pair: Pair) -> tuple[Worker, ...]:
        """The encode worker of every item; none when the prefill worker encodes itself."""
        dispatcher = self._dispatcher
        if not (dispatcher.settings.with_encoders and self._request.media):
            return ()
        there = dispatcher.available(self._request.model, "encode")
        if there and not any(dispatcher.fits(self._request, worker) for worker in there):
            await self._make_fit(there[0])
        failed = self._failed.get("encode")
        return choose_encoders(dispatcher, self._request, pair.prefill, failed)

    async def _make_fit(self, worker: Worker) -> None:
        """Media in the form this worker wants."""
        if self._remake is not None and not self._dispatcher.fits(self._request, worker):
            await self._media.drained()
            self._request = await self._remake(self._dispatcher.form_of(worker))

    async def _pause_or_raise(self, error: EngineError) -> None:
        retry = self._dispatcher.settings.retry
        if not is_retried(error) or self.attempts >= retry.max_attempts or not self._can_repeat():
            raise error
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a status that came together with a cancellation
            raise asyncio.CancelledError
        log.info("attempt %d of %s failed: %s %s", self.attempts, self._request.request_id, error.status, error)
        worker_type = error.role or (self.worker.worker_type if self.worker else "regular")
        if self._legs is not None and error.role is not None:
            self._failed[error.role] = self._legs.worker_of(error)
        self._dispatcher.observer.retried(worker_type)
        await asyncio.sleep(retry.pause_s(self.attempts))

    def _can_repeat(self) -> bool:
        """Whether another attempt would have what it must send."""
        has_media = bool(self._request.media or self._request.references)
        return not (has_media and self._media.is_decided) or (self._legs is not None and self._legs.may_decode_again)


def is_retried(error: EngineError) -> bool:
    """Whether another attempt may help.  What encode and prefill legs say is no answer yet."""
    if isinstance(error, PairRefused) or (error.started and error.role not in ("encode", "prefill")):
        return False
    if error.status == "UNAVAILABLE" and error.message.startswith(_NOT_AGAIN):
        return False
    return error.status in RETRIED


class Media:
    """When the request's tensors are free: a verdict exists, and no stream reads them any more."""

    def __init__(self, on_read: OnMediaRead | None, on_free: OnMediaFree | None) -> None:
        self._on_read = on_read
        self._on_free = on_free
        self._verdict: bool | None = None
        self._streams = 0
        self._drains: list[Drain] = []

    @property
    def is_decided(self) -> bool:
        """Whether the tensors are given up: no attempt can be sent them any more."""
        return self._verdict is not None

    def reading(self, drain: Drain) -> None:
        self._streams += 1
        self._drains.append(drain)
        drain.add_done_callback(self._drained)

    def read(self) -> None:
        on_read, self._on_read = self._on_read, None
        if on_read is not None:
            on_read()

    async def drained(self) -> None:
        """Until no stream reads the tensors; a connection that keeps them is aborted (`engines.link`)."""
        for drain in self._drains:
            await drain.wait()

    def consumed(self) -> None:
        self._decide(True)

    def over(self) -> None:
        self._decide(False)

    def _decide(self, verdict: bool) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self.read()
            self._tell_if_free()

    def _drained(self) -> None:
        self._streams -= 1
        self._tell_if_free()

    def _tell_if_free(self) -> None:
        if self._verdict is None or self._streams or self._on_free is None:
            return
        on_free, self._on_free = self._on_free, None
        on_free(self._verdict)
