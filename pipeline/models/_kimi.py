"""What the Kimi vision families share: native resolution, never enlarged, black to whole merge cells on the right and
below, patches row by row.

Not a family itself.  Values come from `media_proc_cfg` of preprocessor_config.json, or from its top level as
transformers writes them.  Reference: transformers 5.24 `Kimi_K25ImageProcessor` (`navit_resize`).
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import Form, Layout, Modality
from pipeline.crops import place
from pipeline.models._picture import PictureFamily
from pipeline.models._values import normalisation, section, whole
from pipeline.models.base import BundleConfig, FamilyError, Measured, SideTensor, Source
from pipeline.transforms import BICUBIC, Normalisation, patchify, resize


class Chessboard(msgspec.Struct, frozen=True):
    """What shows through transparent pixels: squares of two grays, the light one in the top left corner.

    `before_resize`: painted at the picture's own size, else at the resized one.
    """

    square: int
    light: int
    dark: int
    before_resize: bool


class KimiSettings(msgspec.Struct, frozen=True):
    """`patch_limit` bounds the patches of a picture, `side_limit` those of one side.  `board` None: no transparency
    reaches the family.
    """

    patch: int
    merge: int
    patch_limit: int
    side_limit: int
    normalisation: Normalisation
    board: Chessboard | None = None


class KimiVision(PictureFamily):
    """Pictures of the Kimi families."""

    anchor_text = "<|media_pad|>"
    feature_keys = ("media_placeholder_token_id", "image_token_id")
    patch_limit: ClassVar[int]

    settings_type = KimiSettings

    def modalities(self, bundle: BundleConfig) -> frozenset[Modality]:
        """The text models of the same name have no vision tower."""
        return frozenset(self.limits) if section(bundle.config, "vision_config") else frozenset()

    def settings(self, bundle: BundleConfig) -> KimiSettings:
        values = section(bundle.preprocessor, "media_proc_cfg") or bundle.preprocessor
        if values.get("fixed_output_tokens") is not None:
            raise FamilyError("fixed_output_tokens is not supported")
        found = KimiSettings(
            patch=whole(values, ("patch_size",), 14),
            merge=whole(values, ("merge_kernel_size", "merge_size"), 2),
            patch_limit=whole(values, ("in_patch_limit", "max_patches"), self.patch_limit),
            side_limit=whole(
                values, ("patch_limit_on_one_side",), whole(section(values, "size"), ("max_height",), 512)
            ),
            normalisation=normalisation(values, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            board=self._board(values),
        )
        if found.patch % 2:
            raise FamilyError(f"patch_size {found.patch} is odd: {self.name} cannot lay out such patches")
        return found

    def _board(self, values: Mapping[str, Any]) -> Chessboard | None:
        return None

    def measure(self, settings: KimiSettings, modality: Modality, source: Source) -> Measured:
        self._measures_pictures(modality, source.height, source.width)
        cell = settings.patch * settings.merge
        height, width = (-(-side // cell) * cell for side in _content(settings, source.height, source.width))
        rows, columns = height // settings.patch, width // settings.patch
        return Measured(
            primary_shape=(rows * columns, 3, settings.patch, settings.patch),
            feature_tokens=rows * columns // settings.merge**2,
            resized=(height, width),
            side={
                "grid_thws": SideTensor("int64", (1, 3), (1, rows, columns)),
                "patches_per_image": SideTensor("int64", (1,), (rows * columns,)),
            },
            stated_size=(source.height, source.width),
        )

    def encode(
        self,
        settings: KimiSettings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        """A worker that normalises gets the bytes, the black border included."""
        picture = self._resized(settings, frames, *_content(settings, frames.height, frames.width))
        patchify(
            [place(picture, *measured.resized)],
            out,
            patch=settings.patch,
            merge=1,
            temporal=1,
            normalisation=settings.normalisation if form.normalised else None,
            dtype=form.dtype,
        )

    def _resized(self, settings: KimiSettings, picture: Image.Image, height: int, width: int) -> Image.Image:
        return resize(picture, height, width, BICUBIC)

    def layout(self, modality: Modality) -> Layout:
        self._pictures_only(modality)
        return Layout(
            batched=("grid_thws", "patches_per_image"),
            flat={"pixel_values": "patches_per_image"},
            keep_on_cpu=("grid_thws",),
        )


def _content(settings: KimiSettings, height: int, width: int) -> tuple[int, int]:
    """The resized picture without its border: both sides by one factor, cut off, each within the side limit."""
    longest = settings.side_limit * settings.patch
    patches = max(1, height // settings.patch) * max(1, width // settings.patch)
    scale = min(1.0, math.sqrt(settings.patch_limit / patches), longest / height, longest / width)
    return min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest)
