"""Samples to spectra: short windows, their Fourier transforms, mel bands, logarithms.  Arrays in, arrays out.

Everything is float32 as in the references (transformers' `WhisperFeatureExtractor`, `InklingFeatureExtractor` over
torch), in blocks of windows that stay in the processor's cache, so that an hour takes no more scratch than a second.
Families pick what they need in `pipeline/models`; how samples come to their rate is in `resample.py`.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_BLOCK = 256  # windows at once: 256 of 400 samples and their spectra are 0.9 MB
_LINEAR_HZ = 1000.0  # Slaney's scale: linear below, logarithmic above
_LINEAR_MELS = 15.0
_LOG_STEP = np.log(6.4) / 27.0


@lru_cache(maxsize=8)
def hann(length: int) -> Floats:
    """The periodic Hann window, float32 [length]."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)).astype(np.float32)


@lru_cache(maxsize=8)
def mel_bank(bins: int, bands: int, rate: int) -> Floats:
    """Slaney's triangles from 0 Hz to half the rate, each of area 1 (in Hz, times 2): float32 [bins, bands].

    transformers `mel_filter_bank(norm="slaney", mel_scale="slaney")`, which is librosa's.
    """
    corners = _hertz(np.linspace(0.0, _mels(rate / 2), bands + 2))
    frequencies = np.linspace(0, rate // 2, bins)
    slopes = corners[None, :] - frequencies[:, None]
    widths = np.diff(corners)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return np.ascontiguousarray(triangles * (2.0 / (corners[2:] - corners[:-2])), dtype=np.float32)


def _mels(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return 3.0 * hertz / 200.0
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HZ) / _LOG_STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    high = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, 200.0 * mels / 3.0, high)


def power_spectra(samples: Floats, length: int, hop: int, count: int) -> Iterator[tuple[slice, Floats]]:
    """Squared magnitudes of `count` Hann windows of `length` samples, the first at sample 0, one every `hop`.

    Yields blocks: which windows, and float32 [windows, length // 2 + 1].  `samples` must reach to the end of the last
    window.
    """
    windows = np.lib.stride_tricks.sliding_window_view(samples, length)[::hop][:count]
    window = hann(length)
    for begin in range(0, count, _BLOCK):
        spectra = np.fft.rfft(windows[begin : begin + _BLOCK] * window)
        power = np.square(spectra.real)
        power += np.square(spectra.imag)
        yield slice(begin, begin + len(power)), power


def whisper_frames(samples: int, hop: int) -> int:
    """How many frames `whisper_features` makes: the last of the centred windows is left out."""
    return samples // hop


def whisper_features(samples: Floats, *, rate: int, fft: int, hop: int, bands: int) -> Floats:
    """Log-mel features as `WhisperFeatureExtractor` makes them without padding: float32 [bands, samples // hop].

    Windows are centred, the sound mirrored at its ends; decades below the loudest one of the sound are cut off after 8.
    At least `hop` samples; float32 [samples], about -1..1.
    """
    count = whisper_frames(len(samples), hop)
    mirrored = np.pad(samples, fft // 2, mode="reflect")
    bank = mel_bank(fft // 2 + 1, bands, rate)
    features = np.empty((bands, count), np.float32)
    for frames, power in power_spectra(mirrored, fft, hop, count):
        energies = power @ bank
        np.maximum(energies, np.float32(1e-10), out=energies)
        features[:, frames] = np.log10(energies, out=energies).T
    np.maximum(features, features.max() - np.float32(8), out=features)
    features += np.float32(4)
    features /= np.float32(4)
    return features


def log_mel_magnitudes(samples: Floats, *, rate: int, fft: int, hop: int, bands: int) -> Floats:
    """Log-mel magnitudes as `InklingFeatureExtractor` makes them: float32 [ceil(samples / hop), bands].

    Every window ends with its own hop: the sound has silence before it and is filled up with silence behind.
    """
    count = -(-len(samples) // hop)
    filled = np.zeros(fft - hop + count * hop, np.float32)
    filled[fft - hop : fft - hop + len(samples)] = samples
    bank = mel_bank(fft // 2 + 1, bands, rate)
    found = np.empty((count, bands), np.float32)
    for frames, power in power_spectra(filled, fft, hop, count):
        magnitudes = np.sqrt(np.maximum(power, np.float32(1e-10), out=power), out=power)
        np.matmul(magnitudes, bank, out=found[frames])
    np.maximum(found, np.float32(1e-10), out=found)
    return np.log10(found, out=found)


def nearest_levels(values: Floats, low: float, high: float, levels: int) -> Floats:
    """Which of `levels` evenly spaced numbers from `low` to `high` is nearest, the lower one on a tie; as float32.

    dMel; compared in float64 as the reference does, against the numbers themselves.
    """
    centres = np.linspace(low, high, levels)
    clamped = np.clip(values.astype(np.float64), low, high)
    below = np.clip(np.searchsorted(centres, clamped, side="right") - 1, 0, levels - 2)
    is_upper = centres[below + 1] - clamped < clamped - centres[below]
    return (below + is_upper).astype(np.float32)
