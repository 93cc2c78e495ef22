"""Pictures into tensors: the jobs of one request, their outputs reserved together, their order kept.

Inspect every item (size and hash), reserve all outputs at once, encode in parallel.  The sink is chosen before anything
is decoded: a recycled segment when a candidate worker shares our /dev/shm and the tensors are large enough, else spans
of the mapping.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from engines.base import ITEM_BYTES, Form, MediaBatch, MediaItem, Modality, Tensor
from engines.dispatch import Outlook
from pipeline.admission import InflightMedia
from pipeline.config import Config
from pipeline.errors import GatewayError
from pipeline.intake import Intake, Item, Receiver, failed
from pipeline.jobs import Encode, Encoded, FileSink, Inspect, Inspected, Job, Result, Sink, SpanSink
from pipeline.metrics import Metrics
from pipeline.models.base import Measured, MediaError, SideTensor, Source
from pipeline.plan import ServedModel
from pipeline.prompt import Expanded
from pipeline.ticket import Ticket
from pool.arena import Arena
from pool.pool import JobCrashed, JobFailed, JobLost, JobOverran, Outcome, Pool
from pool.segments import Segment, SegmentStore
from pool.spans import ArenaTooSmall, Lease, Span

T = TypeVar("T")
Buffers = tuple[tuple[memoryview, ...], ...]  # by distinct item, then by position


class Look(msgspec.Struct, frozen=True):
    """What is known of a distinct item before it is decoded."""

    item: Item
    facts: Inspected
    measured: Measured


class Pixels(msgspec.Struct, frozen=True):
    """The tensors of a request: `buffers` by distinct item; `segment` when they lie back to back in one, by
    position.
    """

    looks: tuple[Look, ...]
    form: Form
    buffers: Buffers
    segment: Segment | None


async def all_or_first_error(work: Sequence[Awaitable[T]]) -> list[T]:
    """Run side by side; at the first failure cancel the rest, wait for them, raise the failure of the lowest index."""
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


class Encoder:
    """Runs a request's jobs in the pool."""

    def __init__(
        self,
        config: Config,
        pool: Pool[Job, Result],
        outputs: Arena,
        segments: SegmentStore,
        inflight: InflightMedia,
        receiver: Receiver,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._outputs = outputs
        self._segments = segments
        self._inflight = inflight
        self._receiver = receiver
        self._metrics = metrics
        self._deadline_s = float(config.pool.job_timeout_s)

    async def inspect(self, model: ServedModel, intake: Intake, ticket: Ticket) -> tuple[Look, ...]:
        """Decode base64, hash and measure every item, then all of them together.  Raises
        `multimodal_processing_failed`, `multimodal_payload_too_large`.
        """
        looks = await all_or_first_error([self._look(model, item, intake.lease, ticket) for item in intake.items])
        return reconciled(model, looks)

    async def _look(self, model: ServedModel, item: Item, lease: Lease, ticket: Ticket) -> Look:
        family = model.family
        assert family is not None
        job = Inspect(
            item=item.positions[0],
            modality=item.modality,
            source=item.source,
            base64=item.base64,
            hints=item.hints,
            max_input_bytes=self._receiver.max_bytes(item.modality),
            full_size=family.own_long_side,
        )
        facts = (await self._run(job, item.positions[0], [lease], ticket, "fetch")).result
        assert isinstance(facts, Inspected)
        source = Source(height=facts.height, width=facts.width, frames=facts.frames, hints=item.hints)
        try:
            measured = family.measure(model.settings, item.modality, source)
        except MediaError as error:
            raise failed(error, item.positions[0]) from None
        self._metrics.media_bytes(item.modality.value, facts.nbytes)
        ticket.media_bytes += facts.nbytes
        return Look(item, facts, measured)

    async def encode(
        self,
        model: ServedModel,
        intake: Intake,
        looks: tuple[Look, ...],
        form: Form,
        outlook: Outlook,
        ticket: Ticket,
    ) -> Pixels:
        """Make every item's tensor.  Spans and segment are in the ticket's `media` custody."""
        sizes = [tensor_bytes(look.measured, form) for look in looks]
        self._inflight.check_size(sum(size * len(look.item.positions) for look, size in zip(looks, sizes, strict=True)))
        segment = await self._segment_for(looks, sizes, outlook)
        if segment is None:
            lease, sinks = await self._spans(sizes, ticket)
            buffers: Buffers = tuple((lease.view(index),) for index in range(len(sizes)))
            leases = [intake.lease, lease]
        else:
            ticket.media.keep(lambda: segment.settle(consumed=ticket.media_consumed, reader=ticket.worker or None))
            sinks, places = _segment_sinks(segment, looks, sizes)
            view = segment.view()
            buffers = tuple(tuple(view[begin : begin + size] for begin in begins) for begins, size in places)
            leases = [intake.lease]
        await all_or_first_error(
            [
                self._encode_one(model, look, form, tuple(sinks[index]), leases, ticket)
                for index, look in enumerate(looks)
            ]
        )
        return Pixels(looks, form, buffers, segment)

    async def _segment_for(self, looks: Sequence[Look], sizes: Sequence[int], outlook: Outlook) -> Segment | None:
        total = sum(size * len(look.item.positions) for look, size in zip(looks, sizes, strict=True))
        if not outlook.by_segment or total < outlook.min_segment_bytes:
            return None
        if self._segments.idle_bytes >= total:
            return self._segments.take(total)
        # a new file: its pages are reserved now, which takes 12 ms for 50 MB
        taking = asyncio.ensure_future(asyncio.to_thread(self._segments.take, total))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_settle_unused)
            raise

    async def _spans(self, sizes: Sequence[int], ticket: Ticket) -> tuple[Lease, list[list[Sink]]]:
        try:
            lease = await self._outputs.reserve(sizes)
        except ArenaTooSmall as error:
            raise GatewayError(
                "multimodal_payload_too_large",
                f"the request's tensors take {error.needed} bytes, "
                f"more than the {error.size} bytes this gateway has for them",
            ) from None
        ticket.media.keep(lease.release)
        spans = zip(lease.spans, sizes, strict=True)
        return lease, [[SpanSink(Span(offset=span.offset, nbytes=size))] for span, size in spans]

    async def _encode_one(
        self, model: ServedModel, look: Look, form: Form, sinks: tuple[Sink, ...], leases: list[Lease], ticket: Ticket
    ) -> None:
        job = Encode(
            item=look.item.positions[0],
            model=model.key,
            modality=look.item.modality,
            source=look.item.source,
            nbytes=look.facts.nbytes,
            hints=look.item.hints,
            measured=look.measured,
            form=form,
            sinks=sinks,
        )
        encoded = (await self._run(job, look.item.positions[0], leases, ticket, None)).result
        assert isinstance(encoded, Encoded)
        modality = look.item.modality.value
        for stage, seconds in (("decode", encoded.decode_s), ("preprocess", encoded.preprocess_s)):
            ticket.add(stage, seconds)
            self._metrics.stage(stage, modality, seconds)

    async def _run(
        self, job: Job, item: int, leases: Sequence[Lease], ticket: Ticket, stage: str | None
    ) -> Outcome[Result]:
        try:
            outcome = await self._pool.submit(job, deadline_s=self._deadline_s, leases=leases)
        except JobFailed as error:
            raise failed(str(error), item) from None
        except JobOverran:
            raise failed(f"processing took longer than {self._deadline_s:g} s", item) from None
        except JobLost:
            raise failed("processing ended the decoder process twice", item) from None
        except JobCrashed:
            raise failed("the decoder failed on this input", item) from None
        if stage is not None:
            ticket.add(stage, outcome.run_s)
        self._metrics.page_faults(outcome.minor_faults)
        return outcome


