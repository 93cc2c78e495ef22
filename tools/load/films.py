"""Film-like clips: a camera that pans over a photo while shapes move before it, with grain, as H.264 in MP4.

Ten seconds at 30 frames a second, with B-frames and a key frame every four seconds, about 3 Mbit/s at 720p: what a
phone sends after an upload service has made it smaller.  A still picture would make decoding look too cheap, as nothing
is predicted or corrected.
"""

import io
from typing import Any

import av
import numpy as np
from PIL import Image

from tools.load.photos import photo

SECONDS = 10
RATE = 30
_OPTIONS = {"preset": "veryfast", "crf": "20", "bf": "3", "g": str(4 * RATE)}
_GRAINS = 8  # planes of noise, taken in turn


def film(width: int, height: int, seed: int) -> bytes:
    """The same for the same seed."""
    generator = np.random.default_rng(seed)
    wide, high = width + width // 4, height + height // 4
    ground = np.asarray(photo(wide, high, seed), np.int16)
    grains = [generator.standard_normal((height, width, 1), np.float32) * 3 for _ in range(_GRAINS)]
    grains = [grain.astype(np.int16) for grain in grains]
    shape = np.asarray(photo(width // 5, height // 4, seed + 1), np.int16)
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as out:
        stream: Any = out.add_stream("libx264", rate=RATE, options=_OPTIONS)
        stream.width, stream.height, stream.pix_fmt, stream.thread_count = (
            width,
            height,
            "yuv420p",
            1,
        )
        for number in range(SECONDS * RATE):
            part = number / (SECONDS * RATE)
            x, y = (
                int((wide - width) * part),
                int((high - height) * (0.5 + 0.5 * np.sin(4 * part))),
            )
            pixels = ground[y : y + height, x : x + width] + grains[number % _GRAINS]
            left, top = (
                int((width - shape.shape[1]) * abs(np.sin(5 * part))),
                int((height - shape.shape[0]) * part),
            )
            pixels[top : top + shape.shape[0], left : left + shape.shape[1]] = shape
            frame = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            out.mux(stream.encode(av.VideoFrame.from_image(frame)))
        out.mux(stream.encode(None))
    return written.getvalue()
