"""The tensors of one request: found, waited for, or made, and where they lie.

The sink is chosen before anything is decoded.  *Spans*: a span of the mapping for each distinct picture, all reserved
together.  *Segments*: when every candidate worker shares our /dev/shm and the tensors are large enough.  For most
engines *one*: they read the tensors of all pictures from one file.  So a single picture that another request has in a
segment is published once more without a copy, while of several pictures those that are there are copied in the pool,
from segment to segment: about a tenth of decoding them again.  For an engine that hands names on, one
for each item (*apart*).

No step here waits while the request holds spans of the mapping, its own or another's; else two requests could wait for
each other.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial

import msgspec

from engines.base import Form, Modality
from engines.dispatch import Outlook
from pipeline.asked import Asked, Look, Wanted, tensor_bytes
from pipeline.cache import Entry, InFile, InSpan, Key, PixelCache, Release
from pipeline.errors import GatewayError
from pipeline.intake import Intake
from pipeline.jobs import Copied, Copy, Encode, Encoded, FileSink, Sink
from pipeline.metrics import Metrics
from pipeline.plan import ServedModel
from pipeline.poolwork import PoolWork, all_or_first_error
from pipeline.ticket import Custody, Ticket
from pool.segment import Segment
from pool.spans import ArenaTooSmall, Lease

Buffers = tuple[tuple[memoryview, ...], ...]  # by distinct item, then by position


class Pixels(msgspec.Struct, frozen=True):
    """The tensors of a request: `buffers` by distinct item; `segment` when they lie back to back in one, by
    position; `apart`: by position, a segment that holds this item alone and may be handed on.  `encoded`: the media as
    they came, by distinct item, when the form asks for them.
    """

    looks: tuple[Look, ...]
    form: Form
    buffers: Buffers
    segment: Segment | None
    encoded: tuple[memoryview, ...] = ()
    apart: Mapping[int, Segment] = {}


Step = tuple[Wanted, Entry, bool]
"""A tensor, where it is or is being made, and whether for this request."""


class PixelMaker:
    """Makes the tensors of requests, each at most once at a time (`pipeline.cache`)."""

    def __init__(self, work: PoolWork, cache: PixelCache, metrics: Metrics) -> None:
        self._work = work
        self._cache = cache
        self._metrics = metrics

    async def make(
        self, model: ServedModel, intake: Intake, looks: tuple[Look, ...], form: Form, outlook: Outlook, ticket: Ticket
    ) -> Pixels:
        """All tensors of a request; what they lie in is in the ticket's `media` custody."""
        asked = Asked(model, looks, form, intake.lease, ticket)
        is_mixed = len({look.item.modality for look in looks}) > 1  # each modality is a tensor of its own to an engine
        if outlook.by_segment and outlook.apart:
            return await self._apart(asked, outlook.min_segment_bytes)
        if outlook.by_segment and asked.total >= outlook.min_segment_bytes and not is_mixed:
            wanted = asked.wanted(in_file=True)
            is_single = sum(len(look.item.positions) for look in looks) == 1
            found = await (self._single(asked, wanted) if is_single else self._joined(asked, wanted))
            if found is not None:
                return found
        views = await self._spans(asked, asked.wanted(in_file=False))
        return Pixels(asked.looks, asked.form, _by_item(views), None)

    # -- in spans

    async def _spans(
        self, asked: Asked, wanted: Mapping[Key, Wanted], others: Sequence[Step] = ()
    ) -> dict[int, memoryview]:
        """The tensors by item, when they and the `others` are made."""
        held = Custody()
        asked.ticket.media.keep(held.close)
        try:
            entries = await self._claim_spans(asked, wanted, held)
        except ArenaTooSmall as error:
            raise GatewayError(
                "multimodal_payload_too_large",
                f"the request's tensors take {error.needed} bytes, "
                f"more than the {error.size} bytes this gateway has for them",
            ) from None
        views: dict[int, memoryview] = {}
        for key, (entry, _) in entries.items():
            assert isinstance(entry.place, InSpan)
            views |= dict.fromkeys(wanted[key].looks, entry.place.lease.view())
        steps = [*others, *((wanted[key], entry, is_mine) for key, (entry, is_mine) in entries.items())]
        await all_or_first_error([self._made(asked, *step) for step in steps])
        return views

    async def _claim_spans(
        self, asked: Asked, wanted: Mapping[Key, Wanted], held: Custody
    ) -> dict[Key, tuple[Entry, bool]]:
        """An entry for every key, joined and pinned in `held`, and whether this request began it."""
        found = {key: entry for key in wanted if (entry := self._cache.find(key)) is not None}
        for entry in found.values():
            self._hold_span(entry, held)
        missing = [key for key in wanted if key not in found]
        leases = self._cache.try_spans([wanted[key].nbytes for key in missing]) if missing else ()
        if leases is None:  # what is to be waited for is waited for with empty hands
            held.close()
            found.clear()
            missing = list(wanted)
            leases = await self._cache.spans([wanted[key].nbytes for key in missing])
        entries = {key: (entry, False) for key, entry in found.items()}
        for key, lease in zip(missing, leases, strict=True):
            known = self._cache.find(key)  # begun while this request waited
            if known is not None:
                lease.release()
            place = InSpan(lease)
            entry = known or self._begin(asked, key, wanted[key].job, place, (place.sink,), [lease])
            self._hold_span(entry, held)
            entries[key] = (entry, known is None)
        for key, (entry, is_mine) in entries.items():
            self._note(asked, wanted[key], None if is_mine else entry)
        return entries

    def _hold_span(self, entry: Entry, held: Custody) -> None:
        assert isinstance(entry.place, InSpan)
        held.keep(self._cache.join(entry))
        held.keep(entry.place.lease.pin())

    # -- in one segment

    async def _single(self, asked: Asked, wanted: Mapping[Key, Wanted]) -> Pixels | None:
        """One picture: its segment may be another request's as well.  None: there is no room."""
        [(key, want)] = wanted.items()
        entry = self._cache.find(key)
        if entry is None:
            segment = await self._cache.segment(want.nbytes)
            if segment is None:
                return None
            entry = self._cache.find(key)
            if entry is None:
                place = InFile(segment, want.nbytes)
                entry = self._begin(asked, key, want.job, place, (place.sink,), [])
                return await self._published(asked, want, entry, is_mine=True)
            segment.settle(consumed=True)  # another request was faster; nothing was written
        assert isinstance(entry.place, InFile)
        if entry.place.offset:
            return await self._joined(asked, wanted)
        return await self._published(asked, want, entry, is_mine=False)

    async def _published(self, asked: Asked, want: Wanted, entry: Entry, *, is_mine: bool) -> Pixels:
        assert isinstance(entry.place, InFile)
        self._note(asked, want, None if is_mine else entry)
        asked.ticket.media.keep(self._cache.join(entry))
        use = self._in_custody(entry.place.segment.share(), asked.ticket)
        await all_or_first_error([self._made(asked, want, entry, is_mine)])
        return Pixels(asked.looks, asked.form, ((use.view()[: want.nbytes],),), use)

    async def _joined(self, asked: Asked, wanted: Mapping[Key, Wanted]) -> Pixels | None:
        """Several pictures back to back, by position, in a segment of the request's own.  None: there is no room."""
        whole = await self._cache.segment(asked.total)
        if whole is None:
            return None
        self._in_custody(whole, asked.ticket)
        begins = _begins(asked)
        sinks = {
            key: tuple(
                FileSink(whole.name, whole.nbytes, begins[position], want.nbytes)
                for index in want.looks
                for position in asked.looks[index].item.positions
            )
            for key, want in wanted.items()
        }
        masters = await self._masters(wanted)
        try:
            steps = [self._into(asked, key, wanted[key], whole, sinks[key], masters) for key in wanted]
        finally:
            for master in masters.values():  # of pictures that another request has begun meanwhile
                master.settle(consumed=True)
        await all_or_first_error(steps)
        view = whole.view()
        buffers = []
        for look in asked.looks:
            size = tensor_bytes(look, asked.form)
            buffers.append(tuple(view[begins[position] : begins[position] + size] for position in look.item.positions))
        return Pixels(asked.looks, asked.form, tuple(buffers), whole)

    async def _masters(self, wanted: Mapping[Key, Wanted]) -> dict[Key, Segment]:
        """A segment to keep each picture in that is not there yet, as far as there is room."""
        masters: dict[Key, Segment] = {}
        try:
            for key, want in wanted.items():
                if not _is_keepable(want.job) or self._cache.find(key) is not None:
                    continue
                if self._cache.may_keep(want.nbytes, in_file=True):
                    master = await self._cache.segment(want.nbytes)
                    if master is not None:
                        masters[key] = master
        except asyncio.CancelledError:
            for master in masters.values():
                master.settle(consumed=True)
            raise
        return masters

    def _into(
        self,
        asked: Asked,
        key: Key,
        want: Wanted,
        whole: Segment,
        sinks: tuple[FileSink, ...],
        masters: dict[Key, Segment],
    ) -> Awaitable[None]:
        """What brings one picture to its places in `whole`.  The master it is kept in is taken out of `masters`."""
        entry = self._cache.find(key)
        self._note(asked, want, entry)
        held = Custody()
        asked.ticket.media.keep(held.close)
        if entry is not None:
            assert isinstance(entry.place, InFile)
            held.keep(self._cache.join(entry))
            held.keep(partial(entry.place.segment.share().settle, consumed=True))
            return self._copied(asked, want, entry, sinks, held)
        if (master := masters.pop(key, None)) is None:
            place = InFile(whole.share(), want.nbytes, sinks[0].offset)
            entry = self._begin(asked, key, want.job, place, sinks, [], keepable=False)
        else:  # the job needs `whole` also when this request has left
            place, use = InFile(master, want.nbytes), whole.share()
            holds: list[Release] = [lambda is_whole: use.settle(consumed=is_whole)]
            entry = self._begin(asked, key, want.job, place, (*sinks, place.sink), [], holds=holds)
        held.keep(self._cache.join(entry))
        return self._made(asked, want, entry, True)

    async def _copied(
        self, asked: Asked, want: Wanted, entry: Entry, sinks: tuple[FileSink, ...], held: Custody
    ) -> None:
        await self._made(asked, want, entry, False)
        position = want.job.item
        copied = (
            await self._work.run(Copy(modality=want.job.modality, source=entry.place.sink, sinks=sinks), position)
        ).result
        assert isinstance(copied, Copied)
        asked.ticket.add("preprocess", copied.copy_s)
        self._metrics.stage("copy", want.job.modality.value, copied.copy_s)
        held.close()

    def _note(self, asked: Asked, want: Wanted, found: Entry | None) -> None:
        if found is not None or _is_keepable(want.job):
            self._cache.note(asked.model.model, found)

    def _in_custody(self, segment: Segment, ticket: Ticket) -> Segment:
        ticket.media.keep(lambda: segment.settle(consumed=ticket.media_consumed, reader=ticket.reader or None))
        return segment

    # -- each in a segment of its own

    async def _apart(self, asked: Asked, min_bytes: int) -> Pixels:
        """Each tensor where it is, or in an idle segment, or else in a span: it is copied into a segment when it is
        sent, which will be idle one day.  Spans are waited for while the request has segments: nobody waits for those.
        """
        spans: dict[Key, Wanted] = {}
        steps: list[Step] = []
        uses: dict[int, Segment] = {}
        for key, want in asked.wanted(in_file=False).items():
            entry, is_mine = self._apart_entry(asked, key, want, min_bytes)
            if entry is None:
                spans[key] = want
                continue
            assert isinstance(entry.place, InFile)
            self._note(asked, want, None if is_mine else entry)
            asked.ticket.media.keep(self._cache.join(entry))
            use = entry.place.segment.share()  # readers have uses of their own, and the entry knows how its job ended
            asked.ticket.media.keep(partial(use.settle, consumed=True))
            for index in want.looks:
                uses |= dict.fromkeys(asked.looks[index].item.positions, use)
            steps.append((want, entry, is_mine))
        views = await self._spans(asked, spans, steps)
        for index, look in enumerate(asked.looks):
            if index not in views:
                views[index] = uses[look.item.positions[0]].view()
        return Pixels(asked.looks, asked.form, _by_item(views), None, apart=uses)

    def _apart_entry(self, asked: Asked, key: Key, want: Wanted, min_bytes: int) -> tuple[Entry | None, bool]:
        """A tensor in a segment that may be handed on, and whether this request began it; None: in a span."""
        in_file = key._replace(in_file=True, handed_on=True)
        entry = self._cache.find(in_file)
        if entry is not None or want.nbytes < max(min_bytes, 1) or self._cache.find(key) is not None:
            return entry, False
        segment = self._cache.idle_segment(want.nbytes)
        if segment is None:
            return None, False
        place = InFile(segment, want.nbytes)
        return self._begin(asked, in_file, want.job, place, (place.sink,), []), True

    # -- jobs

    def _begin(
        self,
        asked: Asked,
        key: Key,
        job: Encode,
        place: InSpan | InFile,
        sinks: tuple[Sink, ...],
        leases: Sequence[Lease],
        *,
        holds: Sequence[Release] = (),
        keepable: bool = True,
    ) -> Entry:
        # the task submits the job, which pins the leases, before any later turn of this request
        work = self._encode(msgspec.structs.replace(job, sinks=sinks), [asked.inputs, *leases])
        return self._cache.begin(key, place, work, holds, keepable=keepable and _is_keepable(job))

    async def _encode(self, job: Encode, leases: Sequence[Lease]) -> Encoded:
        encoded = (await self._work.submit(job, leases)).result
        assert isinstance(encoded, Encoded)
        self._metrics.stage("decode", job.modality.value, encoded.decode_s)
        self._metrics.stage("preprocess", job.modality.value, encoded.preprocess_s)
        return encoded

    async def _made(self, asked: Asked, want: Wanted, entry: Entry, is_mine: bool) -> None:
        with self._work.told(want.job.item, want.job.modality):
            encoded = await entry.made()
        if is_mine:
            asked.ticket.add("decode", encoded.decode_s)
            asked.ticket.add("preprocess", encoded.preprocess_s)


def _is_keepable(job: Encode) -> bool:
    """Clips are shared while they are made, and not kept."""
    return job.modality is Modality.IMAGE


def _by_item(views: Mapping[int, memoryview]) -> Buffers:
    return tuple((views[index],) for index in range(len(views)))


def _begins(asked: Asked) -> dict[int, int]:
    """Where each position's tensor begins: one behind the other, in prompt order."""
    sizes = {position: tensor_bytes(look, asked.form) for look in asked.looks for position in look.item.positions}
    begins, at = {}, 0
    for position in sorted(sizes):
        begins[position] = at
        at += sizes[position]
    return begins
