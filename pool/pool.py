"""The asyncio side of the pool, in the frontend: `submit(job) -> Outcome`.

One queue, first come first served, in front of all processes; a process has at most two jobs, so that it never waits
for this loop, and an idle one takes over what another has not begun.  Every decision is made in synchronous code
between two turns of the loop: `_dispatch` fills processes, `_on_answers` takes results, `on_death` takes back what a
dead process had, `_on_tick` looks for jobs that overran.  Waiting is only in `submit`, `retire` and `close`.

A job whose process dies runs once more, first of the queue; if that process dies as well nobody tries again
(`JobLost`).  Only the job the dead process really worked on counts, which is what its board says.  Spans stay pinned
until no process touches them.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic

import msgspec

from pool.conditions import Conditions
from pool.control import Kill, Renewed, Reset, Up, line
from pool.endings import Endings
from pool.lending import Lend, nothing_to_lend
from pool.messages import Answer, BodyTooLarge, Configured, Prepared
from pool.outcome import (
    JobCrashed,
    JobFailed,
    JobLost,
    JobOverran,
    JobT,
    Outcome,
    PoolClosed,
    PoolStatistics,
    ResultT,
)
from pool.ring import RingBroken, RingFull
from pool.row import DEPTH, LONG_BYTES, Row
from pool.seat import Configuration, Piece, Seat, Ticket
from pool.spans import Lease

logger = logging.getLogger(__name__)

__all__ = ["JobCrashed", "JobFailed", "JobLost", "JobOverran", "Outcome", "Pool", "PoolClosed", "PoolStatistics"]

_TICK_S = 0.1
# a process that takes so long to take a piece of configuration is stuck
CONFIGURE_TIMEOUT_S = 60.0
_MOST_DEATHS = 2


class Pool(Generic[JobT, ResultT]):
    """Made by `FrontendLink.pool`.  `send` reaches the supervisor; `overrun_grace_s` is what a job gets beyond its
    deadline to end by itself before its process is killed.
    """

    def __init__(
        self, row: Row, result_type: Any, send: Callable[[msgspec.Struct], None], *, overrun_grace_s: float = 2.0
    ) -> None:
        self.seats = [Seat(slot) for slot in row.slots]
        self._send = send
        self._overrun_grace_s = overrun_grace_s
        self._encoder = msgspec.msgpack.Encoder()
        self._endings = Endings(result_type)
        self._queue: deque[Ticket] = deque()
        self._configurations: dict[int, Configuration] = {}
        self._last_job = 0
        self._last_version = 0
        self._conditions = Conditions()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._is_renewal_wanted = False
        self._is_closed = False

    # -- what others see

    @property
    def processes(self) -> int:
        return len(self.seats)

    @property
    def processes_alive(self) -> int:
        """Prepared and configured."""
        return sum(1 for seat in self.seats if seat.is_up)

    @property
    def busy(self) -> int:
        """Processes that have a job."""
        return sum(1 for seat in self.seats if seat.jobs)

    @property
    def queued(self) -> int:
        """Jobs no process works on yet."""
        return len(self._queue) + sum(max(0, seat.jobs - 1) for seat in self.seats)

    @property
    def statistics(self) -> PoolStatistics:
        return self._endings.statistics

    def __repr__(self) -> str:
        return f"<Pool {self.processes_alive} of {self.processes} up, {self.busy} busy, {self.queued} queued>"

    def start(self, lend: Lend = nothing_to_lend) -> None:
        """Begin to listen to the processes; in the frontend's loop.  `lend`: where the files are that jobs name."""
        self._loop = asyncio.get_running_loop()
        for seat in self.seats:
            self._loop.add_reader(seat.bell.fd, self._on_answers, seat)
            self._loop.add_reader(seat.lending.fd, seat.lending.answer, lend)

    async def close(self) -> None:
        """Stop listening; jobs that have not ended raise PoolClosed.  The processes are the supervisor's."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal])
        if self._ticking is not None:
            self._ticking.cancel()
        for seat in self.seats:
            if self._loop is not None:
                self._loop.remove_reader(seat.bell.fd)
                self._loop.remove_reader(seat.lending.fd)
            self._queue.extend(item for item in seat.line if isinstance(item, Ticket))
            seat.line.clear()
        while self._queue:
            self._endings.fail(self._queue.popleft(), PoolClosed("the pool was closed"))
        self._conditions.fail(PoolClosed("the pool was closed"))

    async def submit(self, job: JobT, *, deadline_s: float, leases: Sequence[Lease] = ()) -> Outcome[ResultT]:
        """Run one job; `deadline_s` counts from when a process begins it.

        The leases are pinned until no process touches their spans any more, also when the waiting is cancelled: a job
        that has not begun is withdrawn then, the result of one that has is dropped.
        Raises JobFailed, JobCrashed, JobOverran, JobLost, PoolClosed; BodyTooLarge for a job that does not fit into
        LONG_BYTES.
        """
        if self._is_closed:
            raise PoolClosed("the pool was closed")
        body = self._encoder.encode(job)
        if len(body) > LONG_BYTES:
            raise BodyTooLarge("job", len(body))
        outcome: asyncio.Future[Outcome[ResultT]] = asyncio.get_running_loop().create_future()
        self._last_job += 1
        ticket = Ticket(self._last_job, body, deadline_s, outcome, [])
        try:
            ticket.unpins.extend(lease.pin() for lease in leases)
        except BaseException:
            ticket.unpin()
            raise
        self._queue.append(ticket)
        self._dispatch()
        try:
            return await outcome
        except asyncio.CancelledError:
            if outcome.done() and not outcome.cancelled():
                outcome.exception()  # it came at the same moment; asyncio would complain that nobody looked
            self._withdraw(ticket)
            raise

    def configure(self, key: int, payload: bytes) -> None:
        """Let every process, and every later one, keep `payload` under `key`.  Jobs submitted from now on find it in
        place.
        """
        self._last_version += 1
        configuration = Configuration(key, self._last_version, payload)
        self._configurations.pop(key, None)
        self._configurations[key] = configuration
        for seat in self.seats:
            if seat.is_present:
                self._submitting(seat, seat.teach, configuration)

    async def retire(self, slot: int) -> None:
        """Let the process of `slot` end once it is idle and wait until another is up in its place."""
        seat = self.seats[slot]
        await self._conditions.met(lambda: seat.is_up)
        generation = seat.generation
        seat.is_retiring = True
        self._requeue(self._take_back_all(seat))
        self._dispatch()
        try:
            await self._conditions.met(lambda: seat.generation != generation or not seat.is_present or not seat.line)
        except asyncio.CancelledError:
            if seat.generation == generation:
                seat.is_retiring = False
                self._dispatch()
            raise
        if seat.generation == generation and seat.is_present:
            self._condemn(seat, "it is retired")
        await self._conditions.met(lambda: seat.generation != generation and seat.is_up)

    # -- what the supervisor says (called by the link)

    def on_death(self, slot: int, how: str) -> None:
        """The process of `slot` is gone: take back its jobs, say that another may come."""
        seat = self.seats[slot]
        seat.is_condemned = True
        self._on_answers(seat)  # what it finished before counts
        # a process killed because of one job may have begun the next meanwhile, which is not to blame
        guilty = 0 if seat.is_overrun else seat.board.running
        self._endings.count("deaths")
        if seat.is_retiring:
            self._endings.count("retired")
        again: list[Ticket] = []
        for ticket in seat.bury():
            if ticket.job_id == guilty:
                ticket.deaths += 1
            if self._may_run_again(ticket, how):
                again.append(ticket)
        self._requeue(again)
        self._send(Reset(slot))
        self._dispatch()

    def on_renew(self) -> None:
        """Replace every process, one after the other; again from the start when asked meanwhile."""
        self._is_renewal_wanted = True
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        while self._is_renewal_wanted:
            self._is_renewal_wanted = False
            for seat in self.seats:
                if seat.is_present:  # else the next process of the slot is a new one anyway
                    await self.retire(seat.index)
        self._send(Renewed())

    # -- decisions

    def _dispatch(self) -> None:
        """Give out what is queued: to idle processes first, then one ahead to busy ones."""
        while self._queue:
            seat = self._roomiest()
            if seat is None:
                break
            self._deliver(seat, self._queue.popleft())
        if not self._queue:
            self._spread()
        self._conditions.check()

    def _roomiest(self) -> Seat | None:
        best: Seat | None = None
        best_jobs = DEPTH
        for seat in self.seats:  # the lowest index of equals: few processes stay warm
            if not seat.takes_jobs or (jobs := seat.jobs) >= best_jobs:
                continue
            best, best_jobs = seat, jobs
            if not jobs:
                break
        return best

    def _deliver(self, seat: Seat, ticket: Ticket) -> None:
        self._submitting(seat, seat.deliver, ticket)

    def _submitting(self, seat: Seat, submit: Callable[..., None], *arguments: Any) -> None:
        """Have the seat write to its process; watch the clock until it has answered."""
        try:
            submit(*arguments)
        except RingFull:
            # the process wrote into memory that is not its own: what it has comes back when it is dead
            logger.error("the ring of a pool process is damaged: slot=%d", seat.index)
            self._condemn(seat, "its ring is damaged")
        if self._ticking is None:
            self._tick_later()

    def _spread(self) -> None:
        """Give idle processes what waits behind a running job elsewhere."""
        idle = [seat for seat in self.seats if seat.takes_jobs and not seat.line]
        if not idle:
            return
        for seat in self.seats:
            if seat.jobs < DEPTH:
                continue
            ticket = seat.take_back()
            if ticket is None:
                continue
            self._deliver(idle.pop(0), ticket)
            if not idle:
                return

    def _take_back_all(self, seat: Seat) -> list[Ticket]:
        """What is with the process and not begun, in order."""
        tickets: list[Ticket] = []
        while (ticket := seat.take_back()) is not None:
            tickets.insert(0, ticket)
        return tickets

    def _requeue(self, tickets: Sequence[Ticket]) -> None:
        """Put jobs at the head of the queue, their order kept; those nobody wants end here."""
        for ticket in reversed(tickets):
            if ticket.is_dropped:
                self._endings.drop(ticket)
            else:
                self._queue.appendleft(ticket)

    def _may_run_again(self, ticket: Ticket, how: str) -> bool:
        if ticket.is_dropped:
            self._endings.drop(ticket)
        elif ticket.is_overrun:
            self._endings.overrun(ticket)
        elif ticket.deaths >= _MOST_DEATHS:
            self._endings.lose(ticket, how)
        else:
            if ticket.deaths:
                self._endings.count("repeated")
            return True
        return False

    def _withdraw(self, ticket: Ticket) -> None:
        """The caller has gone."""
        ticket.is_dropped = True
        if ticket in self._queue:
            self._queue.remove(ticket)
            self._endings.drop(ticket)
            return
        for seat in self.seats:
            if ticket not in seat.line:
                continue
            if seat.line[-1] is ticket and seat.take_back() is not None:
                self._endings.drop(ticket)
                self._dispatch()
            else:
                seat.board.withdraw(ticket.place, ticket.job_id)  # a job that looks at its time ends early
            return

    # -- answers

    def _on_answers(self, seat: Seat) -> None:
        try:
            for completion in seat.completions():
                self._on_completion(seat, completion)
        except (RingBroken, msgspec.DecodeError) as error:
            logger.error("a pool process talks nonsense: slot=%d error=%r", seat.index, str(error))
            self._condemn(seat, "its answers cannot be read")
        self._dispatch()

    def _on_completion(self, seat: Seat, completion: Prepared | Configured | Answer) -> None:
        if isinstance(completion, Prepared):
            self._submitting(seat, seat.arrive, list(self._configurations.values()))
        else:
            head = seat.answered()
            self._submitting(seat, seat.teach_on)
            if isinstance(completion, Answer) and isinstance(head, Ticket) and head.job_id == completion.job_id:
                self._endings.settle(head, completion, seat.body(completion, head), seat.index)
            elif isinstance(completion, Configured) and isinstance(head, Piece):
                self._note_configured(head, completion)
            else:
                if isinstance(head, Ticket):
                    seat.line.appendleft(head)
                raise RingBroken("the answer is not to the message whose turn it is")
        if not seat.is_up and not seat.is_learning:
            seat.is_up = True
            self._send(Up(seat.index))

    def _note_configured(self, piece: Piece, completion: Configured) -> None:
        if completion.error:
            self._endings.count("configurations_refused")
            logger.error("configuration refused: key=%d error=%r", piece.configuration.key, completion.error)

    # -- time

    def _tick_later(self) -> None:
        assert self._loop is not None
        self._ticking = self._loop.call_later(_TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        """Look for processes that are beyond their time; only while some have work."""
        self._ticking = None
        now = time.monotonic()
        is_busy = False
        for seat in self.seats:
            if not seat.line:
                continue
            is_busy = True
            head = seat.line[0]
            if isinstance(head, Piece):
                if now - head.heads_since > CONFIGURE_TIMEOUT_S:
                    self._condemn(seat, "it does not take its configuration")
            elif now - head.heads_since > head.deadline_s + self._overrun_grace_s:
                head.is_overrun = seat.is_overrun = True
                self._condemn(seat, f"job {head.job_id} took longer than {head.deadline_s:g} s")
        if is_busy:
            self._tick_later()

    def _condemn(self, seat: Seat, why: str) -> None:
        """Have the process killed; what it has not begun goes elsewhere."""
        if seat.is_condemned:
            return
        seat.is_condemned = True
        self._requeue(self._take_back_all(seat))
        self._send(Kill(seat.index, line(why)))
        self._dispatch()
