"""Target sizes and token counts of 250 random pictures, as the reference's own functions answer.

Columns of tests/data/reference/plans.json after height and width: Llama 4: canvas and the picture on it; LLaVA-NeXT:
canvas, tokens; Kimi: canvas; DeepSeek-V4.1: canvas, cells.
"""

import json
from typing import Any

import pytest

from pipeline.models.llama4 import _content
from tests.models.served import REFERENCE, Served

PLANS: dict[str, list[list[int]]] = json.loads((REFERENCE / "plans.json").read_text())


def planned(served: Served, height: int, width: int) -> list[Any]:
    measured = served.measure(height, width)
    name = served.family.name
    if name == "llama4":
        return [*measured.resized, *_content(served.settings, height, width, measured.resized)]
    if name == "llava_next":
        return [*measured.resized, measured.feature_tokens]
    if name == "deepseek_v41":
        return [*measured.resized, *measured.side["llm_grid"].values]
    return list(measured.resized)


@pytest.mark.parametrize("name", PLANS)
def test_sizes_are_the_reference_s(name: str) -> None:
    served = Served(name)
    assert len(PLANS[name]) == 250
    found = [[height, width, *planned(served, height, width)] for height, width, *_ in PLANS[name]]
    assert found == PLANS[name]
