"""The frontend process: the stations put together, two listeners, and an orderly end.

Runs in a child of the supervisor on uvloop.  Everything that waits for the network is here; everything that burns CPU
is in the pool.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from ipaddress import ip_address
from typing import Any

import uvloop
from aiohttp import web

from engines.dispatch import Dispatcher
from engines.registry import Registry, RegistryError
from engines.transport import Transport, TransportSettings, shm_namespace
from engines.worker import Worker
from pipeline.address import MediaHostPolicy
from pipeline.admission import Backlog, Bodies, Gate, InflightMedia, Slots
from pipeline.cache import PixelCache
from pipeline.catalog import Catalog
from pipeline.config import EXIT_OK, EXIT_PORT_TAKEN, Config
from pipeline.connections import FOREVER_S, Listener, Patience
from pipeline.counting import TokenCounter
from pipeline.encode import Encoder
from pipeline.fetch_once import SharingFetcher
from pipeline.fleet import backend_word, dispatch_settings, registry_settings, tls_of_workers, worker_specs
from pipeline.gauges import StationGauges, watch_lag
from pipeline.httpurl import host_and_port
from pipeline.intake import Receiver
from pipeline.jobs import Job, Result
from pipeline.metrics import Metrics
from pipeline.pixels import PixelMaker
from pipeline.poolwork import PoolWork
from pipeline.prepare import Preparation
from pipeline.protocols.admin import AdminRoutes
from pipeline.protocols.generation import Stations
from pipeline.protocols.workers import WorkerRoutes
from pipeline.rdma_lane import open_lane
from pipeline.references import Forwarder
from pipeline.routes import all_routes
from pipeline.serve import Doorkeeper, Route, application
from pipeline.tls import expiries, listening_context
from pipeline.versions import VERSION
from pool.link import FrontendLink
from pool.pool import Pool
from pool.segments import SegmentStore

_log = logging.getLogger("mediagate.frontend")

READ_AHEAD = 16 << 10  # of a connection whose request has no room yet (`protocols.http` gives it a large buffer then)
CUT_WAIT_S = 0.5  # for what a cut request gives back


def run(link: FrontendLink, config: Config) -> int:
    """The frontend's life; returns the gateway's exit code."""
    return uvloop.run(Frontend(link, config).live())


class PortTaken(Exception):
    """A listener cannot be opened."""


class Frontend:
    """Owns every station; `live` is its whole life."""

    def __init__(self, link: FrontendLink, config: Config) -> None:
        self._link = link
        self._config = config
        self._metrics = Metrics(backend_word(config))
        self._draining = asyncio.Event()
        self._quitting = asyncio.Event()
        self._settle = False
        self._closing = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()

    async def live(self) -> int:
        sys.set_asyncgen_hooks(firstiter=None)  # whoever iterates one closes it: the loop need not list them
        link = self._link
        link.on_drain(self._on_drain)
        link.on_quit(self._on_quit)
        async with self._closing:
            try:
                sites = await self._assemble()
            except PortTaken as error:
                _log.critical("%s", error)
                return EXIT_PORT_TAKEN
            text = self._ready_text()
            link.ready(text)
            await self._draining.wait()
            await self._drain(sites)
        return EXIT_OK

    # -- putting together

    async def _assemble(self) -> list[web.BaseSite]:
        config, metrics, link = self._config, self._metrics, self._link
        pool: Pool[Job, Result] = link.pool()
        self._pool = pool
        self._closing.push_async_callback(pool.close)
        self._segments = self._open_segments()
        pool.start(self._segments.lend)
        transport = self._open_transport()
        self._registry = self._open_registry()
        self._catalog = Catalog(config, pool.configure, self._registry.model_of)
        dispatcher = Dispatcher(self._registry, transport, dispatch_settings(config), metrics)
        self._closing.push_async_callback(dispatcher.close)
        slots = self._slots()
        bodies = Bodies(config.admission.max_inflight_body_bytes, config.admission.queue_timeout_s, metrics.rejected)
        self._inflight = InflightMedia(
            config.media.inflight_max_bytes, config.media.inflight_wait_s, metrics.rejected, self._inflight_changed
        )
        backlog = Backlog(config.media.unread_bytes_per_worker or None)
        policy = self._media_policy()
        receiver = Receiver(config, self._open_fetcher(policy), link.inputs, bodies)
        cache = self._open_cache()
        self._gauges = StationGauges(metrics, pool, link.inputs, link.outputs, cache)
        work = PoolWork(
            pool,
            config.pool.job_timeout_s,
            metrics,
            clip_deadline_s=config.media.video_timeout_s,
            sound_deadline_s=config.media.audio_timeout_s,
        )
        encoder = Encoder(
            work,
            PixelMaker(work, cache, metrics),
            self._inflight,
            receiver,
            metrics,
            max_clip_bytes=config.media.video_max_decoded_bytes,
            max_sound_bytes=config.media.audio_max_decoded_bytes,
        )
        preparation = Preparation(
            config,
            self._registry,
            receiver,
            Forwarder(policy, receiver),
            encoder,
            dispatcher,
            self._inflight,
            backlog,
            metrics,
        )
        metrics.certificates(expiries(config.tls))
        self._doorkeeper = Doorkeeper(config, metrics, slots)
        stations = Stations(
            config,
            bodies,
            self._catalog,
            preparation,
            dispatcher,
            metrics,
            self._doorkeeper.reply_headers,
            self._doorkeeper.go_on,
        )
        admin = AdminRoutes(config, self._registry, self._catalog, self._unready, lambda: link.has_supervisor)
        counter = TokenCounter(self._registry, receiver, encoder)
        workers = WorkerRoutes(self._registry, bodies)
        sites = await self._listen(all_routes(stations, admin, workers, counter))
        self._start(watch_lag(metrics))
        for spec in worker_specs(config):
            try:
                await self._registry.add(spec)
            except RegistryError as error:
                _log.error("worker refused url=%s reason=%s", spec.url, error)
        return sites

    def _open_segments(self) -> SegmentStore:
        store = SegmentStore(pid=os.getpid(), cap_bytes=self._config.transport.shm_max_bytes)
        swept = store.sweep()
        if swept:
            _log.info("removed segments of gateways that are gone count=%d", swept)
        self._closing.callback(store.close)
        return store

    def _open_cache(self) -> PixelCache:
        """Its bytes are part of the arena's and of the segments'."""
        cache = PixelCache(
            self._config.media.pixel_cache_mb << 20,
            self._config.transport.shm_max_bytes // 2,
            self._link.outputs,
            self._segments,
            self._metrics,
        )
        self._closing.callback(cache.close)
        return cache

    def _open_transport(self) -> Transport:
        config = self._config.transport
        settings = TransportSettings(
            owner_id=f"smg:{os.getpid()}",
            mode=config.mode,
            shm_min_bytes=config.shm_min_bytes,
            namespace=shm_namespace(),
            writable=self._segments.writable,
        )
        _log.info(
            "Multimodal tensor transport configured mode=%s shm_min_bytes=%d dev_writable=%s",
            config.mode,
            config.shm_min_bytes,
            str(self._segments.writable).lower(),
        )
        lane = open_lane(config)
        if lane is not None:
            self._closing.callback(lane.close)
        transport = Transport(settings, self._segments, self._metrics, lane)
        self._closing.callback(transport.close)
        return transport

    def _open_registry(self) -> Registry:
        config = self._config
        registry = Registry(
            registry_settings(config), self._metrics, prepare=self._introduced, tls=tls_of_workers(config.tls)
        )
        self._closing.push_async_callback(registry.close)
        return registry

    async def _introduced(self, worker: Worker) -> None:
        """Before a worker is ready, each time: an engine that comes back may read segments as the last one did not."""
        self._segments.forget(worker.url)
        await self._catalog.load(worker)

    def _media_policy(self) -> MediaHostPolicy:
        media = self._config.media
        policy = MediaHostPolicy(
            allow_private=media.allow_private_hosts,
            listening_on_loopback=ip_address(self._config.server.host).is_loopback,
            allowed_domains=frozenset(media.allowed_domains) if media.allowed_domains is not None else None,
        )
        _log.info("media fetch policy for router-side processing: %s", policy.describe())
        return policy

    def _open_fetcher(self, policy: MediaHostPolicy) -> SharingFetcher:
        media = self._config.media
        fetcher = SharingFetcher(policy, version=VERSION, slots=media.max_fetches, saved=self._metrics.fetch_shared)
        self._closing.push_async_callback(fetcher.close)
        return fetcher

    def _slots(self) -> Slots:
        admission = self._config.admission
        return Slots(
            admission.max_concurrent_requests or None,
            admission.queue_size,
            admission.queue_timeout_s,
            self._metrics.rejected,
            lambda gate: self._metrics.admission(gate.held, gate.waiters),
        )

    def _inflight_changed(self, gate: Gate) -> None:
        self._metrics.inflight_media(gate.held, gate.waiting, gate.limit)

    # -- listening

    async def _listen(self, routes: list[Route]) -> list[web.BaseSite]:
        """Metrics first, so that whoever is served is counted; the sites that take clients."""
        metrics, server = self._config.metrics, self._config.server
        scrapes = await self._set_up(_metrics_app(self._metrics, self._refresh_gauges))
        await self._open(web.TCPSite(scrapes, metrics.host, metrics.port), metrics.host, metrics.port)
        runner = await self._set_up(application(self._config, self._doorkeeper, routes))
        # what strangers send that is no HTTP gets its 400 without a stack in our log; our handlers log their own faults
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
        clients = Listener(
            runner,
            server.host,
            server.port,
            patience=Patience(head_s=server.header_read_timeout_s, idle_s=server.idle_connection_timeout_s),
            cut=self._metrics.connection_cut,
            refuse=self._doorkeeper.refuse_unread,
            tls=listening_context(self._config.tls),
            access_log=None,
            read_bufsize=READ_AHEAD,
            auto_decompress=False,
        )
        await self._open(clients, server.host, server.port)
        return [clients]

    async def _set_up(self, app: web.Application) -> web.AppRunner:
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            keepalive_timeout=self._config.server.idle_connection_timeout_s or FOREVER_S,  # scrapers'
            shutdown_timeout=CUT_WAIT_S,  # aiohttp waits for ever when this is 0
        )
        await runner.setup()
        self._closing.push_async_callback(runner.cleanup)
        return runner

    async def _open(self, site: web.BaseSite, host: str, port: int) -> None:
        try:
            await site.start()
        except OSError as error:
            raise PortTaken(f"cannot listen on {host_and_port(host, port)}: {error.strerror or error}") from None

    def _ready_text(self) -> str:
        config = self._config
        given = ", ".join(spec.url for spec in worker_specs(config))
        urls = given or "none yet (POST /workers adds one, --demo brings one)"
        scheme = "https" if config.tls.cert_path else "http"
        text = (
            f"listening on {scheme}://{host_and_port(config.server.host, config.server.port)} engines: {urls} "
            f"pool: {config.pool.processes} processes transport: {config.transport.mode}"
        )
        _log.info("%s (Ctrl-C to stop)", text)
        return text

    # -- what it tells about itself

    def _unready(self) -> str | None:
        if self._draining.is_set():
            return "draining"
        if not self._pool.processes_alive:
            return "no pool process"
        if self._registry.missing_role is not None:
            return "insufficient healthy workers"
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._closing.callback(task.cancel)

    def _refresh_gauges(self) -> None:
        """At every scrape."""
        for worker in self._registry.workers:
            self._metrics.breaker_state(worker.url, worker.breaker.state.value)
        self._gauges.refresh()

    # -- the end

    def _on_drain(self, settle: bool) -> None:
        self._settle = settle
        self._draining.set()

    def _on_quit(self) -> None:
        self._quitting.set()
        self._draining.set()

    async def _drain(self, sites: list[web.BaseSite]) -> None:
        """Unready at once; the listener stays for the settle time; running requests end within the grace."""
        server = self._config.server
        self._doorkeeper.is_leaving = True
        if self._settle and server.drain_settle_s:
            _log.info("draining: listening %g s longer for balancers to notice", server.drain_settle_s)
            await self._or_quit(server.drain_settle_s, lambda: False)
        for site in sites:
            await site.stop()
        if self._doorkeeper.inflight:
            _log.info(
                "draining: waiting for %d requests, at most %g s", self._doorkeeper.inflight, server.shutdown_grace_s
            )
        await self._or_quit(server.shutdown_grace_s, lambda: self._doorkeeper.inflight == 0)
        if self._doorkeeper.inflight:
            _log.warning("ending with %d requests unfinished", self._doorkeeper.inflight)
            await self._doorkeeper.cut(CUT_WAIT_S)

    async def _or_quit(self, seconds: float, done: Any) -> None:
        deadline = time.monotonic() + seconds
        while not done() and not self._quitting.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quitting.wait(), min(left, 0.05))


def _metrics_app(metrics: Metrics, refresh: Callable[[], None]) -> web.Application:
    async def scrape(request: web.Request) -> web.Response:
        refresh()
        content_type, body = metrics.render()
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", scrape)
    return app
