"""One request, in one direction: the steps from a MediaPlan to what an engine is sent.

Each step is a line of `Preparation.run`; each lives in the module it is named after.  What a step takes is in the
ticket's custody from that moment on, so a step that fails has nothing to clean up.
"""

import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from engines.affinity import Affinity, Mark
from engines.base import (
    EngineError,
    EngineRequest,
    Form,
    MediaBatch,
    MediaReference,
    Modality,
    ModalityRefused,
    NoWorker,
)
from engines.dispatch import Dispatcher, Outlook
from engines.handover import GRIDS
from engines.registry import Registry
from engines.worker import Status, Worker
from pipeline.admission import Backlog, InflightMedia
from pipeline.config import Config
from pipeline.encode import Encoder, Look, batches, tensor_bytes
from pipeline.errors import engine_failure, model_not_found
from pipeline.explain import MediaTold, told_of
from pipeline.intake import Intake, Receiver
from pipeline.logs import mm_timing
from pipeline.metrics import Metrics
from pipeline.plan import UNKNOWN_WINDOW, MediaPart, MediaPlan, ServedModel, check_hints, check_items, check_length
from pipeline.processing import check_reachable, decide
from pipeline.prompt import Expanded, check_anchors, expand
from pipeline.references import Forwarder, marks_of
from pipeline.ticket import Custody, Ticket

TOKEN_CHARACTERS = 256
"""A longer stop string is no token, and is not worth the time to find that out."""


class Prepared(msgspec.Struct, frozen=True):
    """A request ready for dispatch.

    `affinity`: what ties it to a worker.  `remake(form)` makes its tensors again in another form, from the retained
    inputs; None when every worker of the model wants the same form (the inputs are given back then).  `told`: of each
    item, for a client that asked.
    """

    request: EngineRequest
    affinity: Affinity
    remake: Callable[[Form], Awaitable[EngineRequest]] | None = None
    told: tuple[MediaTold, ...] = ()


