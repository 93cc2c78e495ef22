"""Photo-like pictures.

A flat picture makes decoding look too cheap, so these have gradients, noise of two frequencies, lines and filled
shapes: at 1080p and quality 85 a JPEG of them has 350 to 500 kB, as a camera's.
"""

import io

import numpy as np
from PIL import Image, ImageDraw


def photo(width: int, height: int, seed: int) -> Image.Image:
    """RGB; the same for the same seed."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    phase = generator.uniform(0, 6.28, 6).astype(np.float32)
    planes = [
        127
        + 70 * np.sin(columns / width * (2 + channel) + phase[channel])
        + 40 * np.cos(rows / height * (3 - channel) + phase[channel + 3])
        for channel in range(3)
    ]
    coarse = Image.fromarray(
        generator.integers(0, 255, (height // 24 + 1, width // 24 + 1), dtype=np.uint8),
        "L",
    )
    clouds = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) - 127
    grain = generator.standard_normal((height, width), dtype=np.float32) * 6.5
    pixels = np.stack([plane + 0.25 * clouds + grain for plane in planes], axis=-1)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")
    draw = ImageDraw.Draw(image)
    for _ in range(24):
        x, y = int(generator.integers(0, width)), int(generator.integers(0, height))
        dx, dy = (
            int(generator.integers(10, width // 4 + 11)),
            int(generator.integers(10, height // 4 + 11)),
        )
        colour = tuple(int(c) for c in generator.integers(0, 255, 3))
        shape = (draw.ellipse, draw.rectangle, draw.line)[int(generator.integers(0, 3))]
        shape((x, y, x + dx, y + dy), fill=colour)
    return image


def encode(image: Image.Image, format_: str) -> bytes:
    held = io.BytesIO()
    if format_ == "png":
        image.save(held, "PNG", compress_level=6)
    else:
        image.save(held, format_.upper(), quality=85)
    return held.getvalue()
