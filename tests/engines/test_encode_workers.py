"""Encode workers before pairs of TokenSpeed workers, over real gRPC: who is sent what, and what a failed item does."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import msgspec
import pytest
from smg_grpc_proto.generated import tokenspeed_encoder_pb2

from engines.base import EngineError, Finished, Modality, NoWorker
from engines.leg import Leg, Meeting
from pipeline.errors import engine_failure
from tests.engines.pair_bench import PairBench, waits
from tests.engines.stand_in import engine, hangs, regular_answer, until
from tests.engines.test_dispatch import text
from tests.engines.test_engines_served import pictures
from tests.engines.test_pairs_together import meeting

HASHING = {"encode": "consistent_hashing"}


@asynccontextmanager
async def fleet(directory, *, encode=1, labels=None, runtime="tokenspeed", **options):
    """The bench, the encode engines, the prefill engine and the decode engine; in the end nothing is left of them."""
    segments = directory if options.get("mode") else None
    async with AsyncExitStack() as stack:
        bench = PairBench(directory, encoders=True, **{"policies": HASHING, **options})
        made = []
        for role in (*["encode"] * encode, "prefill", "decode"):
            served = await stack.enter_async_context(engine(runtime=runtime, segments=segments))
            port = {"encode": 9100, "prefill": 9000}.get(role)
            spec = {"labels": labels} if labels and role == "encode" else {}
            await bench.add(served, role, **({"bootstrap_port": port} if port else {}), **spec)
            made.append(served)
        *encoders, prefill, decode = made
        prefill.otherwise, decode.otherwise = embedded(encoders), prefilled(prefill)
        try:
            yield bench, encoders, prefill, decode
        finally:
            await bench.close()
        assert {worker.load for worker in bench.registry.workers} <= {0}
        assert bench.store.files == []


def embedded(encoders):
    """A prefill worker waits for the embeddings of every item."""

    async def action(engine, request, context):
        if engine.runtime == "tokenspeed":
            rooms = {one.bootstrap_room for one in request.encode_bootstrap_info.items}
            while rooms - {one.items[0].bootstrap_room for each in encoders for one in each.encoded}:
                await asyncio.sleep(0.005)
        async for reply in regular_answer(11)(engine, request, context):
            yield reply

    return action


def prefilled(prefill):
    """A decode worker waits for its prefill worker."""

    async def action(engine, request, context):
        while request.request_id not in prefill.finished:
            await asyncio.sleep(0.005)
        async for reply in regular_answer(11, 12, 13)(engine, request, context):
            yield reply

    return action


def with_media(bench, count=2):
    return pictures(bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE]).form, count)


def refusing(status):
    async def encode(engine, request, context):
        await context.abort(getattr(grpc.StatusCode, status), "no room")

    return encode


async def test_pixels_go_to_the_encode_worker_and_to_nobody_else(tmp_path):
    async with fleet(tmp_path) as (bench, [encode], prefill, decode):
        request = with_media(bench)
        events = await bench.events(request)
        assert [event.token_ids for event in events] == [[11], [12], [13], []]
        assert len(encode.encoded) == 2 and not encode.received
        by_room = {one.items[0].bootstrap_room: one for one in encode.encoded}
        told = list(prefill.received[0].encode_bootstrap_info.items)
        assert [(one.item_index, one.bootstrap_host, one.bootstrap_port) for one in told] == [
            (0, "127.0.0.1", 9100),
            (1, "127.0.0.1", 9100),
        ]
        for number, place in enumerate(told):
            sent = by_room[place.bootstrap_room]
            assert sent.request_id.startswith("encode-") and len(sent.mm_inputs.items) == 1
            pixels = sent.mm_inputs.items[0].encoder_input.inline
            assert pixels == bytes(request.media[0].items[number].primary.buffers[0])
        assert meeting(prefill.received[0]) == meeting(decode.received[0])
        assert meeting(prefill.received[0])[:2] == ("127.0.0.1", 9000)
        assert not decode.received[0].HasField("encode_bootstrap_info")
        for one in (*prefill.received, *decode.received):
            assert [item.HasField("encoder_input") for item in one.mm_inputs.items] == [False, False]
        assert bench.free == [True]
        assert bench.figures.roles == ["prefill", "decode", "encode", "encode"]


async def test_a_text_needs_no_encode_worker(tmp_path):
    async with fleet(tmp_path, encode=0) as (bench, _, prefill, decode):
        assert isinstance((await bench.events(text()))[-1], Finished)
        assert not prefill.received[0].HasField("encode_bootstrap_info")
        with pytest.raises(NoWorker):
            with_media(bench)


async def test_form_and_transport_are_the_encode_workers(tmp_path):
    labels = {"multimodal_encoder_dtype": "float32"}
    async with fleet(tmp_path, labels=labels, mode="shm", shm_min_bytes=64) as (bench, [encode], prefill, _):
        request = with_media(bench)
        assert request.media[0].form.dtype == "float32"
        await bench.events(request)
        kinds = [one.mm_inputs.items[0].encoder_input.WhichOneof("payload") for one in encode.encoded]
        assert kinds == ["shm", "shm"] and len(encode.tensors) == 2


async def test_files_stay_until_the_prefill_worker_answers(tmp_path):
    """That an item was accepted does not say that its file was read."""
    async with fleet(tmp_path, mode="shm", shm_min_bytes=64) as (bench, [encode], prefill, _):
        let_go = asyncio.Event()
        encode.segments = None  # it reads nothing yet
        prefill.otherwise = waits(let_go, regular_answer(11))
        run = asyncio.create_task(bench.events(with_media(bench, 1)))
        await until(lambda: encode.encoded and prefill.received)
        await asyncio.sleep(0.05)
        name = encode.encoded[0].mm_inputs.items[0].encoder_input.shm.name
        assert name in bench.store.files and bench.free == []
        let_go.set()
        await run
        assert bench.free == [True]


@pytest.mark.parametrize("is_complete", [False, True])
async def test_a_prefill_worker_that_needs_no_item(tmp_path, is_complete):
    """It knows them: its answer, or even the whole answer, may come before they were sent.  Tensors are given back when
    nothing reads them, and what was not sent is not sent any more.
    """
    async with fleet(tmp_path, mode="shm", shm_min_bytes=64) as (bench, [encode], prefill, decode):
        sending, go_on, answer = threading.Event(), threading.Event(), asyncio.Event()
        write = bench.store.write

        def slow(buffers, *, handed_on):
            sending.set()
            assert go_on.wait(10) and not bench.free, "its bytes are being read"
            return write(buffers, handed_on=handed_on)

        bench.store.write = slow
        prefill.otherwise = regular_answer(11)
        decode.otherwise = regular_answer(11) if is_complete else waits(answer, regular_answer(11))
        run = asyncio.create_task(bench.events(with_media(bench, 1)))
        await until(lambda: prefill.finished and sending.is_set() and (not is_complete or decode.finished))
        await asyncio.sleep(0.05)
        assert bench.free == [] and not run.done()
        go_on.set()
        if not is_complete:
            await until(lambda: bench.free == [True])
            answer.set()
        assert [event.token_ids for event in await run] == [[11], []]
        assert bench.free == [not is_complete] and len(encode.encoded) == int(not is_complete)


async def test_the_same_picture_goes_to_the_same_encode_worker(tmp_path):
    async with fleet(tmp_path, encode=3) as (bench, encoders, _, _):
        for _ in range(4):
            await bench.events(with_media(bench, 1))
        assert sorted(len(one.encoded) for one in encoders) == [0, 0, 4]


async def test_items_of_one_request_may_go_to_several(tmp_path):
    async with fleet(tmp_path, encode=2, policies={"encode": "round_robin"}) as (bench, encoders, prefill, _):
        for one, port in zip(encoders, (9101, 9102), strict=True):
            worker = next(each for each in bench.registry.workers if each.url == one.url)
            worker.spec = msgspec.structs.replace(worker.spec, bootstrap_port=port)
        await bench.events(with_media(bench))
        assert [len(one.encoded) for one in encoders] == [1, 1]
        told = prefill.received[0].encode_bootstrap_info.items
        assert sorted(one.bootstrap_port for one in told) == [9101, 9102]
        rooms = {one.encoded[0].items[0].bootstrap_room for one in encoders}
        assert {one.bootstrap_room for one in told} == rooms


async def test_several_choices_are_encoded_once(tmp_path):
    async with fleet(tmp_path) as (bench, [encode], prefill, decode):
        request = with_media(bench, 1)
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, n=2))
        await bench.events(request)
        assert (len(encode.encoded), len(prefill.received), len(decode.received)) == (1, 1, 1)


# ---------------------------------------------------------------- failures


async def failure_of(bench, request):
    with pytest.raises(EngineError) as caught:
        await bench.events(request)
    failure = engine_failure(caught.value)
    return failure.status, failure.code, failure.message


@pytest.mark.parametrize(("status", "http", "attempts"), [("INVALID_ARGUMENT", 400, 1), ("UNAVAILABLE", 503, 5)])
async def test_an_item_that_is_refused_ends_the_request(tmp_path, status, http, attempts):
    async with fleet(tmp_path) as (bench, [encode], prefill, decode):
        encode.encode = refusing(status)
        prefill.otherwise = decode.otherwise = hangs
        told = await failure_of(bench, with_media(bench, 1))
        assert told == (http, "start_generation_failed", "Encode worker failed to start: no room")
        assert len(encode.encoded) == attempts
        await until(lambda: len(prefill.cancelled) == len(prefill.received))
        await until(lambda: len(decode.cancelled) == len(decode.received))
        assert bench.free == [False]


async def test_an_item_that_is_not_accepted(tmp_path):
    async with fleet(tmp_path) as (bench, [encode], prefill, decode):

        async def no(engine, request, context):
            return tokenspeed_encoder_pb2.EncodeResponse(accepted=False)

        encode.encode = no
        prefill.otherwise = decode.otherwise = hangs
        status, code, message = await failure_of(bench, with_media(bench, 1))
        assert (status, code) == (400, "start_generation_failed") and "did not accept" in message


async def test_another_encode_worker_takes_over(tmp_path):
    async with fleet(tmp_path, encode=2, policies={"encode": "round_robin"}) as (bench, [one, other], prefill, decode):
        one.encode = refusing("UNAVAILABLE")
        prefill.script = [hangs]
        decode.script = [hangs]
        events = await bench.events(with_media(bench, 1))
        assert isinstance(events[-1], Finished)
        assert (len(one.encoded), len(other.encoded)) == (1, 1) and bench.free == [True]
        rooms = [received.encode_bootstrap_info.items[0].bootstrap_room for received in prefill.received]
        assert rooms == [each.encoded[0].items[0].bootstrap_room for each in (one, other)]


async def test_an_encode_worker_that_is_gone(tmp_path):
    async with fleet(tmp_path) as (bench, [encode], prefill, decode):
        request = with_media(bench, 1)
        prefill.otherwise = decode.otherwise = hangs
        await encode.stop()
        status, code, _ = await failure_of(bench, request)
        assert status == 503 and code in ("start_generation_failed", "no_available_workers")
        assert bench.free == [False]


async def test_a_client_that_leaves_while_items_are_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr("engines.attempt.DEFERRED_ABORT_S", 0.1)
    async with fleet(tmp_path) as (bench, [encode], prefill, decode):
        begun, never = asyncio.Event(), asyncio.Event()

        async def slow(engine, request, context):
            begun.set()
            await never.wait()

        encode.encode, prefill.otherwise, decode.otherwise = slow, hangs, hangs
        run = asyncio.create_task(bench.events(with_media(bench, 1)))
        await until(lambda: prefill.received and begun.is_set())
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(lambda: prefill.cancelled and prefill.aborted and decode.aborted)
        assert not encode.aborted and bench.free == [False]


async def test_engines_without_encode_workers(tmp_path):
    async with fleet(tmp_path, runtime="sglang") as (bench, [encode], prefill, _):
        status, code, _ = await failure_of(bench, with_media(bench, 1))
        assert (status, code) == (400, "multimodal_not_supported")
        assert not prefill.received and not encode.received


async def test_an_item_over_rdma_goes_by_its_room(tmp_path):
    """The encode worker compares the slot's key with the room it was promised."""
    async with fleet(tmp_path) as (bench, [encode], prefill, _):
        request = with_media(bench, 1)
        leg = Leg("encode", meeting=Meeting("127.0.0.1", 9100, 1234567))
        alone = msgspec.structs.replace(request, leg=leg)
        (encoder,) = [one for one in bench.registry.workers if one.worker_type == "encode"]
        rooms = {out.key.partition("/")[2]: out.room for out in encoder.client.tensors(alone)}
        assert rooms["encoder_input"] == 1234567
        assert {out.room for out in encoder.client.tensors(request)} == {None}
