"""A good answer: expanded prompt, hashes, placeholders, and each item's tensors in the form vLLM 0.32's decoder reads.

    {v, job_id, ok, fingerprint, prompt_token_ids, mm_hashes, mm_placeholders, timing, mm_kwargs: {modality: [bin]}}

Each bin is itself a msgpack map, one tensor by key: `{"data": [dtype, shape, ext 3 with the bytes], "field": how a
batch divides it}`.  The message is built as a list of buffers like an engine's (`engines.wire`): small parts are
encoded, tensors are the very views the pool processes wrote.  Names and fields are those recorded of the published
sidecar (tests/data/sidecar): both kinds may answer the same worker, whose batches join items of equal keys.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import blake3
import msgspec

from engines.base import MediaBatch, MediaItem, Modality, Tensor
from engines.wire import Part, nbytes_of
from pipeline.sidecar.fingerprint import Fingerprint
from pipeline.sidecar.protocol import VERSION

_RAW = 3  # vLLM's extension type for a tensor's bytes
_PRIMARY = "pixel_values"
_CLIP_PRIMARY = "pixel_values_videos"
_MOST_BYTES = (1 << 32) - 1  # of a msgpack bin or ext
COPY_SLICE = 4 << 20  # bytes copied between two turns of the loop: about a millisecond


class Placeholder(msgspec.Struct, frozen=True):
    """A run of the expanded prompt; `is_embed`: which of its tokens receive embeddings, None for all."""

    offset: int
    length: int
    is_embed: list[bool] | None = None


class Timing(msgspec.Struct, frozen=True):
    queue_ms: int = 0
    fetch_ms: int = 0
    process_ms: int = 0


class _Head(msgspec.Struct, frozen=True):
    """Everything but `mm_kwargs`, which is appended."""

    v: int
    job_id: str
    ok: bool
    fingerprint: Fingerprint
    prompt_token_ids: list[int]
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]
    timing: Timing


def encode_answer(
    job_id: str,
    fingerprint: Fingerprint,
    prompt: list[int],
    media: Sequence[MediaBatch],
    side: Sequence[str],
    timing: Timing,
    *,
    seconds: Sequence[Sequence[float]] = (),
) -> list[Part]:
    """The answer to a job as a list of buffers.

    `side`: the tensors an item has beside its pixels, as far as its modality has them.  `seconds`: the times of each
    clip's steps, in prompt order, where the family's items carry them (`timestamps`).
    """
    salt = "|".join(fingerprint.fields().values())
    head = _Head(
        v=VERSION,
        job_id=job_id,
        ok=True,
        fingerprint=fingerprint,
        prompt_token_ids=prompt,
        mm_hashes={batch.modality.value: [_hash(batch, item, salt) for item in batch.items] for batch in media},
        mm_placeholders={batch.modality.value: [_placeholder(item) for item in batch.items] for batch in media},
        timing=timing,
    )
    encoded = msgspec.msgpack.encode(head)
    assert 0x80 <= encoded[0] < 0x8F  # a map of less than 15 entries: one more is its next byte
    parts: list[Part] = [bytes([encoded[0] + 1]) + encoded[1:], msgspec.msgpack.encode("mm_kwargs"), _map(len(media))]
    for batch in media:
        times = seconds if batch.modality is Modality.VIDEO else ()
        parts += [msgspec.msgpack.encode(batch.modality.value), _array(len(batch.items))]
        for place, item in enumerate(batch.items):
            parts += _blob(batch, item, side, times[place] if times else None)
    return parts


def _hash(batch: MediaBatch, item: MediaItem, salt: str) -> str:
    """Opaque to vLLM, which caches encoder outputs by it: so the form and the worker's settings are part of it, and an
    engine that is also sent tensors by a router never mixes the two up.
    """
    recipe = f"mediagate-sidecar-1|{salt}|{batch.form.dtype}|{batch.form.normalised}|{item.content_hash}"
    return blake3.blake3(recipe.encode()).hexdigest()


def _placeholder(item: MediaItem) -> Placeholder:
    start, length = item.structural.offset, item.structural.length
    mask = [False] * length
    for run in item.features:
        begin = run.offset - start
        mask[begin : begin + run.length] = [True] * run.length
    return Placeholder(start, length, None if all(mask) else mask)


# ---------------------------------------------------------------- one item's tensors


def _blob(batch: MediaBatch, item: MediaItem, side: Sequence[str], seconds: Sequence[float] | None) -> list[Part]:
    """A msgpack bin that holds the item's map of tensors."""
    primary = batch.layout.encoder_input_key or _PRIMARY
    key = _CLIP_PRIMARY if batch.modality is Modality.VIDEO and primary == _PRIMARY else primary
    is_row = primary in batch.layout.batched
    rows = {name: item.side[name] for name in side if name in item.side}
    parts: list[Part] = [_map(1 + len(rows) + (seconds is not None)), msgspec.msgpack.encode(key)]
    parts += _element(item.primary, _BATCHED if is_row else _flat(item.primary.shape[0]), is_row=is_row)
    for name, tensor in rows.items():
        parts += [msgspec.msgpack.encode(name), *_element(tensor, _BATCHED_ON_CPU, is_row=True)]
    if seconds is not None:
        times = {"data": list(seconds), "field": _BATCHED_ON_CPU}
        parts += [msgspec.msgpack.encode("timestamps"), msgspec.msgpack.encode(times)]
    return [_header(nbytes_of(parts), 0xC4), *parts]


