"""Windows, mel bands, log-mel features and dMel levels; the families' tests hold them against the references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.spectrum import hann, log_mel_magnitudes, mel_bank, nearest_levels, power_spectra, whisper_features

WHISPER = {"rate": 16_000, "fft": 400, "hop": 160, "bands": 128}
DMEL = {"rate": 16_000, "fft": 1600, "hop": 800, "bands": 80}


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(count).uniform(-0.5, 0.5, count).astype(np.float32)


@pytest.mark.parametrize("length", [400, 1600])
def test_the_window_is_periodic(length: int) -> None:
    window = hann(length)
    assert window[0] == 0 and window[length // 2] == 1
    assert np.allclose(window[1:], window[1:][::-1])


def test_slaney_s_bands() -> None:
    """Numbers of transformers' `mel_filter_bank(201, 128, 0, 8000, 16000, norm="slaney", mel_scale="slaney")`."""
    bank = mel_bank(201, 128, 16_000)
    assert bank.shape == (201, 128) and bank.dtype == np.float32
    assert bank[:4, 0].tolist() == pytest.approx([0.0, 0.012373986332636965, 0.0, 0.0])
    assert bank[:4, 1].tolist() == pytest.approx([0.0, 0.03039256487135522, 0.0, 0.0])
    assert bank[190:193, 127].tolist() == pytest.approx([0.0, 0.00047569508346930465, 0.0016171717313581387])
    assert bank[195:, 127].tolist() == pytest.approx(
        [
            0.005041601675024642,
            0.004457120795012996,
            0.003342840596259734,
            0.0022285603975064727,
            0.001114280198753211,
            0,
        ]
    )
    peaks = bank.argmax(axis=0) * 40
    assert (np.diff(peaks) >= 0).all() and peaks[-1] > 7500


@pytest.mark.parametrize("count", [1, 255, 256, 257, 700])
def test_blocks_are_seamless(count: int) -> None:
    samples = noise(count * 160 + 240)
    whole = np.concatenate([power for _, power in power_spectra(samples, 400, 160, count)])
    windows = np.stack([samples[at * 160 : at * 160 + 400] * hann(400) for at in range(count)]).astype(np.float64)
    assert whole.shape == (count, 201)
    assert np.abs(whole - np.abs(np.fft.rfft(windows)) ** 2).max() < 1e-4


@pytest.mark.parametrize(("samples", "frames"), [(160, 1), (161, 1), (199, 1), (320, 2), (16_000, 100)])
def test_whisper_frames(samples: int, frames: int) -> None:
    features = whisper_features(noise(samples), **WHISPER)
    assert features.shape == (128, frames) and features.dtype == np.float32
    assert np.isfinite(features).all()
    assert features.max() - features.min() <= 2.0001  # eight decades, a quarter each


def test_silence_is_flat() -> None:
    """1e-10 everywhere: ten decades down, plus four, a quarter of it."""
    assert whisper_features(np.zeros(1600, np.float32), **WHISPER) == pytest.approx(-1.5)
    rows = log_mel_magnitudes(np.zeros(1600, np.float32), **DMEL)
    assert (rows == rows[0]).all() and rows.max() < -4.9


@pytest.mark.parametrize(("samples", "rows"), [(1, 1), (800, 1), (801, 2), (16_000, 20), (16_037, 21)])
def test_dmel_rows(samples: int, rows: int) -> None:
    assert log_mel_magnitudes(noise(samples), **DMEL).shape == (rows, 80)


@settings(deadline=None)
@given(st.lists(st.floats(-9, 4, width=32), min_size=1, max_size=50))
def test_the_nearest_level_and_the_lower_of_two(values: list[float]) -> None:
    """As the reference: the first of the smallest distances."""
    clamped = np.clip(np.array(values, np.float32).astype(np.float64), -7, 2)
    distances = np.abs(clamped[:, None] - np.linspace(-7, 2, 16))
    found = nearest_levels(np.array(values, np.float32), -7.0, 2.0, 16)
    assert found.tolist() == distances.argmin(axis=1).tolist()
