"""The one piece of memory all processes share: anonymous, made before the first fork, inherited by every child.

It has no name, so nothing is left behind by a kill and a container's small /dev/shm does not bound it.  Pages cost
nothing until somebody writes to them: nothing here touches any, and `give_back` returns touched ones to the kernel.
Who may use which bytes is none of its business: `row.py` lays out the rings, `arena.py` owns the spans.
"""

import mmap

PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # Linux on x86-64 and ARM64; Python 3.11 has no name for it


def round_up(nbytes: int, step: int = PAGE) -> int:
    return -(-nbytes // step) * step


class Mapping:
    """`nbytes` (rounded up to pages) of zeros, shared by this process and all it forks afterwards."""

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"a mapping needs at least one byte, not {nbytes}")
        self.nbytes = round_up(nbytes)
        # NORESERVE: a mapping as large as half the memory must not count against the kernel's commit limit before it
        # is used
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._memory = mmap.mmap(-1, self.nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = memoryview(self._memory)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes `offset` .. `offset + nbytes`; IndexError outside the mapping.  Valid as long as the mapping
        is.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise IndexError(f"{nbytes} bytes at {offset} are outside a mapping of {self.nbytes} bytes")
        return self._bytes[offset : offset + nbytes]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the whole pages within `offset` .. `offset + nbytes` to the kernel; they read as zeros afterwards.

        Costs about 0.2 ms per MiB that was touched and next to nothing for the rest.  OSError when the kernel refuses.
        """
        first, end = round_up(offset), (offset + nbytes) // PAGE * PAGE
        if first < end:
            self._memory.madvise(mmap.MADV_REMOVE, first, end - first)

    def close(self) -> None:
        """Unmap; BufferError while views exist."""
        self._bytes.release()
        self._memory.close()
