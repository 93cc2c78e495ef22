"""The demo's picture: made, not loaded, and the same on every machine."""

import io

import numpy as np
from PIL import Image, ImageDraw

HEIGHT, WIDTH = 490, 650  # neither is a multiple of 32: the gateway has to resize


def picture() -> Image.Image:
    """Sky, hills and a sun with some grain; RGB, HEIGHT x WIDTH."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    sky = np.stack([60 + rows // 5, 120 + rows // 6, 235 - rows // 8], axis=-1)
    grain = (rows * 7919 + columns * 104729) % 13 - 6
    image = Image.fromarray(np.clip(sky + grain[..., None], 0, 255).astype(np.uint8), "RGB")
    draw = ImageDraw.Draw(image)
    draw.ellipse((470, 50, 570, 150), fill=(255, 214, 90))
    draw.polygon([(0, 490), (0, 330), (180, 220), (360, 360), (480, 270), (650, 400), (650, 490)], fill=(54, 96, 66))
    draw.rectangle((250, 380, 330, 450), fill=(150, 75, 50))
    draw.polygon([(240, 380), (290, 335), (340, 380)], fill=(90, 40, 35))
    return image


def encoded(image: Image.Image) -> bytes:
    """PNG bytes."""
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()
