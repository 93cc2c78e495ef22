"""Qwen2-VL and Qwen2.5-VL pictures against the reference processor's own fingerprints; settings, prompt, layout."""

import functools
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.served import Served, equals_reference, picture_cases, vocabulary

FAMILY = by_name("qwen_vl")
PICTURE = Modality.IMAGE
BUNDLES = ("qwen2_vl", "qwen2_5_vl")
PAD, START, END = 151655, 151652, 151653

served = functools.cache(Served)


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("case", picture_cases("qwen2_vl"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(name: str, case: Any) -> None:
    equals_reference(served(name), case)


def test_a_worker_that_normalises_gets_the_resized_bytes() -> None:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (100, 90, 3), np.uint8))
    measured, raw = served("qwen2_vl").encode(picture, Form("uint8", normalised=False))
    height, width = measured.resized
    assert (height, width) == (112, 84)
    resized = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    patches = raw.reshape(-1, 3, 2, 14, 14)
    assert np.array_equal(patches[0, 1, 0], resized[:14, :14, 1])
    assert np.array_equal(patches[3, 2, 1], resized[14:28, 14:28, 2])
    assert np.array_equal(patches[4, 0, 0], resized[:14, 28:42, 0])


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [(28, 28, 4), (56, 84, 6), (1080, 1920, 2691), (9000, 6000, 16_224), (600, 3, 29)],
)
def test_token_counts(name: str, height: int, width: int, tokens: int) -> None:
    """39 cells of 28 for 1080, 69 for 1920; at most 12,845,056 pixels; at least 3,136; a thin side counts as 0."""
    measured = served(name).measure(height, width)
    assert measured.feature_tokens == tokens
    assert measured.primary_shape == (4 * tokens, 1176)


@pytest.mark.parametrize("name", BUNDLES)
def test_prompt_of_two_pictures(name: str) -> None:
    text, ids, expanded = served(name).prompt(["One: ", (56, 84), " two: ", (112, 28), "?"])
    markers = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\nOne: {markers} two: {markers}?<|im_end|>\n<|im_start|>assistant\n"
    first, second = (position for position, token in enumerate(ids) if token == PAD)
    assert expanded.ids == [*ids[:first], *[PAD] * 6, *ids[first + 1 : second], *[PAD] * 4, *ids[second + 1 :]]
    assert expanded.structural == [Range(first, 6), Range(second + 5, 4)]
    assert expanded.features == [(Range(first, 6),), (Range(second + 5, 4),)]
    for run in expanded.structural:
        assert (expanded.ids[run.offset - 1], expanded.ids[run.offset + run.length]) == (START, END)


def test_bounds_of_a_checkpoint_without_preprocessor_config() -> None:
    """The reference class's own: 56x56 and 28x28x1280."""
    settings: Any = FAMILY.settings(BundleConfig({}))
    assert (settings.patch, settings.merge, settings.temporal) == (14, 2, 2)
    assert (settings.min_pixels, settings.max_pixels) == (56 * 56, 28 * 28 * 1280)
    assert FAMILY.measure(settings, PICTURE, Source(4000, 4000)).feature_tokens == 35 * 35


def test_what_it_takes() -> None:
    for name in BUNDLES:
        assert served(name).family is FAMILY
        assert served(name).anchors.keys() == {PICTURE}
        assert served(name).guarded() == {Modality.VIDEO: 151656}
    assert FAMILY.limits == {PICTURE: 10}
    assert FAMILY.worker_side == frozenset()
    with pytest.raises(MediaError, match="qwen_vl takes no video here"):
        FAMILY.measure(FAMILY.settings(BundleConfig({})), Modality.VIDEO, Source(64, 64, 4))
    with pytest.raises(FamilyError, match="qwen_vl has no token for audio"):
        FAMILY.feature_token(BundleConfig({}), vocabulary(), Modality.AUDIO)


def test_anchor_is_the_pad_and_never_smg_s_image_token() -> None:
    words = vocabulary(**{"<image>": 999, "<|image_pad|>": PAD, "<|vision_pad|>": 151654})
    config = BundleConfig({"image_token_id": PAD, "vision_token_id": 151654})
    assert FAMILY.anchor(config, words, PICTURE).text == "<|image_pad|>"
    assert FAMILY.feature_token(config, words, PICTURE) == PAD
    with pytest.raises(FamilyError, match=r"image placeholder token '<\|image_pad\|>' is missing"):
        FAMILY.anchor(config, vocabulary(**{"<image>": 999}), PICTURE)


def test_thin_pictures_are_refused() -> None:
    with pytest.raises(MediaError, match="side ratio of 201.0, above the limit of 200"):
        served("qwen2_vl").measure(3, 603)


def test_layout() -> None:
    assert FAMILY.layout(PICTURE) == Layout(
        batched=("image_grid_thw", "patches_per_image"),
        flat={"pixel_values": "patches_per_image"},
        keep_on_cpu=("image_grid_thw",),
    )
    assert set(served("qwen2_vl").measure(56, 56).side) == {"image_grid_thw", "patches_per_image"}
