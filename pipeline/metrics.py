"""The one place that observes: a registry of its own over the table of `pipeline.metric_table`.

The frontend owns the only instance; pool processes send their timings with their results.  It is also what engines
report to (`engines.base.Observer`).  Methods are cheap: a label's child is looked up once and kept.  A label with too
many values gets "other" for the rest, so no client and no fleet can grow the registry without bound.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pipeline.histogram import Histogram, Series
from pipeline.metric_table import DECLARATIONS, Declaration
from pipeline.versions import VERSION

OTHER = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_MAX_MODELS = 1024
_MAX_VALUES = 256  # of any other label

# The parts of SMG's router labels that never vary here: gRPC to engines.
_ROUTER, _MODE = "grpc", "grpc"

_BREAKER_STATES = ("closed", "open", "half_open")  # the gauge's values
_WORKER_SERIES = frozenset(one.name for one in DECLARATIONS if one.labels[:1] == ("worker",))

_Family = Counter | Gauge | Histogram


class _Values:
    """The values a label may take: the first `limit` that come, then "other"."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def of(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OTHER
        self._seen.add(value)
        return value

    def forget(self, value: str) -> None:
        self._seen.discard(value)


class Metrics:
    """Observations of one gateway.  Nothing here waits or fails; sizes are bytes, times seconds."""

    def __init__(self, backend: str = "regular") -> None:
        """`backend`: the `backend_type` of every series; SMG says "pd" of disaggregated serving."""
        self._backend = backend
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, unread
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._families: dict[str, _Family] = {one.name: _family(one, self.registry) for one in DECLARATIONS}
        self._children: dict[tuple[str, ...], Counter | Gauge | Series] = {}
        self._models = _Values(_MAX_MODELS)
        self._workers = _Values(_MAX_VALUES)
        self._words: dict[str, _Values] = {}
        self._latest: dict[tuple[str, ...], float] = defaultdict(float)
        """Gauges that change with every request, by name and labels: set when they are asked for."""
        self._counted: dict[tuple[str, ...], float] = defaultdict(float)
        """What counters have to be raised by when they are asked for: a number in a dictionary costs a tenth."""
        self._stages: dict[tuple[str, str], Series] = {}
        self._gauge("mediagate_build_info", VERSION).set(1)
        self.inflight_media(0, 0, 0)

    def certificates(self, expiries: Mapping[str, float]) -> None:
        """Unix time by whose certificate it is: server, client."""
        for name, when in expiries.items():
            self._gauge("mediagate_tls_certificate_expiry_timestamp_seconds", name).set(when)

    # HTTP and admission

    def http_started(self, path: str) -> None:
        """A request's head was read; `path` is the route template."""
        self._latest["smg_http_connections_active",] += 1

    def http_finished(self, method: str, path: str, status: int, code: str, seconds: float) -> None:
        """Its answer ended, however it ended.  `code` is the error code, empty for a success."""
        method = method if method in _METHODS else OTHER
        path = self._word("path", path)
        self._latest["smg_http_connections_active",] -= 1
        self._count("smg_http_requests_total", method, path)
        self._histogram("smg_http_request_duration_seconds", method, path).observe(seconds)
        self._count("smg_http_responses_total", path, str(status), self._word("error_code", code))

    def connection_cut(self, reason: str) -> None:
        """Closed for a head that did not end (head) or because nobody asked for anything (idle)."""
        self._count("mediagate_connections_cut_total", reason)

    def admission(self, inflight: int, queued: int) -> None:
        self._latest["smg_admission_inflight",] = inflight
        self._latest["smg_admission_queue_depth",] = queued

    def rejected(self, reason: str) -> None:
        """A refusal by admission: full, timeout, multimodal_inflight, multimodal_too_large, ..."""
        self._count("smg_admission_queue_rejected_total", self._word("reason", reason))

    # routing and generation

    def request_routed(self, model: str, endpoint: str, streaming: bool) -> None:
        labels = self._routed(model, endpoint)
        self._count("smg_router_requests_total", *labels, "true" if streaming else "false")

    def router_error(self, model: str, endpoint: str, error_type: str) -> None:
        labels = self._routed(model, endpoint)
        self._count("smg_router_request_errors_total", *labels, self._word("error_type", error_type))

    def first_token(self, model: str, endpoint: str, seconds: float) -> None:
        labels = (_ROUTER, self._backend, self._model(model), self._word("endpoint", endpoint))
        self._histogram("smg_router_ttft_seconds", *labels).observe(seconds)

    def tokens(self, model: str, endpoint: str, prompt: int, completion: int) -> None:
        labels = (_ROUTER, self._backend, self._model(model), self._word("endpoint", endpoint))
        self._count("smg_router_tokens_total", *labels, "input", by=prompt)
        self._count("smg_router_tokens_total", *labels, "output", by=completion)

    # media

    def mm_processing(self, model: str, mode: str, reason: str) -> None:
        """Once per multimodal request: where it is preprocessed (router, worker) and why."""
        self._count("smg_mm_processing_total", self._model(model), mode, self._word("mm_reason", reason))

    def stage(self, stage: str, modality: str, seconds: float) -> None:
        found = self._stages.get((stage, modality))
        if found is None:
            labels = (self._word("stage", stage), self._word("modality", modality))
            found = self._histogram("mediagate_stage_duration_seconds", *labels)
            if labels == (stage, modality):
                self._stages[labels] = found
        found.observe(seconds)

    def media_bytes(self, modality: str, nbytes: int) -> None:
        self._histogram("mediagate_media_bytes", self._word("modality", modality)).observe(nbytes)

    def inflight_media(self, held: int, waiting: int, limit: int | None) -> None:
        """Bytes of the in-flight budget; `limit` None is unbounded."""
        self._gauge("mediagate_inflight_bytes").set(held)
        self._gauge("mediagate_inflight_waiting_bytes").set(waiting)
        self._gauge("mediagate_inflight_limit_bytes").set(limit or 0)

    def fetch_shared(self) -> None:
        """A request got what was just being fetched for another one."""
        self._count("mediagate_fetches_shared_total")

    def pixels_shared(self, model: str) -> None:
        """A picture whose tensor was just being made for another request, which it waited for."""
        self._count("mediagate_pixels_shared_total", self._model(model))

    def pixel_cache_asked(self, model: str, found: bool) -> None:
        """Only with the cache on; what was shared is neither a hit nor a miss."""
        name = "mediagate_pixel_cache_hits_total" if found else "mediagate_pixel_cache_misses_total"
        self._count(name, self._model(model))

    def pixel_cache_evicted(self) -> None:
        self._count("mediagate_pixel_cache_evictions_total")

    def pixel_cache(self, used: int, limit: int, entries: int) -> None:
        self._gauge("mediagate_pixel_cache_used_bytes").set(used)
        self._gauge("mediagate_pixel_cache_limit_bytes").set(limit)
        self._gauge("mediagate_pixel_cache_entries").set(entries)

    # the sidecar

    def sidecar_job(self, outcome: str, seconds: float, nbytes: int) -> None:
        """A job was answered: `outcome` is ok or the failure's code; `nbytes` of the answer."""
        self._count("mediagate_sidecar_jobs_total", self._word("outcome", outcome))
        self._histogram("mediagate_sidecar_job_duration_seconds").observe(seconds)
        self._histogram("mediagate_sidecar_answer_bytes").observe(nbytes)

    def sidecar_dropped(self, reason: str) -> None:
        """A job that could not be read."""
        self._count("mediagate_sidecar_jobs_dropped_total", self._word("drop", reason))

    def sidecar_returned(self) -> None:
        """A job was put back for another sidecar."""
        self._count("mediagate_sidecar_jobs_returned_total")

    def sidecar_running(self, jobs: int) -> None:
        self._gauge("mediagate_sidecar_jobs_running").set(jobs)

    def sidecar_connected(self, connected: bool) -> None:
        self._gauge("mediagate_sidecar_redis_connected").set(1 if connected else 0)

    # pool, memory, loop

    def pool(self, busy: int, queued: int, alive: int) -> None:
        self._gauge("mediagate_pool_busy_processes").set(busy)
        self._gauge("mediagate_pool_queue_jobs").set(queued)
        self._gauge("mediagate_pool_processes").set(alive)

    def pool_restarted(self, reason: str) -> None:
        self._count("mediagate_pool_restarts_total", self._word("restart", reason))

    def ring(self, name: str, used: int, size: int) -> None:
        self._gauge("mediagate_ring_used_bytes", name).set(used)
        self._gauge("mediagate_ring_size_bytes", name).set(size)

    def page_faults(self, count: int) -> None:
        self._count("mediagate_page_faults_total", by=count)

    def loop_lag(self, seconds: float) -> None:
        self._histogram("mediagate_event_loop_lag_seconds").observe(max(0.0, seconds))

    # engines.base.Observer

    def tensor_sent(self, runtime: str, path: str, nbytes: int) -> None:
        self._count("smg_mm_tensors_total", runtime, path)
        self._count("smg_mm_tensor_bytes_total", runtime, path, by=nbytes)

    def segment_failed(self, runtime: str) -> None:
        self._count("smg_mm_shm_write_failures_total", runtime)

    def breaker_state(self, worker: str, state: str) -> None:
        self._gauge("smg_worker_cb_state", self._workers.of(worker)).set(_BREAKER_STATES.index(state))

    def breaker_changed(self, worker: str, before: str, after: str) -> None:
        self._count("smg_worker_cb_transitions_total", self._workers.of(worker), before, after)

    def breaker_outcome(self, worker: str, failed: bool) -> None:
        outcome = "failure" if failed else "success"
        self._count("smg_worker_cb_outcomes_total", self._workers.of(worker), outcome)

    def worker_health(self, worker: str, healthy: bool) -> None:
        self._gauge("smg_worker_health", self._workers.of(worker)).set(1 if healthy else 0)

    def worker_load(self, worker: str, requests: int) -> None:
        self._latest["smg_worker_requests_active", self._workers.of(worker)] = requests

    def worker_removed(self, worker: str) -> None:
        """Its series end; a worker that comes back starts new ones."""
        self._workers.forget(worker)
        for pending in (self._latest, self._counted):
            for key in [key for key in pending if _is_of(worker, key)]:
                del pending[key]
        for key in [key for key in self._children if _is_of(worker, key)]:
            del self._children[key]
            self._families[key[0]].remove(*key[1:])

    def worker_selected(self, worker: str, policy: str, worker_type: str, model: str = "unknown") -> None:
        labels = (self._word("worker_type", worker_type), _MODE, self._model(model), self._word("policy", policy))
        self._count("smg_worker_selection_total", *labels)

    def retried(self, worker_type: str, endpoint: str = "chat") -> None:
        labels = (self._word("worker_type", worker_type), self._word("endpoint", endpoint))
        self._count("smg_worker_retries_total", *labels)

    def handover_failed(self, worker: str) -> None:
        self._count("smg_pd_kv_transfer_failures_total")

    def prefilled(self, model: str, runtime: str, seconds: float) -> None:
        self._pair("smg_pd_prefill_duration_seconds", model, runtime, seconds)

    def handed_over(self, model: str, runtime: str, connector: str, seconds: float) -> None:
        self._pair("smg_pd_kv_transfer_duration_seconds", model, runtime, seconds)
        self._count("smg_pd_kv_connector_mode_total", self._word("mode", connector))

    def pair_answered(self, model: str, runtime: str, seconds: float) -> None:
        self._pair("smg_pd_ttft_seconds", model, runtime, seconds)

    def _pair(self, name: str, model: str, runtime: str, seconds: float) -> None:
        self._histogram(name, self._backend, self._model(model), self._word("runtime", runtime)).observe(seconds)

    def settle(self) -> None:
        """Bring the registry up to date with what was noted since."""
        for (name, *labels), value in self._latest.items():
            self._gauge(name, *labels).set(value)
        for (name, *labels), more in self._counted.items():
            self._child(name, labels).inc(more)
        self._counted.clear()

    def render(self) -> tuple[str, bytes]:
        """The content type and the exposition of everything observed so far."""
        self.settle()
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self.registry)

    def _model(self, model: str) -> str:
        return self._models.of(model or "unknown")

    def _word(self, label: str, value: str) -> str:
        values = self._words.get(label)
        if values is None:
            values = self._words[label] = _Values(_MAX_VALUES)
        return values.of(value)

    def _routed(self, model: str, endpoint: str) -> tuple[str, ...]:
        return _ROUTER, self._backend, _MODE, self._model(model), self._word("endpoint", endpoint)

    def _child(self, name: str, labels: Sequence[str]) -> Any:
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            family = self._families[name]
            child = family.labels(*labels) if labels or isinstance(family, Histogram) else family
            self._children[key] = child
        return child

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counted[(name, *labels)] += by

    def _gauge(self, name: str, *labels: str) -> Gauge:
        found: Gauge = self._child(name, labels)
        return found

    def _histogram(self, name: str, *labels: str) -> Series:
        found: Series = self._child(name, labels)
        return found


def _is_of(worker: str, key: tuple[str, ...]) -> bool:
    """Whether a series, by name and labels, is that worker's."""
    return key[0] in _WORKER_SERIES and key[1] == worker


def _family(one: Declaration, registry: CollectorRegistry) -> _Family:
    if one.kind == "counter":
        return Counter(one.name, one.help, one.labels, registry=registry)
    if one.kind == "gauge":
        return Gauge(one.name, one.help, one.labels, registry=registry)
    return Histogram(one.name, one.help, one.labels, one.buckets, registry)
