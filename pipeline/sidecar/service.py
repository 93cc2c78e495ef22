"""The sidecar at work: so many jobs at once, a sign of life each five seconds, an orderly end.

Rules.  A job is taken only while it can be worked on: pool processes are there and nobody has asked to end.  Every job
that can be read is answered once, with its tensors or with the reason; one that cannot be read has no key to answer to
and is dropped.  At the end running jobs finish within the grace, and what has not is put back in front of the queue,
for another sidecar, unless its worker has given up.  A Redis that goes away costs the answers under way and nothing
else: everybody asks again a second later.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping

from pipeline.logs import event
from pipeline.metrics import Metrics
from pipeline.sidecar.protocol import (
    EXPIRED,
    HELLO_PERIOD_S,
    LIMIT_EXCEEDED,
    PROCESSOR_ERROR,
    RESULT_PUSH_FAILED,
    VERSION,
    Job,
    Malformed,
    Refusal,
    decode_job,
    encode_failure,
    job_id_in,
)
from pipeline.sidecar.queue import JobQueue, JobTooLarge, QueueDown
from pipeline.sidecar.work import SCHEMES, JobWork
from pipeline.ticket import Ticket
from pool.pool import PoolClosed

_log = logging.getLogger("mediagate.sidecar")

RECONNECT_PAUSE_S = 1.0
PUSH_FLOOR_S = 5.0  # what a finished answer gets at least to reach its worker
NOTICE_PUSH_S = 5.0
MOST_JOB_S = 600.0  # whatever deadline a job states
_LOOK_S = 0.1
_MOST_MESSAGE = 1000  # characters of a reason


class _Running:
    """A job being worked on: its message, until the answer is on its way."""

    def __init__(self, job: Job, message: bytes | bytearray) -> None:
        self.job = job
        self.message: bytes | bytearray | None = message
        self.task: asyncio.Task[None]


class Service:
    """`is_able`: whether pool processes are there.  `settings_source`: for the hello, where settings came from."""

    def __init__(
        self,
        queue: JobQueue,
        work: JobWork,
        metrics: Metrics,
        is_able: Callable[[], bool],
        *,
        jobs: int,
        settings_source: str = "",
    ) -> None:
        self.is_connected = False
        self._is_down_told = False
        self._queue = queue
        self._work = work
        self._metrics = metrics
        self._is_able = is_able
        self._jobs = jobs
        self._settings_source = settings_source
        self._started_at = time.time()
        self._most_answer_bytes = work.most_answer_bytes
        self._ending = asyncio.Event()
        self._running: set[_Running] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        works = [self._announce, *[self._serve] * self._jobs]
        self._tasks = [asyncio.create_task(self._kept_up(work)) for work in works]
        self._metrics.sidecar_connected(False)

    async def drain(self, grace_s: float, quitting: asyncio.Event) -> None:
        """Take nothing more; let running jobs end within the grace (at once when `quitting` is set), give the rest
        back.
        """
        self._ending.set()
        deadline = time.monotonic() + grace_s
        while self._running and time.monotonic() < deadline and not quitting.is_set():
            await asyncio.sleep(0.02)
        for running in list(self._running):
            await self._return(running)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PUSH_FLOOR_S):
                await asyncio.wait(self._tasks)
        left = [*self._tasks, *(running.task for running in self._running)]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _return(self, running: _Running) -> None:
        """Stop the work and put the job back; an answer on its way is let go on."""
        message = running.message
        if message is None:
            return
        running.task.cancel()
        if _seconds_left(running.job) <= 0:
            return
        try:
            await self._queue.give_back(message)
        except QueueDown as error:
            _log.warning("a job cannot be given back id=%s reason=%s", running.job.job_id, error)
            return
        self._metrics.sidecar_returned()

    async def _kept_up(self, work: Callable[[], Awaitable[None]]) -> None:
        """A fault of ours must not leave a sidecar that is there and does nothing."""
        while not self._ending.is_set():
            try:
                await work()
            except Exception:
                _log.exception("a fault of the sidecar; it goes on")
                await self._pause(RECONNECT_PAUSE_S)

    # -- taking jobs

    async def _serve(self) -> None:
        while not self._ending.is_set():
            if not self._is_able():
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                message = await self._queue.take()
            except QueueDown as error:
                self._note_down(error)
                await self._pause(RECONNECT_PAUSE_S * random.uniform(0.75, 1.25))
                continue
            except JobTooLarge as error:
                await self._refuse_unread(error)
                continue
            self._note_up()
            if message is not None:
                await self._take_up(message)

    async def _take_up(self, message: bytes | bytearray) -> None:
        try:
            job = decode_job(message)
        except Malformed as error:
            _log.error("a job that cannot be read was dropped bytes=%d reason=%s", len(message), error)
            self._metrics.sidecar_dropped("malformed")
            return
        running = _Running(job, message)
        del message
        running.task = asyncio.create_task(self._answer(running))
        self._running.add(running)
        self._metrics.sidecar_running(len(self._running))
        if self._ending.is_set():  # it came while the queue was being left
            await self._return(running)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running.task])
        self._running.discard(running)
        self._metrics.sidecar_running(len(self._running))

    async def _refuse_unread(self, error: JobTooLarge) -> None:
        job_id = job_id_in(error.head)
        self._metrics.sidecar_dropped("too_large")
        _log.error("a job too large to be read was dropped id=%s bytes=%d", job_id or "unknown", error.nbytes)
        if job_id is not None:
            limit = self._queue.most_job_bytes
            why = f"the job of {error.nbytes} bytes is larger than the {limit} bytes this sidecar reads of one"
            with contextlib.suppress(QueueDown):
                failure = encode_failure(job_id, LIMIT_EXCEEDED, why)
                await self._queue.answer(job_id, failure, within_s=NOTICE_PUSH_S)

    # -- one job

    async def _answer(self, running: _Running) -> None:
        job, begun = running.job, time.perf_counter()
        ticket = Ticket(job.request_id[:200], "sidecar")
        ticket.outside = True  # whoever asked, it was not from this machine's loopback
        try:
            answer, outcome, message = await self._worked(job, ticket)
        except PoolClosed:
            return  # the end: the job is given back
        finally:
            ticket.custody.close()
        running.message = None
        outcome = await self._deliver(job, answer, outcome)
        seconds = time.perf_counter() - begun
        self._metrics.sidecar_job(outcome, seconds, len(answer))
        event(
            _log,
            logging.INFO,
            "job",
            id=job.job_id,
            request=job.request_id,
            outcome=outcome,
            reason=message or None,
            items=len(job.items),
            bytes=len(answer),
            ms=round(seconds * 1e3, 1),
            **ticket.stage_ms(),
        )

    async def _worked(self, job: Job, ticket: Ticket) -> tuple[bytes | bytearray, str, str]:
        """The answer, its outcome in a word, and why it is a failure."""
        left = _seconds_left(job)
        clock = asyncio.timeout(min(max(left, 0.0), MOST_JOB_S))
        try:
            if left <= 0:
                raise Refusal(EXPIRED, "the job's deadline passed before it was begun")
            async with clock:
                return await self._work.run(job, ticket), "ok", ""
        except Refusal as refusal:
            code, message = refusal.code, refusal.message
        except PoolClosed:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and clock.expired():
                code, message = EXPIRED, "the job's deadline passed while it was worked on"
            else:
                _log.exception("a job failed id=%s", job.job_id)
                code, message = PROCESSOR_ERROR, "a fault of the sidecar; its log has the job's id"
        message = message[:_MOST_MESSAGE]
        return encode_failure(job.job_id, code, message), code, message

    async def _deliver(self, job: Job, answer: bytes | bytearray, outcome: str) -> str:
        """The outcome: what it was, or that the answer did not get through."""
        try:
            await self._queue.answer(job.job_id, answer, within_s=max(PUSH_FLOOR_S, _seconds_left(job)))
            return outcome
        except QueueDown as error:
            _log.warning("an answer was not taken id=%s bytes=%d reason=%s", job.job_id, len(answer), error)
            notice = encode_failure(job.job_id, RESULT_PUSH_FAILED, str(error))
        try:
            await self._queue.answer(job.job_id, notice, within_s=NOTICE_PUSH_S)
        except QueueDown as error:
            self._note_down(error)
        return RESULT_PUSH_FAILED

    # -- being there

    async def _announce(self) -> None:
        """Never while jobs could not be worked on: a worker that sees no sidecar is not sent any media."""
        while not self._ending.is_set():
            if not self._is_able():
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                if not self.is_connected:
                    await self._learn_limit()
                await self._queue.announce(self._hello())
            except QueueDown as error:
                self._note_down(error)
                await self._pause(RECONNECT_PAUSE_S)
                continue
            self._note_up()
            await self._pause(HELLO_PERIOD_S)

    def _hello(self) -> Mapping[str, str]:
        return {
            **self._work.fingerprint.fields(),
            "schema": str(VERSION),
            "schemes": ",".join(SCHEMES),
            "started_at": str(int(self._started_at)),
            "settings_source": self._settings_source,
            "max_result_bytes": str(self._work.most_answer_bytes),
        }

    async def _learn_limit(self) -> None:
        """Redis refuses a value of its own limit; managed ones do not tell it, and ours stands."""
        largest = await self._queue.largest_value()
        self._work.most_answer_bytes = min(self._most_answer_bytes, largest or self._most_answer_bytes)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    def _note_up(self) -> None:
        if not self.is_connected:
            self.is_connected, self._is_down_told = True, False
            self._metrics.sidecar_connected(True)
            _log.info("connected to Redis keys=%s", self._queue.keys.prefix)

    def _note_down(self, error: QueueDown) -> None:
        _log.log(
            logging.DEBUG if self._is_down_told else logging.WARNING,
            "Redis is not there and is tried again reason=%s",
            error,
        )
        self.is_connected, self._is_down_told = False, True
        self._metrics.sidecar_connected(False)


def _seconds_left(job: Job) -> float:
    return job.deadline_ms / 1000 - time.time()
