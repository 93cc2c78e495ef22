"""Waiting for something that one object's own synchronous code brings about: it calls `check` whenever it has changed
something.
"""

import asyncio
from collections.abc import Callable


class Conditions:
    """Conditions that coroutines wait for; a condition is a function without side effects."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def met(self, condition: Callable[[], bool]) -> None:
        """Until `condition()` holds, also when it held for a moment only and does not any more: then wait again."""
        while not condition():
            entry = condition, asyncio.get_running_loop().create_future()
            self._waiting.append(entry)
            try:
                await entry[1]
            finally:
                self._waiting.remove(entry)

    def check(self) -> None:
        """Something has changed."""
        for condition, waiting in self._waiting:
            if not waiting.done() and condition():
                waiting.set_result(None)

    def fail(self, error: Exception) -> None:
        """Nothing will change any more: everybody who waits gets `error`."""
        for _, waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)
