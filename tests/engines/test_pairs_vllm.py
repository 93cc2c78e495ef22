"""Pairs of vLLM workers over real gRPC: what each leg is sent, by connector; failures, and what is left of them."""

import asyncio
from json import loads

import msgspec
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.affinity import Affinity
from engines.base import EngineError, Modality, NoWorker, PairRefused, Tensor
from engines.pairing import difference, facts
from pipeline.errors import engine_failure
from tests.engines.pair_bench import HANDED_OVER, pairs, prefills, waits
from tests.engines.stand_in import answers, engine, until
from tests.engines.test_dispatch import picture, text
from tests.engines.test_references import PROCESSOR, asking, web

NIXL = {"kv_connector": "NixlConnector"}
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_engine_id": "eng-1"}
BLIND = {"supports_vision": "false"}
PROCESSING = {"labels": NIXL | PROCESSOR, "decode_labels": PROCESSOR}


def flat_picture(**options):
    """Of a model without grids."""
    request = picture(**options)
    [batch] = request.media
    [item] = batch.items
    layout = msgspec.structs.replace(batch.layout, batched=("pixel_values",), flat={}, keep_on_cpu=())
    batch = msgspec.structs.replace(batch, items=(msgspec.structs.replace(item, side={}),), layout=layout)
    return msgspec.structs.replace(request, media=(batch,))


def with_grid(request):
    [batch] = request.media
    [item] = batch.items
    side = {**item.side, "image_grid_thw": Tensor("int64", (1, 3), (bytes(24),))}
    batch = msgspec.structs.replace(batch, items=(msgspec.structs.replace(item, side=side),))
    return msgspec.structs.replace(request, media=(batch,))


