"""What a Generate request carries, checked against the protocol: counts, ranges, grids, hashes, layouts.

`receive` either returns everything it saw or raises `Refused` with the first rule that is broken.  The rules are
those an engine relies on: as many placeholder ranges and hashes as items, ranges inside the prompt that cover exactly
the tokens the encoder will fill, grids that agree with the pixel rows, sizes tensors that add up, the pixel form the
worker announced.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smg_grpc_proto.generated import common_pb2

from tools.fake.tensors import Reader, Refused, SeenTensor

_STATED_COUNTS = ("types_per_image", "tokens_per_item", "num_img_tokens")  # DeepSeek-V4.1, Inkling, Phi-3
_HASH = re.compile(r"[0-9a-f]{64}")
_WORDS = {0: "image", common_pb2.IMAGE: "image", common_pb2.AUDIO: "audio", common_pb2.VIDEO: "video"}


@dataclasses.dataclass(frozen=True)
class Expectations:
    """What this worker insists on.  `merge`: patches on a side that become one feature token (grid models)."""

    vocabulary: int
    merge: int = 2
    whole_range: bool = (
        True  # every token of an image's range is the image token (Qwen); False: markers may stand in it
    )
    normalises: bool = False  # this worker rescales and normalises: it wants the pixels' own bytes
    references: bool = False  # it takes media references
    anchors: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SeenBatch:
    modality: str
    tensors: Mapping[str, SeenTensor]
    ranges: tuple[tuple[int, int], ...]
    hashes: tuple[str, ...]
    token_id: int

    @property
    def grid_name(self) -> str:
        """Kimi says `grid_thws` for what the other grid models call `image_grid_thw`."""
        return "grid_thws" if "grid_thws" in self.tensors else f"{self.modality}_grid_thw"

    @property
    def grids(self) -> list[list[int]] | None:
        grid = self.tensors.get(self.grid_name)
        return grid.rows() if grid is not None else None


@dataclasses.dataclass(frozen=True)
class Seen:
    request_id: str
    input_ids: Sequence[int]
    original_text: str
    batches: tuple[SeenBatch, ...]
    references: tuple[tuple[str, str], ...]


def receive(request: Any, expected: Expectations, reader: Reader, *, light: bool) -> Seen:
    """Read and check a GenerateRequest; every segment it names is consumed, also when it is refused afterwards."""
    batches = [batch for batch in (request.mm_inputs, *request.extra_mm_inputs) if batch.ByteSize()]
    tensors = [_tensors(batch, reader, light) for batch in batches]
    if not request.request_id:
        raise Refused("no request_id")
    if request.WhichOneof("input") != "tokenized":
        raise Refused("input is not tokenized")
    ids = list(request.tokenized.input_ids)
    if not ids:
        raise Refused("empty prompt")
    if max(ids) >= expected.vocabulary:
        raise Refused(f"token {max(ids)} is outside the vocabulary of {expected.vocabulary}")
    references = _references(request, ids, expected)
    seen: list[SeenBatch] = []
    taken = bytearray(len(ids))
    for batch, named in zip(batches, tensors, strict=True):
        seen.append(_batch(batch, named, ids, taken, expected))
    modalities = [batch.modality for batch in seen]
    if len(set(modalities)) != len(modalities):
        raise Refused(f"two batches of one modality: {modalities}")
    keys = [key for batch in seen for key in batch.tensors if key != "pixel_values"]
    if len(set(keys)) != len(keys):
        raise Refused("one tensor key in two batches")
    _no_bare_anchor(seen, ids, taken)
    return Seen(request.request_id, ids, request.tokenized.original_text, tuple(seen), references)


def _tensors(batch: Any, reader: Reader, light: bool) -> dict[str, SeenTensor]:
    """All tensors of a batch.  A refusal waits until every segment is consumed."""
    found: dict[str, SeenTensor] = {}
    refusal: Refused | None = None
    named = [("pixel_values", batch.pixel_values)] if batch.HasField("pixel_values") else []
    for name, tensor in [*named, *sorted(batch.model_specific_tensors.items())]:
        try:
            found[name] = reader.read(name, tensor, light=light)
        except Refused as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    return found


def _references(request: Any, ids: list[int], expected: Expectations) -> tuple[tuple[str, str], ...]:
    if not request.HasField("media_refs"):
        return ()
    if not expected.references:
        raise Refused("media references, but this worker has no media processor")
    if request.HasField("mm_inputs") or request.extra_mm_inputs:
        raise Refused("media references together with tensors")
    items = tuple((_WORDS[item.modality], item.url) for item in request.media_refs.items)
    for modality in {modality for modality, _ in items}:
        wanted, there = sum(m == modality for m, _ in items), ids.count(expected.anchors.get(modality, -1))
        if wanted != there:
            raise Refused(f"{wanted} {modality} references, {there} anchors in the prompt")
    return items


def _batch(
    batch: Any, tensors: dict[str, SeenTensor], ids: list[int], taken: bytearray, expected: Expectations
) -> SeenBatch:
    modality = _WORDS[batch.modality]
    pixels = tensors.get("pixel_values")
    if pixels is None:
        raise Refused(f"{modality} batch without pixel_values")
    if (pixels.dtype == "uint8") != expected.normalises:
        wants = "raw uint8" if expected.normalises else "normalised float"
        raise Refused(f"pixel_values are {pixels.dtype}, this worker takes {wants} pixels")
    if not batch.HasField("im_token_id"):
        raise Refused(f"{modality} batch without im_token_id")
    ranges = tuple((place.offset, place.length) for place in batch.mm_placeholders)
    hashes = tuple(batch.mm_hashes)
    if not ranges or len(ranges) != len(hashes):
        raise Refused(f"{len(ranges)} placeholder ranges, {len(hashes)} hashes")
    for text in hashes:
        if not _HASH.fullmatch(text):
            raise Refused(f"hash {text!r} is not 64 hex characters")
    seen = SeenBatch(modality, tensors, ranges, hashes, batch.im_token_id)
    _layout(batch, seen)
    counts = _feature_counts(seen, expected)
    for (offset, length), count in zip(ranges, counts, strict=True):
        _range(seen, offset, length, count, ids, taken, expected)
    return seen


def _layout(batch: Any, seen: SeenBatch) -> None:
    """The first axis of every tensor is accounted for by the key lists."""
    items, primary = len(seen.ranges), batch.encoder_input_key or "pixel_values"
    batched = set(batch.batched_keys)
    for name, sizes_name in batch.flat_keys.items():
        wire = "pixel_values" if name == primary else name
        if wire not in seen.tensors:
            continue
        sizes = seen.tensors.get(sizes_name)
        if sizes is None:
            raise Refused(f"missing flat sizes tensor {sizes_name}")
        if len(sizes.values) != items or sum(sizes.values) != seen.tensors[wire].shape[0]:
            raise Refused(
                f"{sizes_name} {list(sizes.values)} does not split {seen.tensors[wire].shape[0]} rows of {name}"
            )
    for name, tensor in seen.tensors.items():
        key = primary if name == "pixel_values" else name
        if key in batched and key not in batch.flat_keys and tensor.shape[0] != items:
            raise Refused(f"{name} has {tensor.shape[0]} rows for {items} items")


def _feature_counts(seen: SeenBatch, expected: Expectations) -> list[int | None]:
    """Feature tokens of every item as its grid says, or the tensor that states them; None where nothing tells."""
    grids = seen.grids
    if grids is None:
        stated = next((seen.tensors[name] for name in _STATED_COUNTS if name in seen.tensors), None)
        return [None] * len(seen.ranges) if stated is None else [int(count) for count in stated.values]
    name = seen.grid_name
    if len(grids) != len(seen.ranges):
        raise Refused(f"{name} has {len(grids)} rows for {len(seen.ranges)} items")
    if any(side % expected.merge or not side for _, height, width in grids for side in (height, width)):
        raise Refused(f"{name} {grids} is not a multiple of the merge size {expected.merge}")
    patches = [t * height * width for t, height, width in grids]
    rows = seen.tensors["pixel_values"].shape[0]
    if sum(patches) != rows:
        raise Refused(f"{name} names {sum(patches)} patches, pixel_values has {rows} rows")
    sizes = seen.tensors.get("patches_per_video" if seen.modality == "video" else "patches_per_image")
    if sizes is not None and list(sizes.values) != patches:
        raise Refused(f"{sizes.name} {list(sizes.values)} differs from {name} {patches}")
    return [count // expected.merge**2 for count in patches]


def _range(
    seen: SeenBatch,
    offset: int,
    length: int,
    count: int | None,
    ids: list[int],
    taken: bytearray,
    expected: Expectations,
) -> None:
    end = offset + length
    if not length or end > len(ids):
        raise Refused(f"range {offset}+{length} is not inside the prompt of {len(ids)} tokens")
    if any(taken[offset:end]):
        raise Refused(f"range {offset}+{length} overlaps another")
    taken[offset:end] = b"\x01" * length
    here = ids[offset:end].count(seen.token_id)
    if count is not None and here != count:
        raise Refused(f"range {offset}+{length} holds {here} feature tokens, the item yields {count}")
    if expected.whole_range and seen.modality == "image" and here != length:
        raise Refused(f"range {offset}+{length} covers {length - here} tokens other than {seen.token_id}")
    if not here:
        raise Refused(f"range {offset}+{length} holds no token {seen.token_id}")


def _no_bare_anchor(seen: list[SeenBatch], ids: list[int], taken: bytearray) -> None:
    """A feature token outside every range would reach the model as text."""
    features = {batch.token_id for batch in seen}
    for at, token in enumerate(ids):
        if token in features and not taken[at]:
            raise Refused(f"token {token} at {at} is covered by no range")
