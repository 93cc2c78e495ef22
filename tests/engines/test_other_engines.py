"""TokenSpeed, SGLang, TensorRT-LLM and MLX: messages against those of the real gateway, and their reply rules."""

import blake3
import msgspec
import pytest
from smg_grpc_proto.generated import mlx_engine_pb2, sglang_scheduler_pb2, tokenspeed_scheduler_pb2, trtllm_service_pb2

from engines.base import (
    Chunk,
    Constraint,
    EngineError,
    EngineRequest,
    Finished,
    Form,
    MessageTooLarge,
    Modality,
    ParameterRefused,
    Sampling,
    TokenLogprob,
    TopLogprob,
)
from engines.labels import merged
from engines.probe import ENGINES
from tests.engines.described import describe
from tests.engines.other_records import LABELS, MESSAGES, RECORDS, engine_request, with_stand_ins

MODULES = {
    "sglang": sglang_scheduler_pb2,
    "trtllm": trtllm_service_pb2,
    "tokenspeed": tokenspeed_scheduler_pb2,
    "mlx": mlx_engine_pb2,
}
OTHERS = sorted(MODULES)
# what SMG drops and mediagate sends, in the records' only request that says it
SENT = {
    "sglang": {"sampling_params": {"min_new_tokens": 1}},
    "tokenspeed": {"sampling_params": {"min_new_tokens": 1}},
    "trtllm": {"sampling_config": {"min_tokens": 1}, "stop_token_ids": [7]},
}


def engine(runtime):
    return ENGINES[runtime](channels=None)


def built(runtime, request, handles=None):
    parts = engine(runtime).build(request, "id-1", handles or {})
    return MODULES[runtime].GenerateRequest.FromString(b"".join(parts))


def request_of(stream=False, **given):
    return EngineRequest("id", "m", [1, 2], "text", Sampling(**given), stream)


@pytest.mark.parametrize("name", MESSAGES)
def test_message_equals_the_recorded_one(name):
    record = RECORDS[name]
    runtime = record["runtime"]
    request, handles = engine_request(record)
    sent = describe(built(runtime, request, handles))
    assert sent.pop("request_id") == "id-1"
    expected = with_stand_ins(record["message"])
    for field, value in SENT.get(runtime, {}).items() if record["case"] == "sampling" else ():
        expected[field] = {**expected.get(field, {}), **value} if isinstance(value, dict) else value
    for item in [*sent.get("mm_inputs", {}).get("items", ()), *expected.get("mm_inputs", {}).get("items", ())]:
        item.pop("content_hash")  # of the file's digest, which the record does not have
    assert sent == expected


def test_items_have_the_hash_of_their_hash():
    request, _ = engine_request(RECORDS["1.11.0.tokenspeed.one_png"])
    [batch] = request.media
    digest = "c0ffee" + 58 * "0"
    item = msgspec.structs.replace(batch.items[0], content_hash=digest)
    request = msgspec.structs.replace(request, media=(msgspec.structs.replace(batch, items=(item,)),))
    assert built("tokenspeed", request).mm_inputs.items[0].content_hash == blake3.blake3(digest.encode()).digest()


@pytest.mark.parametrize("name", [name for name in MESSAGES if ".two_images" in name])
def test_pixels_and_files_are_not_copied(name):
    record = RECORDS[name]
    request, handles = engine_request(record)
    parts = engine(record["runtime"]).build(request, "id", handles)
    items = [item for batch in request.media for item in batch.items]
    given = [buffer for item in items for buffer in (*item.primary.buffers, item.encoded) if len(buffer)]
    assert given and all(any(part is buffer for part in parts) for buffer in given)


def test_a_grid_never_goes_by_segment_and_every_item_has_its_own():
    request, _ = engine_request(RECORDS["1.13.0.tokenspeed.image_and_video"])
    outgoing = engine("tokenspeed").tensors(request)
    assert [out.key for out in outgoing if not out.inline_only and out.tensor.nbytes > 64] == [
        "0/encoder_input",
        "1/encoder_input",
    ]
    assert {out.key for out in outgoing if out.inline_only} >= {"0/image_grid_thw", "1/video_grid_thw"}
    assert all(out.segment is None for out in outgoing)


@pytest.mark.parametrize("runtime", ["sglang", "trtllm"])
def test_engines_without_segments_offer_no_tensor(runtime):
    request, _ = engine_request(RECORDS[f"1.13.0.{runtime}.one_png"])
    assert engine(runtime).tensors(request) == []


