"""Metrics: names, labels and buckets against the peer's own exposition and the documents; bounds on cardinality."""

import inspect
import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engines.base import Observer
from pipeline.metric_table import DECLARATIONS
from pipeline.metrics import Metrics

# A scrape of SMG 1.13.0 after seven requests: kind, labels and bucket edges as exposed.
PEER = json.loads((Path(__file__).parents[1] / "data/metrics/smg_1.13.json").read_text())

# The documented names that must be there, with their labels.
DOCUMENTED = {
    "smg_pd_prefill_duration_seconds": ["backend_type", "model", "runtime"],
    "smg_pd_kv_transfer_duration_seconds": ["backend_type", "model", "runtime"],
    "smg_pd_ttft_seconds": ["backend_type", "model", "runtime"],
    "smg_pd_kv_connector_mode_total": ["mode"],
    "smg_pd_kv_transfer_failures_total": [],
    "smg_mm_processing_total": ["model", "mode", "reason"],
    "smg_mm_tensors_total": ["runtime", "path"],
    "smg_mm_tensor_bytes_total": ["runtime", "path"],
    "smg_mm_shm_write_failures_total": ["runtime"],
    "smg_admission_queue_rejected_total": ["reason"],
    "smg_admission_inflight": [],
    "smg_admission_queue_depth": [],
    "smg_http_requests_total": ["method", "path"],
    "smg_http_request_duration_seconds": ["method", "path"],
    "smg_http_responses_total": ["path", "status_code", "error_code"],
    "smg_router_requests_total": [
        "router_type", "backend_type", "connection_mode", "model", "endpoint", "streaming"],
    "smg_router_ttft_seconds": ["router_type", "backend_type", "model", "endpoint"],
    "smg_router_tokens_total": ["router_type", "backend_type", "model", "endpoint", "token_type"],
    "smg_worker_health": ["worker"],
    "smg_worker_cb_state": ["worker"],
    "smg_worker_cb_transitions_total": ["worker", "from", "to"],
    "smg_worker_cb_outcomes_total": ["worker", "outcome"],
    "mediagate_stage_duration_seconds": ["stage", "modality"],
    "mediagate_media_bytes": ["modality"],
    "mediagate_inflight_bytes": [],
    "mediagate_inflight_waiting_bytes": [],
    "mediagate_inflight_limit_bytes": [],
    "mediagate_pool_queue_jobs": [],
    "mediagate_pool_busy_processes": [],
    "mediagate_ring_used_bytes": ["ring"],
    "mediagate_ring_size_bytes": ["ring"],
}  # fmt: skip


def samples(metrics: Metrics) -> list[Sample]:
    _, text = metrics.render()
    return [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]


def reading(metrics: Metrics, name: str, **labels: str) -> float:
    found = [one.value for one in samples(metrics) if one.name == name and one.labels == labels]
    assert len(found) == 1, f"{name}{labels}: {found}"
    return float(found[0])