async def test_nixl_passes_on_what_the_prefill_leg_returned(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills()
        events = await bench.events(with_grid(picture()))
        assert [event.token_ids for event in events] == [[11], [12], [13], []]
        first, second = prefill.received[0], decode.received[0]
        assert first.request_id == second.request_id
        assert loads(first.kv_transfer_params_json) == {"do_remote_decode": True, "do_remote_prefill": False}
        assert second.kv_transfer_params_json == HANDED_OVER
        assert (first.sampling_params.max_tokens, first.stream, second.stream) == (1, False, True)
        assert first.mm_inputs.pixel_values.inline and first.mm_inputs.flat_keys
        told = second.mm_inputs
        assert not told.HasField("pixel_values") and list(told.model_specific_tensors) == ["image_grid_thw"]
        assert (list(told.batched_keys), list(told.keep_on_cpu_keys)) == (["image_grid_thw"], ["image_grid_thw"])
        assert not told.flat_keys and told.mm_hashes == first.mm_inputs.mm_hashes
        assert bench.free == [True]
        assert bench.figures.roles == ["prefill", "decode"]
        assert bench.figures.pairs == [("prefilled", "vllm"), ("nixl", "vllm")]


async def test_tensors_are_free_before_the_answer_begins(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        let_go = asyncio.Event()
        prefill.otherwise, decode.otherwise = prefills(), waits(let_go, answers(11, 12))
        async with bench.generate(picture()) as generation:
            first = asyncio.create_task(anext(generation))
            await until(lambda: bench.free == [True])
            assert not first.done() and generation.taker.url == prefill.url
            let_go.set()
            await first
            assert generation.worker.url == decode.url
            assert [event async for event in generation]


async def test_segments_go_to_the_prefill_worker_alone(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL, mode="shm") as (bench, [prefill], [decode]):
        prefill.otherwise = prefills()
        await bench.events(picture())
        assert prefill.received[0].mm_inputs.pixel_values.WhichOneof("payload") == "shm"
        assert prefill.tensors and not decode.tensors
        assert bench.free == [True]


async def test_mooncake_is_told_a_transfer_that_both_legs_know(tmp_path):
    async with pairs(tmp_path, "vllm", labels=MOONCAKE, port=9123) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills(params="")
        await bench.events(picture())
        asked, taken = (loads(one.received[0].kv_transfer_params_json) for one in (prefill, decode))
        transfer = asked.pop("transfer_id")
        assert transfer.startswith("xfer-")
        assert asked == {"do_remote_decode": True, "do_remote_prefill": False}
        assert taken == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": "eng-1",
            "remote_bootstrap_addr": "http://127.0.0.1:9123",
        }
        assert not decode.received[0].mm_inputs.HasField("pixel_values")


@pytest.mark.parametrize(
    "labels", [{"kv_connector": "MooncakeConnector"}, {**MOONCAKE, "dp_size": "2"}, {**MOONCAKE, "dp_size": "two"}]
)
async def test_mooncake_without_an_engine_id_gets_the_older_address(tmp_path, labels):
    async with pairs(tmp_path, "vllm", labels=labels) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills(params="")
        await bench.events(text())
        assert not prefill.received[0].HasField("kv_transfer_params_json")
        told = decode.received[0].kv_transfer_params
        assert (told.remote_host, told.remote_port) == ("127.0.0.1", 8998)
        assert not decode.received[0].HasField("kv_transfer_params_json")


@pytest.mark.parametrize(("labels", "counted"), [(NIXL, 1), ({}, 0)])
async def test_nothing_handed_over_is_computed_again(tmp_path, labels, counted):
    async with pairs(tmp_path, "vllm", labels=labels) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills(params="")
        await bench.events(picture())
        assert len(bench.figures.missed_handovers) == counted
        assert bench.figures.pairs[-1] == ("nixl" if counted else "passthrough", "vllm")
        (sent,) = decode.received
        assert sent.mm_inputs.pixel_values.inline == prefill.received[0].mm_inputs.pixel_values.inline
        assert not sent.HasField("kv_transfer_params_json")
        assert bench.free == [True]


async def test_another_connector_passes_on_what_comes(tmp_path):
    async with pairs(tmp_path, "vllm", labels={"kv_connector": "LMCache"}) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills()
        await bench.events(picture())
        assert not prefill.received[0].HasField("kv_transfer_params_json")
        assert decode.received[0].kv_transfer_params_json == HANDED_OVER


@pytest.mark.parametrize(("labels", "has_address"), [(NIXL, False), (MOONCAKE, True)])
async def test_several_choices_have_no_hand_over(tmp_path, labels, has_address):
    async with pairs(tmp_path, "vllm", labels=labels) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills(params="")
        request = picture(stream=False)
        sampling = msgspec.structs.replace(request.sampling, n=2, stop=("x",), stop_token_ids=(7,), max_tokens=5)
        events = await bench.events(msgspec.structs.replace(request, sampling=sampling))
        assert [event.index for event in events] == [0, 1]
        first, second = prefill.received[0].sampling_params, decode.received[0].sampling_params
        assert (first.n, second.n, first.ignore_eos, list(first.stop), list(first.stop_token_ids)) == (
            1,
            2,
            True,
            [],
            [],
        )
        assert list(second.stop) == ["x"] and second.max_tokens == 5
        assert decode.received[0].mm_inputs.pixel_values.inline
        assert decode.received[0].HasField("kv_transfer_params") == has_address
        assert bench.free == [True]


async def test_a_decode_worker_of_another_form_gets_no_media_of_this_one(tmp_path):
    """Floats would be normalised once more, without an error."""
    raw = {"mm_device_do_normalize": "true"}
    async with pairs(tmp_path, "vllm", labels=NIXL, decode_labels=raw) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills(params="")
        choices = picture()
        choices = msgspec.structs.replace(choices, sampling=msgspec.structs.replace(choices.sampling, n=2))
        assert await refused(bench, choices) == (400, "multimodal_not_supported")
        assert await refused(bench, picture()) == (502, "pd_decode_missing_kv_transfer_params")
        assert len(prefill.received) == 1 and not decode.received
        prefill.otherwise = prefills()
        await bench.events(picture())  # handed over, it needs no pixels
        assert len(decode.received) == 1


# ---------------------------------------------------------------- decode workers without eyes


async def test_a_blind_decode_worker_gets_hashes_alone(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL, decode_labels=BLIND) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills()
        await bench.events(flat_picture())
        told = decode.received[0].mm_inputs
        assert [field.name for field, _ in told.ListFields()] == ["mm_hashes", "modality"]
        assert list(decode.received[0].tokenized.input_ids) == [1, 2, 3]


async def refused(bench, request):
    with pytest.raises(EngineError) as caught:
        await bench.events(request)
    failure = engine_failure(caught.value)
    return failure.status, failure.code


async def test_what_a_blind_decode_worker_cannot_serve_is_refused_before_anything_is_sent(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL, decode_labels=BLIND) as (bench, [prefill], [decode]):
        choices = flat_picture()
        choices = msgspec.structs.replace(choices, sampling=msgspec.structs.replace(choices.sampling, n=2))
        assert await refused(bench, with_grid(picture())) == (400, "pd_decode_language_model_only_mrope")
        assert await refused(bench, choices) == (400, "pd_decode_language_model_only_n_samples")
        assert not prefill.received and not decode.received and bench.free == [False, False]
        async with engine() as seeing:
            await bench.add(seeing, "decode")
            prefill.otherwise = prefills()
            await bench.events(with_grid(picture()))
            assert len(seeing.received) == 1


async def test_a_blind_decode_worker_without_a_hand_over_is_502_and_not_repeated(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL, decode_labels=BLIND) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills(params="")
        assert await refused(bench, flat_picture()) == (502, "pd_decode_missing_kv_transfer_params")
        assert len(prefill.received) == 1 and not decode.received
        assert bench.figures.retries == []
        prefill.otherwise = prefills(params="")
        await bench.events(text())  # without media it computes the prompt itself


async def test_mooncake_names_the_rank(tmp_path):
    labels = {**MOONCAKE, "dp_size": "2"}
    async with pairs(tmp_path, "vllm", labels=labels, decode_labels={"dp_size": "2"}, dp_aware=True) as found:
        bench, [prefill], [decode] = found
        prefill.otherwise = prefills(params="")
        await until(lambda: sum(worker.is_healthy for worker in bench.registry.workers) == 4)
        for _ in range(2):
            await bench.events(text())
        ranks = {one.request_id: one.data_parallel_rank for one in prefill.received}
        assert sorted(ranks.values()) == [0, 1]
        for one in decode.received:
            assert loads(one.kv_transfer_params_json)["remote_engine_id"] == f"eng-1_dp{ranks[one.request_id]}"
            assert one.HasField("data_parallel_rank")


# ---------------------------------------------------------------- references


def identity(*ids):
    told = pb.MediaIdentity(prompt_token_ids=ids, mm_inputs=pb.MultimodalInputs(mm_hashes=["a" * 64], modality=1))
    told.extra_mm_inputs.add(mm_hashes=["b" * 64], modality=3)
    return told


async def test_what_became_of_references_goes_to_the_decode_leg(tmp_path):
    async with pairs(tmp_path, "vllm", **PROCESSING) as (
        bench,
        [prefill],
        [decode],
    ):
        prefill.otherwise = prefills(media_identity=identity(1, 7, 7, 3))
        await bench.events(asking(web(1), web(2)))
        assert len(prefill.received[0].media_refs.items) == 2 and list(prefill.received[0].tokenized.input_ids) == [
            1,
            2,
            3,
        ]
        (told,) = decode.received
        assert not told.HasField("media_refs") and list(told.tokenized.input_ids) == [1, 7, 7, 3]
        assert (told.mm_inputs, *told.extra_mm_inputs) == (identity().mm_inputs, *identity().extra_mm_inputs)
        assert told.kv_transfer_params_json == HANDED_OVER
        assert bench.free == [True]


@pytest.mark.parametrize(("n", "returned"), [(1, False), (2, True)])
async def test_references_are_processed_again_when_nothing_is_told_of_them(tmp_path, n, returned):
    async with pairs(tmp_path, "vllm", **PROCESSING) as (
        bench,
        [prefill],
        [decode],
    ):
        prefill.otherwise = prefills(**({"media_identity": identity(1)} if returned else {}))
        request = asking(web(), stream=False)
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, n=n))
        await bench.events(request)
        assert decode.received[0].media_refs == prefill.received[0].media_refs
        assert list(decode.received[0].tokenized.input_ids) == [1, 2, 3]


