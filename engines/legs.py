"""One try to get a generation from a pair of engine workers: two attempts, in the order their engine wants.

`PrefillFirst` (vLLM): the prefill leg is a request for one token with the media; when it has ended, the media are not
needed any more (unless the decode leg has to compute the prompt again) and the decode leg is sent.
`Together` (SGLang, TokenSpeed): both legs are sent at once and meet where both messages say.

Rule: the answer is the decode leg's.  The first leg to fail answers for both and the other one is ended: a prefill leg
at once, a decode leg when it has begun to answer (`engines.attempt`), unless no hand-over can be under way.  What each
leg leaves behind is its attempt's matter: nothing.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from engines.attempt import Attempt, Surroundings, uuid7
from engines.base import EngineError, EngineRequest, Event, Finished
from engines.encoding import Encodings, MediaWatch
from engines.handover import decode_request, handover, prefill_request
from engines.leg import Handoff, Leg, MediaShare
from engines.merge import merged
from engines.pairs import Pair, meeting_at
from engines.worker import Worker

log = logging.getLogger(__name__)

LAST_PREFILL_WORD_S = 2.0
"""How long a prefill leg may go on when the answer is complete."""


class Around(Surroundings, Protocol):
    """`engines.dispatch.Dispatcher`."""

    def fits(self, request: EngineRequest, worker: Worker) -> bool:
        """Whether the request's media are in the form this worker wants."""
        ...


