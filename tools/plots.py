"""Pictures of what was measured: SVG files from the JSON files of tools/loadtest.py and tools/compare_peer.py.

    python tools/plots.py load.json peer.json --out docs/plots
    python tools/plots.py ours.json --against smg=other.json --out docs/plots      the same test of a second server

Each load file gives `<name>-concurrency.svg` (throughput and p99 by concurrency or rate), `<name>-stages.svg` (where
the time went) and `<name>-memory.svg` (memory over time); each comparison `<name>-ratios.svg`.  The raw JSON is
copied beside them. Drawn by hand in tools/load/svg.py: a plotting library would bring stock pillow into .venv.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.load.svg import Chart, Series, bars, lines, stacked  # noqa: E402
from tools.usage import Usage, file_to_read  # noqa: E402

STAGES = ("admit", "fetch", "decode", "preprocess", "send", "engine")


def caption(data: dict[str, Any]) -> str:
    """The machine, in one line."""
    facts = data["about"]
    return f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, Python {facts['python']}"


def by_concurrency(runs: dict[str, dict[str, Any]]) -> str:
    """Throughput above, p99 below, over concurrency (or rate); one line for each server."""
    first = next(iter(runs.values()))
    name = "rate" if "rate" in first["points"][0] else "concurrency"
    label = "requests a second offered" if name == "rate" else "requests at once"
    mix = " + ".join(first["settings"]["mix"]) or "text"
    rates = [Series(run, [(p[name], p["rps"]) for p in data["points"]]) for run, data in runs.items()]
    late = [
        Series(run, [(p[name], p["total_ms"]["p99"]) for p in data["points"] if p["total_ms"]])
        for run, data in runs.items()
    ]
    charts = [
        Chart(f"Throughput, {mix}", label, "answers a second", rates),
        Chart(f"99th percentile of latency, {mix}", label, "milliseconds", late),
    ]
    return lines(charts, caption(first), every_x=True)


def by_stage(data: dict[str, Any]) -> str:
    """Mean time of each stage, stacked, one bar for each point."""
    name = "rate" if "rate" in data["points"][0] else "concurrency"
    points = [p for p in data["points"] if p["stage_ms"]]
    rows = [(f"{p[name]:g}", _parts(p["stage_ms"])) for p in points]
    label = "requests a second offered" if name == "rate" else "requests at once"
    return stacked("Mean time of a request by stage", label, "milliseconds", (*STAGES, "waiting"), rows, caption(data))


def _parts(stages: dict[str, float]) -> list[float]:
    """Milliseconds by stage, then what the total has beyond them."""
    known = [stages.get(stage, 0.0) for stage in STAGES]
    return [*known, max(0.0, stages.get("total", 0.0) - sum(known))]


def over_time(data: dict[str, Any]) -> str:
    """Memory of the gateway's processes during each point."""
    name = "rate" if "rate" in data["points"][0] else "concurrency"
    series = [
        Series(f"{name} {p[name]:g}", [(sample[0], sample[1] / 2**20) for sample in p["gateway"]["samples"]])
        for p in data["points"]
        if p.get("gateway", {}).get("samples")
    ]
    chart = Chart("Memory of all processes and segments", "seconds", "MiB", series)
    return lines([chart], caption(data))


def by_scenario(data: dict[str, Any]) -> str:
    """CPU per request, ours / peer: the median as a bar, the spread as a line, the targets as marks."""
    rows = []
    for scenario in data["scenarios"]:
        values = sorted(pair["ratio"]["cpu"] for pair in scenario["pairs"] if pair["ratio"]["cpu"] is not None)
        if not values:
            continue
        targets = {target["figure"]: target for target in scenario["targets"]}.get("cpu", {})
        marks = [targets[word] for word in ("must", "ambitious") if word in targets]
        rows.append((scenario["name"], values[len(values) // 2], values[0], values[-1], marks))
    title = f"CPU a request, ours / {data['peer']} (marks: must and ambitious)"
    return bars(title, "ratio, 1 = equal", rows, caption(data))


def draw(path: Path, against: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Every picture of one JSON file, by the ending of its name.  Raises ValueError for a file that is neither kind."""
    data = json.loads(path.read_text())
    if "scenarios" in data:
        return {"ratios": by_scenario(data)}
    if "points" not in data:
        raise ValueError(f"{path} has neither points nor scenarios")
    made = {"concurrency": by_concurrency({"mediagate": data, **against})}
    if any(point["stage_ms"] for point in data["points"]):
        made["stages"] = by_stage(data)
    if any(point.get("gateway", {}).get("samples") for point in data["points"]):
        made["memory"] = over_time(data)
    return made


def _named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {text!r}")
    return name, file_to_read(path)


def main(arguments: list[str] | None = None) -> int:
    parser = Usage(__doc__)
    parser.add_argument("files", type=file_to_read, nargs="+", metavar="JSON")
    parser.add_argument(
        "--against", type=_named, action="append", default=[], metavar="NAME=JSON", help="a second server's file"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/plots"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        against = {name: json.loads(path.read_text()) for name, path in options.against}
        for path in options.files:
            for ending, text in draw(path, against).items():
                target = options.out / f"{path.stem}-{ending}.svg"
                target.write_text(text)
                print(target)
            if path.resolve() != (options.out / path.name).resolve():
                shutil.copyfile(path, options.out / path.name)
    except (OSError, ValueError, KeyError) as error:
        print(f"plots: no result of loadtest.py or compare_peer.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