# ---------------------------------------------------------------- sampling


def test_what_a_client_does_not_say():
    assert not built("mlx", request_of()).sampling_params.HasField("temperature")
    assert not built("sglang", request_of()).sampling_params.HasField("max_new_tokens")
    plain = built("trtllm", request_of())
    assert plain.max_tokens == 2048 and not plain.output_config.HasField("logprobs")
    assert not any(plain.sampling_config.HasField(name) for name in ("top_k", "min_p", "min_tokens", "seed"))
    assert built("trtllm", request_of(top_k=-1)).sampling_config.top_k == 0
    assert built("trtllm", request_of(logprobs=0)).output_config.HasField("logprobs")
    assert built("sglang", request_of(top_k=-1)).sampling_params.top_k == -1
    assert built("mlx", request_of(logprobs=50)).sampling_params.logprobs == 20
    assert not built("mlx", request_of(seed=2**40)).sampling_params.HasField("seed")
    assert built("tokenspeed", request_of(seed=-1)).sampling_params.sampling_seed == 2**64 - 1
    for runtime in ("sglang", "tokenspeed"):
        assert dict(built(runtime, request_of(logit_bias={7: 1.5})).sampling_params.logit_bias) == {"7": 1.5}
        assert built(runtime, request_of(logprobs=0)).return_logprob
    assert dict(built("mlx", request_of(logit_bias={7: 1.5})).sampling_params.logit_bias) == {7: 1.5}


def test_stop_strings_never_reach_sglang():
    request = msgspec.structs.replace(request_of(stop=("END", "zq xv ww"), stop_token_ids=(7,)), stop_ids=(4689, 7))
    params = built("sglang", request).sampling_params
    assert list(params.stop) == [] and list(params.stop_token_ids) == [7, 4689]


@pytest.mark.parametrize(
    ("runtime", "parameter", "value"),
    [
        ("mlx", "n", 2),
        ("mlx", "stop", ("x",)),
        ("mlx", "min_tokens", 1),
        ("mlx", "constraint", Constraint("regex", "a+")),
        ("trtllm", "logit_bias", {1: 1.0}),
    ],
)
def test_what_an_engine_cannot_be_told_is_refused(runtime, parameter, value):
    word = "response_format" if parameter == "constraint" else parameter
    with pytest.raises(ParameterRefused, match=f"backend {runtime} does not support the parameter {word}"):
        engine(runtime).check(request_of(**{parameter: value}))
    for other in ENGINES:
        engine(other).check(request_of())


@pytest.mark.parametrize("runtime", ["sglang", "tokenspeed", "mlx"])
def test_a_message_the_server_would_not_read_is_not_sent(runtime):
    made = engine(runtime)
    assert made.max_message_bytes == 256 << 20
    made.learn({"max_message_bytes": "20"})
    with pytest.raises(MessageTooLarge, match=rf"backend {runtime} takes at most 20"):
        made.generate(request_of(), "id", {})
    made.learn({"max_message_bytes": "lots"})
    assert made.max_message_bytes == 20 and engine(runtime).max_message_bytes == 256 << 20


@pytest.mark.parametrize(
    ("kind", "field", "guide"),
    [
        ("json_schema", "json_schema", "GUIDE_TYPE_JSON_SCHEMA"),
        ("regex", "regex", "GUIDE_TYPE_REGEX"),
        ("grammar", "ebnf_grammar", "GUIDE_TYPE_EBNF_GRAMMAR"),
    ],
)
def test_constraints(kind, field, guide):
    request = request_of(constraint=Constraint(kind, "a+"))
    for runtime in ("sglang", "tokenspeed"):
        params = built(runtime, request).sampling_params
        assert (params.WhichOneof("constraint"), getattr(params, field)) == (field, "a+")
        assert built(runtime, request_of()).sampling_params.WhichOneof("constraint") is None
    told = built("trtllm", request).guided_decoding
    assert (told.GuideType.Name(told.guide_type), told.guide) == (guide, "a+")
    assert not built("trtllm", request_of()).HasField("guided_decoding")


# ---------------------------------------------------------------- what they take


