"""Mappings of /dev/shm files in a pool process, kept by name so that a recycled segment's pages are faulted in once.

The files belong to the frontend's segment store, which bounds their bytes and their number and never gives a name
twice; here they are only borrowed and mapped.  A kept mapping holds the memory of a file that was unlinked meanwhile,
so such mappings are dropped soon: at the next use, if the last look is `LOOK_S` ago, and when idle.
"""

import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

# A mapping that is dropped early costs its page faults again (a tensor of 50 MB: 4 ms), one that is kept two
# thousandths of its size in page tables, and two of the process's descriptors.
KEEP_BYTES = 16 << 30
KEEP_FILES = 100
LOOK_S = 0.1


class _Mapped(NamedTuple):
    fd: int
    nbytes: int
    memory: mmap.mmap


class FileViews:
    """Writable views of borrowed files, the least recently used dropped when all together exceed `keep_bytes` or are
    more than `keep_files`.  `borrow` gives a descriptor of a named file, or raises OSError.
    """

    def __init__(
        self, borrow: Callable[[str], int], keep_bytes: int = KEEP_BYTES, keep_files: int = KEEP_FILES
    ) -> None:
        self._borrow = borrow
        self._keep_bytes = keep_bytes
        self._keep_files = keep_files
        self._kept: OrderedDict[str, _Mapped] = OrderedDict()
        self._looked = 0.0

    @property
    def nbytes(self) -> int:
        return sum(mapped.nbytes for mapped in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def view(self, name: str, nbytes: int) -> memoryview:
        """The first `nbytes` of file `name`.  OSError for a missing or short file."""
        if time.monotonic() - self._looked > LOOK_S:  # some hundred calls
            self.forget_unlinked()
        self._forget_if_unlinked(name)
        mapped = self._kept.get(name)
        if mapped is None:
            mapped = self._kept[name] = self._map(name)
        self._kept.move_to_end(name)
        self._forget_oldest()
        if mapped.nbytes < nbytes:  # a write beyond the end would be SIGBUS
            raise OSError(f"{name} has {mapped.nbytes} bytes, {nbytes} are needed")
        return memoryview(mapped.memory)[:nbytes]

    def forget_unlinked(self) -> None:
        """Drop the mapping of every file that has no name any more."""
        for name in tuple(self._kept):
            self._forget_if_unlinked(name)
        self._looked = time.monotonic()

    def _forget_if_unlinked(self, name: str) -> None:
        if name in self._kept and os.fstat(self._kept[name].fd).st_nlink == 0:
            self._forget(name)

    def _map(self, name: str) -> _Mapped:
        fd = self._borrow(name)
        try:
            # the store has reserved every page, and the tensor is going to fill them: one call instead of a fault each
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return _Mapped(fd, nbytes := os.fstat(fd).st_size, mmap.mmap(fd, nbytes, flags=flags))
        except BaseException:
            os.close(fd)
            raise

    def _forget_oldest(self) -> None:
        while len(self._kept) > 1 and (self.nbytes > self._keep_bytes or len(self._kept) > self._keep_files):
            self._forget(next(iter(self._kept)))

    def _forget(self, name: str) -> None:
        # the mapping is dropped, not closed: a job may still hold a view, and the last one unmaps
        os.close(self._kept.pop(name).fd)
