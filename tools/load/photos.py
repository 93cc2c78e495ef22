"""Photo-like pictures and the requests that carry them.

A flat picture makes decoding look too cheap, so these have gradients, noise of two frequencies, lines and filled
shapes: at 1080p and quality 85 a JPEG of them has 350 to 500 kB, as a camera's.  A mix is written `2x1080p`,
`1x12mp:png`, `1x640x480:webp`; several are joined by commas.
"""

import dataclasses
import functools
import io
import itertools
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import pybase64
from PIL import Image, ImageDraw

SIZES = {  # width, height
    "480p": (640, 480),
    "512": (512, 512),
    "720p": (1280, 720),
    "1080p": (1920, 1080),
    "4mp": (2464, 1632),
    "12mp": (4000, 3000),
}
_MIX = re.compile(r"(?:(\d+)x)?(480p|512|720p|1080p|4mp|12mp|(\d+)x(\d+))(?::(jpeg|png|webp))?")
DISTINCT = 10  # pictures of one kind, sent in rotation


@dataclasses.dataclass(frozen=True)
class Kind:
    """`count` pictures of one size and format in every request."""

    count: int
    width: int
    height: int
    format: str

    def __str__(self) -> str:
        return f"{self.count}x{self.width}x{self.height}:{self.format}"


def parse_mix(text: str) -> list[Kind]:
    """Raises ValueError."""
    kinds = []
    for part in text.split(","):
        found = _MIX.fullmatch(part.strip().lower())
        if found is None:
            raise ValueError(f"cannot read {part!r}: 1x1080p, 2x640x480:png, sizes {', '.join(SIZES)}")
        count, name, wide, high, format_ = found.groups()
        width, height = (int(wide), int(high)) if wide else SIZES[name]
        kinds.append(Kind(int(count or 1), width, height, format_ or "jpeg"))
    return kinds


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
    coarse = Image.fromarray(generator.integers(0, 255, (height // 24 + 1, width // 24 + 1), dtype=np.uint8), "L")
    clouds = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) - 127
    grain = generator.standard_normal((height, width), dtype=np.float32) * 6.5
    pixels = np.stack([plane + 0.25 * clouds + grain for plane in planes], axis=-1)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")
    draw = ImageDraw.Draw(image)
    for _ in range(24):
        x, y = int(generator.integers(0, width)), int(generator.integers(0, height))
        dx, dy = int(generator.integers(10, width // 4 + 11)), int(generator.integers(10, height // 4 + 11))
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


@functools.cache
def photo_file(kind: Kind, seed: int) -> bytes:
    """The encoded photo of one size and format; made once."""
    return encode(photo(kind.width, kind.height, seed), kind.format)


def made_unique(file: bytes, number: int) -> bytes:
    """The same picture under another content hash: a comment in a JPEG, a text chunk in a PNG; others as they are."""
    note = f"request {number}".encode()
    if file[:2] == b"\xff\xd8":
        return file[:2] + b"\xff\xfe" + (len(note) + 2).to_bytes(2, "big") + note + file[2:]
    if file[:8] == b"\x89PNG\r\n\x1a\n":
        body = b"tEXtComment\x00" + note
        chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
        return file[:33] + chunk + file[33:]  # behind the header chunk
    return file


@dataclasses.dataclass(frozen=True)
class Body:
    """A request body and the bytes of media in it, before base64."""

    data: bytes
    media_bytes: int


class Bodies:
    """Endless request bodies of one mix.

    `repeat_share`: how many of the requests send a picture that was sent before, so that a cache can answer; all
    others carry pictures never seen before.
    """

    def __init__(
        self,
        model: str,
        mix: Sequence[Kind],
        *,
        stream: bool,
        max_tokens: int,
        words: str = "What is shown?",
        repeat_share: float = 0.0,
        seed: int = 1,
    ) -> None:
        self._settings = {"model": model, "stream": stream, "max_tokens": max_tokens}
        self._words, self._repeat_share = words, repeat_share
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._files = [
            [photo_file(kind, 100 * at + number) for number in range(DISTINCT)] for at, kind in enumerate(mix)
        ]
        self._mix = mix

    def __iter__(self) -> Iterator[Body]:
        return self

    def __next__(self) -> Body:
        number = next(self._numbers)
        if not self._mix:
            return self.of([])
        repeats = self._random.random() < self._repeat_share
        files = []
        for kind, known in zip(self._mix, self._files, strict=True):
            for at in range(kind.count):
                file = known[(number + at) % DISTINCT]
                files.append((kind.format, file if repeats else made_unique(file, number * 1000 + at)))
        return self.of(files)

    def of(self, files: Sequence[tuple[str, bytes]], words: str | None = None) -> Body:
        """One body with these files (format, bytes) before the words."""
        words = self._words if words is None else words
        head = json.dumps(self._settings)[:-1] + ', "messages": [{"role": "user", "content": '
        if not files:
            return Body((head + json.dumps(words) + "}]}").encode(), 0)
        pieces = [head.encode() + b"["]
        for format_, file in files:
            pieces.append(b'{"type": "image_url", "image_url": {"url": "data:image/%s;base64,' % format_.encode())
            pieces += [pybase64.b64encode(file), b'"}}, ']
        pieces.append(('{"type": "text", "text": ' + json.dumps(words) + "}]}]}").encode())
        return Body(b"".join(pieces), sum(len(file) for _, file in files))
