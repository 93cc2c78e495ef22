"""The allocator of spans: a region of the shared mapping, handed out in leases by the frontend alone.

Lowest free address first, so the touched part stays small and warm; free neighbours are joined; a request's spans
come together and first come, first served (`spans.py` has the theory).  Free pages above the high-water mark go back
to the kernel once nobody has used them for a while: a steady load keeps its pages, a rare giant's do not stay.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pool.mapping import PAGE, Mapping, round_up
from pool.spans import ArenaTooSmall, Extents, Lease, Span

logger = logging.getLogger(__name__)

# one callback gives back at most this much: 16 MiB cost about 3 ms of the loop's time
GIVE_BACK_BYTES = 16 << 20


class _Waiter(NamedTuple):
    sizes: tuple[int, ...]
    lease: asyncio.Future[Lease]


class Arena:
    """Bytes `start` .. `start + nbytes` of `mapping`; spans are aligned to pages.

    `keep_bytes`: the first so many bytes keep their pages; pages above are given back after being free for `linger_s`
    to twice that (needs a running loop; else `cool` has to be called).
    """

    def __init__(self, mapping: Mapping, start: int, nbytes: int, *, keep_bytes: int, linger_s: float = 2.0) -> None:
        if start % PAGE or start + nbytes > mapping.nbytes:
            raise ValueError(f"an arena of {nbytes} bytes at {start} does not fit into {mapping.nbytes} bytes of pages")
        self.size = nbytes // PAGE * PAGE
        self.used = 0
        self._mapping = mapping
        self._mark = start + keep_bytes
        self._linger_s = linger_s
        self._free = Extents()
        self._free.add(start, start + self.size)
        self._waiters: deque[_Waiter] = deque()
        self._warm = Extents()  # touched, above the mark, freed since the last tick
        self._cold = Extents()  # touched, above the mark, freed before it and not used since
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for spans."""
        return len(self._waiters)

    def __repr__(self) -> str:
        return f"<Arena {self.used} of {self.size} bytes used, {self.waiting} waiting>"

    async def reserve(self, sizes: Sequence[int]) -> Lease:
        """Spans of `sizes` bytes, all together; waits for its turn.

        ArenaTooSmall at once when they can never fit.  When the waiting is cancelled nothing is kept and the queue
        moves on.
        """
        lease = self.try_reserve(sizes)
        if lease is not None:
            return lease
        waiter = _Waiter(tuple(sizes), asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve()  # it may have been the one everybody waited behind
            elif not waiter.lease.cancelled():
                waiter.lease.result().release()
            raise

    def try_reserve(self, sizes: Sequence[int]) -> Lease | None:
        """As `reserve`, but None instead of waiting: there is no room, or somebody waits already."""
        needed = sum(self._extent(size) for size in sizes)
        if needed > self.size:
            raise ArenaTooSmall(needed, self.size)
        if self._waiters:
            return None
        return self._take(sizes)

    @staticmethod
    def _extent(nbytes: int) -> int:
        if nbytes < 0:
            raise ValueError(f"a span cannot have {nbytes} bytes")
        return round_up(max(nbytes, 1))

    def _take(self, sizes: Sequence[int]) -> Lease | None:
        taken: list[Span] = []
        for size in sizes:
            extent = self._extent(size)
            start = self._free.lowest(extent)
            if start is None:
                for span in taken:
                    self._free.add(span.offset, span.offset + self._extent(span.nbytes))
                return None
            self._free.discard(start, start + extent)
            taken.append(Span(start, size))
        nbytes = 0
        for span in taken:
            extent = self._extent(span.nbytes)
            nbytes += extent
            self._warm.discard(span.offset, span.offset + extent)
            self._cold.discard(span.offset, span.offset + extent)
        self.used += nbytes
        return Lease(self._mapping, taken, nbytes, self._reclaim)

    def _reclaim(self, spans: Sequence[Span]) -> None:
        for span in spans:
            end = span.offset + self._extent(span.nbytes)
            self.used -= end - span.offset
            self._free.add(span.offset, end)
            self._warm.add(max(span.offset, self._mark), end)
        self._serve()
        self._tick_later(self._linger_s)

    def _serve(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.lease.cancelled():  # its task has not run yet and will find itself gone
                self._waiters.popleft()
                continue
            lease = self._take(waiter.sizes)
            if lease is None:
                return
            self._waiters.popleft()
            waiter.lease.set_result(lease)

    def _tick_later(self, seconds: float) -> None:
        if self._ticking is not None or not (self._warm or self._cold):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._ticking = loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        is_done = self.cool()
        self._tick_later(self._linger_s if is_done else 0.0)

    def cool(self) -> bool:
        """Give back a slice of what was free at the last but one call; False when more of it is left."""
        budget = GIVE_BACK_BYTES
        for start, end in self._cold:
            end = min(end, start + budget)
            try:
                self._mapping.give_back(start, end - start)
            except OSError as error:
                logger.warning("pages cannot be given back: error=%r", str(error))
                self._cold = Extents()
                break
            self._cold.discard(start, end)
            budget -= end - start
            if not budget:
                break
        if self._cold:
            return False
        self._cold, self._warm = self._warm, Extents()
        return True