async def test_references_need_both_legs(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL | PROCESSOR) as (bench, [prefill], [decode]):
        with pytest.raises(NoWorker):
            await bench.events(asking(web()))
    async with pairs(tmp_path, "vllm", labels=NIXL | PROCESSOR, decode_labels=PROCESSOR | BLIND) as (
        bench,
        [prefill],
        _,
    ):
        assert await refused(bench, asking(web())) == (400, "pd_decode_language_model_only_media_refs")
        assert not prefill.received


# ---------------------------------------------------------------- which pair


async def test_a_role_that_nobody_has(tmp_path):
    async with pairs(tmp_path, "vllm", decode=0) as (bench, [prefill], _):
        with pytest.raises(NoWorker):
            await bench.events(text())
        with pytest.raises(NoWorker):
            bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE])
        assert bench.registry.missing_role == "decode"


@pytest.mark.parametrize("runtime", ["trtllm", "mlx"])
async def test_engines_that_do_not_work_in_pairs(tmp_path, runtime):
    async with pairs(tmp_path, runtime) as (bench, _, _):
        with pytest.raises(PairRefused) as caught:
            await bench.events(text())
        failure = engine_failure(caught.value)
        assert (failure.status, failure.code) == (400, "runtime_pd_not_supported")


async def test_both_legs_run_the_same_engine(tmp_path):
    async with pairs(tmp_path, "vllm") as (bench, [prefill], [decode]), engine(runtime="sglang") as other:
        prefill.otherwise = prefills()
        await bench.add(other, "decode")
        for _ in range(3):
            await bench.events(text())
        assert len(decode.received) == 3 and not other.received


