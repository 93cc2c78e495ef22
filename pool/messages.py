"""What goes through the rings between the frontend and a pool process; msgpack, one message a cell.

Every submission gets exactly one answer, in order.  A body too long for a cell lies in one of the slot's long places
(`row.py`) and the message says how long it is; the answer to a job may use the job's own place again.
"""

import enum

import msgspec

from pool.ring import MESSAGE_BYTES
from pool.row import LONG_BYTES

NOTHING = msgspec.Raw(b"\xc0")

# what the envelope around a body takes at most: five numbers of nine bytes, tags and lengths
_ENVELOPE_BYTES = 96
INLINE_BYTES = MESSAGE_BYTES - _ENVELOPE_BYTES


class RunJob(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Run one job.  `place`: which long place is its own; `long_bytes`: 0 when the body is in the message."""

    job_id: int
    deadline_s: float
    place: int
    long_bytes: int
    body: msgspec.Raw


class Configure(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`nbytes` of the payload of one configuration are in the configuration place; `is_last` when it is complete."""

    version: int
    key: int
    nbytes: int
    is_last: bool


class Ending(enum.IntEnum):
    """How a job ended: what the body is."""

    DONE = 0  # the result
    FAILED = 1  # str, from JobError
    CRASHED = 2  # [str, str]: type and message of any other exception
    OVERRAN = 3  # nothing: the job noticed its deadline


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message of a process: its workshop is ready."""

    pid: int


class Configured(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answer to Configure; `error` when the workshop refused the complete payload."""

    version: int
    error: str = ""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answer to RunJob.  `began`: CLOCK_MONOTONIC; `run_s`; `minor_faults` of the process during the run."""

    job_id: int
    ending: Ending
    began: float
    run_s: float
    minor_faults: int
    long_bytes: int
    body: msgspec.Raw


Submission = RunJob | Configure
Completion = Prepared | Configured | Answer


class BodyTooLarge(Exception):
    """`nbytes` of a job or result are more than the `limit` a long place has."""

    def __init__(self, what: str, nbytes: int) -> None:
        super().__init__(f"a {what} of {nbytes} bytes does not fit into {LONG_BYTES} bytes")
        self.nbytes = nbytes
        self.limit = LONG_BYTES


def stow(body: bytes, place: memoryview, what: str) -> tuple[int, msgspec.Raw]:
    """Put a body where it fits: (0, body) for one that goes inside the message, else (its length, nothing).
    BodyTooLarge.
    """
    if len(body) <= INLINE_BYTES:
        return 0, msgspec.Raw(body)
    if len(body) > len(place):
        raise BodyTooLarge(what, len(body))
    place[: len(body)] = body
    return len(body), NOTHING


def unstow(long_bytes: int, body: msgspec.Raw, place: memoryview) -> memoryview | msgspec.Raw:
    """The body's bytes; a view of `place` when they are long, valid until the message is answered."""
    return place[:long_bytes] if long_bytes else body
