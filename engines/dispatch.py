"""Who serves a generation, and what happens when that fails.

Rule: until the first event nothing is lost, so a failed attempt is repeated with another request id, on another
worker if there is one; after the first event nothing is repeated.  Whatever way a generation ends (finished, failed,
closed, cancelled), load, segments, streams and the engine's own work are cleaned up, and the owner of the tensors is
told once.

A generation is served by one worker, or, in a gateway for disaggregated serving, by a pair (`engines.pairs`): then an
attempt is both legs (`engines.legs`), and no more than the decode leg when the prefill leg is done already.

Theory of operation.  The tensors belong to the caller; the gateway reads them while an attempt is sent, a reader of
shared memory until the engine has answered.  So they are *free* when a verdict exists (first event: consumed; over
without one: not consumed) and every stream that was opened has drained (`engines.scatter.Drain`):
`on_media_free(consumed)` is called then, exactly once, which may be after the generation was closed.  In a pair the
verdict falls when the prefill leg is done, if the decode leg needs no tensors; from then on an attempt that would need
them is not repeated.  Tensors are made for one form; workers of another form are used only when `remake` can make them
again.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from engines.affinity import Affinity
from engines.attempt import Attempt
from engines.base import (
    EngineError,
    EngineRequest,
    Event,
    Form,
    Modality,
    ModalityRefused,
    NoWorker,
    Observer,
    PairRefused,
)
from engines.handover import blind_refusal, is_blind
from engines.leg import Role
from engines.legs import Legs, PrefillFirst, legs_of
from engines.pairs import Pair, choose_decode, choose_encoders, choose_pair, pairing_workers
from engines.policies import PolicySettings, policy_named
from engines.registry import Registry
from engines.scatter import Drain
from engines.selection import Policy
from engines.transport import Transport
from engines.worker import Worker

log = logging.getLogger(__name__)

RETRIED = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"})
"""Statuses of an engine after which another attempt may help; INTERNAL is not among them."""

_NOT_AGAIN = "sidecar_timeout"
"""UNAVAILABLE with these words first: the worker has spent the whole time it has for media on this input."""

_EXAMINATION_S = 5.0

OnMediaRead = Callable[[], None]
OnMediaFree = Callable[[bool], None]
Remake = Callable[[Form], Awaitable[EngineRequest]]


class RetrySettings(msgspec.Struct, frozen=True):
    """`max_attempts` counts the first one.  Pauses: initial * multiplier**k, give or take the jitter, capped."""

    max_attempts: int = 5
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2

    def pause_s(self, failures: int) -> float:
        """After the `failures`-th failed attempt, 1 or more."""
        steady = self.initial_backoff_s * self.multiplier ** (failures - 1)
        return min(self.max_backoff_s, steady * random.uniform(1 - self.jitter, 1 + self.jitter))


class DispatchSettings(msgspec.Struct, frozen=True):
    """`encoder_dtypes`: the operator's dtype variables by runtime name, absent when unset (`engines.labels.form`);
    `modality_dtypes`: those that are for one modality.  `in_pairs`: prefill and decode workers serve every model;
    `with_encoders`: and encode workers get its media.  `role_policies`: by role, where it is not `policy`.
    """

    policy: str = "round_robin"
    policies: PolicySettings = PolicySettings()
    in_pairs: bool = False
    with_encoders: bool = False
    role_policies: Mapping[str, str] = {}
    retry: RetrySettings = RetrySettings()
    encoder_dtypes: Mapping[str, str] = {}
    modality_dtypes: Mapping[str, Mapping[Modality, str]] = {}


class Outlook(msgspec.Struct, frozen=True):
    """What tensors should be made for, before a worker is chosen.

    `form`: that of the worker the policy would choose now; when it has no opinion one candidate's, by chance, so that
    in a fleet of two forms every worker gets its share.  `by_segment`:
    whether every candidate of that form reads recycled segments, so that pool processes should write there.
    `min_segment_bytes`: smallest tensor one of them takes that way.
    """

    form: Form
    by_segment: bool
    min_segment_bytes: int
    workers: tuple[Worker, ...]


class Dispatcher:
    """One for the gateway; `close` it in the end, before the registry."""

    def __init__(
        self, registry: Registry, transport: Transport, settings: DispatchSettings, observer: Observer
    ) -> None:
        for name in (settings.policy, *settings.role_policies.values()):
            policy_named(name)  # KeyError now, not at the first request
        self.transport = transport
        self.observer = observer
        self.settings = settings
        self._registry = registry
        self._policies: dict[tuple[str, str], Policy] = {}
        self._background: set[asyncio.Task[None]] = set()

    def generate(
        self,
        request: EngineRequest,
        *,
        affinity: Affinity | None = None,
        remake: Remake | None = None,
        on_media_read: OnMediaRead | None = None,
        on_media_free: OnMediaFree | None = None,
    ) -> "Generation":
        """A generation to iterate; nothing happens before the first step.

        `remake(form)` makes the request's tensors again in another form, once nothing reads those made before; without
        it only workers of the request's form are used.  `on_media_free(consumed)`: see the head of this file;
        `consumed` is what `SharedSegment.settle` wants to know.  `on_media_read()` comes once, before: the worker has
        taken the tensors from us (message drained, segments read), or has not for a while and may be waiting for
        something; what else is made for it can go on.
        """
        return Generation(self, request, affinity or Affinity.of(request), remake, _Media(on_media_read, on_media_free))

    def outlook(self, model: str, modalities: Iterable[Modality], affinity: Affinity | None = None) -> Outlook:
        """Raises NoWorker, PairRefused and ModalityRefused, as `generate` would.

        `affinity`: of the request, when it is known.
        """
        entrants = self._entrants(model)
        takers = self.available(model, "encode") if self.settings.with_encoders and entrants else entrants
        workers = self._able(takers, model, modalities)
        forms = [self.form_of(worker) for worker in workers]
        role = workers[0].worker_type
        likely = self._policy(model, role).likely(workers, affinity) if affinity is not None else None
        form = self.form_of(likely) if likely is not None else random.choice(forms)
        fitting = tuple(worker for worker, its in zip(workers, forms, strict=True) if its == form)
        by_segment = all(self.transport.writes_ahead(worker) for worker in fitting)
        return Outlook(form, by_segment, min(map(self.transport.min_bytes, fitting)), fitting)

    def form_of(self, worker: Worker) -> Form:
        settings, runtime = self.settings, worker.runtime
        return worker.form(settings.encoder_dtypes.get(runtime), settings.modality_dtypes.get(runtime, {}))

    async def choose(
        self, request: EngineRequest, affinity: Affinity, failed: Worker | None, *, any_form: bool
    ) -> Worker:
        """The worker of the next attempt, the prefill worker of a pair.

        Preferred: the request's form, and not the worker that just failed; with `any_form` a healthy worker of
        another form comes before the failed one.  Waits only while a worker's labels are read again after a lost
        connection.
        """
        await self.examined(request.model)
        workers = self._entrants(request.model)
        if request.references:
            workers = [worker for worker in workers if worker.takes_references]
        modalities = () if self.settings.with_encoders else request.modalities  # encode workers see the media
        workers = _willing(self._able(workers, request.model, modalities), request)
        fitting = [worker for worker in workers if self.settings.with_encoders or self.fits(request, worker)]
        others = [worker for worker in workers if worker not in fitting] if any_form else []
        fresh = [worker for worker in fitting if worker is not failed]
        candidates = fresh or [worker for worker in others if worker is not failed] or fitting or others
        if not candidates:
            raise NoWorker(request.model)
        return self.picked(candidates, request.model, affinity)

    def picked(self, candidates: list[Worker], model: str, affinity: Affinity) -> Worker:
        """One of `candidates`, which are of one role, by that role's policy."""
        role = candidates[0].worker_type
        policy = self._policy(model, role)
        chosen = policy.choose(candidates, affinity)
        self.observer.worker_selected(chosen.url, policy.name, role)
        return chosen

    def _policy(self, model: str, role: str) -> Policy:
        policy = self._policies.get((model, role))
        if policy is None:
            name = self.settings.role_policies.get(role, self.settings.policy)
            policy = self._policies[model, role] = policy_named(name, self.settings.policies)
        return policy

    def takers(self, model: str) -> list[Worker]:
        """Workers that may be sent the model's media: the healthy ones, else all."""
        in_pairs = "encode" if self.settings.with_encoders else "prefill"
        role = in_pairs if self.settings.in_pairs else "regular"
        return self._registry.workers_of(model, role) or self._registry.workers_of(model, role, healthy_only=False)

    def check_decodable(self, model: str, *, grids: bool, choices: int) -> None:
        """Raises PairRefused when no decode worker can serve such media (`engines.handover.refusal`), before they are
        made.  `grids`: they have a grid tensor.
        """
        decodes = self.available(model, "decode") if self.settings.in_pairs else []
        if decodes and all(map(is_blind, decodes)):
            why = blind_refusal(grids=grids, references=False, choices=choices)
            if why is not None:
                raise why

    def window(self, model: str) -> int | None:
        """Tokens that both legs of any pair take; None when no worker says, or without pairs."""
        workers = self._registry.workers_of(model, healthy_only=False) if self.settings.in_pairs else []
        return min((worker.context_length for worker in workers if worker.context_length is not None), default=None)

    def fits(self, request: EngineRequest, worker: Worker) -> bool:
        """Whether the request's media are in the form this worker wants."""
        if not request.media:
            return True
        form = self.form_of(worker)
        return all(batch.form.serves(form, batch.modality) for batch in request.media)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, *, grace_s: float = 1.0) -> None:
        """Let aborts and clean-up that are under way end, within `grace_s`."""
        for _ in range(2):  # what is cut off may have an engine to tell
            if not self._background:
                return
            _, late = await asyncio.wait(self._background, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def available(self, model: str, role: str) -> list[Worker]:
        """Those of one role that may be given a request now."""
        return [worker for worker in self._registry.workers_of(model, role) if worker.is_available]

    def _entrants(self, model: str) -> list[Worker]:
        """Those a request can begin at: all, or the prefill workers that have a partner."""
        if not self.settings.in_pairs:
            return self.available(model, "regular")
        return pairing_workers(self.available(model, "prefill"), self.available(model, "decode"))

    async def examined(self, model: str) -> None:
        """Waits a while for workers that are just examined, when there is no other of their role."""
        roles = ["prefill", "decode"] if self.settings.in_pairs else ["regular"]
        roles += ["encode"] if self.settings.with_encoders else []
        missing = [role for role in roles if not self._registry.workers_of(model, role)]
        if not missing:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXAMINATION_S):
                for role in missing:
                    for worker in self._registry.workers_of(model, role, healthy_only=False):
                        if worker.is_stale:
                            await worker.examined.wait()

    def _able(self, workers: list[Worker], model: str, modalities: Iterable[Modality]) -> list[Worker]:
        """Those that take every modality."""
        if not workers:
            raise NoWorker(model)
        wanted = list(modalities)
        able = [worker for worker in workers if all(map(worker.accepts, wanted))]
        if not able:
            refused = next(modality for modality in wanted if not workers[0].accepts(modality))
            raise ModalityRefused(workers[0].runtime, refused)
        return able


