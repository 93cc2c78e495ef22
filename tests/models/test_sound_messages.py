"""Sounds as SMG 1.13.0 sent them to TokenSpeed: prompt, ranges, hash, tensors, from the file's bytes to the wire's."""

import lzma

import blake3
import numpy as np
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from engines.base import Form
from pipeline.encode import side_tensor
from pipeline.media.audio import decode, inspect
from tests.models.served import Served
from tests.models.sounds import DATA, SOUND, encode, measure, prompt


def floats(brain: np.ndarray) -> np.ndarray:
    """bfloat16's bits as float32."""
    return (brain.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("record", "file", "rounded_otherwise"),
    [("audio", "tone_16k_mono_1s", 0), ("audio_44k_stereo", "tone_44k_stereo_1s", 10)],
)
def test_a_second_as_the_peer_sent_it(record: str, file: str, rounded_otherwise: int) -> None:
    """Without another rate every bit; else a few of 12,800 values round to the other neighbour."""
    message = pb.GenerateRequest.FromString(lzma.decompress((DATA / f"tokenspeed.{record}.pb.xz").read_bytes()))
    [item] = message.mm_inputs.items
    data = lzma.decompress((DATA / f"{file}.wav.xz").read_bytes())
    omni = Served("qwen3_omni")

    sound = decode(memoryview(data), inspect(memoryview(data), 1 << 20, lambda: None).samples, lambda: None)
    measured = measure(omni, sound)
    [measured] = omni.family.reconcile(omni.settings, SOUND, [measured])
    ours = encode(omni, sound, Form("bfloat16"), measured).view(np.uint16)

    theirs = np.frombuffer(item.encoder_input.inline, np.uint16)
    assert (item.encoder_input.dtype, list(item.encoder_input.shape)) == ("bfloat16", list(measured.primary_shape))
    differ = np.count_nonzero(ours != theirs)
    print(f"{record}: {differ} of {len(theirs)} values differ")
    assert differ <= rounded_otherwise
    assert np.abs(ours.astype(np.int32) - theirs.astype(np.int32)).max() <= 1  # the next bfloat16
    assert np.abs(floats(ours) - floats(theirs)).max() <= 0.004

    side = {name: side_tensor(tensor) for name, tensor in measured.side.items()}
    assert {name: (tensor.dtype, list(tensor.shape), b"".join(tensor.buffers)) for name, tensor in side.items()} == {
        name: (tensor.dtype, list(tensor.shape), tensor.inline) for name, tensor in item.model_specific_tensors.items()
    }

    text, _, expanded = prompt(omni, [sound, "What is shown?"])
    assert text == message.tokenized.original_text
    assert expanded.ids == list(message.tokenized.input_ids)
    assert [(run.offset, run.length) for run in item.placeholders] == [
        (run.offset, run.length) for run in expanded.features[0]
    ]
    assert item.placeholder_token_id == omni.family.feature_token(omni.config, omni.vocabulary, SOUND)
    assert item.content_hash == blake3.blake3(blake3.blake3(data).hexdigest().encode()).digest()
