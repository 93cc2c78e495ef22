"""This gateway against the peer it replaces (smg from PyPI), side by side on this machine.

    python tools/compare_peer.py                         every scenario, three pairs each (about half an hour)
    python tools/compare_peer.py --quick --scenario jpeg1080-shm --scenario text
    python tools/compare_peer.py --json peer.json --check        exit 1 when a "must" is missed

Both stand in front of the same engine stand-in, in alternation (A B B A ...), at least three pairs of at least 50
requests (clips: 16) after 5 uncounted ones, ten pictures or two clips in rotation.  CPU is that of the process tree,
reaped children included; memory the sum of PSS.  Ratios are ours / peer, of each pair.  Before that, both send every
picture once and the tensors are compared by SHA-256.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.environments import EnvironmentFailed, environment  # noqa: E402
from tools.launch import Gateway, LaunchError, known_flags  # noqa: E402
from tools.load.figures import about  # noqa: E402
from tools.load.rounds import RoundFailed, bodies, gateway, measure, sent_tensors, stand_in  # noqa: E402
from tools.load.scenarios import GROWTHS, QUIET, SCENARIOS, Growth, Scenario  # noqa: E402
from tools.usage import Usage, command, count, file_to_write  # noqa: E402

PEER = "smg==1.13.0"
FIGURES = ("cpu", "user", "system", "faults", "rps", "p50", "p99", "memory", "pss", "segments")
SEGMENT_PREFIXES = ("smg-tokenspeed-", "mediagate-")


@dataclasses.dataclass(frozen=True)
class Sides:
    """Both commands with the quiet flags each of them knows."""

    ours: list[str]
    peer: list[str]
    quiet: dict[str, list[str]]
    folder: Path

    def flags(self, side: str, scenario: Scenario) -> list[str]:
        return [*self.quiet[side], *scenario.flags]

    def command(self, side: str) -> list[str]:
        return self.ours if side == "ours" else self.peer


def reading(point: dict[str, Any]) -> dict[str, float]:
    """The figures that are compared, of one round."""
    own = point["gateway"]
    return {
        "cpu": own["cpu_ms_per_request"],
        "user": own["user_ms_per_request"],
        "system": own["system_ms_per_request"],
        "faults": float(own["minor_faults_per_request"]),
        "rps": point["rps"],
        "p50": point["total_ms"]["p50"],
        "p99": point["total_ms"]["p99"],
        "memory": own["memory_max_mib"],
        "pss": own["pss_max_mib"],
        "segments": own["segments_max_mib"],
    }


def ratio(ours: float, peer: float) -> float | None:
    return round(ours / peer, 4) if peer else None


def compare(sides: Sides, scenario: Scenario, *, pairs: int, requests: int) -> dict[str, Any]:
    """All rounds of one scenario.  Raises RoundFailed and LaunchError."""
    journal, log = sides.folder / f"{scenario.name}.jsonl", sides.folder / "engine.log"
    with contextlib.ExitStack() as held:
        port = held.enter_context(stand_in(scenario, journal, log))
        started: dict[str, Gateway] = {}
        for side in ("ours", "peer"):
            flags, at = sides.flags(side, scenario), sides.folder / f"{scenario.name}-{side}.log"
            started[side] = held.enter_context(gateway(sides.command(side), flags, port, at))
        seen = {side: sent_tensors(one, scenario, journal) for side, one in started.items()}
        rows = []
        sent = bodies(scenario)
        for number in range(pairs):
            order = ("ours", "peer") if number % 2 == 0 else ("peer", "ours")
            points = {side: measure(started[side], scenario, sent, requests) for side in order}
            figures = {side: reading(point) for side, point in points.items()}
            ratios = {name: ratio(figures["ours"][name], figures["peer"][name]) for name in FIGURES}
            rows.append({"order": list(order), **figures, "ratio": ratios})
    return {
        "name": scenario.name,
        "mix": scenario.mix or "text",
        "flags": list(scenario.flags),
        "labels": list(scenario.labels),
        "concurrency": scenario.concurrency,
        "requests": requests,
        "tensors_equal": seen["ours"] == seen["peer"],
        "pictures_compared": len(seen["ours"]),
        "pairs": rows,
        "targets": [dict(zip(("figure", "must", "ambitious"), target, strict=True)) for target in scenario.targets],
    }


def grow(sides: Sides, growth: Growth, *, share: float) -> dict[str, Any]:
    """Our own figure in the two situations, and segments left behind."""
    values, leftovers = [], 0
    for scenario in (growth.first, growth.second):
        before = _segments()
        journal, log = sides.folder / f"{growth.name}.jsonl", sides.folder / "engine.log"
        at = sides.folder / f"{growth.name}.log"
        with (
            stand_in(scenario, journal, log) as port,
            gateway(sides.ours, sides.flags("ours", scenario), port, at) as started,
        ):
            point = measure(started, scenario, bodies(scenario), max(2, round(scenario.requests * share)))
        leftovers += len(_segments() - before)
        values.append(reading(point)[growth.figure])
    grown = ratio(values[1] / growth.per_item, values[0])
    return {
        "name": growth.name,
        "figure": growth.figure,
        "first": values[0],
        "second": values[1],
        "ratio": grown,
        "must": growth.must,
        "segments_left": leftovers,
    }


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(SEGMENT_PREFIXES)}


def spread(result: dict[str, Any], figure: str) -> tuple[float, float, float] | None:
    """Median, least and largest ratio over the pairs."""
    values = [pair["ratio"][figure] for pair in result["pairs"] if pair["ratio"][figure] is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


def verdict(figure: str, value: float, must: float, ambitious: float) -> str:
    reached = (lambda bound: value >= bound) if figure == "rps" else (lambda bound: value <= bound)
    return "ambitious" if reached(ambitious) else "must" if reached(must) else "MISSED"


def table(results: Sequence[dict[str, Any]], growths: Sequence[dict[str, Any]]) -> str:
    """Ratios ours / peer as a person reads them."""
    head = f"{'scenario':<22}{'figure':<8}{'ours':>10}{'peer':>10}{'ratio':>8}  {'spread':<14}{'must':>6}{'amb.':>6}  "
    lines = [head + "verdict"]
    for result in results:
        targets = {target["figure"]: target for target in result["targets"]}
        for figure in dict.fromkeys(["cpu", *targets, "faults"]):
            found = spread(result, figure)
            if found is None:
                continue
            middle = {
                side: statistics.median(pair[side][figure] for pair in result["pairs"]) for side in ("ours", "peer")
            }
            row = f"{result['name']:<22}{figure:<8}{middle['ours']:>10.2f}{middle['peer']:>10.2f}{found[0]:>8.3f}"
            row += f"  {f'{found[1]:.3f}..{found[2]:.3f}':<14}"
            target = targets.get(figure)
            if target:
                said = verdict(figure, found[0], target["must"], target["ambitious"])
                row += f"{target['must']:>6.2f}{target['ambitious']:>6.2f}  {said}"
            lines.append(row.rstrip())
        if not result["tensors_equal"]:
            lines.append(f"{result['name']:<22}TENSORS DIFFER")
    for growth in growths:
        said = "must" if growth["ratio"] is not None and growth["ratio"] <= growth["must"] else "MISSED"
        left = f", {growth['segments_left']} segments left" if growth["segments_left"] else ""
        lines.append(
            f"{growth['name']:<22}{growth['figure']:<8}{growth['second']:>10.2f}{growth['first']:>10.2f}"
            f"{growth['ratio'] or 0:>8.3f}  {'own growth':<14}{growth['must']:>6.2f}        {said}{left}"
        )
    return "\n".join(lines)


def missed(results: Sequence[dict[str, Any]], growths: Sequence[dict[str, Any]]) -> list[str]:
    """Every "must" that does not hold."""
    found = [
        f"{result['name']} {target['figure']}"
        for result in results
        for target in result["targets"]
        if (values := spread(result, target["figure"])) is None
        or verdict(target["figure"], values[0], target["must"], target["ambitious"]) == "MISSED"
    ]
    return found + [
        growth["name"]
        for growth in growths
        if growth["ratio"] is None or growth["ratio"] > growth["must"] or growth["segments_left"]
    ]


def parser() -> argparse.ArgumentParser:
    made = Usage(__doc__)
    names = [scenario.name for scenario in SCENARIOS] + [growth.name for growth in GROWTHS]
    made.add_argument("--scenario", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    made.add_argument("--pairs", type=count, default=3)
    made.add_argument("--requests", type=count, help="of each round; default: the scenario's")
    made.add_argument(
        "--quick", action="store_true", help="one pair and a fifth of the requests: a look, no measurement"
    )
    made.add_argument("--no-growth", action="store_true", help="leave our own growth figures out")
    made.add_argument(
        "--ours", type=command, default=f"{sys.executable} gateway.py", help="command of the gateway under test"
    )
    made.add_argument(
        "--peer", type=command, help=f"command of the other one; default: {PEER} in an environment of its own"
    )
    made.add_argument("--json", type=file_to_write, help="write everything to this file (for tools/plots.py)")
    made.add_argument("--check", action="store_true", help='exit 1 when a "must" is missed')
    made.add_argument("--logs", type=Path, help="keep the logs in this directory")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mediagate-peer-") as made:
        folder = options.logs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return _main(options, folder)
        except (EnvironmentFailed, LaunchError, RoundFailed, OSError) as error:
            print(f"compare_peer: {error}", file=sys.stderr)
            return 1


def _main(options: argparse.Namespace, folder: Path) -> int:
    peer = options.peer or [str(environment("smg-1.13.0", [PEER]) / "smg"), "launch"]
    quiet = {"ours": known_flags(options.ours, QUIET), "peer": known_flags(peer, QUIET)}
    sides = Sides(options.ours, peer, quiet, folder)
    pairs, share = (1, 0.2) if options.quick else (options.pairs, 1.0)
    results, growths = [], []
    for scenario in SCENARIOS:
        if options.scenario and scenario.name not in options.scenario:
            continue
        if scenario.lacks:
            print(f"{scenario.name} is left out: {scenario.lacks}", file=sys.stderr)
            continue
        print(f"{scenario.name} ...", file=sys.stderr, flush=True)
        requests = options.requests or max(2, round(scenario.requests * share))
        results.append(compare(sides, scenario, pairs=pairs, requests=requests))
        _write(options.json, results, growths)
    for growth in GROWTHS:
        if options.no_growth or (options.scenario and growth.name not in options.scenario):
            continue
        print(f"{growth.name} ...", file=sys.stderr, flush=True)
        growths.append(grow(sides, growth, share=share))
        _write(options.json, results, growths)
    print(table(results, growths))
    unequal = [result["name"] for result in results if not result["tensors_equal"]]
    for name in unequal:
        print(f"compare_peer: {name}: the gateways sent different tensors", file=sys.stderr)
    late = missed(results, growths) if options.check else []
    for name in late:
        print(f"compare_peer: {name} misses its target", file=sys.stderr)
    return 1 if unequal or late else 0


def _write(path: Path | None, results: list[dict[str, Any]], growths: list[dict[str, Any]]) -> None:
    """After every scenario, so that an interrupted run has kept what it measured."""
    if path is not None:
        path.write_text(
            json.dumps({"about": about(), "peer": PEER, "scenarios": results, "growths": growths}, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
