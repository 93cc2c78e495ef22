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
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from engines.attempt import Attempt, Surroundings, uuid7
from engines.base import EngineError, EngineRequest, Event, Finished
from engines.handover import bootstrap_address, decode_request, handover, prefill_request
from engines.leg import Handoff, Leg, Meeting
from engines.merge import merged
from engines.pairs import Pair
from engines.scatter import Drain
from engines.worker import Worker

log = logging.getLogger(__name__)

LAST_PREFILL_WORD_S = 2.0
"""How long a prefill leg may go on when the answer is complete."""


class MediaWatch(Protocol):
    """Who is told about the request's tensors; see `engines.attempt.Attempt`."""

    def reading(self, drain: Drain) -> None: ...

    def read(self) -> None: ...

    def consumed(self) -> None: ...


class PrefillFirst:
    """`events` may be iterated once more when `may_decode_again`, after `decode_on`."""

    def __init__(self, pair: Pair, request: EngineRequest, around: Surroundings, media: MediaWatch) -> None:
        self.pair = pair
        self.send_s = 0.0
        self.may_decode_again = False  # the prefill leg is done, and no decode worker has seen what it handed over
        self._request = request
        self._around = around
        self._media = media
        self._id = f"{request.request_id}-{uuid7()}"  # the same on both legs: some connectors go by it
        self._way = handover(pair.prefill, request.sampling.n, f"xfer-{uuid7()}")
        self._handoff: Handoff | None = None

    def decode_on(self, worker: Worker) -> None:
        self.pair = Pair(self.pair.prefill, worker)

    async def events(self) -> AsyncGenerator[Event, None]:
        if not self.may_decode_again:
            await self._prefill()
        self.may_decode_again = False
        request = decode_request(self._request, self._way, self._handoff, self.pair.decode)
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
        async with aclosing(attempt.events()) as events:
            async for event in events:
                if isinstance(event, Finished):
                    self._handoff = event.handoff
        self.send_s = attempt.send_s
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

    def __init__(self, pair: Pair, request: EngineRequest, around: Surroundings, media: MediaWatch) -> None:
        self.pair = pair
        self._around = around
        attempt_id = f"{request.request_id}-{uuid7()}"
        choices = request.sampling.n
        self._couples = [
            _Couple(pair, one, around, media, one_id)
            for one, one_id in (
                [(request, attempt_id)] if choices == 1 or request.media else _one_by_one(request, attempt_id)
            )
        ]

    @property
    def send_s(self) -> float:
        return max(couple.send_s for couple in self._couples)

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
    """One prefill and one decode leg under way at once."""

    def __init__(
        self, pair: Pair, request: EngineRequest, around: Surroundings, media: MediaWatch, attempt_id: str
    ) -> None:
        self._around = around
        meeting = _meeting(pair.prefill)
        self._prefill = Attempt(
            pair.prefill,
            msgspec.structs.replace(request, leg=Leg("prefill", meeting=meeting)),
            around,
            reading=media.reading,
            read=media.read,
            answered=media.consumed,
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
        return self._prefill.send_s

    async def events(self) -> AsyncGenerator[Event, None]:
        prefill = asyncio.create_task(_drained(self._prefill.events()))
        decode = self._decode.events()
        try:
            async with aclosing(decode):
                yield await self._first(prefill, decode)
                async for event in decode:
                    yield event
        finally:
            if self._decode.is_complete:
                self._around.in_background(_ended(prefill, LAST_PREFILL_WORD_S))
            else:
                await _ended(prefill)

    async def _first(self, prefill: asyncio.Task[None], decode: AsyncGenerator[Event, None]) -> Event:
        """The decode leg's first event; whichever leg fails before raises."""
        first = asyncio.create_task(_next(decode))
        try:
            await asyncio.wait({first, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                prefill.result()  # raises what the prefill leg failed with
            return await first
        except EngineError as error:
            if error.role == "prefill" and not error.started:
                self._decode.has_nothing_to_lose()
            raise
        finally:
            await _ended(first)


async def _next(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


async def _drained(events: AsyncGenerator[Event, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _ended(task: "asyncio.Task[Any]", patience_s: float = 0.0) -> None:
    """Cancel it, after a while, and wait for its end; what it raises was seen, or comes too late to matter."""
    try:
        if patience_s:
            await asyncio.wait({task}, timeout=patience_s)
    finally:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _meeting(prefill: Worker) -> Meeting:
    """A number nobody else has; an engine that places by it gets one that leads to the prefill worker's rank."""
    assert prefill.client is not None
    host, port = bootstrap_address(prefill)
    room = random.SystemRandom().randrange((1 << prefill.client.room_bits) - 1)
    size = prefill.labels.get("dp_size", "")
    if prefill.client.places_by_room and prefill.rank is not None and size.isdecimal() and room >= int(size):
        room += prefill.rank - room % int(size)
    return Meeting(host, port, room)


Legs = PrefillFirst | Together
_ORDERS: dict[str, Callable[[Pair, EngineRequest, Surroundings, MediaWatch], Legs]] = {
    "prefill_first": PrefillFirst,
    "together": Together,
}


def legs_of(pair: Pair, request: EngineRequest, around: Surroundings, media: MediaWatch) -> Legs:
    """As the pair's engine wants them."""
    assert pair.prefill.client is not None and pair.prefill.client.pairing is not None
    return _ORDERS[pair.prefill.client.pairing](pair, request, around, media)
