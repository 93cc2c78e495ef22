"""How a ticket ends: the one place where callers are told, pins end and outcomes are counted.

Every ticket comes here exactly once, except that a job whose caller has gone while it ran is counted as withdrawn
whatever its process answers.
"""

from typing import Any

import msgspec

from pool.messages import Answer, Ending
from pool.outcome import JobCrashed, JobFailed, JobLost, JobOverran, Outcome, PoolStatistics
from pool.seat import Ticket


class Endings:
    """`result_type`: the tagged union a job's result is decoded as."""

    def __init__(self, result_type: Any) -> None:
        self._results = msgspec.msgpack.Decoder(result_type)
        self._failures = msgspec.msgpack.Decoder(str)
        self._crashes = msgspec.msgpack.Decoder(tuple[str, str])
        self._counts: dict[str, int] = dict.fromkeys(PoolStatistics.__struct_fields__, 0)

    @property
    def statistics(self) -> PoolStatistics:
        return PoolStatistics(**self._counts)

    def count(self, what: str) -> None:
        """`what`: a field of PoolStatistics."""
        self._counts[what] += 1

    def settle(self, ticket: Ticket, answer: Answer, body: bytes, slot: int) -> None:
        """The process has answered and touches the job's spans no more."""
        if ticket.is_dropped or ticket.outcome.done():
            self.drop(ticket)
            return
        try:
            if answer.ending is Ending.DONE:
                self._finish(ticket, answer, self._results.decode(body), slot)
            elif answer.ending is Ending.FAILED:
                self._end(ticket, "failed", JobFailed(self._failures.decode(body)))
            elif answer.ending is Ending.OVERRAN:
                self.overrun(ticket)
            else:
                self._end(ticket, "crashed", JobCrashed(*self._crashes.decode(body)))
        except msgspec.DecodeError as error:
            crash = JobCrashed(type(error).__name__, f"the answer cannot be read: {error}")
            self._end(ticket, "crashed", crash)

    def _finish(self, ticket: Ticket, answer: Answer, result: Any, slot: int) -> None:
        ticket.unpin()
        self.count("done")
        queued_s = max(0.0, answer.began - ticket.submitted)
        ticket.outcome.set_result(Outcome(result, queued_s, answer.run_s, answer.minor_faults, slot))

    def overrun(self, ticket: Ticket) -> None:
        """It noticed its deadline, or its process was killed for it."""
        self._end(ticket, "overran", JobOverran(f"the job took longer than {ticket.deadline_s:g} s"))

    def lose(self, ticket: Ticket, how: str) -> None:
        """Too many processes died running it."""
        error = JobLost(f"{ticket.deaths} pool processes died running the job (the last: {how})")
        self._end(ticket, "lost", error)

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""
        self.count("withdrawn")
        ticket.unpin()

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """Tell the caller, if there is one left."""
        ticket.unpin()
        if not ticket.outcome.done():
            ticket.outcome.set_exception(error)

    def _end(self, ticket: Ticket, what: str, error: Exception) -> None:
        self.count(what)
        self.fail(ticket, error)
