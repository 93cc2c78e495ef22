"""Pairs of SGLang and TokenSpeed workers over real gRPC: both legs at once, where they meet, and which one answers."""

import asyncio

import msgspec
import pytest

from engines.base import EngineError, Finished, Modality
from pipeline.errors import engine_failure
from tests.engines.pair_bench import falls, pairs, waits
from tests.engines.stand_in import hangs, regular_answer, until
from tests.engines.test_dispatch import text
from tests.engines.test_engines_served import pictures

BOTH = pytest.mark.parametrize("runtime", ["sglang", "tokenspeed"])


def meeting(request):
    """Where a leg is told to meet the other."""
    kind = "kv_bootstrap_info" if "kv_bootstrap_info" in request.DESCRIPTOR.fields_by_name else "disaggregated_params"
    assert request.HasField(kind)
    told = getattr(request, kind)
    return told.bootstrap_host, told.bootstrap_port, told.bootstrap_room


def with_media(bench):
    return pictures(bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE]).form)


def several(request, n, **sampling):
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, n=n, **sampling))


@BOTH
@pytest.mark.parametrize("port", [None, 9000])
async def test_both_legs_meet_at_the_prefill_worker(tmp_path, runtime, port):
    async with pairs(tmp_path, runtime, port=port) as (bench, [prefill], [decode]):
        events = await bench.events(with_media(bench))
        assert [event.token_ids for event in events] == [[11], [12], [13], []]
        first, second = prefill.received[0], decode.received[0]
        assert first.request_id == second.request_id and first.sampling_params == second.sampling_params
        host, its_port, room = meeting(first)
        assert meeting(second) == (host, its_port, room)
        assert (host, its_port) == ("127.0.0.1", port or 8998)
        assert bench.figures.pairs == [("answered", runtime)]
        assert 0 <= room < (1 << (31 if runtime == "sglang" else 63)) - 1
        assert bench.free == [True]


async def test_sglang_decodes_without_media(tmp_path):
    async with pairs(tmp_path, "sglang") as (bench, [prefill], [decode]):
        await bench.events(with_media(bench))
        assert prefill.received[0].mm_inputs.pixel_values.data and prefill.received[0].mm_inputs.image_data
        assert not decode.received[0].HasField("mm_inputs")


@pytest.mark.parametrize("mode", ["inline", "shm"])
async def test_tokenspeed_decodes_with_everything_but_pixels(tmp_path, mode):
    async with pairs(tmp_path, "tokenspeed", mode=mode) as (bench, [prefill], [decode]):
        await bench.events(with_media(bench))
        whole, rest = (list(one.received[0].mm_inputs.items) for one in (prefill, decode))
        kind = "shm" if mode == "shm" else "inline"
        assert [item.encoder_input.WhichOneof("payload") for item in whole] == [kind, kind]
        for item in whole:
            item.ClearField("encoder_input")
            for tensor in item.model_specific_tensors.values():
                tensor.ClearField("inline"), tensor.ClearField("shm")
        for item in rest:
            for tensor in item.model_specific_tensors.values():
                tensor.ClearField("inline"), tensor.ClearField("shm")
        assert whole == rest


@BOTH
async def test_choices_of_a_text_are_pairs_of_their_own(tmp_path, runtime):
    async with pairs(tmp_path, runtime) as (bench, [prefill], [decode]):
        events = await bench.events(several(text(), 3, seed=5))
        tokens = {index: [] for index in range(3)}
        for event in events:
            tokens[event.index] += event.token_ids
        assert tokens == {index: [11, 12, 13] for index in range(3)}
        assert sorted(event.index for event in events if isinstance(event, Finished)) == [0, 1, 2]
        ids = sorted(one.request_id for one in prefill.received)
        assert ids == sorted(one.request_id for one in decode.received)
        assert {one[:-2] for one in ids} == {ids[0][:-2]} and [one[-2:] for one in ids] == ["-0", "-1", "-2"]
        rooms = {one.request_id: meeting(one) for one in prefill.received}
        assert len(set(rooms.values())) == 3
        assert rooms == {one.request_id: meeting(one) for one in decode.received}
        assert {one.sampling_params.n for one in (*prefill.received, *decode.received)} == {1}
        if runtime == "tokenspeed":
            seeds = {one.request_id: one.sampling_params.sampling_seed for one in decode.received}
            assert [seeds[one] for one in ids] == [5, 6, 7]


@BOTH
async def test_choices_with_media_are_one_pair(tmp_path, runtime):
    async with pairs(tmp_path, runtime) as (bench, [prefill], [decode]):
        events = await bench.events(several(with_media(bench), 2))
        assert sum(isinstance(event, Finished) for event in events) == 2
        assert [one.sampling_params.n for one in (*prefill.received, *decode.received)] == [2, 2]


