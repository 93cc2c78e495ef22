"""Inkling pictures against transformers' fingerprints; patches, rescaling, the bound of a request, prompt, layout."""

import hashlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline import models
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.direct import apart
from tests.models.served import Served, picture_cases, through_png, vocabulary
from tests.models.stock_pillow import lanczos, resize

PICTURE = Modality.IMAGE
ANCHOR, BEFORE = 200054, 200005


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("inkling")


@pytest.mark.parametrize("case", picture_cases("inkling"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(served: Served, case: Any) -> None:
    expected = case["backends"]["torchvision"]
    measured, out = served.encode(through_png(case))
    tensor = expected["tensors"]["pixel_values"]
    assert measured.side["tokens_per_item"].values == (tensor["shape"][0],)
    assert measured.feature_tokens == expected["num_tokens"][0]
    assert list(measured.primary_shape) == tensor["shape"]
    assert out.view(np.float32)[:8].tolist() == tensor["first8"]
    assert hashlib.sha256(out).hexdigest() == tensor["sha256"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_forms(served: Served, dtype: str) -> None:
    picture = through_png(picture_cases("inkling")[2])
    wide = served.encode(picture)[1].view(np.float32)
    found = served.encode(picture, Form(dtype))[1]
    if dtype == "float16":
        assert np.array_equal(found.view(np.float16), wide.astype(np.float16))
    else:
        bits = wide.view(np.uint32).astype(np.uint64)
        assert np.array_equal(found.view(np.uint16), (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def test_raw_form_puts_pixels_where_they_were(served: Served) -> None:
    pixels = np.random.default_rng(6).integers(1, 256, (90, 85, 3), np.uint8)
    measured, raw = served.encode(Image.fromarray(pixels), Form("uint8", normalised=False))
    assert measured.primary_shape == (9, 2, 40, 40, 3)
    patches = raw.reshape(3, 3, 2, 40, 40, 3)
    for slot in range(2):
        canvas = patches[:, :, slot].transpose(0, 2, 1, 3, 4).reshape(120, 120, 3)
        assert np.array_equal(canvas[:90, :85], pixels)
        assert not canvas[90:].any() and not canvas[:, 85:].any()


@pytest.mark.parametrize(
    ("preprocessor", "size", "resized"),
    [
        ({}, (300, 400), (300, 400)),
        ({"rescale_image_frac": 2.0}, (300, 401), (600, 802)),
        ({"rescale_image_frac": 2.0}, (1000, 1500), (1365, 2048)),  # the long side stops at 2048
        ({"rescale_image_frac": 2.0}, (1000, 3000), (1000, 3000)),  # above it already: as it is
        ({"rescale_image_frac": 0.5}, (1001, 3001), (501, 1501)),  # half up
        ({"rescale_image_frac": 2.0, "rescale_image_max_upscaled_long_edge": None}, (1000, 3000), (2000, 6000)),
        ({"rescale_image_frac": 0.001}, (10, 900), (1, 1)),
    ],
)
def test_rescaling(preprocessor: Any, size: tuple[int, int], resized: tuple[int, int]) -> None:
    measured = Served("inkling", preprocessor).measure(*size)
    assert measured.resized == resized
    assert measured.feature_tokens == -(-resized[0] // 40) * (resized[1] // 40 + 1)


@pytest.mark.parametrize("factor", [2.0, 0.4])
def test_lanczos_is_within_two_levels_of_stock_pillow(factor: float) -> None:
    served = Served("inkling", {"rescale_image_frac": factor})
    pixels = np.random.default_rng(7).integers(0, 256, (217, 333, 3), np.uint8)
    measured, raw = served.encode(Image.fromarray(pixels), Form("uint8", normalised=False))
    height, width = measured.resized
    columns = width // 40 + 1
    canvas = raw.reshape(-1, columns, 2, 40, 40, 3)[:, :, 0].transpose(0, 2, 1, 3, 4).reshape(-1, columns * 40, 3)
    assert apart(f"Lanczos {factor}", canvas[:height, :width], resize(pixels, height, width, lanczos)) <= 2


def test_the_patches_of_a_request_are_bounded_together(served: Served) -> None:
    item = served.measure(4000, 4000)  # 100 rows of 101
    assert served.family.reconcile(served.settings, PICTURE, [item] * 3) == [item] * 3
    with pytest.raises(MediaError, match="the pictures make 40400 patches, above the limit of 32768"):
        served.family.reconcile(served.settings, PICTURE, [item] * 4)
    small = Served("inkling", {"in_patch_limit": 100})
    with pytest.raises(MediaError, match="the pictures make 110 patches, above the limit of 100"):
        small.family.reconcile(small.settings, PICTURE, [small.measure(400, 400)])


def test_prompt_of_two_pictures(served: Served) -> None:
    text, ids, expanded = served.prompt(["See ", (40, 40), " and ", (100, 100), "."])
    assert text.count("<|content_image|><|unused_200054|>") == 2 and text.index("See") < text.index("<|content_image|>")
    first = ids.index(ANCHOR)
    second = ids.index(ANCHOR, first + 1) + 1
    assert ids[first - 1] == BEFORE
    assert expanded.structural == [Range(first - 1, 3), Range(second - 1, 10)]  # with <|content_image|> before it
    assert expanded.features == [(Range(first, 2),), (Range(second, 9),)]
    assert expanded.ids.count(ANCHOR) == 11


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(
        batched=("tokens_per_item",), flat={"pixel_values": "tokens_per_item"}
    )
    assert served.family.limits[PICTURE] == 10 and served.family.worker_side == frozenset()
    for name, kind in (("thinkingmachines/Inkling", None), ("x", "inkling_mm_model")):
        found = models.family_of(name, kind)
        assert found is not None and found.name == "inkling"


@pytest.mark.parametrize("vision", [{}, {"decoder_dmodel": None}, None])
def test_a_checkpoint_without_vision_takes_no_pictures(served: Served, vision: Any) -> None:
    assert PICTURE not in served.family.modalities(BundleConfig({"vision_config": vision}))
    assert PICTURE in served.family.modalities(served.config)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"patch_size": 0}, "patch_size must be a positive whole number, got 0"),
        ({"rescale_image_frac": 0}, "rescale_image_frac must be a positive number, got 0"),
        ({"rescale_image_max_upscaled_long_edge": -1}, "rescale_image_max_upscaled_long_edge must be a positive"),
        ({"in_patch_limit": 1.5}, "in_patch_limit must be a positive whole number, got 1.5"),
        ({"do_resize": False}, "do_resize false is not supported"),
    ],
)
def test_settings_that_cannot_be_used(served: Served, values: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        served.family.settings(BundleConfig(served.config.config, values))


def test_what_is_refused(served: Served) -> None:
    with pytest.raises(MediaError, match="inkling takes no video"):
        served.family.measure(served.settings, Modality.VIDEO, Source(64, 64, 4))
    with pytest.raises(FamilyError, match=r"token '<\|unused_200054\|>' is missing"):
        served.family.anchor(BundleConfig({}), vocabulary(), PICTURE)
