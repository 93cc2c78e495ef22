"""Rings: how two processes hand messages to each other through shared memory without a lock.

Theory of operation.  A ring is a run of fixed-size cells in the shared mapping with one writer and one reader, and
beside it a doorbell, an eventfd.  The writer fills a cell, then rings; the reader takes from the doorbell how many
cells are filled, then reads that many.  The kernel orders the two, so nothing in the cells needs atomics.  Writer and
reader each count the cells they have used; the reader's count is in the shared memory as well, so that a writer which
ran ahead fails loudly (`RingFull`) instead of overwriting.  It never happens in good order: every submission is
answered once and the pool bounds what is unanswered.

A submission bell hands out one cell at a time.  What the pool process has not taken yet can therefore be taken back
by the frontend: whoever gets the count from the kernel has the cell.  A completion bell gives its whole count at once.

When a process dies, its rings are `reset` by the survivor before another process is forked for the slot.
"""

import os
import struct

CELL_BYTES = 4096
CELLS = 8
RING_BYTES = CELL_BYTES * (CELLS + 1)  # the first cell's place holds the reader's count

_HEAD = struct.Struct("<II")  # length of the message, low half of the writer's count
MESSAGE_BYTES = CELL_BYTES - _HEAD.size


class RingFull(Exception):
    """The reader has not taken the oldest cell yet: the bound on unanswered messages was broken."""


class RingBroken(Exception):
    """A cell does not hold the message that is due: the two sides have lost each other."""


class MessageTooLarge(Exception):
    """`nbytes` do not fit into one cell; `limit` would."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(f"a message of {nbytes} bytes is larger than a cell ({limit} bytes)")
        self.nbytes = nbytes
        self.limit = limit


class Doorbell:
    """An eventfd, inherited by every process forked later and never blocking.

    `one_by_one`: `answer` takes one ring at a time, else all there are.
    """

    def __init__(self, *, one_by_one: bool) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | (os.EFD_SEMAPHORE if one_by_one else 0))

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def answer(self) -> int:
        """How many rings were taken; 0 when there was none."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def silence(self) -> None:
        """Take all rings there are."""
        while self.answer():
            pass

    def close(self) -> None:
        os.close(self.fd)


class _End:
    """One side of a ring; `memory` are RING_BYTES of the mapping."""

    def __init__(self, memory: memoryview, bell: Doorbell) -> None:
        if len(memory) != RING_BYTES:
            raise ValueError(f"a ring takes {RING_BYTES} bytes, not {len(memory)}")
        self.bell = bell
        self.count = 0
        self._taken = memory[:8].cast("Q")
        self._cells = memory[CELL_BYTES:]

    def reset(self) -> None:
        """Begin anew; only when the process at the other side is gone."""
        self.bell.silence()
        self.count = 0
        self._taken[0] = 0


class RingWriter(_End):
    def put(self, message: bytes) -> None:
        """Write one cell and ring.  MessageTooLarge, RingFull."""
        if len(message) > MESSAGE_BYTES:
            raise MessageTooLarge(len(message), MESSAGE_BYTES)
        if self.count - self._taken[0] >= CELLS:
            raise RingFull(f"{CELLS} messages are unread")
        at = self.count % CELLS * CELL_BYTES
        _HEAD.pack_into(self._cells, at, len(message), self.count & 0xFFFFFFFF)
        self._cells[at + _HEAD.size : at + _HEAD.size + len(message)] = message
        self.count += 1
        self.bell.ring()

    def take_back(self) -> bool:
        """Undo the latest `put`; False when the reader was faster.  For rings whose bell goes one by one."""
        if not self.bell.answer():
            return False
        self.count -= 1
        return True


class RingReader(_End):
    def get(self) -> bytes:
        """The next message; to be called once for every ring the bell's `answer` gave.  RingBroken."""
        at = self.count % CELLS * CELL_BYTES
        nbytes, count = _HEAD.unpack_from(self._cells, at)
        if nbytes > MESSAGE_BYTES or count != self.count & 0xFFFFFFFF:
            raise RingBroken(f"cell {self.count} holds {nbytes} bytes of message {count}")
        message = bytes(self._cells[at + _HEAD.size : at + _HEAD.size + nbytes])
        self.count += 1
        self._taken[0] = self.count
        return message
