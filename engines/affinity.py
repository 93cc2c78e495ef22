"""What ties a request to a worker that has served its like: the client's own key, its media, the beginning of its
prompt.

Rule: prompts are compared from their beginning, as engines cache them, and a placeholder run is the picture it stands
for: content hashes are folded in where media stand, so that two pictures of one size are two prompts.  A prefix is a
digest at fixed places (`boundaries`), which do not depend on the prompt's length.  Pure; `engines.selection` and
`engines.cache_aware` decide with it.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Self

import msgspec

from engines.base import EngineRequest

_FINE_BLOCKS = 64  # from the beginning of a prompt; then blocks are four times as long, and after 512 sixteen times
_MEDIUM_BLOCKS = 512


class Mark(msgspec.Struct, frozen=True):
    """A media item in the prompt: its placeholder run, and the hash of its content."""

    offset: int
    length: int
    content_hash: str


class Affinity:
    """Of one request.  `key`: what the client wants kept together.  `marks`: its media in prompt order."""

    def __init__(self, input_ids: Sequence[int] = (), marks: Sequence[Mark] = (), key: str | None = None) -> None:
        self.key = key
        self.marks = tuple(sorted(marks, key=lambda mark: mark.offset))
        self._ids = input_ids
        self._prefixes: dict[int, list[tuple[int, int]]] = {}

    @classmethod
    def of(cls, request: EngineRequest, key: str | None = None) -> Self:
        marks = [
            Mark(item.structural.offset, item.structural.length, item.content_hash)
            for batch in request.media
            for item in batch.items
        ]
        return cls(request.input_ids, marks, key)

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @cached_property
    def media_key(self) -> str | None:
        """Of all media together; None without any."""
        return "".join(mark.content_hash for mark in self.marks) or None

    def prefixes(self, block: int) -> list[tuple[int, int]]:
        """For every boundary (`boundaries`): its place in tokens, and a digest of 64 bits of all before it."""
        if block not in self._prefixes:
            self._prefixes[block] = list(self._digests(boundaries(len(self._ids), block)))
        return self._prefixes[block]

    def head(self, tokens: int) -> str:
        """A digest of the first `tokens` tokens, or of all when there are fewer."""
        ((_, digest),) = self._digests(iter([min(tokens, len(self._ids))]))
        return f"{digest:016x}"

    def _digests(self, places: Iterator[int]) -> Iterator[tuple[int, int]]:
        ids = self._ids if isinstance(self._ids, array) else array("I", self._ids)
        octets = memoryview(ids.tobytes())
        marks = list(reversed(self.marks))
        digest = hashlib.blake2b(digest_size=8)
        done = 0
        for place in places:
            while marks and marks[-1].offset < place:
                mark = marks.pop()
                digest.update(f"{mark.offset} {mark.content_hash}".encode())
            digest.update(octets[done * ids.itemsize : place * ids.itemsize])
            done = place
            yield place, int.from_bytes(digest.copy().digest())


def boundaries(tokens: int, block: int) -> Iterator[int]:
    """Where the prefixes of a prompt end: fine at its beginning, coarse where it is long, so that 128k tokens are
    some hundred prefixes.
    """
    place = 0
    while True:
        coarseness = 1 if place < _FINE_BLOCKS * block else 4 if place < _MEDIUM_BLOCKS * block else 16
        place += coarseness * block
        if place > tokens:
            return
        yield place