def test_forms():
    def form(runtime, told=None, dtype=None, **dtypes):
        by_modality = {Modality(name): wanted for name, wanted in dtypes.items()}
        return engine(runtime).form(told or {}, dtype, by_modality)

    assert form("sglang", {"multimodal_encoder_dtype": "bfloat16"}) == Form("float32", encoded=True)
    assert form("trtllm") == Form(tensors=False, encoded=True)
    assert form("tokenspeed") == Form("bfloat16")
    assert form("tokenspeed", {"multimodal_encoder_dtype": "FP16"}) == Form("float16")
    assert form("tokenspeed", {"multimodal_encoder_dtype": "int3"}) == Form("float32")
    assert form("tokenspeed", {"multimodal_encoder_dtype": "float16"}, "float32") == Form("float32")
    mixed = form("tokenspeed", None, "float32", image="float16", video="float32")
    assert mixed == Form("float32", others=((Modality.IMAGE, "float16"),))
    assert mixed.of(Modality.IMAGE) == Form("float16") and mixed.of(Modality.AUDIO) == Form("float32")


def test_which_form_serves_whom():
    image = Modality.IMAGE
    plain, sglang, trtllm = Form(), Form(encoded=True), Form(tensors=False, encoded=True)
    assert sglang.serves(plain, image) and sglang.serves(trtllm, image) and sglang.serves(sglang, image)
    assert not plain.serves(sglang, image) and not trtllm.serves(sglang, image) and not plain.serves(trtllm, image)
    mixed = Form("bfloat16", others=((Modality.VIDEO, "float32"),))
    assert mixed.serves(Form("bfloat16"), image) and not mixed.serves(Form("bfloat16"), Modality.VIDEO)


@pytest.mark.parametrize("setup", sorted(LABELS))
def test_labels_equal_those_of_the_real_gateway(setup):
    """The info replies of the recording engine, from what it is known to say."""
    told, seen = LABELS[setup], LABELS[setup]["seen"]
    runtime = told["runtime"]
    pb = MODULES[runtime]
    model, server = pb.GetModelInfoResponse(), pb.GetServerInfoResponse()
    facts = {
        "model_path": "qwen3-vl", "model_id": "qwen3-vl", "served_model_name": "qwen3-vl", "tokenizer_path": "qwen3-vl",
        "is_generation": True, "max_context_length": 262144, "max_req_input_len": 262143, "max_seq_len": 262144,
        "max_input_len": 262144, "max_batch_size": 256, "vocab_size": 151936, "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"], "eos_token_ids": [151645, 151643], "pad_token_id": 151643,
        "bos_token_id": 151643, "supports_vision": True, "supports_multimodal": True, "supported_modalities": [1, 3],
    }  # fmt: skip
    facts |= dict(text.split("=") for text in told["told"])
    for name, value in facts.items():
        if name in model.DESCRIPTOR.fields_by_name:
            repeated = isinstance(value, list)
            getattr(model, name).extend(value) if repeated else setattr(model, name, value)
    own = {
        "sglang": {"server_type": "grpc", "sglang_version": "0.5.20"},
        "trtllm": {"version": "1.2.0", "backend": "pytorch", "tensor_parallel_size": 1, "world_size": 1},
        "tokenspeed": {"tokenspeed_version": "0.1.0"},
        "mlx": {"server_type": "mlx-grpc"},
    }
    for name, value in own[runtime].items():
        setattr(server, name, value)
    if "server_args" in server.DESCRIPTOR.fields_by_name:
        names = ("model", "tokenizer") if runtime == "tokenspeed" else ("model_path", "tokenizer_path")
        server.server_args.update({**dict.fromkeys(names, "qwen3-vl"), "served_model_name": "qwen3-vl", "tp_size": 1})
        server.server_args.update({"api_key": "not a label", "dp_size": 0, "load_balance_method": "null"})
    assert merged([model, server], {}, engine(runtime).flatten) == seen


def test_numbers_and_flags_of_a_struct():
    reply = tokenspeed_scheduler_pb2.GetServerInfoResponse()
    reply.server_args.update({"max_total_tokens": 123456789, "is_embedding": False, "weight_version": ""})
    reply.scheduler_info.update({"shm_namespace_id": "boot:25", "other": 1})
    found = engine("tokenspeed").flatten(reply)
    assert found == {"max_total_tokens": "123456789", "is_embedding": "false", "shm_namespace_id": "boot:25"}


# ---------------------------------------------------------------- replies


def chunk(runtime, ids, index=0, **fields):
    pb = MODULES[runtime]
    place = {"sequence_index" if runtime == "trtllm" else "index": index}
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, prompt_tokens=9, **place, **fields))


