"""How much memory a pool process may take for a picture, and how much it keeps, so that the next one finds its pages
touched.

A new page costs more than the arithmetic done on it, and glibc gives large blocks back to the kernel as soon as they
are free.  Here it is told to keep them; what a process keeps is bounded by `KEPT_BYTES`, and `trim` after every job
holds it to that.  Pillow's own block cache stays off: measured, it adds nothing, and it cuts and grows its blocks when
sizes change.
"""

import ctypes
import mmap
import resource

# Private memory above what the process had at `keep_pages`.  A 1080p picture needs 25 MB while it is worked on, one of
# 12 megapixels 130 MB: RGB takes 4 bytes a pixel, twice when it is resized, and 3 in planes.
KEPT_BYTES = 192 * 1024 * 1024

# glibc's own upper bound on 64-bit machines; larger blocks come from the kernel and return to it at once.
_MMAP_THRESHOLD = 32 * 1024 * 1024
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_baseline = 0


def keep_pages() -> bool:
    """Set this process's thresholds; False where the C library has none (the work is then slower, not wrong)."""
    global _baseline
    _baseline = _private_bytes()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def bound(nbytes: int) -> None:
    """Let this process have at most `nbytes` of private memory beyond what it has now.

    What asks for more gets a MemoryError (a C library its own failure), where otherwise the kernel would look for a
    process to kill.  The limit counts private pages that may be written, touched or not: neither the shared mapping
    nor files of /dev/shm.
    """
    limit = _data_bytes() + nbytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    with open("/proc/self/status", "rb") as status:
        line = next(line for line in status if line.startswith(b"VmData:"))
    return int(line.split()[1]) << 10


def trim() -> None:
    """Give free pages back to the kernel, when the process has more than `KEPT_BYTES` above its baseline."""
    if _private_bytes() - _baseline <= KEPT_BYTES:
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _private_bytes() -> int:
    """Resident memory that is not shared: the arenas do not count, whoever touched them."""
    with open("/proc/self/statm", "rb") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
