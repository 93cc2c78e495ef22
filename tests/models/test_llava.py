"""LLaVA 1.5 pictures against transformers' fingerprints; crops, padding, prompt and layout."""

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
ANCHOR = 32000


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("llava15")


@pytest.mark.parametrize("case", picture_cases("llava15"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(served: Served, case: Any) -> None:
    expected = case["backends"]["torchvision"]
    measured, out = served.encode(through_png(case))
    tensor = expected["tensors"]["pixel_values"]
    assert list(measured.primary_shape) == tensor["shape"] == [1, 3, 336, 336]
    assert measured.feature_tokens == expected["num_tokens"][0] and not measured.side
    assert out.view(np.float32)[:8].tolist() == tensor["first8"]
    assert hashlib.sha256(out).hexdigest() == tensor["sha256"]


@pytest.mark.parametrize("size", [(335, 500), (337, 333), (1000, 999), (336, 337)], ids=str)
def test_the_middle_square_of_the_cut_off_long_side(served: Served, size: tuple[int, int]) -> None:
    height, width = size
    pixels = np.random.default_rng(2).integers(0, 256, (height, width, 3), np.uint8)
    raw = served.encode(Image.fromarray(pixels), Form("uint8", normalised=False))[1].reshape(3, 336, 336)
    long = 336 * max(size) // min(size)
    full = (long, 336) if width >= height else (336, long)
    resized = np.asarray(Image.fromarray(pixels).resize(full, Image.Resampling.BICUBIC))
    cut = (long - 336) // 2
    square = resized[:, cut : cut + 336] if width >= height else resized[cut : cut + 336]
    assert np.array_equal(raw.transpose(1, 2, 0), square)


@pytest.mark.parametrize("ask", ["preprocessor", "config"])
def test_padding_to_a_square_of_the_mean(ask: str) -> None:
    served = Served("llava15", {"do_pad": True} if ask == "preprocessor" else None)
    if ask == "config":
        config = {**served.config.config, "image_aspect_ratio": "pad"}
        served.settings = served.family.settings(BundleConfig(config, served.config.preprocessor))
    raw = served.encode(Image.new("RGB", (672, 335), (255, 0, 0)), Form("uint8", normalised=False))[1]
    square = raw.reshape(3, 336, 336).transpose(1, 2, 0)
    assert (square[:80] == (122, 116, 104)).all() and (square[-80:] == (122, 116, 104)).all()
    assert (square[100:-100] == (255, 0, 0)).all()


def test_narrow_form(served: Served) -> None:
    picture = through_png(picture_cases("llava15")[2])
    wide = served.encode(picture)[1].view(np.float32)
    assert np.array_equal(served.encode(picture, Form("float16"))[1].view(np.float16), wide.astype(np.float16))


def test_prompt_of_two_pictures(served: Served) -> None:
    text, ids, expanded = served.prompt(["Two: ", (10, 10), (700, 30), "?"])
    assert text == "USER: Two: <image>\n<image>\n? ASSISTANT:"
    first = ids.index(ANCHOR)
    second = ids.index(ANCHOR, first + 1) + 575
    assert expanded.structural == [Range(first, 576), Range(second, 576)]
    assert expanded.features == [(Range(first, 576),), (Range(second, 576),)]
    assert len(expanded.ids) == len(ids) + 2 * 575


def test_the_class_token_counts_where_it_is_kept(served: Served) -> None:
    config = {**served.config.config, "vision_feature_select_strategy": "full"}
    settings = served.family.settings(BundleConfig(config, served.config.preprocessor))
    assert served.family.measure(settings, PICTURE, Source(9, 9)).feature_tokens == 577


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(batched=("pixel_values",))
    assert served.family.limits == {PICTURE: 4} and served.family.worker_side == frozenset()
    cases = [("llava-hf/llava-1.5-7b-hf", None), ("x", "llava"), ("liuhaotian/llava-v1.5-13b", "llava_llama")]
    for name, kind in cases:
        found = models.family_of(name, kind)
        assert found is not None and found.name == "llava"
    anchor = served.family.anchor(BundleConfig({}), vocabulary(**{"<image>": 9}), PICTURE)
    assert (anchor.token_id, anchor.text) == (9, "<image>")


@pytest.mark.parametrize("kind", ["llava_onevision", "video_llava", "vipllava", "llava_next_video"])
def test_other_models_of_that_name_are_not_served_with_wrong_pixels(served: Served, kind: str) -> None:
    found = models.family_of(f"{kind}-7b", kind)
    assert found is not None
    with pytest.raises(FamilyError, match=f"model_type {kind} is not a LLaVA"):
        found.settings(BundleConfig({"model_type": kind}))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"size": {"shortest_edge": 224}, "crop_size": 336}, "336 pixels cannot be cut"),
        ({"do_center_crop": False}, "llava needs do_resize and do_center_crop"),
        ({"resample": 0}, "resample must be 3"),
        ({"size": "big"}, "size must be a positive whole number, got 'big'"),
        ({"image_std": 0}, "image_std must not hold 0"),
    ],
)
def test_settings_that_cannot_be_used(served: Served, values: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        served.family.settings(BundleConfig({}, values))


def test_what_is_refused(served: Served) -> None:
    assert served.measure(3, 600).feature_tokens == 576
    with pytest.raises(MediaError, match=r"603x3 pixels has a side ratio of 201.0, above the limit of 200"):
        served.measure(3, 603)
    with pytest.raises(MediaError, match="llava takes no video"):
        served.family.measure(served.settings, Modality.VIDEO, Source(64, 64, 4))
    with pytest.raises(FamilyError, match="token '<image>' is missing"):
        served.family.anchor(BundleConfig({}), vocabulary(), PICTURE)