def complete(runtime, ids, index=0, reason="stop", **fields):
    pb = MODULES[runtime]
    is_trtllm = runtime == "trtllm"
    named = {"sequence_index" if is_trtllm else "index": index, "output_token_ids" if is_trtllm else "output_ids": ids}
    return pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=reason, prompt_tokens=9, **named, **fields))


def replies(runtime, **given):
    return engine(runtime).replies(request_of(**given))


@pytest.mark.parametrize("runtime", OTHERS)
def test_stream_emits_no_token_twice(runtime):
    """Chunk counts are running totals, the end repeats every token."""
    told = replies(runtime, stream=True)
    assert told.event(chunk(runtime, [11, 12], completion_tokens=2)) == Chunk(0, [11, 12], prompt_tokens=9)
    told.event(chunk(runtime, [13], completion_tokens=3))
    end = told.event(complete(runtime, [11, 12, 13], completion_tokens=3, cached_tokens=4))
    assert end == Finished(0, "stop", [], prompt_tokens=9, completion_tokens=3, cached_tokens=4)
    assert told.all_finished
    told.end()


@pytest.mark.parametrize("runtime", OTHERS)
def test_tokens_only_the_end_tells_are_not_lost(runtime):
    told = replies(runtime, stream=True)
    told.event(chunk(runtime, [11], completion_tokens=1))
    end = told.event(complete(runtime, [11, 12], completion_tokens=2))
    assert (end.token_ids, end.completion_tokens) == ([12], 2)


@pytest.mark.parametrize("runtime", ["sglang", "tokenspeed", "trtllm"])
def test_choices_are_told_apart(runtime):
    told = replies(runtime, n=2)
    second = told.event(complete(runtime, [21, 22], index=1, completion_tokens=2, matched_stop_str="END"))
    assert not told.all_finished
    first = told.event(complete(runtime, [11], completion_tokens=1, matched_token_id=11, reason="length"))
    assert (second.index, second.token_ids, second.matched_stop) == (1, [21, 22], "END")
    assert (first.index, first.finish_reason, first.matched_stop) == (0, "length", 11)
    with pytest.raises(EngineError, match="a choice 2 nobody asked for"):
        told.event(chunk(runtime, [1], index=2))


def test_a_stop_word_is_a_stop():
    end = replies("trtllm").event(complete("trtllm", [1], reason="stop_word", matched_stop_str="END"))
    assert (end.finish_reason, end.matched_stop) == ("stop", "END")


def test_mlx_tells_a_matched_token():
    assert replies("mlx").event(complete("mlx", [1], matched_stop_token_id=0)).matched_stop == 0
    assert replies("mlx").event(complete("mlx", [1])).matched_stop is None


@pytest.mark.parametrize("runtime", ["sglang", "tokenspeed", "mlx"])
def test_logprobs_in_columns(runtime):
    pb = MODULES[runtime]
    columns = pb.OutputLogProbs(
        token_logprobs=[-1.5], token_ids=[11], top_logprobs=[pb.TopLogProbs(values=[-1.5, -0.5], token_ids=[11, 12])]
    )
    event = replies(runtime, stream=True).event(chunk(runtime, [11], output_logprobs=columns))
    assert event.logprobs == (TokenLogprob(11, -1.5, (TopLogprob(12, -0.5), TopLogprob(11, -1.5))),)


def test_logprobs_by_token():
    pb = trtllm_service_pb2
    rivals = [pb.TopLogprob(token_id=11, logprob=-1.5), pb.TopLogprob(token_id=12, logprob=-0.5)]
    told = [pb.TokenLogprob(token_id=11, logprob=-1.5, top_logprobs=rivals)]
    stream = replies("trtllm", stream=True)
    assert stream.event(chunk("trtllm", [11], logprobs=told)).logprobs == (
        TokenLogprob(11, -1.5, (TopLogprob(12, -0.5), TopLogprob(11, -1.5))),
    )
    assert stream.event(complete("trtllm", [11], logprobs=told)).logprobs == ()


@pytest.mark.parametrize("runtime", OTHERS)
def test_order_of_messages_is_held(runtime):
    told = replies(runtime, stream=True)
    with pytest.raises(EngineError, match="neither chunk nor end"):
        told.event(MODULES[runtime].GenerateResponse())
    with pytest.raises(EngineError, match="before choice 0 did"):
        told.end()
    told.event(complete(runtime, [1]))
    with pytest.raises(EngineError, match="more of choice 0 after its end"):
        told.event(chunk(runtime, [2]))
