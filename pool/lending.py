"""How a pool process gets at the files it writes tensors into: it asks for one by name, the frontend lends it.

Theory of operation.  A pool process opens no file of the store by itself.  What it is sent over a socket is the very
open file the frontend has, not one more of the same bytes; so it can keep the file mapped, and the kernel still tells
the frontend when nobody else has it (`pool.shm_directory.MasterFile.is_alone`).  It asks once for each file: as long
as the mapping is kept, writing costs neither a call nor a page fault.

A question is a name, its answer the same name, with a descriptor, or without one when the store has no such file (any
more).  Both ends exist before the first fork and never block.  A process asks one thing at a time.  What a process that
died has asked is thrown away (`reset`); should its answer be on the way all the same, the next one passes over it,
because it is to another name, or takes it, because it is what it asks for.
"""

import errno
import logging
import os
import select
import socket
from array import array
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

_NAME_BYTES = 128
_PATIENCE_S = 10.0

Lend = Callable[[str, Callable[[int], None]], bool]
"""`lend(name, give)`: call `give` with the open descriptor of a file; False when there is no such file."""


def nothing_to_lend(name: str, give: Callable[[int], None]) -> bool:
    return False


class Lending:
    """Both ends of one pool slot's counter; made before the first fork."""

    def __init__(self) -> None:
        self._frontend, self._process = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._frontend.setblocking(False)
        self._process.setblocking(False)

    # -- in the frontend

    @property
    def fd(self) -> int:
        """Readable when something was asked."""
        return self._frontend.fileno()

    def answer(self, lend: Lend) -> None:
        """Answer one question; does nothing when there is none."""
        try:
            asked = self._frontend.recv(_NAME_BYTES)
        except BlockingIOError:
            return
        try:
            if not lend(asked.decode(errors="replace"), lambda fd: self._give(asked, fd)):
                self._frontend.send(asked)
        except OSError as error:  # it does not read its answers, or there are too many descriptors on the way
            logger.warning("a file could not be lent: error=%r", str(error))

    def _give(self, name: bytes, fd: int) -> None:
        socket.send_fds(self._frontend, [name], [fd])

    def reset(self) -> None:
        """Throw away what is on the way; only when the process is gone."""
        with suppress(BlockingIOError):
            while True:
                self._frontend.recv(_NAME_BYTES)
        with suppress(BlockingIOError):
            while True:
                _close(self._receive()[1])

    # -- in the pool process

    def borrow(self, name: str) -> int:
        """A descriptor of file `name`, readable and writable, the caller's to close.  OSError: the store has no such
        file (any more), or nobody answers.
        """
        asked = name.encode()
        if len(asked) > _NAME_BYTES:
            raise OSError(errno.ENAMETOOLONG, "no file of the store has such a name", name)
        self._process.send(asked)
        waiting = select.poll()
        waiting.register(self._process, select.POLLIN)
        while waiting.poll(_PATIENCE_S * 1000):
            answered, fds = self._receive()
            if answered == asked and fds:
                return fds[0]
            _close(fds)
            if answered == asked:
                raise FileNotFoundError(errno.ENOENT, "nobody lends this file", name)
        raise TimeoutError(errno.ETIMEDOUT, "the frontend does not answer", name)

    def _receive(self) -> tuple[bytes, list[int]]:
        # not socket.recv_fds, which leaves the flags out: a program that is started would inherit what was lent
        room = socket.CMSG_SPACE(array("i").itemsize)
        answered, found, _, _ = self._process.recvmsg(_NAME_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        return answered, [fd for _, _, data in found for fd in array("i", data)]

    def close_frontend_end(self) -> None:
        self._frontend.close()

    def close(self) -> None:
        self._frontend.close()
        self._process.close()


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
