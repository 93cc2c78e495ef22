"""DeepSeek-V4.1 pictures against the direct vectors within 2 levels; canvas, roles of tokens, prompt and layout."""

import hashlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline import models
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.direct import apart, drawn, levels, unpatched
from tests.models.served import Served, picture_cases, vocabulary
from tests.models.stock_pillow import bicubic, resize
from tests.models.synthetic import digest

PICTURE = Modality.IMAGE
ANCHOR = 129264


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("deepseek_v41")


def fitted(picture: Image.Image, height: int, width: int) -> np.ndarray:
    """Pillow's ImageOps.pad with stock resampling: one side touches, the gap is shared, gray 127."""
    inner_height, inner_width = height, width
    if picture.width * height > picture.height * width:
        inner_height = round(picture.height / picture.width * width)
    elif picture.width * height < picture.height * width:
        inner_width = round(picture.width / picture.height * height)
    canvas = np.full((height, width, 3), 127, np.uint8)
    top, left = round((height - inner_height) * 0.5), round((width - inner_width) * 0.5)
    resized = resize(np.asarray(picture), inner_height, inner_width, bicubic)
    canvas[top : top + inner_height, left : left + inner_width] = resized
    return canvas


@pytest.mark.parametrize("case", picture_cases("deepseek_v41"), ids=lambda case: case["name"])
def test_pixels_are_within_two_levels(served: Served, case: Any) -> None:
    expected = case["backends"]["direct"]
    picture = drawn(case).convert("RGB")
    width, height = expected["resized_width_height"]
    reference = fitted(picture, height, width)
    assert digest(Image.fromarray(reference)) == expected["resized_u8_sha256"]

    measured, out = served.encode(picture)
    tensor = expected["tensors"]["patches"]
    assert measured.resized == (height, width)
    assert list(measured.primary_shape) == tensor["shape"]
    assert measured.feature_tokens == expected["num_tokens"][0]
    for name in ("vit_grid", "llm_grid"):
        assert measured.side[name].values == tuple(expected["tensors"][name]["values"][0])
    rows, columns = (int(side) for side in measured.side["vit_grid"].values)
    canvas = levels(unpatched(out.view(np.float32).reshape(measured.primary_shape), rows, columns), 0.5, 0.5)
    assert apart(case["name"], canvas, reference) <= 2


def test_roles_of_tokens_equal_the_reference(served: Served) -> None:
    """The vector is long: it is known by the digest of its int64 bytes."""
    for case in picture_cases("deepseek_v41"):
        tensors = case["backends"]["direct"]["tensors"]
        measured = served.measure(case["input"]["height"], case["input"]["width"])
        types = np.array(measured.side["types"].values, np.int64)
        assert hashlib.sha256(types.tobytes()).hexdigest() == tensors["types"]["sha256"]
        assert measured.side["types_per_image"].values == (len(types),)
        assert measured.side["patches_per_image"].values == (tensors["patches"]["shape"][0],)


