"""Sizes against transformers' rule written a second time, patches against the textbook transpose."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.models.base import MediaError
from pipeline.transforms import BICUBIC, BILINEAR, Normalisation, patchify, resize, smart_resize

CLIP = Normalisation.of([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = Normalisation.of([0.5] * 3, [0.5] * 3)
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def reference_size(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """`smart_resize` of transformers 5.24, the ratio check left out."""
    h_bar = round(height / factor) * factor
    w_bar = round(width / factor) * factor
    if h_bar * w_bar > high:
        beta = math.sqrt((height * width) / high)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < low:
        beta = math.sqrt(low / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


sides = st.integers(1, 9000)
bounds = st.sampled_from([(65_536, 16_777_216), (3136, 12_845_056), (56 * 56, 28 * 28 * 1280), (4096, 4096)])


@settings(max_examples=400, deadline=None)
@given(sides, sides, st.sampled_from([28, 32]), bounds)
def test_size_is_the_reference_s(height: int, width: int, factor: int, bound: tuple[int, int]) -> None:
    low, high = bound
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(MediaError, match="above the limit of 200"):
            smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
        return
    found = smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
    assert found == reference_size(height, width, factor, low, high)
    assert found[0] % factor == 0 == found[1] % factor and min(found) >= factor


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1080, 1920, (1088, 1920)),
        (400, 400, (384, 384)),
        (10, 900, (32, 2432)),
        (3, 600, (32, 3648)),
        (9, 7, (320, 256)),
    ],
)
def test_sizes_known_from_the_vectors(height: int, width: int, expected: tuple[int, int]) -> None:
    assert smart_resize(height, width, factor=32, min_pixels=65_536, max_pixels=16_777_216) == expected


def test_a_picture_without_area_is_refused() -> None:
    with pytest.raises(MediaError, match="no area"):
        smart_resize(0, 5, factor=32, min_pixels=65_536, max_pixels=16_777_216)


def noise(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def textbook(frames: list[Image.Image], patch: int, merge: int, temporal: int) -> np.ndarray:
    """The transpose of the reference: [patches, 3 * temporal * patch * patch] uint8."""
    stack = np.stack([np.asarray(frame) for frame in frames])
    if len(stack) == 1:
        stack = np.repeat(stack, temporal, axis=0)
    rows, columns = stack.shape[1] // patch, stack.shape[2] // patch
    cells = stack.reshape(temporal, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return cells.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(rows * columns, -1)


def values_of(raw: np.ndarray, normalisation: Normalisation, dtype: str) -> np.ndarray:
    """Looked up in the channel's table after the transpose."""
    if dtype == "uint8":
        return raw
    channel = np.arange(raw.shape[1]) // (raw.shape[1] // 3)
    wide = normalisation.table()[channel, raw]
    if dtype == "bfloat16":
        bits = wide.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return wide.astype(dtype)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([2, 8, 14, 16]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(sorted(ITEM)),
    st.sampled_from([HALF, CLIP, Normalisation(scale=1 / 255), Normalisation()]),
    st.integers(0, 2**31),
)
def test_patches_equal_the_textbook(
    rows: int,
    columns: int,
    patch: int,
    merge: int,
    temporal: int,
    one_for_all: bool,
    dtype: str,
    normalisation: Normalisation,
    seed: int,
) -> None:
    frames = [
        noise(rows * patch * merge, columns * patch * merge, seed + slot)
        for slot in range(1 if one_for_all else temporal)
    ]
    raw = textbook(frames, patch, merge, temporal)
    out = np.full(raw.size * ITEM[dtype], 0xA5, np.uint8)
    patchify(frames, out, patch=patch, merge=merge, temporal=temporal, normalisation=normalisation, dtype=dtype)
    expected = values_of(raw, normalisation, dtype)
    assert np.array_equal(out, np.ascontiguousarray(expected).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("columns", [63, 64, 65, 84, 130, 193])
@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_wide_pictures_are_worked_in_blocks(columns: int, patch: int, dtype: str) -> None:
    picture = noise(2 * patch, columns * 2 * patch, columns)
    raw = textbook([picture], patch, 2, 2)
    out = np.full(raw.size * ITEM[dtype], 0xA5, np.uint8)
    patchify([picture], out, patch=patch, merge=2, temporal=2, normalisation=CLIP, dtype=dtype)
    assert np.array_equal(out, np.ascontiguousarray(values_of(raw, CLIP, dtype)).reshape(-1).view(np.uint8))


def test_nothing_of_the_output_s_size_is_allocated() -> None:
    """3.1 MB of planes and the scratch of one row of cells, for 25 MB of output."""
    picture = noise(1024, 1024, 1)
    out = np.zeros(1024 * 1024 * 3 * 2 * 4, np.uint8)
    tracemalloc.start()
    try:
        patchify([picture], out, patch=16, merge=2, temporal=2, normalisation=HALF, dtype="float32")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000


def test_an_output_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="10 bytes given for a tensor of 6144"):
        patchify(
            [noise(16, 16, 0)],
            np.zeros(10, np.uint8),
            patch=16,
            merge=1,
            temporal=2,
            normalisation=None,
            dtype="float32",
        )


@pytest.mark.parametrize(("mean", "std"), [([0.5] * 3, [0.5] * 3), ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])])
def test_folded_arithmetic(mean: list[float], std: list[float]) -> None:
    """Mean and std are scaled by 255 in float32 first: then subtract, then divide."""
    table = Normalisation.of(mean, std).table()
    for channel in range(3):
        minus = np.float32(mean[channel]) * np.float32(255)
        over = np.float32(std[channel]) * np.float32(255)
        assert np.array_equal(table[channel], (np.arange(256, dtype=np.float32) - minus) / over)


def test_resize_keeps_a_picture_of_the_right_size() -> None:
    picture = noise(30, 40, 2)
    assert resize(picture, 30, 40) is picture
    assert resize(picture, 32, 64).size == (64, 32)
    assert resize(picture, 32, 64, BILINEAR).tobytes() != resize(picture, 32, 64, BICUBIC).tobytes()