def _willing(workers: list[Worker], request: EngineRequest) -> list[Worker]:
    """Those whose engine can be told everything the request says."""
    refusals = [worker.refusal(request) for worker in workers]
    if all(refusals):
        raise refusals[0] or NoWorker(request.model)
    return [worker for worker, refusal in zip(workers, refusals, strict=True) if refusal is None]


class Generation:
    """Events of one request: `async with` it and iterate, or `aclose` it in the end.

    `worker`: whose answer it is, of the latest attempt; `taker`: who was sent the tensors (the prefill worker of a
    pair).  `attempts`: how many were begun.  `send_s`: seconds the last one took to send.  Raises EngineError
    (NoWorker, PairRefused and ModalityRefused included) from the step that met it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: EngineRequest,
        affinity: Affinity,
        remake: Remake | None,
        media: "_Media",
    ) -> None:
        self.worker: Worker | None = None
        self.taker: Worker | None = None
        self.attempts = 0
        self.send_s = 0.0
        self._dispatcher = dispatcher
        self._request = request
        self._affinity = affinity
        self._remake = remake
        self._media = media
        self._legs: Legs | None = None
        self._failed: dict[Role, Worker] = {}
        self._events = self._run()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def aclose(self) -> None:
        """End it now: cancels the stream, aborts the engine's work, withdraws segments.  Harmless when it is over."""
        await self._events.aclose()
        self._media.over()  # also when no step was ever taken

    async def _run(self) -> AsyncGenerator[Event, None]:
        in_pairs = self._dispatcher.settings.in_pairs
        try:
            while True:
                attempt = await (self._pair_attempt() if in_pairs else self._attempt())
                self.attempts += 1
                try:
                    async with aclosing(attempt.events()) as events:
                        async for event in events:
                            self.send_s = attempt.send_s
                            yield event
                    return
                except EngineError as error:
                    await self._pause_or_raise(error)
        finally:
            self._media.over()

    async def _attempt(self) -> Attempt:
        request = self._request
        self.worker = self.taker = await self._dispatcher.choose(
            request, self._affinity, self.worker, any_form=self._remake is not None
        )
        await self._make_fit(self.worker)
        media = self._media
        return Attempt(
            self.worker,
            self._request,
            self._dispatcher,
            reading=media.reading,
            read=media.read,
            answered=media.consumed,
        )

    async def _pair_attempt(self) -> Legs:
        """A pair's legs, or once more the decode leg alone, on another worker."""
        dispatcher, request, legs = self._dispatcher, self._request, self._legs
        if isinstance(legs, PrefillFirst) and legs.may_decode_again:
            legs.decode_on(
                choose_decode(dispatcher, request, self._affinity, legs.pair.prefill, self._failed.get("decode"))
            )
        else:
            pair = await choose_pair(
                dispatcher, request, self._affinity, self._failed, any_form=self._remake is not None
            )
            self.taker = pair.prefill
            encoders = await self._encoders(pair)
            if not encoders:
                await self._make_fit(pair.prefill)
            legs = legs_of(pair, self._request, dispatcher, self._media, encoders)
        self._legs, self.worker = legs, legs.pair.decode
        return legs

    async def _encoders(self, pair: Pair) -> tuple[Worker, ...]:
        """The encode worker of every item; none when the prefill worker encodes itself."""
        dispatcher = self._dispatcher
        if not (dispatcher.settings.with_encoders and self._request.media):
            return ()
        there = dispatcher.available(self._request.model, "encode")
        if there and not any(dispatcher.fits(self._request, worker) for worker in there):
            await self._make_fit(there[0])
        failed = self._failed.get("encode")
        return choose_encoders(dispatcher, self._request, pair.prefill, failed)

    async def _make_fit(self, worker: Worker) -> None:
        """Media in the form this worker wants."""
        if self._remake is not None and not self._dispatcher.fits(self._request, worker):
            await self._media.drained()
            self._request = await self._remake(self._dispatcher.form_of(worker))

    async def _pause_or_raise(self, error: EngineError) -> None:
        retry = self._dispatcher.settings.retry
        if not is_retried(error) or self.attempts >= retry.max_attempts or not self._can_repeat():
            raise error
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a status that came together with a cancellation
            raise asyncio.CancelledError
        log.info("attempt %d of %s failed: %s %s", self.attempts, self._request.request_id, error.status, error)
        worker_type = error.role or (self.worker.worker_type if self.worker else "regular")
        if self._legs is not None and error.role is not None:
            self._failed[error.role] = self._legs.worker_of(error)
        self._dispatcher.observer.retried(worker_type)
        await asyncio.sleep(retry.pause_s(self.attempts))

    def _can_repeat(self) -> bool:
        """Whether another attempt would have what it must send."""
        has_media = bool(self._request.media or self._request.references)
        return not (has_media and self._media.is_decided) or (self._legs is not None and self._legs.may_decode_again)


