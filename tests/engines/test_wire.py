"""Hand-written fields, judged by protobuf's own parser (upb) with the engines' message classes."""

import pytest
from google.protobuf.internal import decoder, encoder
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as tokenspeed
from smg_grpc_proto.generated import trtllm_service_pb2 as trtllm
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from engines.wire import field, length_delimited, nbytes_of, splice, varint

payloads = st.lists(st.binary(max_size=300), max_size=4)
names = st.text(max_size=20)


def views(payload):
    return [memoryview(piece) for piece in payload]


@given(st.integers(0, 2**64 - 1))
def test_varint_is_protobufs(value):
    assert varint(value) == encoder._VarintBytes(value)
    assert decoder._DecodeVarint(varint(value), 0) == (value, len(varint(value)))


@pytest.mark.parametrize("value", [-1, 2**64])
def test_varint_out_of_range(value):
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        varint(value)


@given(st.integers(1, 2**29 - 1), st.integers(0, 2**31 - 1))
def test_tag_and_length_are_protobufs(number, nbytes):
    assert length_delimited(number, nbytes) == encoder.TagBytes(number, 2) + encoder._VarintBytes(nbytes)


@pytest.mark.parametrize("number", [0, -1, 2**29])
def test_no_field_number(number):
    with pytest.raises(ValueError, match="field number"):
        length_delimited(number, 1)


def test_an_empty_path():
    with pytest.raises(ValueError, match="path"):
        field((), [b"x"])


def test_nothing_is_copied():
    raw = memoryview(bytearray(1000)).cast("f")
    parts = splice(b"head", field((7, 2, 1), [raw, b"tail"]))
    assert parts[2] is raw
    assert nbytes_of(parts) == len(b"".join(parts)) == 4 + len(parts[1]) + 1000 + 4


@given(payloads, names, st.lists(st.integers(0, 2**31 - 1), max_size=4), st.lists(st.integers(0, 200_000), max_size=9))
def test_vllm_pixels_merge_into_the_first_occurrence(payload, dtype, shape, ids):
    whole = vllm.GenerateRequest(
        request_id="r",
        tokenized=vllm.TokenizedInput(input_ids=ids),
        mm_inputs=vllm.MultimodalInputs(
            pixel_values=vllm.TensorData(dtype=dtype, shape=shape), mm_hashes=["a", "b"], im_token_id=7
        ),
        stream=True,
    )
    parts = splice(whole.SerializeToString(), field((7, 2, 1), views(payload)))
    whole.mm_inputs.pixel_values.inline = b"".join(payload)
    assert vllm.GenerateRequest.FromString(b"".join(parts)) == whole


@given(st.lists(st.tuples(payloads, names, payloads), max_size=3), payloads)
def test_vllm_further_batches_and_map_entries_are_written_whole(batches, first):
    whole = vllm.GenerateRequest(mm_inputs=vllm.MultimodalInputs(mm_hashes=["x"]))
    parts = splice(whole.SerializeToString(), field((7, 2, 1), views(first)))
    whole.mm_inputs.pixel_values.inline = b"".join(first)
    for payload, dtype, side in batches:
        batch = vllm.MultimodalInputs(pixel_values=vllm.TensorData(dtype=dtype, shape=[2]), modality=3)
        grid = vllm.TensorData(dtype="int64", shape=[1, 3])
        entry = [
            *field((1,), [b"video_grid_thw"]),
            *field((2,), splice(grid.SerializeToString(), field((1,), views(side)))),
        ]
        head = batch.SerializeToString()
        parts += field((11,), splice(head, field((2, 1), views(payload)), field((3,), entry)))
        batch.pixel_values.inline = b"".join(payload)
        grid.inline = b"".join(side)
        batch.model_specific_tensors["video_grid_thw"].CopyFrom(grid)
        whole.extra_mm_inputs.append(batch)
    assert vllm.GenerateRequest.FromString(b"".join(parts)) == whole


@given(st.lists(st.tuples(payloads, names, st.binary(min_size=32, max_size=32)), max_size=4))
def test_tokenspeed_items_are_written_whole(items):
    whole = tokenspeed.GenerateRequest(request_id="r")
    parts = [whole.SerializeToString()]
    for payload, dtype, content_hash in items:
        item = tokenspeed.MultimodalItem(
            modality=1, content_hash=content_hash, encoder_input=tokenspeed.TensorData(dtype=dtype, shape=[3, 4])
        )
        parts += field((9, 1), splice(item.SerializeToString(), field((3, 3), views(payload))))
        item.encoder_input.inline = b"".join(payload)
        whole.mm_inputs.items.append(item)
    assert tokenspeed.GenerateRequest.FromString(b"".join(parts)) == whole


@given(payloads, st.lists(payloads, max_size=3))
def test_sglang_pixels_and_encoded_images(payload, images):
    whole = sglang.GenerateRequest(
        mm_inputs=sglang.MultimodalInputs(
            pixel_values=sglang.TensorData(dtype="float32", shape=[1]), modalities=["image"]
        )
    )
    parts = splice(
        whole.SerializeToString(), field((3, 4, 1), views(payload)), *(field((3, 5), views(image)) for image in images)
    )
    whole.mm_inputs.pixel_values.data = b"".join(payload)
    whole.mm_inputs.image_data.extend(b"".join(image) for image in images)
    assert sglang.GenerateRequest.FromString(b"".join(parts)) == whole


@given(st.lists(payloads, min_size=1, max_size=3))
def test_trtllm_encoded_images(images):
    whole = trtllm.GenerateRequest(request_id="r", max_tokens=5)
    parts = splice(whole.SerializeToString(), *(field((15, 1), views(image)) for image in images))
    whole.multimodal_input.image_data.extend(b"".join(image) for image in images)
    assert trtllm.GenerateRequest.FromString(b"".join(parts)) == whole
