"""Who serves a generation: which workers may, which one is preferred, and what tensors to make for them before one is
chosen.

Rule: everything that attempts share is here (transport, observer, settings, what goes on in the background);
`engines.generation` repeats attempts, `engines.pairs` chooses second workers.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from engines.affinity import Affinity
from engines.base import (
    EngineRequest,
    Form,
    Modality,
    ModalityRefused,
    NoWorker,
    Observer,
)
from engines.generation import Generation, Media, OnMediaFree, OnMediaRead, Remake
from engines.handover import blind_refusal, is_blind
from engines.pairs import pairing_workers
from engines.policies import PolicySettings, policy_named
from engines.registry import Registry
from engines.selection import Policy
from engines.transport import Transport
from engines.worker import Worker

_EXAMINATION_S = 5.0


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
    whether every candidate of that form reads segments, so that pool processes should write there.
    `min_segment_bytes`: smallest tensor one of them takes that way.  `apart`: one of them hands names on, so each item
    gets a segment of its own.
    """

    form: Form
    by_segment: bool
    min_segment_bytes: int
    workers: tuple[Worker, ...]
    apart: bool = False


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
    ) -> Generation:
        """A generation to iterate; nothing happens before the first step.

        `remake(form)` makes the request's tensors again in another form, once nothing reads those made before; without
        it only workers of the request's form are used.  `on_media_free(consumed)`: see `engines.generation`;
        `consumed` is what `SharedSegment.settle` wants to know.  `on_media_read()` comes once, before: the worker has
        taken the tensors from us (message drained, segments read), or has not for a while and may be waiting for
        something; what else is made for it can go on.
        """
        return Generation(self, request, affinity or Affinity.of(request), remake, Media(on_media_read, on_media_free))

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
        apart = any(worker.keeps_segments for worker in fitting)
        return Outlook(form, by_segment, min(map(self.transport.min_bytes, fitting)), fitting, apart)

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
