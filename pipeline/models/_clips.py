"""What the families of the Qwen kind share that take clips: frames chosen, fitted and laid out step by step, pads of
each step between markers with its time in words.

Not a family itself.  A family states its defaults and overrides what it does otherwise: `sample`, `clip_sizes`,
`clip_bounds`, `step` for the tokens of one temporal step.  A clip is worked on with as many frames in memory as a patch
is deep. References: the video processors of transformers 5.24.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import ITEM_BYTES, Form, Layout, Modality
from pipeline.models._qwen_vl import Cell, QwenSettings, QwenVision, areas
from pipeline.models._sampling import clamped, seconds_of, spread_to_nearest
from pipeline.models._values import number, whole
from pipeline.models.base import (
    BundleConfig,
    Hints,
    Measured,
    MediaError,
    Replacement,
    Sampling,
    SideTensor,
    Source,
    Vocabulary,
)
from pipeline.transforms import patchify, smart_resize


class ClipSettings(QwenSettings, frozen=True, kw_only=True):
    """The video processor's configuration as far as pixels depend on it.

    What the pixel bounds count is the family's: a frame, or the whole clip.  `rate`: frames a second that are used, at
    least `least` and at most `most`.
    """

    rate: float
    least: int
    most: int

    @property
    def factor(self) -> int:
        """What both sides of a frame are a multiple of."""
        return self.patch * self.merge


class ClipQwenSettings(QwenSettings, frozen=True, kw_only=True):
    """`clip`: None for a checkpoint without clips."""

    clip: ClipSettings | None = None


class QwenClips(QwenVision):
    """Pictures and clips of the Qwen vision families."""

    clip_min_pixels: ClassVar[int]
    clip_max_pixels: ClassVar[int]
    clip_rate: ClassVar[float] = 2.0
    least_frames: ClassVar[int] = 4
    most_frames: ClassVar[int] = 768
    samples_by_interval: ClassVar[bool] = False

    settings_type: ClassVar[type[msgspec.Struct]] = ClipQwenSettings

    def modalities(self, bundle: BundleConfig) -> frozenset[Modality]:
        """Clips when the checkpoint's configuration names their token."""
        has_clips = self.token_config(bundle).get(self.token_id_key[Modality.VIDEO]) is not None
        return frozenset(self.limits) if has_clips else frozenset(self.limits) - {Modality.VIDEO}

    def settings(self, bundle: BundleConfig) -> ClipQwenSettings:
        found = ClipQwenSettings(**msgspec.structs.asdict(super().settings(bundle)))
        if Modality.VIDEO not in self.modalities(bundle):
            return found
        return msgspec.structs.replace(found, clip=self.clip_settings(bundle))

    def clip_settings(self, bundle: BundleConfig) -> ClipSettings:
        """Raises FamilyError."""
        values = bundle.video
        cells = self.cell_settings(values, self.clip_bounds(values, self.cell(values)), " of clips")
        return ClipSettings(
            **msgspec.structs.asdict(cells),
            rate=number(values, "fps") or self.clip_rate,
            least=whole(values, ("min_frames",), self.least_frames),
            most=whole(values, ("max_frames",), self.most_frames),
        )

    def clip_bounds(self, values: Mapping[str, Any], cell: Cell) -> tuple[int, int]:
        """As `bounds`, for clips.  `values`: the video processor's configuration."""
        return areas(values, self.clip_min_pixels, self.clip_max_pixels)

    def with_most_frames(self, settings: Any, most: int) -> Any:
        if settings.clip is None:
            return settings
        clip = settings.clip
        clip = msgspec.structs.replace(clip, least=min(clip.least, most), most=min(clip.most, most))
        return msgspec.structs.replace(settings, clip=clip)

    def sampling(self, settings: Any, hints: Hints) -> Sampling:
        return Sampling(hints.fps or clip_of(settings).rate, self.samples_by_interval)

    def sample(self, settings: Any, source: Source) -> Sequence[int]:
        """Evenly from the first frame to the last, never more than there are: `Qwen3VLVideoProcessor`."""
        clip = clip_of(settings)
        wanted = clamped(source.duration * self.sampling(settings, source.hints).rate, clip.least, clip.most)
        return spread_to_nearest(source.frames, min(wanted, source.frames))

    def clip_sizes(self, clip: ClipSettings, source: Source, frames: int) -> tuple[int, int]:
        """Height, width of the `frames` that are cut into patches.  Raises MediaError."""
        return smart_resize(
            source.height, source.width, factor=clip.factor, min_pixels=clip.min_pixels, max_pixels=clip.max_pixels
        )

    def clip_seconds(self, clip: ClipSettings, indices: Sequence[int], rate: float) -> tuple[float, ...]:
        """The time the prompt states for every temporal step; none for a family that states none."""
        return seconds_of(indices, rate, clip.temporal, middle=True)

    def measure(self, settings: Any, modality: Modality, source: Source) -> Measured:
        if modality is not Modality.VIDEO:
            return super().measure(settings, modality, source)
        clip = clip_of(settings)
        indices = self.sample(settings, source)
        height, width = self.clip_sizes(clip, source, len(indices))
        steps, rows, columns = -(-len(indices) // clip.temporal), height // clip.patch, width // clip.patch
        patches = steps * rows * columns
        return Measured(
            primary_shape=(patches, 3 * clip.temporal * clip.patch**2),
            feature_tokens=patches // clip.merge**2,
            resized=(height, width),
            side={
                "video_grid_thw": SideTensor("int64", (1, 3), (steps, rows, columns)),
                "patches_per_video": SideTensor("int64", (1,), (patches,)),
                "video_second_per_grid": SideTensor("float32", (1,), (clip.temporal * source.duration / len(indices),)),
            },
            frames=len(indices),
            seconds=self.clip_seconds(clip, indices, source.rate),
        )

    def encode(
        self,
        settings: Any,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        """A clip step by step; one that lacks frames at its end is filled with the last."""
        if modality is not Modality.VIDEO:
            super().encode(settings, modality, frames, measured, form, out)
            return
        clip = clip_of(settings)
        steps = measured.side["video_grid_thw"].values[0]
        step_bytes = measured.primary_shape[0] // int(steps) * measured.primary_shape[1] * ITEM_BYTES[form.dtype]
        fitted = (self.fitted_frame(clip, frame, measured) for frame in frames)
        for at, step in enumerate(_in_steps(fitted, clip.temporal)):
            patchify(
                step,
                out[at * step_bytes : (at + 1) * step_bytes],
                patch=clip.patch,
                merge=clip.merge,
                temporal=clip.temporal,
                normalisation=clip.normalisation if form.normalised else None,
                dtype=form.dtype,
            )

    def fitted_frame(self, clip: ClipSettings, frame: Image.Image, measured: Measured) -> Image.Image:
        """A frame in the size `clip_sizes` said."""
        return self.fitted(clip, frame, *measured.resized)

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """Step after step: what `steps` puts before its pads, the pads, and what it puts behind them.

        One run of pads for a family that states no times.
        """
        if modality is not Modality.VIDEO:
            return super().replacement(bundle, vocabulary, modality, measured)
        pad = self.feature_token(bundle, vocabulary, modality)
        if not measured.seconds:
            return Replacement(token_ids=[pad] * measured.feature_tokens, features=((0, measured.feature_tokens),))
        count = measured.feature_tokens // len(measured.seconds)
        tokens: list[int] = []
        features = []
        for before, after in self.steps(bundle, vocabulary, measured.seconds):
            tokens += before
            features.append((len(tokens), count))
            tokens += [pad] * count
            tokens += after
        return Replacement(token_ids=tokens, features=tuple(features))

    def steps(
        self, bundle: BundleConfig, vocabulary: Vocabulary, seconds: Sequence[float]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """The tokens around the pads of each temporal step."""
        raise NotImplementedError

    def layout(self, modality: Modality) -> Layout:
        """As SMG 1.13.0 lists the keys of a clip batch.

        For GLM-5.3-Flash it names the counts like those of pictures, so that a worker refuses both in one request.
        """
        if modality is not Modality.VIDEO:
            return super().layout(modality)
        return Layout(
            batched=("video_grid_thw", "video_second_per_grid", "patches_per_video"),
            flat={"pixel_values": "patches_per_video"},
            keep_on_cpu=self.grids_on_cpu,
        )


def clip_of(settings: Any) -> ClipSettings:
    """The part of the settings that clips depend on.  MediaError for a checkpoint without clips."""
    if settings.clip is None:
        raise MediaError("this model takes no clips")
    found: ClipSettings = settings.clip
    return found


def _in_steps(frames: Iterator[Image.Image], temporal: int) -> Iterator[list[Image.Image]]:
    step: list[Image.Image] = []
    for frame in frames:
        step.append(frame)
        if len(step) == temporal:
            yield step
            step = []
    if len(step) == 1:
        yield step  # one frame fills every slot
    elif step:
        yield step + step[-1:] * (temporal - len(step))
