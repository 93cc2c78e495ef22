"""What a front process tells of its stations when its metrics are asked for, and how late its event loop is."""

import asyncio
import time
from collections import Counter

from pipeline.cache import PixelCache
from pipeline.jobs import Job, Result
from pipeline.metrics import Metrics
from pool.arena import Arena
from pool.pool import Pool

LAG_PERIOD_S = 0.1


class StationGauges:
    """Of the pool, the arenas and the cache; what is read is true now."""

    def __init__(
        self, metrics: Metrics, pool: Pool[Job, Result], inputs: Arena, outputs: Arena, cache: PixelCache
    ) -> None:
        self._metrics = metrics
        self._pool = pool
        self._arenas = (("inputs", inputs), ("outputs", outputs))
        self._cache = cache
        self._restarts_told: Counter[str] = Counter()

    def refresh(self) -> None:
        pool, metrics = self._pool, self._metrics
        metrics.pool(pool.busy, pool.queued, pool.processes_alive)
        counts = pool.statistics
        for reason, total in (("renewed", counts.retired), ("died", counts.deaths - counts.retired)):
            for _ in range(total - self._restarts_told[reason]):
                metrics.pool_restarted(reason)
            self._restarts_told[reason] = total
        for name, arena in self._arenas:
            metrics.ring(name, arena.used, arena.size)
        metrics.pixel_cache(self._cache.used_bytes, self._cache.limit_bytes, len(self._cache))


async def watch_lag(metrics: Metrics) -> None:
    """A timer that measures its own lateness: the figure that shows whether anything blocks the loop."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD_S)
        metrics.loop_lag(max(0.0, time.perf_counter() - begun - LAG_PERIOD_S))
