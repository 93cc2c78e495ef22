"""The supervisor: `python gateway.py` itself.  It maps the memory, forks frontend and pool processes, and then only
watches.

It starts no thread and no event loop, so forking from it is safe at any time, and it waits in one `poll` for three
things: signals (written into a pipe by the interpreter's own handler), messages of the frontend, and the clock.  It
decides who lives; it knows nothing of jobs (`crew.py` keeps the pool processes, `control.py` the messages,
`notify.py` what systemd hears).

SIGTERM: the frontend drains and ends by itself, then the pool processes end.  SIGINT: the same without the time for
balancers.  A second of either: at once (a third does not even wait for the frontend to remove its files).  One that
comes within ECHO_S of the last is that one once more: a shell, `timeout` or a service manager signals a process and
then its group.  SIGHUP: the pool processes are replaced one by one.  A frontend that dies ends the gateway, since the
leases and connections were its own; the service manager starts it again.
"""

import contextlib
import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from pool import child, process
from pool.arena import Arena
from pool.control import (
    Died,
    Drain,
    Kill,
    Ping,
    Pong,
    Quit,
    Ready,
    Renew,
    Renewed,
    Reset,
    Status,
    Up,
    control_pair,
)
from pool.crew import PREPARE_TIMEOUT_S, Crew, Forked, reap_strangers
from pool.link import FrontendLink
from pool.mapping import Mapping, round_up
from pool.notify import Notifier
from pool.row import Row

logger = logging.getLogger(__name__)

EXIT_CLEAN = 0
EXIT_CONFIGURATION = 1
EXIT_USAGE = 2
EXIT_PORT_TAKEN = 3
EXIT_POOL_CANNOT_START = 4
EXIT_FRONTEND_DIED = 5