def reconciled(model: ServedModel, looks: Sequence[Look]) -> tuple[Look, ...]:
    """The same items, their shapes settled among those of the same modality (`Family.reconcile`).

    Raises `multimodal_processing_failed` without an item: what is refused is the request as a whole.
    """
    family = model.family
    assert family is not None
    by_position = {position: look for look in looks for position in look.item.positions}
    settled: dict[int, Measured] = {}
    for modality in {look.item.modality for look in looks}:
        positions = sorted(position for position, look in by_position.items() if look.item.modality is modality)
        try:
            items = family.reconcile(model.settings, modality, [by_position[place].measured for place in positions])
        except MediaError as error:
            raise GatewayError("multimodal_processing_failed", f"Multimodal processing failed: {error}") from None
        settled.update(zip(positions, items, strict=True))
    return tuple(msgspec.structs.replace(look, measured=settled[look.item.positions[0]]) for look in looks)


def _settle_unused(taking: "asyncio.Future[Segment | None]") -> None:
    segment = taking.result() if not taking.cancelled() else None
    if segment is not None:
        segment.settle(consumed=False)


def tensor_bytes(measured: Measured, form: Form) -> int:
    return int(np.prod(measured.primary_shape)) * ITEM_BYTES[form.dtype]


def _segment_sinks(
    segment: Segment, looks: Sequence[Look], sizes: Sequence[int]
) -> tuple[list[list[Sink]], list[tuple[list[int], int]]]:
    """Every position's rows back to back, in prompt order."""
    size_at = {position: size for look, size in zip(looks, sizes, strict=True) for position in look.item.positions}
    begins, at = {}, 0
    for position in sorted(size_at):
        begins[position] = at
        at += size_at[position]
    sinks: list[list[Sink]] = []
    places = []
    for look, size in zip(looks, sizes, strict=True):
        offsets = [begins[position] for position in look.item.positions]
        sinks.append([FileSink(segment.name, segment.nbytes, offset, size) for offset in offsets])
        places.append((offsets, size))
    return sinks, places


def side_tensor(side: SideTensor) -> Tensor:
    return Tensor(side.dtype, side.shape, (np.array(side.values, dtype=side.dtype).tobytes(),))


def batches(model: ServedModel, pixels: Pixels, expanded: Expanded) -> tuple[MediaBatch, ...]:
    """The engine's view: one batch by modality, items in prompt order."""
    by_position: dict[int, tuple[Look, memoryview]] = {}
    for look, buffers in zip(pixels.looks, pixels.buffers, strict=True):
        for nth, position in enumerate(look.item.positions):
            by_position[position] = (look, buffers[min(nth, len(buffers) - 1)])
    grouped: dict[Modality, list[MediaItem]] = {}
    for position in sorted(by_position):
        look, buffer = by_position[position]
        item = MediaItem(
            content_hash=look.facts.content_hash,
            structural=expanded.structural[position],
            features=expanded.features[position],
            primary=Tensor(pixels.form.dtype, look.measured.primary_shape, (buffer,)),
            side={name: side_tensor(side) for name, side in look.measured.side.items()},
        )
        grouped.setdefault(look.item.modality, []).append(item)
    family = model.family
    assert family is not None
    return tuple(
        MediaBatch(
            modality=modality,
            items=tuple(items),
            token_id=model.feature_tokens[modality],
            layout=family.layout(modality),
            form=pixels.form,
            segment=pixels.segment,
        )
        for modality, items in grouped.items()
    )