async def test_both_legs_hand_over_in_the_same_way(tmp_path):
    """What only one of them tells decides nothing."""
    async with pairs(tmp_path, "vllm", labels=NIXL, decode_labels=MOONCAKE) as (bench, [prefill], [other]):
        prefill.otherwise = prefills()
        assert await refused(bench, text()) == (503, "no_compatible_pd_pair")
        with pytest.raises(PairRefused, match="transport nixl and mooncake"):
            bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE])
        async with engine() as silent, engine() as paged:
            await bench.add(silent, "decode")
            await bench.add(paged, "decode", labels={**NIXL, "page_size": "16"})
            for _ in range(2):
                await bench.events(text())
            assert (len(other.received), len(silent.received), len(paged.received)) == (0, 1, 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        ({}, {}, ""),
        ({"kv_connector": "NixlConnector"}, {}, ""),
        ({"kv_connector": "NixlConnector"}, {"kv_connector": "NixlConnector"}, ""),
        ({"kv_connector": "NixlConnector"}, {"kv_connector": "MooncakeConnector"}, "transport nixl and mooncake"),
        ({"kv_connector": "LMCache"}, {"kv_connector": "lmcache"}, ""),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, "dtype fp8 and auto"),
        ({"block_size": "16"}, {"page_size": "32"}, "page 16 and 32"),
        ({"pairing_protocol": "a", "block_size": "16"}, {"pairing_protocol": "a", "block_size": "32"}, ""),
        ({"pairing_protocol": "a"}, {"pairing_protocol": "b"}, "protocol a and b"),
        ({"pairing_protocol": "a", "model_dtype": "x"}, {"model_dtype": "y"}, "model x and y"),
    ],
)
def test_what_keeps_two_workers_apart(prefill, decode, why):
    assert difference(*(facts("vllm", told, told) for told in (prefill, decode))) == why


def test_other_engines_transports():
    told = {"disaggregation_transfer_backend": "nixl", "kv_cache_dtype": "auto", "page_size": "16"}
    assert str(facts("sglang", told, {})) == "sglang/nixl/dtype=auto,page=16"
    assert str(facts("tokenspeed", {}, {})) == "tokenspeed/mooncake/?"
    assert str(facts("sglang", {}, {})) == "sglang/?/?"
    assert difference(facts("sglang", told, {}), facts("tokenspeed", {}, {})).startswith(
        "runtime sglang and tokenspeed"
    )


async def test_each_role_has_its_policy(tmp_path):
    policies = {"prefill": "consistent_hashing"}
    async with pairs(tmp_path, "vllm", prefill=3, decode=2, policies=policies) as (bench, first, second):
        for one in first:
            one.otherwise = prefills()
        for _ in range(4):
            await bench.events(text(), affinity=Affinity(key="session"))
        assert sorted(len(one.received) for one in first) == [0, 0, 4]
        assert [len(one.received) for one in second] == [2, 2]
