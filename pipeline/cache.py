"""Pixels once: a tensor that is there, or being made for another request, is not made again.

Theory of operation.  An `Entry` is one picture's tensor: where it lies, the task that makes it, how many requests use
it. Its `Key` is everything the bytes depend on: content hash, the whole encode job less its places (so model, settings,
hints, measured shape, form), and the kind of place: a span of the output arena, or a segment of
either kind.

    (nobody) ──begin──▶ being made ──done, cache on, room──▶ kept ──oldest, or somebody needs the room──▶ given up
                            ├──────done, else─────────────────────────────────────────────────────────────▶ given up
                            └──failed, or the last request left: the job is withdrawn─────────────────────▶ given up

* A request *joins* an entry and leaves it when its media custody ends.  The job belongs to the entry and not to the
  request that came first: it goes on as long as one request waits for it, and a failure is told to all who wait; a
  later request tries again.
* An entry owns its place: a lease, or a use of a segment.  Whoever reads the bytes has a pin or a use of its own, so an
  entry can be given up at any moment; its place is free when the last reader has gone ("drains first").  Nobody writes
  to a place after its job has ended, as long as anybody has it.
* The cache has no memory of its own: kept entries lie in the arena and among the segments, so they give way.  Before a
  request waits for spans every entry that nobody uses goes, oldest first, until they fit; when they do not, all
  entries go, used or not, and none is kept as long as anybody waits: the arena is then served exactly as without a
  cache.  Segments: those nobody uses go until there is room.  Kept segments never exceed half of the cap, so that
  tensors that must be copied into a segment later still find one.

Everything here runs on the event loop and is synchronous, but for the waiting.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.jobs import Encode, Encoded, FileSink, Sink, SpanSink
from pipeline.metrics import Metrics
from pool.arena import Arena
from pool.segment import Segment
from pool.segments import SegmentStore
from pool.spans import Lease, Span

Release = Callable[[bool], object]
"""Ends a hold on something a job uses; the argument: whether the job has ended well."""


class Key(NamedTuple):
    """`recipe`: the encode job without item and places, as bytes.  `handed_on`: in a file that may be."""

    content_hash: str
    recipe: bytes
    in_file: bool
    handed_on: bool = False

    @classmethod
    def of(cls, content_hash: str, job: Encode, *, in_file: bool) -> "Key":
        recipe = msgspec.structs.replace(job, item=0, source=Span(0, 0), sinks=())
        return cls(content_hash, msgspec.msgpack.encode(recipe), in_file)


class InSpan:
    """A place in the output arena: a lease of one span."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.nbytes = lease.nbytes

    @property
    def sink(self) -> Sink:
        return SpanSink(self.lease.spans[0])

    def give_up(self, is_whole: bool) -> None:
        self.lease.release()


class InFile:
    """A place among the segments: a use of one, in which the tensor's `size` bytes begin at `offset`."""

    def __init__(self, segment: Segment, size: int, offset: int = 0) -> None:
        self.segment = segment
        self.size = size
        self.offset = offset
        self.nbytes = segment.capacity

    @property
    def sink(self) -> Sink:
        return FileSink(self.segment.name, self.segment.nbytes, self.offset, self.size)

    def give_up(self, is_whole: bool) -> None:
        self.segment.settle(consumed=is_whole)


class Entry:
    """A tensor that is kept or being made.  `users`: requests that have joined; `is_keepable`: may outlive them."""

    def __init__(
        self, key: Key, place: InSpan | InFile, making: asyncio.Task[Encoded], holds: Sequence[Release], keepable: bool
    ) -> None:
        self.key = key
        self.place = place
        self.making = making
        self.holds = holds
        self.is_keepable = keepable
        self.users = 0

    async def made(self) -> Encoded:
        """Wait until the bytes are there; raises what the job raised.  To be cancelled in here does the job no harm."""
        return await asyncio.shield(self.making)

    @property
    def has_failed(self) -> bool:
        return self.making.done() and (self.making.cancelled() or self.making.exception() is not None)


