"""Qwen3-VL, Qwen3.5, Qwen3.6 and Qwen4-Exp: pictures.

Patches of 16 pixels, mean and std 0.5, so a value is `(x - 127.5) / 127.5`.  Bounds of a checkpoint without
preprocessor_config.json are SMG's.  Reference: transformers 5.24 `Qwen2VLImageProcessor` as `Qwen3VLProcessor` uses it.
"""

from engines.base import Modality
from pipeline.models._qwen_vl import QwenVision


class Qwen3VL(QwenVision):
    name = "qwen3_vl"
    model_types = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"})
    name_patterns = (("qwen3", "vl"), ("qwen3.5",), ("qwen3.6",))
    limits = {Modality.IMAGE: 10}
    worker_side = frozenset({Modality.IMAGE})

    patch = 16
    min_pixels = 65_536
    max_pixels = 16_777_216
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
