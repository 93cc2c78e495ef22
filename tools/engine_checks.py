"""Checks against real engines and the real peer, each in an environment of its own (`tools/test --engines`).

    python tools/engine_checks.py                    torch worker by every form and transport and by the official
                                                     SDKs, MLX, RDMA over NIXL, the peer's tensors
    python tools/engine_checks.py --engine vllm      vLLM itself on CPU behind its servicer in Python and in Rust, by
                                                     every form and transport, by reference in every mode, and two
                                                     engines as a pair over NIXL (tools/e2e_vllm)
    python tools/engine_checks.py --only float,shm   those whose names hold both words
    python tools/engine_checks.py --record clip      what the peer has the torch worker answer, for expected.json

Answers are compared with recorded log-probabilities of vLLM (within 1e-4), what arrived with the reference
processor's pixels (exactly), and both gateways' tensors with each other (by SHA-256).  Environments are made on first
use and cached outside the tree (about 1.8 GB; vLLM another 2.5 GB).  At the end stands a line for
each group of checks that shared an engine, then `N passed, N failed`; exit code 1 when anything failed.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from tests.engines_real.answers import ASKED, Differs, as_expected, ask, body, compare_answer
    from tests.engines_real.checkpoint import checkpoint, text_checkpoint
    from tests.engines_real.checks import CHECKS, Bench, by_tensors, on_engine
    from tests.engines_real.mlx_cpu import mlx_engine
    from tests.engines_real.rdma_checks import RDMA_CHECKS, lane
    from tests.engines_real.sdk_checks import SDK_CHECKS
    from tests.engines_real.tally import Tally
    from tests.engines_real.vllm_checks import with_vllm
    from tests.engines_real.vllm_cpu import vllm_engine
    from tools.compare_peer import PEER
    from tools.environments import cache_folder, environment
    from tools.launch import ROOT, Gateway, known_flags, listening, request
    from tools.load.rounds import RoundFailed, gateway, sent_tensors, stand_in
    from tools.load.scenarios import QUIET, SCENARIOS, Scenario
    from tools.usage import Usage, command
except ModuleNotFoundError as _error:
    sys.exit(f"engine_checks.py: {_error}: tools/setup tests installs what this needs")


TORCH_WORKER = ("torch==2.13.0", "transformers==5.19.0", "smg-grpc-servicer==0.14.1", "llguidance==1.9.1")
NIXL = ("--no-deps", "nixl-cu13==1.5.1")  # it asks for torch and needs NumPy alone
COMPARED_PICTURES = 3


@contextlib.contextmanager
def torch_engine(
    model: Path, journal: Path, log: Path, *, float_pixels: bool = False, hide_bundle: bool = False
) -> Iterator[int]:
    """The torch worker; gives its port."""
    python = environment("torch-worker", TORCH_WORKER) / "python"
    script = str(ROOT / "tests" / "engines_real" / "torch_worker.py")
    command = [str(python), script, "--model", str(model), "--journal", str(journal)]
    command += ["--float-pixels"] * float_pixels + ["--hide-bundle"] * hide_bundle
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("ab") as output, listening(command, environment=offline, log=output, wait_s=180) as port:
        yield port


def fetched_bundle(tally: Tally, bench: Bench) -> None:
    """The model's files come from the worker, by the published servicer's own archive."""
    name = "torch: tokenizer bundle fetched from the worker"
    if not tally.wants(name):
        return
    with bench.start_engine(hide_bundle=True) as port, bench.gateway(port, "inline") as started:
        tally.run(name, functools.partial(CHECKS["image_shapes"], bench, started, "inline"))


def with_mlx(tally: Tally, bench: Bench) -> None:
    """The text case by a whole answer and a streamed one, and what MLX does not take."""
    names = {"text_only": _mlx_text, "text_only streamed": _mlx_streamed, "refusals": _mlx_refuses}
    wanted = {f"mlx: {name}": check for name, check in names.items() if tally.wants(f"mlx: {name}")}
    if not wanted:
        return
    model = text_checkpoint(cache_folder() / "checkpoints")
    with mlx_engine(model, bench.folder / "mlx.log") as port, bench.gateway(port, "inline", str(model)) as started:
        for name, check in wanted.items():
            tally.run(name, functools.partial(check, started, str(model)))


def _mlx_text(started: Gateway, model: str) -> None:
    compare_answer("text_only", ask(started, body("text_only") | {"model": model}))


def _mlx_streamed(started: Gateway, model: str) -> None:
    options = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    compare_answer("text_only", ask(started, body("text_only") | options))


def _mlx_refuses(started: Gateway, model: str) -> None:
    for more, code in (({"n": 2}, "unsupported_parameter"), ({"stop": "x"}, "unsupported_parameter")):
        status, text = request(
            started.host, started.port, "/v1/chat/completions", body("text_only") | {"model": model} | more
        )
        if status != 400 or code.encode() not in text:
            raise Differs(f"{more}: status {status}: {text[:200]!r}")


def with_rdma(tally: Tally, command: list[str], quiet: list[str], folder: Path) -> None:
    """NIXL in the gateway, the published servicer's puller in a worker, over TCP on loopback."""
    if not any(tally.wants(f"rdma: {name}") for name in RDMA_CHECKS):
        return
    python = environment("torch-worker", TORCH_WORKER) / "python"
    with lane(command, quiet, _nixl(), python, folder) as bench:
        for name, check in RDMA_CHECKS.items():
            tally.run(f"rdma: {name}", functools.partial(check, bench))