async def test_tensors_are_free_when_the_prefill_leg_has_answered(tmp_path):
    async with pairs(tmp_path, "tokenspeed") as (bench, [prefill], [decode]):
        let_go = asyncio.Event()
        decode.otherwise = waits(let_go, regular_answer(11))
        async with bench.generate(with_media(bench)) as generation:
            first = asyncio.create_task(anext(generation))
            await until(lambda: bench.free == [True])
            assert not first.done()
            let_go.set()
            await first


async def test_log_probabilities_are_the_decode_legs(tmp_path):
    async with pairs(tmp_path, "sglang") as (bench, [prefill], [decode]):
        request = text(stream=False)
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, logprobs=2))
        pb = decode.pb

        async def with_logprobs(engine, asked, context):
            told = pb.OutputLogProbs(token_ids=[21], token_logprobs=[-0.5])
            end = pb.GenerateComplete(output_ids=[21], finish_reason="stop", completion_tokens=1, output_logprobs=told)
            yield pb.GenerateResponse(complete=end)

        decode.otherwise = with_logprobs
        (event,) = await bench.events(request)
        assert (event.token_ids, event.logprobs[0].logprob) == ([21], -0.5)
        assert prefill.received[0].return_logprob and decode.received[0].return_logprob


@BOTH
async def test_ranks(tmp_path, runtime):
    """SGLang is told each leg's rank, TokenSpeed finds it in the room."""
    ranks = {"labels": {"dp_size": "3"}, "decode_labels": {"dp_size": "3"}, "dp_aware": True}
    async with pairs(tmp_path, runtime, port=9000, **ranks) as (bench, [prefill], [decode]):
        await until(lambda: sum(worker.is_healthy for worker in bench.registry.workers) == 6)
        for _ in range(6):
            await bench.events(text())
        told = {one.request_id: meeting(one) for one in decode.received}
        assert {host for host, _, _ in told.values()} == {"127.0.0.1"}
        placed = []
        for one in prefill.received:
            room = meeting(one)[2]
            assert told[one.request_id][2] == room
            placed.append(one.data_parallel_rank if runtime == "sglang" else room % 3)
            assert one.HasField("data_parallel_rank") == (runtime == "sglang")
        assert sorted(placed) == [0, 0, 1, 1, 2, 2]
        assert {one.HasField("data_parallel_rank") for one in decode.received} == {runtime == "sglang"}


# ---------------------------------------------------------------- failures


async def failure_of(bench, request):
    with pytest.raises(EngineError) as caught:
        await bench.events(request)
    failure = engine_failure(caught.value)
    return failure.status, failure.code


@BOTH
async def test_a_prefill_leg_that_is_refused_answers_and_the_decode_leg_is_aborted_at_once(tmp_path, runtime):
    async with pairs(tmp_path, runtime) as (bench, [prefill], [decode]):
        let_go = asyncio.Event()
        prefill.otherwise, decode.otherwise = waits(let_go, falls("INVALID_ARGUMENT")), hangs
        run = asyncio.create_task(failure_of(bench, with_media(bench)))
        await until(lambda: decode.received)
        let_go.set()
        assert await run == (400, "prefill_worker_failed_to_start")
        await until(lambda: decode.cancelled and decode.aborted)
        assert prefill.aborted == [] and bench.free == [False]


@BOTH
async def test_a_decode_leg_that_is_refused_answers_and_the_prefill_leg_is_aborted(tmp_path, runtime):
    async with pairs(tmp_path, runtime) as (bench, [prefill], [decode]):
        let_go = asyncio.Event()
        prefill.otherwise, decode.otherwise = hangs, waits(let_go, falls("FAILED_PRECONDITION"))
        run = asyncio.create_task(failure_of(bench, with_media(bench)))
        await until(lambda: prefill.received)
        let_go.set()
        assert await run == (400, "decode_worker_failed_to_start")
        await until(lambda: prefill.cancelled and prefill.aborted)
        assert decode.aborted == []


async def test_a_prefill_leg_that_breaks_off_answers_and_the_decode_leg_is_left_to_end_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("engines.attempt.DEFERRED_ABORT_S", 0.2)
    async with pairs(tmp_path, "sglang") as (bench, [prefill], [decode]):
        prefill.otherwise, decode.otherwise = falls("INTERNAL", after=1), hangs
        assert await failure_of(bench, text()) == (500, "prefill_stream_error")
        assert decode.aborted == []
        await until(lambda: decode.cancelled and decode.aborted)


