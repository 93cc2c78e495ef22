"""One text for both kinds of client: an official SDK's synchronous client and its asynchronous one.

A test says `await side.of(client.method(...))` and `await side.events(stream)`; what is awaited decides how it is done.
"""

import inspect
from collections.abc import AsyncIterable, Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def of(value: "T | Awaitable[T]") -> T:
    """What a client's method gave, or will give."""
    if inspect.isawaitable(value):
        return await value
    return value  # type: ignore[return-value]


async def events(stream: "Iterable[T] | AsyncIterable[T]") -> list[T]:
    """All that a stream has still to tell."""
    if isinstance(stream, AsyncIterable):
        return [event async for event in stream]
    return list(stream)


class opened:
    """`async with` for a client's stream manager of either kind."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def __aenter__(self) -> Any:
        if hasattr(self._manager, "__aenter__"):
            return await self._manager.__aenter__()
        return self._manager.__enter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        if hasattr(self._manager, "__aexit__"):
            await self._manager.__aexit__(*exc_info)
        else:
            self._manager.__exit__(*exc_info)
