"""Qwen3-VL pictures against the reference processor's own fingerprints; settings, prompt and layout."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from pipeline.transforms import Normalisation
from tests.models.served import Served, equals_reference, picture_cases, through_png, vocabulary

DATA = Path(__file__).parent.parent / "data"
QWEN3 = picture_cases("qwen3_vl")
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
FAMILY = by_name("qwen3_vl")
PICTURE = Modality.IMAGE
FLOAT32 = Form()


def encode(preprocessor: Any, picture: Image.Image, form: Form = FLOAT32) -> tuple[Any, np.ndarray]:
    settings = FAMILY.settings(BundleConfig({}, preprocessor))
    measured = FAMILY.measure(settings, PICTURE, Source(picture.height, picture.width))
    width = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}[form.dtype]
    out = np.full(math.prod(measured.primary_shape) * width, 0xA5, np.uint8)
    FAMILY.encode(settings, PICTURE, picture, measured, form, out)
    return measured, out


@pytest.mark.parametrize("case", QWEN3, ids=lambda case: case["name"])
def test_pixels_equal_the_reference(case: Any) -> None:
    equals_reference(Served("qwen3_vl"), case)


@pytest.mark.parametrize("preprocessor", [{}, CLIP], ids=["equal_channels", "clip"])
def test_narrow_types_are_the_rounded_float32(preprocessor: Any) -> None:
    picture = through_png(next(case for case in QWEN3 if case["name"] == "odd"))
    wide = encode(preprocessor, picture)[1].view(np.float32)
    half = encode(preprocessor, picture, Form("float16"))[1].view(np.float16)
    assert np.array_equal(half, wide.astype(np.float16))
    brain = encode(preprocessor, picture, Form("bfloat16"))[1].view(np.uint16)
    bits = wide.view(np.uint32).astype(np.uint64)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    assert np.array_equal(brain, nearest_even.astype(np.uint16))


def test_a_worker_that_normalises_gets_the_resized_bytes() -> None:
    picture = through_png(next(case for case in QWEN3 if case["name"] == "odd"))
    wide = encode({}, picture)[1].view(np.float32)
    measured, raw = encode({}, picture, Form("uint8", normalised=False))
    assert np.array_equal(raw, np.rint(wide * 127.5 + 127.5).astype(np.uint8))
    height, width = measured.resized
    resized = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    assert np.array_equal(raw[:16], resized[0, :16, 0])


def test_values_of_every_byte() -> None:
    """The reference computes `(x - 127.5) / 127.5` in float32."""
    table = Normalisation.of([0.5] * 3, [0.5] * 3).table()
    expected = (np.arange(256, dtype=np.float32) - np.float32(127.5)) / np.float32(127.5)
    assert np.array_equal(table, np.broadcast_to(expected, (3, 256)))


@pytest.mark.parametrize(
    ("preprocessor", "value"),
    [
        ({"do_normalize": False}, np.float32(200) * np.float32(1 / 255)),
        ({"do_normalize": False, "do_rescale": False}, np.float32(200)),
        ({"do_rescale": False}, (np.float32(200) - np.float32(0.5)) / np.float32(0.5)),
        ({"image_mean": 0.25, "image_std": [0.5, 0.5, 0.5]}, (np.float32(200) - np.float32(63.75)) / np.float32(127.5)),
    ],
)
def test_steps_that_are_switched_off(preprocessor: Any, value: np.float32) -> None:
    out = encode(preprocessor, Image.new("RGB", (256, 256), (200, 200, 200)))[1].view(np.float32)
    assert (out == value).all()


@pytest.mark.parametrize(
    ("preprocessor", "bounds"),
    [
        ({}, (65536, 16777216)),
        ({"size": {"shortest_edge": 1024, "longest_edge": 4096}}, (1024, 4096)),
        ({"size": {"shortest_edge": 1024, "longest_edge": 4096}, "max_pixels": 9216}, (1024, 9216)),
        ({"min_pixels": None, "size": [448, 448]}, (65536, 16777216)),
    ],
)
def test_pixel_bounds(preprocessor: Any, bounds: tuple[int, int]) -> None:
    settings = FAMILY.settings(BundleConfig({}, preprocessor))
    assert (settings.min_pixels, settings.max_pixels) == bounds  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("preprocessor", "reason"),
    [
        ({"patch_size": 0}, "patch_size must be a positive whole number, got 0"),
        ({"patch_size": 15}, "patch_size 15 is odd"),
        ({"merge_size": "2"}, "merge_size must be a positive whole number, got '2'"),
        ({"min_pixels": 100, "max_pixels": 50}, "min_pixels 100 is above max_pixels 50"),
        ({"max_pixels": True}, "max_pixels must be a positive whole number"),
        ({"resample": 0}, "resample must be 3"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"image_std": ["a", 1, 1]}, "image_std must be three numbers"),
        ({"rescale_factor": 0}, "rescale_factor must be a positive number"),
        ({"do_resize": False}, "do_resize false is not supported"),
    ],
)
def test_settings_that_cannot_be_used(preprocessor: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        FAMILY.settings(BundleConfig({}, preprocessor))


def test_anchor_is_the_token_the_config_names() -> None:
    bundle = BundleConfig({"image_token_id": 7})
    anchor = FAMILY.anchor(bundle, vocabulary(**{"<|picture|>": 7}), PICTURE)
    assert (anchor.token_id, anchor.text) == (7, "<|picture|>")


def test_anchor_of_a_config_without_ids() -> None:
    anchor = FAMILY.anchor(BundleConfig({}), vocabulary(**{"<|image_pad|>": 9}), PICTURE)
    assert (anchor.token_id, anchor.text) == (9, "<|image_pad|>")


@pytest.mark.parametrize("config", [{}, {"image_token_id": 7}])
def test_missing_anchor_is_named(config: Any) -> None:
    reason = "image placeholder token '<|image_pad|>' is missing from the tokenizer vocabulary"
    with pytest.raises(FamilyError) as refused:
        FAMILY.anchor(BundleConfig(config), vocabulary(), PICTURE)
    assert str(refused.value) == reason


def test_replacement_is_one_run_of_pads() -> None:
    settings = FAMILY.settings(BundleConfig({}))
    measured = FAMILY.measure(settings, PICTURE, Source(1080, 1920))
    found = FAMILY.replacement(BundleConfig({"image_token_id": 5}), vocabulary(), PICTURE, measured)
    assert found.token_ids == (5,) * 2040
    assert (found.features, found.prefix) == (((0, 2040),), 0)


def test_layout_lists_the_keys_the_records_list() -> None:
    record = json.loads((DATA / "pictures" / "golden.json").read_text())["png_rgb_256.png"]
    layout = FAMILY.layout(PICTURE)
    assert isinstance(layout, Layout)
    assert set(layout.batched) == set(record["batched_keys"])
    assert layout.flat == record["flat_keys"]
    assert set(layout.keep_on_cpu) == set(record["keep_on_cpu_keys"])


def test_side_ratio_above_200_is_refused() -> None:
    settings = FAMILY.settings(BundleConfig({}))
    assert FAMILY.measure(settings, PICTURE, Source(3, 600)).feature_tokens == 114
    with pytest.raises(MediaError, match=r"603x3 pixels has a side ratio of 201.0, above the limit of 200"):
        FAMILY.measure(settings, PICTURE, Source(3, 603))


def test_clips_need_their_token() -> None:
    assert FAMILY.modalities(BundleConfig({"video_token_id": 6})) == {PICTURE, Modality.VIDEO}
    assert FAMILY.modalities(BundleConfig({})) == {PICTURE}
    with pytest.raises(MediaError, match="this model takes no clips"):
        FAMILY.measure(FAMILY.settings(BundleConfig({})), Modality.VIDEO, Source(64, 64, 4))