async def test_both_legs_are_tried_again(tmp_path):
    async with pairs(tmp_path, "tokenspeed", decode=2) as (bench, [prefill], [broken, other]):
        broken.otherwise = falls("UNAVAILABLE")
        prefill.otherwise = waits_for_a_partner(other)
        for _ in range(2):
            events = await bench.events(with_media(bench))
            assert isinstance(events[-1], Finished)
        assert len(other.received) == 2 and len(prefill.received) == 4
        rooms = [meeting(one) for one in prefill.received]
        assert len(set(rooms)) == 4 and {meeting(one) for one in other.received} <= set(rooms)


def waits_for_a_partner(other):
    """A prefill worker that answers when its leg's other half is there."""

    async def action(engine, request, context):
        while not any(one.request_id == request.request_id for one in other.received):
            await asyncio.sleep(0.005)
        async for reply in regular_answer(11)(engine, request, context):
            yield reply

    return action


async def test_a_rank_that_fails_is_not_asked_again(tmp_path):
    ranks = {"labels": {"dp_size": "2"}, "dp_aware": True, "decode_labels": {"dp_size": "1"}}
    async with pairs(tmp_path, "sglang", **ranks) as (bench, [prefill], [decode]):
        await until(lambda: sum(worker.is_healthy for worker in bench.registry.workers) == 3)
        prefill.script, decode.otherwise = [falls("UNAVAILABLE")], prefilled_by(prefill)
        events = await bench.events(text())
        assert isinstance(events[-1], Finished)
        assert sorted(one.data_parallel_rank for one in prefill.received) == [0, 1]


def prefilled_by(prefill):
    """A decode worker that answers when its prefill worker has."""

    async def action(engine, request, context):
        while request.request_id not in prefill.finished:
            await asyncio.sleep(0.005)
        async for reply in regular_answer(11)(engine, request, context):
            yield reply

    return action


async def test_media_are_not_repeated_when_the_prefill_leg_has_answered(tmp_path):
    async with pairs(tmp_path, "sglang") as (bench, [prefill], [decode]):
        let_go = asyncio.Event()
        decode.otherwise = waits(let_go, falls("UNAVAILABLE"))
        run = asyncio.create_task(failure_of(bench, with_media(bench)))
        await until(lambda: bench.free == [True])
        let_go.set()
        assert await run == (503, "decode_worker_failed_to_start")
        assert len(prefill.received) == len(decode.received) == 1


async def test_one_choice_that_fails_ends_the_others(tmp_path):
    async with pairs(tmp_path, "sglang") as (bench, [prefill], [decode]):
        all_there = asyncio.Event()
        decode.script = [hangs, waits(all_there, falls("INVALID_ARGUMENT")), hangs]
        prefill.otherwise = hangs
        run = asyncio.create_task(failure_of(bench, several(text(), 3)))
        await until(lambda: len(prefill.received) == len(decode.received) == 3)
        all_there.set()
        assert await run == (400, "decode_worker_failed_to_start")
        await until(lambda: len(prefill.cancelled) == len(prefill.aborted) == 3)


@BOTH
async def test_a_client_that_leaves_before_the_answer(tmp_path, runtime):
    async with pairs(tmp_path, runtime) as (bench, [prefill], [decode]):
        let_go = asyncio.Event()
        prefill.otherwise, decode.otherwise = hangs, waits(let_go, regular_answer(*range(11, 60)))
        run = asyncio.create_task(bench.events(text()))
        await until(lambda: prefill.received and decode.received)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(lambda: prefill.cancelled and prefill.aborted)
        assert not decode.cancelled and not decode.aborted
        let_go.set()
        await until(lambda: decode.aborted)


async def test_a_client_that_leaves_in_the_answer(tmp_path):
    async with pairs(tmp_path, "tokenspeed") as (bench, [prefill], [decode]):

        async def first_only(engine, request, context):
            yield engine.pb.GenerateResponse(chunk=engine.pb.GenerateStreamChunk(token_ids=[11], completion_tokens=1))
            await asyncio.Event().wait()

        decode.otherwise = first_only
        async with bench.generate(text()) as generation:
            await anext(generation)
        await until(lambda: decode.cancelled and decode.aborted)


async def test_a_worker_that_is_gone(tmp_path):
    async with pairs(tmp_path, "sglang") as (bench, [prefill], [decode]):
        prefill.otherwise = hangs
        await decode.stop()
        status, code = await failure_of(bench, text())
        assert status == 503 and code in ("decode_worker_failed_to_start", "no_available_workers")
        await until(lambda: len(prefill.cancelled) == len(prefill.received))