def _nixl() -> Path:
    """The folder that has NIXL's package."""
    (package,) = environment("nixl", NIXL).parent.glob("lib/python3*/site-packages")
    return package


def with_peer(tally: Tally, command: list[str], folder: Path) -> None:
    """Both gateways send the same pictures; the tensors have to be equal."""
    sides = {"ours": command, "peer": _peer()}
    quiet = {side: known_flags(one, QUIET) for side, one in sides.items()}
    for scenario in SCENARIOS:
        name = f"peer: {scenario.name}"
        if scenario.concurrency == 1 and not scenario.lacks and tally.wants(name):
            tally.run(name, functools.partial(_same_tensors, sides, quiet, scenario, folder))


def _peer() -> list[str]:
    return [str(environment("smg-1.13.0", [PEER]) / "smg"), "launch"]


def _record(case: str, bench: Bench) -> None:
    """Print what the real gateway has the torch worker see and answer."""
    with bench.start_engine() as port, bench.gateway(port, "inline") as started:
        answer = ask(started, body(case))
        print(json.dumps({case: as_expected(answer, bench.records()[-1])}, indent=1))


def _same_tensors(sides: dict[str, list[str]], quiet: dict[str, list[str]], scenario: Scenario, folder: Path) -> None:
    journal, log = folder / f"{scenario.name}.jsonl", folder / "engine.log"
    seen = {}
    with stand_in(scenario, journal, log) as port:
        for side, command in sides.items():
            flags = [*quiet[side], *scenario.flags]
            with gateway(command, flags, port, folder / f"{side}.log") as started:
                try:
                    seen[side] = sent_tensors(started, scenario, journal, COMPARED_PICTURES)
                except RoundFailed as error:
                    raise Differs(f"{side}: {error}") from None
                if side == "peer" and not _peer_decodes_jpeg_exactly(started.host, started.metrics_port):
                    raise Differs(
                        "the peer did not find libturbojpeg (Debian: libturbojpeg0): its JPEG pixels are approximate"
                    )
    if seen["ours"] != seen["peer"]:
        raise Differs(f"ours {seen['ours'][0]['media']}, peer {seen['peer'][0]['media']}")


def _peer_decodes_jpeg_exactly(host: str, port: int) -> bool:
    status, text = request(host, port, "/metrics", timeout_s=10)
    return status != 200 or b"smg_mm_turbojpeg_available 0" not in text


def main(arguments: list[str] | None = None) -> int:
    parser = Usage(__doc__)
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="run checks whose names hold all of these, comma-separated"
    )
    parser.add_argument("--record", choices=ASKED, metavar="CASE", help=f"one of {', '.join(ASKED)}")
    parser.add_argument(
        "--gateway", type=command, default=f"{sys.executable} gateway.py", help="command of the gateway under test"
    )
    parser.add_argument("--logs", type=Path, help="keep logs and journals in this directory")
    options = parser.parse_args(arguments)
    tally = Tally([word for word in options.only.split(",") if word])
    with tempfile.TemporaryDirectory(prefix="mediagate-engines-") as made:
        folder = options.logs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        with tally.group(options.engine):
            _main(options, tally, folder)
    print(tally.table())
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or not tally.passed else 0


def _main(options: argparse.Namespace, tally: Tally, folder: Path) -> None:
    command = options.gateway
    model = checkpoint(cache_folder() / "checkpoints")
    quiet = known_flags(command, QUIET)
    log = folder / "engine.log"
    if options.engine == "vllm":
        bench = Bench(command, quiet, lambda **how: vllm_engine(model, log, **how), None, folder)
        with_vllm(tally, bench, model, _nixl)
        return
    journal = folder / "torch.jsonl"
    bench = Bench(command, quiet, lambda **how: torch_engine(model, journal, log, **how), journal, folder)
    if options.record:
        peers = dataclasses.replace(bench, command=_peer(), quiet=[])
        tally.run(f"record: {options.record}", functools.partial(_record, options.record, peers))
        return
    by_tensors(tally, bench, "torch")
    on_engine(tally, bench, "torch", SDK_CHECKS, "inline")
    fetched_bundle(tally, bench)
    with_mlx(tally, bench)
    with_rdma(tally, command, quiet, folder)
    with_peer(tally, command, folder)


if __name__ == "__main__":
    sys.exit(main())