class Preparation:
    """The steps, with the stations they need."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        receiver: Receiver,
        forwarder: Forwarder,
        encoder: Encoder,
        dispatcher: Dispatcher,
        inflight: InflightMedia,
        backlog: Backlog,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._registry = registry
        self._receiver = receiver
        self._forwarder = forwarder
        self._encoder = encoder
        self._dispatcher = dispatcher
        self._inflight = inflight
        self._backlog = backlog
        self._metrics = metrics

    async def run(self, model: ServedModel, plan: MediaPlan, ticket: Ticket) -> Prepared:
        """Raises GatewayError with the code of the step that failed, in the order of SMG's checks."""
        candidates = self._candidates(model)
        if (window := self._dispatcher.window(model.model)) is not None:
            model = msgspec.structs.replace(model, max_context=window)
        if plan.parts:
            check_items(model, plan.parts, engine_limits(candidates))
            _check_vision(plan, candidates)

        with ticket.stage("prompt"):
            text, given = _text(model, plan), plan.ids
            # many times their JSON in memory
            plan = msgspec.structs.replace(plan, messages=(), template_variables={}, text=None, ids=None)
            ids = await self._tokenise(model, plan, text, given)
        if not plan.parts:
            request = engine_request(model, plan, text, ids, (), ticket)
            return Prepared(request, Affinity(request.input_ids, key=ticket.routing_key))

        if self._by_worker(model, plan):
            references = await self._forwarder.take_over(plan.parts, ticket)
            request = engine_request(model, plan, text, ids, (), ticket, references)
            marks = marks_of(references, request.input_ids, model.anchors)
            return Prepared(request, Affinity(request.input_ids, marks, ticket.routing_key))

        check_hints(plan.parts)
        intake = await self._receiver.take_in(plan.parts, ticket)
        with ticket.stage("inspect"):
            looks = await self._encoder.inspect(model, intake, ticket)
        plan = msgspec.structs.replace(plan, parts=_without_urls(plan.parts))  # their bytes are in spans

        in_order = _in_order(looks)
        begun = time.perf_counter()
        expanded = expanded_prompt(model, ids, in_order)
        expand_s = time.perf_counter() - begun
        check_length(model, len(expanded.ids))
        self._check_decodable(model, plan, looks)

        affinity = Affinity(array("I", expanded.ids), _marks(in_order, expanded), ticket.routing_key)
        outlook = await self._outlook(model, plan, affinity)
        tensors = _Tensors(self._encoder, self._inflight, model, plan, ticket, text, expanded, intake, looks, outlook)
        with ticket.stage("wait"):
            ahead = sum(tensor_bytes(look, outlook.form) for look in in_order)
            ticket.unread = await self._backlog.enter(model.model, len(outlook.workers), ahead)
        ticket.custody.keep(ticket.unread.release)
        request = await tensors.made(outlook.form)
        if self._config.media.log_timing:
            _log_timing(plan, ticket, in_order, expand_s, len(ids), len(expanded.ids))
        is_uniform = self._serves_all(outlook.form, plan, candidates)
        if is_uniform and not outlook.form.encoded:
            ticket.inputs.close()
        told = told_of(in_order, expanded) if ticket.explains else ()
        return Prepared(request, affinity, None if is_uniform else tensors.remade, told)

    def _serves_all(self, form: Form, plan: MediaPlan, candidates: Sequence[Worker]) -> bool:
        """Whether media of that form are what every worker wants that may get them."""
        modalities = {part.modality for part in plan.parts}
        wanted = [self._dispatcher.form_of(worker) for worker in candidates if all(map(worker.accepts, modalities))]
        return all(form.serves(one, modality) for one in wanted for modality in modalities)

    def _check_decodable(self, model: ServedModel, plan: MediaPlan, looks: Sequence[Look]) -> None:
        """What no decode worker can serve is refused before any pixel is decoded."""
        grids = any(name in GRIDS for look in looks for name in look.measured.side)
        try:
            self._dispatcher.check_decodable(model.model, grids=grids, choices=plan.sampling.n)
        except EngineError as error:
            raise engine_failure(error) from None

    async def _outlook(self, model: ServedModel, plan: MediaPlan, affinity: Affinity) -> Outlook:
        """What tensors to make, before a worker is chosen; no worker that could take them is an answer of its own."""
        await self._dispatcher.examined(model.model)
        try:
            return self._dispatcher.outlook(model.model, {part.modality for part in plan.parts}, affinity)
        except EngineError as error:
            raise engine_failure(error) from None

    def _candidates(self, model: ServedModel) -> list[Worker]:
        """Workers that may get the media: the healthy ones, else all, so that a health flap does not move a limit."""
        found = self._dispatcher.takers(model.model)
        if not found and self._registry.workers_of(model.model, healthy_only=False):  # of another role
            raise engine_failure(NoWorker(model.model))
        if not found:
            raise model_not_found(model.model)
        return found

    async def _tokenise(self, model: ServedModel, plan: MediaPlan, text: str, given: Sequence[int] | None) -> list[int]:
        """The prompt's ids, which may be `given`: no more than the window takes, and an anchor for each item."""
        if given is not None:
            ids = list(given)
        else:
            ids = await model.bundle.tokenizer.encode(text, most=model.max_context or UNKNOWN_WINDOW)
        check_length(model, len(ids))
        counts = Counter(part.modality for part in plan.parts) if plan.parts else {}
        anchors = {**model.anchors, **model.guards}
        check_anchors(ids, {modality: (anchor, counts.get(modality, 0)) for modality, anchor in anchors.items()})
        return ids

    def _by_worker(self, model: ServedModel, plan: MediaPlan) -> bool:
        """Whether the engine worker processes the media; counted, and refused where that is asked for and cannot be."""
        known = self._registry.workers_of(model.model, healthy_only=False)
        workers = [worker for worker in known if worker.status is not Status.DRAINING]
        decision = decide(self._config.media.processing, model, plan.parts, workers)
        self._metrics.mm_processing(model.model, decision.mode, decision.reason)
        if decision.mode == "router":
            return False
        check_reachable(model, workers)
        return True


def _stop_ids(model: ServedModel, stops: Sequence[str]) -> tuple[int, ...]:
    """The stop strings that are one token each."""
    tokenizer = model.bundle.tokenizer
    found = [tokenizer.encode_now(stop) for stop in stops if len(stop) <= TOKEN_CHARACTERS]
    return tuple(ids[0] for ids in found if len(ids) == 1)


def _text(model: ServedModel, plan: MediaPlan) -> str:
    if plan.ids is not None:
        return ""
    if plan.text is not None:
        return plan.text
    return model.bundle.template.render(plan.messages, model.anchors, **plan.template_variables) + plan.continuation


def _without_urls(parts: Sequence[MediaPart]) -> tuple[MediaPart, ...]:
    return tuple(msgspec.structs.replace(part, url=b"") for part in parts)


