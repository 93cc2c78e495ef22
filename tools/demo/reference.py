"""What the engine has to see, worked out again from the definitions and sharing no code with the gateway.

Qwen3-VL's picture processor in its textbook form (transformers' Qwen2VLImageProcessor): `smart_resize` to multiples
of 32, bicubic, (x - 127.5) / 127.5 in float32, patches of 16 x 16 pixels ordered by 2 x 2 groups, the picture
repeated for both temporal slots. The built-in tokenizer has no merges, so a prompt's ids are its bytes and its
special tokens.
"""

import dataclasses
import hashlib
import math
import re

import numpy as np
from blake3 import blake3
from PIL import Image

PATCH, MERGE, TEMPORAL = 16, 2, 2
SHORTEST_EDGE, LONGEST_EDGE = 65536, 16777216  # pixels in all, of the bundle's preprocessor_config.json
IMAGE_TOKEN = 151655
SPECIALS = {
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": IMAGE_TOKEN,
}


@dataclasses.dataclass(frozen=True)
class Expected:
    """One prompt as the engine must receive it; the picture's fields are empty for a text prompt."""

    input_ids: list[int]
    grid: list[int] = dataclasses.field(default_factory=list)
    pixel_shape: list[int] = dataclasses.field(default_factory=list)
    pixel_sha256: str = ""
    content_hash: str = ""
    ranges: list[list[int]] = dataclasses.field(default_factory=list)


def smart_resize(height: int, width: int) -> tuple[int, int]:
    """Height and width after the resize: multiples of 32 near the given ones, within the allowed number of pixels."""
    factor = PATCH * MERGE
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > LONGEST_EDGE:
        beta = math.sqrt(height * width / LONGEST_EDGE)
        high, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif high * wide < SHORTEST_EDGE:
        beta = math.sqrt(SHORTEST_EDGE / (height * width))
        high, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return high, wide


def pixel_values(image: Image.Image) -> tuple[np.ndarray, list[int]]:
    """float32 (patches, 3 * 2 * 16 * 16) and the grid [1, rows, columns] of an RGB picture."""
    high, wide = smart_resize(image.height, image.width)
    resized = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC), dtype=np.float32)
    values = (resized - np.float32(127.5)) / np.float32(127.5)
    frames = np.stack([values.transpose(2, 0, 1)] * TEMPORAL)  # temporal slot, channel, height, width
    rows, columns = high // PATCH, wide // PATCH
    blocks = frames.reshape(1, TEMPORAL, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    ordered = blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(ordered).reshape(rows * columns, 3 * TEMPORAL * PATCH * PATCH), [1, rows, columns]


def token_ids(prompt: str) -> list[int]:
    """Ids of the built-in tokenizer: a special token's own id, a byte's value for everything else."""
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", prompt):
        ids += [SPECIALS[piece]] if piece in SPECIALS else list(piece.encode())
    return ids


def text_prompt(question: str) -> Expected:
    return Expected(token_ids(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"))


def picture_prompt(image: Image.Image, file: bytes, question: str) -> Expected:
    """The picture stands before the question."""
    pixels, grid = pixel_values(image)
    count = grid[1] * grid[2] // MERGE**2
    pads = "<|image_pad|>" * count
    turn = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = token_ids(turn)
    return Expected(
        input_ids=ids,
        grid=grid,
        pixel_shape=list(pixels.shape),
        pixel_sha256=hashlib.sha256(pixels.astype("<f4").tobytes()).hexdigest(),
        content_hash=blake3(file).hexdigest(),
        ranges=[[ids.index(IMAGE_TOKEN), count]],
    )
