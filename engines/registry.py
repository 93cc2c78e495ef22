"""The engine workers: registration, labels, health, and who may be asked for a model.

Theory of operation.  Every worker has one task.  It introduces itself to the engine (which engine, is it well, labels,
then the `prepare` hook, where the model's tokenizer is loaded) until that succeeds: the pauses grow with the time
already waited, so an engine that starts late is found soon.  From then on the task watches: a health check every
interval, and at once when the control connection is lost.  A lost connection may mean a restarted engine with other
settings, so the worker is *stale*, gets no requests, and is introduced again; labels are never trusted beyond the
connection they were read on.

    pending --introduced--> ready --3 failed checks, or lost and not back--> not_ready --introduced--> ready
    pending --too long--> failed                      any --remove--> draining --load 0 or grace over--> gone
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import ClassVar

import msgspec

from engines.base import Observer
from engines.breaker import Breaker, BreakerSettings, BreakerState
from engines.channel import WorkerChannels, parse_url
from engines.health import HealthSettings, Life
from engines.ranks import check_rank, ranked_url
from engines.worker import Status, Worker, WorkerSpec, WorkerType

log = logging.getLogger(__name__)


class RegistrySettings(msgspec.Struct, frozen=True):
    """Field names follow the flags; all times in seconds.

    `drain_settle_s`: how long a worker that is removed keeps its connections at least; `drain_grace_s`: how long it
    then waits for requests in flight.  `aliases`: further names of models, whichever worker serves them.  `roles`: the
    worker types this gateway serves with.
    """

    health: HealthSettings = HealthSettings()
    breaker: BreakerSettings = BreakerSettings()
    drain_settle_s: float = 5.0
    drain_grace_s: float = 180.0
    connect_timeout_s: float = 10.0
    dp_aware: bool = False
    aliases: Mapping[str, str] = {}
    roles: tuple[WorkerType, ...] = ("regular",)


class RegistryError(Exception):
    """A registration or removal that cannot be; the message is for the operator, `code` as in the admin API."""

    code: ClassVar[str] = "BAD_REQUEST"


class WorkerRefused(RegistryError):
    """The specification asks for something this version does not do."""


class WorkerExists(RegistryError):
    code = "WORKER_ALREADY_EXISTS"


class WorkerBeingCreated(RegistryError):
    code = "WORKER_CREATE_IN_PROGRESS"


class WorkerNotFound(RegistryError):
    code = "WORKER_NOT_FOUND"


async def _nothing_to_prepare(_worker: Worker) -> None:
    return None


class Registry:
    """All workers of the gateway.  Make it and use it inside one event loop; `close` it in the end.

    `prepare` is awaited before a worker becomes ready, each time; what it raises counts as a failed introduction and
    is tried again.  `tls`: for workers with a grpcs URL (None: `engines.channel.default_tls`).
    """

    def __init__(
        self,
        settings: RegistrySettings,
        observer: Observer,
        *,
        prepare: Callable[[Worker], Awaitable[None]] = _nothing_to_prepare,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._settings = settings
        self._observer = observer
        self._prepare = prepare
        self._workers: dict[str, Worker] = {}
        self._channels: dict[str, WorkerChannels] = {}
        self._lives: dict[str, tuple[Life, asyncio.Task[None]]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}

    # ------------------------------------------------------------ asked

    @property
    def workers(self) -> list[Worker]:
        """All of them, in the order they were added."""
        return list(self._workers.values())

    def get(self, worker_id: str) -> Worker:
        """Raises WorkerNotFound."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise WorkerNotFound(f"no worker has the id {worker_id!r}")
        return worker

    def models(self) -> list[str]:
        """Model ids of all workers that once told theirs, healthy or not; aliases are not listed."""
        found = {worker.model_id: None for worker in self._workers.values() if worker.model_id}
        return list(found)

    def model_of(self, name: str) -> str | None:
        """The id of the model that goes by this name: its own id, else an alias; None for nobody's."""
        for worker in self._workers.values():
            if worker.model_id == name:
                return name or None
        return next((worker.model_id for worker in self._workers.values() if name in worker.aliases), None)

    def workers_of(self, model: str, role: str | None = None, *, healthy_only: bool = True) -> list[Worker]:
        """Workers that serve `model` (its id or an alias), all or those of one role."""
        name = self.model_of(model)
        return [
            worker
            for worker in self._workers.values()
            if name is not None
            and worker.model_id == name
            and role in (None, worker.worker_type)
            and (worker.is_healthy or not healthy_only)
        ]

    @property
    def missing_role(self) -> str | None:
        """A role without a healthy worker, so that nothing can be served; None when all are filled."""
        filled = {worker.worker_type for worker in self._workers.values() if worker.is_healthy}
        return next((role for role in self._settings.roles if role not in filled), None)

    # ------------------------------------------------------------ changed

    async def add(self, spec: WorkerSpec) -> Worker:
        """Register a worker and return it at once, `pending`; everything else happens in its own task.

        Raises WorkerRefused (a URL or type that cannot be), WorkerExists or WorkerBeingCreated (same URL).  A worker
        that has failed is replaced.
        """
        url = canonical_url(spec.url)
        _check_spec(spec, self._settings.roles)
        self._make_room(url)
        return self._open(spec, url, rank=None)

    def change(self, worker_id: str, spec: WorkerSpec) -> Worker:
        """Give a worker another registration.  Its requests in flight go on; unless only what is shown differs, it is
        introduced again, and requests that come meanwhile wait for that as after a lost connection.

        Raises WorkerNotFound (also for one that is draining), and WorkerRefused as `add` does, or for another URL.
        """
        worker = self.get(worker_id)
        if worker.id in self._drains:
            raise WorkerNotFound(f"the worker {worker_id!r} is draining")
        if canonical_url(spec.url) != worker.address:
            raise WorkerRefused(f"the worker's URL is {worker.address}, not {spec.url}: remove it and add another")
        _check_spec(spec, self._settings.roles)
        before, worker.spec = worker.spec, spec
        if msgspec.structs.replace(before, priority=spec.priority, cost=spec.cost, url=spec.url) != spec:
            self._introduce_again(worker)
        return worker

    def remove(self, worker_id: str) -> Worker:
        """Take a worker out of service: no new requests from now on.

        In the background it drains (settle time, then until nothing is in flight, at most the grace), then it is
        gone.  A second call changes nothing.  Raises WorkerNotFound.
        """
        worker = self.get(worker_id)
        if worker.id not in self._drains:
            self._lives[worker.id][1].cancel()
            worker.status = Status.DRAINING
            self._drains[worker.id] = asyncio.create_task(self._drain(worker), name=f"drain {worker.url}")
            log.info("worker %s: draining", worker.url)
        return worker

    async def close(self) -> None:
        """Stop all tasks and close all connections; calls under way end with UNAVAILABLE."""
        tasks = [*(task for _, task in self._lives.values()), *self._drains.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channels in self._channels.values():
            channels.close()
        for keep in (self._workers, self._channels, self._lives, self._drains):
            keep.clear()

    def _open(self, spec: WorkerSpec, address: str, rank: int | None) -> Worker:
        worker = Worker(spec, address, aliases=self._settings.aliases)
        if rank is not None:
            worker.rank, worker.url = rank, ranked_url(address, rank)
        worker.breaker = self._breaker(worker)
        channels = WorkerChannels(address, connect_timeout_s=self._settings.connect_timeout_s, tls=self._tls)
        self._workers[worker.id] = worker
        self._channels[worker.id] = channels
        self._begin_life(worker)
        log.info("worker %s: registered", worker.url)
        return worker

    def _breaker(self, worker: Worker) -> Breaker:
        def changed(before: BreakerState, after: BreakerState) -> None:
            level = logging.WARNING if after is BreakerState.OPEN else logging.INFO
            log.log(level, "worker %s: circuit breaker %s, was %s", worker.url, after.value, before.value)
            self._observer.breaker_changed(worker.url, before.value, after.value)

        return Breaker(self._settings.breaker, changed)

    async def _introduced(self, worker: Worker) -> None:
        """Before a worker is ready, each time."""
        if self._settings.dp_aware:
            self._spread(worker)
        await self._prepare(worker)

    def _spread(self, worker: Worker) -> None:
        """Its rank for the worker, and a worker for every rank that is new."""
        ranks = check_rank(worker)
        if worker.rank is None:
            self._observer.worker_removed(worker.url)
            worker.rank, worker.url = 0, ranked_url(worker.address, 0)
        if worker.client is not None:
            worker.client.pin(worker.rank)
        if worker.rank == 0:
            for rank in range(max(worker.ranks, 1), ranks):
                self._open(worker.spec, worker.address, rank)
            worker.ranks = max(worker.ranks, ranks)

    def _make_room(self, url: str) -> None:
        for other in self.workers:
            if other.address != url:
                continue
            if other.status is Status.FAILED:
                self._forget(other)
            elif other.status is Status.PENDING:
                raise WorkerBeingCreated(f"worker {url} is being registered already, its id is {other.id}")
            else:
                raise WorkerExists(f"worker {url} exists already, its id is {other.id}")

    def _begin_life(self, worker: Worker) -> None:
        channels, health = self._channels[worker.id], self._settings.health.overridden(worker.spec.health)
        life = Life(worker, channels, health, self._observer, self._introduced)
        self._lives[worker.id] = life, asyncio.create_task(life.run(), name=f"worker {worker.url}")

    def _introduce_again(self, worker: Worker) -> None:
        log.info("worker %s: its registration changed", worker.url)
        life, task = self._lives[worker.id]
        if task.done():  # it was given up
            worker.status = Status.PENDING
            self._begin_life(worker)
        else:
            life.introduce_again(self._settings.health.overridden(worker.spec.health))

    async def _drain(self, worker: Worker) -> None:
        await asyncio.sleep(self._settings.drain_settle_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_grace_s):
                await worker.idle.wait()
        if worker.load:
            log.warning("worker %s: removed with %d requests in flight", worker.url, worker.load)
        self._forget(worker)
        self._drains.pop(worker.id, None)

    def _forget(self, worker: Worker) -> None:
        self._lives.pop(worker.id)[1].cancel()
        self._channels.pop(worker.id).close()
        del self._workers[worker.id]
        self._observer.worker_removed(worker.url)
        log.info("worker %s: gone", worker.url)


def canonical_url(url: str) -> str:
    """`grpc://host:port` or `grpcs://host:port`; a bare `host:port` is gRPC.  WorkerRefused says what else it is."""
    scheme, separator, _ = url.strip().partition("://")
    if separator and scheme.lower() in ("http", "https"):
        raise WorkerRefused(f"{url}: workers are gRPC only, HTTP workers are not supported (use grpc://host:port)")
    if separator and scheme.lower() == "ipc":
        raise WorkerRefused(
            f"{url}: workers are gRPC only, direct ZMQ workers are not supported (use grpc://host:port)"
        )
    try:
        address = parse_url(url.strip())
    except ValueError as error:
        raise WorkerRefused(f"{url}: {error}") from None
    if not address.port:
        raise WorkerRefused(f"{url}: a worker needs a port from 1 to 65535")
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{'grpcs' if address.is_tls else 'grpc'}://{host}:{address.port}"


def _check_spec(spec: WorkerSpec, roles: tuple[WorkerType, ...]) -> None:
    if spec.worker_type not in roles:
        raise WorkerRefused(
            f"{spec.url}: a {spec.worker_type} worker gets no requests here, this gateway serves with "
            f"{' and '.join(roles)} workers (--pd-disaggregation and --epd-disaggregation decide)"
        )
