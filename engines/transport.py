"""How each tensor travels to the chosen engine worker: inside the message, through a file in /dev/shm, or over RDMA.

Rule: shared memory is an offer, never a condition.  A tensor goes by segment when mode, worker and size allow it
(`reads_segments`, `shm_min_bytes`); whatever fails there is counted, logged, and the bytes go inline.  What a worker
can pull over RDMA (`engines.rdma`) and finds no slot goes by segment when the worker shares our /dev/shm, else inline.
The decision is made for every attempt anew, for the worker chosen for it.

Theory of operation.  `place` gives one attempt a `Placement`: the handles of the tensors that lie in segments.  A
tensor that a pool process already wrote into a segment has that one published under a fresh name; others, and for an
engine that keeps its files those in a segment that is not meant for that, are copied into segments of their own, which
the placement owns, as it does a use of its own of a segment that may be handed on: several attempts of one request may
have such a one, and each reader is done with it at another time.  A placement ends exactly once, by
`end(consumed=...)`: what it owns is settled; a segment of the caller stays the caller's, who settles it when
`engines.generation` says so, and only has its names withdrawn when the attempt failed.  File operations and copies run
in one thread of the transport, so that the event loop never waits.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from engines.base import Observer, SegmentStore, SharedSegment, Tensor
from engines.rdma import Lease, RdmaLane

log = logging.getLogger(__name__)

Mode = Literal["inline", "shm", "auto", "rdma"]
ResultT = TypeVar("ResultT")


class TransportSettings(msgspec.Struct, frozen=True):
    """The gateway-wide choice.

    `shm_min_bytes`: smallest tensor that goes by segment; 0 means every one.  `namespace`: our own /dev/shm
    (`shm_namespace`), compared with the worker's under `auto`.  `writable`: whether a probe file could be written at
    start.  `owner_id` ("smg:<pid of the gateway>") goes into every handle.
    """

    owner_id: str
    mode: Mode = "inline"
    shm_min_bytes: int = 65536
    namespace: str | None = None
    writable: bool = False


class TensorReader(Protocol):
    """What the decision needs to know of an engine worker; `engines.worker.Worker` is one.

    `keeps_segments`: it hands names on, so its answer does not tell that a file was last read: it takes only files that
    may be handed on.  `pulls_tensors`: it can read them over RDMA.
    `tensor_transport` and `shm_min_bytes` are the worker's own settings and win over the gateway's; None: not set.
    """

    @property
    def url(self) -> str: ...

    @property
    def runtime(self) -> str: ...

    @property
    def takes_segments(self) -> bool: ...

    @property
    def keeps_segments(self) -> bool: ...

    @property
    def tensor_transport(self) -> Mode | None: ...

    @property
    def shm_min_bytes(self) -> int | None: ...

    @property
    def pulls_tensors(self) -> bool: ...

    def shares_memory(self, namespace: str | None) -> bool: ...


class Outgoing(msgspec.Struct, frozen=True):
    """One tensor of a message.

    `key` names it within the message.  `segment`, when set, already holds exactly these bytes.  `inline_only`: never by
    segment.  `may_be_pulled`: its engine can read it over RDMA; `room`: the key it was promised there.
    """

    key: str
    tensor: Tensor
    segment: SharedSegment | None = None
    inline_only: bool = False
    may_be_pulled: bool = False
    room: int | None = None


class Handle(msgspec.Struct, frozen=True):
    """Where a reader finds a tensor: bare file name in /dev/shm, from offset 0."""

    name: str
    nbytes: int
    owner_id: str


class RemoteHandle(msgspec.Struct, frozen=True):
    """Where a reader finds a tensor over RDMA (`engines.rdma`)."""

    descriptor: bytes
    nbytes: int


Placed = Handle | RemoteHandle
Placements = Mapping[str, Placed]


class Placement:
    """The segments and RDMA slots of one attempt.

    `handles`: by key, for tensors that are not inline.  `published`: segments of the caller that got a name; `own`:
    those that are settled with the placement.  `leases`: slots, each with its generation.  Nobody but `Transport` makes
    or ends one.
    """

    def __init__(self, reader: str, *, keeps: bool = False) -> None:
        self.reader = reader
        self.keeps = keeps
        self.handles: dict[str, Placed] = {}
        self.leases: list[Lease] = []
        self.published: list[SharedSegment] = []
        self.own: list[SharedSegment] = []
        self.ended = False

    @property
    def is_unread(self) -> bool:
        """Whether the worker has still to read a segment or a slot."""
        if self.ended:
            return False
        segments = (*self.published, *self.own)
        return any(segment.is_unread for segment in segments) or any(lease.is_unread for lease in self.leases)


class Transport:
    """Decides and places; one for the whole gateway.  `store` may be None: nothing is ever written then; without a
    `lane` the mode rdma means inline.
    """

    def __init__(
        self,
        settings: TransportSettings,
        store: SegmentStore | None,
        observer: Observer,
        lane: RdmaLane | None = None,
    ) -> None:
        self._settings = settings
        self._lane = lane
        self._store = store
        self._observer = observer
        self._thread: ThreadPoolExecutor | None = None

    def reads_segments(self, worker: TensorReader) -> bool:
        """Whether this worker is given segments at all."""
        mode = self._mode(worker)
        if mode == "inline" or not self._settings.writable or not worker.takes_segments:
            return False
        if mode == "rdma" and not (self._lane is not None and worker.pulls_tensors):
            return False
        return mode == "shm" or worker.shares_memory(self._settings.namespace)

    def writes_ahead(self, worker: TensorReader) -> bool:
        """Whether pool processes should write its tensors into segments, before a worker is chosen.  Not where RDMA
        slots come first: those are filled from the mapping.
        """
        return self.reads_segments(worker) and self._mode(worker) != "rdma"

    def min_bytes(self, worker: TensorReader) -> int:
        return self._settings.shm_min_bytes if worker.shm_min_bytes is None else worker.shm_min_bytes

    async def place(self, tensors: Sequence[Outgoing], worker: TensorReader) -> Placement:
        """Publish or write what goes by segment to `worker`; count every tensor with the path it takes.

        When this is cancelled the bytes are not read any more after it has returned, and nothing stays published.
        """
        placement = Placement(worker.url, keeps=worker.keeps_segments)
        pulled = self._leased(placement, tensors, worker)
        chosen = self._by_segment([out for out in tensors if out.key not in placement.handles], worker)
        if pulled or chosen:
            failures = await self._place(placement, pulled, chosen)
            for key, reason in failures:
                log.warning("tensor %s goes inline to %s: %s", key, worker.runtime, reason)
                self._observer.segment_failed(worker.runtime)
        for outgoing in tensors:
            path = _PATHS[type(placement.handles.get(outgoing.key))]
            self._observer.tensor_sent(worker.runtime, path, outgoing.tensor.nbytes)
        return placement

    async def end(self, placement: Placement, *, consumed: bool) -> None:
        """The attempt needs its names no longer; a second call does nothing.

        `consumed`: the engine's first response has arrived, so no reader is at work any more.
        """
        if placement.ended:
            return
        placement.ended = True
        if consumed:  # else a reader may be at work, and its slots wait for its word
            for lease in placement.leases:
                lease.release()
        if placement.own or (placement.published and not consumed):
            await self._in_thread(lambda: _end(placement, consumed))

    def close(self) -> None:
        """Waits for nothing; call it when no placement is open any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _by_segment(self, tensors: Sequence[Outgoing], worker: TensorReader) -> list[Outgoing]:
        if not self.reads_segments(worker):
            return []
        if self._mode(worker) == "rdma":  # instead of a slot
            tensors = [out for out in tensors if out.may_be_pulled]
        least = max(self.min_bytes(worker), 1)  # an empty tensor has nothing to put into a file
        return [out for out in tensors if not out.inline_only and out.tensor.nbytes >= least]

    def _mode(self, worker: TensorReader) -> Mode:
        return worker.tensor_transport or self._settings.mode

    def _leased(
        self, placement: Placement, tensors: Sequence[Outgoing], worker: TensorReader
    ) -> list[tuple[Lease, Outgoing]]:
        """Slots for what this worker pulls by itself, as far as there are any; they are still to be filled."""
        if self._lane is None or self._mode(worker) != "rdma" or not worker.pulls_tensors:
            return []
        found = []
        for outgoing in tensors:
            lease = self._lane.lease(outgoing.tensor.nbytes, outgoing.room) if outgoing.may_be_pulled else None
            if lease is not None:
                found.append((lease, outgoing))
                placement.leases.append(lease)
                placement.handles[outgoing.key] = RemoteHandle(lease.descriptor, outgoing.tensor.nbytes)
            elif outgoing.may_be_pulled:
                log.info("tensor %s: too large for an RDMA slot, or none is free", outgoing.key)
        return found

    async def _place(
        self, placement: Placement, pulled: Sequence[tuple[Lease, Outgoing]], chosen: Sequence[Outgoing]
    ) -> list[tuple[str, str]]:
        def place() -> list[tuple[str, str]]:
            for lease, outgoing in pulled:
                lease.fill(outgoing.tensor.buffers)
            return self._place_now(placement, chosen)

        try:
            return await self._in_thread(place)
        except asyncio.CancelledError:
            for lease in placement.leases:
                lease.release()  # nobody was told of them
            await self.end(placement, consumed=False)
            raise

    def _place_now(self, placement: Placement, chosen: Sequence[Outgoing]) -> list[tuple[str, str]]:
        failures = []
        for outgoing in chosen:
            try:
                name = self._publish(placement, outgoing)
            except OSError as error:
                failures.append((outgoing.key, str(error)))
                continue
            if name is None:
                failures.append((outgoing.key, "no room in shared memory"))
                continue
            placement.handles[outgoing.key] = Handle(name, outgoing.tensor.nbytes, self._settings.owner_id)
        return failures

    def _publish(self, placement: Placement, outgoing: Outgoing) -> str | None:
        written = outgoing.segment
        if written is not None and written.is_handed_on:
            placement.own.append(written.share())
            return placement.own[-1].publish()
        if written is not None and not placement.keeps:
            placement.published.append(written)
            return written.publish()
        segment = (
            self._store.write(outgoing.tensor.buffers, handed_on=placement.keeps) if self._store is not None else None
        )
        if segment is None:
            return None
        placement.own.append(segment)
        return segment.publish()

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` to its end in the transport's thread, also when the caller is cancelled meanwhile."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segments")
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            running.exception()  # fetched: nobody else will
            raise cancelled
        return running.result()


_PATHS = {Handle: "shm", RemoteHandle: "remote", type(None): "inline"}


def _end(placement: Placement, consumed: bool) -> None:
    if not consumed:
        for segment in placement.published:
            _quietly(segment.withdraw)
    for segment in placement.own:
        _quietly(partial(segment.settle, consumed=consumed, reader=placement.reader))


def _quietly(work: Callable[[], None]) -> None:
    """One segment that cannot be removed must not keep the others: say so and go on."""
    try:
        work()
    except OSError as error:
        log.warning("a segment could not be removed: %s", error)


def shm_namespace(directory: str = "/dev/shm") -> str | None:
    """This host's shared memory as workers advertise theirs: boot id, then the device of the tmpfs.  Reads files: call
    it at start.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat(directory).st_dev}"
    except OSError:
        return None
