"""Mappings of /dev/shm files in a pool process, kept by name so that a recycled segment's pages are faulted in once.

The files belong to the frontend's segment store, which bounds their bytes and their number; here they are only mapped.
A kept mapping holds the memory of a file that was unlinked meanwhile, so such mappings are dropped soon: at the next
use, if the last look is `LOOK_S` ago, and when idle.
"""

import mmap
import os
import time
from collections import OrderedDict
from typing import NamedTuple

DIRECTORY = "/dev/shm"
# A mapping that is dropped early costs its page faults again (a tensor of 50 MB: 18 ms), one that is kept two
# thousandths of its size in page tables.
KEEP_BYTES = 16 << 30
LOOK_S = 0.1


class _Mapped(NamedTuple):
    inode: tuple[int, int]
    nbytes: int
    memory: mmap.mmap


class FileViews:
    """Writable views of files in `directory`, the least recently used dropped when all together exceed `keep_bytes`."""

    def __init__(self, directory: str = DIRECTORY, keep_bytes: int = KEEP_BYTES) -> None:
        self._directory = directory
        self._keep_bytes = keep_bytes
        self._kept: OrderedDict[str, _Mapped] = OrderedDict()
        self._looked = 0.0

    @property
    def nbytes(self) -> int:
        return sum(mapped.nbytes for mapped in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def view(self, name: str, nbytes: int) -> memoryview:
        """The first `nbytes` of file `name`.  ValueError for a name with a folder in it, OSError for a missing or
        short file.
        """
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"{name!r} is not a bare file name")
        if time.monotonic() - self._looked > LOOK_S:  # some hundred stat calls take a millisecond
            self.forget_unlinked()
        self._forget_if_replaced(name)
        mapped = self._kept.get(name)
        if mapped is None or mapped.nbytes < nbytes:
            mapped = self._kept[name] = self._map(name, nbytes)
        self._kept.move_to_end(name)
        self._forget_oldest()
        return memoryview(mapped.memory)[:nbytes]

    def forget_unlinked(self) -> None:
        """Drop the mapping of every file that is gone or has become another file."""
        for name in tuple(self._kept):
            self._forget_if_replaced(name)
        self._looked = time.monotonic()

    def _forget_if_replaced(self, name: str) -> None:
        if name not in self._kept:
            return
        try:
            found = os.stat(os.path.join(self._directory, name))
        except FileNotFoundError:
            del self._kept[name]
            return
        if (found.st_dev, found.st_ino) != self._kept[name].inode:
            del self._kept[name]

    def _map(self, name: str, nbytes: int) -> _Mapped:
        fd = os.open(os.path.join(self._directory, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if found.st_size < nbytes:  # a write beyond the end would be SIGBUS
                raise OSError(f"{name} has {found.st_size} bytes, {nbytes} are needed")
            memory = mmap.mmap(fd, found.st_size)
        finally:
            os.close(fd)
        return _Mapped((found.st_dev, found.st_ino), found.st_size, memory)

    def _forget_oldest(self) -> None:
        # dropped, not closed: a job may still hold a view, and the last one unmaps
        while len(self._kept) > 1 and self.nbytes > self._keep_bytes:
            self._kept.popitem(last=False)
