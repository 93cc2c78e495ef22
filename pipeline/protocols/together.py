"""Several generations of one request, told as one: the events of each as they come, under choices of their own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Self

import msgspec

from engines.base import Event
from engines.generation import Generation
from engines.worker import Worker

AHEAD = 4  # events of each that wait for a client that reads slowly


class Together:
    """Like a Generation.  `choices`: how many each of them has; those of the second are numbered behind those of the
    first.  What goes wrong with one goes wrong with all.
    """

    def __init__(self, generations: Sequence[Generation], choices: int) -> None:
        self._generations = generations
        self._choices = choices
        self._waiting: asyncio.Queue[Event | Exception | None] = asyncio.Queue(AHEAD * len(generations))
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(generations)

    @property
    def worker(self) -> Worker | None:
        """Of the first, for logs; others may have gone elsewhere."""
        return self._generations[0].worker

    @property
    def taker(self) -> Worker | None:
        return self._generations[0].taker

    @property
    def send_s(self) -> float:
        return max(generation.send_s for generation in self._generations)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if not self._tasks:
            numbered = enumerate(self._generations)
            self._tasks = [asyncio.create_task(self._pass_on(at * self._choices, one)) for at, one in numbered]
        while self._left:
            found = await self._waiting.get()
            if isinstance(found, Exception):
                raise found
            if found is not None:
                return found
            self._left -= 1
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends them all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for generation in self._generations:
            await generation.aclose()

    async def _pass_on(self, first: int, events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                await self._waiting.put(msgspec.structs.replace(event, index=first + event.index))
        except Exception as error:
            await self._waiting.put(error)
        await self._waiting.put(None)
