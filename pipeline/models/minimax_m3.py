"""MiniMax-M3: pictures and clips.

Patches of 14 pixels, CLIP's mean and std, at most 672x672 pixels, of a clip 602,112 a frame.  The template renders a
bare anchor, so the run of pads brings its markers: start of image, pads, end of image; a clip has one for each of its
steps, with the time before it (`]<]2.0 seconds[>[`).  References: transformers 5.24 `MiniMaxM3VLImageProcessor`,
`MiniMaxM3VLVideoProcessor`, `MiniMaxM3VLProcessor`, which leave sampling to the caller: one frame for each interval, as
SMG; with `max_long_side_pixel` the long-side mode of vLLM 0.32's processor, which alone knows a least short side (SMG
has it for every picture).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engines.base import Modality
from pipeline.models._clips import ClipSettings, QwenClips, clip_of
from pipeline.models._qwen_vl import Cell, QwenSettings, missing
from pipeline.models._sampling import by_interval, seconds_of, spread_down
from pipeline.models._values import CLIP_MEAN, CLIP_STD, whole
from pipeline.models.base import (
    Anchor,
    BundleConfig,
    FamilyError,
    Measured,
    MediaError,
    Replacement,
    Source,
    VllmItems,
    Vocabulary,
)
from pipeline.transforms import refuse_thin

# vLLM 0.32, long-side mode: fixed, no configuration names them
SHORT_SIDE = 112
LONG_SIDE_AREA = 12_845_056
LONG_SIDE_VOLUME = 301_056_000  # of a clip: area times frames


class MiniMaxM3(QwenClips):
    name = "minimax_m3"
    model_types = frozenset({"minimax_m3_vl"})
    name_patterns = (("minimax", "m3"),)
    limits = {Modality.IMAGE: 200, Modality.VIDEO: 20}
    worker_side = frozenset({Modality.IMAGE, Modality.VIDEO})
    vllm_items = VllmItems(side=("image_grid_thw", "video_grid_thw"))
    own_long_side = True

    patch = 14
    min_pixels = 3_136
    max_pixels = 451_584
    clip_min_pixels = 3_136
    clip_max_pixels = 602_112
    clip_rate = 1.0
    samples_by_interval = True
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
        factor = settings.patch * settings.merge
        height, width = long_side_sizes(source.height, source.width, factor=factor, cap=cap)
        if height * width > LONG_SIDE_AREA:
            raise MediaError(
                f"a picture of {source.width}x{source.height} pixels becomes {height * width} pixels with "
                f"max_long_side_pixel {cap}, above the limit of {LONG_SIDE_AREA}"
            )
        return height, width

    def sample(self, settings: Any, source: Source) -> Sequence[int]:
        """Too few frames, or too many, are spread evenly instead."""
        clip = clip_of(settings)
        found = by_interval(source.frames, source.rate, 1 / self.sampling(settings, source.hints).rate)
        if clip.least <= len(found) <= clip.most:
            return found
        return spread_down(source.frames, clip.least if len(found) < clip.least else clip.most)

    def clip_sizes(self, clip: ClipSettings, source: Source, frames: int) -> tuple[int, int]:
        """The bounds are a frame's; in long-side mode the volume is bounded instead."""
        cap = source.hints.max_long_side
        if cap is None:
            return super().clip_sizes(clip, source, frames)
        height, width = long_side_sizes(source.height, source.width, factor=clip.factor, cap=cap)
        if frames * height * width > LONG_SIDE_VOLUME:
            raise MediaError(
                f"{frames} frames of {source.width}x{source.height} pixels become {frames * height * width} pixels "
                f"with max_long_side_pixel {cap}, above the limit of {LONG_SIDE_VOLUME}"
            )
        return height, width

    def clip_seconds(self, clip: ClipSettings, indices: Sequence[int], rate: float) -> tuple[float, ...]:
        return seconds_of(indices, rate, clip.temporal, middle=False)

    def steps(
        self, bundle: BundleConfig, vocabulary: Vocabulary, seconds: Sequence[float]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        start, end = self._marker_ids(vocabulary)
        for time in seconds:
            yield [*vocabulary.encode(f"]<]{time:.1f} seconds[>["), start], [end]

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        pads = super().replacement(bundle, vocabulary, modality, measured)
        if modality is Modality.VIDEO:
            return pads
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

    The usual bounds of the area do not count here.  Raises MediaError above a side ratio of 200.
    """
    refuse_thin(height, width)
    scale = 1.0
    if max(height, width) > cap:
        scale = cap / max(height, width)
    elif min(height, width) < SHORT_SIDE:
        scale = SHORT_SIDE / min(height, width)
    rows, columns = (max(1, round(side * scale / factor)) for side in (height, width))
    return rows * factor, columns * factor
