"""A circuit breaker for one engine worker: one that is well by its own word and fails its requests gets none for a
while.

    closed --`failure_threshold` failures in a row, within the window--> open
    open --its time is over, or the worker was introduced again--> half-open
    half-open --`success_threshold` answers--> closed           half-open --one failure--> open

Rule: only what the worker is to blame for counts (`COUNTED`), never a refusal of the request and never 429, which says
"not now".  A half-open breaker lets in no more requests at once than answers are still missing, so that a worker that
hangs holds few.  An answer counts at its first event while half-open, and at its regular end while closed: a worker
that always dies in mid-answer must not look well for having begun.
"""

import enum
import time
from collections import deque
from collections.abc import Callable

import msgspec

COUNTED = frozenset(
    {
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "UNKNOWN",
        "INTERNAL",
        "DATA_LOSS",
    }
)
"""Statuses that the worker is to blame for."""


class BreakerState(enum.Enum):
    """The value is the word used in metrics and `GET /workers`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerSettings(msgspec.Struct, frozen=True):
    """Field names follow the flags; times in seconds.  `disabled`: nothing is ever counted."""

    failure_threshold: int = 10
    success_threshold: int = 3
    timeout_duration_s: float = 60.0
    window_duration_s: float = 120.0
    disabled: bool = False


OnTransition = Callable[[BreakerState, BreakerState], None]


class Breaker:
    """Make one for each worker.  `on_transition(from, to)` is told every change of state."""

    def __init__(
        self,
        settings: BreakerSettings,
        on_transition: OnTransition = lambda _from, _to: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_transition = on_transition
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures: deque[float] = deque(maxlen=settings.failure_threshold)  # when they were, in a row
        self._opened_at = 0.0
        self._answers = 0  # while half-open
        self._trials = 0  # requests under way that were let in while half-open
        self._period = 0  # of being half-open: what a trial of an earlier one says counts no more

    @property
    def state(self) -> BreakerState:
        """As of now: an open one whose time is over is half-open from the first look on."""
        if self._state is BreakerState.OPEN and self._clock() - self._opened_at >= self._settings.timeout_duration_s:
            self.try_again()
        return self._state

    @property
    def admits(self) -> bool:
        """Whether the worker may be given a request now."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            return self._trials + self._answers < self._settings.success_threshold
        return state is BreakerState.CLOSED

    @property
    def failures(self) -> int:
        """In a row, within the window."""
        since = self._clock() - self._settings.window_duration_s
        return sum(moment > since for moment in self._failures)

    def begin(self) -> "Trial":
        """A request is sent; the trial is told how it goes, and ended."""
        if self.state is not BreakerState.HALF_OPEN:
            return Trial(self, period=None)
        self._trials += 1
        return Trial(self, period=self._period)

    def try_again(self) -> None:
        """The worker may be another one now: what was open is half-open."""
        if self._state is BreakerState.OPEN:
            self._answers = self._trials = 0
            self._period += 1
            self._change(BreakerState.HALF_OPEN)

    # ------------------------------------------------------------ told by trials

    def _answered(self, period: int | None) -> None:
        if self._state is not BreakerState.HALF_OPEN or period != self._period:
            return
        self._trials -= 1
        self._answers += 1
        if self._answers >= self._settings.success_threshold:
            self._failures.clear()
            self._change(BreakerState.CLOSED)

    def _unanswered(self, period: int | None) -> None:
        if self._state is BreakerState.HALF_OPEN and period == self._period:
            self._trials -= 1

    def _finished(self) -> None:
        if self._state is BreakerState.CLOSED:
            self._failures.clear()

    def _failed(self) -> None:
        if self._settings.disabled or self._state is BreakerState.OPEN:
            return
        self._failures.append(self._clock())
        if self._state is BreakerState.HALF_OPEN or self.failures >= self._settings.failure_threshold:
            self._opened_at = self._clock()
            self._answers = self._trials = 0  # those under way say nothing any more
            self._change(BreakerState.OPEN)

    def _change(self, state: BreakerState) -> None:
        before, self._state = self._state, state
        self._on_transition(before, state)


class Trial:
    """What one request says of its worker: `answered` at the first event, then `finished` or `failed` or neither (the
    client left), and `end` in any case.
    """

    def __init__(self, breaker: Breaker, period: int | None) -> None:
        self._breaker = breaker
        self._period = period
        self._is_open = True

    def answered(self) -> None:
        if self._is_open:
            self._is_open = False
            self._breaker._answered(self._period)

    def finished(self) -> None:
        self._breaker._finished()

    def failed(self, status: str) -> bool:
        """Whether a failure with that gRPC status counts."""
        if status not in COUNTED:
            return False
        self._breaker._failed()
        return True

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._breaker._unanswered(self._period)
