"""MiniMax-M3 pictures against the reference processor's own fingerprints; the long-side mode; markers in the prompt."""

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engines.base import Layout, Modality, Range
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, FamilyError, Hints, MediaError, Source
from pipeline.models.minimax_m3 import long_side_sizes
from tests.models.served import Served, equals_reference, picture_cases, vocabulary

FAMILY = by_name("minimax_m3")
PICTURE = Modality.IMAGE
PAD, START, END = 200025, 200029, 200030

served = functools.cache(lambda: Served("minimax_m3"))


@pytest.mark.parametrize("case", picture_cases("minimax_m3"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(case: Any) -> None:
    equals_reference(served(), case)


@pytest.mark.parametrize("case", picture_cases("minimax_m3_long_side"), ids=lambda case: case["name"])
def test_long_side_mode_equals_vllm(case: Any) -> None:
    equals_reference(served(), case)


@pytest.mark.parametrize(
    ("height", "width", "tokens"), [(28, 28, 4), (56, 84, 6), (1080, 1920, 576), (2048, 2048, 576), (40, 200, 7)]
)
def test_token_counts(height: int, width: int, tokens: int) -> None:
    """At most 672x672 pixels, and no least short side: 40x200 stays 28x196."""
    measured = served().measure(height, width)
    assert measured.feature_tokens == tokens
    assert measured.primary_shape == (4 * tokens, 1176)


@pytest.mark.parametrize(("cap", "tokens"), [(252, 81), (504, 324), (1008, 1296)])
def test_long_side_sets_the_size_beyond_the_usual_bound(cap: int, tokens: int) -> None:
    """The figures of vLLM's own tests of this mode, for a picture of 2048x2048."""
    assert served().measure(2048, 2048, hints=Hints(max_long_side=cap)).feature_tokens == tokens


@pytest.mark.parametrize(
    ("height", "width", "cap", "expected"),
    [
        (2048, 1024, 1008, (1008, 504)),  # (a) longer than the cap: shrunk to it
        (200, 40, 1008, (560, 112)),  # (b) a short side below 112: enlarged
        (1100, 40, 1008, (1008, 28)),  # (a) and (b) exclude each other, on the picture's own long side
        (111, 1008, 1008, (112, 1008)),
        (112, 300, 1008, (112, 308)),  # neither
        (3000, 100, 280, (280, 28)),  # a side is never less than a cell
    ],
)
def test_long_side_mode(height: int, width: int, cap: int, expected: tuple[int, int]) -> None:
    assert served().measure(height, width, hints=Hints(max_long_side=cap)).resized == expected


def test_long_side_mode_refuses_what_stays_too_large() -> None:
    with pytest.raises(MediaError, match="16032016 pixels with max_long_side_pixel 4004, above the limit of 12845056"):
        served().measure(5000, 5000, hints=Hints(max_long_side=4004))
    assert served().measure(5000, 5000, hints=Hints(max_long_side=3584)).feature_tokens == 128 * 128
    with pytest.raises(MediaError, match="side ratio of 201.0"):
        served().measure(3, 603, hints=Hints(max_long_side=280))


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 128))
def test_long_side_mode_keeps_its_promises(height: int, width: int, cells: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    cap = 28 * cells
    try:
        found = long_side_sizes(height, width, factor=28, cap=cap)
    except MediaError:  # thin pictures that grow: 112 x 22,400 at most
        assert max(height, width) <= cap
        return
    assert all(side % 28 == 0 and side >= 28 for side in found)
    assert math.prod(found) <= 12_845_056
    if max(height, width) > cap:
        assert max(found) == cap
    else:
        assert min(found) >= 112


def test_long_side_mode_resizes_the_full_picture_once() -> None:
    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (300, 200, 3), np.uint8))
    measured, out = served().encode(picture, hints=Hints(max_long_side=112))
    assert measured.resized == (112, 84)
    once = Served("minimax_m3").encode(picture.resize((84, 112), Image.Resampling.BICUBIC))
    assert measured == once[0]
    assert np.array_equal(out, once[1])


