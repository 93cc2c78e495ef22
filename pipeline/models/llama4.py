"""Llama 4: pictures in tiles of 336 pixels.

A picture is shrunk as little as possible, never enlarged beyond one tile, put top left on the black canvas that fits
best, and cut; more than one tile is followed by the whole picture squeezed into one.  Reference: transformers 5.24
`Llama4ImageProcessor`, which normalises in bfloat16: a table of 256 values gives the very same numbers.  The checkpoint
calls its bound `max_patches`, SMG `max_image_tiles`; both are read.
"""

import math
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import Form, Layout, Modality
from pipeline.crops import narrowed, place, tiles_by_table
from pipeline.models._picture import PictureFamily, token
from pipeline.models._values import mean_and_std, number, resample, section, whole
from pipeline.models.base import (
    Anchor,
    BundleConfig,
    FamilyError,
    Measured,
    Replacement,
    SideTensor,
    Source,
    VllmItems,
    Vocabulary,
)
from pipeline.transforms import BICUBIC, BILINEAR, patchify, resize

_IMAGE, _PATCH, _START, _END = "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"
_BESIDE, _BELOW = "<|tile_x_separator|>", "<|tile_y_separator|>"


class Llama4Settings(msgspec.Struct, frozen=True):
    """`tile`: its side in pixels, `tile_tokens` its embeddings.  `enlarges`: pictures fill the largest canvas."""

    tile: int
    tile_tokens: int
    most_tiles: int
    enlarges: bool
    resample: int
    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Llama4(PictureFamily):
    name = "llama4"
    model_types = frozenset({"llama4"})
    name_patterns = (("llama-4",), ("llama4",))
    limits = {Modality.IMAGE: 8}
    worker_side = frozenset({Modality.IMAGE})
    vllm_items = VllmItems(side=("aspect_ratios", "patches_per_image"))

    anchor_text = _PATCH
    feature_keys = ("image_token_index",)
    settings_type = Llama4Settings

    def settings(self, bundle: BundleConfig) -> Llama4Settings:
        values, vision = bundle.preprocessor, section(bundle.config, "vision_config")
        if values.get("do_rescale") is False or values.get("do_normalize") is False or values.get("do_resize") is False:
            raise FamilyError(f"{self.name} needs do_resize, do_rescale and do_normalize")
        tile = whole(values, ("size",), whole(vision, ("image_size",), 336))
        patch = whole(vision, ("patch_size",), 14)
        shuffle = number(vision, "pixel_shuffle_ratio") or 0.5
        if tile % 2 or tile % patch:
            raise FamilyError(f"tiles of {tile} pixels cannot be cut into patches of {patch}")
        mean, std = mean_and_std(values, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        return Llama4Settings(
            tile=tile,
            tile_tokens=(tile // patch) ** 2 // round(1 / shuffle**2),
            most_tiles=whole(values, ("max_patches", "max_image_tiles"), 16),
            enlarges=values.get("resize_to_max_canvas") is True,
            resample=resample(values, BILINEAR, {BICUBIC: "bicubic", BILINEAR: "bilinear"}),
            rescale_factor=number(values, "rescale_factor") or 1 / 255,
            mean=mean,
            std=std,
        )

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """`<|image|>`, not the token that is repeated.  Every token of the replacement is asked for now."""
        self._pictures_only(modality)
        for text in (_START, _END, _BESIDE, _BELOW):
            token(vocabulary, text)
        return Anchor(token_id=token(vocabulary, _IMAGE), text=_IMAGE)

    def measure(self, settings: Llama4Settings, modality: Modality, source: Source) -> Measured:
        self._measures_pictures(modality, source.height, source.width)
        rows, columns = _grid(settings, source.height, source.width)
        tiles = rows * columns + (rows * columns > 1)
        return Measured(
            primary_shape=(tiles, 3, settings.tile, settings.tile),
            feature_tokens=tiles * settings.tile_tokens,
            resized=(rows * settings.tile, columns * settings.tile),
            side={
                "aspect_ratios": SideTensor("int64", (1, 2), (rows, columns)),
                "patches_per_image": SideTensor("int64", (1,), (tiles,)),
            },
        )

    def encode(
        self,
        settings: Llama4Settings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        """A worker that normalises gets the bytes, the black canvas included."""
        tiles = measured.primary_shape[0]
        begin = out.nbytes // tiles * (tiles - 1 if tiles > 1 else 1)  # of the whole picture's tile
        content = resize(frames, *_content(settings, frames.height, frames.width, measured.resized), settings.resample)
        _write(settings, place(content, *measured.resized), form, out[:begin])
        if tiles > 1:
            whole_picture = resize(frames, settings.tile, settings.tile, settings.resample)
            _write(settings, whole_picture, form, out[begin:])

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """Tiles with separators row by row, then `<|image|>` and the whole picture, between start and end."""
        rows, columns = (int(side) for side in measured.side["aspect_ratios"].values)
        count = measured.feature_tokens // measured.primary_shape[0]
        patches = [self.feature_token(bundle, vocabulary, modality)] * count
        ids = [token(vocabulary, _START)]
        features = []
        for tile in range(rows * columns if rows * columns > 1 else 0):
            features.append((len(ids), count))
            ids += [*patches, token(vocabulary, _BELOW if tile % columns == columns - 1 else _BESIDE)]
        ids.append(token(vocabulary, _IMAGE))
        features.append((len(ids), count))
        ids += [*patches, token(vocabulary, _END)]
        return Replacement(ids, features=tuple(features))

    def layout(self, modality: Modality) -> Layout:
        self._pictures_only(modality)
        return Layout(
            batched=("aspect_ratios", "patches_per_image"),
            flat={"pixel_values": "patches_per_image"},
        )


@lru_cache(maxsize=8)
def _grids(most: int) -> NDArray[np.int64]:
    """Every canvas of at most that many tiles, [n, 2] rows and columns, in the reference's order: by ratio, the ratios
    as they come when counts fall and rows grow.  The order decides ties.
    """
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return np.array([grid for grids in by_ratio.values() for grid in grids], np.int64)


def _grid(settings: Llama4Settings, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the canvas that asks for the smallest enlargement, else for the least shrinking; among equals
    the smallest.  Scales are compared in float32, as torch computes them.
    """
    grids = _grids(settings.most_tiles)
    sides = (grids * settings.tile).astype(np.float32) / np.array([height, width], np.float32)
    scales = sides.min(axis=1)
    growing = scales[scales >= 1]
    if growing.size:
        chosen = growing.max() if settings.enlarges else growing.min()
    else:
        chosen = scales.max()
    fitting = grids[scales == chosen]
    rows, columns = fitting[fitting.prod(axis=1).argmin()].tolist()
    return rows, columns


def _content(settings: Llama4Settings, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """The picture's size on the canvas: ratio kept, cut off to whole pixels, enlarged to one tile at most."""
    bounds = canvas
    if not settings.enlarges:
        bounds = min(max(height, settings.tile), canvas[0]), min(max(width, settings.tile), canvas[1])
    down, across = bounds[0] / height, bounds[1] / width
    if across < down:
        return max(1, min(math.floor(height * across), bounds[0])), bounds[1]
    return bounds[0], max(1, min(math.floor(width * down), bounds[1]))


def _write(settings: Llama4Settings, view: Image.Image, form: Form, out: NDArray[np.uint8]) -> None:
    """The tiles of a picture whose sides are whole tiles."""
    if form.normalised:
        table = _table(settings.rescale_factor, settings.mean, settings.std)
        tiles_by_table(view, out, side=settings.tile, table=table, dtype=form.dtype)
    else:
        patchify([view], out, patch=settings.tile, merge=1, temporal=1, normalisation=None, dtype="uint8")


@lru_cache(maxsize=4)
def _table(
    rescale_factor: float, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> NDArray[np.float32]:
    """[3, 256]: every step in float32, rounded to bfloat16, as torch computes with bfloat16 tensors."""

    def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return (narrowed(values, "bfloat16").astype(np.uint32) << 16).view(np.float32)

    scaled = rounded(np.arange(256, dtype=np.float32) * np.float32(rescale_factor))
    minus = rounded(np.array(mean, np.float32).reshape(3, 1))
    over = rounded(np.array(std, np.float32).reshape(3, 1))
    return rounded(rounded(scaled - minus) / over)
