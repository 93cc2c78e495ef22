"""The pool processes as the supervisor sees them: who is there, who died, who may be forked again and when.

The order after a death is fixed (`control.py`): reaped, told to the frontend, reset by it, forked.  A process that
dies before it was ever of use, again and again, is forked after longer and longer pauses; when none has ever come
through its preparation, the pool cannot start at all and the gateway gives up.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Container
from typing import Any

import multiprocess

from pool.row import Row

logger = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 60.0
# pauses before another start after so many failed ones in a row
PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
# so many failed starts in a row in one slot, while no process was ever prepared, mean that the pool cannot start
MOST_FIRST_FAILURES = 3

_fork_context = multiprocess.get_context("fork")
_ALL_SIGNALS = signal.valid_signals()


class Forked:
    """One child process of the supervisor; it is reaped here and nowhere else, so its pid means nobody else
    meanwhile.
    """

    def __init__(self, name: str, main: Callable[..., Any], *arguments: Any, leads_group: bool) -> None:
        self._leads_group = leads_group
        self._process = _fork_context.Process(target=main, args=arguments, name=name)
        # a signal that arrives in the child before it has handlers of its own would be reported to this process's pipe
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid: int = self._process.pid

    def reap(self, *, wait: bool = False) -> int | None:
        """Exit code, negative for a signal; None while it lives.  What it left in its process group is killed."""
        options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
        try:
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
        except ChildProcessError:
            pass  # multiprocess reaps what is dead whenever it starts another process; it has kept the exit code
        if self._leads_group:  # while the group has a member its number is not given to anybody else
            self._signal_group()
        self._process.join()
        code: int = self._process.exitcode
        self._process.close()
        return code

    def kill(self) -> None:
        """SIGKILL, for a pool process with everything it started."""
        if self._leads_group:
            self._signal_group()
        with contextlib.suppress(ProcessLookupError):  # dead and reaped by multiprocess
            os.kill(self.pid, signal.SIGKILL)  # it may not lead a group yet

    def _signal_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # no group any more, or not yet
            os.killpg(self.pid, signal.SIGKILL)


def reap_strangers(known: Container[int]) -> None:
    """Reap dead children that nobody here forked: as a container's first process this one inherits every orphan."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in known:  # one that died just now: its own reaping comes first
            return
        os.waitpid(dead.si_pid, 0)


class _Post:
    """What the supervisor knows about one pool slot."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: Forked | None = None
        self.started = 0.0
        self.due: float | None = 0.0  # when to fork; None: not yet allowed, or there is a process
        self.is_up = False
        self.has_been_up = False
        self.failures = 0  # starts in a row that came to nothing
        self.is_killed = False  # it was asked for


class Crew:
    """`entry(index)` is the main function of a pool process; `prepare_timeout_s` what it may take to prepare its
    workshop.
    """

    def __init__(self, row: Row, entry: Callable[[int], None], *, prepare_timeout_s: float = PREPARE_TIMEOUT_S) -> None:
        self._row = row
        self._entry = entry
        self._prepare_timeout_s = prepare_timeout_s
        self._posts = [_Post(index) for index in range(len(row.slots))]
        self._was_ever_prepared = False

    @property
    def up(self) -> int:
        return sum(1 for post in self._posts if post.is_up)

    @property
    def is_assembled(self) -> bool:
        """Every process is up; one that fails to start does not keep the others from serving."""
        return self.up > 0 and all(post.has_been_up or post.failures for post in self._posts)

    @property
    def cannot_start(self) -> bool:
        return not self._was_ever_prepared and any(post.failures >= MOST_FIRST_FAILURES for post in self._posts)

    @property
    def pids(self) -> set[int]:
        return {post.process.pid for post in self._posts if post.process is not None}

    def tick(self, now: float) -> None:
        """Fork what is due, kill what does not come through its preparation."""
        for post in self._posts:
            if post.due is not None and post.due <= now:
                self._fork(post, now)
            elif post.process is not None and self._is_stuck(post, now):
                logger.error("a pool process does not get ready: slot=%d pid=%d", post.index, post.process.pid)
                post.process.kill()
                post.started = now

    def _is_stuck(self, post: _Post, now: float) -> bool:
        return now - post.started > self._prepare_timeout_s and not self._row.slots[post.index].board.is_prepared

    def next_due(self) -> float | None:
        """When `tick` has something to do, at the earliest."""
        times = [post.due for post in self._posts if post.due is not None]
        for post in self._posts:
            if post.process is not None and not self._row.slots[post.index].board.is_prepared:
                times.append(post.started + self._prepare_timeout_s)
        return min(times, default=None)

    def _fork(self, post: _Post, now: float) -> None:
        post.process = Forked(f"mediagate-pool-{post.index}", self._entry, post.index, leads_group=True)
        post.due = None
        post.is_killed = False
        post.started = now
        logger.debug("pool process forked: slot=%d pid=%d", post.index, post.process.pid)

    def reap(self) -> list[tuple[int, str]]:
        """(slot, how) of every process that has died since the last call."""
        dead = []
        for post in self._posts:
            if post.process is None or (code := post.process.reap()) is None:
                continue
            how = signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit code {code}"
            level = logging.INFO if post.is_killed else logging.WARNING
            logger.log(level, "pool process died: slot=%d pid=%d how=%r", post.index, post.process.pid, how)
            self._was_ever_prepared |= self._row.slots[post.index].board.is_prepared
            post.process = None
            post.failures = 0 if post.is_up else post.failures + 1
            post.is_up = False
            dead.append((post.index, how))
        return dead

    def on_up(self, slot: int) -> None:
        post = self._posts[slot]
        if post.process is None:  # it died since
            return
        post.is_up = post.has_been_up = self._was_ever_prepared = True
        post.failures = 0

    def on_reset(self, slot: int) -> None:
        """The frontend has taken the slot's jobs back: another process may come, now or after a pause."""
        post = self._posts[slot]
        if post.process is not None or post.due is not None:
            return
        pause_s = PAUSES_S[min(post.failures, len(PAUSES_S) - 1)]
        if pause_s:
            logger.warning("pool process waits to start: slot=%d failures=%d pause_s=%g", slot, post.failures, pause_s)
        post.due = time.monotonic() + pause_s

    def kill(self, slot: int, why: str) -> None:
        post = self._posts[slot]
        if post.process is None:  # it died before the request came
            return
        logger.info("killing a pool process: slot=%d pid=%d why=%r", slot, post.process.pid, why)
        post.is_killed = True
        post.process.kill()

    def end(self) -> None:
        """Kill and reap them all; there is nothing in a pool process that would have to be put in order."""
        alive = [post for post in self._posts if post.process is not None]
        for post in alive:
            assert post.process is not None
            post.process.kill()
        for post in alive:
            assert post.process is not None
            post.process.reap(wait=True)
            post.process = None
