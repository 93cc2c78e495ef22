"""A real vLLM worker whose media a sidecar processes, through Redis: with the published sidecar and with ours.

Each on a fresh engine, through the gateway with `--mm-processing worker`; the answers are held against the recorded
log-probabilities (`answers.EXPECTED`), which the engine gave with tensors of its own.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path

from tests.engines_real.answers import CASES, Differs, ask, body, compare_answer
from tests.engines_real.checks import UNIQUE, Bench, Check
from tests.engines_real.clip_checks import CLIP_CHECKS
from tests.engines_real.published_sidecar import published_sidecar
from tests.engines_real.vllm_cpu import LIMITS
from tests.sidecar.running import Sidecar
from tools.launch import Gateway, request
from tools.redis_server import RedisServer, redis_server

_ENGINE_FLAGS = ("--dtype", "float32", "--limit-mm-per-prompt", LIMITS)
_NOWHERE = "http://127.0.0.1:9/picture.png"  # port 9: nothing listens there


def _published(server: RedisServer, model: Path, folder: Path) -> contextlib.AbstractContextManager[int]:
    flags = [*_ENGINE_FLAGS, "--max-model-len", "4096"]
    return published_sidecar(model, server.url, folder / "sidecar.log", flags)


@contextlib.contextmanager
def _ours(server: RedisServer, model: Path, folder: Path) -> Iterator[int]:
    flags = ["--redis-url", server.url, "--model", str(model), *_ENGINE_FLAGS, "--mm-allow-private-media-hosts"]
    sidecar = Sidecar(flags, folder / "sidecar.log")
    try:
        yield sidecar.process.pid
    finally:
        sidecar.stop()


SIDECARS = {"published": _published, "ours": _ours}


@contextlib.contextmanager
def served(kind: str, bench: Bench, model: Path, servicer: str) -> Iterator[Gateway]:
    """Redis, the sidecar, the engine, the gateway; ready to be asked."""
    with redis_server() as server, SIDECARS[kind](server, model, bench.folder):
        settings = {"SMG_VLLM_MM_REDIS_URL": server.url}
        # the published sidecar's first job takes long on a busy machine
        settings |= {"SMG_VLLM_MM_SIDECAR_TIMEOUT_MS": "120000"}
        starting = bench.start_engine(processor="redis", servicer=servicer, settings=settings)
        with starting as port, bench.gateway(port, "inline", processing="worker") as started:
            yield started


def checks(kind: str) -> dict[str, Check]:
    found: dict[str, Check] = {case: functools.partial(_case, case) for case in CASES}
    found |= CLIP_CHECKS
    found["the worker processed the media"] = _by_worker
    # the published sidecar calls every failed fetch the client's fault
    found["a media host that is down"] = functools.partial(_host_down, 400 if kind == "published" else 503)
    return found


def _case(case: str, bench: Bench, gateway: Gateway, transport: str) -> None:
    compare_answer(case, ask(gateway, body(case, next(UNIQUE))))


def _by_worker(bench: Bench, gateway: Gateway, transport: str) -> None:
    _, text = request(gateway.host, gateway.metrics_port, "/metrics")
    if b"smg_mm_processing_total{" not in text or b'mode="worker"' not in text or b'mode="router"' in text:
        raise Differs("not every request with media went to the worker as references")


def _host_down(status: int, bench: Bench, gateway: Gateway, transport: str) -> None:
    asked = body("image_shapes", next(UNIQUE))
    parts = [part for message in asked["messages"] for part in message["content"] if isinstance(part, dict)]
    for part in parts:
        if "image_url" in part:
            part["image_url"] = {"url": _NOWHERE}
    came, text = request(gateway.host, gateway.port, "/v1/chat/completions", asked, timeout_s=120)
    if came != status:
        raise Differs(f"status {came}, expected {status}: {text[:300]!r}")
    if status == 503 and "fetch_unavailable" not in json.loads(text)["error"]["message"]:
        raise Differs(f"the cause is lost: {text[:300]!r}")
