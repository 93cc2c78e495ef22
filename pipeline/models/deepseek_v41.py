"""DeepSeek-V4.1: pictures.

A picture keeps its ratio on a gray canvas of whole patches; three by three patches become one token, and the prompt
holds a token for every cell, one at the end of every row and one at either end.  Values are config.json's
`vision_config`; preprocessor_config.json may override them, as in SMG.  Reference: vLLM, known from SMG and
the `direct` vectors of our references; it fits with stock Pillow (`ImageOps.pad`), up to 2 levels from ours.
"""

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import Form, Layout, Modality
from pipeline.crops import place
from pipeline.models._picture import PictureFamily
from pipeline.models._values import normalisation, number, section, whole
from pipeline.models.base import BundleConfig, FamilyError, Measured, SideTensor, Source
from pipeline.transforms import BICUBIC, Normalisation, patchify, resize

_GRAY = (127, 127, 127)
_START, _CELL, _ROW_END, _END = 0, 1, 2, 3  # roles of the tokens, as the encoder numbers them


class DeepSeekSettings(msgspec.Struct, frozen=True):
    """`token_limit` bounds a picture's tokens, the marks included; pictures below `min_pixels` are enlarged; from
    `stretch_ratio` (width to height) on they are stretched over the canvas.
    """

    patch: int
    cell: int
    token_limit: int
    min_pixels: int
    stretch_ratio: float | None
    normalisation: Normalisation


class DeepSeekV41(PictureFamily):
    name = "deepseek_v41"
    model_types = frozenset({"deepseek_v41"})
    name_patterns = (("deepseek-v4.1",), ("deepseek_v41",))
    limits = {Modality.IMAGE: 128}

    anchor_text = "<｜deepseek_image｜>"
    feature_keys = ("image_token_id",)
    settings_type = DeepSeekSettings

    def settings(self, bundle: BundleConfig) -> DeepSeekSettings:
        values = {**section(bundle.config, "vision_config"), **bundle.preprocessor}
        found = DeepSeekSettings(
            patch=whole(values, ("patch_size",), 14),
            cell=whole(values, ("downsample_ratio",), 3),
            token_limit=whole(values, ("max_image_tokens",), 1024),
            min_pixels=whole(values, ("min_pixels",), 295_936),
            stretch_ratio=number(values, "max_wh_ratio"),
            normalisation=normalisation(values, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        )
        if found.patch % 2:
            raise FamilyError(f"patch_size {found.patch} is odd: {self.name} cannot lay out such patches")
        if found.token_limit < 5:
            raise FamilyError(f"max_image_tokens {found.token_limit} has no room for one cell and its marks")
        return found

    def measure(self, settings: DeepSeekSettings, modality: Modality, source: Source) -> Measured:
        self._measures_pictures(modality, source.height, source.width)
        height, width = _canvas(settings, source.height, source.width)
        grid = height // settings.patch, width // settings.patch
        cells = _cells(settings, height, width)
        types = (_START, *((_CELL,) * cells[1] + (_ROW_END,)) * cells[0], _END)
        return Measured(
            primary_shape=(grid[0] * grid[1], 3, settings.patch, settings.patch),
            feature_tokens=len(types),
            resized=(height, width),
            side={
                "vit_grid": SideTensor("int64", (1, 2), grid),
                "llm_grid": SideTensor("int64", (1, 2), cells),
                "types": SideTensor("int64", (len(types),), types),
                "patches_per_image": SideTensor("int64", (1,), (grid[0] * grid[1],)),
                "types_per_image": SideTensor("int64", (1,), (len(types),)),
            },
        )

    def encode(
        self,
        settings: DeepSeekSettings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        """A worker that normalises gets the bytes, the gray border included."""
        patchify(
            [_fitted(settings, frames, *measured.resized)],
            out,
            patch=settings.patch,
            merge=1,
            temporal=1,
            normalisation=settings.normalisation if form.normalised else None,
            dtype=form.dtype,
        )

    def layout(self, modality: Modality) -> Layout:
        self._pictures_only(modality)
        return Layout(
            batched=("vit_grid", "llm_grid", "patches_per_image", "types_per_image"),
            flat={"patches": "patches_per_image", "types": "types_per_image"},
            keep_on_cpu=("vit_grid", "llm_grid", "types"),
            encoder_input_key="patches",
        )


def _canvas(settings: DeepSeekSettings, height: int, width: int) -> tuple[int, int]:
    """The sides in whole patches, the tokens within the limit: the picture's own, else the largest that fit."""
    if height * width < settings.min_pixels:
        grow = (settings.min_pixels / (height * width)) ** 0.5
        height, width = int(height * grow), int(width * grow)
    canvas = -(-height // settings.patch) * settings.patch, -(-width // settings.patch) * settings.patch
    rows, columns = _cells(settings, *canvas)
    if rows * (columns + 1) + 2 <= settings.token_limit:
        return canvas
    cell, room = settings.patch * settings.cell, settings.token_limit - 2
    ratio = height / width
    most_columns = math.sqrt(room / ratio + 0.25) - 0.5
    most_rows = most_columns * ratio
    if most_columns < 1:
        return room // 2 * cell, cell
    if most_rows < 1:
        return cell, (room - 1) * cell
    shrink = min(math.floor(most_columns) * cell / width, math.floor(most_rows) * cell / height)
    return (
        math.floor(height * shrink / settings.patch) * settings.patch,
        math.floor(width * shrink / settings.patch) * settings.patch,
    )


def _cells(settings: DeepSeekSettings, height: int, width: int) -> tuple[int, int]:
    return -(-(height // settings.patch) // settings.cell), -(-(width // settings.patch) // settings.cell)


def _fitted(settings: DeepSeekSettings, picture: Image.Image, height: int, width: int) -> Image.Image:
    """The picture as large as the canvas allows, centred on gray: sizes and offsets rounded half to even, as Pillow's
    `ImageOps.pad` does.
    """
    if settings.stretch_ratio is not None and picture.width >= settings.stretch_ratio * picture.height:
        return resize(picture, height, width, BICUBIC)
    inner_height, inner_width = height, width
    if picture.width / picture.height > width / height:
        inner_height = max(1, round(picture.height / picture.width * width))
    elif picture.width / picture.height < width / height:
        inner_width = max(1, round(picture.width / picture.height * height))
    top, left = round((height - inner_height) * 0.5), round((width - inner_width) * 0.5)
    return place(resize(picture, inner_height, inner_width, BICUBIC), height, width, top=top, left=left, colour=_GRAY)
