"""The life of one engine worker: introduced until that works, then watched, then introduced again.

Rule: labels are valid for the connection they were read on.  When the control connection is lost the worker is stale
at once and gets no requests until it was introduced again, because whoever answers next may be an engine with other
settings (one that normalises pixels itself answers nonsense to normalised ones, without an error).  `engines.registry`
owns the tasks, states and transitions are drawn there.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from google.protobuf.message import Message

from engines.base import EngineError, Observer
from engines.channel import WorkerChannels
from engines.engine import Engine
from engines.labels import merged
from engines.probe import ENGINES, runtime_at
from engines.worker import HealthOverride, Status, Worker

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25


class HealthSettings(msgspec.Struct, frozen=True):
    """Field names follow the flags; times in seconds.

    `startup_timeout_s`: how long a new worker may take to become ready.  `startup_check_interval_s`: longest pause
    between two introductions.
    """

    startup_timeout_s: float = 1800.0
    startup_check_interval_s: float = 30.0
    interval_s: float = 60.0
    timeout_s: float = 5.0
    failure_threshold: int = 3
    success_threshold: int = 2
    disabled: bool = False

    def overridden(self, own: HealthOverride) -> "HealthSettings":
        """With what a worker's registration says instead."""
        given = {
            "interval_s": own.check_interval_secs,
            "timeout_s": own.timeout_secs,
            "failure_threshold": own.failure_threshold,
            "success_threshold": own.success_threshold,
            "disabled": own.disable_health_check,
        }
        return msgspec.structs.replace(self, **{name: value for name, value in given.items() if value is not None})


class Life:
    """`run` is the worker's task; it ends only when the worker has failed for good."""

    def __init__(
        self,
        worker: Worker,
        channels: WorkerChannels,
        settings: HealthSettings,
        observer: Observer,
        prepare: Callable[[Worker], Awaitable[None]],
    ) -> None:
        self._worker = worker
        self._channels = channels
        self._settings = settings
        self._observer = observer
        self._prepare = prepare
        self._losses = 0
        self._lost = asyncio.Event()
        channels.watch(self._connection_lost)

    async def run(self) -> None:
        is_introduced = await self._introduce_until(give_up_after_s=self._settings.startup_timeout_s)
        while is_introduced:
            await self._watch()
            is_introduced = await self._introduce_until(give_up_after_s=None)

    def introduce_again(self, settings: HealthSettings) -> None:
        """The registration is another one: what was learned on this connection is no longer believed."""
        self._settings = settings
        self._connection_lost()

    def _connection_lost(self) -> None:
        self._losses += 1
        self._lost.set()
        if self._worker.status is Status.READY:
            self._worker.is_stale = True
            self._worker.examined.clear()

    # ------------------------------------------------------------ introduction

    async def _introduce_until(self, *, give_up_after_s: float | None) -> bool:
        """Whether the worker is ready; pauses grow with the time waited: a quarter of it, within bounds."""
        began = time.monotonic()
        while True:
            try:
                await self._introduce()
                return True
            except Exception as error:  # whatever `prepare` raises: the worker is not ready, and tried again
                self._is_not_ready(error)
            finally:
                self._worker.examined.set()
            waited = time.monotonic() - began
            if give_up_after_s is not None and waited >= give_up_after_s:
                self._give_up(f"not ready after {waited:.0f} s: {self._worker.failure}")
                return False
            await asyncio.sleep(min(self._settings.startup_check_interval_s, max(_FIRST_PAUSE_S, waited / 4)))

    async def _introduce(self) -> None:
        """One try, in order: which engine, is it well, what does it say, is its model at hand."""
        worker, timeout_s, losses = self._worker, self._settings.timeout_s, self._losses
        runtime = worker.spec.runtime_type or await runtime_at(self._channels, timeout_s=timeout_s)
        client = ENGINES[runtime](self._channels)
        await self._check_well(client)
        told = merged(await self._infos(client), worker.spec.labels, client.flatten)
        client.learn(told)
        worker.client = client
        worker.learn(told)
        await self._prepare(worker)
        if self._losses != losses:
            raise EngineError("UNAVAILABLE", "connection lost while the worker was introduced")
        self._is_ready()

    async def _check_well(self, client: Engine) -> None:
        if self._settings.disabled:
            return
        for _ in range(self._settings.success_threshold):
            if not await client.is_healthy(self._settings.timeout_s):
                raise EngineError("UNAVAILABLE", "the engine says it is not healthy")

    async def _infos(self, client: Engine) -> list[Message]:
        """What the engine says of its model and of itself; an engine without such a method says nothing.

        Any other failure is one of the introduction: without `mm_device_do_normalize` the wrong pixels would be sent.
        """
        replies = []
        for ask in (client.model_info, client.server_info):
            try:
                replies.append(await ask(self._settings.timeout_s))
            except EngineError as error:
                if error.status != "UNIMPLEMENTED":
                    raise
                log.warning("worker %s: no %s, so no labels from it", self._worker.url, ask.__name__)
        return replies

    # ------------------------------------------------------------ watching

    async def _watch(self) -> None:
        """Returns when the worker has to be introduced again."""
        failures = 0
        while True:
            await self._pause()
            if self._worker.is_stale:
                log.warning("worker %s: connection lost, or registered anew: labels are read again", self._worker.url)
                return
            reason = await self._ailment()
            failures = failures + 1 if reason else 0
            if failures >= self._settings.failure_threshold:
                self._is_not_ready(EngineError("UNAVAILABLE", f"{failures} failed health checks, the last: {reason}"))
                return

    async def _pause(self) -> None:
        """Until the next check is due, or the connection is lost."""
        interval_s = None if self._settings.disabled else self._settings.interval_s
        self._lost.clear()
        if self._worker.is_stale:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await self._lost.wait()

    async def _ailment(self) -> str:
        """What is wrong, in words; nothing when the engine is well."""
        client = self._worker.client
        try:
            is_well = client is not None and await client.is_healthy(self._settings.timeout_s)
        except EngineError as error:
            return f"{error.status}: {error.message}"
        return "" if is_well else "the engine says it is not healthy"

    # ------------------------------------------------------------ transitions

    def _is_ready(self) -> None:
        worker = self._worker
        worker.status, worker.is_stale, worker.failure = Status.READY, False, ""
        worker.breaker.try_again()
        self._observer.worker_health(worker.url, True)
        log.info("worker %s: ready, serves %s on %s", worker.url, worker.model_id, worker.runtime)

    def _is_not_ready(self, error: Exception) -> None:
        worker, reason = self._worker, str(error) or type(error).__name__
        if worker.status is Status.READY:
            worker.status, worker.is_stale = Status.NOT_READY, False
        log.log(logging.DEBUG if reason == worker.failure else logging.WARNING, "worker %s: %s", worker.url, reason)
        worker.failure = reason
        self._observer.worker_health(worker.url, False)

    def _give_up(self, reason: str) -> None:
        worker = self._worker
        worker.status, worker.is_stale, worker.failure = Status.FAILED, False, reason
        self._observer.worker_health(worker.url, False)
        log.error("worker %s: given up: %s", worker.url, reason)
