"""Requests for tensors against a real arena, real segments and a real cache, with a pool that does what a test says.

A picture's content hash is its own name; its bytes are made from everything the job says, so that a wrong answer of the
cache is a wrong byte.  The pool is as unkind as a real one may be: a job that has begun goes on after it was withdrawn,
and writes.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from engines.base import Form, Modality
from engines.dispatch import Outlook
from pipeline.asked import Look
from pipeline.cache import PixelCache
from pipeline.intake import Intake, Item
from pipeline.jobs import Copied, Copy, Encode, Encoded, FileSink, Inspected, Job, SpanSink
from pipeline.metrics import Metrics
from pipeline.models.base import Hints, Measured
from pipeline.pixels import PixelMaker, Pixels
from pipeline.poolwork import PoolWork
from pipeline.ticket import Ticket
from pool.arena import Arena
from pool.mapping import PAGE, Mapping
from pool.pool import JobFailed
from pool.segment import Segment
from pool.segments import SegmentStore
from pool.spans import Lease, Span

INPUTS = 64 * PAGE
PLAIN = Hints()


def content(job: Encode) -> bytes:
    """What a job makes: depends on the source's bytes and on every setting."""
    shape = job.measured.primary_shape
    facts = repr((job.source.offset, job.nbytes, job.model, job.hints, shape, job.form)).encode()
    nbytes = shape[0] * shape[1] * {"float32": 4, "uint8": 1}[job.form.dtype]
    return (hashlib.sha256(facts).digest() * (nbytes // 32 + 1))[:nbytes]


class Running:
    """A job with the pool; its files are borrowed when a process begins it."""

    def __init__(self, job: Job, unpins: list[Callable[[], None]]) -> None:
        self.job = job
        self.unpins = unpins
        self.is_begun = False
        self.files: dict[str, int] = {}
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def begin(self, segments: SegmentStore) -> None:
        if self.is_begun:
            return
        self.is_begun = True
        places: list[Any] = [*self.job.sinks] if isinstance(self.job, Encode | Copy) else []
        places += [self.job.source] if isinstance(self.job, Copy) else []
        for place in places:
            if isinstance(place, FileSink) and place.name not in self.files:
                name = place.name
                assert segments.lend(name, lambda fd, name=name: self.files.update({name: os.dup(fd)}))


class FakePool:
    """Jobs begin at once, or when their end comes (`begins_late`: they were queued); they end when the test says so, or
    by themselves while `is_quick`.
    """

    def __init__(self, mapping: Mapping, segments: SegmentStore) -> None:
        self._mapping = mapping
        self._segments = segments
        self.is_quick = True
        self.begins_late: Callable[[], bool] = lambda: False
        self.running: list[Running] = []
        self.begun: list[Job] = []
        self.broken: set[int] = set()  # inputs (offsets) no decoder takes

    async def submit(self, job: Job, *, deadline_s: float, leases: Sequence[Lease] = ()) -> Any:
        running = Running(job, [lease.pin() for lease in leases])
        if not self.begins_late():
            running.begin(self._segments)
        self.begun.append(job)
        self.running.append(running)
        if self.is_quick:
            asyncio.get_running_loop().call_soon(self.finish, running)
        return await running.outcome

    def finish(self, running: Running) -> None:
        self.running.remove(running)
        is_withdrawn = running.outcome.done()
        result = None
        if running.is_begun or not is_withdrawn:
            running.begin(self._segments)
            result = self._run(running)
        for unpin in running.unpins:
            unpin()
        for fd in running.files.values():
            os.close(fd)
        if is_withdrawn:
            return
        if isinstance(result, Exception):
            running.outcome.set_exception(result)
        else:
            running.outcome.set_result(SimpleNamespace(result=result, run_s=0.0, minor_faults=0))

    def finish_all(self) -> None:
        for running in list(self.running):
            self.finish(running)

    def _run(self, running: Running) -> Any:
        job = running.job
        if isinstance(job, Copy):
            data = self._read(job.source, running)
            self._write(job.sinks, data, running)
            return Copied(0.0)
        assert isinstance(job, Encode)
        if job.source.offset in self.broken:
            self._write(job.sinks, b"?" * len(content(job)), running)
            return JobFailed("it is broken")
        self._write(job.sinks, content(job), running)
        return Encoded(0.0, 0.0)

    def _read(self, source: Any, running: Running) -> bytes:
        if isinstance(source, SpanSink):
            return bytes(self._mapping.view(source.span.offset, source.span.nbytes))
        return os.pread(running.files[source.name], source.nbytes, source.offset)

    def _write(self, sinks: Sequence[Any], data: bytes, running: Running) -> None:
        for sink in sinks:
            if isinstance(sink, SpanSink):
                self._mapping.view(sink.span.offset, sink.span.nbytes)[:] = data
            else:
                assert os.pwrite(running.files[sink.name], data, sink.offset) == sink.nbytes


class Stand:
    """Everything a request for tensors meets."""

    def __init__(
        self, directory: Path, *, arena_pages: int = 16, limit_pages: int = 64, shm_bytes: int = 4 << 20
    ) -> None:
        self.directory = directory
        mapping = Mapping(INPUTS + arena_pages * PAGE)
        self.inputs = Arena(mapping, 0, INPUTS, keep_bytes=INPUTS)
        self.outputs = Arena(mapping, INPUTS, arena_pages * PAGE, keep_bytes=arena_pages * PAGE)
        self.segments = SegmentStore(pid=os.getpid(), cap_bytes=shm_bytes, directory=str(directory))
        self.metrics = Metrics()
        self.pool = FakePool(mapping, self.segments)
        work = PoolWork(cast(Any, self.pool), 60.0, self.metrics)
        self.cache = PixelCache(limit_pages * PAGE, shm_bytes // 2, self.outputs, self.segments, self.metrics)
        self.maker = PixelMaker(work, self.cache, self.metrics)

    def ask(self, *pictures: int, **settings: Any) -> "Request":
        return Request(self, pictures, **settings)

    async def close(self) -> None:
        self.pool.finish_all()
        self.cache.close()
        async with asyncio.timeout(10):  # a thread may be making a segment for a request that left
            while self.segments.idle_bytes != self.segments.bytes:
                await asyncio.sleep(0.002)
        self.segments.close()

    @property
    def keeps_spans(self) -> bool:
        return any(not key.in_file for key in self.cache)

    @property
    def encoded(self) -> int:
        return sum(isinstance(job, Encode) for job in self.pool.begun)

    @property
    def copied(self) -> int:
        return sum(isinstance(job, Copy) for job in self.pool.begun)

    def count(self, name: str) -> float:
        self.metrics.settle()
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"mediagate_{name}"
        )


class Request:
    """One request for the tensors of `pictures` (small numbers), of `pages` pages each.

    `leave` is what the end of a request does; `result` what it got, with the bytes checked; `publish` names it for an
    engine.  `apart`: for one that hands names on; `is_late`: that is done with them before the request is.
    """

    def __init__(
        self,
        stand: Stand,
        pictures: Sequence[int],
        *,
        by_segment: bool = False,
        apart: bool = False,
        pages: int = 2,
        model: int = 1,
        dtype: str = "float32",
        hints: Hints = PLAIN,
        min_bytes: int = 1,
        is_late: bool = False,
    ) -> None:
        self._stand = stand
        self._apart = apart
        self._is_late = is_late
        self._placed: list[Segment] = []
        self.ticket = Ticket("id", "route")
        form = Form(dtype)
        whole = stand.inputs.try_reserve([1])
        assert whole is not None
        self.ticket.inputs.keep(whole.release)
        items = 4 if dtype == "float32" else 1
        self.jobs: list[Encode] = []
        looks = []
        for position, picture in enumerate(pictures):
            shape = (pages * PAGE // items // 16, 16)
            measured = Measured(shape, 1, (16, 16), {})
            # every picture's bytes lie at an offset of its own, whoever asks: the fake pool reads nothing there
            source = Span(offset=picture, nbytes=10)
            item = Item((position,), Modality.IMAGE, hints, source, False)
            facts = Inspected(10, f"{picture:064x}", 16, 16, 1, 16, 16, "PNG")
            looks.append(Look(item, facts, measured))
            self.jobs.append(Encode(position, model, Modality.IMAGE, source, 10, hints, measured, form, ()))
        outlook = Outlook(form, by_segment or apart, min_bytes, (), apart)
        served = cast(Any, SimpleNamespace(model="m", key=model))
        intake = Intake(tuple(look.item for look in looks), whole)
        self.task = asyncio.ensure_future(stand.maker.make(served, intake, tuple(looks), form, outlook, self.ticket))

    async def result(self) -> Pixels:
        pixels = await self.task
        self.check(pixels)
        return pixels

    def check(self, pixels: Pixels) -> None:
        for job, buffers in zip(self.jobs, pixels.buffers, strict=True):
            assert all(bytes(buffer) == content(job) for buffer in buffers)
        if pixels.segment is not None:
            whole = b"".join(content(job) for job in self.jobs)
            assert bytes(pixels.segment.view()[: len(whole)]) == whole
        for position, segment in pixels.apart.items():
            assert bytes(segment.view()) == content(self.jobs[position]) and segment.is_handed_on

    def publish(self, pixels: Pixels) -> list[tuple[str, bytes]]:
        """Names an engine reads, and what it must find there: as `engines.transport`, which copies what is not written
        into a segment yet that the engine takes.
        """
        if pixels.segment is not None:
            return [(pixels.segment.publish(), b"".join(content(job) for job in self.jobs))]
        if not self._apart:
            return []
        named = []
        for job, (buffer,) in zip(self.jobs, pixels.buffers, strict=True):
            written = pixels.apart.get(job.item)
            segment = written.share() if written else self._stand.segments.write([buffer], handed_on=True)
            if segment is not None:  # else inline
                self._placed.append(segment)
                named.append((segment.publish(), content(job)))
        return named

    async def leave(self, *, consumed: bool = True) -> None:
        """The end of the request, wherever it is."""
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])
        self.ticket.media_consumed = consumed
        ends = [self.ticket.custody.close, *(partial(one.settle, consumed=consumed) for one in self._placed)]
        for end in ends[:: -1 if self._is_late else 1]:  # an attempt may end before or after its request
            end()
