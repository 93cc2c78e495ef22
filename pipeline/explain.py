"""What was done with a request's media, in numbers, for a client that asks: the page at `/`, or anybody who wonders.

All of it is the client's own: what its file is, and what the model's rules make of it.
"""

from collections.abc import Sequence

import msgspec

from pipeline.asked import Look
from pipeline.prompt import Expanded

MOST_VALUES = 8  # of a side tensor that is told: those with more are no facts to read


class MediaTold(msgspec.Struct, frozen=True):
    """One item, in prompt order.  Sizes are height, width in pixels.

    bytes, format, hash   the file, decoded from base64; BLAKE3 of it
    size                  as stored; None of a sound
    frames, rate          of a clip in all, and a second; of a sound its samples
    resized, used_frames  what the patches are cut from
    shape                 rows of the primary tensor
    tokens, begin, length embeddings the engine's encoder returns; where the item stands in the prompt, in tokens
    values                small side tensors, by the name they have on the wire (`image_grid_thw`)
    """

    modality: str
    format: str
    bytes: int
    hash: str
    size: tuple[int, int] | None
    frames: int
    rate: float
    resized: tuple[int, int]
    used_frames: int
    shape: tuple[int, ...]
    tokens: int
    begin: int
    length: int
    values: dict[str, tuple[int | float, ...]]


def told_of(looks: Sequence[Look], expanded: Expanded) -> tuple[MediaTold, ...]:
    """`looks` in prompt order."""
    return tuple(_told(look, expanded, position) for position, look in enumerate(looks))


def _told(look: Look, expanded: Expanded, position: int) -> MediaTold:
    facts, measured = look.facts, look.measured
    where = expanded.structural[position]
    small = {name: side for name, side in measured.side.items() if not side.repeats and len(side.values) <= MOST_VALUES}
    return MediaTold(
        modality=look.item.modality.value,
        format=facts.format,
        bytes=facts.nbytes,
        hash=facts.content_hash,
        size=(facts.stored_height, facts.stored_width) if facts.stored_height else None,
        frames=facts.frames,
        rate=facts.rate,
        resized=measured.resized,
        used_frames=measured.frames,
        shape=measured.primary_shape,
        tokens=measured.feature_tokens,
        begin=where.offset,
        length=where.length,
        values={name: side.values for name, side in small.items()},
    )
