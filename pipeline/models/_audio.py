"""What the Qwen families share that take sounds: log-mel features as Whisper's, about 13 tokens a second.

Not a family itself, but a base to put before another: `QwenSounds` answers for sounds and leaves every other modality
to the class behind it.  A sound's features are made of its own samples alone; those of one request are then filled up
with zeros to the longest, which the mask says.  Reference: transformers 5.24 `WhisperFeatureExtractor` without its
padding to 30 seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.base import Form, Layout, Modality
from pipeline.crops import narrowed
from pipeline.models._values import first_of, section, whole
from pipeline.models.base import (
    BundleConfig,
    Family,
    FamilyError,
    Measured,
    MediaError,
    Replacement,
    SideTensor,
    Source,
    Vocabulary,
)
from pipeline.resample import resample, resampled_length
from pipeline.spectrum import whisper_features, whisper_frames

_LENGTHS = "audio_feature_lengths"
_MASK = "feature_attention_mask"


class SoundSettings(msgspec.Struct, frozen=True):
    """preprocessor_config.json as far as features depend on it; `rate` in Hz, `fft` and `hop` in samples.

    `window`: half the frames the encoder works on at a time.  `most`: samples that are used of a sound, None for all.
    """

    rate: int
    fft: int
    hop: int
    bands: int
    window: int
    most: int | None

    def samples(self, count: int, rate: float) -> int:
        """How many are used of `count` samples at `rate` Hz, at the settings' own rate."""
        found = resampled_length(count, int(rate), self.rate)
        return found if self.most is None else min(found, self.most)

    @classmethod
    def of(cls, values: Mapping[str, Any], encoder: Mapping[str, Any]) -> "SoundSettings":
        """`values`: preprocessor_config.json; `encoder`: config.json's `audio_config`.  Raises FamilyError."""
        found = cls(
            rate=whole(values, ("sampling_rate",), 16_000),
            fft=whole(values, ("n_fft",), 400),
            hop=whole(values, ("hop_length",), 160),
            bands=whole(values, ("feature_size",), whole(encoder, ("num_mel_bins",), 128)),
            window=whole(encoder, ("n_window",), 50),
            most=_most(values),
        )
        if found.hop > found.fft:
            raise FamilyError(f"hop_length {found.hop} is above n_fft {found.fft}")
        if first_of(values, ("dither",), 0.0) != 0.0:
            raise FamilyError("dither is not supported: features would be other ones each time")
        return found


def _most(values: Mapping[str, Any]) -> int | None:
    if values.get("max_samples") is not None:
        return whole(values, ("max_samples",), 1)
    return whole(values, ("n_samples",), 480_000) if values.get("truncation") is True else None


def sound_tokens(frames: int, window: int) -> int:
    """Embeddings of so many frames: three convolutions halve every window of twice `window` frames, rounded up."""

    def halved(count: int) -> int:
        for _ in range(3):
            count = -(-count // 2)
        return count

    return frames // (2 * window) * halved(2 * window) + halved(frames % (2 * window))


class QwenSounds(Family):
    """Sounds of the Qwen families.  The settings of a family have a field `sound`."""

    def sound_settings(self, bundle: BundleConfig) -> SoundSettings:
        """Raises FamilyError."""
        config = {**bundle.config, **section(bundle.config, "thinker_config")}
        return SoundSettings.of(bundle.preprocessor, section(config, "audio_config"))

    def measure(self, settings: Any, modality: Modality, source: Source) -> Measured:
        if modality is not Modality.AUDIO:
            return super().measure(settings, modality, source)
        sound: SoundSettings = settings.sound
        samples = sound.samples(source.frames, source.rate)
        frames = whisper_frames(samples, sound.hop)
        if frames < 1:
            raise MediaError(
                f"a sound of {samples} samples at {sound.rate} Hz is shorter than one frame of {sound.hop}"
            )
        return Measured(
            primary_shape=(1, sound.bands, frames),
            feature_tokens=sound_tokens(frames, sound.window),
            resized=(0, 0),
            side={
                _LENGTHS: SideTensor("int64", (1,), (frames,)),
                _MASK: SideTensor("int64", (1, frames), (1,), repeats=(frames,)),
            },
            frames=source.frames,
        )

    def reconcile(self, settings: Any, modality: Modality, items: Sequence[Measured]) -> Sequence[Measured]:
        """As many frames as the longest sound has."""
        if modality is not Modality.AUDIO:
            return super().reconcile(settings, modality, items)
        longest = max(item.primary_shape[2] for item in items)
        return [_filled(item, longest) for item in items]

    def encode(
        self, settings: Any, modality: Modality, frames: Any, measured: Measured, form: Form, out: NDArray[np.uint8]
    ) -> None:
        """Features need the loudest of all before the first can be written, so all are held once in float32."""
        if modality is not Modality.AUDIO:
            super().encode(settings, modality, frames, measured, form, out)
            return
        sound: SoundSettings = settings.sound
        samples = resample(frames.samples, frames.rate, sound.rate)[: sound.most]
        features = whisper_features(samples, rate=sound.rate, fft=sound.fft, hop=sound.hop, bands=sound.bands)
        rows = out.view(np.uint32 if form.dtype == "float32" else np.uint16).reshape(measured.primary_shape[1:])
        values = narrowed(features, form.dtype)
        rows[:, : values.shape[1]] = values.view(rows.dtype)
        rows[:, values.shape[1] :] = 0

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """The template's single pad becomes one for each embedding; the markers around it stay the template's."""
        if modality is not Modality.AUDIO:
            return super().replacement(bundle, vocabulary, modality, measured)
        count = measured.feature_tokens
        return Replacement((self.feature_token(bundle, vocabulary, modality),) * count, features=((0, count),))

    def layout(self, modality: Modality) -> Layout:
        if modality is not Modality.AUDIO:
            return super().layout(modality)
        return Layout(batched=("input_features", _LENGTHS, _MASK), encoder_input_key="input_features")


def _filled(item: Measured, longest: int) -> Measured:
    _, bands, frames = item.primary_shape
    if frames == longest:
        return item
    mask = SideTensor("int64", (1, longest), (1, 0), repeats=(frames, longest - frames))
    return msgspec.structs.replace(item, primary_shape=(1, bands, longest), side={**item.side, _MASK: mask})
