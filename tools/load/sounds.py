"""Speech-like sounds: syllables of a few harmonics under noise, as a WAV file of 16 bits, one channel, 16 kHz."""

import io
import wave

import numpy as np

RATE = 16_000


def sound(seconds: int, seed: int) -> bytes:
    """The same for the same seed."""
    generator = np.random.default_rng(seed)
    at = np.arange(seconds * RATE) / RATE
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.4 * at + generator.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 9))
    syllables = np.clip(np.sin(2 * np.pi * 3.5 * at + generator.uniform(0, 6)), 0, 1)
    samples = 0.15 * voice * syllables + 0.01 * generator.standard_normal(at.size)
    written = io.BytesIO()
    with wave.open(written, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return written.getvalue()
