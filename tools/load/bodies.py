"""The requests of a load test: what media they carry, and their JSON.

A mix is written `2x1080p`, `1x12mp:png`, `1x640x480:webp`, `1x720p:mp4` (ten seconds of film), `1x30s:wav` (sound);
several are joined by commas.
"""

import dataclasses
import functools
import itertools
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence

import pybase64

from tools.load.films import film
from tools.load.photos import encode, photo
from tools.load.sounds import sound

SIZES = {  # width, height
    "480p": (640, 480),
    "512": (512, 512),
    "720p": (1280, 720),
    "1080p": (1920, 1080),
    "4mp": (2464, 1632),
    "12mp": (4000, 3000),
}
_MIX = re.compile(r"(?:(\d+)x)?(480p|512|720p|1080p|4mp|12mp|(\d+)x(\d+))(?::(jpeg|png|webp|mp4))?")
_SOUNDS = re.compile(r"(?:(\d+)x)?(\d+)s:wav")
DISTINCT = 10  # pictures of one kind, sent in rotation
_DISTINCT_FILMS = 2  # which take seconds to make


@dataclasses.dataclass(frozen=True)
class Kind:
    """`count` pictures or films of one size and format in every request, or sounds of so many `seconds`."""

    count: int
    width: int
    height: int
    format: str
    seconds: int = 0

    @property
    def modality(self) -> str:
        return {"mp4": "video", "wav": "audio"}.get(self.format, "image")

    @property
    def distinct(self) -> int:
        return _DISTINCT_FILMS if self.format == "mp4" else DISTINCT

    def __str__(self) -> str:
        if self.format == "wav":
            return f"{self.count}x{self.seconds}s:wav"
        return f"{self.count}x{self.width}x{self.height}:{self.format}"


def parse_mix(text: str) -> list[Kind]:
    """Raises ValueError."""
    kinds = []
    for part in text.split(","):
        if heard := _SOUNDS.fullmatch(part.strip().lower()):
            kinds.append(Kind(int(heard[1] or 1), 0, 0, "wav", int(heard[2])))
            continue
        found = _MIX.fullmatch(part.strip().lower())
        if found is None:
            raise ValueError(f"cannot read {part!r}: 1x1080p, 2x640x480:png, sizes {', '.join(SIZES)}")
        count, name, wide, high, format_ = found.groups()
        width, height = (int(wide), int(high)) if wide else SIZES[name]
        kinds.append(Kind(int(count or 1), width, height, format_ or "jpeg"))
    return kinds


def media_files(kind: Kind, place: int = 0) -> list[bytes]:
    """The different photos, films or sounds of a kind; other ones for another `place` of it in a mix."""
    one = dataclasses.replace(kind, count=1)
    return [_made(one, 100 * place + number) for number in range(kind.distinct)]


@functools.cache
def _made(kind: Kind, seed: int) -> bytes:
    if kind.format == "wav":
        return sound(kind.seconds, seed)
    if kind.format == "mp4":
        return film(kind.width, kind.height, seed)
    return encode(photo(kind.width, kind.height, seed), kind.format)


def made_unique(file: bytes, number: int) -> bytes:
    """The same under another content hash: a comment in a JPEG, a text chunk in a PNG, an unknown box or chunk at the
    end of MP4, Matroska and WAV; others as they are.
    """
    note = f"request {number}".encode()
    if file[:2] == b"\xff\xd8":
        return file[:2] + b"\xff\xfe" + (len(note) + 2).to_bytes(2, "big") + note + file[2:]
    if file[:8] == b"\x89PNG\r\n\x1a\n":
        body = b"tEXtComment\x00" + note
        chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
        return file[:33] + chunk + file[33:]  # behind the header chunk
    if file[8:12] == b"WAVE":
        return file + b"note" + (len(note) + len(note) % 2).to_bytes(4, "little") + note + b" " * (len(note) % 2)
    if file[:4] == b"\x1a\x45\xdf\xa3":
        return file + b"\xec" + bytes([0x80 | len(note)]) + note
    if file[4:8] == b"ftyp":
        return file + (len(note) + 8).to_bytes(4, "big") + b"free" + note
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
        self._files = [media_files(kind, place) for place, kind in enumerate(mix)]
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
                file = known[(number + at) % len(known)]
                files.append((kind, file if repeats else made_unique(file, number * 1000 + at)))
        return self.of(files)

    def of(self, files: Sequence[tuple[Kind, bytes]], words: str | None = None) -> Body:
        """One body with these files before the words."""
        words = self._words if words is None else words
        head = json.dumps(self._settings)[:-1] + ', "messages": [{"role": "user", "content": '
        if not files:
            return Body((head + json.dumps(words) + "}]}").encode(), 0)
        pieces = [head.encode() + b"["]
        for kind, file in files:
            part, media_type = f"{kind.modality}_url", f"{kind.modality}/{kind.format}"
            pieces.append(f'{{"type": "{part}", "{part}": {{"url": "data:{media_type};base64,'.encode())
            pieces += [pybase64.b64encode(file), b'"}}, ']
        pieces.append(('{"type": "text", "text": ' + json.dumps(words) + "}]}]}").encode())
        return Body(b"".join(pieces), sum(len(file) for _, file in files))
