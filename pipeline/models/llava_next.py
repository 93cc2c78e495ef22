"""LLaVA-NeXT (1.6): the whole picture in one square, then the picture again in tiles of the canvas that fits best.

The checkpoint lists its canvases (`image_grid_pinpoints`); the first of equals wins, in listed order, as transformers
chooses and SMG does not.  All pictures of a request have as many tiles as the largest, the rest zero.  The model drops
the black border again, so a picture's tokens depend on its own ratio.  Reference: transformers 5.24
`LlavaNextImageProcessor`, `LlavaNextProcessor`.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.base import ITEM_BYTES, Form, Layout, Modality
from pipeline.crops import place
from pipeline.models._picture import PictureFamily
from pipeline.models._values import CLIP_MEAN, CLIP_STD, normalisation, resample, section, whole
from pipeline.models.base import BundleConfig, FamilyError, Measured, SideTensor, Source
from pipeline.models.llava import tower_tokens
from pipeline.transforms import BICUBIC, BILINEAR, Normalisation, patchify, resize

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class LlavaNextSettings(msgspec.Struct, frozen=True):
    """`canvases`: height, width of each, in the checkpoint's order; `cells`: patches on a tile's side."""

    tile: int
    canvases: tuple[tuple[int, int], ...]
    cells: int
    base_tokens: int
    resample: int
    normalisation: Normalisation


class LlavaNext(PictureFamily):
    name = "llava_next"
    model_types = frozenset({"llava_next"})
    name_patterns = (("llava-next",), ("llava_next",), ("llava", "1.6"))
    limits = {Modality.IMAGE: 4}

    anchor_text = "<image>"
    feature_keys = ("image_token_index", "image_token_id")
    settings_type = LlavaNextSettings

    def settings(self, bundle: BundleConfig) -> LlavaNextSettings:
        stated = bundle.config.get("model_type")
        if isinstance(stated, str) and stated.startswith("llava_next_"):
            raise FamilyError(f"model_type {stated} is not a LLaVA-NeXT picture model")
        values = bundle.preprocessor
        short = whole(values, ("size",), 336)
        tile = whole(values, ("crop_size",), short)
        if short != tile or tile % 2:
            raise FamilyError(f"size {short} and crop_size {tile} differ: {self.name} cannot cut such tiles")
        patch = whole(section(bundle.config, "vision_config"), ("patch_size",), 14)
        return LlavaNextSettings(
            tile=tile,
            canvases=_canvases(bundle, tile),
            cells=tile // patch,
            base_tokens=tower_tokens(bundle.config, tile),
            resample=resample(values, BICUBIC, {BICUBIC: "bicubic", BILINEAR: "bilinear"}),
            normalisation=normalisation(values, CLIP_MEAN, CLIP_STD),
        )

    def measure(self, settings: LlavaNextSettings, modality: Modality, source: Source) -> Measured:
        self._measures_pictures(modality, source.height, source.width)
        height, width = _canvas(settings.canvases, source.height, source.width)
        rows, columns = height // settings.tile, width // settings.tile
        return Measured(
            primary_shape=(1, 1 + rows * columns, 3, settings.tile, settings.tile),
            feature_tokens=settings.base_tokens + _kept_tokens(settings.cells, rows, columns, source),
            resized=(height, width),
            side={"image_sizes": SideTensor("int64", (1, 2), (source.height, source.width))},
        )

    def reconcile(
        self, settings: LlavaNextSettings, modality: Modality, items: Sequence[Measured]
    ) -> Sequence[Measured]:
        """As many tiles for each as the largest has."""
        most = max(item.primary_shape[1] for item in items)
        return [
            msgspec.structs.replace(item, primary_shape=(1, most, *item.primary_shape[2:]))
            if item.primary_shape[1] != most
            else item
            for item in items
        ]

    def encode(
        self,
        settings: LlavaNextSettings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        height, width = _inside(measured.resized, frames.height, frames.width)
        top, left = (measured.resized[0] - height) // 2, (measured.resized[1] - width) // 2
        canvas = place(resize(frames, height, width, settings.resample), *measured.resized, top=top, left=left)
        begin = 0
        for view in (resize(frames, settings.tile, settings.tile, settings.resample), canvas):
            end = begin + view.height * view.width * 3 * ITEM_BYTES[form.dtype]
            patchify(
                [view],
                out[begin:end],
                patch=settings.tile,
                merge=1,
                temporal=1,
                normalisation=settings.normalisation if form.normalised else None,
                dtype=form.dtype,
            )
            begin = end
        out[begin:] = 0

    def layout(self, modality: Modality) -> Layout:
        self._pictures_only(modality)
        return Layout(batched=("pixel_values", "image_sizes"))


def _canvases(bundle: BundleConfig, tile: int) -> tuple[tuple[int, int], ...]:
    """The preprocessor's list, else the model's; FamilyError unless all are made of whole tiles."""
    listed = bundle.preprocessor.get("image_grid_pinpoints") or bundle.config.get("image_grid_pinpoints") or _PINPOINTS
    found = []
    for entry in listed if isinstance(listed, list) else [listed]:
        sides = entry if isinstance(entry, list) else []
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 and side % tile == 0 for side in sides):
            raise FamilyError(f"image_grid_pinpoints must be pairs of multiples of {tile}, got {entry!r}")
        found.append((sides[0], sides[1]))
    return tuple(found)


def _canvas(canvases: Sequence[tuple[int, int]], height: int, width: int) -> tuple[int, int]:
    """The canvas that keeps most of the picture's pixels, then wastes least; the first of equals."""

    def kept(canvas: tuple[int, int]) -> int:
        scale = min(canvas[1] / width, canvas[0] / height)
        return min(int(width * scale) * int(height * scale), width * height)

    return max(canvases, key=lambda canvas: (kept(canvas), kept(canvas) - canvas[0] * canvas[1]))


def _inside(canvas: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """The largest size within the canvas that keeps the ratio; the side that does not touch is rounded up."""
    down, across = canvas[0] / height, canvas[1] / width
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


def _kept_tokens(cells: int, rows: int, columns: int, source: Source) -> int:
    """Tokens of the tiles after the model cut off the border, and one newline for every row that is left."""
    down, across = cells * rows, cells * columns
    if source.width / source.height > across / down:
        down -= (down - int(round(source.height * (across / source.width), 7))) // 2 * 2
    else:
        across -= (across - int(round(source.width * (down / source.height), 7))) // 2 * 2
    return down * across + down
