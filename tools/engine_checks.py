"""Checks against real engines and the real peer, each in an environment of its own (`tools/test --engines`).

    python tools/engine_checks.py                    torch worker by every form and transport and by the official
                                                     SDKs, MLX, RDMA over NIXL, the peer's tensors
    python tools/engine_checks.py --engine vllm      the same with vLLM itself on CPU, pictures by reference, and two
                                                     engines as a pair over NIXL (tools/e2e_vllm)
    python tools/engine_checks.py --only float,shm   those whose names hold both words
    python tools/engine_checks.py --record clip      what the peer has the torch worker answer, for expected.json

Answers are compared with recorded log-probabilities of vLLM (within 1e-4), what arrived with the reference
processor's pixels (exactly), and both gateways' tensors with each other (by SHA-256).  Environments are made on first
use and cached outside the tree (about 1.8 GB; vLLM another 2.5 GB).  The last line is `N passed, N failed`; exit code
1 when anything failed.
"""

import argparse
import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.engines_real import pair_checks  # noqa: E402
from tests.engines_real.answers import ASKED, Differs, as_expected, ask, body, compare_answer  # noqa: E402
from tests.engines_real.checkpoint import checkpoint, text_checkpoint  # noqa: E402
from tests.engines_real.checks import CHECKS, Bench, run  # noqa: E402
from tests.engines_real.mlx_cpu import mlx_engine  # noqa: E402
from tests.engines_real.rdma_checks import RDMA_CHECKS, lane  # noqa: E402
from tests.engines_real.redis_mode import SIDECARS, served  # noqa: E402
from tests.engines_real.redis_mode import checks as redis_checks  # noqa: E402
from tests.engines_real.reference_checks import REFERENCE_CHECKS  # noqa: E402
from tests.engines_real.sdk_checks import SDK_CHECKS  # noqa: E402
from tests.engines_real.vllm_cpu import vllm_engine  # noqa: E402
from tools.compare_peer import PEER  # noqa: E402
from tools.environments import EnvironmentFailed, cache_folder, environment  # noqa: E402
from tools.launch import ROOT, Gateway, LaunchError, known_flags, listening, request  # noqa: E402
from tools.load.rounds import RoundFailed, gateway, sent_tensors, stand_in  # noqa: E402
from tools.load.scenarios import QUIET, SCENARIOS, Scenario  # noqa: E402
from tools.usage import Usage, command  # noqa: E402

TORCH_WORKER = ("torch==2.13.0", "transformers==5.19.0", "smg-grpc-servicer==0.14.1", "llguidance==1.9.1")
NIXL = ("--no-deps", "nixl-cu13==1.5.1")  # it asks for torch and needs NumPy alone
COMPARED_PICTURES = 3


class Tally:
    """Counts; `only`: words a check's name must hold to be run."""

    def __init__(self, only: list[str]) -> None:
        self.only, self.passed, self.failed = only, 0, 0

    def wants(self, name: str) -> bool:
        return all(word in name for word in self.only)

    def run(self, name: str, check: Callable[[], None]) -> None:
        if not self.wants(name):
            return
        if run(name, check):
            self.passed += 1
        else:
            self.failed += 1


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


def with_engine(tally: Tally, bench: Bench, label: str) -> None:
    """Every case by raw and float pixels, inline and by segments; then a worker whose bundle has to be fetched."""
    for pixels in ("raw", "float"):
        wanted = {
            transport: [check for check in CHECKS if tally.wants(f"{label} {pixels} {transport}: {check}")]
            for transport in ("inline", "shm")
        }
        if not any(wanted.values()):
            continue
        with bench.start_engine(float_pixels=pixels == "float") as port:
            for transport, names in wanted.items():
                if not names:
                    continue
                with bench.gateway(port, transport) as started:
                    for check in names:
                        function = functools.partial(CHECKS[check], bench, started, transport)
                        tally.run(f"{label} {pixels} {transport}: {check}", function)


