"""Kimi-K3 pictures against the direct vectors within 3 levels; its chessboard; the markers of its prompt."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Layout, Modality, Range
from pipeline import models
from pipeline.models.base import BundleConfig, FamilyError
from pipeline.models.kimi_k3 import over_chessboard
from tests.models.direct import apart, decoded, drawn, levels, unpatched
from tests.models.served import Served, picture_cases, vocabulary
from tests.models.stock_pillow import bicubic, resize, resize_rgba
from tests.models.synthetic import digest

PICTURE = Modality.IMAGE
BEGIN, CONTENT, END, PAD = 163602, 163603, 163604, 163605


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("kimi_k3")


def over_board(rgba: np.ndarray) -> np.ndarray:
    """The rule in plain arithmetic: [height, width, 4] to [height, width, 3]."""
    rows, columns = np.indices(rgba.shape[:2]) // 8
    board = np.where((rows + columns) % 2, np.float32(180), np.float32(255))[..., None]
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    return (alpha * rgba[..., :3].astype(np.float32) + (1 - alpha) * board).astype(np.uint8)


def stock(picture: Image.Image, height: int, width: int) -> np.ndarray:
    pixels = np.asarray(picture)
    if picture.mode == "RGBA":
        return over_board(resize_rgba(pixels, height, width))
    return resize(pixels, height, width, bicubic)


@pytest.mark.parametrize("case", picture_cases("kimi_k3"), ids=lambda case: case["name"])
def test_pixels_are_within_three_levels(served: Served, case: Any) -> None:
    expected = case["backends"]["direct"]
    picture = decoded(drawn(case), keep_alpha=True)
    width, height = expected["resized_width_height"]
    reference = stock(picture, height, width)
    assert digest(Image.fromarray(reference)) == expected["resized_u8_sha256"]

    measured, out = served.encode(picture)
    tensor = expected["tensors"]["pixel_values"]
    assert list(measured.primary_shape) == tensor["shape"]
    assert measured.side["grid_thws"].values == tuple(expected["tensors"]["grid_thws"]["values"][0])
    assert measured.feature_tokens == expected["num_tokens"][0]
    values = out.view(np.float32)
    assert np.abs(values[:8] - tensor["first8"]).max() < 3 / 127 and np.abs(values[-8:] - tensor["last8"]).max() < 3e-7
    _, rows, columns = measured.side["grid_thws"].values
    canvas = levels(unpatched(values.reshape(measured.primary_shape), int(rows), int(columns)), 0.5, 0.5)
    assert not canvas[height:].any() and not canvas[:, width:].any()
    assert apart(case["name"], canvas[:height, :width], reference) <= 3
    # the reference's own float arithmetic rounds elsewhere
    assert abs(float(values.mean(dtype=np.float64)) - tensor["mean"]) < 1e-4


@pytest.mark.parametrize("size", [(2600, 2100), (5000, 700), (14, 9000)], ids=str)
def test_large_transparent_pictures_are_within_three_levels(served: Served, size: tuple[int, int]) -> None:
    """None of the vectors shrinks a transparent picture: limits of 1,024 patches and 64 on a side make these shrink."""
    small = Served("kimi_k3", {"media_proc_cfg": {"in_patch_limit": 1024, "patch_limit_on_one_side": 64}})
    pixels = np.random.default_rng(4).integers(0, 256, (size[0] // 4 + 1, size[1] // 4 + 1, 4), np.uint8)
    picture = Image.fromarray(pixels.repeat(4, 0).repeat(4, 1)[: size[0], : size[1]])
    measured, out = small.encode(picture)
    _, rows, columns = measured.side["grid_thws"].values
    patches = int(rows) * int(columns)
    assert patches <= 1200 and max(int(rows), int(columns)) <= 64
    canvas = levels(unpatched(out.view(np.float32).reshape(measured.primary_shape), int(rows), int(columns)), 0.5, 0.5)
    used = canvas.any(axis=2)
    height, width = int(used.any(axis=1).sum()), int(used.any(axis=0).sum())
    assert apart(str(size), canvas[:height, :width], stock(picture, height, width)) <= 3


def test_every_blend_is_the_float32_arithmetic(served: Served) -> None:
    board = served.settings.board
    alpha, value = (axis.astype(np.uint8) for axis in np.mgrid[0:256, 0:256])
    pixels = np.stack([value, 255 - value, value // 2, alpha], axis=2)
    assert np.array_equal(np.asarray(over_chessboard(Image.fromarray(pixels), board)), over_board(pixels))


def test_a_board_before_resizing() -> None:
    served = Served("kimi_k3", {"media_proc_cfg": {"transparent_bg_fill_stage": "before_resize", "in_patch_limit": 16}})
    picture = Image.new("RGBA", (256, 128), (0, 0, 0, 0))
    measured, out = served.encode(picture)
    _, rows, columns = measured.side["grid_thws"].values
    canvas = levels(unpatched(out.view(np.float32).reshape(measured.primary_shape), int(rows), int(columns)), 0.5, 0.5)
    board = over_board(np.asarray(picture))
    resized = np.asarray(Image.fromarray(board).resize((80, 40), Image.Resampling.BICUBIC))
    assert np.array_equal(canvas[:40, :80], resized)


def test_no_board_means_white() -> None:
    served = Served("kimi_k3", {"media_proc_cfg": {"transparent_bg_config": None}})
    assert not served.family.keeps_alpha(served.settings)
    assert Served("kimi_k3").family.keeps_alpha(Served("kimi_k3").settings)


def test_prompt_of_two_pictures(served: Served) -> None:
    text, ids, expanded = served.prompt([(56, 84), " and ", (1080, 1920), "?"])
    assert text.count("<|media_pad|>") == 2 and "<|media_begin|>" not in text
    found = []
    for (height, width), count, (features,) in zip(
        [(56, 84), (1080, 1920)], [6, 39 * 69], expanded.features, strict=True
    ):
        words = list(served.vocabulary.encode(f"image {width}x{height}"))
        head = [BEGIN, *words, CONTENT]
        start = features.offset - len(head)
        assert expanded.ids[start : start + len(head) + count + 1] == [*head, *[PAD] * count, END]
        assert features.length == count
        found.append(Range(start, len(head) + count + 1))
    assert expanded.structural == found
    assert len(expanded.ids) == len(ids) - 2 + sum(range_.length for range_ in found)


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(
        batched=("grid_thws", "patches_per_image"),
        flat={"pixel_values": "patches_per_image"},
        keep_on_cpu=("grid_thws",),
    )
    assert served.family.limits == {PICTURE: 10} and served.family.worker_side == frozenset()
    for name, kind in (("moonshotai/Kimi-K3", None), ("x", "kimi_k3"), ("kimi-k3-instruct", "something")):
        found = models.family_of(name, kind)
        assert found is not None and found.name == "kimi_k3"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"transparent_bg_config": {"pattern": "stripes"}}, "a chessboard, light first, is"),
        (
            {"transparent_bg_config": {"pattern": "chessboard", "chessboard_square_on_top_left": False}},
            "a chessboard, light first, is",
        ),
        (
            {"transparent_bg_config": {"pattern": "chessboard", "chessboard_gray_value": 256}},
            "chessboard_gray_value must be a byte, got 256",
        ),
        (
            {"transparent_bg_config": {"pattern": "chessboard", "chessboard_square_size": 0}},
            "chessboard_square_size must be a positive whole number",
        ),
        ({"transparent_bg_fill_stage": "never"}, "must be one of after_resize, before_resize, got 'never'"),
    ],
)
def test_settings_that_cannot_be_used(served: Served, values: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        served.family.settings(BundleConfig({}, {"media_proc_cfg": values}))


def test_every_marker_is_needed(served: Served) -> None:
    with pytest.raises(FamilyError, match=r"token '<\|media_content\|>' is missing"):
        served.family.anchor(served.config, vocabulary(**{"<|media_begin|>": 1, "<|media_pad|>": 2}), PICTURE)
