"""Samples to another rate, as the reference does it: a sinc under a Hann window, one filter for each phase, float32.

The rule is torchaudio's `resample` with its defaults (six zero crossings, roll-off 0.99), which the models' own loaders
and SMG use; libswresample and soxr give other samples.  Output `i` is the filter of phase `i % new` laid over the
samples around `i * old / new`; a filter is as long as its window is not zero.

torchaudio computes its filters in float32 and so differs by up to 3e-6 (44.1 kHz) to 2e-5 (11.025 kHz) from these.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ZERO_CROSSINGS = 6
ROLL_OFF = 0.99


def resampled_length(samples: int, old: int, new: int) -> int:
    """How many samples `resample` returns."""
    return -(-samples * new // old)


def resample(samples: Floats, old: int, new: int) -> Floats:
    """Samples at rate `old` as they would be at rate `new` (both in Hz): float32 [ceil(samples * new / old)].

    The same array when the rates are equal.
    """
    if old == new:
        return samples
    count = resampled_length(len(samples), old, new)
    divisor = math.gcd(old, new)
    filters, reach = _filters(old // divisor, new // divisor)
    phases, taps = filters.shape
    step = phases * old // new  # samples from one turn of all phases to the next
    turns = -(-count // phases)
    padded = np.zeros(turns * step + 2 * reach + taps, np.float32)
    padded[reach : reach + len(samples)] = samples
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps)
    found = np.empty((turns, phases), np.float32)
    for phase, first in enumerate(np.arange(phases) * old // new):
        np.matmul(windows[first::step][:turns], filters[phase], out=found[:, phase])
    return found.reshape(-1)[:count]


def _filters(old: int, new: int) -> tuple[Floats, int]:
    """One filter for each phase, float32 [phases, taps], and how many samples before its own place each begins.

    `old` and `new` have no common divisor.  Phases are repeated until one turn of them is at least a filter long: the
    windows of a phase then overlap nowhere, and their products are one call of BLAS.
    """
    low = min(old, new) * ROLL_OFF
    reach = math.ceil(ZERO_CROSSINGS * old / low)
    taps = 2 * reach + 2  # the place of a phase lies between two samples
    turns = -(-taps // old)
    phases = np.arange(new * turns)
    places = phases * old / new - phases * old // new  # behind the sample the filter is laid around
    times = (np.arange(taps)[None, :] - reach - places[:, None]) / old * low
    np.clip(times, -ZERO_CROSSINGS, ZERO_CROSSINGS, out=times)
    window = np.cos(times * np.pi / ZERO_CROSSINGS / 2) ** 2
    return (np.sinc(times) * window * (low / old)).astype(np.float32), reach