def exercised() -> Metrics:
    """Every method once or more, as a request with one picture would."""
    metrics = Metrics()
    metrics.certificates({"server": 1.8e9})
    metrics.http_started("/v1/chat/completions")
    metrics.http_finished("POST", "/v1/chat/completions", 200, "", 0.02)
    metrics.http_started("other")
    metrics.http_finished("GET", "other", 404, "unknown_url", 0.0001)
    metrics.http_started("/v1/chat/completions")
    metrics.admission(3, 1)
    metrics.rejected("full")
    metrics.request_routed("qwen3-vl", "chat", False)
    metrics.request_routed("qwen3-vl", "chat", True)
    metrics.router_error("qwen3-vl", "chat", "backend_error")
    metrics.first_token("qwen3-vl", "chat", 0.03)
    metrics.tokens("qwen3-vl", "chat", 75, 3)
    metrics.mm_processing("qwen3-vl", "router", "auto_mixed")
    metrics.stage("decode", "image", 0.004)
    metrics.media_bytes("image", 40_000)
    metrics.inflight_media(5, 6, 7)
    metrics.fetch_shared()
    metrics.connection_cut("head")
    metrics.pixels_shared("qwen3-vl")
    metrics.pixel_cache_asked("qwen3-vl", False)
    metrics.pixel_cache_asked("qwen3-vl", True)
    metrics.pixel_cache_evicted()
    metrics.pixel_cache(10, 100, 1)
    metrics.sidecar_job("ok", 0.05, 1_000_000)
    metrics.sidecar_dropped("malformed")
    metrics.sidecar_returned()
    metrics.sidecar_running(2)
    metrics.sidecar_connected(True)
    metrics.pool(1, 2, 3)
    metrics.pool_restarted("killed")
    metrics.ring("outputs", 10, 100)
    metrics.page_faults(12)
    metrics.loop_lag(0.002)
    for nbytes in (8, 24, 1572864):
        metrics.tensor_sent("vllm", "inline", nbytes)
    metrics.segment_failed("vllm")
    metrics.worker_health("grpc://a:1", True)
    metrics.worker_load("grpc://a:1", 4)
    metrics.breaker_outcome("grpc://a:1", True)
    metrics.breaker_changed("grpc://a:1", "closed", "open")
    metrics.breaker_state("grpc://a:1", "open")
    metrics.worker_selected("grpc://a:1", "round_robin", "decode")
    metrics.handover_failed("grpc://a:1")
    metrics.prefilled("m", "vllm", 0.1)
    metrics.handed_over("m", "vllm", "nixl", 0.01)
    metrics.pair_answered("m", "sglang", 0.2)
    metrics.retried("regular")
    return metrics


@pytest.mark.parametrize("name", sorted({one.name for one in DECLARATIONS} & set(PEER)))
def test_the_peers_metrics_letter_by_letter(name: str) -> None:
    (ours,) = [one for one in DECLARATIONS if one.name == name]
    theirs = PEER[name]
    assert (ours.kind, list(ours.labels)) == (theirs["kind"], theirs["labels"])
    assert list(ours.buckets) == [float(edge) for edge in theirs.get("buckets", [])]


def test_documented_names_are_there() -> None:
    ours = {one.name: list(one.labels) for one in DECLARATIONS}
    assert {name: ours.get(name) for name in DOCUMENTED} == DOCUMENTED
    invented = [name for name in ours if name.startswith("smg_") and name not in PEER and name not in DOCUMENTED]
    assert invented == [], "the prefix smg_ is SMG's"


def test_every_declared_metric_is_observed() -> None:
    seen = {sample.name for sample in samples(exercised())}
    for one in DECLARATIONS:
        assert (one.name + "_count" if one.kind == "histogram" else one.name) in seen, one.name
    assert "process_cpu_seconds_total" in seen
    assert not [name for name in seen if name.endswith("_created")]


def test_figures() -> None:
    metrics = exercised()
    chat = {"path": "/v1/chat/completions"}
    assert reading(metrics, "smg_http_requests_total", method="POST", **chat) == 1
    assert reading(metrics, "smg_http_responses_total", status_code="200", error_code="", **chat) == 1
    assert reading(metrics, "smg_http_request_duration_seconds_sum", method="POST", **chat) == 0.02
    assert reading(metrics, "smg_http_connections_active") == 1
    assert reading(metrics, "smg_admission_inflight") == 3
    assert reading(metrics, "smg_admission_queue_depth") == 1
    assert reading(metrics, "smg_mm_tensors_total", runtime="vllm", path="inline") == 3
    assert reading(metrics, "smg_mm_tensor_bytes_total", runtime="vllm", path="inline") == 1572896
    routed = {"router_type": "grpc", "backend_type": "regular", "model": "qwen3-vl", "endpoint": "chat"}
    # the values of the constant labels are the peer's
    assert reading(metrics, "smg_router_requests_total", connection_mode="grpc", streaming="true", **routed) == 1
    assert reading(metrics, "smg_router_tokens_total", token_type="input", **routed) == 75
    assert reading(metrics, "smg_router_tokens_total", token_type="output", **routed) == 3
    assert reading(metrics, "smg_router_ttft_seconds_bucket", le="0.05", **routed) == 1
    assert reading(metrics, "smg_router_ttft_seconds_bucket", le="0.025", **routed) == 0
    assert reading(metrics, "mediagate_inflight_limit_bytes") == 7
    assert reading(metrics, "mediagate_pool_busy_processes") == 1
    assert reading(metrics, "mediagate_pool_queue_jobs") == 2
    assert reading(metrics, "mediagate_pool_processes") == 3
    assert reading(metrics, "mediagate_ring_used_bytes", ring="outputs") == 10
    assert reading(metrics, "mediagate_page_faults_total") == 12