def with_references(tally: Tally, bench: Bench, label: str) -> None:
    """Pictures that the worker fetches and processes itself, by the servicer in Python and by the one in Rust, each on
    an engine of its own.
    """
    for servicer in ("python", "rust"):
        title = f"{label} references {servicer}"
        wanted = {name: check for name, check in REFERENCE_CHECKS.items() if tally.wants(f"{title}: {name}")}
        if not wanted:
            continue
        starting = bench.start_engine(processor="inprocess", servicer=servicer)
        with starting as port, bench.gateway(port, "inline") as started:
            for name, check in wanted.items():
                tally.run(f"{title}: {name}", functools.partial(check, bench, started, "inline"))


def with_pairs(tally: Tally, bench: Bench, model: Path) -> None:
    """Two engines, tensors and references."""
    ways = {"router": pair_checks.TENSOR_CHECKS, "auto": pair_checks.REFERENCE_CHECKS}
    titles = {processing: f"vllm pair {processing}" for processing in ways}
    wanted = {
        processing: {name: check for name, check in checks.items() if tally.wants(f"{titles[processing]}: {name}")}
        for processing, checks in ways.items()
    }
    if not any(wanted.values()):
        return
    (package,) = environment("nixl", NIXL).parent.glob("lib/python3*/site-packages")
    with pair_checks.engines(model, package, bench.folder) as ports:
        for processing, checks in wanted.items():
            with pair_checks.pair(bench.command, bench.quiet, ports, processing, bench.folder) as found:
                for name, check in checks.items():
                    tally.run(f"{titles[processing]}: {name}", functools.partial(check, found))


def with_sdks(tally: Tally, bench: Bench, label: str) -> None:
    """What clients really use, on one form and transport."""
    wanted = {name: check for name, check in SDK_CHECKS.items() if tally.wants(f"{label}: {name}")}
    if not wanted:
        return
    with bench.start_engine(float_pixels=False) as port, bench.gateway(port, "inline") as started:
        for name, check in wanted.items():
            tally.run(f"{label}: {name}", functools.partial(check, bench, started, "inline"))


def with_redis(tally: Tally, command: list[str], quiet: list[str], model: Path, folder: Path) -> None:
    """Media by reference, processed by a sidecar; a fresh engine for each kind of sidecar."""
    for kind in SIDECARS:
        wanted = {
            name: check for name, check in redis_checks(kind).items() if tally.wants(f"vllm redis {kind}: {name}")
        }
        if not wanted:
            continue
        with served(kind, model, command, quiet, folder) as started:
            for name, check in wanted.items():
                tally.run(f"vllm redis {kind}: {name}", functools.partial(check, started))


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
    (package,) = environment("nixl", NIXL).parent.glob("lib/python3*/site-packages")
    python = environment("torch-worker", TORCH_WORKER) / "python"
    with lane(command, quiet, package, python, folder) as bench:
        for name, check in RDMA_CHECKS.items():
            tally.run(f"rdma: {name}", functools.partial(check, bench))


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
        try:
            _main(options, tally, folder)
        except (EnvironmentFailed, LaunchError, OSError, ValueError) as error:
            print(f"FAIL  {options.engine}: {error}")
            tally.failed += 1
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or not tally.passed else 0


def _main(options: argparse.Namespace, tally: Tally, folder: Path) -> None:
    command = options.gateway
    model = checkpoint(cache_folder() / "checkpoints")
    quiet = known_flags(command, QUIET)
    log = folder / "engine.log"
    if options.engine == "vllm":
        bench = Bench(command, quiet, lambda **how: vllm_engine(model, log, **how), None, folder)
        with_engine(tally, bench, "vllm")
        with_references(tally, bench, "vllm")
        with_sdks(tally, bench, "vllm")
        with_redis(tally, command, quiet, model, folder)
        with_pairs(tally, bench, model)
        return
    journal = folder / "torch.jsonl"
    if options.record:
        _record(
            options.record, Bench(_peer(), [], lambda **how: torch_engine(model, journal, log, **how), journal, folder)
        )
        tally.passed += 1
        return
    bench = Bench(command, quiet, lambda **how: torch_engine(model, journal, log, **how), journal, folder)
    with_engine(tally, bench, "torch")
    with_sdks(tally, bench, "torch")
    fetched_bundle(tally, bench)
    with_mlx(tally, bench)
    with_rdma(tally, command, quiet, folder)
    with_peer(tally, command, folder)


if __name__ == "__main__":
    sys.exit(main())