class PixelCache:
    """`limit_bytes`: most bytes kept, 0 for none (what is being made is shared all the same); `segment_bytes`: most of
    them in segments.
    """

    def __init__(
        self, limit_bytes: int, segment_bytes: int, outputs: Arena, segments: SegmentStore, metrics: Metrics
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._segment_limit = min(limit_bytes, segment_bytes)
        self._segment_bytes = 0
        self._outputs = outputs
        self._segments = segments
        self._metrics = metrics
        self._kept: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self._making: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._kept))

    def may_keep(self, nbytes: int, *, in_file: bool) -> bool:
        return 0 < nbytes <= (self._segment_limit if in_file else self.limit_bytes)

    # -- entries

    def find(self, key: Key) -> Entry | None:
        """An entry to join, at once: it may be given up at the next turn of the loop."""
        entry = self._making.get(key)
        if entry is not None:
            return None if entry.has_failed else entry
        entry = self._kept.get(key)
        if entry is not None:
            self._kept.move_to_end(key)
        return entry

    def begin(
        self,
        key: Key,
        place: InSpan | InFile,
        work: Coroutine[Any, Any, Encoded],
        holds: Sequence[Release],
        *,
        keepable: bool = True,
    ) -> Entry:
        """A new entry, which owns `place` from now on; to be joined at once.

        `work` makes the bytes; `holds` are ended when it has ended.
        """
        making = asyncio.get_running_loop().create_task(work)
        entry = self._making[key] = Entry(key, place, making, holds, keepable)
        making.add_done_callback(lambda _: self._ended(entry))
        return entry

    def join(self, entry: Entry) -> Callable[[], None]:
        """One more request uses the entry; call what is returned once, when it does not any more."""
        entry.users += 1

        def leave() -> None:
            entry.users -= 1
            if not entry.users and not entry.making.done():
                self._making.pop(entry.key, None)
                entry.making.cancel()

        return leave

    def note(self, model: str, found: Entry | None) -> None:
        """Count one look-up of a picture."""
        if found is not None and self._making.get(found.key) is found:
            self._metrics.pixels_shared(model)
        elif self.limit_bytes:
            self._metrics.pixel_cache_asked(model, found is not None)

    def _ended(self, entry: Entry) -> None:
        is_whole = not entry.has_failed
        if self._making.get(entry.key) is entry:
            del self._making[entry.key]
        for end in entry.holds:
            end(is_whole)
        if is_whole and self._has_place_for(entry):
            self._keep(entry)
        else:
            entry.place.give_up(is_whole)

    # -- what is kept

    def _has_place_for(self, entry: Entry) -> bool:
        in_file = entry.key.in_file
        if not entry.is_keepable or not self.may_keep(entry.place.nbytes, in_file=in_file):
            return False
        return entry.key not in self._kept and (in_file or not self._outputs.waiting)

    def _keep(self, entry: Entry) -> None:
        self._kept[entry.key] = entry
        self._count(entry, entry.place.nbytes)
        while self._segment_bytes > self._segment_limit:
            self._evict(next(kept for kept in self._kept.values() if kept.key.in_file))
        while self.used_bytes > self.limit_bytes:
            self._evict(next(iter(self._kept.values())))

    def _evict(self, entry: Entry) -> None:
        del self._kept[entry.key]
        self._count(entry, -entry.place.nbytes)
        entry.place.give_up(True)
        self._metrics.pixel_cache_evicted()

    def _count(self, entry: Entry, nbytes: int) -> None:
        self.used_bytes += nbytes
        if entry.key.in_file:
            self._segment_bytes += nbytes

    def _evict_unused(self, *, in_file: bool) -> bool:
        """Give up the oldest entry of that kind that nobody uses; False when there is none."""
        for entry in self._kept.values():
            if entry.key.in_file is in_file and not entry.users:
                self._evict(entry)
                return True
        return False

    # -- room for new tensors

    def try_spans(self, sizes: Sequence[int]) -> tuple[Lease, ...] | None:
        """A lease for each size, or None when they have to be waited for.  Raises ArenaTooSmall."""
        while True:
            lease = self._outputs.try_reserve(sizes)
            if lease is not None:
                return lease.split()
            if not self._evict_unused(in_file=False):
                return None

    async def spans(self, sizes: Sequence[int]) -> tuple[Lease, ...]:
        """A lease for each size, waited for; raises ArenaTooSmall.  The caller must hold no span meanwhile."""
        leases = self.try_spans(sizes)
        if leases is not None:
            return leases
        for entry in [entry for entry in self._kept.values() if not entry.key.in_file]:
            self._evict(entry)
        return (await self._outputs.reserve(sizes)).split()

    def idle_segment(self, nbytes: int) -> Segment | None:
        """One that may be handed on, of the caller's, when there is one at hand."""
        return self._segments.take_idle(nbytes)

    async def segment(self, nbytes: int) -> Segment | None:
        """A segment of the caller's, or None when there is no room: the tensor goes inline then."""
        if nbytes <= self._segments.cap_bytes:
            while not self._segments.has_room(nbytes) and self._evict_unused(in_file=True):
                pass
        segment = await self._take(nbytes)
        if segment is None and self._evict_unused(in_file=True):  # a full /dev/shm
            while self._evict_unused(in_file=True):
                pass
            segment = await self._take(nbytes)
        return segment

    async def _take(self, nbytes: int) -> Segment | None:
        if self._segments.idle_bytes >= nbytes:
            return self._segments.take(nbytes)
        # a new file: its pages are reserved now, which takes 12 ms for 50 MB
        taking = asyncio.ensure_future(asyncio.to_thread(self._segments.take, nbytes))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_settle_unused)
            raise

    def close(self) -> None:
        """Give everything up; jobs under way are withdrawn.  Before the segments are closed."""
        for entry in list(self._kept.values()):
            self._evict(entry)
        for entry in list(self._making.values()):
            entry.making.cancel()


def _settle_unused(taking: "asyncio.Future[Segment | None]") -> None:
    segment = taking.result() if not taking.cancelled() else None
    if segment is not None:
        segment.settle(consumed=True)  # nobody has written to it
