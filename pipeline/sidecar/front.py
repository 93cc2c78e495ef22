"""The sidecar's front process: the stations put together, a listener for health and metrics, an orderly end.

What `pipeline.frontend` is to a gateway: one event loop, in a child of the same supervisor, over the same pool and the
same shared mapping.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from engines.base import Form
from pipeline import models
from pipeline.address import MediaHostPolicy
from pipeline.admission import Bodies, InflightMedia
from pipeline.archive import BundleError
from pipeline.bundle import Bundle, load_bundle, locate
from pipeline.cache import PixelCache
from pipeline.catalog import pool_configuration, with_family
from pipeline.config import EXIT_CONFIG, EXIT_OK, EXIT_PORT_TAKEN, ConfigError
from pipeline.encode import Encoder
from pipeline.fetch_once import SharingFetcher
from pipeline.gauges import StationGauges, watch_lag
from pipeline.httpurl import host_and_port
from pipeline.intake import Receiver
from pipeline.jobs import Job, Result
from pipeline.metrics import Metrics
from pipeline.models.base import Family, FamilyError
from pipeline.pixels import PixelMaker
from pipeline.plan import ServedModel
from pipeline.poolwork import PoolWork
from pipeline.sidecar.fingerprint import Fingerprint
from pipeline.sidecar.protocol import Keys
from pipeline.sidecar.queue import JobQueue, shown_url
from pipeline.sidecar.service import Service
from pipeline.sidecar.settings import SidecarConfig, fingerprint_of
from pipeline.sidecar.work import JobWork
from pipeline.versions import VERSION
from pool.link import FrontendLink
from pool.pool import Pool
from pool.segments import SegmentStore

_log = logging.getLogger("mediagate.sidecar")

MODEL_KEY = 1  # the one model pool processes are told of
FETCH_WAIT_S = 10.0


def run(link: FrontendLink, config: SidecarConfig) -> int:
    """The front process's life; returns the sidecar's exit code."""
    return uvloop.run(SidecarFront(link, config).live())


class CannotListen(Exception):
    """The listener cannot be opened."""


class SidecarFront:
    """Owns every station; `live` is its whole life."""

    def __init__(self, link: FrontendLink, config: SidecarConfig) -> None:
        self._link = link
        self._config = config
        self._metrics = Metrics()
        self._draining = asyncio.Event()
        self._quitting = asyncio.Event()
        self._closing = contextlib.AsyncExitStack()

    async def live(self) -> int:
        self._link.on_drain(lambda settle: self._draining.set())
        self._link.on_quit(self._on_quit)
        async with self._closing:
            try:
                await self._assemble()
            except CannotListen as error:
                _log.critical("%s", error)
                return EXIT_PORT_TAKEN
            except (ConfigError, BundleError, FamilyError) as error:
                _log.critical("%s", error)
                return EXIT_CONFIG
            await self._draining.wait()
            _log.info("draining: %d jobs, at most %g s", self._service.running, self._config.watch.shutdown_grace_s)
            await self._service.drain(self._config.watch.shutdown_grace_s, self._quitting)
        return EXIT_OK

    def _on_quit(self) -> None:
        self._quitting.set()
        self._draining.set()

    # -- putting together

    async def _assemble(self) -> None:
        config, link = self._config, self._link
        pool: Pool[Job, Result] = link.pool()
        pool.start()
        self._pool = pool
        self._closing.push_async_callback(pool.close)
        bundle = await asyncio.to_thread(_bundle, config.bundle_source)
        model, form = served(config, bundle)
        assert model.family is not None
        pool.configure(MODEL_KEY, pool_configuration(model.family, model.settings))
        fingerprint = fingerprint_of(config.engine, bundle.config.config)
        work = self._work(model, fingerprint, form)
        queue = self._open_queue(fingerprint)
        self._service = Service(
            queue,
            work,
            self._metrics,
            lambda: pool.processes_alive > 0,
            jobs=config.jobs.concurrency,
            settings_source=_settings_source(config.sources),
        )
        await self._listen()
        lag = asyncio.create_task(watch_lag(self._metrics))
        self._closing.callback(lag.cancel)
        self._service.start()
        text = (
            f"media sidecar for {fingerprint.model} ({model.family.name}) redis: {shown_url(config.jobs.redis_url)} "
            f"keys: {queue.keys.prefix} jobs at once: {config.jobs.concurrency} "
            f"pool: {config.pool.processes} processes "
            f"pixels: {'raw, for a worker that normalises' if not form.normalised else form.dtype}"
        )
        _log.info("serves workers that were started with %s", fingerprint.told())
        _log.info("health and metrics on http://%s", host_and_port(config.watch.host, config.watch.port))
        link.ready(text)

    def _work(self, model: ServedModel, fingerprint: Fingerprint, form: Form) -> JobWork:
        config, metrics = self._config, self._metrics
        stations = config.stations()
        bodies = Bodies(config.jobs.max_fetched_bytes, FETCH_WAIT_S, metrics.rejected)
        receiver = Receiver(stations, self._open_fetcher(), self._link.inputs, bodies)
        pool_work = PoolWork(
            self._pool, config.pool.job_timeout_s, metrics, clip_deadline_s=config.media.video_timeout_s
        )
        cache = self._open_cache()
        self._gauges = StationGauges(metrics, self._pool, self._link.inputs, self._link.outputs, cache)
        encoder = Encoder(
            pool_work,
            PixelMaker(pool_work, cache, metrics),
            InflightMedia(None, 0.0, metrics.rejected, lambda gate: None),
            receiver,
            metrics,
            max_clip_bytes=config.media.video_max_decoded_bytes,
        )
        return JobWork(model, fingerprint, form, receiver, encoder, most_answer_bytes=config.jobs.max_result_bytes)

    def _open_cache(self) -> PixelCache:
        """In the arena alone: nothing here is read from /dev/shm."""
        segments = SegmentStore(pid=os.getpid(), cap_bytes=0)
        self._closing.callback(segments.close)
        limit = self._config.media.pixel_cache_mb << 20
        cache = PixelCache(limit, 0, self._link.outputs, segments, self._metrics)
        self._closing.callback(cache.close)
        return cache

    def _open_fetcher(self) -> SharingFetcher:
        media, watch = self._config.media, self._config.watch
        policy = MediaHostPolicy(
            allow_private=watch.allow_private_hosts,
            listening_on_loopback=False,
            allowed_domains=frozenset(media.allowed_domains) if media.allowed_domains is not None else None,
        )
        _log.info("media fetch policy of the sidecar: %s", policy.describe())
        fetcher = SharingFetcher(policy, version=VERSION, slots=media.max_fetches, saved=self._metrics.fetch_shared)
        self._closing.push_async_callback(fetcher.close)
        return fetcher

    def _open_queue(self, fingerprint: Fingerprint) -> JobQueue:
        jobs = self._config.jobs
        queue = JobQueue(
            jobs.redis_url, Keys(jobs.namespace or fingerprint.namespace()), most_job_bytes=jobs.max_job_bytes
        )
        self._closing.push_async_callback(queue.close)
        return queue

    # -- health and metrics

    async def _listen(self) -> None:
        watch = self._config.watch
        app = web.Application()
        app.router.add_get("/health", _well)
        app.router.add_get("/liveness", self._liveness)
        app.router.add_get("/readiness", self._readiness)
        app.router.add_get("/metrics", self._scrape)
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        self._closing.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, watch.host, watch.port).start()
        except OSError as error:
            raise CannotListen(
                f"cannot listen on {host_and_port(watch.host, watch.port)}: {error.strerror or error}"
            ) from None

    async def _liveness(self, request: web.Request) -> web.Response:
        return _said(None if self._link.has_supervisor else "no supervisor")

    async def _readiness(self, request: web.Request) -> web.Response:
        return _said(self._unready())

    def _unready(self) -> str | None:
        if self._draining.is_set():
            return "draining"
        if not self._pool.processes_alive:
            return "no pool process"
        return None if self._service.is_connected else "no Redis"

    async def _scrape(self, request: web.Request) -> web.Response:
        self._gauges.refresh()
        content_type, body = self._metrics.render()
        return web.Response(body=body, headers={"Content-Type": content_type})


async def _well(request: web.Request) -> web.Response:
    return _said(None)


def _said(trouble: str | None) -> web.Response:
    return web.json_response({"status": trouble or "ok"}, status=503 if trouble else 200)


def _settings_source(sources: Mapping[str, str]) -> str:
    """As the published hello tells it."""
    names = {"redis_url": "jobs.redis_url", "sidecar_namespace": "jobs.namespace"}
    return ",".join(f"{name}={sources.get(key, 'default')}" for name, key in names.items())


def _bundle(source: str) -> Bundle:
    return load_bundle(Path(locate(source)))


def served(config: SidecarConfig, bundle: Bundle) -> tuple[ServedModel, Form]:
    """The model with its family, and the form its worker wants pixels in.

    Raises ConfigError for a model whose media no vLLM worker is known to be sent as references, FamilyError for a
    checkpoint that lacks something.
    """
    engine = config.engine
    name = engine.model or ""
    family = models.family_of(name, str(bundle.config.config.get("model_type", "")))
    if family is None or family.vllm_items is None:
        known = ", ".join(models.taken_by_reference())
        kind = family.name if family else bundle.config.config.get("model_type", "unknown")
        raise ConfigError(f"model {name} ({kind}) cannot be served by this sidecar; it serves {known}")
    settings: Any = family.settings(bundle.config)
    if engine.max_video_frames:
        settings = family.with_most_frames(settings, engine.max_video_frames)
    base = ServedModel(model=name, bundle=bundle, family=None, max_context=bundle.max_context)
    model = _worker_side(with_family(base, family, settings, MODEL_KEY), family)
    return model, _form(config, family, bundle)


def _worker_side(model: ServedModel, family: Family) -> ServedModel:
    """Only what vLLM expands itself; anchors of the rest must not stand in a prompt."""
    here = {modality: anchor for modality, anchor in model.anchors.items() if modality in family.worker_side}
    rest = {modality: anchor for modality, anchor in model.anchors.items() if modality not in family.worker_side}
    return msgspec.structs.replace(model, anchors=here, guards={**model.guards, **rest})


def _form(config: SidecarConfig, family: Family, bundle: Bundle) -> Form:
    """Raw pixels for a worker that normalises itself, else what the model computes with."""
    engine = config.engine
    told = engine.device_do_normalize
    assert family.vllm_items is not None
    if told if told is not None else family.vllm_items.normalises:
        return Form("uint8", normalised=False)
    return Form(fingerprint_of(engine, bundle.config.config).dtype.removeprefix("torch."))
