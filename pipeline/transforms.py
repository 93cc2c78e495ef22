"""Pixels to tensors: sizes, resizing, normalising, patches.  Pictures and numbers in, bytes out; no files, no models.

The rules are those of the reference processors (transformers' torchvision classes), bit for bit; a family picks among
them. Output is written once, in its final type, into memory the caller gives.  Beside it only bytes of the picture's
own size and a scratch that stays in the processor's L2 cache are allocated.  Sizes are height, width.

How patches are laid out: a row of a patch (14 or 16 bytes) moves as one element, a quarter of the data a float
transpose would move; the bytes of one row of merge cells are then contiguous, get their values in the scratch, and one
store puts them into every temporal slot.  Measured for 1920x1088 float32: about twice the time of copying the output
once; patches of 14, whose rows have no native type, take a third more.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.models.base import MediaError

BICUBIC = int(Image.Resampling.BICUBIC)
BILINEAR = int(Image.Resampling.BILINEAR)

MAX_SIDE_RATIO = 200

# Of one channel: 240 patches of 3x16x16 float32 are 0.7 MB; half to twice of it measured best with 1 MB of L2.
_BLOCK_PIXELS = 65_536

Bytes = NDArray[np.uint8]
Step = tuple[Callable[..., Any], NDArray[np.float32]]


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Qwen's target size: sides are multiples of `factor`, the area lies between the bounds where that is possible.

    transformers 5.24, `qwen2_vl.image_processing_qwen2_vl.smart_resize`: rounding is half to even, and a side under
    half a factor counts as 0 when areas are compared.  Raises MediaError above a side ratio of 200.
    """
    refuse_thin(height, width)
    rows, columns = round(height / factor), round(width / factor)
    area = rows * columns * factor**2
    if area > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def refuse_thin(height: int, width: int) -> None:
    """Raises MediaError for a picture without area or with a side ratio above 200."""
    if min(height, width) < 1:
        raise MediaError(f"a picture of {width}x{height} pixels has no area")
    if max(height, width) > MAX_SIDE_RATIO * min(height, width):
        ratio = max(height, width) / min(height, width)
        raise MediaError(
            f"a picture of {width}x{height} pixels has a side ratio of {ratio:.1f}, above the limit of {MAX_SIDE_RATIO}"
        )


def resize(image: Image.Image, height: int, width: int, resample: int = BICUBIC) -> Image.Image:
    """The RGB picture in another size; the same object when the size is right already.

    pillow-simd's bicubic and bilinear equal torch's antialiased uint8 interpolation byte for byte.
    """
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling(resample))


class Normalisation(msgspec.Struct, frozen=True):
    """What becomes of a byte x of channel c: `(x * scale - minus[c]) / over[c]` in float32; absent steps are left out.

    The order and the width of the steps are the reference's, so that every bit agrees.
    """

    scale: float | None = None
    minus: tuple[float, ...] | None = None
    over: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        rescale_factor: float = 1 / 255,
        do_rescale: bool = True,
        do_normalize: bool = True,
    ) -> "Normalisation":
        """As transformers' torchvision backend: rescaling is folded into mean and std when both are asked for."""
        if not do_normalize:
            return cls(scale=rescale_factor if do_rescale else None)
        unit = np.float32(1.0 / rescale_factor if do_rescale else 1.0)
        return cls(
            minus=tuple(float(np.float32(value) * unit) for value in mean),
            over=tuple(float(np.float32(value) * unit) for value in std),
        )

    def steps(self) -> list[Step]:
        """The arithmetic as (ufunc, operand); an operand is a scalar, or [3, 1, 1] when channels differ."""
        found: list[Step] = []
        if self.scale is not None:
            found.append((np.multiply, np.asarray(self.scale, np.float32)))
        if self.minus is not None:
            found.append((np.subtract, _operand(self.minus)))
        if self.over is not None:
            found.append((np.divide, _operand(self.over)))
        return found

    def table(self) -> NDArray[np.float32]:
        """[3, 256] float32: the value of every byte in every channel."""
        values = np.empty((3, 1, 256), np.float32)
        values[...] = np.arange(256)
        for ufunc, operand in self.steps():
            ufunc(values, operand, out=values)
        return values.reshape(3, 256)


