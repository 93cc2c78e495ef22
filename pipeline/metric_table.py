"""Every metric the gateway exports: one declaration each, with kind, name, labels and help.

`smg_*` names, labels and buckets are SMG's, letter by letter, so that dashboards and alerts carry over; the rest is
`mediagate_*`.  `pipeline.metrics` observes them, docs/metrics.md is generated from this table.  Nothing a client can
choose freely is ever a label: paths are route templates, models come from the registry, and every label's number of
values is bounded.
"""

from typing import Literal

import msgspec

_ROUTED = ("router_type", "backend_type", "connection_mode", "model", "endpoint")
_PAIR = ("backend_type", "model", "runtime")
_GENERATED = ("router_type", "backend_type", "model", "endpoint")

# SMG's buckets for whole requests and for the time to the first token, in seconds.
REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0),
    *(180.0, 240.0, 300.0, 480.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0),
)
STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
MEDIA_BYTES = tuple(float(1 << power) for power in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28))


class Declaration(msgspec.Struct, frozen=True):
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


def _counter(name: str, labels: tuple[str, ...], text: str) -> Declaration:
    return Declaration("counter", name, labels, text)


def _gauge(name: str, labels: tuple[str, ...], text: str) -> Declaration:
    return Declaration("gauge", name, labels, text)


def _histogram(name: str, labels: tuple[str, ...], text: str, buckets: tuple[float, ...]) -> Declaration:
    return Declaration("histogram", name, labels, text, buckets)


