"""Spans of the shared mapping and the leases that own them.

Theory of operation.  A span is a run of bytes in an arena (`arena.py`).  It is in one of four states, and only the
frontend moves it; a pool process reads and writes the bytes of spans that a job names and never knows who owns them.

    free ──reserve──▶ held ──release──▶ draining ──last pin gone──▶ free
                       └──────release without pins──────────────────▶ free
    free ──(above the high-water mark, unused for a while)──▶ given back ──reserve──▶ held

* free → held: the arena, for all spans of a request together, in the order of asking.  Nobody overtakes, so a request
  that holds its spans never waits for another one and a large request is not starved by small ones.
* held: the lease's owner, one request, may read and write.  Whoever else uses the bytes, a job in a pool process or
  buffers of a socket, holds a pin: `Lease.pin` returns the call that ends it.  Pins can only be made while the lease
  is held.
* held → draining: the owner calls `release`, exactly once, whatever happened (answered, client gone, engine dead).
* draining → free: the last pin is gone.  The bytes are not handed to another request before that, else its pixels
  would go out on this request's connection or a pool process would write into them.
* free → given back: the arena's timer; given-back spans are free spans without pages.

Nothing here waits; `Span` is part of jobs, so this module knows no event loop.
"""

import bisect
import warnings
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pool.mapping import Mapping, round_up


class Span(msgspec.Struct, frozen=True):
    """`nbytes` bytes of the shared mapping from `offset` on."""

    offset: int
    nbytes: int


class ArenaTooSmall(Exception):
    """More was asked for than the arena holds in all (`needed` > `size`, bytes): waiting would never end."""

    def __init__(self, needed: int, size: int) -> None:
        super().__init__(f"{needed} bytes do not fit into an arena of {size} bytes")
        self.needed = needed
        self.size = size


class LeaseError(Exception):
    """A lease was released twice, used after its release, or a pin was ended twice: a mistake in the calling code."""


class Lease:
    """Owns the spans of one request until `release`; made by an arena.

    `nbytes` is what it takes from the arena, rounding included.
    """

    __slots__ = ("_is_released", "_mapping", "_pins", "_reclaim", "nbytes", "spans")

    def __init__(
        self, mapping: Mapping, spans: Sequence[Span], nbytes: int, reclaim: Callable[[Sequence[Span]], None]
    ) -> None:
        self.spans = tuple(spans)
        self.nbytes = nbytes
        self._mapping = mapping
        self._reclaim = reclaim
        self._pins = 0
        self._is_released = False

    @property
    def pins(self) -> int:
        return self._pins

    @property
    def is_released(self) -> bool:
        return self._is_released

    def view(self, index: int = 0) -> memoryview:
        """Writable bytes of span `index`.  Whoever keeps the view beyond `release` must hold a pin."""
        if self._is_released:
            raise LeaseError("the lease was released")
        span = self.spans[index]
        return self._mapping.view(span.offset, span.nbytes)

    def pin(self) -> Callable[[], None]:
        """Somebody else uses the bytes from now on; call what is returned exactly once when that has ended."""
        if self._is_released:
            raise LeaseError("a released lease takes no new pins")
        self._pins += 1
        is_ended = False

        def unpin() -> None:
            nonlocal is_ended
            if is_ended:
                raise LeaseError("a pin was ended twice")
            is_ended = True
            self._pins -= 1
            self._drain()

        return unpin

    def release(self) -> None:
        """The owner has done with the spans; they return to the arena now or when the last pin is gone."""
        if self._is_released:
            raise LeaseError("the lease was released twice")
        self._is_released = True
        self._drain()

    def split(self) -> "tuple[Lease, ...]":
        """A lease for each span, in order, in place of this one, which is released; only while nothing is pinned."""
        if self._is_released or self._pins:
            raise LeaseError("only a lease that is held and has no pins can be split")
        self._is_released = True
        return tuple(Lease(self._mapping, [span], round_up(max(span.nbytes, 1)), self._reclaim) for span in self.spans)

    def _drain(self) -> None:
        if self._is_released and self._pins == 0:
            self._reclaim(self.spans)

    def __del__(self) -> None:
        if not self._is_released or self._pins:
            warnings.warn(f"{self.nbytes} leased bytes are lost: nobody released them", ResourceWarning, stacklevel=1)


class Extents:
    """A set of byte ranges, sorted, disjoint and coalesced."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(tuple(zip(self._starts, self._ends, strict=True)))

    def __bool__(self) -> bool:
        return bool(self._starts)

    @property
    def nbytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Put `start` .. `end` in; neighbours and overlaps become one range."""
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def discard(self, start: int, end: int) -> None:
        """Take `start` .. `end` out, as far as it is in."""
        if start >= end:
            return
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._starts, end)
        if first >= last:
            return
        left, right = self._starts[first], self._ends[last - 1]
        rest = [(a, b) for a, b in ((left, start), (end, right)) if a < b]
        self._starts[first:last] = [a for a, _ in rest]
        self._ends[first:last] = [b for _, b in rest]

    def lowest(self, nbytes: int) -> int | None:
        """Where the lowest range of at least `nbytes` begins."""
        for start, end in zip(self._starts, self._ends, strict=True):
            if end - start >= nbytes:
                return start
        return None
