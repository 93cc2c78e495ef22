"""How much memory a pool process keeps between two pictures, so that the next one finds its pages touched.

A new page costs more than the arithmetic done on it.  glibc gives large blocks back to the kernel as soon as they are
free; here it is told to keep them, up to `KEPT_BYTES` at the top of the heap, and Pillow to keep none itself: its cache
would hold blocks of one size, and cut or grow them for the next.  After a picture that needed more, `trim` gives
everything back.
"""

import ctypes

# An RGB picture of 4 bytes a pixel in two sizes and its three planes: 1080p needs 25 MB, 12 megapixels 130 MB.
KEPT_BYTES = 192 * 1024 * 1024
# glibc's upper bound for this threshold on 64-bit machines; larger blocks come from the kernel and return to it.
_MMAP_THRESHOLD = 32 * 1024 * 1024

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_pages() -> bool:
    """Raise glibc's thresholds for this process; False where the C library has none (the work is then slower)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def trim() -> None:
    """Give free pages back to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