DECLARATIONS: tuple[Declaration, ...] = (
    # HTTP
    _counter("smg_http_requests_total", ("method", "path"), "HTTP requests answered, by method and route template"),
    _histogram(
        "smg_http_request_duration_seconds",
        ("method", "path"),
        "From the request's head to the last byte of its answer",
        REQUEST_SECONDS,
    ),
    _counter(
        "smg_http_responses_total",
        ("path", "status_code", "error_code"),
        "HTTP answers; error_code is empty for a success",
    ),
    _gauge("smg_http_connections_active", (), "HTTP connections with a request that is being answered"),
    _counter(
        "mediagate_connections_cut_total",
        ("reason",),
        "Connections closed for their silence: head (one that did not end, 408), idle (between requests)",
    ),
    # admission
    _gauge("smg_admission_inflight", (), "Requests that hold a place"),
    _gauge("smg_admission_queue_depth", (), "Requests that wait for a place"),
    _counter(
        "smg_admission_queue_rejected_total",
        ("reason",),
        "Refusals: full, timeout, multimodal_inflight, multimodal_too_large, body_bytes",
    ),
    # routing
    _counter("smg_router_requests_total", (*_ROUTED, "streaming"), "Requests sent to an engine"),
    _counter(
        "smg_router_request_errors_total", (*_ROUTED, "error_type"), "Requests that ended in an error, by its kind"
    ),
    _histogram("smg_router_ttft_seconds", _GENERATED, "From the request to its first token", REQUEST_SECONDS),
    _counter("smg_router_tokens_total", (*_GENERATED, "token_type"), "Tokens; token_type is input or output"),
    # workers
    _gauge("smg_worker_health", ("worker",), "1 while the worker is healthy, else 0"),
    _gauge("smg_worker_cb_state", ("worker",), "The worker's circuit breaker: 0 closed, 1 open, 2 half-open"),
    _counter("smg_worker_cb_transitions_total", ("worker", "from", "to"), "Changes of a circuit breaker's state"),
    _counter("smg_worker_cb_outcomes_total", ("worker", "outcome"), "What circuit breakers count: success or failure"),
    _gauge("smg_worker_requests_active", ("worker",), "Requests running on the worker"),
    _counter(
        "smg_worker_selection_total",
        ("worker_type", "connection_mode", "model", "policy"),
        "Times a worker was chosen, by policy",
    ),
    _counter("smg_worker_retries_total", ("worker_type", "endpoint"), "Further attempts after a failed one"),
    _histogram("smg_pd_prefill_duration_seconds", _PAIR, "Prefill legs of vLLM pairs, to their end", REQUEST_SECONDS),
    _histogram(
        "smg_pd_kv_transfer_duration_seconds",
        _PAIR,
        "From the end of a vLLM prefill leg to its decode leg being sent",
        REQUEST_SECONDS,
    ),
    _histogram(
        "smg_pd_ttft_seconds", _PAIR, "SGLang and TokenSpeed pairs, from sending to the first output", REQUEST_SECONDS
    ),
    _counter("smg_pd_kv_connector_mode_total", ("mode",), "Hand-overs of vLLM pairs: nixl, mooncake or passthrough"),
    _counter(
        "smg_pd_kv_transfer_failures_total",
        (),
        "Prefill legs that were asked for kv_transfer_params and returned none: decode computed the prompt again",
    ),
    # media
    _counter(
        "smg_mm_processing_total",
        ("model", "mode", "reason"),
        "Multimodal requests by where media are processed (router, worker) and why: config, plan_not_forwardable, "
        "model_not_opted_in, auto_none, auto_uniform, auto_mixed",
    ),
    _counter("smg_mm_tensors_total", ("runtime", "path"), "Tensors sent, side tensors included, by transport path"),
    _counter("smg_mm_tensor_bytes_total", ("runtime", "path"), "Bytes of the tensors sent, by transport path"),
    _counter("smg_mm_shm_write_failures_total", ("runtime",), "Segments that failed; their tensor went in the message"),
    _histogram(
        "mediagate_stage_duration_seconds",
        ("stage", "modality"),
        "Time of one stage of one item or request; modality is all where a stage has none",
        STAGE_SECONDS,
    ),
    _histogram("mediagate_media_bytes", ("modality",), "Encoded bytes of one media item", MEDIA_BYTES),
    _gauge("mediagate_inflight_bytes", (), "Preprocessed media held for engines"),
    _gauge("mediagate_inflight_waiting_bytes", (), "Preprocessed media that waits for room"),
    _gauge("mediagate_inflight_limit_bytes", (), "--multimodal-max-inflight-bytes; 0 = unbounded"),
    _counter("mediagate_fetches_shared_total", (), "Fetches saved: another request was just fetching the same URL"),
    _counter("mediagate_pixel_cache_hits_total", ("model",), "Pictures whose tensor was in the pixel cache"),
    _counter(
        "mediagate_pixel_cache_misses_total",
        ("model",),
        "Pictures whose tensor had to be made; with hits and shared ones, all pictures while the cache is on",
    ),
    _counter(
        "mediagate_pixels_shared_total",
        ("model",),
        "Pictures that waited for the tensor another request was having made; the cache may be off",
    ),
    _counter("mediagate_pixel_cache_evictions_total", (), "Tensors the cache gave up, for its limit or for requests"),
    _gauge("mediagate_pixel_cache_used_bytes", (), "Bytes the cache holds, of the output ring or of /dev/shm"),
    _gauge("mediagate_pixel_cache_limit_bytes", (), "--mm-pixel-cache-mb in bytes; 0 = off"),
    _gauge("mediagate_pixel_cache_entries", (), "Tensors in the cache"),
    # the sidecar
    _counter("mediagate_sidecar_jobs_total", ("outcome",), "Sidecar: jobs answered, by ok or the failure's code"),
    _counter(
        "mediagate_sidecar_jobs_dropped_total",
        ("reason",),
        "Sidecar: jobs that could not be read: malformed, too_large",
    ),
    _counter("mediagate_sidecar_jobs_returned_total", (), "Sidecar: jobs given back to the queue at the end"),
    _gauge("mediagate_sidecar_jobs_running", (), "Sidecar: jobs being worked on"),
    _gauge("mediagate_sidecar_redis_connected", (), "Sidecar: 1 while Redis answers, else 0"),
    _histogram(
        "mediagate_sidecar_job_duration_seconds",
        (),
        "Sidecar: from taking a job to its answer's delivery",
        STAGE_SECONDS,
    ),
    _histogram("mediagate_sidecar_answer_bytes", (), "Sidecar: bytes of one answer", MEDIA_BYTES),
    # pool and memory
    _gauge("mediagate_pool_processes", (), "Pool processes alive"),
    _gauge("mediagate_pool_busy_processes", (), "Pool processes at work"),
    _gauge("mediagate_pool_queue_jobs", (), "Jobs that wait for a pool process"),
    _counter("mediagate_pool_restarts_total", ("reason",), "Pool processes replaced"),
    _gauge("mediagate_ring_used_bytes", ("ring",), "Shared memory in use, by ring (inputs, outputs)"),
    _gauge("mediagate_ring_size_bytes", ("ring",), "Shared memory there is, by ring"),
    _counter("mediagate_page_faults_total", (), "Minor page faults of pool jobs: memory touched for the first time"),
    _histogram("mediagate_event_loop_lag_seconds", (), "How late the event loop's timer fires", LAG_SECONDS),
    _gauge(
        "mediagate_tls_certificate_expiry_timestamp_seconds",
        ("certificate",),
        "When the first certificate of the file ends that clients (server) or workers (client) are shown",
    ),
    _gauge("mediagate_build_info", ("version",), "1, with the version as label"),
)
