"""Kimi-K2.5: pictures.

The template writes `<|media_begin|>image<|media_content|>` and `<|media_end|>` around the anchor; transparency is
composited over white.  Reference: transformers 5.24 `Kimi_K25ImageProcessor`, whose `image_grid_thw` travels as
`grid_thws`.
"""

from pipeline.models._kimi import KimiVision


class KimiK25(KimiVision):
    name = "kimi_k25"
    model_types = frozenset({"kimi_k25"})
    name_patterns = (("kimi", "k2"),)

    patch_limit = 16_384
