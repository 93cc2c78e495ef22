"""Several streams of events as one, in the order they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from engines.base import Event

_AHEAD = 16  # events that wait for a reader who is slower than the engines


async def merged(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """The first stream to fail ends them all, with its error; whoever leaves early ends them too."""
    events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_AHEAD)

    async def pump(stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await events.put(event)
        except Exception as error:
            await events.put(error)
        else:
            await events.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            event = await events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()  # one whose task never began