def _element(tensor: Tensor, field: Any, *, is_row: bool) -> list[Part]:
    """`is_row`: the item's row of a batched tensor, which loses its first axis."""
    shape = tensor.shape[1:] if is_row else tensor.shape
    entry = [_map(2), msgspec.msgpack.encode("data"), _array(3), msgspec.msgpack.encode(tensor.dtype)]
    entry += [msgspec.msgpack.encode(shape), _header(tensor.nbytes, 0xC7) + bytes([_RAW])]
    return [b"".join(entry), *tensor.buffers, msgspec.msgpack.encode("field"), msgspec.msgpack.encode(field)]


_BATCHED = ("batched", {"keep_on_cpu": False})
_BATCHED_ON_CPU = ("batched", {"keep_on_cpu": True})  # what vLLM reads on the host: grids, counts, times


def _flat(rows: int) -> tuple[str, Mapping[str, Any]]:
    """Each item is a batch of its own to vLLM's processor: its slice begins at 0."""
    return "flat", {"keep_on_cpu": False, "slices": [[[0, rows, None]]], "dim": 0}


# ---------------------------------------------------------------- msgpack by hand


def _map(count: int) -> bytes:
    return bytes([0x80 + count]) if count < 16 else b"\xde" + count.to_bytes(2, "big")


def _array(count: int) -> bytes:
    return bytes([0x90 + count]) if count < 16 else b"\xdc" + count.to_bytes(2, "big")


def _header(nbytes: int, first: int) -> bytes:
    """Kind and length of a bin (`first` 0xC4) or an ext (0xC7).  ValueError for more than msgpack can say."""
    if nbytes > _MOST_BYTES:
        raise ValueError(f"{nbytes} bytes are more than a msgpack value holds")
    width = 0 if nbytes < 1 << 8 else 1 if nbytes < 1 << 16 else 2
    return bytes([first + width]) + nbytes.to_bytes(1 << width, "big")


async def joined(parts: Iterable[Part]) -> bytearray:
    """The message in one piece, copied in slices so that the loop goes on meanwhile.

    One copy: the spans are free afterwards, however long Redis takes to read.
    """
    parts = list(parts)
    whole = bytearray(nbytes_of(parts))
    view = memoryview(whole)
    at = since = 0
    for part in parts:
        source = memoryview(part)
        for begin in range(0, len(source), COPY_SLICE):
            piece = source[begin : begin + COPY_SLICE]
            view[at : at + len(piece)] = piece
            at += len(piece)
            since += len(piece)
            if since >= COPY_SLICE:
                since = 0
                await asyncio.sleep(0)
    view.release()
    return whole
