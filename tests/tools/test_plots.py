"""Pictures are well-formed, to scale, labelled with units and machine; axes have round numbers."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.load.svg import Chart, Series, bars, lines, stacked, ticks
from tools.plots import STAGES, main

ABOUT = {"cpu": "Some <CPU> & Co", "cores": 2, "kernel": "6.1", "python": "3.11.4"}


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def found(root: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in found(root, "text")]


@given(st.floats(min_value=1e-3, max_value=1e9))
def test_ticks_are_few_round_and_reach_the_top(top: float) -> None:
    values = ticks(top)
    assert values[0] == 0 and values[-1] >= top * 0.998 and 3 <= len(values) <= 8
    step = values[1]
    assert step / 10 ** math.floor(math.log10(step) + 1e-9) == pytest.approx(1, abs=1e-6) or round(
        step / 10 ** math.floor(math.log10(step) + 1e-9), 6
    ) in (2.0, 2.5, 5.0)


def test_lines_are_to_scale() -> None:
    root = parsed(lines([Chart("T", "s", "MiB", [Series("a", [(0, 0), (5, 50), (10, 100)])])], "machine"))
    (path,) = found(root, "polyline")
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, pair.split(","))) for pair in path.attrib["points"].split()]
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.11)
    assert x2 > x0 and y2 < y0
    assert {"T", "s", "MiB", "a", "machine", "100"} <= set(words(root))


def test_stacked_bars_add_up() -> None:
    root = parsed(stacked("T", "x", "ms", ("decode", "send"), [("1", (10.0, 30.0)), ("2", (20.0, 0.0))], "m"))
    heights = [float(box.attrib["height"]) for box in found(root, "rect") if "x" in box.attrib][:4]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.02) and heights[2] == pytest.approx(
        2 * heights[0], rel=0.02
    )
    assert heights[3] == 0
    assert {"decode", "send", "40.0", "20.0"} <= set(words(root))


def test_ratio_bars_show_targets_and_spread() -> None:
    root = parsed(bars("T", "ratio", [("text", 2.0, 1.8, 2.4, [2.0, 1.3]), ("shm", 0.2, 0.2, 0.2, [])], "m"))
    widths = [float(box.attrib["width"]) for box in found(root, "rect") if "x" in box.attrib]
    assert widths[0] == pytest.approx(10 * widths[1], rel=0.02)
    marks = [line for line in found(root, "line") if "stroke" in line.attrib]
    assert len(marks) == 2
    assert {"text", "shm", "2.00", "0.20", "ratio"} <= set(words(root))


def load_file() -> dict[str, Any]:
    points = [
        {
            "concurrency": n,
            "rps": 10.0 * n,
            "total_ms": {"p99": 100.0 * n},
            "stage_ms": dict.fromkeys(STAGES, 1.5),
            "gateway": {"samples": [[0.2, 1 << 20, 1, 1, 0.1], [0.4, 2 << 20, 1, 1, 0.2]]},
        }
        for n in (1, 4)
    ]
    return {"about": ABOUT, "settings": {"mix": ["1x1920x1080:jpeg"]}, "points": points}


def test_files_become_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load, peer = tmp_path / "load.json", tmp_path / "peer.json"
    load.write_text(json.dumps(load_file()))
    pair = {"ratio": {"cpu": 0.25}}
    scenario = {"name": "jpeg", "pairs": [pair], "targets": [{"figure": "cpu", "must": 0.4, "ambitious": 0.3}]}
    peer.write_text(json.dumps({"about": ABOUT, "peer": "smg==1.13.0", "scenarios": [scenario], "growths": []}))
    out = tmp_path / "out"
    assert main([str(load), str(peer), "--against", f"other={load}", "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    pictures = {"load-concurrency.svg", "load-stages.svg", "load-memory.svg", "peer-ratios.svg"}
    assert names == pictures | {"load.json", "peer.json"}
    for name in pictures:
        assert any("Some <CPU> & Co, 2 cores" in text for text in words(parsed((out / name).read_text())))
    both = words(parsed((out / "load-concurrency.svg").read_text()))
    assert {"mediagate", "other", "answers a second", "milliseconds", "requests at once"} <= set(both)
    capsys.readouterr()
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    assert main([str(broken), "--out", str(out)]) == 2
    assert "no result" in capsys.readouterr().err
