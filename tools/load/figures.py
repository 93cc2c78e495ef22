"""From outcomes to figures: counts by status, rates, percentiles, stage times; the table, and the conditions of
`--fail-if`.
"""

import dataclasses
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tools.load.client import Outcome
from tools.load.processes import Watch

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
_CONDITION = re.compile(r"\s*([\w.]+)\s*(>=|<=|>|<)\s*([\d.]+)\s*")


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99 and max of milliseconds; empty for no values."""
    if not values:
        return {}
    rows = {"mean": statistics.fmean(values)}
    rows |= {name: float(np.percentile(values, at)) for name, at in QUANTILES.items()}
    return {name: round(value, 2) for name, value in (rows | {"max": max(values)}).items()}


def figures(outcomes: Sequence[Outcome], elapsed_s: float, watch: Watch | None) -> dict[str, Any]:
    """One point of a load test.  Latencies are those of answers with status 200."""
    fine = [outcome for outcome in outcomes if outcome.status == 200]
    statuses = Counter("failed" if not outcome.status else str(outcome.status) for outcome in outcomes)
    stages: dict[str, list[float]] = {}
    for outcome in fine:
        for name, duration in outcome.stages.items():
            stages.setdefault(name, []).append(duration)
    point: dict[str, Any] = {
        "requests": len(outcomes),
        "ok": len(fine),
        "statuses": dict(sorted(statuses.items())),
        "duration_s": round(elapsed_s, 2),
        "rps": round(len(fine) / elapsed_s, 2) if elapsed_s else 0.0,
        "media_mb_s": round(sum(o.media_bytes for o in fine) / elapsed_s / 1e6, 1) if elapsed_s else 0.0,
        "total_ms": spread([o.total_s * 1000 for o in fine]),
        "ttft_ms": spread([o.first_s * 1000 for o in fine if o.first_s is not None]),
        "stage_ms": {name: round(statistics.fmean(values), 2) for name, values in stages.items()},
        "problems": [text for text, _ in Counter(o.problem for o in outcomes if o.problem).most_common(5)],
    }
    if watch is not None:
        point["gateway"] = {
            "cpu_cores": round(watch.used.cpu_s / elapsed_s, 2) if elapsed_s else 0.0,
            "cpu_ms_per_request": round(watch.used.cpu_s * 1000 / max(1, len(outcomes)), 3),
            "user_ms_per_request": round(watch.used.user_s * 1000 / max(1, len(outcomes)), 3),
            "system_ms_per_request": round(watch.used.system_s * 1000 / max(1, len(outcomes)), 3),
            "minor_faults_per_request": round(watch.used.minor_faults / max(1, len(outcomes))),
            "memory_max_mib": round(watch.peak() / 2**20, 1),
            "pss_max_mib": round(watch.peak("pss") / 2**20, 1),
            "segments_max_mib": round(watch.peak("segments") / 2**20, 1),
            "samples": [dataclasses.astuple(sample) for sample in watch.samples],
        }
    return point


def table(point: Mapping[str, Any]) -> str:
    """The point as a person reads it."""
    others = "  ".join(f"{status} {count}" for status, count in point["statuses"].items() if status != "200")
    lines = [
        f"requests {point['requests']}  ok {point['ok']}  {others or 'no errors'}"
        f"   duration {point['duration_s']:.1f} s   {point['rps']:.1f} req/s   media {point['media_mb_s']:.1f} MB/s"
    ]
    names = ["mean", *QUANTILES, "max"]
    lines.append(" " * 10 + "".join(f"{name:>10}" for name in names))
    for row in ("ttft_ms", "total_ms"):
        if point[row]:
            lines.append(f"{row:<10}" + "".join(f"{point[row][name]:>10.1f}" for name in names))
    if point["stage_ms"]:
        lines.append("stage_ms  " + "  ".join(f"{name} {value:.1f}" for name, value in point["stage_ms"].items()))
    if "gateway" in point:
        own = point["gateway"]
        lines.append(
            f"gateway   cpu {own['cpu_cores']:.2f} cores, {own['cpu_ms_per_request']:.1f} ms a request"
            f"   memory max {own['memory_max_mib']:.0f} MiB   faults {own['minor_faults_per_request']} a request"
        )
    if point.get("loop_lag_p99_ms") is not None:
        lines.append(f"loop lag  p99 {point['loop_lag_p99_ms']:.1f} ms")
    return "\n".join([*lines, *(f"  ! {text}" for text in point["problems"])])


def about() -> dict[str, Any]:
    """The machine and the versions, for the caption of a plot."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    versions = {}
    for name in ("aiohttp", "numpy", "pillow-simd", "grpclib", "uvloop"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    return {"cpu": model, "cores": cores, "kernel": platform.release(), "python": platform.python_version()} | {
        "versions": versions
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def fails(point: Mapping[str, Any], condition: str) -> bool:
    """Whether `p99>500`, `ttft.p50>100`, `errors>0`, `rps<10` ... holds.  Raises ValueError for anything else."""
    found = _CONDITION.fullmatch(condition)
    if found is None:
        raise ValueError(f"cannot read condition {condition!r}: p99>500, ttft.p50>100, errors>0, rps<10")
    name, sign, bound = found[1], found[2], float(found[3])
    value = _value(point, name)
    return {">": value > bound, "<": value < bound, ">=": value >= bound, "<=": value <= bound}[sign]


def _value(point: Mapping[str, Any], name: str) -> float:
    """A figure that is missing because nothing succeeded counts as endless latency."""
    if name == "errors":
        return float(point["requests"] - point["ok"])
    if name in ("rps", "ok", "media_mb_s"):
        return float(point[name])
    row, _, figure = name.rpartition(".")
    table_name = f"{row or 'total'}_ms"
    if figure not in ("mean", *QUANTILES, "max") or table_name not in ("total_ms", "ttft_ms"):
        raise ValueError(f"unknown figure {name!r}")
    return float(point[table_name].get(figure, float("inf")))
