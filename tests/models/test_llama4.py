"""Llama 4 pictures: equal to transformers, its bfloat16 arithmetic included; tiles, separators, feature runs."""

import hashlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline import models
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.served import Served, picture_cases, through_png, vocabulary

PICTURE = Modality.IMAGE
START, END, BESIDE, BELOW, IMAGE, PATCH = 200080, 200081, 200084, 200085, 200090, 200092


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("llama4")


@pytest.mark.parametrize("case", picture_cases("llama4"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(served: Served, case: Any) -> None:
    """Every bit, although the reference rounds to bfloat16 between the steps; its float32 form is 0.013 away."""
    expected = case["backends"]["torchvision"]
    measured, out = served.encode(through_png(case))
    tensor = expected["tensors"]["pixel_values"]
    assert measured.side["aspect_ratios"].values == tuple(expected["tensors"]["aspect_ratios"]["values"][0])
    assert measured.side["patches_per_image"].values == (tensor["shape"][0],)
    assert measured.feature_tokens == expected["num_tokens"][0]
    assert list(measured.primary_shape) == tensor["shape"]
    found = served.family.replacement(served.config, served.vocabulary, PICTURE, measured)
    assert len(found.token_ids) == expected["expanded_length"]
    values = out.view(np.float32)
    assert values[:8].tolist() == tensor["first8"] and values[-8:].tolist() == tensor["last8"]
    assert hashlib.sha256(out).hexdigest() == tensor["sha256"]
    plain = case["backends"]["torchvision_float32"]["tensors"]["pixel_values"]
    assert np.abs(values[:8] - plain["first8"]).max() < 0.013


def test_pixels_before_normalising_equal_the_float32_reference(served: Served) -> None:
    """The bytes a worker that normalises gets, put through plain float32 arithmetic."""
    for case in picture_cases("llama4"):
        raw = served.encode(through_png(case), Form("uint8", normalised=False))[1]
        values = (raw.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
        tensor = case["backends"]["torchvision_float32"]["tensors"]["pixel_values"]
        assert hashlib.sha256(values).hexdigest() == tensor["sha256"]


def test_bfloat16_loses_nothing(served: Served) -> None:
    picture = through_png(picture_cases("llama4")[2])
    wide = served.encode(picture)[1].view(np.uint32)
    assert not (wide & 0xFFFF).any()
    assert np.array_equal(served.encode(picture, Form("bfloat16"))[1].view(np.uint16), wide >> 16)
    half = served.encode(picture, Form("float16"))[1].view(np.float16)
    assert np.array_equal(half, wide.view(np.float32).astype(np.float16))


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [
        (100, 100, (1, 1)),
        (336, 336, (1, 1)),
        (337, 336, (2, 1)),
        (337, 337, (2, 2)),
        (1080, 1920, (3, 5)),  # nothing fits without shrinking: the least
        (336, 672, (1, 2)),
        (5000, 5000, (4, 4)),
        (10, 5376, (1, 16)),
    ],
)
def test_canvas(served: Served, height: int, width: int, grid: tuple[int, int]) -> None:
    measured = served.measure(height, width)
    assert measured.side["aspect_ratios"].values == grid
    tiles = grid[0] * grid[1]
    assert measured.primary_shape == (tiles + (tiles > 1), 3, 336, 336)
    assert measured.resized == (336 * grid[0], 336 * grid[1])


@pytest.mark.parametrize(("key", "most"), [("max_patches", 4), ("max_image_tiles", 4), ("max_patches", 1)])
def test_the_bound_is_read_under_both_names(key: str, most: int) -> None:
    served = Served("llama4", {"max_patches": None, key: most})
    measured = served.measure(3000, 3000)
    assert measured.feature_tokens == 144 * (most + (most > 1))


def test_the_largest_canvas_when_asked() -> None:
    assert Served("llama4", {"resize_to_max_canvas": True}).measure(100, 100).side["aspect_ratios"].values == (4, 4)


def test_small_pictures_fill_one_tile_at_most(served: Served) -> None:
    """10x20 becomes 168x336: enlarged to a tile; the rest is black."""
    raw = served.encode(Image.new("RGB", (20, 10), (255, 255, 255)), Form("uint8", normalised=False))[1]
    tile = raw.reshape(3, 336, 336)
    assert (tile[:, :168] == 255).all() and not tile[:, 168:].any()


def test_prompt_of_two_pictures(served: Served) -> None:
    text, ids, expanded = served.prompt(["Look: ", (600, 900), (50, 50), "?"])
    assert text.count("<|image|>") == 2 and text.index("Look") < text.index("<|image|>")
    first = ids.index(IMAGE)
    tile = [PATCH] * 144
    row = [*tile, BESIDE, *tile, BESIDE, *tile, BELOW]
    one = [START, *row, *row, IMAGE, *tile, END]
    two = [START, IMAGE, *tile, END]
    assert expanded.ids == [*ids[:first], *one, *two, *ids[first + 2 :]]
    assert expanded.structural == [Range(first, len(one)), Range(first + len(one), len(two))]
    runs = [Range(first + 1 + 145 * index, 144) for index in range(6)]
    assert expanded.features[0] == (*runs, Range(first + 1 + 6 * 145 + 1, 144))
    assert expanded.features[1] == (Range(first + len(one) + 2, 144),)


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(
        batched=("aspect_ratios", "patches_per_image"), flat={"pixel_values": "patches_per_image"}
    )
    assert served.family.limits == {PICTURE: 8} and served.family.worker_side == {PICTURE}
    assert served.family.feature_token(served.config, served.vocabulary, PICTURE) == PATCH
    assert served.anchors[PICTURE].token_id == IMAGE
    for name, kind in (("meta-llama/Llama-4-Scout-17B", None), ("x", "llama4"), ("llama4-maverick", "")):
        found = models.family_of(name, kind)
        assert found is not None and found.name == "llama4"
    assert models.family_of("Llama-3.2-11B", "mllama") is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"do_normalize": False}, "llama4 needs do_resize, do_rescale and do_normalize"),
        ({"size": {"height": 336, "width": 224}}, "size must be a positive whole number"),
        ({"size": {"height": 100, "width": 100}}, "tiles of 100 pixels cannot be cut into patches of 14"),
        ({"resample": 1}, r"resample must be 3 \(bicubic\) or 2 \(bilinear\), got 1"),
        ({"max_patches": 0}, "max_patches must be a positive whole number, got 0"),
        ({"rescale_factor": "a"}, "rescale_factor must be a positive number"),
    ],
)
def test_settings_that_cannot_be_used(served: Served, values: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        served.family.settings(BundleConfig(served.config.config, values))


def test_what_is_refused(served: Served) -> None:
    with pytest.raises(MediaError, match="llama4 takes no video"):
        served.family.measure(served.settings, Modality.VIDEO, Source(64, 64, 4))
    tokens = {"<|image|>": 1, "<|patch|>": 2, "<|image_start|>": 3, "<|image_end|>": 4, "<|tile_x_separator|>": 5}
    with pytest.raises(FamilyError, match=r"token '<\|tile_y_separator\|>' is missing"):
        served.family.anchor(served.config, vocabulary(**tokens), PICTURE)
    with pytest.raises(FamilyError, match=r"token '<\|patch\|>' is missing"):
        served.family.feature_token(BundleConfig({}), vocabulary(), PICTURE)
