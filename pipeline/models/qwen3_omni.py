"""Qwen3-Omni: pictures and sounds.

Patches of 16 pixels with the bounds of Qwen2-VL; token ids stand in config.json's `thinker_config`, at its top level in
the thinker's own config.  Clips are not served yet; their anchor is known, so none reaches an engine from text.
References: transformers 5.24 `Qwen2VLImageProcessor` and `WhisperFeatureExtractor` as `Qwen3OmniMoeProcessor` uses
them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from engines.base import Modality
from pipeline.models._audio import QwenSounds, SoundSettings
from pipeline.models._qwen_vl import QwenSettings, QwenVision
from pipeline.models.base import BundleConfig


class OmniSettings(QwenSettings, frozen=True, kw_only=True):
    sound: SoundSettings


class Qwen3Omni(QwenSounds, QwenVision):
    name = "qwen3_omni"
    model_types = frozenset({"qwen3_omni_moe", "qwen3_omni_moe_thinker"})
    name_patterns = (("qwen3-omni",), ("qwen3_omni",))
    limits = {Modality.IMAGE: 10, Modality.AUDIO: 10}
    settings_type = OmniSettings

    patch = 16
    min_pixels = 3_136
    max_pixels = 12_845_056
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    anchor_text = {**QwenVision.anchor_text, Modality.AUDIO: "<|audio_pad|>"}
    token_id_key = {**QwenVision.token_id_key, Modality.AUDIO: "audio_token_id"}

    def settings(self, bundle: BundleConfig) -> OmniSettings:
        return OmniSettings(**msgspec.structs.asdict(super().settings(bundle)), sound=self.sound_settings(bundle))

    def token_config(self, bundle: BundleConfig) -> Mapping[str, Any]:
        thinker = bundle.config.get("thinker_config")
        return {**bundle.config, **thinker} if isinstance(thinker, Mapping) else bundle.config
