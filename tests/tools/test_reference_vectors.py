"""The recorder of reference vectors: what it writes of our own pixels is what was recorded of the reference's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from tests.models.served import Served, picture_cases
from tools.reference_vectors import PICTURES, cases, fingerprint


def test_our_pixels_give_the_recorded_cases() -> None:
    served = Served("qwen2_vl")

    def process(picture: Image.Image) -> Mapping[str, Any]:
        measured, out = served.encode(picture)
        grid = np.array(measured.side["image_grid_thw"].values).reshape(1, 3)
        return {"pixel_values": out.view(np.float32).reshape(measured.primary_shape), "image_grid_thw": grid}

    recorded = {case["name"]: case for case in picture_cases("qwen2_vl")}
    names = ("tiny", "odd", "thin")
    for case in cases(process, merge=2, names=names):
        expected = recorded[case["name"]]
        assert case["input"] == expected["input"]
        made, reference = case["backends"]["torchvision"], expected["backends"]["torchvision"]
        assert made["num_tokens"] == reference["num_tokens"]
        for key, tensor in made["tensors"].items():
            assert tensor == {name: reference["tensors"][key][name] for name in tensor}
    assert set(recorded) == set(PICTURES)


def test_what_the_processor_refuses_is_recorded_too() -> None:
    def process(picture: Image.Image) -> Mapping[str, Any]:
        raise ValueError("aspect ratio")

    (case,) = cases(process, merge=None, names=("thin",))
    assert case["refused"] == "aspect ratio" and "backends" not in case


def test_small_tensors_are_kept_as_values() -> None:
    assert fingerprint(np.arange(6, dtype=np.int32).reshape(2, 3)) == {
        "shape": [2, 3],
        "dtype": "int64",
        "values": [[0, 1, 2], [3, 4, 5]],
    }
    large = fingerprint(np.zeros((5, 13), np.float64))
    assert large["dtype"] == "float32" and large["shape"] == [5, 13] and len(large["first8"]) == 8