class _Tensors:
    """One request's tensors in the form of the worker that gets them; made again when that wants another form."""

    def __init__(
        self,
        encoder: Encoder,
        inflight: InflightMedia,
        model: ServedModel,
        plan: MediaPlan,
        ticket: Ticket,
        text: str,
        expanded: Expanded,
        intake: Intake,
        looks: tuple[Look, ...],
        outlook: Outlook,
    ) -> None:
        self._encoder = encoder
        self._inflight = inflight
        self._model = model
        self._plan = plan
        self._ticket = ticket
        self._text = text
        self._expanded = expanded
        self._intake = intake
        self._looks = looks
        self._outlook = outlook
        self._budget = Custody()
        ticket.custody.keep(self._budget.close)

    async def made(self, form: Form) -> EngineRequest:
        """The request with its tensors, within the in-flight budget."""
        model, ticket = self._model, self._ticket
        with ticket.waiting():
            pixels = await self._encoder.encode(model, self._intake, self._looks, form, self._outlook, ticket)
        media = batches(model, pixels, self._expanded)
        request = engine_request(model, self._plan, self._text, self._expanded.ids, media, ticket)
        with ticket.stage("wait"):
            self._budget.keep((await self._inflight.enter(request.media_bytes)).release)
        ticket.tensor_bytes = request.media_bytes
        return request

    async def remade(self, form: Form) -> EngineRequest:
        """What was made before goes first: a request that waits for room must not hold some of it."""
        self._ticket.media.close()
        self._budget.close()
        return await self.made(form)


def expanded_prompt(model: ServedModel, ids: Sequence[int], looks: Sequence[Look]) -> Expanded:
    """Every anchor replaced by its item's run; `looks` in prompt order."""
    family, vocabulary = model.family, model.vocabulary
    assert family is not None and vocabulary is not None
    anchors = [model.anchors[look.item.modality].token_id for look in looks]
    config = model.bundle.config
    replacements = [family.replacement(config, vocabulary, look.item.modality, look.measured) for look in looks]
    return expand(ids, anchors, replacements)


def engine_limits(candidates: Sequence[Worker]) -> Mapping[Modality, int]:
    """The most items every candidate takes: the smallest of what they advertise."""
    found: dict[Modality, int] = {}
    for worker in candidates:
        for modality, limit in worker.item_limits.items():
            found[modality] = min(limit, found.get(modality, limit))
    return found


def _check_vision(plan: MediaPlan, candidates: Sequence[Worker]) -> None:
    """Media that no worker of the model takes together are refused before any fetch."""
    wanted = list(dict.fromkeys(part.modality for part in plan.parts))
    if not candidates or any(all(map(worker.accepts, wanted)) for worker in candidates):
        return
    nearest = max(candidates, key=lambda worker: sum(map(worker.accepts, wanted)))
    refused = next(modality for modality in wanted if not nearest.accepts(modality))
    raise engine_failure(ModalityRefused(nearest.runtime, refused))


def _in_order(looks: Sequence[Look]) -> list[Look]:
    """By position: an item that stands twice is looked at once."""
    by_position = {position: look for look in looks for position in look.item.positions}
    return [by_position[position] for position in sorted(by_position)]


def _marks(looks: Sequence[Look], expanded: Expanded) -> list[Mark]:
    return [
        Mark(run.offset, run.length, look.facts.content_hash)
        for look, run in zip(looks, expanded.structural, strict=True)
    ]


def _log_timing(
    plan: MediaPlan, ticket: Ticket, looks: Sequence[Look], expand_s: float, original: int, expanded: int
) -> None:
    """SMG's line for one multimodal request.  The model's configuration is looked up at registration, so never here."""
    counts = Counter(part.modality.value for part in plan.parts)
    mm_timing(
        ticket.request_id,
        counts=counts,
        frames=sum(look.measured.frames for look in looks if look.item.modality is Modality.VIDEO),
        fetch_decode_s=sum(ticket.stages.get(stage, 0.0) for stage in ("fetch", "inspect", "decode")),
        config_lookup_s=0.0,
        preprocess_s=ticket.stages.get("preprocess", 0.0),
        token_expand_s=expand_s,
        total_s=ticket.elapsed_s,
        original_tokens=original,
        expanded_tokens=expanded,
    )


def engine_request(
    model: ServedModel,
    plan: MediaPlan,
    text: str,
    ids: list[int],
    media: tuple[MediaBatch, ...],
    ticket: Ticket,
    references: tuple[MediaReference, ...] = (),
) -> EngineRequest:
    ticket.prompt_tokens = len(ids)
    return EngineRequest(
        request_id=ticket.request_id,
        model=model.model,
        input_ids=array("I", ids),  # a tenth of the list
        original_text=text,
        sampling=plan.sampling,
        stream=plan.stream,
        media=media,
        references=references,
        stop_ids=_stop_ids(model, plan.sampling.stop),
    )
