"""One fetch for requests that need the same URL at the same time.

Rule: sharing may save a fetch and never costs an answer.  Shared is only what is the same in everything that decides
whether and how it is fetched: the URL to the letter, the modality, the largest size, and whether the request came
from outside (so what one policy lets in serves nobody of the stricter one).  Every request accounts for the bytes as if
they were its own; one that has no room is refused alone.  A request that leaves stops nothing as long as another waits.
A request that came second and is told of a failure fetches for itself with what is left of its time: the failure may
have to do with a connection, or with a clock, that began before it came.

A fetch is shared from its first look-up to its last byte, not longer: what was fetched is not kept.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

from engines.base import Modality
from pipeline.address import MediaHostPolicy
from pipeline.errors import GatewayError
from pipeline.fetch import Fetched, Fetcher, Resolve

Account = Callable[[int], None]

_LEAST_SHARE = 0.5  # of the time for a fetch that must be left for one of its own to make sense


class _Key(NamedTuple):
    url: str
    modality: Modality
    max_bytes: int
    deadline_s: float
    outside: bool


class _Reader:
    """One request that waits.  `accounted`: bytes its own account has been told of."""

    def __init__(self, account: Account | None) -> None:
        self._account = account
        self.accounted = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrived(self, total: int) -> None:
        """Account for what has arrived in all; raises what the account raises."""
        nbytes = total - self.accounted
        if nbytes > 0 and self._account is not None:
            self._account(nbytes)
        self.accounted = max(total, self.accounted)

    def again(self) -> Account:
        """The account of a further fetch, whose first bytes are accounted for already."""
        total = 0

        def account(nbytes: int) -> None:
            nonlocal total
            total += nbytes
            self.arrived(total)

        return account


class _Fetch:
    """A fetch under way and who waits for it."""

    task: asyncio.Task[Fetched]

    def __init__(self) -> None:
        self.nbytes = 0
        self.readers: list[_Reader] = []

    def join(self, account: Account | None) -> _Reader:
        """Raises what the account raises on the bytes that are here."""
        reader = _Reader(account)
        reader.arrived(self.nbytes)
        self.readers.append(reader)
        return reader

    def arrived(self, nbytes: int) -> None:
        """A reader that has no room is told and goes; when nobody is left the fetch stops."""
        self.nbytes += nbytes
        for reader in list(self.readers):
            try:
                reader.arrived(self.nbytes)
            except GatewayError as error:
                self.readers.remove(reader)
                if not reader.ended.done():
                    reader.ended.set_exception(error)
                if not self.readers:
                    raise

    def leave(self, reader: _Reader) -> None:
        if reader in self.readers:
            self.readers.remove(reader)
        if reader.ended.done() and not reader.ended.cancelled():
            reader.ended.exception()  # looked at, also when the request was cancelled at the same moment

    def tell(self) -> None:
        """It has ended, one way or the other."""
        if not self.task.cancelled():
            self.task.exception()
        for reader in self.readers:
            if not reader.ended.done():
                reader.ended.set_result(None)


class _Failure(NamedTuple):
    error: GatewayError
    reader: _Reader


class SharingFetcher(Fetcher):
    """A Fetcher whose `fetch` is shared; `saved` is called for each fetch that was not necessary."""

    def __init__(
        self,
        policy: MediaHostPolicy,
        *,
        version: str,
        slots: int = 128,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(policy, version=version, slots=slots, resolve=resolve, tls=tls)
        self._saved = saved
        self._running: dict[_Key, _Fetch] = {}

    async def fetch(
        self,
        url: str,
        *,
        modality: Modality,
        max_bytes: int,
        deadline_s: float = 10.0,
        outside: bool = False,
        slots: asyncio.Semaphore | None = None,
        account: Account | None = None,
    ) -> Fetched:
        """As `Fetcher.fetch`.  The pieces may be those of other requests as well: nobody changes them."""
        key = _Key(url, modality, max_bytes, deadline_s, outside)
        async with slots or contextlib.nullcontext():
            running = self._running.get(key)
            is_first = running is None
            running = running or self._begin(key)
            came = time.monotonic()
            fetched = await self._wait(key, running, account)
            if isinstance(fetched, Fetched):
                if not is_first:
                    self._saved()
                return fetched
            failure, reader = fetched
            left_s = deadline_s - (time.monotonic() - came)
            if is_first or left_s < _LEAST_SHARE * deadline_s:
                raise failure
            return await super().fetch(
                url,
                modality=modality,
                max_bytes=max_bytes,
                deadline_s=left_s,
                outside=outside,
                account=reader.again(),
            )

    async def close(self) -> None:
        """As `Fetcher.close`; what is being fetched is cut."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    def _begin(self, key: _Key) -> _Fetch:
        running = self._running[key] = _Fetch()
        running.task = asyncio.get_running_loop().create_task(
            super().fetch(
                key.url,
                modality=key.modality,
                max_bytes=key.max_bytes,
                deadline_s=key.deadline_s,
                outside=key.outside,
                account=running.arrived,
            )
        )
        running.task.add_done_callback(lambda _: self._ended(key, running))
        return running

    async def _wait(self, key: _Key, running: _Fetch, account: Account | None) -> "Fetched | _Failure":
        """Raises what the request's own account raises."""
        reader = running.join(account)
        try:
            await reader.ended
        finally:
            running.leave(reader)
            if not running.readers and not running.task.done():
                self._forget(key, running)
                running.task.cancel()
        error = running.task.exception()
        if error is None:
            return running.task.result()
        if not isinstance(error, GatewayError):
            raise error
        return _Failure(error, reader)

    def _ended(self, key: _Key, running: _Fetch) -> None:
        self._forget(key, running)
        running.tell()

    def _forget(self, key: _Key, running: _Fetch) -> None:
        if self._running.get(key) is running:
            del self._running[key]
