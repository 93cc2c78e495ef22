"""Phi-3 and Phi-3.5 vision: the whole picture in one square, then the picture in tiles of 336 pixels on white.

As many tiles as `num_crops` allows (16 for Phi-3, 4 for Phi-3.5): small pictures are enlarged.  The first square is
torch's bicubic of the tiled canvas; tiles the picture does not need are zero.  The checkpoints' template takes strings,
so the anchor stands on a line of its own before the text.  Reference: the checkpoints' own processor, by the `direct`
vectors of our references; it resizes with stock Pillow, up to a level from ours.
"""

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import ITEM_BYTES, Form, Layout, Modality
from pipeline.crops import bicubic, narrowed, place
from pipeline.models._picture import PictureFamily
from pipeline.models._values import CLIP_MEAN, CLIP_STD, normalisation, whole
from pipeline.models.base import BundleConfig, Measured, MediaError, SideTensor, Source
from pipeline.transforms import BILINEAR, Normalisation, patchify, resize

_TILE = 336
_WHITE = (255, 255, 255)
_TILE_ROW_TOKENS = 12  # tokens on a tile's side: its newlines


class Phi3Settings(msgspec.Struct, frozen=True):
    """`tile_tokens`: embeddings of one tile."""

    crops: int
    tile_tokens: int
    normalisation: Normalisation


class Phi3Vision(PictureFamily):
    name = "phi3_v"
    model_types = frozenset({"phi3_v"})
    name_patterns = (("phi", "vision"),)
    limits = {Modality.IMAGE: 4}

    anchor_text = "<|image|>"
    settings_type = Phi3Settings

    def settings(self, bundle: BundleConfig) -> Phi3Settings:
        return Phi3Settings(
            crops=whole(bundle.preprocessor, ("num_crops",), 16),
            tile_tokens=whole(bundle.preprocessor, ("num_img_tokens",), 144),
            normalisation=normalisation(bundle.preprocessor, CLIP_MEAN, CLIP_STD),
        )

    def measure(self, settings: Phi3Settings, modality: Modality, source: Source) -> Measured:
        """MediaError for a picture so thin that its short side vanishes."""
        self._measures_pictures(modality, source.height, source.width)
        long, short = _enlarged(settings, max(source.height, source.width), min(source.height, source.width))
        if not short:
            raise MediaError(f"a picture of {source.width}x{source.height} pixels is too thin for {self.name}")
        wide = long, -(-short // _TILE) * _TILE
        height, width = wide if source.width < source.height else (wide[1], wide[0])
        rows, columns = height // _TILE, width // _TILE
        tokens = (rows * columns + 1) * settings.tile_tokens + 1 + (rows + 1) * _TILE_ROW_TOKENS
        return Measured(
            primary_shape=(1, settings.crops + 1, 3, _TILE, _TILE),
            feature_tokens=tokens,
            resized=(height, width),
            side={
                "image_sizes": SideTensor("int64", (1, 2), (height, width)),
                "num_img_tokens": SideTensor("int64", (1,), (tokens,)),
            },
        )

    def encode(
        self,
        settings: Phi3Settings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        """A worker that normalises gets bytes: the first square rounded, zero tiles as zeros."""
        canvas = _canvas(settings, frames)
        tile_bytes = 3 * _TILE**2 * ITEM_BYTES[form.dtype]
        begin, end = tile_bytes, tile_bytes * (1 + canvas.height * canvas.width // _TILE**2)
        _write_whole(canvas, settings.normalisation, form, out[:begin])
        patchify(
            [canvas],
            out[begin:end],
            patch=_TILE,
            merge=1,
            temporal=1,
            normalisation=settings.normalisation if form.normalised else None,
            dtype=form.dtype,
        )
        out[end:] = 0

    def layout(self, modality: Modality) -> Layout:
        self._pictures_only(modality)
        return Layout(batched=("pixel_values", "image_sizes", "num_img_tokens"))


def _enlarged(settings: Phi3Settings, long: int, short: int) -> tuple[int, int]:
    """Both sides after resizing: the long one as many tiles as leave the canvas within `num_crops`."""
    ratio = long / short
    tiles = 1
    while (tiles + 1) * math.ceil((tiles + 1) / ratio) <= settings.crops:
        tiles += 1
    return tiles * _TILE, int(tiles * _TILE / ratio)


def _canvas(settings: Phi3Settings, picture: Image.Image) -> Image.Image:
    """The picture resized, in the middle of white to whole tiles; an upright one is handled lying, as the reference
    does.
    """
    is_upright = picture.width < picture.height
    lying = picture.transpose(Image.Transpose.TRANSPOSE) if is_upright else picture
    width, height = _enlarged(settings, lying.width, lying.height)
    full = -(-height // _TILE) * _TILE
    resized = resize(lying, height, width, BILINEAR)
    canvas = place(resized, full, width, top=(full - height) // 2, colour=_WHITE)
    return canvas.transpose(Image.Transpose.TRANSPOSE) if is_upright else canvas


def _write_whole(canvas: Image.Image, normalisation: Normalisation, form: Form, out: NDArray[np.uint8]) -> None:
    """The canvas in one square, [3, 336, 336]: interpolated before it is normalised, which commutes."""
    values = np.ascontiguousarray(bicubic(canvas, _TILE, _TILE).transpose(2, 0, 1))
    if not form.normalised:
        out[...] = np.clip(np.rint(values), 0, 255).astype(np.uint8).reshape(-1)
        return
    for ufunc, operand in normalisation.steps():
        ufunc(values, operand, out=values)
    narrow = narrowed(values, form.dtype)
    out.view(narrow.dtype)[...] = narrow.reshape(-1)
