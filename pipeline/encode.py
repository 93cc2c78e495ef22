"""Pictures into tensors, in two rounds of jobs: look at every item (size and hash), then make what is to be made.

The sizes of the first round tell every tensor's shape before any pixel is decoded; `pipeline.pixels` has the second
round.  Here is also how tensors become what an engine is sent.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from engines.base import Form, MediaBatch, MediaItem, Modality, Tensor
from engines.dispatch import Outlook
from pipeline.admission import InflightMedia
from pipeline.asked import Look, tensor_bytes
from pipeline.errors import GatewayError
from pipeline.intake import Intake, Item, Receiver, failed
from pipeline.jobs import Inspect, Inspected
from pipeline.metrics import Metrics
from pipeline.models.base import Measured, MediaError, Sampling, SideTensor, Source
from pipeline.pixels import PixelMaker, Pixels
from pipeline.plan import ServedModel
from pipeline.poolwork import PoolWork, all_or_first_error
from pipeline.prompt import Expanded
from pipeline.ticket import Ticket
from pool.spans import Lease

__all__ = ["Encoder", "Look", "Pixels", "batches", "reconciled", "side_tensor", "tensor_bytes"]


class Encoder:
    """Runs a request's jobs in the pool."""

    def __init__(
        self,
        work: PoolWork,
        maker: PixelMaker,
        inflight: InflightMedia,
        receiver: Receiver,
        metrics: Metrics,
        *,
        max_clip_bytes: int = 1 << 30,
        max_sound_bytes: int = 512 << 20,
    ) -> None:
        """`max_clip_bytes`: of the frames of one clip, decoded; `max_sound_bytes`: of the samples of one sound."""
        self._work = work
        self._maker = maker
        self._inflight = inflight
        self._receiver = receiver
        self._metrics = metrics
        self._max_clip_bytes = max_clip_bytes
        self._max_sound_bytes = max_sound_bytes

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
            sampling=_sampling(model, item),
            max_sound_bytes=self._max_sound_bytes,
        )
        facts = (await self._work.run(job, item.positions[0], [lease])).result
        assert isinstance(facts, Inspected)
        source = Source(facts.height, facts.width, facts.frames, item.hints, facts.rate)
        try:
            measured = family.measure(model.settings, item.modality, source)
            self._check_decoded(item.modality, facts, measured)
        except MediaError as error:
            raise failed(error, item.positions[0]) from None
        self._metrics.media_bytes(item.modality.value, facts.nbytes)
        ticket.media_bytes += facts.nbytes
        return Look(item, facts, measured)

    def _check_decoded(self, modality: Modality, facts: Inspected, measured: Measured) -> None:
        """A clip's frames, as they would be together; raises MediaError."""
        decoded = 3 * facts.stored_height * facts.stored_width * measured.frames
        if modality is Modality.VIDEO and decoded > self._max_clip_bytes:
            raise MediaError(
                f"video decode error: decoded video RGB payload would be {decoded} bytes, "
                f"exceeding SMG_VIDEO_MAX_DECODED_BYTES={self._max_clip_bytes}"
            )

    async def encode(
        self,
        model: ServedModel,
        intake: Intake,
        looks: tuple[Look, ...],
        form: Form,
        outlook: Outlook,
        ticket: Ticket,
    ) -> Pixels:
        """Every item's tensor, as far as the form has any.  What they lie in is in the ticket's `media` custody, the
        media as they came in `inputs`.
        """
        self._inflight.check_size(sum(tensor_bytes(look, form) * len(look.item.positions) for look in looks))
        if form.tensors:
            pixels = await self._maker.make(model, intake, looks, form, outlook, ticket)
        else:
            pixels = Pixels(looks, form, ((memoryview(b""),),) * len(looks), None)
        if not form.encoded:
            return pixels
        files = tuple(intake.lease.view(index)[: look.facts.nbytes] for index, look in enumerate(looks))
        return msgspec.structs.replace(pixels, encoded=files)


def _sampling(model: ServedModel, item: Item) -> Sampling:
    assert model.family is not None
    return model.family.sampling(model.settings, item.hints) if item.modality is Modality.VIDEO else Sampling()


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


def side_tensor(side: SideTensor) -> Tensor:
    values = np.array(side.values, dtype=side.dtype)
    if side.repeats:
        values = np.repeat(values, side.repeats)
    return Tensor(side.dtype, side.shape, (values.tobytes(),))


def batches(model: ServedModel, pixels: Pixels, expanded: Expanded) -> tuple[MediaBatch, ...]:
    """The engine's view: one batch by modality, pictures, then clips, then sounds, items in prompt order."""
    by_position: dict[int, tuple[Look, memoryview, memoryview | bytes]] = {}
    files: Sequence[memoryview | bytes] = pixels.encoded or (b"",) * len(pixels.looks)
    for look, buffers, file in zip(pixels.looks, pixels.buffers, files, strict=True):
        for nth, position in enumerate(look.item.positions):
            by_position[position] = (look, buffers[min(nth, len(buffers) - 1)], file)
    grouped: dict[Modality, list[MediaItem]] = {}
    for position in sorted(by_position):
        look, buffer, file = by_position[position]
        form = pixels.form.of(look.item.modality)
        item = MediaItem(
            content_hash=look.facts.content_hash,
            structural=expanded.structural[position],
            features=expanded.features[position],
            primary=Tensor(form.dtype, look.measured.primary_shape if form.tensors else (0,), (buffer,)),
            side={name: side_tensor(side) for name, side in look.measured.side.items()},
            encoded=file,
            segment=pixels.apart.get(position),
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
            segment=pixels.segment or (items[0].segment if len(items) == 1 else None),
        )
        for modality in Modality  # the order of SMG's messages
        if (items := grouped.get(modality))
    )
