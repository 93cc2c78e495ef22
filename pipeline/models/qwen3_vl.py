"""Qwen3-VL, Qwen3.5, Qwen3.6 and Qwen4-Exp: pictures and clips.

Patches of 16 pixels, mean and std 0.5, so a value is `(x - 127.5) / 127.5`.  Bounds of a checkpoint without
preprocessor_config.json are SMG's.  A clip's bounds count the pixels of all its frames together, and each of its steps
stands in the prompt with its time: `<0.3 seconds>`, start, pads, end.  References: transformers 5.24
`Qwen2VLImageProcessor`, `Qwen3VLVideoProcessor` and `Qwen3VLProcessor`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from engines.base import Modality
from pipeline.models._clips import ClipSettings, QwenClips
from pipeline.models._qwen_vl import missing
from pipeline.models.base import BundleConfig, Source, VllmItems, Vocabulary
from pipeline.transforms import refuse_thin


class Qwen3VL(QwenClips):
    name = "qwen3_vl"
    model_types = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"})
    name_patterns = (("qwen3", "vl"), ("qwen3.5",), ("qwen3.6",))
    limits = {Modality.IMAGE: 10, Modality.VIDEO: 1}
    worker_side = frozenset({Modality.IMAGE, Modality.VIDEO})
    vllm_items = VllmItems(side=("image_grid_thw", "video_grid_thw"), times=True, normalises=True)

    patch = 16
    min_pixels = 65_536
    max_pixels = 16_777_216
    clip_min_pixels = 4_096
    clip_max_pixels = 25_165_824
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    markers: Mapping[str, str] = {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }

    def clip_sizes(self, clip: ClipSettings, source: Source, frames: int) -> tuple[int, int]:
        """The bounds are volumes, frames times area; a frame smaller than a cell is enlarged first."""
        height, width, factor = source.height, source.width, clip.factor
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        refuse_thin(height, width)
        depth = max(clip.temporal, round(frames / clip.temporal) * clip.temporal)
        rows, columns = round(height / factor), round(width / factor)
        volume = depth * rows * columns * factor**2
        if volume > clip.max_pixels:
            shrink = math.sqrt(frames * height * width / clip.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif volume < clip.min_pixels:
            grow = math.sqrt(clip.min_pixels / (frames * height * width))
            rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows * factor, columns * factor

    def steps(
        self, bundle: BundleConfig, vocabulary: Vocabulary, seconds: Sequence[float]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        start, end = (self._marker(bundle, vocabulary, key) for key in self.markers)
        for time in seconds:
            yield [*vocabulary.encode(f"<{time:.1f} seconds>"), start], [end]

    def _marker(self, bundle: BundleConfig, vocabulary: Vocabulary, key: str) -> int:
        stated = bundle.config.get(key)
        found = stated if isinstance(stated, int) else vocabulary.id_of(self.markers[key])
        if found is None:
            raise missing(Modality.VIDEO, self.markers[key])
        return found
