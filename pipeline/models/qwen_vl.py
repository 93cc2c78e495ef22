"""Qwen2-VL and Qwen2.5-VL: pictures.

Patches of 14 pixels, CLIP's mean and std.  Bounds of a checkpoint without preprocessor_config.json are the reference
class's own (checkpoints state 3,136 and 12,845,056).  The anchor is the token `image_token_id` names, as in the
checkpoints' templates; SMG looks for `<image>`, which their vocabulary lacks.  Reference: transformers 5.24
`Qwen2VLImageProcessor`.
"""

from engines.base import Modality
from pipeline.models._qwen_vl import QwenVision
from pipeline.models._values import CLIP_MEAN, CLIP_STD


class QwenVL(QwenVision):
    name = "qwen_vl"
    model_types = frozenset({"qwen2_vl", "qwen2_5_vl"})
    name_patterns = (("qwen", "vl"),)
    limits = {Modality.IMAGE: 10}

    patch = 14
    min_pixels = 3_136
    max_pixels = 1_003_520
    mean = CLIP_MEAN
    std = CLIP_STD
    grids_on_cpu = ("image_grid_thw",)
