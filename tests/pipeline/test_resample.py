"""Samples to another rate: against sines whose other samples are known, against the rule written out, and its edges."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.resample import resample, resampled_length

RATES = (8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000)


def sine(hertz: float, rate: int, seconds: float) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate).astype(np.float32)


def by_the_rule(samples: np.ndarray, old: int, new: int) -> np.ndarray:
    """Every output as its own sum, in float64: sinc under a Hann window of six crossings, roll-off 0.99."""
    low = min(old, new) * 0.99
    found = []
    for place in np.arange(resampled_length(len(samples), old, new)) / new:
        times = np.clip((np.arange(len(samples)) / old - place) * low, -6, 6)
        found.append(samples @ (np.sinc(times) * np.cos(times * np.pi / 12) ** 2) * low / old)
    return np.array(found)


@pytest.mark.parametrize("old", RATES)
def test_a_sine_stays_a_sine(old: int) -> None:
    """But for the ends, where half the window is silence; the window's ripple is 0.3 %."""
    found = resample(sine(440, old, 0.5), old, 16_000)
    assert found.dtype == np.float32
    assert np.abs(found - sine(440, 16_000, 0.5))[64:-64].max() < 0.003


@pytest.mark.parametrize("old", [44_100, 48_000, 96_000])
def test_what_the_new_rate_cannot_hold_is_gone(old: int) -> None:
    """50 dB down, as far as a window of six crossings can."""
    assert np.abs(resample(sine(11_000, old, 0.2), old, 16_000))[64:-64].max() < 0.004


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 300),
    st.sampled_from([*RATES, 15_999, 44_099, 7, 1000]),
    st.sampled_from([16_000, 24_000]),
    st.integers(0, 2**32),
)
def test_equals_the_rule(count: int, old: int, new: int, seed: int) -> None:
    samples = np.random.default_rng(seed).uniform(-1, 1, count).astype(np.float32)
    count = resampled_length(count, old, new)
    found = resample(samples, old, new)
    assert len(found) == count == math.ceil(len(samples) * new / old)
    if old == new:
        assert found is samples
    elif count <= 4000:
        assert np.abs(found - by_the_rule(samples, old, new)).max() < 1e-6
