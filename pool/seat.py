"""One pool slot as the frontend sees it: which messages are with its process, in which order, and what it still has
to learn.

The *line* holds every unanswered submission, jobs and pieces of configuration, in the order they were written; the
process answers in that order, so an answer always belongs to the head.  Only the end of the line can be taken back.
No decisions here: which job goes where, what a death means and who is told is `pool.py`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pool.messages import Answer, Completion, Configure, Configured, Prepared, RunJob, stow, unstow
from pool.ring import RingBroken, RingReader, RingWriter
from pool.row import CONFIGURATION, DEPTH, LONG_BYTES, PoolSlot


class Ticket:
    """One submitted job on its way through the pool.

    `outcome` is the caller's future.  `deaths`: processes that died running it.  `is_dropped`: nobody wants the
    outcome. `heads_since`: when it came to the head of a line, so when the process may have begun it
    (loop-independent monotonic time).
    """

    __slots__ = (
        "body",
        "deadline_s",
        "deaths",
        "heads_since",
        "is_dropped",
        "is_overrun",
        "job_id",
        "outcome",
        "place",
        "submitted",
        "unpins",
    )

    def __init__(
        self,
        job_id: int,
        body: bytes,
        deadline_s: float,
        outcome: asyncio.Future[Any],
        unpins: list[Callable[[], None]],
    ) -> None:
        self.job_id = job_id
        self.body = body
        self.deadline_s = deadline_s
        self.outcome = outcome
        self.unpins = unpins
        self.submitted = time.monotonic()
        self.heads_since = 0.0
        self.deaths = 0
        self.place = 0
        self.is_dropped = False
        self.is_overrun = False

    def unpin(self) -> None:
        """No process touches the job's spans any more."""
        unpins, self.unpins = self.unpins, []
        for unpin in unpins:
            unpin()


class Configuration(msgspec.Struct, frozen=True):
    """One value every process must have; a later version of the same key replaces it."""

    key: int
    version: int
    payload: bytes


class Piece(msgspec.Struct, frozen=True):
    """A part of a configuration that is with the process."""

    configuration: Configuration
    heads_since: float


class Seat:
    """Rings, line and state of one pool slot."""

    def __init__(self, slot: PoolSlot) -> None:
        self.index = slot.index
        self.board = slot.board
        self.bell = slot.completion_bell
        self.lending = slot.lending
        self.line: deque[Ticket | Piece] = deque()
        self.generation = 0  # processes that were prepared here
        self.is_present = False  # a prepared process is there
        self.is_up = False  # and it has learned all there was to learn
        self.is_condemned = False  # it will be killed
        self.is_overrun = False  # because of a job that took too long
        self.is_retiring = False
        self._long = slot.long
        self._writer = RingWriter(slot.submission, slot.submission_bell)
        self._reader = RingReader(slot.completion, slot.completion_bell)
        self._completions = msgspec.msgpack.Decoder(Completion)
        self._encoder = msgspec.msgpack.Encoder()
        self._unlearned: deque[Configuration] = deque()
        self._learned_bytes = 0  # of the first of these

    @property
    def jobs(self) -> int:
        return sum(1 for item in self.line if isinstance(item, Ticket))

    @property
    def takes_jobs(self) -> bool:
        """Prepared, configured as far as it can be told (rings are in order), and to stay."""
        return self.is_present and not self.is_condemned and not self.is_retiring and not self._unlearned

    # -- submissions

    def deliver(self, ticket: Ticket) -> None:
        """Hand a job over; for a seat that `takes_jobs` and has fewer than DEPTH."""
        taken = {item.place for item in self.line if isinstance(item, Ticket)}
        ticket.place = next(place for place in range(DEPTH) if place not in taken)
        long_bytes, body = stow(ticket.body, self._long[ticket.place], "job")
        ticket.heads_since = 0.0 if self.line else time.monotonic()
        ticket.is_overrun = False
        self.line.append(ticket)
        message = RunJob(ticket.job_id, ticket.deadline_s, ticket.place, long_bytes, body)
        self._writer.put(self._encoder.encode(message))

    def take_back(self) -> Ticket | None:
        """The job at the end of the line, if the process has not begun it."""
        if not self.line or not isinstance(self.line[-1], Ticket) or not self._writer.take_back():
            return None
        ticket = self.line.pop()
        assert isinstance(ticket, Ticket)
        return ticket

    def teach(self, configuration: Configuration) -> None:
        """Let the process learn a configuration, after those it has not learned yet."""
        self._unlearned.append(configuration)
        self.teach_on()

    def teach_on(self) -> None:
        """Send the next piece, if it is time; there is one place for it, so one piece at a time."""
        if not self._unlearned or any(isinstance(item, Piece) for item in self.line):
            return
        configuration = self._unlearned[0]
        start, end = self._learned_bytes, min(self._learned_bytes + LONG_BYTES, len(configuration.payload))
        self._long[CONFIGURATION][: end - start] = configuration.payload[start:end]
        is_last = end == len(configuration.payload)
        self._learned_bytes = 0 if is_last else end
        if is_last:
            self._unlearned.popleft()
        self.line.append(Piece(configuration, 0.0 if self.line else time.monotonic()))
        message = Configure(configuration.version, configuration.key, end - start, is_last)
        self._writer.put(self._encoder.encode(message))

    # -- completions

    def completions(self) -> list[Prepared | Configured | Answer]:
        """What has been answered since the last call; the line is not touched.  RingBroken, msgspec.DecodeError."""
        return [self._completions.decode(self._reader.get()) for _ in range(self.bell.answer())]

    def answered(self) -> Ticket | Piece:
        """Take the head of the line out: its answer has come.  `teach_on` afterwards.  RingBroken when nothing was
        asked.
        """
        if not self.line:
            raise RingBroken("an answer to nothing")
        head = self.line.popleft()
        if self.line:
            following, now = self.line[0], time.monotonic()
            if isinstance(following, Ticket):
                following.heads_since = now
            else:
                self.line[0] = Piece(following.configuration, now)
        return head

    def body(self, answer: Answer, ticket: Ticket) -> bytes:
        """The answer's body, copied: the long place serves the next job."""
        return bytes(unstow(answer.long_bytes, answer.body, self._long[ticket.place]))

    # -- the process

    def arrive(self, configurations: list[Configuration]) -> None:
        """A prepared process is there and has to learn these."""
        self.is_present = True
        self.generation += 1
        self._unlearned.extend(configurations)
        self.teach_on()

    @property
    def is_learning(self) -> bool:
        return bool(self._unlearned) or any(isinstance(item, Piece) for item in self.line)

    def bury(self) -> list[Ticket]:
        """The process is dead: wipe what it shared with us, return the jobs that were with it, in order."""
        tickets = [item for item in self.line if isinstance(item, Ticket)]
        self.line.clear()
        self._unlearned.clear()
        self._learned_bytes = 0
        self.is_present = self.is_up = self.is_condemned = self.is_overrun = self.is_retiring = False
        self._writer.reset()
        self._reader.reset()
        self.board.reset()
        self.lending.reset()
        return tickets
