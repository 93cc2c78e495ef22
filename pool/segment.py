"""One request's use of a file of the segment store: written, published under names for readers, settled.

`pool.segments` has the theory, and decides what becomes of the file.
"""

import os
from collections.abc import Sequence
from typing import Protocol

from pool.shm_directory import MasterFile, ShmDirectory

_MOST_BUFFERS = 1024  # IOV_MAX


class Owner(Protocol):
    """What a segment tells its store."""

    def begin_use(self, file: MasterFile) -> None: ...

    def end_use(self, file: MasterFile, *, is_spent: bool, is_read: bool) -> None: ...

    def recycles(self, reader: str | None) -> bool: ...

    def distrust(self, reader: str) -> None: ...


class SegmentError(Exception):
    """A segment was used after its request had settled it, or after the store was closed: a fault of the caller."""


class Segment:
    """One request's use of a file; `engines.base.SharedSegment`.

    `name`: bare name of the master, for the process that writes.  `nbytes`: what the tensor needs; `capacity`: length
    of the file.  The bytes belong to the holder until `settle`, which is called exactly once, whatever happens.
    """

    def __init__(self, store: Owner, directory: ShmDirectory, file: MasterFile, nbytes: int) -> None:
        self._store = store
        self._directory = directory
        self._file = file
        self.nbytes = nbytes
        self.name = file.name
        self.capacity = file.capacity
        self.is_handed_on = file.handed_on
        self._names: list[str] = []  # published, and not taken away by us
        self._was_published = False
        self._is_doubtful = False
        self._is_settled = False

    def publish(self) -> str:
        """Give the bytes a fresh name for one reader; OSError when that is impossible (then send inline)."""
        self._check()
        if self._was_published and not self._names:
            self._is_doubtful = True  # an attempt before this one failed: its reader may still be at work
        name = self._directory.publish(self._file)
        self._names.append(name)
        self._was_published = True
        return name

    @property
    def is_unread(self) -> bool:
        """Whether a published name is still there: its reader has not consumed it."""
        return not self._is_settled and any(self._directory.has(name) for name in self._names)

    def withdraw(self) -> None:
        """Remove every published name that a reader has not consumed; the bytes stay, for another attempt."""
        self._check()
        if self._remove_names():
            self._is_doubtful = True

    def settle(self, *, consumed: bool, reader: str | None = None) -> None:
        """The request is over, or never began.

        `consumed`: the engine's first response arrived, and nobody will read a `view` again (the socket took all of
        it). Anything else (error, abort, cancelled) retires the file.  `reader`: who read it, e.g. the worker's URL;
        one that leaves its name in place (told not to unlink) is remembered, and what it reads is not recycled any
        more.
        """
        self._check()
        self._is_settled = True
        left = self._remove_names()
        if consumed and left and reader is not None:
            self._store.distrust(reader)
        is_clean = consumed and not left and not self._is_doubtful
        # Clean or never published: nobody reads, so the pages may go although a pool process keeps the file mapped.
        self._store.end_use(
            self._file,
            is_spent=not is_clean or not self._store.recycles(reader),
            is_read=not is_clean and self._was_published,
        )

    def share(self) -> "Segment":
        """A further use of the same bytes, published, withdrawn and settled on its own.

        The file is written again only after the last use of it was settled, and only if every one of them ended well.
        """
        self._check()
        self._store.begin_use(self._file)
        return Segment(self._store, self._directory, self._file, self.nbytes)

    def view(self) -> memoryview:
        """The tensor's bytes, read-only, for an inline fallback; the mapping is kept with the file.

        A view that is alive at `settle(consumed=False)` keeps its bytes; after `settle(consumed=True)` it must not be
        read.
        """
        self._open_fd()
        return memoryview(self._file.read_mapping())[: self.nbytes]

    def copy_in(self, buffers: Sequence[memoryview]) -> None:
        """Write the flat byte views back to back from offset 0, without mapping the file; OSError when that fails."""
        fd = self._open_fd()
        offset = 0
        queue = [buffer for buffer in buffers if buffer.nbytes]
        while queue:
            done = os.pwritev(fd, queue[:_MOST_BUFFERS], offset)
            offset += done
            while queue and done >= queue[0].nbytes:
                done -= queue.pop(0).nbytes
            if done:
                queue[0] = queue[0][done:]

    def _check(self) -> None:
        if self._is_settled:
            raise SegmentError(f"segment {self.name} was settled already")

    def _open_fd(self) -> int:
        self._check()
        if self._file.fd < 0:  # and mmap would take -1 for anonymous memory
            raise SegmentError(f"the store of segment {self.name} is closed")
        return self._file.fd

    def _remove_names(self) -> int:
        removed = sum(self._directory.unlink(name) for name in self._names)
        self._names.clear()
        return removed