ECHO_S = 0.5  # between two signals of somebody who means both
# after a second signal the frontend has this long to remove its files
QUIT_GRACE_S = 2.0
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class _Signals:
    """Signals as bytes in a pipe, while the `with` block lasts."""

    def __enter__(self) -> "_Signals":
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in _HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reading.close()
        self._writing.close()

    @property
    def fd(self) -> int:
        return self._reading.fileno()

    def take(self) -> list[int]:
        try:
            return list(self._reading.recv(4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """In a child: the descriptors only."""
        self._reading.close()
        self._writing.close()


def assert_single_thread() -> None:
    """RuntimeError when this process has more than one thread: a fork would copy locks that nobody ever opens."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(
            f"the supervisor has {threads} threads and must have one before it forks; "
            "OPENBLAS_NUM_THREADS=1 (and OMP_NUM_THREADS=1) must be set before numpy is imported"
        )


class Supervisor:
    """`processes`: pool processes.  `mapping_bytes`: both arenas together, a quarter for inputs.  `keep_bytes`: of
    the touched memory, what is kept for reuse (divided likewise).  `stop_timeout_s`: when the frontend has not ended
    by itself so long after being told to drain, it is killed; more than settle time and grace together.
    """

    def __init__(
        self,
        *,
        processes: int,
        mapping_bytes: int,
        keep_bytes: int,
        stop_timeout_s: float,
        notifier: Notifier | None = None,
        prepare_timeout_s: float = PREPARE_TIMEOUT_S,
    ) -> None:
        row_bytes = round_up(Row.nbytes(processes))
        inputs_bytes = round_up(mapping_bytes // 4)
        outputs_bytes = round_up(max(mapping_bytes - inputs_bytes, 1))
        self.mapping = Mapping(row_bytes + inputs_bytes + outputs_bytes)
        self.row = Row(self.mapping, 0, processes)
        self.inputs = Arena(self.mapping, row_bytes, inputs_bytes, keep_bytes=keep_bytes // 4)
        self.outputs = Arena(
            self.mapping, row_bytes + inputs_bytes, outputs_bytes, keep_bytes=keep_bytes - keep_bytes // 4
        )
        self._control, self._frontend_control = control_pair()
        self._notifier = notifier or Notifier()
        self._stop_timeout_s = stop_timeout_s
        self._prepare_timeout_s = prepare_timeout_s
        self._signals = _Signals()
        self._frontend: Forked | None = None
        self._ready_text: str | None = None
        self._is_announced = False
        self._is_draining = False
        self._is_quitting = False
        self._stopped_at = -math.inf  # when a signal to end was last heeded
        self._kill_at: float | None = None
        self._ping_at = 0.0
        self._is_pinged = False
        self._code: int | None = None

    def run(self, frontend: Callable[[FrontendLink], int], workshop: process.Workshop) -> int:
        """Fork everything, watch until it has ended, return the exit code.

        `frontend` runs in a process of its own; its return value is the exit code unless something else decides.
        `workshop` is used in every pool process.  RuntimeError when there is more than one thread.
        """
        assert_single_thread()
        pid = os.getpid()
        link = FrontendLink(
            self.mapping, self.row, self.inputs, self.outputs, self._frontend_control, workshop.result_type
        )

        def pool_entry(index: int) -> NoReturn:
            self._shed_in_pool_process(index)
            process.main(self.row.slots[index], self.mapping, workshop, pid)

        crew = Crew(self.row, pool_entry, prepare_timeout_s=self._prepare_timeout_s)
        gc.collect()
        gc.freeze()  # what exists now stays shared: the children's collections do not touch these objects' pages
        with self._signals:
            try:
                crew.tick(time.monotonic())
                self._frontend = Forked(
                    "mediagate-frontend", self._frontend_entry, frontend, link, pid, leads_group=False
                )
                self._frontend_control.close()
                return self._watch(crew)
            finally:
                self._end(crew)

    # -- in the children

    def _frontend_entry(self, frontend: Callable[[FrontendLink], int], link: FrontendLink, parent_pid: int) -> NoReturn:
        # a terminal's or a group's signals are for the supervisor, which tells the frontend what to do
        child.begin("mediagate:front", parent_pid, ignore=frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP}))
        self._signals.close()
        self._control.close()
        self._notifier.close()
        try:
            code = frontend(link)
        except Exception:
            logger.critical("the frontend failed", exc_info=True)
            code = EXIT_FRONTEND_DIED
        sys.exit(code)

    def _shed_in_pool_process(self, index: int) -> None:
        """Close what belongs to others."""
        self._signals.close()
        self._control.close()
        self._frontend_control.close()
        self._notifier.close()
        for slot in self.row.slots:
            if slot.index != index:
                slot.close()
            else:
                slot.lending.close_frontend_end()

    # -- the loop

    def _watch(self, crew: Crew) -> int:
        assert self._frontend is not None
        waiting = select.poll()
        waiting.register(self._signals.fd, select.POLLIN)
        while True:
            now = time.monotonic()
            crew.tick(now)
            self._on_clock(now)
            self._listen(waiting)
            waiting.poll(self._timeout_ms(crew))
            numbers = self._signals.take()
            self._on_messages(crew)
            for slot, how in crew.reap():
                self._control.send(Died(slot, how))
            if crew.cannot_start and self._code is None:
                logger.critical("the pool cannot start: its processes end before they are ready")
                self._quit(EXIT_POOL_CANNOT_START)
            for number in numbers:
                self._on_signal(number)
            code = self._frontend.reap()
            if code is not None:
                self._frontend = None
                return self._exit_code(code)
            if signal.SIGCHLD in numbers:
                reap_strangers({*crew.pids, self._frontend.pid})

    def _listen(self, waiting: select.poll) -> None:
        if self._control.is_open:
            waiting.register(self._control.fd, select.POLLIN | (select.POLLOUT if self._control.has_unsent else 0))
            return
        with contextlib.suppress(KeyError):  # the frontend is ending; its exit code follows
            waiting.unregister(self._control.fd)

    def _timeout_ms(self, crew: Crew) -> int | None:
        times = [at for at in (crew.next_due(), self._kill_at) if at is not None]
        if self._notifier.watchdog_s and not self._is_pinged:
            times.append(self._ping_at)
        if not times:
            return None
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1)

    def _on_clock(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at and self._frontend is not None:
            logger.error("the frontend does not end and is killed: pid=%d", self._frontend.pid)
            self._kill_at = None
            self._code = EXIT_FRONTEND_DIED if self._code is None else self._code
            self._frontend.kill()
        if self._notifier.watchdog_s and not self._is_pinged and now >= self._ping_at:
            self._is_pinged = True  # no second ping before the answer: a stuck frontend does not fill the socket
            self._ping_at = now + self._notifier.watchdog_s / 4
            self._control.send(Ping())

    def _on_messages(self, crew: Crew) -> None:
        if not self._control.is_open:
            return
        self._control.flush()
        for message in self._control.receive():
            if isinstance(message, Reset):
                crew.on_reset(message.slot)
            elif isinstance(message, Up):
                crew.on_up(message.slot)
            elif isinstance(message, Kill):
                crew.kill(message.slot, message.why)
            elif isinstance(message, Pong):
                self._is_pinged = False
                self._notifier.watchdog()
            elif isinstance(message, Ready):
                self._ready_text = message.text
            elif isinstance(message, Status):
                self._notifier.status(message.text)
            elif isinstance(message, Renewed):
                self._on_renewed()
        if not self._is_announced and self._ready_text is not None and crew.is_assembled and not self._is_draining:
            self._is_announced = True
            self._notifier.ready(self._ready_text)
            logger.info("ready: %s", self._ready_text)

    # -- signals

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._renew()
        elif number in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(number).name
            now = time.monotonic()
            if now - self._stopped_at < ECHO_S:
                logger.info("the same signal once more: signal=%s", name)
                return
            self._stopped_at = now
            if self._is_draining:
                logger.warning("second signal, ending at once: signal=%s", name)
                self._quit(None)
            else:
                logger.info("draining: signal=%s", name)
                self._is_draining = True
                self._kill_at = now + self._stop_timeout_s
                self._notifier.stopping("draining")
                self._control.send(Drain(settle=number == signal.SIGTERM))

    def _quit(self, code: int | None) -> None:
        """Let the frontend end at once; `code` is the exit code whatever it says."""
        self._code = code if self._code is None else self._code
        self._kill_at = time.monotonic() + (0.0 if self._is_quitting else QUIT_GRACE_S)
        self._is_draining = self._is_quitting = True
        self._control.send(Quit())

    def _renew(self) -> None:
        if self._is_draining or not self._is_announced:
            logger.warning("not replacing pool processes: the gateway is starting or ending")
            return
        logger.info("replacing pool processes")
        self._notifier.reloading()
        self._control.send(Renew())

    def _on_renewed(self) -> None:
        logger.info("pool processes replaced")
        if not self._is_draining and self._ready_text is not None:
            self._notifier.ready(self._ready_text)

    # -- the end

    def _exit_code(self, code: int) -> int:
        if self._code is not None:
            return self._code
        if code < 0:
            logger.critical("the frontend died: signal=%d", -code)
            return EXIT_FRONTEND_DIED
        if code not in (EXIT_CLEAN, EXIT_CONFIGURATION, EXIT_USAGE, EXIT_PORT_TAKEN):
            logger.critical("the frontend ended: exit_code=%d", code)
        return code

    def _end(self, crew: Crew) -> None:
        if self._frontend is not None:
            self._frontend.kill()
            self._frontend.reap(wait=True)
            self._frontend = None
        crew.end()
        gc.unfreeze()
        self.close()

    def close(self) -> None:
        """Close the descriptors; `run` does so at its end."""
        self._control.close()
        self._frontend_control.close()
        self._notifier.close()
        self.row.close()
