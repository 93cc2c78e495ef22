"""The table of families: what counts as the same, and that every test bundle has a row on the page."""

import re
from typing import Any

from tests.models.served import Served
from tests.pipeline.bundles import NAMES
from tools.family_table import BUNDLES, MARKS, MODELS, apart, vectors


def seen(*, sample: list[float], sha256: str = "a", ids: list[list[int]] | None = None) -> dict[str, Any]:
    tensors = {
        "pixel_values": {"dtype": "float32", "shape": [4, 3], "sha256": sha256, "sample": sample},
        "grid": {"dtype": "int64", "shape": [1, 3], "sha256": "g", "values": [1, 2, 2]},
    }
    return {
        "input_ids": ids or [[1, 2], [9, 4]],
        "media": [{"modality": "image", "tensors": tensors, "ranges": [[2, 4]]}],
    }


def test_what_counts_as_the_same() -> None:
    one = seen(sample=[0.0, 1.0])
    assert apart([one], [seen(sample=[0.0, 1.0])]) == "equal"
    assert apart([one], [seen(sample=[0.0, 1.25], sha256="b")]) == "within 0.2"
    assert apart([one], [seen(sample=[0.0, 1.0], sha256="b")]) == "within 1e-09"  # elsewhere
    assert apart([one], [seen(sample=[0.0])]) == "differs"
    assert apart([one], [seen(sample=[0.0, 1.0], ids=[[1, 2], [8, 4]])]) == "differs"
    longer = seen(sample=[0.0, 1.0], ids=[[7, 2], [9, 4]])
    assert apart([one], [longer]) == "equal"  # another prompt around the same run


def test_vectors_are_counted() -> None:
    assert vectors(Served("llava15")) == "11 of 11"
    assert vectors(Served("qwen3_asr")) == "-"


def test_every_bundle_has_a_row() -> None:
    table = MODELS.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"checkpoint"} == set(BUNDLES) == set(NAMES)
