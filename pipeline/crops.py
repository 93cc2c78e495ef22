"""Pictures cut and placed: canvas, centre crop, tiles through a table of values, torch's bicubic without antialias.

The array work of families that see a picture as tiles (LLaVA, LLaVA-NeXT, Llama 4, Phi-3) or on a padded canvas (Kimi,
DeepSeek).  Cutting a canvas into tiles is `transforms.patchify` with patches as large as a tile; here is what it lacks.
Pictures are moved as bytes, before they are widened.  Sizes and offsets are height, width and top, left.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Bytes = NDArray[np.uint8]
Colour = tuple[int, int, int]
BLACK: Colour = (0, 0, 0)

# 16 rows of a picture 1344 wide are 258 KB of float32: source, product and sum stay in L2.
_BLOCK_ROWS = 16


def place(
    image: Image.Image, height: int, width: int, *, top: int = 0, left: int = 0, colour: Colour = BLACK
) -> Image.Image:
    """The RGB picture on a canvas of another size; the same object when it fills the canvas."""
    if image.size == (width, height):
        return image
    canvas = Image.new("RGB", (width, height), colour)
    canvas.paste(image, (left, top))
    return canvas


def centre_crop(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of a picture that is at least that large; an odd excess leaves the extra pixel right and below."""
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def tiles_by_table(image: Image.Image, out: Bytes, *, side: int, table: NDArray[np.float32], dtype: str) -> None:
    """Write the picture's tiles, row by row: [rows * columns, 3, side, side] of `dtype`, C order.

    For values that plain float32 arithmetic does not give; `transforms.patchify` is quicker where it does.  `table`:
    [3, 256], the value of every byte in every channel, exact in bfloat16.  `dtype`: "float32", "bfloat16" or
    "float16".  The picture's sides are multiples of `side`; `out`: uint8, flat, exactly that many bytes.
    """
    rows, columns = image.height // side, image.width // side
    values = narrowed(table, dtype)
    target = out.view(values.dtype).reshape(rows * columns, 3, side, side)
    indices = np.empty((side, side), np.intp)
    for channel, band in enumerate("RGB"):
        plane = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(rows, side, columns, side)
        for tile in range(rows * columns):
            indices[...] = plane[tile // columns, :, tile % columns]
            np.take(values[channel], indices, out=target[tile, channel], mode="clip")  # "clip" writes without a copy


def bicubic(image: Image.Image, height: int, width: int) -> NDArray[np.float32]:
    """The RGB picture resized as `torch.nn.functional.interpolate(mode="bicubic")` does: [height, width, 3] float32.

    Keys' kernel with a = -0.75, corners not aligned, no antialias: four taps a side whatever the scale, the border
    repeated.  Values are bytes' values, neither rounded nor clipped.
    """
    pixels = np.asarray(image)
    down, across = _taps(image.height, height), _taps(image.width, width)
    found = np.empty((height, width, 3), np.float32)
    scratch = np.empty((2, _BLOCK_ROWS, image.width * 3), np.float32)
    for top in range(0, height, _BLOCK_ROWS):
        rows = slice(top, min(top + _BLOCK_ROWS, height))
        product, mixed = scratch[:, : rows.stop - top]
        mixed[...] = 0
        for places, weights in down:
            product[...] = pixels[places[rows]].reshape(product.shape)
            np.multiply(product, weights[rows, None], out=product)
            mixed += product
        lines = mixed.reshape(-1, image.width, 3)
        found[rows] = sum(np.take(lines, places, axis=1) * weights[:, None] for places, weights in across)
    return found


def _taps(source: int, target: int) -> Sequence[tuple[NDArray[np.intp], NDArray[np.float32]]]:
    """For each of the four taps: where it lies for every output pixel, and its weight.  torch computes in float32.

    Taps that weigh nothing are left out: at odd whole scales only one is left.
    """
    scale = np.float32(source) / np.float32(target)
    centres = (np.arange(target, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    first = np.floor(centres)
    t = centres - first
    a = np.float32(-0.75)

    def inner(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def outer(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    weights = (outer(t + 1), inner(t), inner(1 - t), outer(2 - t))
    places = first.astype(np.intp)
    return [(np.clip(places + tap - 1, 0, source - 1), weight) for tap, weight in enumerate(weights) if weight.any()]


def narrowed(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """float32 values in another type, rounded to nearest even; bfloat16 as its bits in uint16."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    raise ValueError(f"no float type: {dtype}")
