"""The long-side cap of a content part: a picture, or a clip's frame, shrunk before the model's own rules see it.

SMG 1.13's rule and arithmetic, from its records.  Families with a rule of their own are given full sizes instead.
"""

import math

from PIL import Image


def capped_size(height: int, width: int, cap: int | None) -> tuple[int, int]:
    """The size under a long-side cap: ratio kept, the short side rounded half up, at least 1; never enlarged.

    300x200 under 112 becomes 112x75, under 280 280x187.
    """
    long = max(height, width)
    if cap is None or long <= cap:
        return height, width
    return max(1, math.floor(height * cap / long + 0.5)), max(1, math.floor(width * cap / long + 0.5))


def capped(image: Image.Image, height: int, width: int) -> Image.Image:
    """Shrink for the long-side cap as SMG does: bicubic in floating point over both passes, rounded once at the end.

    The 8-bit resize rounds between the passes and differs by a level in places; one channel at a time bounds the
    memory. Colours of RGBA are weighted by alpha meanwhile, as Pillow does.
    """
    if image.size == (width, height):
        return image
    if image.mode == "RGBA":
        return capped(image.convert("RGBa"), height, width).convert("RGBA")
    bands = []
    for band in image.split():
        wide = band.convert("F").resize((width, height), Image.Resampling.BICUBIC)
        bands.append(wide.point(lambda level: level * 1 + 0.5).convert("L"))  # F to L cuts off and clips
    return Image.merge(image.mode, bands)
