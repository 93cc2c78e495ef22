"""The vLLM messages against those of the real gateway, and the reply rules of the vLLM servicer."""

import pytest
from google.protobuf import json_format
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.base import (
    Chunk,
    Constraint,
    EngineError,
    EngineRequest,
    Finished,
    Layout,
    MediaBatch,
    MediaItem,
    Modality,
    Range,
    Sampling,
    Tensor,
    TokenLogprob,
    TopLogprob,
)
from engines.transport import Handle
from engines.vllm import VllmReplies, build, side_tensors, tensors
from tests.engines import golden


def handles_of(recorded):
    """The handles of a recorded message, by the key the transport uses."""
    found = {}
    for batch in golden.batches(recorded):
        named = {"pixel_values": batch.pixel_values, **batch.model_specific_tensors}
        for name, tensor in named.items():
            if tensor.WhichOneof("payload") == "shm":
                key = f"{golden.MODALITIES[batch.modality].value}/{name}"
                found[key] = Handle(tensor.shm.name, tensor.shm.nbytes, tensor.shm.owner_id)
    return found


@pytest.mark.parametrize("case", golden.CASES)
def test_message_equals_the_recorded_one(case):
    recorded = golden.message(case)
    request = golden.engine_request(case)
    recorded.sampling_params.min_tokens = request.sampling.min_tokens  # SMG drops it, mediagate sends it
    parts = build(request, recorded.request_id, handles_of(recorded))
    sent = golden.same_order(pb.GenerateRequest.FromString(b"".join(parts)))
    recorded = golden.same_order(recorded)
    for ours, theirs in zip(golden.batches(sent), golden.batches(recorded), strict=True):
        assert ours.pixel_values.inline == theirs.pixel_values.inline
        ours.pixel_values.inline = theirs.pixel_values.inline = b""  # else a failure prints megabytes
    assert json_format.MessageToDict(sent) == json_format.MessageToDict(recorded)
    assert sent == recorded


@pytest.mark.parametrize("case", sorted(golden.WITH_HANDLES))
def test_what_may_go_by_segment_is_what_smg_puts_there(case):
    """Pixels and sizes at threshold 0; never the grids, which identify the media to a decode worker."""
    by_segment = {
        out.key for out in tensors(golden.engine_request(case)) if not out.inline_only and out.tensor.nbytes > 8
    }
    at_any_size = {out.key for out in tensors(golden.engine_request(case)) if not out.inline_only}
    told = set(handles_of(golden.message(case)))
    assert told == (at_any_size if "min0" in case else by_segment)


def test_pixels_are_not_copied():
    request = golden.engine_request("vllm_label_normalize.two_images")
    views = [buffer for item in request.media[0].items for buffer in item.primary.buffers]
    parts = build(request, "id", {})
    assert [part for part in parts if isinstance(part, memoryview)] == views
    assert all(any(part is view for part in parts) for view in views)


def sampling_of(**given):
    request = EngineRequest("id", "m", [1], "text", Sampling(**given), stream=False)
    return pb.GenerateRequest.FromString(b"".join(build(request, "id-1", {}))).sampling_params


def test_sampling_bounds():
    assert sampling_of(top_k=-1).top_k == 0
    assert sampling_of(seed=2**40).seed == 2**31 - 1
    assert sampling_of(seed=-(2**40)).seed == -(2**31)
    assert sampling_of(seed=0).HasField("seed")
    assert sampling_of(logprobs=0).logprobs == 1
    assert sampling_of(logprobs=50).logprobs == 20
    assert dict(sampling_of(logit_bias={7: -100.0, 11: 1.5}).logit_bias) == {7: -100.0, 11: 1.5}
    assert sampling_of(min_tokens=3).min_tokens == 3
    assert sampling_of(temperature=0.0).HasField("temperature")


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_constraint_is_one_of_its_kinds(kind):
    params = sampling_of(constraint=Constraint(kind, "a+"))
    assert (params.WhichOneof("constraint"), getattr(params, kind)) == (kind, "a+")


def test_unset_sampling_stays_unset():
    params = sampling_of()
    assert not any(params.HasField(name) for name in ("temperature", "max_tokens", "seed", "logprobs"))
    assert params.WhichOneof("constraint") is None
    assert (params.top_p, params.repetition_penalty, params.n, params.top_k) == (1.0, 1.0, 1, 0)


def one_batch(layout, *sides):
    items = tuple(
        MediaItem("0" * 64, Range(i, 1), (Range(i, 1),), Tensor("uint8", (1, 2), (b"ab",)), side)
        for i, side in enumerate(sides)
    )
    return MediaBatch(Modality.IMAGE, items, 7, layout)


def test_shared_side_tensors_are_sent_once():
    rows = Tensor("int64", (1,), (b"\x01" + bytes(7),))
    shared = Tensor("float32", (2,), (bytes(8),))
    batch = one_batch(Layout(batched=("rows",)), {"rows": rows, "shared": shared}, {"rows": rows, "shared": shared})
    side = side_tensors(batch)
    assert side["rows"].shape == (2,) and side["rows"].nbytes == 16
    assert side["shared"] is shared


