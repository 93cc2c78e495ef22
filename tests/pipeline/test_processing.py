"""Where media are processed: the requirement's table, row by row, and what `worker` refuses."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.base import Modality
from engines.worker import Worker, WorkerSpec, WorkerType
from pipeline import models
from pipeline.bundle import Bundle
from pipeline.errors import GatewayError
from pipeline.models.base import Family, Hints
from pipeline.plan import MediaPart, ServedModel
from pipeline.processing import Decision, check_reachable, decide

PICTURE, CLIP, SOUND = (MediaPart(modality, b"http://host/x") for modality in Modality)
SMALLER = MediaPart(Modality.IMAGE, b"http://host/x", Hints(max_long_side=56))
SLOWER = MediaPart(Modality.VIDEO, b"http://host/x", Hints(fps=0.5))
PROCESSOR = {"mm_processor": "inprocess"}


def model(name: str = "qwen3-vl", model_type: str = "qwen3_vl") -> ServedModel:
    return ServedModel(model=name, bundle=cast(Bundle, None), family=models.family_of(name, model_type))


def worker(
    labels: dict[str, str] | None = None, *, takes: bool | None = True, kind: WorkerType = "regular", name: str = "vllm"
) -> Worker:
    """`takes`: whether its engine's protocol has references; None: the engine was not recognised yet."""
    found = Worker(WorkerSpec(url="grpc://h:1", worker_type=kind), "grpc://h:1")
    found.learn(dict(labels or {}))
    if takes is not None:
        found.client = cast(Any, SimpleNamespace(name=name, takes_references=takes))
    return found


READY = worker(PROCESSOR)
PLAIN = worker()
TOKENSPEED = worker(PROCESSOR, takes=False, name="tokenspeed")
UNKNOWN = worker(takes=None)


@pytest.mark.parametrize("labels", [{}, {"mm_processor": ""}, {"mm_processor": "off"}, {"mm_processor": " OFF "}])
def test_who_has_no_processor(labels: dict[str, str]) -> None:
    assert not worker(labels).takes_references


def test_who_takes_references() -> None:
    assert READY.takes_references and worker({"mm_processor": "redis"}).takes_references
    assert not TOKENSPEED.takes_references and not UNKNOWN.takes_references
    assert not worker(PROCESSOR, kind="encode").takes_references
    assert worker(PROCESSOR, kind="prefill").takes_references


@pytest.mark.parametrize("parts", [[PICTURE], [SLOWER], [SOUND]])
def test_router_always_says_router(parts: list[MediaPart]) -> None:
    assert decide("router", model(), parts, [READY]) == Decision("router", "config")


@pytest.mark.parametrize(
    ("parts", "workers", "expected"),
    [
        ([PICTURE], [READY], Decision("worker", "auto_uniform")),
        ([PICTURE, CLIP, PICTURE], [READY, READY], Decision("worker", "auto_uniform")),
        ([PICTURE], [], Decision("router", "auto_none")),
        ([PICTURE], [READY, PLAIN], Decision("router", "auto_mixed")),
        ([PICTURE], [PLAIN], Decision("router", "auto_mixed")),
        ([PICTURE], [READY, TOKENSPEED], Decision("router", "auto_mixed")),
        ([PICTURE], [READY, UNKNOWN], Decision("router", "auto_mixed")),
        ([SMALLER], [READY], Decision("router", "plan_not_forwardable")),
        ([PICTURE, SLOWER], [], Decision("router", "plan_not_forwardable")),
        ([PICTURE, SOUND], [READY], Decision("router", "plan_not_forwardable")),
    ],
)
def test_auto(parts: list[MediaPart], workers: list[Worker], expected: Decision) -> None:
    assert decide("auto", model(), parts, workers) == expected


def test_a_worker_that_is_not_well_counts_as_before() -> None:
    ill = worker(PROCESSOR)
    assert not ill.is_healthy
    assert decide("auto", model(), [PICTURE], [ill]) == Decision("worker", "auto_uniform")
    assert decide("auto", model(), [PICTURE], [READY, worker()]) == Decision("router", "auto_mixed")


