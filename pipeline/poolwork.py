"""Jobs for the pool, as a request sees them: one deadline, page faults counted, failures in words for the client.

`run` is for a job of one request.  `submit` leaves the pool's own exceptions as they are, for a job that several
requests wait for (`pipeline.cache`): each of them names its own item, by `told`.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from engines.base import Modality
from pipeline.errors import GatewayError
from pipeline.intake import failed
from pipeline.jobs import Job, Result
from pipeline.metrics import Metrics
from pool.pool import JobCrashed, JobFailed, JobLost, JobOverran, Outcome, Pool
from pool.spans import Lease

T = TypeVar("T")


async def all_or_first_error(work: Sequence[Awaitable[T]]) -> list[T]:
    """Run side by side; at the first failure cancel the rest, wait for them, raise the failure of the lowest index."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class PoolWork:
    """What the frontend has of the pool.  `deadline_s`: longest job, from when a process begins it; `clip_deadline_s`
    that of a clip, `sound_deadline_s` that of a sound.
    """

    def __init__(
        self,
        pool: Pool[Job, Result],
        deadline_s: float,
        metrics: Metrics,
        *,
        clip_deadline_s: float = 30.0,
        sound_deadline_s: float = 30.0,
    ) -> None:
        self._pool = pool
        self._deadlines_s = {
            Modality.IMAGE: deadline_s,
            Modality.VIDEO: clip_deadline_s,
            Modality.AUDIO: sound_deadline_s,
        }
        self._metrics = metrics

    async def run(self, job: Job, item: int, leases: Sequence[Lease] = ()) -> Outcome[Result]:
        """Raises `multimodal_processing_failed` with the item."""
        with self.told(item, job.modality):
            return await self.submit(job, leases)

    async def submit(self, job: Job, leases: Sequence[Lease] = ()) -> Outcome[Result]:
        """Raises what `Pool.submit` raises."""
        outcome = await self._pool.submit(job, deadline_s=self._deadlines_s[job.modality], leases=leases)
        self._metrics.page_faults(outcome.minor_faults)
        return outcome

    @contextmanager
    def told(self, item: int, modality: Modality) -> Iterator[None]:
        """What the pool raises in here is `multimodal_processing_failed` with the item."""
        try:
            yield
        except (JobFailed, JobOverran, JobLost, JobCrashed) as error:
            raise self._explained(error, item, modality) from None

    def _explained(self, error: Exception, item: int, modality: Modality) -> GatewayError:
        if isinstance(error, JobFailed):
            return failed(str(error), item)
        if isinstance(error, JobOverran):
            return failed(f"processing took longer than {self._deadlines_s[modality]:g} s", item)
        if isinstance(error, JobLost):
            return failed("processing ended the decoder process twice", item)
        return failed("the decoder failed on this input", item)
