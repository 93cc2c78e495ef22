"""Sounds as Inkling takes them: one row of quantised mel magnitudes for every 50 ms, each an embedding.

A sound that is very quiet is raised first; then every band's logarithm becomes the nearest of 16 levels, stored as a
float.  Reference: transformers 5.24 `InklingFeatureExtractor` and the quantisation of `InklingProcessor`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.base import Form
from pipeline.crops import narrowed
from pipeline.media.audio import Sound
from pipeline.models._values import first_of, number, whole
from pipeline.models.base import FamilyError, Measured, MediaError, SideTensor, Source
from pipeline.resample import resample, resampled_length
from pipeline.spectrum import log_mel_magnitudes, nearest_levels


class DmelSettings(msgspec.Struct, frozen=True):
    """`rate` in Hz; `hop` and `fft` in samples; `levels` from `low` to `high`, decades.  `quiet`: root mean square that
    a quieter sound is raised to, 0 for none.
    """

    rate: int
    hop: int
    fft: int
    bands: int
    levels: int
    low: float
    high: float
    quiet: float

    @classmethod
    def of(cls, values: Mapping[str, Any], encoder: Mapping[str, Any]) -> "DmelSettings":
        """`values`: preprocessor_config.json; `encoder`: config.json's `audio_config`.  Raises FamilyError."""
        rate = whole(values, ("sampling_rate",), 16_000)
        hop_s = number(values, "audio_token_duration_s") or 0.05
        hop = _samples("audio_token_duration_s", hop_s * rate)
        window = _samples("window_size_multiplier", (number(values, "window_size_multiplier") or 2.0) * hop_s * rate)
        if whole(values, ("n_fft",), window) != window or window < hop:
            raise FamilyError(f"n_fft must be the window of {window} samples, and no shorter than the hop of {hop}")
        low, high = (_decades(encoder, name, default) for name, default in _RANGE)
        if low >= high:
            raise FamilyError(f"dmel_min_value {low:g} is not below dmel_max_value {high:g}")
        return cls(
            rate=rate,
            hop=hop,
            fft=window,
            bands=whole(encoder, ("n_mel_bins",), whole(values, ("feature_size",), 80)),
            levels=_levels(encoder),
            low=low,
            high=high,
            quiet=_decades(values, "audio_rms_norm_floor", 0.01),
        )

    def measure(self, source: Source) -> Measured:
        """Raises MediaError for a sound without samples."""
        samples = resampled_length(source.frames, int(source.rate), self.rate)
        if samples < 1:
            raise MediaError("a sound without samples")
        tokens = -(-samples // self.hop)
        return Measured(
            primary_shape=(tokens, self.bands),
            feature_tokens=tokens,
            resized=(0, 0),
            side={"tokens_per_item": SideTensor("int64", (1,), (tokens,))},
            frames=source.frames,
        )

    def encode(self, sound: Sound, form: Form, out: NDArray[np.uint8]) -> None:
        """`out`: uint8, flat, of the shape `measure` told, in `form.dtype`."""
        samples = raised(resample(sound.samples, sound.rate, self.rate), self.quiet)
        decades = log_mel_magnitudes(samples, rate=self.rate, fft=self.fft, hop=self.hop, bands=self.bands)
        levels = narrowed(nearest_levels(decades, self.low, self.high, self.levels), form.dtype)
        out[:] = levels.reshape(-1).view(np.uint8)


_RANGE = (("dmel_min_value", -7.0), ("dmel_max_value", 2.0))


def raised(samples: NDArray[np.float32], quiet: float) -> NDArray[np.float32]:
    """A sound whose root mean square is above 0 and below `quiet`, brought to it; any other as it is."""
    loudness = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
    if not 0 < loudness < quiet:
        return samples
    return (samples.astype(np.float64) * (quiet / loudness)).astype(np.float32)


def _samples(name: str, count: float) -> int:
    if abs(count - round(count)) > 1e-6 or round(count) < 1:
        raise FamilyError(f"{name} must make a whole number of samples, not {count:g}")
    return round(count)


def _decades(values: Mapping[str, Any], name: str, default: float) -> float:
    value = first_of(values, (name,), default)
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise FamilyError(f"{name} must be a number, got {value!r}")
    return float(value)


def _levels(encoder: Mapping[str, Any]) -> int:
    found = whole(encoder, ("mel_vocab_size",), 16)
    if not 2 <= found <= 256:  # every level is exact in bfloat16
        raise FamilyError(f"mel_vocab_size must be from 2 to 256, got {found}")
    return found
