"""The pool process: takes one job after the other from its submission ring, runs it, answers.

No event loop, no thread, and no socket but the one files are lent over (`pool.lending`).  It never dies of a bad job:
whatever the workshop raises becomes an answer.  What it works on is on its board, so that after a death everybody knows
which job it was.  The work itself, the workshop, is handed over before the fork; this file knows nothing of it.
"""

import logging
import os
import resource
import select
import time
from typing import Any, NoReturn, Protocol

import msgspec

from pool import child
from pool.files import FileViews
from pool.mapping import Mapping
from pool.messages import (
    Answer,
    BodyTooLarge,
    Configure,
    Configured,
    Ending,
    Prepared,
    RunJob,
    Submission,
    stow,
    unstow,
)
from pool.ring import RingReader, RingWriter
from pool.row import CONFIGURATION, Board, PoolSlot
from pool.spans import Span

logger = logging.getLogger(__name__)

# an idle process looks this often whether its parent is there and whether files it has mapped are still in use
_IDLE_MS = 5000
_CRASH_CHARACTERS = 500


class JobError(Exception):
    """The job cannot be done because of what the client sent; the message is for the client."""


class Bench:
    """What a job may touch while it runs.  Views are valid until `run` returns."""

    def __init__(self, mapping: Mapping, board: Board, files: FileViews, message: RunJob, deadline: float) -> None:
        self._mapping = mapping
        self._board = board
        self._files = files
        self._job_id = message.job_id
        self._place = message.place
        self._deadline = deadline

    def span(self, span: Span) -> memoryview:
        """The bytes of a span, writable; uint8, `span.nbytes` long."""
        return self._mapping.view(span.offset, span.nbytes)

    def file(self, name: str, nbytes: int) -> memoryview:
        """File `name` of the segment store, writable; `nbytes` long.  The mapping is kept, so that a recycled file
        faults in once.

        OSError when there is no such file (any more) or it is shorter.
        """
        return self._files.view(name, nbytes)

    @property
    def is_withdrawn(self) -> bool:
        """Nobody wants the result any more."""
        return self._board.is_withdrawn(self._place, self._job_id)

    def remaining(self) -> float:
        """Seconds to the job's deadline, 0.0 when it has passed or nobody wants the result any more.

        A job that sees 0.0 raises `TimeoutError`.
        """
        if self.is_withdrawn:
            return 0.0
        return max(0.0, self._deadline - time.monotonic())


class Workshop(Protocol):
    """The work of a pool: made before the fork, used in every pool process (`job_type`, `result_type` also in the
    frontend).
    """

    @property
    def job_type(self) -> Any:
        """A tagged msgspec union."""

    @property
    def result_type(self) -> Any:
        """A tagged msgspec union."""

    def prepare(self) -> None:
        """Once in every process, after the fork."""

    def configure(self, key: int, payload: bytes) -> None:
        """Keep `payload` under `key`, in place of what was there before."""

    def run(self, job: Any, bench: Bench) -> Any:
        """Do one job.  JobError: it is the client's fault.  TimeoutError: the deadline has passed.  Anything else is
        a fault.
        """


class PoolProcess:
    """The loop of one pool process."""

    def __init__(self, slot: PoolSlot, mapping: Mapping, workshop: Workshop) -> None:
        self._slot = slot
        self._mapping = mapping
        self._workshop = workshop
        self._reader = RingReader(slot.submission, slot.submission_bell)
        self._writer = RingWriter(slot.completion, slot.completion_bell)
        self._files = FileViews(slot.lending.borrow)
        self._payload = bytearray()
        self._envelopes = msgspec.msgpack.Decoder(Submission)
        self._jobs = msgspec.msgpack.Decoder(workshop.job_type)
        self._encoder = msgspec.msgpack.Encoder()

    def serve(self) -> NoReturn:
        """Prepare the workshop, then work until killed."""
        self._workshop.prepare()
        self._slot.board.set_prepared()
        self._put(Prepared(os.getpid()))
        parent = os.getppid()
        waiting = select.poll()
        waiting.register(self._slot.submission_bell.fd, select.POLLIN)
        while True:
            if self._slot.submission_bell.answer():
                self._handle(self._envelopes.decode(self._reader.get()))
                continue
            if not waiting.poll(_IDLE_MS):
                self._files.forget_unlinked()
                if os.getppid() != parent:  # the kernel's signal should have come first
                    os._exit(0)

    def _put(self, message: Prepared | Configured | Answer) -> None:
        self._writer.put(self._encoder.encode(message))

    def _handle(self, message: RunJob | Configure) -> None:
        if isinstance(message, Configure):
            self._put(self._configure(message))
            return
        board = self._slot.board
        board.running = message.job_id
        self._put(self._run(message))
        board.running = 0

    def _configure(self, message: Configure) -> Configured:
        self._payload += self._slot.long[CONFIGURATION][: message.nbytes]
        if not message.is_last:
            return Configured(message.version)
        payload, self._payload = bytes(self._payload), bytearray()
        try:
            self._workshop.configure(message.key, payload)
        except Exception as error:
            logger.error("configuration refused: key=%d version=%d", message.key, message.version, exc_info=True)
            return Configured(message.version, f"{type(error).__name__}: {error}"[:_CRASH_CHARACTERS])
        return Configured(message.version)

    def _run(self, message: RunJob) -> Answer:
        place = self._slot.long[message.place]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.monotonic()
        ending, body = self._attempt(message, place, began + message.deadline_s)
        run_s = time.monotonic() - began
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        try:
            long_bytes, raw = stow(body, place, "result")
        except BodyTooLarge as error:
            ending, (long_bytes, raw) = Ending.CRASHED, stow(self._crash(error), place, "result")
        return Answer(message.job_id, ending, began, run_s, faults, long_bytes, raw)

    def _attempt(self, message: RunJob, place: memoryview, deadline: float) -> tuple[Ending, bytes]:
        bench = Bench(self._mapping, self._slot.board, self._files, message, deadline)
        if bench.is_withdrawn:
            return Ending.OVERRAN, b"\xc0"
        try:
            job = self._jobs.decode(unstow(message.long_bytes, message.body, place))
            return Ending.DONE, self._encoder.encode(self._workshop.run(job, bench))
        except JobError as error:
            return Ending.FAILED, self._encoder.encode(str(error))
        except TimeoutError:
            return Ending.OVERRAN, b"\xc0"
        except BaseException as error:  # SystemExit and the like are faults as well; the process goes on
            if bench.is_withdrawn:  # and may find its files gone already
                logger.debug("withdrawn job ended: job=%d error=%r", message.job_id, error)
                return Ending.OVERRAN, b"\xc0"
            logger.error("job crashed: job=%d pid=%d", message.job_id, os.getpid(), exc_info=True)
            return Ending.CRASHED, self._crash(error)

    def _crash(self, error: BaseException) -> bytes:
        return self._encoder.encode([type(error).__name__, str(error)[:_CRASH_CHARACTERS]])


def main(slot: PoolSlot, mapping: Mapping, workshop: Workshop, parent_pid: int) -> NoReturn:
    """Entry of a forked pool process; ends by an exception of `Workshop.prepare` or by a signal."""
    child.begin_pool_process(slot.index, parent_pid)
    PoolProcess(slot, mapping, workshop).serve()
