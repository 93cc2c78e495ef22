"""Two vLLM engines as a pair: one prefills, NIXL carries its keys and values over loopback, the other one answers.

Answers are held against the recorded ones of a single engine.  That the decode worker had no pixels needs no check of
its own: the servicer refuses a leg without pixels that is handed nothing, and its log tells what came from outside.
"""

import concurrent.futures
import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.engines_real.answers import CASES, Differs, ask, body, compare_answer
from tests.engines_real.checks import UNIQUE, Bench
from tests.engines_real.reference_checks import PICTURES, forwarded
from tests.engines_real.tally import Tally
from tests.engines_real.vllm_cpu import Nixl, vllm_engine
from tools.launch import Gateway, free_port, request

HIT_RATE = re.compile(r"External prefix cache hit rate: ([\d.]+)%")
PairCheck = Callable[["Pair"], None]
FindNixl = Callable[[], Path]


class Pair:
    """A gateway and its two engines; `decode_log` is what the decode engine writes."""

    def __init__(self, gateway: Gateway, decode_log: Path) -> None:
        self.gateway = gateway
        self.decode_log = decode_log

    def hit_rate(self) -> float:
        """Share of the prompts' tokens whose keys and values came from outside, as last told."""
        found = HIT_RATE.findall(self.decode_log.read_text(errors="replace"))
        return float(found[-1]) if found else 0.0


@contextlib.contextmanager
def engines(model: Path, package: Path, folder: Path, servicer: str) -> Iterator[tuple[int, int]]:
    """Prefill and decode engine, both with a media processor; gives their ports.  `package`: the folder of NIXL's."""
    path = folder / "nixl"
    path.mkdir(parents=True, exist_ok=True)
    for name, target in (("nixl", "nixl_cu13"), ("nixl_cu13", "nixl_cu13"), ("nixl_cu13.libs", "nixl_cu13.libs")):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(package / target)  # vLLM imports it by the name without CUDA
    with contextlib.ExitStack() as stack:

        def start(role: str) -> int:
            nixl = Nixl(f"kv_{role}", free_port(), path)
            how = {"processor": "inprocess", "servicer": servicer}
            return stack.enter_context(vllm_engine(model, folder / f"{role}.log", nixl=nixl, **how))

        with concurrent.futures.ThreadPoolExecutor(2) as side_by_side:
            prefill, decode = side_by_side.map(start, ("producer", "consumer"))
        yield prefill, decode


@contextlib.contextmanager
def pair(command: list[str], quiet: list[str], ports: tuple[int, int], processing: str, folder: Path) -> Iterator[Pair]:
    flags = ["--pd-disaggregation", "--mm-processing", processing]
    flags += ["--prefill", f"grpc://127.0.0.1:{ports[0]}", "--decode", f"grpc://127.0.0.1:{ports[1]}"]
    started = Gateway(command, [*quiet, *flags], log=folder / f"pair-{processing}.log")
    try:
        ready = {"model": "tiny-qwen3vl", "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
        started.wait_until("/v1/chat/completions", ready, wait_s=120)
        yield Pair(started, folder / "consumer.log")
    finally:
        started.stop()


def _case(case: str, found: Pair) -> None:
    compare_answer(case, ask(found.gateway, body(case, next(UNIQUE))))


def streamed(found: Pair) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    compare_answer("image_shapes", ask(found.gateway, body("image_shapes", next(UNIQUE)) | options))


def by_nixl(found: Pair) -> None:
    """Every prefill leg handed over, by the gateway's count."""
    _, text = request(found.gateway.host, found.gateway.metrics_port, "/metrics")
    told = dict(re.findall(r"^(smg_pd_kv_\w+_total\S*) (\S+)$", text.decode(), re.MULTILINE))
    if float(told.get("smg_pd_kv_transfer_failures_total", 0)):
        raise Differs(f"prefill legs that handed nothing over: {told}")
    if float(told.get('smg_pd_kv_connector_mode_total{mode="nixl"}', 0)) < len(CASES):
        raise Differs(f"hand-overs that were counted: {told}")


def all_is_handed_over(found: Pair) -> None:
    """By the decode engine's word, which it gives every ten seconds."""
    deadline = time.monotonic() + 30
    while found.hit_rate() < 100:
        if time.monotonic() > deadline:
            raise Differs(f"of the prompts' tokens {found.hit_rate():g} % came from the prefill engine")
        time.sleep(0.5)


def _by_reference(case: str, found: Pair) -> None:
    before = forwarded(found.gateway)
    _case(case, found)
    if forwarded(found.gateway) != before + 1:
        raise Differs("processed by the gateway")


TENSOR_CHECKS: dict[str, PairCheck] = {
    **{case: functools.partial(_case, case) for case in CASES},
    "streamed": streamed,
    "handed over by NIXL": by_nixl,
}
REFERENCE_CHECKS: dict[str, PairCheck] = {case: functools.partial(_by_reference, case) for case in PICTURES}


def with_pairs(tally: Tally, bench: Bench, model: Path, servicer: str, nixl: FindNixl) -> None:
    """Two engines, asked by tensors and by reference."""
    word = {"all is handed over": all_is_handed_over} if servicer == "python" else {}  # that in Rust does not tell
    ways = {"router": TENSOR_CHECKS | word, "auto": REFERENCE_CHECKS}
    group = f"vllm {servicer} pair"
    wanted = {processing: tally.chosen(f"{group} {processing}", checks) for processing, checks in ways.items()}
    if not any(wanted.values()):
        return
    folder = bench.folder / f"pair-{servicer}"
    with tally.group(group), engines(model, nixl(), folder, servicer) as ports:
        for processing, checks in wanted.items():
            with pair(bench.command, bench.quiet, ports, processing, folder) as found:
                for name, check in checks.items():
                    tally.run(name, functools.partial(check, found))