def test_an_unbounded_budget_has_limit_zero() -> None:
    metrics = Metrics()
    metrics.inflight_media(1, 2, None)
    assert reading(metrics, "mediagate_inflight_limit_bytes") == 0


def test_a_removed_worker_ends_its_series_and_may_come_back() -> None:
    metrics = exercised()
    metrics.worker_health("grpc://b:1", False)
    metrics.worker_removed("grpc://a:1")
    metrics.worker_removed("grpc://never:1")
    left = {sample.labels["worker"] for sample in samples(metrics) if "worker" in sample.labels}
    assert left == {"grpc://b:1"}
    metrics.worker_health("grpc://a:1", False)
    assert reading(metrics, "smg_worker_health", worker="grpc://a:1") == 0


def test_models_are_capped_at_1024() -> None:
    metrics = Metrics()
    for number in range(1100):
        metrics.mm_processing(f"model-{number}", "router", "config")
    metrics.mm_processing("model-5", "router", "config")
    rows = {s.labels["model"]: s.value for s in samples(metrics) if s.name == "smg_mm_processing_total"}
    assert len(rows) == 1025
    assert rows["other"] == 1100 - 1024
    assert rows["model-5"] == 2


def test_no_other_label_grows_without_bound() -> None:
    metrics = Metrics()
    for number in range(400):
        word = f"w{number}"
        metrics.http_finished(word, f"/{word}", 200 + number % 3, word, 0.1)
        metrics.rejected(word)
        metrics.router_error("m", word, word)
        metrics.stage(word, "image", 0.1)
        metrics.worker_health(word, True)
        metrics.pool_restarted(word)
        metrics.worker_selected("a", word, word)
        metrics.retried(word, word)
    values: dict[tuple[str, str], set[str]] = {}
    for sample in samples(metrics):
        for label, value in sample.labels.items():
            if label != "le":
                values.setdefault((sample.name, label), set()).add(value)
    assert max(len(found) for found in values.values()) == 257
    assert values["smg_http_requests_total", "method"] == {"other"}


def test_a_missing_model_is_unknown() -> None:
    metrics = Metrics()
    metrics.mm_processing("", "router", "config")
    assert reading(metrics, "smg_mm_processing_total", model="unknown", mode="router", reason="config") == 1


def test_two_registries_do_not_meet() -> None:
    exercised()
    fresh = Metrics()
    assert not [sample for sample in samples(fresh) if sample.name == "smg_http_requests_total"]


def test_it_is_what_engines_report_to() -> None:
    for name, method in inspect.getmembers(Observer, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted = list(inspect.signature(method).parameters.values())
        given = list(inspect.signature(getattr(Metrics, name)).parameters.values())
        assert [one.name for one in given[: len(wanted)]] == [one.name for one in wanted], name
        assert all(one.default is not inspect.Parameter.empty for one in given[len(wanted) :]), name


def test_the_exposition_is_plain_text() -> None:
    kind, text = Metrics().render()
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b'mediagate_build_info{version="' in text