def test_values_of_every_byte(served: Served) -> None:
    """The reference computes `(x / 255 - 0.5) / 0.5` and casts to bfloat16: ours are the same in bfloat16."""
    table = served.settings.normalisation.table()
    x = np.arange(256, dtype=np.float32)
    reference = (x / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    assert np.abs(table - reference).max() < 6e-8

    def bits(values: np.ndarray) -> np.ndarray:
        wide = values.view(np.uint32).astype(np.uint64)
        return (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16

    assert np.array_equal(bits(table[0]), bits(reference))


@pytest.mark.parametrize(
    ("height", "width", "canvas", "cells"),
    [
        (544, 544, (546, 546), (13, 13)),  # min_pixels exactly
        (10, 10, (546, 546), (13, 13)),  # enlarged to min_pixels
        (1080, 1920, (966, 1708), (23, 41)),
        (4000, 3000, (1512, 1134), (36, 27)),
        (1, 2000, (14, 24332), (1, 580)),
        (1, 100_000, (42, 42882), (1, 1021)),  # fewer than one row fits: one of a single cell's height
        (100_000, 1, (21462, 42), (511, 1)),
    ],
)
def test_canvas(served: Served, height: int, width: int, canvas: tuple[int, int], cells: tuple[int, int]) -> None:
    measured = served.measure(height, width)
    assert measured.resized == canvas
    assert measured.side["llm_grid"].values == cells
    assert measured.feature_tokens == cells[0] * (cells[1] + 1) + 2 <= 1024


def test_a_thread_keeps_a_pixel(served: Served) -> None:
    """Its short side would round to nothing."""
    measured, out = served.encode(Image.new("RGB", (3000, 1), (255, 255, 255)))
    assert measured.feature_tokens <= 1024 and out.view(np.float32).max() == 1


def test_wide_pictures_are_stretched_when_the_config_says_so() -> None:
    served = Served("deepseek_v41", {"max_wh_ratio": 2})
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (400, 801, 3), np.uint8))
    measured, raw = served.encode(picture, Form("uint8", normalised=False))
    rows, columns = (int(side) for side in measured.side["vit_grid"].values)
    height, width = measured.resized
    stretched = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    assert np.array_equal(unpatched(raw.reshape(measured.primary_shape), rows, columns), stretched)
    less_wide = served.encode(Image.new("RGB", (799, 400), (255, 255, 255)), Form("uint8", normalised=False))[1]
    assert set(np.unique(less_wide)) == {127, 255}  # fitted: a border is left


def test_prompt_of_two_pictures(served: Served) -> None:
    text, ids, expanded = served.prompt(["Compare ", (10, 10), " with ", (1080, 1920)])
    assert text.index("Compare") < text.index("<｜deepseek_image｜>") < text.index("with")
    counts = [13 * 14 + 2, 23 * 42 + 2]
    first = ids.index(ANCHOR)
    second = ids.index(ANCHOR, first + 1) - 1 + counts[0]
    assert expanded.structural == [Range(first, counts[0]), Range(second, counts[1])]
    assert expanded.features == [(Range(first, counts[0]),), (Range(second, counts[1]),)]
    assert expanded.ids.count(ANCHOR) == sum(counts)


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(
        batched=("vit_grid", "llm_grid", "patches_per_image", "types_per_image"),
        flat={"patches": "patches_per_image", "types": "types_per_image"},
        keep_on_cpu=("vit_grid", "llm_grid", "types"),
        encoder_input_key="patches",
    )
    assert served.family.limits == {PICTURE: 128} and served.family.worker_side == frozenset()
    for name, kind in (("deepseek-ai/DeepSeek-V4.1", None), ("x", "deepseek_v41"), ("my_deepseek_v41", "")):
        found = models.family_of(name, kind)
        assert found is not None and found.name == "deepseek_v41"
    assert models.family_of("DeepSeek-V4", "deepseek_v4") is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"patch_size": 7}, "patch_size 7 is odd"),
        ({"max_image_tokens": 4}, "has no room for one cell"),
        ({"downsample_ratio": 0}, "downsample_ratio must be a positive whole number"),
        ({"max_wh_ratio": -1}, "max_wh_ratio must be a positive number"),
        ({"min_pixels": None, "max_image_tokens": [9]}, "max_image_tokens must be a positive whole number"),
    ],
)
def test_settings_that_cannot_be_used(served: Served, values: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        served.family.settings(BundleConfig({"vision_config": values}))


def test_what_is_refused(served: Served) -> None:
    with pytest.raises(MediaError, match="deepseek_v41 takes no audio"):
        served.family.measure(served.settings, Modality.AUDIO, Source(64, 64))
    with pytest.raises(FamilyError, match="token '<｜deepseek_image｜>' is missing"):
        served.family.anchor(BundleConfig({}), vocabulary(), PICTURE)
