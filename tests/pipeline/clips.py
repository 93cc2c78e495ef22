"""Clips made for a test: any codec, container, group structure and rotation that PyAV can write."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

Picture = np.ndarray[Any, np.dtype[np.uint8]]


def gray_levels(count: int, height: int = 48, width: int = 64) -> list[Picture]:
    """Frames that tell their number: a level of its own each, a red square in the top left corner."""
    found = []
    for number in range(count):
        frame = np.full((height, width, 3), 20 + 210 * number // max(1, count - 1), np.uint8)
        frame[: height // 3, : width // 3] = (200, 0, 0)
        found.append(frame)
    return found


def moving_noise(count: int, height: int = 48, width: int = 64, seed: int = 0) -> list[Picture]:
    """Frames that differ from one another everywhere, and yet are predicted from each other."""
    noise = np.random.default_rng(seed)
    whole = noise.integers(0, 256, (height + count, width + 2 * count, 3), np.uint8)
    return [whole[at : at + height, 2 * at : 2 * at + width].copy() for at in range(count)]


def clip(
    frames: Sequence[Picture],
    *,
    container: str = "mp4",
    codec: str = "libx264",
    rate: int = 10,
    pixels: str = "yuv420p",
    times: Sequence[int] | None = None,
    rotation: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """`times`: of the frames, in hundredths of a second, for a variable rate."""
    written = io.BytesIO()
    with av.open(written, "w", format=container, container_options=container_options or {}) as out:
        stream: Any = out.add_stream(codec, rate=rate, options=options or {})
        height, width = frames[0].shape[:2]
        stream.height, stream.width, stream.pix_fmt, stream.thread_count = height, width, pixels, 1
        if rotation:
            stream.set_display_rotation(rotation)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 100)
        for number, frame in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times is not None:
                shown.pts, shown.time_base = times[number], Fraction(1, 100)
            out.mux(stream.encode(shown))
        out.mux(stream.encode(None))
    return written.getvalue()
