"""A real vLLM worker whose media a sidecar processes, through Redis: with the published sidecar and with ours.

Each on a fresh engine, through the gateway with `--mm-processing worker`; the answers are held against the recorded
log-probabilities (`answers.EXPECTED`), which the engine gave with tensors of its own.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.engines_real.answers import CASES, Differs, ask, body, compare_answer
from tests.engines_real.published_sidecar import published_sidecar
from tests.engines_real.vllm_cpu import LIMITS, vllm_engine
from tests.sidecar.running import Sidecar
from tools.launch import Gateway, request
from tools.redis_server import RedisServer, redis_server

_UNIQUE = itertools.count(1)
_ENGINE_FLAGS = ("--dtype", "float32", "--limit-mm-per-prompt", LIMITS)
_NOWHERE = "http://127.0.0.1:9/picture.png"  # port 9: nothing listens there

Check = Callable[[Gateway], None]


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
def served(kind: str, model: Path, command: list[str], quiet: list[str], folder: Path) -> Iterator[Gateway]:
    """Redis, the sidecar, the engine, the gateway; ready to be asked."""
    with redis_server() as server, SIDECARS[kind](server, model, folder):
        settings = {"SMG_VLLM_MM_REDIS_URL": server.url}
        # the published sidecar's first job takes long on a busy machine
        settings |= {"SMG_VLLM_MM_SIDECAR_TIMEOUT_MS": "120000"}
        with vllm_engine(model, folder / "engine.log", processor="redis", settings=settings) as port:
            flags = ["--worker-urls", f"grpc://127.0.0.1:{port}", "--mm-processing", "worker", *quiet]
            started = Gateway(command, flags, log=folder / "gateway.log")
            try:
                ready = {"model": "tiny-qwen3vl", "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
                started.wait_until("/v1/chat/completions", ready, wait_s=120)
                yield started
            finally:
                started.stop()


def checks(kind: str) -> dict[str, Check]:
    found: dict[str, Check] = {case: functools.partial(_case, case) for case in CASES}
    found["the worker processed the media"] = _by_worker
    # the published sidecar calls every failed fetch the client's fault
    found["a media host that is down"] = functools.partial(_host_down, status=400 if kind == "published" else 503)
    return found


def _case(case: str, gateway: Gateway) -> None:
    compare_answer(case, ask(gateway, body(case, next(_UNIQUE))))


def _by_worker(gateway: Gateway) -> None:
    _, text = request(gateway.host, gateway.metrics_port, "/metrics")
    if b"smg_mm_processing_total{" not in text or b'mode="worker"' not in text or b'mode="router"' in text:
        raise Differs("not every request with media went to the worker as references")


def _host_down(gateway: Gateway, status: int) -> None:
    asked = body("image_shapes", next(_UNIQUE))
    parts = [part for message in asked["messages"] for part in message["content"] if isinstance(part, dict)]
    for part in parts:
        if "image_url" in part:
            part["image_url"] = {"url": _NOWHERE}
    came, text = request(gateway.host, gateway.port, "/v1/chat/completions", asked, timeout_s=120)
    if came != status:
        raise Differs(f"status {came}, expected {status}: {text[:300]!r}")
    if status == 503 and "fetch_unavailable" not in json.loads(text)["error"]["message"]:
        raise Differs(f"the cause is lost: {text[:300]!r}")
