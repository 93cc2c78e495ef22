"""Qwen3-Omni: pictures.

Patches of 16 pixels with the bounds of Qwen2-VL; token ids stand in config.json's `thinker_config`, at its top level in
the thinker's own config.  Clips and sounds are not served yet; their anchors are known, so none reaches an engine from
text. Reference: transformers 5.24 `Qwen2VLImageProcessor` as `Qwen3OmniMoeProcessor` uses it.
"""

from collections.abc import Mapping
from typing import Any

from engines.base import Modality
from pipeline.models._qwen_vl import QwenVision
from pipeline.models.base import BundleConfig


class Qwen3Omni(QwenVision):
    name = "qwen3_omni"
    model_types = frozenset({"qwen3_omni_moe", "qwen3_omni_moe_thinker"})
    name_patterns = (("qwen3-omni",), ("qwen3_omni",))
    limits = {Modality.IMAGE: 10}

    patch = 16
    min_pixels = 3_136
    max_pixels = 12_845_056
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    anchor_text = {**QwenVision.anchor_text, Modality.AUDIO: "<|audio_pad|>"}
    token_id_key = {**QwenVision.token_id_key, Modality.AUDIO: "audio_token_id"}

    def token_config(self, bundle: BundleConfig) -> Mapping[str, Any]:
        thinker = bundle.config.get("thinker_config")
        return {**bundle.config, **thinker} if isinstance(thinker, Mapping) else bundle.config
