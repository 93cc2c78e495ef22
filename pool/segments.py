"""Recycled files in /dev/shm that carry a tensor to a reader on the same host.

Theory of operation
- A *master* `mediagate-<pid>-<n>` (`pool.shm_directory`) holds the bytes at offset 0.  A pool process is lent it
  (`pool.lending`) and writes; the file may be longer than the tensor, readers read `nbytes` of it.
- `publish` gives it a further name by link(): `smg-tokenspeed-<pid>-<unix ns>-<counter>`.  The reader opens that
  name, reads, unlinks.  The Python and the Rust servicer both read exactly [offset, offset + nbytes) into memory
  before they unlink.
- `settle` ends the use.  The file is used again only when the engine has answered (`consumed`), its link count is
  back to 1 and no earlier attempt had its name taken away; in any doubt it is *retired*: unlinked, and never written
  again, since a reader may still be at work.
- A reader may hand the name on to a process that reads later, and unlink before that (TokenSpeed's scheduler maps the
  file, the whole of it).  Files for such readers are a kind of their own, as long as their tensor; one is used again
  when, besides all that, no reader has it open or mapped any more: the kernel says so (`MasterFile.is_alone`).
- `share` makes a further use of the same bytes, for another request or for who keeps them.  A file has its fate when
  its last use is settled, and one use that ended in doubt is enough to retire it.
- Touched pages are the point: a recycled file costs no page fault.  Idle files above `keep_bytes` go, oldest first.

A store belongs to one process and is made after the last fork (the locks of its files must die with it).  It may be
used from several threads: `take` costs microseconds for an idle file, 0.25 ms a MB for a new one; `write` 0.2 ms a MB
more.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence

from pool.leftovers import sweep_directory
from pool.segment import Segment
from pool.shm_directory import MasterFile, ShmDirectory

_log = logging.getLogger(__name__)

_SMALLEST_CLASS = 64 * 1024
_CLASSES_PER_DOUBLING = 8  # so rounding up wastes at most an eighth, of small files 64 KiB

Buffer = memoryview | bytes


def size_class(nbytes: int) -> int:
    """The capacity of a new recyclable file for `nbytes`: images of about one size share files."""
    if nbytes <= _SMALLEST_CLASS:
        return _SMALLEST_CLASS
    step = max(_SMALLEST_CLASS, (1 << (nbytes.bit_length() - 1)) // _CLASSES_PER_DOUBLING)
    return -(-nbytes // step) * step


class SegmentStore:
    """Every segment of one gateway; `engines.base.SegmentStore`.

    `pid`: the gateway's main process, for the names.  `cap_bytes`: most bytes of all files together, in use and idle.
    `keep_bytes`: most bytes kept idle (default: half of the cap).  `max_files` bounds open descriptors.  What does
    not fit or fails (ENOSPC, EACCES, ...) is None and counted in `failures`: the tensor goes inline.
    """

    def __init__(
        self,
        *,
        pid: int,
        cap_bytes: int,
        directory: str = "/dev/shm",
        keep_bytes: int | None = None,
        max_files: int = 512,
    ) -> None:
        self.cap_bytes = cap_bytes
        self._keep_bytes = cap_bytes // 2 if keep_bytes is None else keep_bytes
        self._max_files = max_files
        self._lock = threading.Lock()
        self._idle: list[MasterFile] = []  # oldest first
        self._files: dict[str, MasterFile] = {}  # every master that exists
        self._bytes = 0
        self._count = 0  # with files that are just being made
        self._keepers: set[str] = set()
        self._last_complaint: int | None = None
        self.failures = 0
        self._directory = self._open(directory, pid)

    @property
    def writable(self) -> bool:
        """Whether a probe file could be written at start (and the store is not closed)."""
        return self._directory is not None

    @property
    def bytes(self) -> int:
        """Bytes of all files, in use and idle."""
        return self._bytes

    @property
    def count(self) -> int:
        """Files, in use and idle."""
        return self._count

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            return sum(file.capacity for file in self._idle)

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` would find room for `nbytes`, as far as the cap tells."""
        with self._lock:
            if any(nbytes <= file.capacity for file in self._idle if not file.handed_on):
                return True
            used = self._bytes - sum(file.capacity for file in self._idle)
            files = self._count - len(self._idle)
            return used + self._capacity(nbytes, handed_on=False) <= self.cap_bytes and files < self._max_files

    def take(self, nbytes: int, *, handed_on: bool = False) -> Segment | None:
        """A segment for `nbytes`, its old bytes undefined; None when there is no room.

        `handed_on`: a file of exactly that size, for a reader that hands the name on (TokenSpeed); write it by
        `Segment.copy_in` only, since a new one has no pages yet.
        """
        if nbytes < 1:
            raise ValueError(f"a segment needs at least one byte, not {nbytes}")
        directory = self._directory
        if directory is None:
            self._complain(errno.EROFS, "shared memory is not writable")
            return None
        file = self._find_or_create(directory, nbytes, handed_on)
        return None if file is None else Segment(self, directory, file, nbytes)

    def take_idle(self, nbytes: int) -> Segment | None:
        """A segment of exactly that size that may be handed on, for a pool process to write; None when no file that
        has been written before is idle.  New ones come by `write` alone: of a reader that keeps its files open none is
        ever used again, and writing new pages by a system call costs half of mapping them.
        """
        with self._lock:
            directory = self._directory
            file = None if directory is None else self._pop_idle(nbytes, handed_on=True)
        return None if directory is None or file is None else Segment(self, directory, file, nbytes)

    def write(self, buffers: Sequence[Buffer], *, handed_on: bool = False) -> Segment | None:
        """A segment with `buffers` copied in, back to back; None when there is no room.  Call it from a thread."""
        flat = [memoryview(buffer).cast("B") for buffer in buffers]
        segment = self.take(sum(buffer.nbytes for buffer in flat), handed_on=handed_on)
        if segment is None:
            return None
        try:
            segment.copy_in(flat)
        except OSError as error:
            segment.settle(consumed=False)
            self._complain(error.errno or 0, f"writing failed: {error.strerror}")
            return None
        return segment

    def lend(self, name: str, give: Callable[[int], None]) -> bool:
        """Call `give` with the open descriptor of master `name`; False when there is no such file.  OSError: what
        `give` raises.
        """
        with self._lock:  # nobody may close it, and another file get its number, meanwhile
            file = self._files.get(name)
            if file is not None:
                give(file.fd)
            return file is not None

    def recycles(self, reader: str | None) -> bool:
        """Whether what `reader` reads is used again; False once it left a name in place."""
        return reader is None or reader not in self._keepers

    def distrust(self, reader: str) -> None:
        """It left a published name in place although it had answered."""
        if reader not in self._keepers:
            _log.warning("%s leaves shared-memory names in place: its segments are not recycled", reader)
            self._keepers.add(reader)

    def forget(self, reader: str) -> None:
        """The worker is gone or came back anew: it is believed again."""
        self._keepers.discard(reader)

    def sweep(self) -> int:
        """Remove what dead gateways of this user left; how many names went.  See `pool.leftovers`."""
        directory = self._directory
        return 0 if directory is None else sweep_directory(directory.fd, directory.pid)

    def close(self) -> None:
        """Unlink every file.  Segments still in use may only be settled after that; no thread may be in `write`."""
        with self._lock:
            directory, self._directory = self._directory, None
            self._idle.clear()
            for file in list(self._files.values()):
                self._remove(file, directory, free_pages=False)
        if directory is not None:
            directory.close()

    def begin_use(self, file: MasterFile) -> None:
        """From a segment: one more has the file."""
        with self._lock:
            file.uses += 1

    def end_use(self, file: MasterFile, *, is_spent: bool, is_read: bool) -> None:
        """From a segment: it has done with the file.  The flags are those of `MasterFile`."""
        with self._lock:
            file.uses -= 1
            file.is_spent |= is_spent
            file.is_read |= is_read
            if file.uses or file.fd < 0:  # not the last one, or the store was closed
                return
            is_had = file.handed_on and not file.is_alone  # by who was handed the name, whatever was answered
            if file.is_spent:
                self._remove(file, self._directory, free_pages=not file.is_read and not is_had)
            elif os.fstat(file.fd).st_nlink != 1 or is_had:
                self._remove(file, self._directory, free_pages=False)
            else:
                self._keep_idle(file)

    def _keep_idle(self, file: MasterFile) -> None:
        self._idle.append(file)
        total = sum(idle.capacity for idle in self._idle)
        while total > self._keep_bytes:
            oldest = self._idle.pop(0)
            total -= oldest.capacity
            self._remove(oldest, self._directory, free_pages=True)

    def _find_or_create(self, directory: ShmDirectory, nbytes: int, handed_on: bool) -> MasterFile | None:
        capacity = self._capacity(nbytes, handed_on)
        while True:
            with self._lock:
                file = self._pop_idle(nbytes, handed_on)
                if file is not None:
                    return file
                if not self._make_room(capacity):
                    self._complain(0, f"the cap of {self.cap_bytes} bytes or {self._max_files} files is reached")
                    return None
                self._bytes += capacity
                self._count += 1
            try:
                file = directory.create(capacity, handed_on=handed_on)
            except OSError as error:
                if self._roll_back(capacity, is_full=error.errno == errno.ENOSPC):
                    continue
                self._complain(error.errno or 0, f"{capacity} bytes: {error.strerror}")
                return None
            with self._lock:
                self._files[file.name] = file
                self._last_complaint = None
                if self._directory is not None:
                    return file
                self._remove(file, directory, free_pages=True)  # closed meanwhile
                return None

    def _capacity(self, nbytes: int, handed_on: bool) -> int:
        return nbytes if handed_on else min(size_class(nbytes), max(nbytes, self.cap_bytes))

    def _pop_idle(self, nbytes: int, handed_on: bool) -> MasterFile | None:
        """The smallest idle file that fits, of equals the one used last; a much larger one only when no new one may
        be made."""
        capacity = self._capacity(nbytes, handed_on)
        largest = capacity + capacity // 4 if self._has_room(capacity) else self.cap_bytes
        mine = [file for file in reversed(self._idle) if file.handed_on == handed_on]
        fitting = [file for file in mine if nbytes <= file.capacity <= largest]
        if not fitting:
            return None
        best = min(fitting, key=lambda file: file.capacity)
        self._idle.remove(best)
        if handed_on and best.capacity != nbytes:
            self._bytes -= best.capacity - nbytes
            best.resize(nbytes)
        best.uses = 1
        return best

    def _has_room(self, capacity: int) -> bool:
        return self._bytes + capacity <= self.cap_bytes and self._count < self._max_files

    def _make_room(self, capacity: int) -> bool:
        if capacity > self.cap_bytes:
            return False  # would only empty the store
        while not self._has_room(capacity) and self._idle:
            self._remove(self._idle.pop(0), self._directory, free_pages=True)
        return self._has_room(capacity)

    def _roll_back(self, capacity: int, *, is_full: bool) -> bool:
        """Take a reservation back; True when idle files were given up, so that another try may succeed."""
        with self._lock:
            self._bytes -= capacity
            self._count -= 1
            if not is_full or not self._idle:
                return False
            while self._idle:
                self._remove(self._idle.pop(), self._directory, free_pages=True)
            return True

    def _remove(self, file: MasterFile, directory: ShmDirectory | None, *, free_pages: bool) -> None:
        """Unlink and forget, under the lock."""
        assert directory is not None, "a closed store has no files"
        self._files.pop(file.name, None)
        self._bytes -= file.capacity
        self._count -= 1
        directory.discard(file, free_pages=free_pages)

    def _open(self, path: str, pid: int) -> ShmDirectory | None:
        try:
            directory = ShmDirectory(path, pid)
        except OSError as error:
            _log.warning("no shared memory: %s: %s", path, error.strerror)
            return None
        try:
            directory.discard(directory.create(1, handed_on=True), free_pages=False)
        except OSError as error:
            directory.close()
            _log.warning("no shared memory: %s: %s", path, error.strerror)
            return None
        return directory

    def _complain(self, number: int, why: str) -> None:
        """Count a failure; log the first of a run of equal ones."""
        self.failures += 1
        if self._last_complaint != number:
            self._last_complaint = number
            _log.warning("no segment, the tensor goes inline: %s", why)
