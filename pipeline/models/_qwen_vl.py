"""What the families of the Qwen kind share: the smart resize, merged patches in cells of 2x2, one run of pads for a
picture.

Not a family itself.  A family states its defaults (`patch`, bounds, mean and std of a checkpoint without
preprocessor_config.json) and overrides what it does otherwise: `sizes` and `fitted` for another way to fit a picture,
`cell` and `bounds` for other names in the configuration, `token_config` for ids in another place.  Clips get their own
measures there.  Reference: transformers 5.24 `Qwen2VLImageProcessor`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import Form, Layout, Modality
from pipeline.models._values import normalisation, resample, section, whole
from pipeline.models.base import (
    Anchor,
    BundleConfig,
    Family,
    FamilyError,
    Measured,
    MediaError,
    Replacement,
    SideTensor,
    Source,
    Vocabulary,
)
from pipeline.transforms import BICUBIC, BILINEAR, Normalisation, patchify, resize, smart_resize

_FILTERS = {BICUBIC: "bicubic", BILINEAR: "bilinear"}


class Cell(NamedTuple):
    """How pixels become tokens: `patch` pixels a side, `merge` patches a side to a token, `temporal` frames a patch."""

    patch: int
    merge: int
    temporal: int


class QwenSettings(msgspec.Struct, frozen=True):
    """preprocessor_config.json as far as pixels depend on it; pixel bounds are areas of the resized picture."""

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    resample: int
    normalisation: Normalisation


def areas(values: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    """The pixel bounds a configuration states, `least` and `most` where it is silent."""
    size = section(values, "size")
    low = whole(size, ("shortest_edge", "min_pixels"), least)
    high = whole(size, ("longest_edge", "max_pixels"), most)
    return whole(values, ("min_pixels",), low), whole(values, ("max_pixels",), high)


class QwenVision(Family):
    """Pictures of the Qwen vision families."""

    patch: ClassVar[int]
    min_pixels: ClassVar[int]
    max_pixels: ClassVar[int]
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]
    anchor_text: ClassVar[Mapping[Modality, str]] = {
        Modality.IMAGE: "<|image_pad|>",
        Modality.VIDEO: "<|video_pad|>",
    }
    token_id_key: ClassVar[Mapping[Modality, str]] = {
        Modality.IMAGE: "image_token_id",
        Modality.VIDEO: "video_token_id",
    }
    grids_on_cpu: ClassVar[tuple[str, ...]] = ("image_grid_thw", "video_grid_thw")  # as SMG lists them for the family

    settings_type: ClassVar[type[msgspec.Struct]] = QwenSettings

    def settings(self, bundle: BundleConfig) -> QwenSettings:
        values = bundle.preprocessor
        found = self.cell_settings(values, self.bounds(values, self.cell(values)))
        if values.get("do_resize") is False:
            raise FamilyError(f"do_resize false is not supported: {self.name} needs sides in multiples of its cells")
        return found

    def cell_settings(self, values: Mapping[str, Any], bounds: tuple[int, int], whose: str = "") -> QwenSettings:
        """What pictures and clips have in common, each of their own configuration.  Raises FamilyError."""
        cell, (low, high) = self.cell(values), bounds
        if cell.patch % 2:
            raise FamilyError(f"patch_size {cell.patch} is odd: {self.name} cannot lay out such patches")
        if low > high:
            raise FamilyError(f"min_pixels {low}{whose} is above max_pixels {high}")
        return QwenSettings(
            patch=cell.patch,
            merge=cell.merge,
            temporal=cell.temporal,
            min_pixels=low,
            max_pixels=high,
            resample=resample(values, BICUBIC, _FILTERS),
            normalisation=normalisation(values, self.mean, self.std),
        )

    def cell(self, values: Mapping[str, Any]) -> Cell:
        """`values`: preprocessor_config.json.  Raises FamilyError, as `bounds` does."""
        return Cell(
            patch=whole(values, ("patch_size",), self.patch),
            merge=whole(values, ("merge_size",), 2),
            temporal=whole(values, ("temporal_patch_size",), 2),
        )

    def bounds(self, values: Mapping[str, Any], cell: Cell) -> tuple[int, int]:
        """The least and the largest area.  `size` that is no mapping (MiniMax has a list) says nothing."""
        return areas(values, self.min_pixels, self.max_pixels)

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        token_id = self.feature_token(bundle, vocabulary, modality)
        text = vocabulary.token_of(token_id)
        if text is None:
            raise missing(modality, self.anchor_text[modality])
        return Anchor(token_id=token_id, text=text)

    def anchor_by_text(self, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """The family's own placeholder.  Raises FamilyError when the vocabulary lacks it."""
        if modality not in self.anchor_text:
            raise FamilyError(f"{self.name} has no token for {modality.value}")
        text = self.anchor_text[modality]
        token_id = vocabulary.id_of(text)
        if token_id is None:
            raise missing(modality, text)
        return Anchor(token_id=token_id, text=text)

    def feature_token(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> int:
        """The configured id; for a config without one, the id of the family's own placeholder."""
        if modality not in self.token_id_key:
            raise FamilyError(f"{self.name} has no token for {modality.value}")
        configured = self.token_config(bundle).get(self.token_id_key[modality])
        if isinstance(configured, int) and not isinstance(configured, bool):
            return configured
        return self.anchor_by_text(vocabulary, modality).token_id

    def token_config(self, bundle: BundleConfig) -> Mapping[str, Any]:
        """Where config.json states the token ids."""
        return bundle.config

    def measure(self, settings: QwenSettings, modality: Modality, source: Source) -> Measured:
        """A picture is one temporal step: `patches_per_image` is rows times columns.  MediaError: side ratio."""
        self._pictures_only(modality)
        height, width = self.sizes(settings, source)
        rows, columns = height // settings.patch, width // settings.patch
        return Measured(
            primary_shape=(rows * columns, 3 * settings.temporal * settings.patch**2),
            feature_tokens=rows * columns // settings.merge**2,
            resized=(height, width),
            side={
                "image_grid_thw": SideTensor("int64", (1, 3), (1, rows, columns)),
                "patches_per_image": SideTensor("int64", (1,), (rows * columns,)),
            },
        )

    def sizes(self, settings: Any, source: Source) -> tuple[int, int]:
        """Height, width of the picture that is cut into patches.  Raises MediaError."""
        return smart_resize(
            source.height,
            source.width,
            factor=settings.patch * settings.merge,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
        )

    def fitted(self, settings: Any, picture: Image.Image, height: int, width: int) -> Image.Image:
        """The picture in the size `sizes` said."""
        return resize(picture, height, width, settings.resample)

    def encode(
        self,
        settings: QwenSettings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        """Fit, then patches; a picture fills every temporal slot.  A worker that normalises gets the bytes."""
        self._pictures_only(modality)
        patchify(
            [self.fitted(settings, frames, *measured.resized)],
            out,
            patch=settings.patch,
            merge=settings.merge,
            temporal=settings.temporal,
            normalisation=settings.normalisation if form.normalised else None,
            dtype=form.dtype,
        )

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """The template's single pad becomes one for each merged patch; the markers around it stay the template's."""
        self._pictures_only(modality)
        count = measured.feature_tokens
        return Replacement(
            token_ids=(self.feature_token(bundle, vocabulary, modality),) * count, features=((0, count),)
        )

    def layout(self, modality: Modality) -> Layout:
        """As SMG 1.13.0 lists the keys of a picture batch."""
        self._pictures_only(modality)
        return Layout(
            batched=("image_grid_thw", "patches_per_image"),
            flat={"pixel_values": "patches_per_image"},
            keep_on_cpu=self.grids_on_cpu,
        )

    def _pictures_only(self, modality: Modality) -> None:
        if modality is not Modality.IMAGE:
            raise MediaError(f"{self.name} takes no {modality.value} here")


def missing(modality: Modality, text: str) -> FamilyError:
    return FamilyError(f"{modality.value} placeholder token '{text}' is missing from the tokenizer vocabulary")