@pytest.mark.parametrize(
    ("name", "model_type", "pictures", "clips"),
    [  # "Worker-side expansion on vLLM" of SMG's page
        ("qwen3-vl", "qwen3_vl", True, True),
        ("qwen3.5", "qwen3_5", True, True),
        ("qwen4", "qwen4_exp", True, True),
        ("minimax-m3", "minimax_m3", True, True),
        ("glm-5.3-flash", "glm5_3_flash", True, False),
        ("llama-4", "llama4", True, False),
        ("qwen2-vl", "qwen2_vl", False, False),
        ("qwen2.5-vl", "qwen2_5_vl", False, False),
        ("qwen3-omni", "qwen3_omni_moe", False, False),
        ("kimi-k3", "kimi_k3", False, False),
        ("kimi-k2.5", "kimi_k25", False, False),
        ("deepseek-v4.1", "deepseek_v41", False, False),
        ("llava-1.5", "llava", False, False),
        ("llava-next", "llava_next", False, False),
        ("phi-3-vision", "phi3_v", False, False),
        ("inkling", "inkling", False, False),
    ],
)
def test_families_vllm_expands(name: str, model_type: str, pictures: bool, clips: bool) -> None:
    served = model(name, model_type)
    assert isinstance(served.family, Family), name
    for part, is_expanded in ((PICTURE, pictures), (CLIP, clips)):
        reason = "auto_uniform" if is_expanded else "model_not_opted_in"
        assert decide("auto", served, [part], [READY]).reason == reason
        if is_expanded:
            assert decide("worker", served, [part], []) == Decision("worker", "config")
        else:
            with pytest.raises(GatewayError, match=f"this model's {part.modality.value} placeholder") as refused:
                decide("worker", served, [part], [READY])
            assert refused.value.code == "multimodal_worker_processing_unsupported_model"


@pytest.mark.parametrize(
    ("parts", "code", "item"),
    [
        ([PICTURE, SMALLER], "multimodal_hint_unsupported_in_worker_mode", 1),
        ([SLOWER], "multimodal_hint_unsupported_in_worker_mode", 0),
        ([PICTURE, PICTURE, SOUND], "multimodal_not_supported", 2),
    ],
)
def test_worker_refuses_what_no_reference_says(parts: list[MediaPart], code: str, item: int) -> None:
    with pytest.raises(GatewayError) as refused:
        decide("worker", model(), parts, [READY])
    assert (refused.value.code, refused.value.status, refused.value.item) == (code, 400, item)
    assert refused.value.message.startswith(f"media item {item}: ")


def test_worker_does_not_look_at_the_fleet() -> None:
    for workers in ([], [PLAIN], [READY, TOKENSPEED]):
        assert decide("worker", model(), [PICTURE], workers) == Decision("worker", "config")


def test_reachable() -> None:
    check_reachable(model(), [])  # that there is no worker at all is told later
    for workers in itertools.permutations([READY, PLAIN, TOKENSPEED, UNKNOWN]):
        check_reachable(model(), workers)


@pytest.mark.parametrize(
    ("workers", "code", "status", "words"),
    [
        ([PLAIN], "no_media_ref_capable_worker", 503, "has vLLM gRPC workers but none advertises mm_processor"),
        ([PLAIN, TOKENSPEED], "no_media_ref_capable_worker", 503, "has vLLM gRPC workers but none advertises"),
        ([TOKENSPEED, UNKNOWN], "no_media_ref_capable_worker", 503, "has no vLLM gRPC worker"),
        ([READY, worker(takes=False, kind="encode")], "multimodal_not_supported", 400, "cannot reach an encode worker"),
    ],
)
def test_unreachable(workers: list[Worker], code: str, status: int, words: str) -> None:
    with pytest.raises(GatewayError, match=words) as refused:
        check_reachable(model(), workers)
    assert (refused.value.code, refused.value.status) == (code, status)
