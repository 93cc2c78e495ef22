"""What a submitted job comes to: a result with its cost, or one of five errors; and the pool's counts of them.

Each error says who must act: the client (`JobFailed`), the operator (`JobOverran`: the limit, or the media), nobody
again (`JobLost`), us (`JobCrashed`), or whoever closed the pool (`PoolClosed`).
"""

from typing import Generic, TypeVar

import msgspec

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


class JobFailed(Exception):
    """The workshop refused the job because of what the client sent; the message is the workshop's."""


class JobLost(Exception):
    """The job was running when two processes died."""


class JobOverran(Exception):
    """The job did not end before its deadline."""


class JobCrashed(Exception):
    """The workshop raised something else; `kind` is the exception's type, the stack is in the log only."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class PoolClosed(Exception):
    """The pool was closed before the job ended."""


class Outcome(msgspec.Struct, Generic[ResultT], frozen=True):
    """A job's result and its cost.  `queued_s`: from submit until a process began; `slot`: the pool slot it ran in."""

    result: ResultT
    queued_s: float
    run_s: float
    minor_faults: int
    slot: int


class PoolStatistics(msgspec.Struct, frozen=True):
    """Counts since the start: jobs by how they ended, runs repeated after a death, processes that died or were
    replaced (`retired`: those of the `deaths` that were asked for by `retire`).
    """

    done: int = 0
    failed: int = 0
    crashed: int = 0
    lost: int = 0
    overran: int = 0
    withdrawn: int = 0
    repeated: int = 0
    deaths: int = 0
    retired: int = 0
    configurations_refused: int = 0