def test_renamed_primary_tensor():
    """DeepSeek-V4.1: key lists name the tensor `patches`, the field stays pixel_values."""
    layout = Layout(batched=("patches",), encoder_input_key="patches")
    request = EngineRequest("id", "m", [1], "t", Sampling(), False, (one_batch(layout, {}, {}),))
    sent = pb.GenerateRequest.FromString(b"".join(build(request, "id", {}))).mm_inputs
    assert sent.encoder_input_key == "patches" and list(sent.batched_keys) == ["patches"]
    assert list(sent.pixel_values.shape) == [2, 2] and sent.pixel_values.inline == b"abab"


def test_items_of_different_width_are_a_fault():
    odd = Tensor("uint8", (1, 3), (b"abc",))
    good = one_batch(Layout(), {})
    items = (*good.items, MediaItem("1" * 64, Range(1, 1), (), odd, {}))
    request = EngineRequest("id", "m", [1], "t", Sampling(), False, (MediaBatch(Modality.IMAGE, items, 7, Layout()),))
    with pytest.raises(ValueError, match="differ"):
        build(request, "id", {})


# ---------------------------------------------------------------- replies


def replies(*, stream, n=1):
    return VllmReplies(EngineRequest("id", "m", [1], "t", Sampling(n=n), stream))


def chunk(ids, index=0, **fields):
    body = pb.GenerateStreamChunk(token_ids=ids, index=index, prompt_tokens=9, completion_tokens=len(ids), **fields)
    return pb.GenerateResponse(chunk=body)


def complete(ids, index=0, **fields):
    fields = {"finish_reason": "stop", "prompt_tokens": 9, **fields}
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, index=index, **fields))


@pytest.mark.parametrize("last", [[], [13]])
def test_stream_emits_no_token_twice(last):
    """`complete.output_ids` is the last delta or empty, its completion_tokens not the total."""
    told = replies(stream=True)
    assert told.event(chunk([11, 12])) == Chunk(0, [11, 12], prompt_tokens=9)
    told.event(chunk([13]))
    end = told.event(complete(last, completion_tokens=1, matched_token_id=13, cached_tokens=4))
    assert end == Finished(0, "stop", [], matched_stop=13, prompt_tokens=9, completion_tokens=3, cached_tokens=4)
    assert told.all_finished
    told.end()


def test_stream_without_a_chunk_gives_the_tokens_of_its_end():
    told = replies(stream=True)
    end = told.event(complete([11], completion_tokens=1))
    assert (end.token_ids, end.completion_tokens) == ([11], 1)


def test_answer_at_once_has_everything():
    told = replies(stream=False, n=2)
    second = told.event(complete([21, 22], index=1, completion_tokens=2, matched_stop_str="END"))
    first = told.event(complete([11], completion_tokens=1, finish_reason="length"))
    assert (second.token_ids, second.matched_stop, second.completion_tokens) == ([21, 22], "END", 2)
    assert (first.token_ids, first.finish_reason, first.matched_stop) == ([11], "length", None)
    assert told.all_finished


def test_logprobs_are_deltas_most_likely_first():
    logprobs = pb.OutputLogProbs(
        token_logprobs=[-1.5], token_ids=[11], top_logprobs=[pb.TopLogProbs(values=[-1.5, -0.5], token_ids=[11, 12])]
    )
    told = replies(stream=True)
    event = told.event(chunk([11], output_logprobs=logprobs))
    assert event.logprobs == (TokenLogprob(11, -1.5, (TopLogprob(12, -0.5), TopLogprob(11, -1.5))),)
    end = told.event(complete([11], output_logprobs=logprobs))
    assert end.logprobs == ()


def test_logprobs_without_tokens_are_a_fault():
    with pytest.raises(EngineError) as fault:
        replies(stream=True).event(chunk([1], output_logprobs=pb.OutputLogProbs(token_logprobs=[-1.0])))
    assert (fault.value.status, fault.value.started) == ("INTERNAL", True)


@pytest.mark.parametrize(
    "messages",
    [
        [complete([1]), chunk([2])],
        [complete([1]), complete([1])],
        [chunk([1], index=1)],
        [pb.GenerateResponse()],
    ],
    ids=["chunk after end", "second end", "unknown choice", "empty message"],
)
def test_order_of_messages_is_held(messages):
    told = replies(stream=True)
    with pytest.raises(EngineError) as fault:
        for message in messages:
            told.event(message)
    assert (fault.value.status, fault.value.started) == ("INTERNAL", True)


def test_stream_that_ends_early_is_a_fault():
    told = replies(stream=True, n=2)
    told.event(complete([1]))
    with pytest.raises(EngineError, match="choice 1"):
        told.end()