class PrefillFirst:
    """`events` may be iterated once more when `may_decode_again`, after `decode_on`."""

    def __init__(self, pair: Pair, request: EngineRequest, around: Around, media: MediaWatch) -> None:
        self.pair = pair
        self.send_s = 0.0
        self.may_decode_again = False  # the prefill leg is done, and no decode worker has seen what it handed over
        self._request = request
        self._around = around
        self._media = media
        self._id = f"{request.request_id}-{uuid7()}"  # the same on both legs: some connectors go by it
        self._way = handover(pair.prefill, request.sampling.n, f"xfer-{uuid7()}")
        self._handoff: Handoff | None = None

    def worker_of(self, error: EngineError) -> Worker:
        """Whose leg failed."""
        return self.pair.prefill if error.role == "prefill" else self.pair.decode

    def decode_on(self, worker: Worker) -> None:
        self.pair = Pair(self.pair.prefill, worker)

    async def events(self) -> AsyncGenerator[Event, None]:
        if not self.may_decode_again:
            await self._prefill()
        self.may_decode_again = False
        decode = self.pair.decode
        fits = self._around.fits(self._request, decode)
        request = decode_request(self._request, self._way, self._handoff, decode, fits=fits)
        async with aclosing(self._decode(request)) as events:
            async for event in events:
                yield event

    async def _prefill(self) -> None:
        attempt = Attempt(
            self.pair.prefill,
            prefill_request(self._request, self._way),
            self._around,
            reading=self._media.reading,
            read=self._media.read,
            attempt_id=self._id,
        )
        begun = time.monotonic()
        async with aclosing(attempt.events()) as events:
            async for event in events:
                if isinstance(event, Finished):
                    self._handoff = event.handoff
        self.send_s = attempt.send_s
        self._around.observer.prefilled(self._request.model, self.pair.prefill.runtime, time.monotonic() - begun)
        if self._way.relays and self._way.asking and self._handoff is None:
            self._around.observer.handover_failed(self.pair.prefill.url)
            log.warning("worker %s: no kv_transfer_params from its prefill leg", self.pair.prefill.url)

    async def _decode(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        needs_media = request.leg is not None and request.leg.media == "whole"
        if not needs_media:
            self._media.consumed()
        attempt = Attempt(
            self.pair.decode,
            request,
            self._around,
            reading=self._media.reading,
            read=self._media.read,
            answered=self._media.consumed,
            attempt_id=self._id,
        )
        try:
            async with aclosing(attempt.events()) as events:
                first = await anext(events)
                observer, runtime = self._around.observer, self.pair.decode.runtime
                observer.handed_over(request.model, runtime, self._way.connector, attempt.send_s)
                yield first
                async for event in events:
                    yield event
        except EngineError as error:
            self.may_decode_again = error.is_undelivered
            raise


class Together:
    """`events` is iterated once, and closed.

    Several choices of a text request are as many pairs of legs with one choice each, for every hand-over has a number
    of its own; media are sent once, so such a request is one pair of legs.
    """

    may_decode_again = False

    def __init__(
        self,
        pair: Pair,
        request: EngineRequest,
        around: Surroundings,
        media: MediaWatch,
        encoders: Sequence[Worker] = (),
    ) -> None:
        self.pair = pair
        self._encoders = encoders
        attempt_id = f"{request.request_id}-{uuid7()}"
        choices = request.sampling.n
        self._couples = [
            _Couple(pair, one, around, media, one_id, encoders)
            for one, one_id in (
                [(request, attempt_id)] if choices == 1 or request.media else _one_by_one(request, attempt_id)
            )
        ]

    @property
    def send_s(self) -> float:
        return max(couple.send_s for couple in self._couples)

    def worker_of(self, error: EngineError) -> Worker:
        """Whose leg failed."""
        if error.role != "encode":
            return self.pair.prefill if error.role == "prefill" else self.pair.decode
        return next((one for one in self._encoders if error.worker in (one.url, one.address)), self._encoders[0])

    async def events(self) -> AsyncGenerator[Event, None]:
        if len(self._couples) == 1:
            streams = self._couples[0].events()
        else:
            streams = merged([_as_choice(index, couple.events()) for index, couple in enumerate(self._couples)])
        async with aclosing(streams) as events:
            async for event in events:
                yield event


def _one_by_one(request: EngineRequest, attempt_id: str) -> list[tuple[EngineRequest, str]]:
    """Its choices as requests of their own; a seed counts up, for equal ones would give equal answers."""
    sampling, found = request.sampling, []
    for index in range(sampling.n):
        seed = None if sampling.seed is None else sampling.seed + index
        alone = msgspec.structs.replace(sampling, n=1, seed=seed)
        found.append((msgspec.structs.replace(request, sampling=alone), f"{attempt_id}-{index}"))
    return found


async def _as_choice(index: int, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with aclosing(events):
        async for event in events:
            yield msgspec.structs.replace(event, index=index)


class _Couple:
    """One prefill and one decode leg under way at once, and before them an encode leg for every item there may be."""

    def __init__(
        self,
        pair: Pair,
        request: EngineRequest,
        around: Surroundings,
        media: MediaWatch,
        attempt_id: str,
        encoders: Sequence[Worker],
    ) -> None:
        self._around = around
        self._media = media
        self._model, self._runtime = request.model, pair.prefill.runtime
        meeting = meeting_at(pair.prefill)
        self._encodings = Encodings(request, encoders, around, media)
        rooms = self._encodings.meetings
        share: MediaShare = "identity" if rooms else "whole"
        self._prefill = Attempt(
            pair.prefill,
            msgspec.structs.replace(request, leg=Leg("prefill", share, meeting=meeting, encoders=rooms)),
            around,
            reading=media.reading,
            read=_nothing if rooms else media.read,
            answered=self._prefilled,
            attempt_id=attempt_id,
        )
        self._decode = Attempt(
            pair.decode,
            msgspec.structs.replace(request, leg=Leg("decode", "identity", meeting=meeting)),
            around,
            reading=media.reading,
            attempt_id=attempt_id,
        )

    @property
    def send_s(self) -> float:
        return max(self._prefill.send_s, self._encodings.send_s)

    async def events(self) -> AsyncGenerator[Event, None]:
        begun = time.monotonic()
        attempts = [*self._encodings.attempts, self._prefill]
        before = [*self._encodings.begin(), asyncio.create_task(_drained(self._prefill.events()))]
        decode = self._decode.events()
        try:
            async with aclosing(decode):
                first = await self._first(before, decode)
                self._around.observer.pair_answered(self._model, self._runtime, time.monotonic() - begun)
                yield first
                async for event in decode:
                    yield event
        finally:
            if self._decode.is_complete:
                self._encodings.release()
                # nobody needs what was not sent yet, and the tensors are given back now
                await _ended([leg for leg, attempt in zip(before, attempts, strict=True) if not attempt.is_sent])
                self._around.in_background(_ended(before, LAST_PREFILL_WORD_S))
            else:
                await _ended(before)

    def _prefilled(self) -> None:
        """The prefill worker has begun to answer: it has had the embeddings of every item, or knows them."""
        self._encodings.release()
        if not self._encodings.attempts:
            self._media.consumed()

    async def _first(self, before: list[asyncio.Task[None]], decode: AsyncGenerator[Event, None]) -> Event:
        """The decode leg's first event; whichever leg fails before raises."""
        first = asyncio.create_task(_next(decode))
        waiting: set[asyncio.Task[Any]] = {first, *before}
        try:
            while not first.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {first}:
                    task.result()  # raises what that leg failed with
            return await first
        except EngineError as error:
            if error.role != "decode" and not error.started:
                self._decode.has_nothing_to_lose()
            raise
        finally:
            await _ended([first])


def _nothing() -> None:
    return None


async def _next(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


async def _drained(events: AsyncGenerator[Event, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _ended(tasks: "Sequence[asyncio.Task[Any]]", patience_s: float = 0.0) -> None:
    """Cancel them, after a while, and wait for their end; what they raise was seen, or comes too late to matter."""
    try:
        if patience_s:
            await asyncio.wait(tasks, timeout=patience_s)
    finally:
        for task in tasks:
            task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if patience_s and isinstance(end, EngineError):
            log.info("worker %s: its %s leg failed when the answer was there: %s", end.worker, end.role, end)


Legs = PrefillFirst | Together


def legs_of(
    pair: Pair, request: EngineRequest, around: Around, media: MediaWatch, encoders: Sequence[Worker] = ()
) -> Legs:
    """As the pair's engine wants them.  `encoders`: the encode worker of every item, in prompt order."""
    assert pair.prefill.client is not None
    if pair.prefill.client.pairing == "prefill_first":
        return PrefillFirst(pair, request, around, media)
    return Together(pair, request, around, media, encoders)
