"""Pictures of the `direct` reference vectors, and how far apart two pictures are where a tolerance is allowed.

These vectors were computed from the rules, not by a published class: without its file's decoder, so alpha is dropped
except where a family has a rule for it.
"""

import io
from typing import Any

import numpy as np
from PIL import Image

from pipeline.media.image import decode
from pipeline.models.base import Hints
from tests.models.synthetic import digest, draw


def drawn(case: Any) -> Image.Image:
    """The case's picture as it was drawn: RGB, RGBA or L."""
    found = draw(**{name: case["input"][name] for name in ("width", "height", "mode", "seed")})
    assert digest(found) == case["input"]["pixels_sha256"]
    return found


def decoded(picture: Image.Image, *, keep_alpha: bool = False) -> Image.Image:
    """The picture after it went through a file."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return decode(memoryview(file.getvalue()), Hints(), keep_alpha=keep_alpha)


def levels(values: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    """Normalised float32 values, channels on the axis of `mean`, as the bytes they came from."""
    found = (values * np.asarray(std, np.float32) + np.asarray(mean, np.float32)) * np.float32(255)
    rounded = np.rint(found)
    assert np.abs(found - rounded).max() < 1e-3  # they were bytes
    return rounded.astype(np.uint8)


def apart(name: str, ours: np.ndarray, reference: np.ndarray) -> int:
    """The largest difference in levels; the share of bytes that differ is printed for the reader of the output."""
    difference = np.abs(ours.astype(np.int16) - reference.astype(np.int16))
    share = np.count_nonzero(difference) / difference.size
    print(f"{name}: at most {difference.max()} levels, {share:.4%} of {difference.size} bytes differ")
    return int(difference.max())


def unpatched(patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """[rows * columns, 3, side, side] back to [height, width, 3]."""
    side = patches.shape[-1]
    grid = patches.reshape(rows, columns, 3, side, side).transpose(0, 3, 1, 4, 2)
    return np.ascontiguousarray(grid).reshape(rows * side, columns * side, 3)
