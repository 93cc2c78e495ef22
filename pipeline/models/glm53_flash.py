"""GLM-5.3-Flash: pictures and clips.

The picture keeps its ratio: it is scaled to fit a canvas of whole cells and lies in its top left corner on black, so
only a size on the canvas, never the picture's own, is a multiple of 28.  Budgets count pixels over the frames of a
patch: a picture is two frames deep.  Patches of 14 pixels, CLIP's mean and std.  Each step of a clip stands in the
prompt like a picture, with its time behind it: `2.0 seconds`.  References: transformers 5.24 `Glm5NextImageProcessor`,
`Glm5NextVideoProcessor`, `Glm5NextProcessor`; the limit on the side ratio is vLLM's and SMG's.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from PIL import Image

from engines.base import Modality
from pipeline.models._clips import ClipQwenSettings, ClipSettings, QwenClips, clip_of
from pipeline.models._qwen_vl import Cell, missing
from pipeline.models._sampling import at_rate, seconds_of
from pipeline.models._values import CLIP_MEAN, CLIP_STD, whole
from pipeline.models.base import Anchor, BundleConfig, FamilyError, Measured, Source, VllmItems, Vocabulary
from pipeline.transforms import refuse_thin, resize


class GlmClipSettings(ClipSettings, frozen=True):
    """As `GlmSettings`, of clips."""

    expand: int

    @property
    def factor(self) -> int:
        return self.patch * self.merge * self.expand


class GlmSettings(ClipQwenSettings, frozen=True, kw_only=True):
    """`min_pixels`, `max_pixels` are volumes here, frames times area; `expand` tokens a side share one embedding."""

    expand: int
    clip: GlmClipSettings | None = None

    @property
    def factor(self) -> int:
        """What both sides of a canvas are a multiple of."""
        return self.patch * self.merge * self.expand


class Glm53Flash(QwenClips):
    name = "glm53_flash"
    model_types = frozenset({"glm53_flash", "glm5_next"})
    name_patterns = (("glm-5.3-flash",), ("glm5.3-flash",), ("glm-5-next",), ("glm5-next",))
    limits = {Modality.IMAGE: 10, Modality.VIDEO: 1}
    worker_side = frozenset({Modality.IMAGE})
    vllm_items = VllmItems(side=("image_grid_thw",), normalises=True)

    patch = 14
    min_tokens = 16
    max_tokens = 8_000
    clip_max_tokens = 240_000
    least_frames = 1
    most_frames = 2_048
    mean = CLIP_MEAN
    std = CLIP_STD
    anchor_text = {Modality.IMAGE: "<|image|>", Modality.VIDEO: "<|video|>"}
    settings_type = GlmSettings
    markers = ("<|begin_of_image|>", "<|end_of_image|>")

    def modalities(self, bundle: BundleConfig) -> frozenset[Modality]:
        """Pictures when config.json states `image_token_id`, clips when it states `video_token_id` as well."""
        return super().modalities(bundle) if bundle.config.get("image_token_id") is not None else frozenset()

    def settings(self, bundle: BundleConfig) -> GlmSettings:
        base = super().settings(bundle)
        found = GlmSettings(**msgspec.structs.asdict(base), expand=_expand(bundle.preprocessor))
        if found.max_pixels < found.temporal * found.factor**2:
            raise FamilyError(
                f"max_pixels {found.max_pixels} is too small for one cell of {found.factor} pixels a side"
            )
        return found

    def clip_settings(self, bundle: BundleConfig) -> GlmClipSettings:
        return GlmClipSettings(**msgspec.structs.asdict(super().clip_settings(bundle)), expand=_expand(bundle.video))

    def clip_bounds(self, values: Mapping[str, Any], cell: Cell) -> tuple[int, int]:
        return self._volumes(values, cell, self.clip_max_tokens)

    def bounds(self, values: Mapping[str, Any], cell: Cell) -> tuple[int, int]:
        """Token bounds times the pixels of a token, unless pixel bounds are stated."""
        return self._volumes(values, cell, self.max_tokens)

    def _volumes(self, values: Mapping[str, Any], cell: Cell, max_tokens: int) -> tuple[int, int]:
        token = cell.temporal * (cell.patch * cell.merge * _expand(values)) ** 2
        low = whole(values, ("min_image_tokens",), self.min_tokens) * token
        high = whole(values, ("max_image_tokens",), max_tokens) * token
        return whole(values, ("min_pixels",), low), whole(values, ("max_pixels",), high)

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """The family's own placeholder, whatever id the embeddings land on."""
        if modality is Modality.VIDEO:
            self._marker_ids(vocabulary)
        return self.anchor_by_text(vocabulary, modality)

    def feature_token(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> int:
        """The embeddings of a clip land on the token of pictures."""
        return super().feature_token(bundle, vocabulary, Modality.IMAGE if modality is Modality.VIDEO else modality)

    def sample(self, settings: Any, source: Source) -> Sequence[int]:
        clip = clip_of(settings)
        return at_rate(source.frames, source.rate, self.sampling(settings, source.hints).rate, clip.most)

    def clip_sizes(self, clip: ClipSettings, source: Source, frames: int) -> tuple[int, int]:
        """The bounds are volumes, frames times area."""
        assert isinstance(clip, GlmClipSettings)
        canvas, _ = fit(source.height, source.width, clip, frames=frames)
        return canvas

    def clip_seconds(self, clip: ClipSettings, indices: Sequence[int], rate: float) -> tuple[float, ...]:
        return seconds_of(indices, rate, clip.temporal, middle=False)

    def steps(
        self, bundle: BundleConfig, vocabulary: Vocabulary, seconds: Sequence[float]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        begin, end = self._marker_ids(vocabulary)
        for time in seconds:
            yield [begin], [end, *vocabulary.encode(f"{time:.1f} seconds")]

    def _marker_ids(self, vocabulary: Vocabulary) -> tuple[int, int]:
        begin, end = (vocabulary.id_of(text) for text in self.markers)
        if begin is None or end is None:
            raise missing(Modality.VIDEO, self.markers[0] if begin is None else self.markers[1])
        return begin, end

    def sizes(self, settings: GlmSettings, source: Source) -> tuple[int, int]:
        canvas, _ = fit(source.height, source.width, settings, frames=settings.temporal)
        return canvas

    def fitted(self, settings: GlmSettings, picture: Image.Image, height: int, width: int) -> Image.Image:
        """The picture on its canvas; black before normalising is what the reference pads with."""
        return _on_canvas(picture, settings, settings.temporal)

    def fitted_frame(self, clip: ClipSettings, frame: Image.Image, measured: Measured) -> Image.Image:
        assert isinstance(clip, GlmClipSettings)
        return _on_canvas(frame, clip, measured.frames)


def _on_canvas(picture: Image.Image, settings: GlmSettings | GlmClipSettings, frames: int) -> Image.Image:
    (height, width), content = fit(picture.height, picture.width, settings, frames=frames)
    content_picture = resize(picture, *content, settings.resample)
    if content == (height, width):
        return content_picture
    canvas = Image.new("RGB", (width, height))
    canvas.paste(content_picture, (0, 0))
    return canvas


def _expand(values: Mapping[str, Any]) -> int:
    return whole(values, ("patch_expand_factor",), 1)


def fit(
    height: int, width: int, settings: GlmSettings | GlmClipSettings, *, frames: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Canvas and content size, each height, width: sides of the canvas are multiples of `settings.factor`, the content
    keeps its ratio and is enlarged only when the volume is below the lower bound.

    Raises MediaError above a side ratio of 200.
    """
    refuse_thin(height, width)
    depth = max(settings.temporal, round(frames / settings.temporal) * settings.temporal)
    canvas_height, canvas_width = _up(height, settings), _up(width, settings)
    if depth * canvas_height * canvas_width < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (frames * height * width))
        canvas_height, canvas_width = _up(math.ceil(height * grow), settings), _up(math.ceil(width * grow), settings)
    if depth * canvas_height * canvas_width > settings.max_pixels:
        canvas_height, canvas_width = _largest_canvas(height, width, settings, depth)
    scale = min(canvas_height / height, canvas_width / width)
    if frames * height * width >= settings.min_pixels:
        scale = min(scale, 1.0)
    content_height = max(1, min(canvas_height, math.floor(height * scale)))
    content_width = max(1, min(canvas_width, math.floor(width * scale)))
    return (canvas_height, canvas_width), (content_height, content_width)


def _up(side: int, settings: GlmSettings | GlmClipSettings) -> int:
    return -(-side // settings.factor) * settings.factor


def _largest_canvas(height: int, width: int, settings: GlmSettings | GlmClipSettings, depth: int) -> tuple[int, int]:
    """The canvas of the largest height of content whose volume is within the bound; one cell when there is none."""

    def canvas(content_height: int) -> tuple[int, int]:
        return _up(content_height, settings), _up(max(1, width * content_height // height), settings)

    def volume(content_height: int) -> int:
        canvas_height, canvas_width = canvas(content_height)
        return depth * canvas_height * canvas_width

    fitting = bisect_right(range(1, height + 1), settings.max_pixels, key=volume)
    return canvas(fitting) if fitting else (settings.factor, settings.factor)
