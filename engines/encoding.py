"""Encode legs (TokenSpeed): every media item's pixels to an encode worker, which sends the embeddings to the prefill
worker.

Rule: an encode leg is an attempt of a request that has one item.  Its answer only says that the item was accepted, so
what it placed in shared memory stays until the prefill worker has begun to answer (`release`); then every item was
encoded.  A prefill worker that knows the items already may do so before they were accepted, or even sent, so the
request's tensors are free when both have happened to all.  A leg that fails before ends the whole attempt, for the
prefill leg would wait in vain.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from engines.attempt import Attempt, Surroundings, uuid7
from engines.base import EngineRequest
from engines.leg import Leg
from engines.pairs import in_prompt_order, meeting_at
from engines.scatter import Drain
from engines.worker import Worker


class MediaWatch(Protocol):
    """Who is told about the request's tensors; see `engines.attempt.Attempt`."""

    def reading(self, drain: Drain) -> None: ...

    def read(self) -> None: ...

    def consumed(self) -> None: ...


class Encodings:
    """The encode legs of one request; none when `workers` (one for every item, in prompt order) is empty.

    `meetings`: where the prefill worker finds each item.  `begin` gives a task for every one of `attempts`, which ends
    after `release`, or raises before.
    """

    def __init__(
        self, request: EngineRequest, workers: Sequence[Worker], around: Surroundings, media: MediaWatch
    ) -> None:
        self.meetings = tuple(meeting_at(worker) for worker in workers)
        self._released = asyncio.Event()
        self._media = media
        self._unread = self._unfinished = len(workers)
        alone = _one_by_one(request) if workers else ()
        self.attempts = [
            Attempt(
                worker,
                msgspec.structs.replace(item, leg=Leg("encode", meeting=meeting)),
                around,
                reading=media.reading,
                read=self._read,
                attempt_id=f"encode-{uuid7()}",
            )
            for worker, item, meeting in zip(workers, alone, self.meetings, strict=True)
        ]

    @property
    def send_s(self) -> float:
        return max((attempt.send_s for attempt in self.attempts), default=0.0)

    def begin(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._encode(attempt)) for attempt in self.attempts]

    def release(self) -> None:
        self._released.set()

    async def _encode(self, attempt: Attempt) -> None:
        async with aclosing(attempt.events()) as events:
            async for _ in events:
                await self._released.wait()
                self._finished()

    def _finished(self) -> None:
        """One item was accepted, and the prefill worker has begun to answer."""
        self._unfinished -= 1
        if self._unfinished == 0:
            self._media.consumed()

    def _read(self) -> None:
        """One item was taken; the backlog's room is given back when all of them are."""
        self._unread -= 1
        if self._unread == 0:
            self._media.read()


def _one_by_one(request: EngineRequest) -> list[EngineRequest]:
    """The request with one item each, in prompt order."""
    found = []
    for item in in_prompt_order(request):
        (batch,) = [batch for batch in request.media if any(one is item for one in batch.items)]
        alone = msgspec.structs.replace(batch, items=(item,), segment=None)
        found.append(msgspec.structs.replace(request, media=(alone,)))
    return found
