"""The directory of shared-memory files: make, publish, unlink, give pages back.  `pool.segments` decides when.

A file is made exclusively, mode 0600, with its space reserved, and is held by a shared flock as long as it exists:
that lock says "its gateway lives" to a sweep, also across pid namespaces, and ends with the process and the pool
processes that were lent the file.  Names are never used twice in one life.
"""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import signal
import time

from pool.leftovers import MASTER_PREFIX, PUBLISHED_PREFIX

_F_SETSIG = 10  # Linux; the module fcntl does not name it


class MasterFile:
    """One file with its bytes at offset 0.  `fd` is open (and locked) as long as the name exists, then -1.

    `handed_on`: for readers that hand the name on.  The store's notes:
    `uses`, how many have it now; `is_spent`, never to be written for another request, because a use ended in doubt;
    `is_read`, a reader may still be at work.
    """

    __slots__ = ("_mapping", "capacity", "fd", "handed_on", "is_read", "is_spent", "name", "uses")

    def __init__(self, name: str, fd: int, capacity: int, handed_on: bool) -> None:
        self.name = name
        self.fd = fd
        self.capacity = capacity
        self.uses = 1
        self.handed_on = handed_on
        self.is_spent = False
        self.is_read = False
        self._mapping: mmap.mmap | None = None

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has opened the file and has it open or mapped still, in any process.  Pool processes that
        were lent this descriptor (`pool.lending`) do not count.

        The kernel gives a write lease only then (fcntl(2)); where it gives none, the answer is no.  Whoever opens the
        file while the lease lasts, which is no time, makes the kernel send a signal: one that is ignored.
        """
        try:
            fcntl.fcntl(self.fd, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def resize(self, capacity: int) -> None:
        """Shorter, or as long as it is."""
        os.ftruncate(self.fd, capacity)
        self.capacity = capacity

    def read_mapping(self) -> mmap.mmap:
        """The file's bytes, read-only; mapped at the first call, so that a recycled file faults in once."""
        if self._mapping is None:
            self._mapping = mmap.mmap(self.fd, self.capacity, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return self._mapping

    def unmap(self) -> bool:
        """Whether nobody views the file here; else the mapping lives as long as the views."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return True
        try:
            mapping.close()
        except BufferError:
            return False
        return True


class ShmDirectory:
    """`/dev/shm`, or another directory in tests.  `pid` stands in every name; OSError when the directory cannot be
    opened."""

    def __init__(self, path: str, pid: int) -> None:
        self.path = path
        self.pid = pid
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._masters = itertools.count()
        self._publications = itertools.count()
        self._published: set[str] = set()

    def close(self) -> None:
        """Unlink every published name that is left.  Names can still be unlinked after that, nothing else."""
        for name in list(self._published):
            self.unlink(name)
        fd, self.fd = self.fd, -1
        os.close(fd)

    def create(self, capacity: int, *, handed_on: bool) -> MasterFile:
        """A new file of `capacity` bytes; OSError (ENOSPC, EMFILE, ...) leaves nothing behind.

        A `handed_on` one gets its pages when it is first written: by a system call, which can say that there is no
        room.
        """
        while True:
            name = f"{MASTER_PREFIX}{self.pid}-{next(self._masters)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                fd = os.open(name, flags, 0o600, dir_fd=self.fd)
            except FileExistsError:
                continue  # a namesake's, of an earlier life or of another pid namespace
            try:
                if _is_held(fd):
                    if handed_on:
                        os.ftruncate(fd, capacity)
                    else:
                        _reserve(fd, capacity)
                    return MasterFile(name, fd, capacity, handed_on)
            except BaseException:
                self.unlink(name)
                os.close(fd)
                raise
            self.unlink(name)
            os.close(fd)

    def publish(self, file: MasterFile) -> str:
        """A further name of the file, for one reader."""
        while True:
            name = f"{PUBLISHED_PREFIX}{self.pid}-{time.time_ns()}-{next(self._publications)}"
            try:
                os.link(file.name, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            except FileExistsError:
                continue
            self._published.add(name)
            return name

    def has(self, name: str) -> bool:
        """Whether a file of that name is there."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def unlink(self, name: str) -> bool:
        """Whether the name was there."""
        self._published.discard(name)
        try:
            if self.fd >= 0:
                os.unlink(name, dir_fd=self.fd)
            else:
                os.unlink(os.path.join(self.path, name))
        except FileNotFoundError:
            return False
        return True

    def discard(self, file: MasterFile, *, free_pages: bool) -> None:
        """Unlink the master.  `free_pages` only when no reader can still want the bytes; a living view keeps them."""
        self.unlink(file.name)
        if file.unmap() and free_pages:
            _punch(file)
        os.close(file.fd)
        file.fd = -1


def _is_held(fd: int) -> bool:
    """Lock a file just made; False when a sweeping gateway was faster."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: the pid alone decides
    return os.fstat(fd).st_nlink == 1


def _reserve(fd: int, nbytes: int) -> None:
    """Get the pages now: a full tmpfs must fail here and not with SIGBUS in the process that writes."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, nbytes)


def _punch(file: MasterFile) -> None:
    """Give the pages back although a process still maps the file; a late write there finds new, orphaned pages."""
    with contextlib.suppress(OSError, ValueError), mmap.mmap(file.fd, file.capacity) as mapping:
        mapping.madvise(mmap.MADV_REMOVE)
