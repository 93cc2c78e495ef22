"""Phi-3 and Phi-3.5 vision pictures against the direct vectors within 2 levels; tiles, global view, prompt, layout."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline import models
from pipeline.crops import bicubic as torch_bicubic
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.direct import apart, drawn, levels, unpatched
from tests.models.served import Served, picture_cases, vocabulary
from tests.models.stock_pillow import bilinear, resize
from tests.models.synthetic import digest

PICTURE = Modality.IMAGE
ANCHOR = 32044
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


@pytest.fixture(scope="module", params=["phi3_v", "phi35_v"])
def served(request: pytest.FixtureRequest) -> Served:
    return Served(request.param)


def on_white(picture: Image.Image, width: int, height: int) -> np.ndarray:
    """The reference's canvas with stock resampling: lying, in the middle of white to whole tiles, turned back."""
    is_upright = picture.width < picture.height
    pixels = np.asarray(picture).transpose(1, 0, 2) if is_upright else np.asarray(picture)
    full = -(-height // 336) * 336
    canvas = np.full((full, width, 3), 255, np.uint8)
    top = (full - height) // 2
    canvas[top : top + height] = resize(pixels, height, width, bilinear)
    return np.ascontiguousarray(canvas.transpose(1, 0, 2)) if is_upright else canvas


def normalised(values: np.ndarray) -> np.ndarray:
    """[height, width, 3] of bytes' values to float32 [3, height, width]."""
    return ((values.astype(np.float32) / np.float32(255) - MEAN) / STD).transpose(2, 0, 1)


CASES = [
    pytest.param(name, case, id=f"{name}-{case['name']}")
    for name in ("phi3_v", "phi35_v")
    for case in picture_cases(name)
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_pixels_are_within_two_levels(name: str, case: Any) -> None:
    served = Served(name)
    expected = case["backends"]["direct"]
    picture = drawn(case).convert("RGB")
    reference = on_white(picture, *expected["resized_width_height"])
    assert digest(Image.fromarray(reference)) == expected["hd_u8_sha256"]

    measured, out = served.encode(picture)
    tensor = expected["tensors"]["pixel_values"]
    assert list(measured.primary_shape) == tensor["shape"]
    assert measured.side["image_sizes"].values == tuple(expected["tensors"]["image_sizes"]["values"][0])
    assert measured.feature_tokens == expected["num_tokens"][0]
    assert measured.side["num_img_tokens"].values == (measured.feature_tokens,)
    height, width = measured.resized
    rows, columns = height // 336, width // 336
    values = out.view(np.float32).reshape(measured.primary_shape)[0]
    assert not values[1 + rows * columns :].any()
    canvas = unpatched(values[1 : 1 + rows * columns], rows, columns)
    assert apart(case["name"], levels(canvas, MEAN, STD), reference) <= 2

    whole = normalised(torch_bicubic(Image.fromarray(reference), 336, 336))
    level = np.float32(1 / 255) / STD.reshape(3, 1, 1)
    assert (np.abs(values[0] - whole) <= 2 * level).all()
    # the reference's canvas, global view included, has the vector's own figures
    assert np.abs(whole.reshape(-1)[:8] - tensor["first8"]).max() < 1e-6
    total = whole.sum(dtype=np.float64) + normalised(reference).sum(dtype=np.float64)
    assert abs(total / values.size - tensor["mean"]) < 1e-6


def test_the_global_view_is_keys_with_three_quarters(served: Served) -> None:
    """Four taps a side whatever the scale, weights of a = -0.75, the border repeated; in float64 and a pixel at a
    time.
    """
    pixels = np.random.default_rng(8).integers(0, 256, (20, 31, 3), np.uint8)
    found = torch_bicubic(Image.fromarray(pixels), 7, 11)

    def weight(x: float) -> float:
        x, a = abs(x), -0.75
        if x <= 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    for y in range(7):
        for x in range(11):
            down, across = (y + 0.5) * 20 / 7 - 0.5, (x + 0.5) * 31 / 11 - 0.5
            total = np.zeros(3)
            for row in range(int(np.floor(down)) - 1, int(np.floor(down)) + 3):
                for column in range(int(np.floor(across)) - 1, int(np.floor(across)) + 3):
                    pixel = pixels[min(max(row, 0), 19), min(max(column, 0), 30)]
                    total += pixel * weight(down - row) * weight(across - column)
            assert np.abs(found[y, x] - total).max() < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_forms(served: Served, dtype: str) -> None:
    picture = drawn(picture_cases("phi3_v")[2])
    wide = served.encode(picture)[1].view(np.float32)
    found = served.encode(picture, Form(dtype))[1]
    if dtype == "float16":
        assert np.array_equal(found.view(np.float16), wide.astype(np.float16))
    else:
        bits = wide.view(np.uint32).astype(np.uint64)
        assert np.array_equal(found.view(np.uint16), (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def test_raw_form(served: Served) -> None:
    picture = drawn(picture_cases("phi3_v")[2])
    measured, wide = served.encode(picture)
    raw = served.encode(picture, Form("uint8", normalised=False))[1].reshape(measured.primary_shape)[0]
    values = wide.view(np.float32).reshape(measured.primary_shape)[0]
    used = 1 + measured.resized[0] * measured.resized[1] // 336**2
    back = (values[:used] * STD.reshape(3, 1, 1) + MEAN.reshape(3, 1, 1)) * 255
    assert np.abs(np.clip(back, 0, 255) - raw[:used]).max() < 0.501 and not raw[used:].any()


def test_prompt_of_two_pictures(served: Served) -> None:
    """The template takes strings: every anchor on a line of its own before the text."""
    text, ids, expanded = served.prompt(["What?", (300, 400), (900, 200)])
    assert text == "<|user|>\n<|image|>\n<|image|>\nWhat?<|end|>\n<|assistant|>\n"
    counts = [served.measure(300, 400).feature_tokens, served.measure(900, 200).feature_tokens]
    first = ids.index(ANCHOR)
    second = ids.index(ANCHOR, first + 1) - 1 + counts[0]
    assert expanded.structural == [Range(first, counts[0]), Range(second, counts[1])]
    assert expanded.features == [(Range(first, counts[0]),), (Range(second, counts[1]),)]
    assert expanded.ids.count(ANCHOR) == sum(counts)


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(batched=("pixel_values", "image_sizes", "num_img_tokens"))
    assert served.family.limits == {PICTURE: 4} and served.family.worker_side == frozenset()
    for name, kind in (("microsoft/Phi-3.5-vision-instruct", None), ("x", "phi3_v"), ("phi-3-vision-128k", "")):
        found = models.family_of(name, kind)
        assert found is not None and found.name == "phi3_v"
    assert models.family_of("phi-4", "phi3") is None
    assert served.settings.crops == served.config.preprocessor["num_crops"]
    assert served.family.settings(BundleConfig({})).crops == 16  # type: ignore[attr-defined]


def test_what_is_refused(served: Served) -> None:
    with pytest.raises(MediaError, match="9000x1 pixels is too thin for phi3_v"):
        served.measure(1, 9000)
    with pytest.raises(MediaError, match="phi3_v takes no video"):
        served.family.measure(served.settings, Modality.VIDEO, Source(64, 64, 4))
    with pytest.raises(FamilyError, match=r"token '<\|image\|>' is missing"):
        served.family.anchor(served.config, vocabulary(), PICTURE)
    with pytest.raises(FamilyError, match="num_crops must be a positive whole number, got 0"):
        served.family.settings(BundleConfig({}, {"num_crops": 0}))
