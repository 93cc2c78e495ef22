"""Qwen3-Omni: pictures, clips and sounds.

Patches of 16 pixels with the bounds of Qwen2-VL; token ids stand in config.json's `thinker_config`, at its top level in
the thinker's own config.  A clip's bounds count the pixels of a frame, its prompt states no times; the processor's
class leaves sampling to the caller, so frames are SMG's.  References: transformers 5.24 `Qwen2VLImageProcessor`,
`Qwen2VLVideoProcessor` and `WhisperFeatureExtractor` as `Qwen3OmniMoeProcessor` uses them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines.base import Modality
from pipeline.models._audio import QwenSounds, SoundSettings
from pipeline.models._clips import ClipQwenSettings, ClipSettings, QwenClips, clip_of
from pipeline.models._qwen_vl import Cell
from pipeline.models._sampling import clamped, spread_down
from pipeline.models.base import BundleConfig, Source


class OmniSettings(ClipQwenSettings, frozen=True, kw_only=True):
    sound: SoundSettings


class Qwen3Omni(QwenSounds, QwenClips):
    name = "qwen3_omni"
    model_types = frozenset({"qwen3_omni_moe", "qwen3_omni_moe_thinker"})
    name_patterns = (("qwen3-omni",), ("qwen3_omni",))
    limits = {Modality.IMAGE: 10, Modality.VIDEO: 1, Modality.AUDIO: 10}
    settings_type = OmniSettings

    patch = 16
    min_pixels = 3_136
    max_pixels = 12_845_056
    clip_min_pixels = 131_072
    clip_max_pixels = 786_432
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    anchor_text = {**QwenClips.anchor_text, Modality.AUDIO: "<|audio_pad|>"}
    token_id_key = {**QwenClips.token_id_key, Modality.AUDIO: "audio_token_id"}

    def settings(self, bundle: BundleConfig) -> OmniSettings:
        return OmniSettings(**msgspec.structs.asdict(super().settings(bundle)), sound=self.sound_settings(bundle))

    def token_config(self, bundle: BundleConfig) -> Mapping[str, Any]:
        thinker = bundle.config.get("thinker_config")
        return {**bundle.config, **thinker} if isinstance(thinker, Mapping) else bundle.config

    def clip_bounds(self, values: Mapping[str, Any], cell: Cell) -> tuple[int, int]:
        """A configuration that is only about pictures, read for lack of another, does not bound clips."""
        is_of_pictures = "ImageProcessor" in str(values.get("image_processor_type")) and (
            "video_processor_type" not in values
        )
        return super().clip_bounds({} if is_of_pictures else values, cell)

    def sample(self, settings: Any, source: Source) -> Sequence[int]:
        clip = clip_of(settings)
        wanted = math.floor(source.duration * self.sampling(settings, source.hints).rate + 0.5)
        return spread_down(source.frames, clamped(wanted, clip.least, clip.most))

    def clip_seconds(self, clip: ClipSettings, indices: Sequence[int], rate: float) -> tuple[float, ...]:
        return ()
