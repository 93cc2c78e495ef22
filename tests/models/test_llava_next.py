"""LLaVA-NeXT pictures against transformers' fingerprints; canvases, tokens, and the tiles of a whole request."""

import hashlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline import models
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.served import Served, picture_cases, through_png

PICTURE = Modality.IMAGE
ANCHOR = 32000


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("llava_next")


@pytest.mark.parametrize("case", picture_cases("llava_next"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(served: Served, case: Any) -> None:
    expected = case["backends"]["torchvision"]
    measured, out = served.encode(through_png(case))
    tensor = expected["tensors"]["pixel_values"]
    assert measured.side["image_sizes"].values == tuple(expected["tensors"]["image_sizes"]["values"][0])
    assert measured.feature_tokens == expected["num_tokens"][0]
    assert list(measured.primary_shape) == tensor["shape"]
    assert out.view(np.float32)[:8].tolist() == tensor["first8"]
    assert hashlib.sha256(out).hexdigest() == tensor["sha256"]


@pytest.mark.parametrize(
    ("height", "width", "canvas"),
    [
        (10, 20, (336, 672)),  # every canvas keeps all: the first of the smallest
        (20, 10, (336, 672)),
        (300, 300, (336, 672)),
        (500, 300, (672, 336)),
        (1080, 1920, (672, 672)),
        (3000, 300, (1008, 336)),
        (1, 5000, (336, 672)),  # no canvas keeps a pixel: the smallest
    ],
)
def test_canvas(served: Served, height: int, width: int, canvas: tuple[int, int]) -> None:
    assert served.measure(height, width).resized == canvas


@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [
        (336, 672, 576 + 24 * 48 + 24),
        (672, 672, 576 + 48 * 48 + 48),
        (1080, 1920, 576 + 28 * 48 + 28),  # 27 rows of the canvas are picture, 20 of 21 others are cut
        (1, 5000, 576),  # nothing of the tiles is left
    ],
)
def test_tokens(served: Served, height: int, width: int, tokens: int) -> None:
    assert served.measure(height, width).feature_tokens == tokens


def test_pictures_of_a_request_have_as_many_tiles_as_the_largest(served: Served) -> None:
    sizes = [(300, 300), (1080, 1920), (500, 300)]
    alone = [served.measure(*size) for size in sizes]
    assert [item.primary_shape[1] for item in alone] == [3, 5, 3]
    together = served.family.reconcile(served.settings, PICTURE, alone)
    assert [item.primary_shape for item in together] == [(1, 5, 3, 336, 336)] * 3
    assert [item.feature_tokens for item in together] == [item.feature_tokens for item in alone]
    assert [item.side for item in together] == [item.side for item in alone]
    assert served.family.reconcile(served.settings, PICTURE, alone[:1]) == alone[:1]

    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (300, 300, 3), np.uint8))
    padded = np.full(5 * 3 * 336 * 336, np.nan, np.float32)
    served.family.encode(served.settings, PICTURE, picture, together[0], Form(), padded.view(np.uint8))
    tiles = served.encode(picture)[1].view(np.float32)
    assert np.array_equal(padded[: tiles.size], tiles) and not padded[tiles.size :].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8"])
def test_other_forms(served: Served, dtype: str) -> None:
    picture = through_png(picture_cases("llava_next")[2])
    measured, wide = served.encode(picture)
    values = wide.view(np.float32).reshape(measured.primary_shape)
    found = served.encode(picture, Form(dtype, normalised=dtype != "uint8"))[1]
    if dtype == "float16":
        assert np.array_equal(found.view(np.float16).reshape(values.shape), values.astype(np.float16))
    elif dtype == "bfloat16":
        bits = values.view(np.uint32).astype(np.uint64)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert np.array_equal(found.view(np.uint16).reshape(values.shape), nearest_even)
    else:
        mean = np.array([0.48145466, 0.4578275, 0.40821073]).reshape(3, 1, 1)
        std = np.array([0.26862954, 0.26130258, 0.27577711]).reshape(3, 1, 1)
        assert np.array_equal(found.reshape(values.shape), np.rint((values * std + mean) * 255))


def test_prompt_of_two_pictures(served: Served) -> None:
    text, ids, expanded = served.prompt(["A ", (10, 10), "B ", (1080, 1920)])
    assert text == "USER: A <image>\nB <image>\n ASSISTANT:"
    counts = [served.measure(10, 10).feature_tokens, served.measure(1080, 1920).feature_tokens]
    first = ids.index(ANCHOR)
    second = ids.index(ANCHOR, first + 1) - 1 + counts[0]
    assert expanded.structural == [Range(first, counts[0]), Range(second, counts[1])]
    assert expanded.features == [(Range(first, counts[0]),), (Range(second, counts[1]),)]
    assert len(expanded.ids) == len(ids) - 2 + sum(counts)


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(batched=("pixel_values", "image_sizes"))
    assert served.family.limits == {PICTURE: 4} and served.family.worker_side == frozenset()
    cases = [("x", "llava_next"), ("llava-next-72b", ""), ("llava_next_x", None), ("llava-v1.6-mistral-7b-hf", None)]
    for name, kind in cases:
        found = models.family_of(name, kind)
        assert found is not None and found.name == "llava_next"


def test_pinpoints_of_the_model_when_the_preprocessor_has_none(served: Served) -> None:
    settings = served.family.settings(BundleConfig({"image_grid_pinpoints": [[336, 336]]}))
    assert served.family.measure(settings, PICTURE, Source(9, 9)).primary_shape == (1, 2, 3, 336, 336)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"image_grid_pinpoints": [[336, 500]]}, r"must be pairs of multiples of 336, got \[336, 500\]"),
        ({"image_grid_pinpoints": [336]}, "must be pairs of multiples of 336, got 336"),
        ({"image_grid_pinpoints": "all"}, "must be pairs of multiples of 336, got 'all'"),
        ({"crop_size": {"height": 224, "width": 224}}, "size 336 and crop_size 224 differ"),
        ({"resample": 5}, "resample must be 3"),
    ],
)
def test_settings_that_cannot_be_used(served: Served, values: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        served.family.settings(BundleConfig({}, values))


def test_what_is_refused(served: Served) -> None:
    with pytest.raises(MediaError, match="llava_next takes no video"):
        served.family.measure(served.settings, Modality.VIDEO, Source(64, 64, 4))
    with pytest.raises(MediaError, match="has no area"):
        served.measure(0, 9)
