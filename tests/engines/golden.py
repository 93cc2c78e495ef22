"""Recorded Generate messages of SMG 1.13.0, and the `EngineRequest` that must give each of them.

The request is put together from what the gateway knew: token ids and text of the record, sampling from the recorded
HTTP body, pixels and side tensors of the record cut up by item.
"""

import json
import lzma
from functools import lru_cache
from math import prod
from pathlib import Path

from smg_grpc_proto.generated import vllm_engine_pb2

from engines.base import (
    ITEM_BYTES,
    EngineRequest,
    Form,
    Layout,
    MediaBatch,
    MediaItem,
    Modality,
    Range,
    Sampling,
    Tensor,
)

FOLDER = Path(__file__).parent.parent / "data" / "engine_messages"
CASES = sorted(path.name.split(".pb")[0] for path in FOLDER.glob("*.pb*"))
WITH_HANDLES = {"vllm_shm.image_and_video", "vllm_shm_min0.one_png"}
MODALITIES = {1: Modality.IMAGE, 3: Modality.VIDEO}
# the layout of Qwen3-VL, per modality
LAYOUTS = {
    Modality.IMAGE: Layout(
        batched=("image_grid_thw", "patches_per_image", "not_in_this_request"),
        flat={"pixel_values": "patches_per_image"},
        keep_on_cpu=("image_grid_thw", "video_grid_thw"),
    ),
    Modality.VIDEO: Layout(
        batched=("video_grid_thw", "patches_per_video", "video_second_per_grid"),
        flat={"pixel_values": "patches_per_video"},
        keep_on_cpu=("image_grid_thw", "video_grid_thw"),
    ),
}


@lru_cache(maxsize=4)
def raw_message(case: str) -> bytes:
    packed = FOLDER / f"{case}.pb.xz"
    return lzma.decompress(packed.read_bytes()) if packed.is_file() else (FOLDER / f"{case}.pb").read_bytes()


def message(case: str) -> vllm_engine_pb2.GenerateRequest:
    return vllm_engine_pb2.GenerateRequest.FromString(raw_message(case))


def batches(request: vllm_engine_pb2.GenerateRequest) -> list[vllm_engine_pb2.MultimodalInputs]:
    return [request.mm_inputs, *request.extra_mm_inputs] if request.HasField("mm_inputs") else []


def engine_request(case: str) -> EngineRequest:
    recorded = message(case)
    http = json.loads((FOLDER / f"{case}.request.json").read_text())["body"]
    return EngineRequest(
        request_id="chatcmpl-test",
        model=http["model"],
        input_ids=list(recorded.tokenized.input_ids),
        original_text=recorded.tokenized.original_text,
        sampling=sampling(http),
        stream=http.get("stream", False),
        media=tuple(media_batch(batch) for batch in batches(recorded)),
    )


def sampling(http: dict) -> Sampling:
    plain = {
        key: http[key]
        for key in (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "max_tokens", "min_tokens", "ignore_eos", "n", "seed",
        )
        if key in http
    }  # fmt: skip
    return Sampling(
        **plain,
        stop=tuple(http.get("stop", ())),
        stop_token_ids=tuple(http.get("stop_token_ids", ())),
        logprobs=http.get("top_logprobs", 0) if http.get("logprobs") else None,
    )


def media_batch(recorded: vllm_engine_pb2.MultimodalInputs) -> MediaBatch:
    modality = MODALITIES[recorded.modality]
    sizes = f"patches_per_{modality.value}"
    primary, start, items = recorded.pixel_values, 0, []
    pixels = memoryview(primary.inline) if primary.inline else memoryview(bytes(nbytes(primary)))
    row_bytes = nbytes(primary) // primary.shape[0]
    for index, place in enumerate(recorded.mm_placeholders):
        rows = patches(recorded, sizes, index)
        view = pixels[start * row_bytes : (start + rows) * row_bytes]
        half = len(view) // 2  # an item may come in several buffers
        items.append(
            MediaItem(
                content_hash=recorded.mm_hashes[index],
                structural=Range(place.offset, place.length),
                features=(Range(place.offset, place.length),),
                primary=Tensor(primary.dtype, (rows, *primary.shape[1:]), (view[:half], view[half:])),
                side={name: row(tensor, index) for name, tensor in recorded.model_specific_tensors.items()},
            )
        )
        start += rows
    form = Form(primary.dtype, normalised=primary.dtype != "uint8")
    return MediaBatch(modality, tuple(items), recorded.im_token_id, LAYOUTS[modality], form)


def nbytes(tensor: vllm_engine_pb2.TensorData) -> int:
    return prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def patches(recorded: vllm_engine_pb2.MultimodalInputs, sizes: str, index: int) -> int:
    told = recorded.model_specific_tensors[sizes]
    if told.WhichOneof("payload") == "shm":  # one item: all rows are its own
        return recorded.pixel_values.shape[0]
    return int.from_bytes(told.inline[8 * index : 8 * index + 8], "little")


def row(tensor: vllm_engine_pb2.TensorData, index: int) -> Tensor:
    each = nbytes(tensor) // tensor.shape[0]
    data = tensor.inline[each * index : each * (index + 1)] or bytes(each)
    return Tensor(tensor.dtype, (1, *tensor.shape[1:]), (data,))


def same_order(request: vllm_engine_pb2.GenerateRequest) -> vllm_engine_pb2.GenerateRequest:
    """Key lists are sets: SMG writes them in any order."""
    for batch in batches(request):
        for keys in (batch.batched_keys, batch.keep_on_cpu_keys):
            in_order = sorted(keys)
            del keys[:]
            keys.extend(in_order)
    return request
