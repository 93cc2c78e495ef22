"""Stock Pillow 12's resampling, written from its rules: pillow-simd rounds a little differently, and some references
resize with the stock one.

What it gives is not trusted: the tests compare its digests with those of the reference vectors before they compare our
pixels with it.
"""

import math
from typing import Any

import numpy as np

_BITS = 22


def bicubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0


def bilinear(x: float) -> float:
    return max(0.0, 1 - abs(x))


def lanczos(x: float) -> float:
    def sinc(y: float) -> float:
        return math.sin(math.pi * y) / (math.pi * y) if y else 1.0

    return sinc(x) * sinc(x / 3) if -3 <= x < 3 else 0.0


_SUPPORT = {bicubic: 2.0, bilinear: 1.0, lanczos: 3.0}


def resize(pixels: np.ndarray, height: int, width: int, kernel: Any) -> np.ndarray:
    """uint8 [h, w, channels]: columns first, then rows, bytes between; a pass that changes nothing is left out."""
    across = _pass(pixels.transpose(1, 0, 2), width, kernel).transpose(1, 0, 2)
    return _pass(across, height, kernel)


def _pass(pixels: np.ndarray, target: int, kernel: Any) -> np.ndarray:
    source = len(pixels)
    if source == target:
        return pixels
    scale = source / target
    stretch = max(scale, 1.0)
    support = _SUPPORT[kernel] * stretch
    taps = math.ceil(support) * 2 + 1
    places = np.zeros((target, taps), np.intp)
    weights = np.zeros((target, taps), np.int64)
    for x in range(target):
        centre = (x + 0.5) * scale
        first, end = max(0, int(centre - support + 0.5)), min(source, int(centre + support + 0.5))
        found = [kernel((tap - centre + 0.5) / stretch) for tap in range(first, end)]
        total = sum(found)
        places[x, : end - first] = range(first, end)
        for tap, value in enumerate(found):
            share = value / total * (1 << _BITS)
            weights[x, tap] = int(share + 0.5) if share >= 0 else int(share - 0.5)
    summed = np.full((target, *pixels.shape[1:]), 1 << (_BITS - 1), np.int32)
    for tap in range(taps):
        summed += pixels[places[:, tap]] * weights[:, tap].astype(np.int32)[:, None, None]
    return np.clip(summed >> _BITS, 0, 255).astype(np.uint8)


def resize_rgba(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic with colours weighted by alpha, as Pillow's RGBA resize: weighted, resized, divided, all in bytes."""
    if pixels.shape[:2] == (height, width):
        return pixels
    alpha = pixels[..., 3:].astype(np.int64)
    product = pixels[..., :3] * alpha + 128
    weighted = np.concatenate([((product >> 8) + product) >> 8, alpha], axis=2).astype(np.uint8)
    resized = resize(weighted, height, width, bicubic).astype(np.int64)
    alpha = resized[..., 3:]
    divided = np.minimum(255 * resized[..., :3] // np.maximum(alpha, 1), 255)
    colours = np.where((alpha == 0) | (alpha == 255), resized[..., :3], divided)
    return np.concatenate([colours, alpha], axis=2).astype(np.uint8)