def test_prompt_of_two_pictures() -> None:
    text, ids, expanded = served().prompt(["One ", (56, 84), " two ", (112, 28), "?"])
    assert text == "]~b]user\nOne ]<]image[>[ two ]<]image[>[?[e~[\n]~b]ai\n"
    first, second = (position for position, token in enumerate(ids) if token == PAD)
    one, two = [START, *[PAD] * 6, END], [START, *[PAD] * 4, END]
    assert expanded.ids == [*ids[:first], *one, *ids[first + 1 : second], *two, *ids[second + 1 :]]
    assert expanded.structural == [Range(first, 8), Range(second + 7, 6)]
    assert expanded.features == [(Range(first + 1, 6),), (Range(second + 8, 4),)]


@pytest.mark.parametrize(
    ("preprocessor", "cell"),
    [
        ({}, (14, 2, 2)),
        ({"img_token_compression_config": None}, (14, 2, 2)),
        ({"img_token_compression_config": {"spatial_merge_size": 4, "temporal_patch_size": 1}}, (14, 4, 1)),
        ({"img_token_compression_config": {"spatial_merge_size": 4}, "merge_size": 2}, (14, 2, 2)),
        ({"temporal_patch_size": 4}, (14, 2, 4)),
    ],
)
def test_sizes_of_cells(preprocessor: Any, cell: tuple[int, int, int]) -> None:
    settings: Any = FAMILY.settings(BundleConfig({}, preprocessor))
    assert (settings.patch, settings.merge, settings.temporal) == cell


@pytest.mark.parametrize(
    ("nested", "reason"),
    [
        ({"spatial_merge_size": 0}, "spatial_merge_size must be a positive whole number, got 0"),
        ({"temporal_patch_size": "2"}, "temporal_patch_size must be a positive whole number, got '2'"),
        ([], r"img_token_compression_config must be an object, got \[\]"),
    ],
)
def test_cells_that_cannot_be_used(nested: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        FAMILY.settings(BundleConfig({}, {"img_token_compression_config": nested, "merge_size": 2}))


def test_a_list_of_sizes_is_ignored() -> None:
    """The checkpoint states [672, 672] and does not mean it."""
    assert served().config.preprocessor["size"] == [672, 672]
    assert (served().settings.min_pixels, served().settings.max_pixels) == (3136, 451_584)


@pytest.mark.parametrize("lacking", ["]<]image[>[", "]<]start of image[>[", "]<]end of image[>["])
def test_missing_tokens_are_named(lacking: str) -> None:
    words = {"]<]image[>[": 1, "]<]start of image[>[": 2, "]<]end of image[>[": 3}
    del words[lacking]
    with pytest.raises(FamilyError) as refused:
        FAMILY.anchor(BundleConfig({}), vocabulary(**words), PICTURE)
    assert str(refused.value) == f"image placeholder token '{lacking}' is missing from the tokenizer vocabulary"


def test_what_it_takes() -> None:
    assert served().family is FAMILY
    assert served().anchors.keys() == {PICTURE, Modality.VIDEO}
    assert served().guarded() == {}
    assert FAMILY.limits == {PICTURE: 200, Modality.VIDEO: 20}
    assert FAMILY.worker_side == {PICTURE, Modality.VIDEO}
    with pytest.raises(MediaError, match="minimax_m3 takes no audio here"):
        FAMILY.measure(served().settings, Modality.AUDIO, Source(64, 64, 4))


def test_layout() -> None:
    assert FAMILY.layout(PICTURE) == Layout(
        batched=("image_grid_thw", "patches_per_image"),
        flat={"pixel_values": "patches_per_image"},
        keep_on_cpu=("image_grid_thw", "video_grid_thw"),
    )
