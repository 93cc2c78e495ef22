"""The comparison's arithmetic on made-up rounds, and the whole tool with one gateway on both sides."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.compare_peer import FIGURES, main, missed, ratio, spread, table, verdict
from tools.launch import ROOT
from tools.load.scenarios import GROWTHS, SCENARIOS


def result(ratios: list[float], *, equal: bool = True) -> dict[str, Any]:
    figures = [(dict.fromkeys(FIGURES, 10 * value), dict.fromkeys(FIGURES, 10.0)) for value in ratios]
    pairs = [
        {"order": ["ours", "peer"], "ours": ours, "peer": peer, "ratio": {n: ratio(ours[n], peer[n]) for n in FIGURES}}
        for ours, peer in figures
    ]
    targets = [{"figure": "cpu", "must": 0.45, "ambitious": 0.3}]
    return {"name": "jpeg1080-shm", "pairs": pairs, "targets": targets, "tensors_equal": equal}


def test_median_and_spread_over_pairs() -> None:
    assert spread(result([0.4, 0.2, 0.3]), "cpu") == pytest.approx((0.3, 0.2, 0.4))
    assert ratio(1.0, 0.0) is None


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [("cpu", 0.30, "ambitious"), ("cpu", 0.45, "must"), ("cpu", 0.46, "MISSED")]
    + [("rps", 1.9, "ambitious"), ("rps", 1.5, "must"), ("rps", 1.3, "MISSED")],
)
def test_verdicts(figure: str, value: float, said: str) -> None:
    must, ambitious = (1.4, 1.9) if figure == "rps" else (0.45, 0.30)
    assert verdict(figure, value, must, ambitious) == said


def test_what_is_missed_and_how_it_reads() -> None:
    grown = {"name": "images-1-to-10", "figure": "cpu", "first": 10.0, "second": 100.0, "must": 1.15}
    fine = grown | {"ratio": 1.0, "segments_left": 0}
    assert missed([result([0.4, 0.44, 0.5])], [fine]) == []
    assert missed([result([0.4, 0.46, 0.5])], [fine | {"segments_left": 2}]) == ["jpeg1080-shm cpu", "images-1-to-10"]
    text = table([result([0.2, 0.25, 0.29], equal=False)], [fine | {"ratio": 1.3}])
    assert "0.250  0.200..0.290" in text and "ambitious" in text and "TENSORS DIFFER" in text and "MISSED" in text


def test_every_target_of_the_plan_is_a_scenario() -> None:
    """The rows of the table of targets: figure, must, ambitious."""
    have = {(s.name, *target) for s in SCENARIOS for target in s.targets}
    assert have == {
        ("jpeg1080-shm", "cpu", 0.45, 0.30),
        ("jpeg1080-inline", "cpu", 0.60, 0.42),
        ("jpeg12mp-shm", "cpu", 0.45, 0.30),
        ("webp4mp-shm", "cpu", 0.55, 0.40),
        ("png4mp-shm", "cpu", 0.80, 0.60),
        ("jpeg480-shm", "cpu", 0.70, 0.45),
        ("clip720-shm", "cpu", 0.35, 0.30),
        ("clips8-shm", "memory", 0.7, 0.5),
        ("tokenspeed-shm", "cpu", 0.40, 0.30),
        ("sglang-inline", "cpu", 0.60, 0.42),
        ("text", "cpu", 1.5, 1.3),
        ("concurrency16-shm", "rps", 1.4, 1.9),
        ("concurrency16-shm", "p99", 0.75, 0.55),
        ("concurrency16-shm", "memory", 0.7, 0.5),
    }
    assert all(s.requests >= (16 if "mp4" in s.mix else 50) for s in SCENARIOS)
    assert {g.name: g.must for g in GROWTHS} == {
        "images-1-to-10": 1.15,
        "requests-100-to-1000": 1.05,
        "bfloat16-to-float32": 0.85,
    }


def test_a_gateway_that_does_not_start_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"{sys.executable} -c exit(4)"
    assert main(["--ours", broken, "--peer", broken, "--scenario", "text", "--quick"]) == 1
    assert "exit code" in capsys.readouterr().err


def test_the_whole_comparison_with_one_gateway_on_both_sides(tmp_path: Path) -> None:
    written = tmp_path / "peer.json"
    command = [sys.executable, "tools/compare_peer.py", "--peer", f"{sys.executable} gateway.py", "--quick"]
    command += ["--requests", "30", "--scenario", "jpeg480-shm", "--json", str(written), "--logs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (scenario,) = json.loads(written.read_text())["scenarios"]
    assert scenario["tensors_equal"] and scenario["pictures_compared"] == 10
    (pair,) = scenario["pairs"]  # of enough requests that a clock of 10 ms sees them
    assert pair["ours"]["cpu"] > 0 and pair["peer"]["memory"] > 10
