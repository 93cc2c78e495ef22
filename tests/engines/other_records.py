"""Recorded Generate messages of SMG 1.11.0 and 1.13.0 to TokenSpeed, SGLang, TensorRT-LLM and MLX (`described` form),
and the `EngineRequest` that must give each of them.

Pixels and files are kept as size and digest; here bytes drawn from the digest stand in for them.  The gateway's own
pixels are held against the digests from outside (`tests/e2e/test_other_engines.py`).
"""

import base64
import hashlib
import json
import lzma
import random
from math import prod

from engines.base import (
    ITEM_BYTES,
    EngineRequest,
    Form,
    Layout,
    MediaBatch,
    MediaItem,
    Modality,
    Range,
    Tensor,
)
from engines.transport import Handle
from tests.engines.described import is_digest
from tests.engines.golden import FOLDER, sampling

_DATA = json.loads(lzma.decompress((FOLDER / "others.json.xz").read_bytes()))
LABELS = _DATA["labels"]
RECORDS = {f"{one['version']}.{one['setup']}.{one['case']}": one for one in _DATA["records"]}
MESSAGES = sorted(name for name, record in RECORDS.items() if "message" in record)
END_ID = 4689  # "END" in the model's vocabulary
MODALITIES = {1: Modality.IMAGE, 2: Modality.AUDIO, 3: Modality.VIDEO}
LAYOUT = Layout(
    batched=("image_grid_thw", "patches_per_image"),
    flat={"pixel_values": "patches_per_image"},
    keep_on_cpu=("image_grid_thw",),
)


def stand_in_bytes(value):
    """The recorded bytes, or as many others in their place."""
    if "base64" in value:
        return base64.b64decode(value["base64"])
    return random.Random(value["sha256"]).randbytes(value["nbytes"])


def with_stand_ins(value):
    """The described message with the digests of `stand_in_bytes`."""
    if is_digest(value):
        return {**value, "sha256": hashlib.sha256(stand_in_bytes(value)).hexdigest()}
    if isinstance(value, dict):
        return {key: with_stand_ins(inner) for key, inner in value.items()}
    return [with_stand_ins(inner) for inner in value] if isinstance(value, list) else value


def engine_request(record):
    """The request, and for TokenSpeed the handles of tensors that went by shared memory."""
    message, http = record["message"], record["request"]["body"]
    tokenized = message["tokenized"]
    if record["runtime"] == "tokenspeed":
        media, handles = _items(message)
    else:
        media, handles = _pictures(message), {}
    told = sampling({**http, "stop": _listed(http.get("stop", ()))})
    request = EngineRequest(
        request_id="chatcmpl-test",
        model=http["model"],
        input_ids=tokenized.get("input_ids") or tokenized["input_token_ids"],
        original_text=tokenized.get("original_text", ""),
        sampling=told,
        stream=http.get("stream", False),
        media=media,
        stop_ids=(END_ID,) if "END" in told.stop else (),
    )
    return request, handles


def _listed(stop):
    return [stop] if isinstance(stop, str) else stop


def _ranges(told):
    return tuple(Range(run.get("offset", 0), run["length"]) for run in told)


def _items(message):
    """TokenSpeed: items of one modality are a batch; items of all modalities are in prompt order."""
    grouped, handles = {}, {}
    for number, told in enumerate(message.get("mm_inputs", {}).get("items", ())):
        named = {"encoder_input": told["encoder_input"], **told["model_specific_tensors"]}
        for name, tensor in named.items():
            if "shm" in tensor:
                shm = tensor["shm"]
                handles[f"{number}/{name}"] = Handle(shm["name"], shm["nbytes"], shm["owner_id"])
        runs = _ranges(told["placeholders"])
        primary = _tensor(told["encoder_input"])
        data = primary.buffers[0]
        half = len(data) // 2  # an item may come in several buffers
        item = MediaItem(
            content_hash="",
            structural=Range(runs[0].offset - 1, runs[-1].offset + runs[-1].length + 2 - runs[0].offset),
            features=runs,
            primary=Tensor(primary.dtype, primary.shape, (memoryview(data)[:half], memoryview(data)[half:])),
            side={name: _tensor(tensor) for name, tensor in told["model_specific_tensors"].items()},
        )
        grouped.setdefault((MODALITIES[told["modality"]], told["placeholder_token_id"]), []).append(item)
    batches = [
        MediaBatch(modality, tuple(items), token, LAYOUT, Form(items[0].primary.dtype))
        for (modality, token), items in grouped.items()
    ]
    return tuple(reversed(batches)), handles  # the order of batches says nothing


def _tensor(told):
    if "shm" in told:
        data = bytes(told["shm"]["nbytes"])
    else:
        data = stand_in_bytes(told["inline"])
    shape = tuple(told["shape"])
    assert len(data) == prod(shape) * ITEM_BYTES[told["dtype"]]
    return Tensor(told["dtype"], shape, (data,))


def _pictures(message):
    """SGLang: one batch; TensorRT-LLM: files alone."""
    if "multimodal_input" in message:
        files = message["multimodal_input"]["image_data"]
        items = [
            MediaItem("", Range(number, 1), (), Tensor("float32", (0,), ()), {}, stand_in_bytes(one))
            for number, one in enumerate(files)
        ]
        return (MediaBatch(Modality.IMAGE, tuple(items), 7, LAYOUT, Form(tensors=False, encoded=True)),)
    if "mm_inputs" not in message:
        return ()
    told = message["mm_inputs"]
    pixels = memoryview(stand_in_bytes(told["pixel_values"]["data"]))
    rows, width = told["pixel_values"]["shape"]
    side = {name: (one, stand_in_bytes(one["data"])) for name, one in told["model_specific_tensors"].items()}
    items, start = [], 0
    for number, run in enumerate(_ranges(told["mm_placeholders"])):
        count = int.from_bytes(side["patches_per_image"][1][8 * number : 8 * number + 8], "little")
        view = pixels[start * width * 4 : (start + count) * width * 4]
        start += count
        items.append(
            MediaItem(
                content_hash="0" * 64,
                structural=Range(run.offset - 1, run.length + 2),
                features=(run,),
                primary=Tensor("float32", (count, width), (view,)),
                side={name: _row(one, data, number) for name, (one, data) in side.items()},
                encoded=stand_in_bytes(told["image_data"][number]),
            )
        )
    assert start == rows
    return (MediaBatch(Modality.IMAGE, tuple(items), told["im_token_id"], LAYOUT, Form(encoded=True)),)


def _row(told, data, number):
    each = len(data) // told["shape"][0]
    return Tensor(told["dtype"], (1, *told["shape"][1:]), (data[each * number : each * (number + 1)],))
