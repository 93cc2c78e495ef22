"""What the stand-in writes down of a request: one JSON line that holds everything but the bytes of its tensors.

`media` has every tensor's dtype, shape, transport and digest; `message` the rest of the GenerateRequest by field
name, fields that are not set left out, so that a test can compare whole messages without keeping pixels.
"""

import itertools
from typing import Any

from google.protobuf import json_format

from tools.fake.received import Seen


def record(request: Any, seen: Seen) -> dict[str, Any]:
    """The journal's view of a request; ids as [id, repeat] runs."""
    media = []
    for batch in seen.batches:
        tensors = {
            name: {"dtype": t.dtype, "shape": list(t.shape), "transport": t.transport, "sha256": t.sha256}
            | ({"values": list(t.values)} if t.values else {"sample": list(t.sample)} if t.sample else {})
            for name, t in batch.tensors.items()
        }
        ranges = [list(place) for place in batch.ranges]
        media.append({"modality": batch.modality, "tensors": tensors, "ranges": ranges, "hashes": list(batch.hashes)})
    runs = [[token, sum(1 for _ in group)] for token, group in itertools.groupby(seen.input_ids)]
    return {
        "request_id": seen.request_id,
        "input_ids": runs,
        "media": media,
        "references": list(seen.references),
        "message": without_tensors(request),
    }


def without_tensors(request: Any) -> dict[str, Any]:
    """A GenerateRequest as JSON without its tensors, token ids and request id, which stand elsewhere in the record."""
    lean = type(request)()
    lean.CopyFrom(request)
    lean.ClearField("request_id")
    lean.tokenized.ClearField("input_ids")
    for batch in ([lean.mm_inputs] if lean.HasField("mm_inputs") else []) + list(lean.extra_mm_inputs):
        batch.ClearField("pixel_values")
        batch.ClearField("model_specific_tensors")
    found: dict[str, Any] = json_format.MessageToDict(lean, preserving_proto_field_name=True)
    return found
