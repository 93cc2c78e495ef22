"""MiniMax-M3: pictures.

Patches of 14 pixels, CLIP's mean and std, at most 672x672 pixels.  The template renders a bare anchor, so the run of
pads brings its markers: start of image, pads, end of image.  Reference: transformers 5.24 `MiniMaxM3VLImageProcessor`;
with `max_long_side_pixel` the long-side mode of vLLM 0.32's processor, which alone knows a least short side (SMG has it
for every picture).
"""

from collections.abc import Mapping
from typing import Any

from engines.base import Modality
from pipeline.models._qwen_vl import Cell, QwenSettings, QwenVision, missing
from pipeline.models._values import CLIP_MEAN, CLIP_STD, whole
from pipeline.models.base import (
    Anchor,
    BundleConfig,
    FamilyError,
    Measured,
    MediaError,
    Replacement,
    Source,
    Vocabulary,
)
from pipeline.transforms import refuse_thin

# vLLM 0.32, long-side mode: fixed, no configuration names them
SHORT_SIDE = 112
LONG_SIDE_AREA = 12_845_056


class MiniMaxM3(QwenVision):
    name = "minimax_m3"
    model_types = frozenset({"minimax_m3_vl"})
    name_patterns = (("minimax", "m3"),)
    limits = {Modality.IMAGE: 200}
    worker_side = frozenset({Modality.IMAGE})
    own_long_side = True

    patch = 14
    min_pixels = 3_136
    max_pixels = 451_584
    mean = CLIP_MEAN
    std = CLIP_STD
    anchor_text = {Modality.IMAGE: "]<]image[>[", Modality.VIDEO: "]<]video[>["}
    token_id_key = {Modality.IMAGE: "image_token_index", Modality.VIDEO: "video_token_index"}
    markers = ("]<]start of image[>[", "]<]end of image[>[")

    def cell(self, values: Mapping[str, Any]) -> Cell:
        """Sizes that preprocessor_config.json does not state itself may stand in its `img_token_compression_config`."""
        found = super().cell(values)
        nested = values.get("img_token_compression_config")
        if nested is None:
            return found
        if not isinstance(nested, Mapping):
            raise FamilyError(f"img_token_compression_config must be an object, got {nested!r}")
        merge = whole(nested, ("spatial_merge_size",), found.merge)
        temporal = whole(nested, ("temporal_patch_size",), found.temporal)
        return Cell(
            patch=found.patch,
            merge=merge if values.get("merge_size") is None else found.merge,
            temporal=temporal if values.get("temporal_patch_size") is None else found.temporal,
        )

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """Raises FamilyError also when a marker is missing: no item could be laid out."""
        found = super().anchor(bundle, vocabulary, modality)
        self._marker_ids(vocabulary)
        return found

    def sizes(self, settings: QwenSettings, source: Source) -> tuple[int, int]:
        cap = source.hints.max_long_side
        if cap is None:
            return super().sizes(settings, source)
        return long_side_sizes(source.height, source.width, factor=settings.patch * settings.merge, cap=cap)

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        pads = super().replacement(bundle, vocabulary, modality, measured)
        start, end = self._marker_ids(vocabulary)
        return Replacement(token_ids=(start, *pads.token_ids, end), features=((1, measured.feature_tokens),))

    def _marker_ids(self, vocabulary: Vocabulary) -> tuple[int, int]:
        start, end = (vocabulary.id_of(text) for text in self.markers)
        if start is None or end is None:
            raise missing(Modality.IMAGE, self.markers[0] if start is None else self.markers[1])
        return start, end


def long_side_sizes(height: int, width: int, *, factor: int, cap: int) -> tuple[int, int]:
    """vLLM's long-side mode: a longer picture shrinks to `cap`, else a short side below 112 grows to 112; then both
    sides are rounded (half to even) to multiples of `factor`.

    The usual bounds of the area do not count here.  Raises MediaError above a side ratio of 200 or 12,845,056 pixels.
    """
    refuse_thin(height, width)
    scale = 1.0
    if max(height, width) > cap:
        scale = cap / max(height, width)
    elif min(height, width) < SHORT_SIDE:
        scale = SHORT_SIDE / min(height, width)
    rows, columns = (max(1, round(side * scale / factor)) for side in (height, width))
    area = rows * columns * factor**2
    if area > LONG_SIDE_AREA:
        raise MediaError(
            f"a picture of {width}x{height} pixels becomes {area} pixels with max_long_side_pixel {cap}, "
            f"above the limit of {LONG_SIDE_AREA}"
        )
    return rows * factor, columns * factor