def is_retried(error: EngineError) -> bool:
    """Whether another attempt may help.  What encode and prefill legs say is no answer yet."""
    if isinstance(error, PairRefused) or (error.started and error.role not in ("encode", "prefill")):
        return False
    if error.status == "UNAVAILABLE" and error.message.startswith(_NOT_AGAIN):
        return False
    return error.status in RETRIED


class _Media:
    """When the request's tensors are free: a verdict exists, and no stream reads them any more."""

    def __init__(self, on_read: OnMediaRead | None, on_free: OnMediaFree | None) -> None:
        self._on_read = on_read
        self._on_free = on_free
        self._verdict: bool | None = None
        self._streams = 0
        self._drains: list[Drain] = []

    @property
    def is_decided(self) -> bool:
        """Whether the tensors are given up: no attempt can be sent them any more."""
        return self._verdict is not None

    def reading(self, drain: Drain) -> None:
        self._streams += 1
        self._drains.append(drain)
        drain.add_done_callback(self._drained)

    def read(self) -> None:
        on_read, self._on_read = self._on_read, None
        if on_read is not None:
            on_read()

    async def drained(self) -> None:
        """Until no stream reads the tensors; a connection that keeps them is aborted (`engines.link`)."""
        for drain in self._drains:
            await drain.wait()

    def consumed(self) -> None:
        self._decide(True)

    def over(self) -> None:
        self._decide(False)

    def _decide(self, verdict: bool) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self.read()
            self._tell_if_free()

    def _drained(self) -> None:
        self._streams -= 1
        self._tell_if_free()

    def _tell_if_free(self) -> None:
        if self._verdict is None or self._streams or self._on_free is None:
            return
        on_free, self._on_free = self._on_free, None
        on_free(self._verdict)
