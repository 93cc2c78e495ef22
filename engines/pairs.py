"""Which pair of engine workers serves a generation: one that prefills, one that decodes; and who encodes its media.

Rule: the prefill worker is chosen as a single worker would be, for it gets the media: by modality, form and what its
engine can be told.  The decode worker is of the same engine, and one that can serve the request at all; each role has
a policy of its own.
"""

import random
from collections.abc import Mapping
from typing import Protocol

import msgspec

from engines.affinity import Affinity
from engines.base import EngineRequest, MediaItem, NoWorker, PairRefused
from engines.engine import Engine
from engines.handover import bootstrap_address, refusal
from engines.leg import Meeting, Role
from engines.pairing import difference
from engines.worker import Worker


class Pair(msgspec.Struct, frozen=True):
    prefill: Worker
    decode: Worker


class Choosing(Protocol):
    """`engines.dispatch.Dispatcher`, as far as both roles need it."""

    async def choose(
        self, request: EngineRequest, affinity: Affinity, failed: Worker | None, *, any_form: bool
    ) -> Worker: ...

    def available(self, model: str, role: str) -> list[Worker]: ...

    def fits(self, request: EngineRequest, worker: Worker) -> bool: ...

    def picked(self, candidates: list[Worker], model: str, affinity: Affinity) -> Worker: ...


async def choose_pair(
    choosing: Choosing,
    request: EngineRequest,
    affinity: Affinity,
    failed: Mapping[Role, Worker],
    *,
    any_form: bool,
) -> Pair:
    """Raises NoWorker, PairRefused and what `choose` raises."""
    prefill = await choosing.choose(request, affinity, failed.get("prefill"), any_form=any_form)
    return Pair(prefill, choose_decode(choosing, request, affinity, prefill, failed.get("decode")))


def choose_decode(
    choosing: Choosing, request: EngineRequest, affinity: Affinity, prefill: Worker, failed: Worker | None
) -> Worker:
    """One of the prefill worker's engine; not the one that just failed, if there is another."""
    there = choosing.available(request.model, "decode")
    workers = [worker for worker in there if not difference(prefill.handover, worker.handover)]
    if not workers:
        raise NoWorker(request.model)
    refusals = [refusal(request, worker) for worker in workers]
    able = [worker for worker, why in zip(workers, refusals, strict=True) if why is None]
    if request.references:  # which it has to process itself when the prefill worker tells nothing about them
        able = [worker for worker in able if worker.takes_references]
    if not able:
        raise refusals[0] or NoWorker(request.model)
    fitting = [worker for worker in able if choosing.fits(request, worker)]
    if not fitting and prefill.client is not None and computes_again(prefill.client, request):
        raise PairRefused("multimodal_not_supported", "no decode worker takes the media as the prefill workers do")
    candidates = fitting or able
    fresh = [worker for worker in candidates if worker is not failed] or [one for one in able if one is not failed]
    return choosing.picked(fresh or candidates, request.model, affinity)


def computes_again(engine: Engine, request: EngineRequest) -> bool:
    """Whether the decode leg is sent the whole media in any case: a hand-over has one taker."""
    return engine.pairing == "prefill_first" and bool(request.media) and request.sampling.n > 1


def pairing_workers(prefills: list[Worker], decodes: list[Worker]) -> list[Worker]:
    """The prefill workers that have a partner.

    Raises PairRefused: `runtime_pd_not_supported` when none of them is of an engine that works in pairs,
    `no_compatible_pd_pair` when there are decode workers and none can take over from any.
    """
    able = [worker for worker in prefills if worker.client is not None and worker.client.pairing is not None]
    if prefills and not able:
        raise PairRefused(
            "runtime_pd_not_supported", f"backend {prefills[0].runtime} does not support prefill/decode disaggregation"
        )
    firsts = {worker.handover for worker in able}  # a few, however many workers
    seconds = {worker.handover for worker in decodes}
    paired = {first for first in firsts if any(not difference(first, second) for second in seconds)}
    if firsts and seconds and not paired:
        told = "; ".join(sorted({difference(first, second) for first in firsts for second in seconds}))
        raise PairRefused("no_compatible_pd_pair", f"no prefill worker can hand over to any decode worker: {told}")
    return [worker for worker in able if worker.handover in paired]


def choose_encoders(
    choosing: Choosing, request: EngineRequest, prefill: Worker, failed: Worker | None
) -> tuple[Worker, ...]:
    """The encode worker of every media item, in prompt order: by default the same picture goes to the same one.

    Raises NoWorker, and PairRefused for an engine without encode workers.
    """
    if prefill.client is None or not prefill.client.encodes:
        raise PairRefused("multimodal_not_supported", f"backend {prefill.runtime} has no encode workers")
    there = choosing.available(request.model, "encode")
    able = [
        worker
        for worker in there
        if worker.runtime == prefill.runtime
        and all(map(worker.accepts, request.modalities))
        and choosing.fits(request, worker)
    ]
    candidates = [worker for worker in able if worker is not failed] or able
    if not candidates:
        raise NoWorker(request.model)
    hashes = [item.content_hash for item in in_prompt_order(request)]
    return tuple(choosing.picked(candidates, request.model, Affinity(key=key)) for key in hashes)


def in_prompt_order(request: EngineRequest) -> list[MediaItem]:
    items = [item for batch in request.media for item in batch.items]
    return sorted(items, key=lambda item: item.structural.offset)


def meeting_at(worker: Worker) -> Meeting:
    """A number nobody else has; an engine that places by it gets one that leads to a prefill worker's rank."""
    assert worker.client is not None
    host, port = bootstrap_address(worker)
    room = random.SystemRandom().randrange((1 << worker.client.room_bits) - 1)
    size = worker.labels.get("dp_size", "")
    if worker.client.places_by_room and worker.rank is not None and size.isdecimal() and room >= int(size):
        room += worker.rank - room % int(size)
    return Meeting(host, port, room)
