"""Canvas, middle square, tiles through a table; torch's bicubic is held in the Phi-3 tests."""

import numpy as np
import pytest
from PIL import Image

from pipeline.crops import bicubic, centre_crop, narrowed, place, tiles_by_table


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_place_puts_the_picture_and_colours_the_rest() -> None:
    pixels = noise(5, 7)
    canvas = np.asarray(place(Image.fromarray(pixels), 9, 11, top=1, left=3, colour=(1, 2, 3)))
    assert canvas.shape == (9, 11, 3)
    assert np.array_equal(canvas[1:6, 3:10], pixels)
    rest = np.ones((9, 11), bool)
    rest[1:6, 3:10] = False
    assert (canvas[rest] == (1, 2, 3)).all()


def test_a_picture_that_fills_the_canvas_is_not_copied() -> None:
    picture = Image.fromarray(noise(4, 6))
    assert place(picture, 4, 6) is picture


@pytest.mark.parametrize(("size", "top", "left"), [((8, 8), 2, 2), ((9, 7), 2, 1), ((4, 5), 0, 0)])
def test_the_odd_pixel_of_a_crop_is_cut_right_and_below(size: tuple[int, int], top: int, left: int) -> None:
    pixels = noise(*size)
    found = np.asarray(centre_crop(Image.fromarray(pixels), 4, 4))
    assert np.array_equal(found, pixels[top : top + 4, left : left + 4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tiles_are_rows_of_the_table(dtype: str) -> None:
    pixels = noise(12, 18)
    table = np.arange(3 * 256, dtype=np.float32).reshape(3, 256) // 3  # whole numbers up to 255: exact in every type
    values = narrowed(table, dtype)
    out = np.full(12 * 18 * 3 * values.itemsize, 0xA5, np.uint8)
    tiles_by_table(Image.fromarray(pixels), out, side=6, table=table, dtype=dtype)
    tiles = out.view(values.dtype).reshape(2, 3, 3, 6, 6)
    for row in range(2):
        for column in range(3):
            tile = pixels[row * 6 : row * 6 + 6, column * 6 : column * 6 + 6]
            for channel in range(3):
                assert np.array_equal(tiles[row, column, channel], values[channel][tile[..., channel]])


def test_bicubic_of_the_same_size_is_the_picture() -> None:
    pixels = noise(33, 17)
    assert np.array_equal(bicubic(Image.fromarray(pixels), 33, 17), pixels)


def test_bicubic_of_one_colour_is_that_colour() -> None:
    found = bicubic(Image.new("RGB", (31, 1), (10, 200, 255)), 16, 5)
    assert found.shape == (16, 5, 3) and np.abs(found - [10, 200, 255]).max() < 1e-3


def test_narrowing() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -2.5], np.float32)
    assert narrowed(values, "bfloat16").tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020]  # ties to even
    assert narrowed(values, "float16").tolist() == [1, 1 + 2**-8, 1 + 3 * 2**-8, -2.5]
    assert narrowed(values, "float32") is values
    with pytest.raises(ValueError, match="no float type: uint8"):
        narrowed(values, "uint8")
