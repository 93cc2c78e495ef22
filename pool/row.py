"""What lies in the shared mapping for one frontend: a row of pool slots, each with its rings, doorbells, board and
long places, and the socket pair files are lent over.

A *pool slot* is the place of one pool process; the process in it may die and be replaced, the slot's memory and
descriptors stay. All of a frontend is in its row, so that a second frontend is a second row and nothing else.
"""

from pool.lending import Lending
from pool.mapping import PAGE, Mapping, round_up
from pool.ring import RING_BYTES, Doorbell

# at most so many jobs are with one process: the one that runs and the next, so that it never waits for the frontend's
# loop
DEPTH = 2

# a job or a result that does not fit into a cell goes through a place of this size; one for each of the DEPTH jobs,
# one for configuration.  Untouched unless used.
LONG_BYTES = 1 << 20
CONFIGURATION = DEPTH

_BOARD_BYTES = PAGE
_SLOT_BYTES = _BOARD_BYTES + 2 * round_up(RING_BYTES) + (DEPTH + 1) * LONG_BYTES


class Board:
    """A few words of shared memory that outlive the process which wrote them; each has one writer.

    The pool process writes that it `is_prepared` (its workshop is ready) and what is `running` (id of the job it
    works on, 0 for none).  The frontend writes, for each long place, the id of the job there whose result nobody
    wants any more.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")

    @property
    def is_prepared(self) -> bool:
        return self._words[0] != 0

    def set_prepared(self) -> None:
        self._words[0] = 1

    @property
    def running(self) -> int:
        return self._words[1]

    @running.setter
    def running(self, job_id: int) -> None:
        self._words[1] = job_id

    def withdraw(self, place: int, job_id: int) -> None:
        self._words[2 + place] = job_id

    def is_withdrawn(self, place: int, job_id: int) -> bool:
        return self._words[2 + place] == job_id

    def reset(self) -> None:
        """Wipe it; only when the process is gone."""
        for word in range(2 + DEPTH):
            self._words[word] = 0


class PoolSlot:
    """Memory and descriptors of pool slot `index`."""

    def __init__(self, index: int, mapping: Mapping, start: int) -> None:
        self.index = index
        self.board = Board(mapping.view(start, 64))
        rings = start + _BOARD_BYTES
        self.submission = mapping.view(rings, RING_BYTES)
        self.completion = mapping.view(rings + round_up(RING_BYTES), RING_BYTES)
        self.submission_bell = Doorbell(one_by_one=True)
        self.completion_bell = Doorbell(one_by_one=False)
        self.lending = Lending()
        longs = rings + 2 * round_up(RING_BYTES)
        self.long = [mapping.view(longs + i * LONG_BYTES, LONG_BYTES) for i in range(DEPTH + 1)]

    def close(self) -> None:
        self.lending.close()
        self.submission_bell.close()
        self.completion_bell.close()


class Row:
    """The pool slots of one frontend, from byte `start` of the mapping on; made before the first fork."""

    def __init__(self, mapping: Mapping, start: int, slots: int) -> None:
        if slots < 1:
            raise ValueError("a pool needs at least one process")
        self.mapping = mapping
        self.slots = [PoolSlot(index, mapping, start + index * _SLOT_BYTES) for index in range(slots)]

    @staticmethod
    def nbytes(slots: int) -> int:
        return slots * _SLOT_BYTES

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
