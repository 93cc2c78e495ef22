"""GLM-5.3-Flash pictures against the reference processor's own fingerprints; canvas and content; prompt, layout."""

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from pipeline.models.glm53_flash import Glm53Flash, GlmSettings, fit
from tests.models.served import Served, equals_reference, picture_cases, vocabulary

FAMILY = by_name("glm53_flash")
PICTURE = Modality.IMAGE
PAD, START, END = 154854, 154830, 154831

served = functools.cache(lambda: Served("glm53_flash"))


@pytest.mark.parametrize("case", picture_cases("glm53_flash"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(case: Any) -> None:
    equals_reference(served(), case)


@pytest.mark.parametrize(
    ("height", "width", "canvas", "content"),
    [
        (300, 250, (308, 252), (300, 250)),  # as it is, on whole cells
        (48, 64, (112, 140), (105, 140)),  # below 16 tokens: enlarged
        (112, 112, (112, 112), (112, 112)),  # 16 tokens exactly
        (1283, 1920, (1288, 1932), (1283, 1920)),
        (4000, 3000, (2884, 2156), (2874, 2156)),  # above 8,000 tokens: shrunk
        (10, 900, (28, 924), (10, 924)),
    ],
)
def test_canvas_and_content(height: int, width: int, canvas: tuple[int, int], content: tuple[int, int]) -> None:
    assert fit(height, width, served().settings, frames=2) == (canvas, content)
    assert served().measure(height, width).feature_tokens == math.prod(canvas) // 784


def textbook(height: int, width: int, factor: int, low: int, high: int, frames: int) -> tuple[int, int]:
    """The canvas by trying every height of content."""

    def up(side: float) -> int:
        return math.ceil(side / factor) * factor

    depth = max(2, round(frames / 2) * 2)
    canvas = up(height), up(width)
    if depth * math.prod(canvas) < low:
        grow = math.sqrt(low / (frames * height * width))
        canvas = up(math.ceil(height * grow)), up(math.ceil(width * grow))
    if depth * math.prod(canvas) > high:
        canvas = factor, factor
        for content in range(1, height + 1):
            tried = up(content), up(max(1, width * content // height))
            if depth * math.prod(tried) <= high:
                canvas = tried
    return canvas


@given(
    st.integers(1, 900),
    st.integers(1, 900),
    st.sampled_from([(1, 16, 8000), (2, 16, 500), (1, 64, 100), (1, 1, 1)]),
    st.integers(1, 9),
)
def test_canvas_equals_the_textbook(height: int, width: int, bounds: tuple[int, int, int], frames: int) -> None:
    expand, least, most = bounds
    values = {"patch_expand_factor": expand, "min_image_tokens": least, "max_image_tokens": most}
    settings = Glm53Flash().settings(BundleConfig({}, values))
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(MediaError):
            fit(height, width, settings, frames=frames)
        return
    factor = 28 * expand
    canvas, content = fit(height, width, settings, frames=frames)
    assert canvas == textbook(height, width, factor, least * 2 * factor**2, most * 2 * factor**2, frames)
    assert all(1 <= inner <= outer for inner, outer in zip(content, canvas, strict=True))


def test_outside_the_content_is_black_before_normalising() -> None:
    white = Image.new("RGB", (250, 300), (255, 255, 255))
    measured, raw = served().encode(white, Form("uint8", normalised=False))
    assert measured.resized == (308, 252)
    patches = raw.reshape(11, 9, 2, 2, 3, 2, 14, 14)
    canvas = patches[:, :, :, :, 0, 1].transpose(0, 2, 4, 1, 3, 5).reshape(308, 252)
    assert (canvas[:300, :250] == 255).all()
    assert not canvas[300:].any() and not canvas[:, 250:].any()
    wide = served().encode(white)[1].view(np.float32)
    black = [
        np.float32(-mean) / np.float32(std)
        for mean, std in zip((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), strict=True)
    ]
    assert wide.reshape(-1, 3, 2, 14, 14)[-1, :, 1, 13, 13].tolist() == pytest.approx(black, abs=1e-6)


def test_prompt_of_two_pictures_as_written() -> None:
    text, ids, expanded = served().prompt(["One ", (112, 140), " two ", (112, 112), "?"])
    markers = "<|begin_of_image|><|image|><|end_of_image|>"
    assert text == f"[gMASK]<sop><|user|>\nOne {markers} two {markers}?<|assistant|>\n"
    first, second = (position for position, token in enumerate(ids) if token == PAD)
    assert expanded.ids == [*ids[:first], *[PAD] * 20, *ids[first + 1 : second], *[PAD] * 16, *ids[second + 1 :]]
    assert expanded.structural == [Range(first, 20), Range(second + 19, 16)]
    assert expanded.features == [(Range(first, 20),), (Range(second + 19, 16),)]
    for run in expanded.structural:
        assert (expanded.ids[run.offset - 1], expanded.ids[run.offset + run.length]) == (START, END)


@pytest.mark.parametrize(
    ("preprocessor", "bounds"),
    [
        ({}, (16 * 1568, 8000 * 1568)),
        ({"min_image_tokens": 4, "max_image_tokens": 10}, (4 * 1568, 10 * 1568)),
        ({"patch_expand_factor": 2}, (16 * 6272, 8000 * 6272)),
        ({"min_pixels": 5000, "max_pixels": 9000}, (5000, 9000)),
    ],
)
def test_volume_bounds(preprocessor: Any, bounds: tuple[int, int]) -> None:
    """Two frames of 28x28 pixels are a token's 1,568."""
    settings = FAMILY.settings(BundleConfig({}, preprocessor))
    assert isinstance(settings, GlmSettings)
    assert (settings.min_pixels, settings.max_pixels) == bounds


@pytest.mark.parametrize(
    ("preprocessor", "reason"),
    [
        ({"patch_expand_factor": 0}, "patch_expand_factor must be a positive whole number, got 0"),
        ({"max_image_tokens": "many"}, "max_image_tokens must be a positive whole number, got 'many'"),
        ({"min_image_tokens": 20, "max_image_tokens": 10}, "min_pixels 31360 is above max_pixels 15680"),
        ({"min_pixels": 1, "max_pixels": 1567}, "max_pixels 1567 is too small for one cell of 28 pixels a side"),
    ],
)
def test_settings_that_cannot_be_used(preprocessor: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        FAMILY.settings(BundleConfig({}, preprocessor))


def test_anchor_and_feature_token_may_differ() -> None:
    words = vocabulary(**{"<|image|>": 5, "<|patch|>": 9})
    config = BundleConfig({"image_token_id": 9})
    assert FAMILY.anchor(config, words, PICTURE).token_id == 5
    assert FAMILY.feature_token(config, words, PICTURE) == 9
    with pytest.raises(FamilyError, match=r"image placeholder token '<\|image\|>' is missing"):
        FAMILY.anchor(config, vocabulary(**{"<|patch|>": 9}), PICTURE)


def test_pictures_only_where_the_config_names_their_token() -> None:
    assert FAMILY.modalities(BundleConfig({"image_token_id": 1})) == {PICTURE}
    assert FAMILY.modalities(BundleConfig({"image_token_id": 1, "video_token_id": 2})) == {PICTURE, Modality.VIDEO}
    assert FAMILY.modalities(BundleConfig({"image_token_id": None, "video_token_id": 2})) == frozenset()
    assert FAMILY.modalities(BundleConfig({})) == frozenset()


def test_what_it_takes() -> None:
    assert served().family is FAMILY
    assert served().anchors.keys() == {PICTURE, Modality.VIDEO}
    assert served().guarded() == {}
    assert FAMILY.limits == {PICTURE: 10, Modality.VIDEO: 1}
    assert FAMILY.worker_side == {PICTURE}
    with pytest.raises(MediaError, match="glm53_flash takes no audio here"):
        FAMILY.measure(served().settings, Modality.AUDIO, Source(64, 64, 4))
    with pytest.raises(MediaError, match="side ratio of 201.0"):
        served().measure(603, 3)


def test_layout() -> None:
    assert FAMILY.layout(PICTURE) == Layout(
        batched=("image_grid_thw", "patches_per_image"),
        flat={"pixel_values": "patches_per_image"},
        keep_on_cpu=("image_grid_thw", "video_grid_thw"),
    )