def _operand(channels: tuple[float, ...]) -> NDArray[np.float32]:
    values = np.asarray(channels, np.float32)
    return values[0] if len(set(channels)) == 1 else values.reshape(3, 1, 1)  # a scalar keeps numpy's loops long


def patchify(
    frames: Sequence[Image.Image],
    out: Bytes,
    *,
    patch: int,
    merge: int,
    temporal: int,
    normalisation: Normalisation | None,
    dtype: str,
) -> None:
    """Write the patches of one temporal step: [rows * columns, 3 * temporal * patch * patch] of `dtype`, C order.

    `frames`: RGB pictures of one size, sides multiples of `patch * merge`; either `temporal` of them or one, which then
    fills every temporal slot.  Patches follow merge cells row by row, inside a cell row by row; inside a patch:
    channel, temporal, y, x. `dtype`: "float32", "bfloat16" or "float16" (rounded to nearest even from the float32
    value), or "uint8" for the bytes themselves (`normalisation` is not used).  `out`: uint8, flat, exactly that many
    bytes, every one of which is written.
    """
    width, height = frames[0].size
    rows, columns = height // (patch * merge), width // (patch * merge)
    wanted = height * width * 3 * temporal * _WIDTH_OF[dtype]
    if out.nbytes != wanted:
        raise ValueError(f"{out.nbytes} bytes given for a tensor of {wanted}")
    planes = [[_plane(frame, band, patch, merge) for band in "RGB"] for frame in frames]
    pixels = patch * patch
    store = _store(normalisation or Normalisation(), dtype, pixels)
    target = out.view(store.item_type).reshape(rows, columns, merge * merge * 3, temporal, pixels // store.item_pixels)
    cells = _even_share(columns, max(1, _BLOCK_PIXELS // (merge * merge * pixels)))
    scratch = np.empty((cells, merge, merge, 3, len(frames), patch), _row_type(patch))
    for row in range(rows):
        for left in range(0, columns, cells):
            right = min(left + cells, columns)
            block = scratch[: right - left]
            for slot, bands in enumerate(planes):
                for channel, band in enumerate(bands):
                    block[:, :, :, channel, slot] = band[row, :, :, left:right].transpose(2, 0, 3, 1)
            bytes_of_block = block.reshape(-1).view(np.uint8).reshape(-1, 3, len(frames), pixels)
            store(bytes_of_block, target[row, left:right].reshape(-1, 3, temporal, pixels // store.item_pixels))


_WIDTH_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def _row_type(patch: int) -> np.dtype[Any]:
    """A type of `patch` bytes, so that numpy moves a patch row as one element; 16 bytes have a native one."""
    return np.dtype(np.complex128) if patch == 16 else np.dtype((np.void, patch))


def _plane(frame: Image.Image, band: str, patch: int, merge: int) -> NDArray[Any]:
    """One channel as patch rows: [rows, merge, patch, columns, merge] of the row type.

    Packing a band straight from the RGB picture costs half of splitting it and copying the parts.
    """
    width, height = frame.size
    rows = np.frombuffer(frame.tobytes("raw", band), _row_type(patch))
    return rows.reshape(height // (patch * merge), merge, patch, width // (patch * merge), merge)


def _even_share(total: int, most: int) -> int:
    """The size of equal parts of `total`, none above `most`."""
    return -(-total // -(-total // most))


class _Raw:
    """Bytes [n, 3, 1 or temporal, pixels] as they are: a whole patch of one channel moves as one element."""

    def __init__(self, pixels: int) -> None:
        self.item_type: np.dtype[Any] = np.dtype((np.void, pixels))
        self.item_pixels = pixels

    def __call__(self, block: Bytes, target: NDArray[Any]) -> None:
        target[...] = block.view(self.item_type)


class _Float32:
    """Bytes [n, 3, 1 or temporal, pixels] to float32 [n, 3, temporal, pixels].

    Every step works in the scratch and a single store follows: a last step that wrote all temporal slots itself would
    compute every value once for each.
    """

    item_type = np.dtype(np.float32)
    item_pixels = 1

    def __init__(self, normalisation: Normalisation, pixels: int) -> None:
        self._steps = [(ufunc, _spread(operand, pixels)) for ufunc, operand in normalisation.steps()]
        self._scratch = np.empty(0, np.float32)

    def __call__(self, block: Bytes, target: NDArray[Any]) -> None:
        if self._scratch.size < block.size:
            self._scratch = np.empty(block.size, np.float32)
        values = self._scratch[: block.size].reshape(block.shape)
        values[...] = block
        for ufunc, operand in self._steps:
            ufunc(values, operand, out=values)
        target[...] = values


class _Narrow:
    """Bytes to a 16-bit type by look-up, two pixels at a time: exact by construction, and quicker than arithmetic."""

    item_type = np.dtype(np.uint32)
    item_pixels = 2

    def __init__(self, normalisation: Normalisation, dtype: str, pixels: int) -> None:
        self._table, offsets = _pair_table(normalisation, dtype)
        self._offsets = None if offsets is None else _spread(offsets, pixels // 2)
        self._indices = np.empty(0, np.intp)
        self._pairs = np.empty(0, np.uint32)

    def __call__(self, block: Bytes, target: NDArray[Any]) -> None:
        bytes_in_pairs = block.view(np.uint16)
        if self._indices.size < bytes_in_pairs.size:
            self._indices = np.empty(bytes_in_pairs.size, np.intp)
            self._pairs = np.empty(bytes_in_pairs.size, np.uint32)
        indices = self._indices[: bytes_in_pairs.size].reshape(bytes_in_pairs.shape)
        pairs = self._pairs[: bytes_in_pairs.size].reshape(bytes_in_pairs.shape)
        indices[...] = bytes_in_pairs
        if self._offsets is not None:
            np.add(indices, self._offsets, out=indices)
        np.take(self._table, indices, out=pairs, mode="clip")  # "clip" writes into `out` without a copy
        target[...] = pairs


def _store(normalisation: Normalisation, dtype: str, pixels: int) -> _Raw | _Float32 | _Narrow:
    if dtype == "uint8":
        return _Raw(pixels)
    return _Float32(normalisation, pixels) if dtype == "float32" else _Narrow(normalisation, dtype, pixels)


def _spread(operand: NDArray[Any], pixels: int) -> NDArray[Any]:
    """An operand that differs by channel, [3, 1, 1], repeated to [3, 1, pixels]: numpy's loops then run over a patch's
    three channels at once.  A scalar as it is.
    """
    return operand if operand.ndim == 0 else np.broadcast_to(operand, (3, 1, pixels)).copy()


@lru_cache(maxsize=8)
def _pair_table(normalisation: Normalisation, dtype: str) -> tuple[NDArray[np.uint32], NDArray[np.intp] | None]:
    """What two bytes, read as one little-endian 16-bit number, become: two 16-bit values in one 32-bit number.

    The first pixel is the low byte and the low half.  One table of 65,536 for equal channels; else three in a row with
    the offset of each channel's, [3, 1, 1].
    """
    table = normalisation.table()
    narrow = _bfloat16_bits(table) if dtype == "bfloat16" else table.astype(np.float16).view(np.uint16)
    wide = narrow.astype(np.uint32)
    pairs = np.empty((3, 65536), np.uint32)
    pairs[...] = (wide[:, None, :] | wide[:, :, None] << 16).reshape(3, 65536)
    if (wide[0] == wide).all():
        return pairs[0].copy(), None
    offsets = np.empty((3, 1, 1), np.intp)
    offsets[...] = np.arange(3).reshape(3, 1, 1) << 16
    return pairs.reshape(-1), offsets


def _bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
