"""The RDMA lane with NIXL itself, over TCP on loopback, and the published servicer's puller at the other end.

Two TokenSpeed stand-ins behind one gateway: `pulled` reads its tensors over RDMA, `inline` gets them in the message.
What arrived must be the same bytes.  The lane has few slots, so that they are used again and run out.
"""

import concurrent.futures
import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.engines_real.answers import Differs, picture_part
from tools.launch import ROOT, Gateway, free_port, listening, request

CHAT = "/v1/chat/completions"
SLOTS, SLOT_BYTES = 3, 4 << 20
BUNDLE = ROOT / "tools" / "demo" / "bundle"
OVER_TCP = {"UCX_TLS": "tcp,self", "SMG_RDMA_SLOT_BYTES": str(SLOT_BYTES)}
_SEEDS = itertools.count()


class Lane:
    """A gateway with an open lane and its two workers."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self.gateway = gateway
        self._folder = folder

    def ask(self, model: str, file: bytes) -> None:
        content = [picture_part(file), {"type": "text", "text": "?"}]
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        status, text = request(self.gateway.host, self.gateway.port, CHAT, body, timeout_s=60)
        if status != 200:
            raise Differs(f"{model}: status {status}: {text[:200]!r}")

    def seen(self, model: str) -> list[dict[str, Any]]:
        """Requests with media; nothing is aborted here."""
        lines = (self._folder / f"{model}.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "mm_inputs" in line["message"]]

    def items(self, model: str) -> list[dict[str, Any]]:
        return [item for line in self.seen(model) for item in line["message"]["mm_inputs"]["items"]]

    def sent_by(self, path: str) -> float:
        _, text = request(self.gateway.host, self.gateway.metrics_port, "/metrics")
        start = f'smg_mm_tensors_total{{path="{path}",runtime="tokenspeed"}}'
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.decode().splitlines() if line.startswith(start))


@contextlib.contextmanager
def lane(command: list[str], quiet: list[str], nixl: Path, torch_python: Path, folder: Path) -> Iterator[Lane]:
    """`nixl`: the folder that has the package; `torch_python`: of an environment with torch and the servicer."""
    path = {"PYTHONPATH": str(nixl), **OVER_TCP}
    puller = f"{torch_python} {ROOT / 'tests/engines_real/rdma_puller.py'}"
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "rdma-workers.log").open("wb"))
        pulled = stack.enter_context(_worker("pulled", folder, log, ["--puller", puller], path))
        inline = stack.enter_context(_worker("inline", folder, log, [], {}))
        lane_flags = ["--multimodal-tensor-transport", "rdma", "--rdma-listen-ip", "127.0.0.1"]
        environment = {**path, "SMG_RDMA_LISTEN_PORT": str(free_port()), "SMG_RDMA_POOL_SLOTS": str(SLOTS)}
        flags = [*quiet, *lane_flags, "--worker-urls", f"grpc://127.0.0.1:{pulled}"]
        started = Gateway(command, flags, log=folder / "rdma-gateway.log", environment=environment)
        stack.callback(started.stop)
        ready = {"max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
        started.wait_until(CHAT, {**ready, "model": "pulled"})
        spec = {"url": f"grpc://127.0.0.1:{inline}", "multimodal_tensor_transport": "inline"}
        request(started.host, started.port, "/workers", spec)
        started.wait_until(CHAT, {**ready, "model": "inline"})
        yield Lane(started, folder)


def _worker(
    model: str, folder: Path, log: Any, more: Sequence[str], environment: dict[str, str]
) -> contextlib.AbstractContextManager[int]:
    script, journal = ROOT / "tests" / "e2e" / "other_engine.py", folder / f"{model}.jsonl"
    command = [sys.executable, str(script), "--runtime", "tokenspeed", "--model", model, "--bundle", str(BUNDLE)]
    switched = {"SMG_MM_PIXEL_RDMA": "1", "SMG_RDMA_LANDING_SLOTS": "4", **environment}
    return listening([*command, "--journal", str(journal), *more], environment=switched, log=log, wait_s=120)


def pictures(count: int, height: int = 256, width: int = 384) -> list[bytes]:
    files = []
    for _ in range(count):
        pixels = np.random.default_rng(next(_SEEDS)).integers(0, 256, (height, width, 3), dtype=np.uint8)
        held = io.BytesIO()
        Image.fromarray(pixels).save(held, "PNG")
        files.append(held.getvalue())
    return files


def _by_hash(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {json.dumps(item["content_hash"]): item for item in items}


def one_picture(bench: Lane) -> None:
    (file,) = pictures(1)
    before = bench.sent_by("remote")
    bench.ask("pulled", file)
    bench.ask("inline", file)
    if bench.seen("pulled")[-1]["pulled"] != 1 or bench.sent_by("remote") != before + 1:
        raise Differs(f"it was not pulled: {bench.seen('pulled')[-1]}")
    if (got := bench.items("pulled")[-1]) != (wanted := bench.items("inline")[-1]):
        raise Differs(f"pulled {got}, inline {wanted}")


def many_at_once(bench: Lane) -> None:
    """More than there are slots: what finds none goes another way, and nobody gets another's pixels."""
    files = pictures(24)
    for model in ("pulled", "inline"):
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            list(clients.map(lambda file, model=model: bench.ask(model, file), files))
    pulled, inline = _by_hash(bench.items("pulled")[-24:]), _by_hash(bench.items("inline")[-24:])
    if pulled != inline:
        raise Differs(f"{sum(pulled.get(key) != item for key, item in inline.items())} of 24 differ")
    lines = bench.seen("pulled")[-24:]
    if not any(line["pulled"] for line in lines):
        raise Differs("nothing was pulled")


def slots_come_back(bench: Lane) -> None:
    before = bench.sent_by("remote")
    for file in pictures(4 * SLOTS):
        bench.ask("pulled", file)
    if bench.sent_by("remote") != before + 4 * SLOTS:
        raise Differs(f"{bench.sent_by('remote') - before:.0f} of {4 * SLOTS} went by slots, one after the other")


def a_stale_descriptor(bench: Lane) -> None:
    """The first descriptor of all, read again and again: after its slot was used again the worker refuses what it
    reads.
    """
    told = [line["stale"] for line in bench.seen("pulled") if line.get("stale")]
    if not told or any("generation mismatch" not in words for words in told[SLOTS:]):
        raise Differs(f"what became of it: {told[-3:]}")


def too_large_for_a_slot(bench: Lane) -> None:
    before = {path: bench.sent_by(path) for path in ("remote", "shm")}
    (file,) = pictures(1, 1200, 1600)
    bench.ask("pulled", file)
    bench.ask("inline", file)
    if bench.sent_by("remote") != before["remote"] or bench.sent_by("shm") != before["shm"] + 1:
        raise Differs("a tensor larger than a slot did not go by shared memory")
    if bench.items("pulled")[-1] != bench.items("inline")[-1]:
        raise Differs("its bytes differ")


RDMA_CHECKS: dict[str, Callable[[Lane], None]] = {
    "one picture": one_picture,
    "more at once than slots": many_at_once,
    "slots come back": slots_come_back,
    "a stale descriptor": a_stale_descriptor,
    "too large for a slot": too_large_for_a_slot,
}
