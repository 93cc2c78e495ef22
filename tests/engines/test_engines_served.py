"""Every engine over real gRPC: answers, aborts, failures, tensors by segments, and fleets of several engines."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from engines.base import EngineError, Finished, Form, Layout, MediaBatch, MediaItem, Modality, Range, Tensor
from engines.probe import ENGINES
from pipeline.errors import engine_failure
from tests.engines.stand_in import engine, fails, regular_answer, until
from tests.engines.test_dispatch import Bench, text

RUNTIMES = sorted(ENGINES)
OF_IMAGES = [name for name in RUNTIMES if name != "mlx"]


@asynccontextmanager
async def fleet(directory, *runtimes, **options):
    """A bench and a stand-in for each of `runtimes`."""
    bench, segments = Bench(directory, **options), directory if options else None
    made = [engine(runtime=runtime, segments=segments) for runtime in runtimes]
    served = [await one.__aenter__() for one in made]
    try:
        await bench.add(*served)
        yield bench, *served
    finally:
        await bench.close()
        for one in made:
            await one.__aexit__(None, None, None)
    assert bench.loads <= {0} and bench.store.files == []


def pictures(form, count=2, nbytes=4096):
    """Distinct pictures with all an engine may want of them."""
    items = []
    for number in range(count):
        pixels = memoryview(bytes([number + 1]) * nbytes) if form.tensors else memoryview(b"")
        dtype = form.of(Modality.IMAGE).dtype
        each = {"float32": 4, "bfloat16": 2}[dtype]
        primary = Tensor(dtype, (4, nbytes // 4 // each) if form.tensors else (0,), (pixels,))
        side = {"patches_per_image": Tensor("int64", (1,), (b"\x04" + bytes(7),))}
        file = bytes([number + 65]) * 100 if form.encoded else b""
        at = Range(number, 1)
        items.append(MediaItem(f"{number:064x}", at, (at,), primary, side, file))
    layout = Layout(batched=("patches_per_image",), flat={"pixel_values": "patches_per_image"})
    batch = MediaBatch(Modality.IMAGE, tuple(items), 7, layout, form)
    return msgspec.structs.replace(text(), media=(batch,))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers(tmp_path, runtime, stream):
    async with fleet(tmp_path, runtime) as (bench, served):
        choices = 1 if runtime == "mlx" else 2
        events = await bench.events(text(stream=stream, n=choices))
        tokens = {index: [] for index in range(choices)}
        for event in events:
            tokens[event.index] += event.token_ids
        assert tokens == {index: [11, 12, 13] for index in range(choices)}
        ends = [event for event in events if isinstance(event, Finished)]
        assert [(end.index, end.completion_tokens, end.finish_reason) for end in ends] == [
            (index, 3, "stop") for index in range(choices)
        ]
        assert served.aborted == []


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_dropped_generation_is_aborted(tmp_path, runtime):
    async with fleet(tmp_path, runtime) as (bench, served):
        regular = regular_answer(11, 12) if runtime != "vllm" else served.otherwise

        async def first_only(engine, request, context):
            async for reply in regular(engine, request, context):
                yield reply
                break
            await asyncio.Event().wait()

        served.otherwise = first_only
        generation = bench.generate(text())
        await anext(generation)
        await generation.aclose()
        await until(lambda: served.cancelled and served.aborted)
        assert served.aborted == served.cancelled == [served.received[0].request_id]


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_failures_are_told_alike(tmp_path, runtime):
    async with fleet(tmp_path, runtime) as (bench, served):
        served.script = [fails("UNAVAILABLE", "busy"), fails("INVALID_ARGUMENT", "too long")]
        with pytest.raises(EngineError) as refused:
            await bench.events(text())
        failure = engine_failure(refused.value)
        assert (failure.status, failure.code) == (400, "start_generation_failed")
        assert failure.message == "Failed to start generation: too long"
        assert len(served.received) == 2  # UNAVAILABLE was tried again


@pytest.mark.parametrize("runtime", OF_IMAGES)
async def test_media_arrive_in_the_form_of_the_engine(tmp_path, runtime):
    async with fleet(tmp_path, runtime) as (bench, served):
        outlook = bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE])
        request = pictures(outlook.form)
        await bench.events(request)
        assert bench.free == [True]
        (received,) = served.received
        items = request.media[0].items
        pixels = b"".join(bytes(item.primary.buffers[0]) for item in items)
        files = [item.encoded for item in items]
        if runtime == "tokenspeed":
            assert [one.encoder_input.inline for one in received.mm_inputs.items] == [
                bytes(item.primary.buffers[0]) for item in items
            ]
        elif runtime == "trtllm":
            assert list(received.multimodal_input.image_data) == files and len(files[0]) == 100
        elif runtime == "sglang":
            assert received.mm_inputs.pixel_values.data == pixels
            assert list(received.mm_inputs.image_data) == files and len(files[0]) == 100
        else:
            assert received.mm_inputs.pixel_values.inline == pixels
        counted = {runtime for runtime, _, _ in bench.figures.tensors}
        assert counted == ({runtime} if runtime in ("vllm", "tokenspeed") else set())


async def test_tokenspeed_gets_a_file_for_every_tensor(tmp_path):
    async with fleet(tmp_path, "tokenspeed", mode="shm", shm_min_bytes=64) as (bench, served):
        outlook = bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE])
        assert outlook.by_segment and outlook.apart
        request = pictures(outlook.form)
        for _ in range(3):
            await bench.events(request)
        assert len(served.tensors) == 6 and len(bench.store.segments) == 6
        await until(lambda: all(segment.is_handed_on and segment.settled for segment in bench.store.segments))
        kinds = [item.encoder_input.WhichOneof("payload") for item in served.received[0].mm_inputs.items]
        assert kinds == ["shm", "shm"]
        side = served.received[0].mm_inputs.items[0].model_specific_tensors["patches_per_image"]
        assert side.WhichOneof("payload") == "inline"
        assert set(served.tensors.values()) == {bytes([1]) * 4096, bytes([2]) * 4096}


async def test_a_request_goes_only_to_who_can_be_told_it(tmp_path):
    async with fleet(tmp_path, "mlx", "tokenspeed") as (bench, mlx, tokenspeed):
        for _ in range(4):
            await bench.events(text(n=2))
        assert (len(mlx.received), len(tokenspeed.received)) == (0, 4)
        for _ in range(4):
            await bench.events(text())
        assert (len(mlx.received), len(tokenspeed.received)) == (2, 6)
        assert len(bench.dispatcher.outlook("qwen3-vl", [Modality.AUDIO]).workers) == 1


async def test_another_engine_takes_over_in_its_own_form(tmp_path):
    async with fleet(tmp_path, "sglang", "trtllm", "vllm") as (bench, sglang, trtllm, vllm):
        sglang.otherwise = trtllm.otherwise = fails("UNAVAILABLE")
        remade = []

        async def remake(form):
            remade.append(form)
            return pictures(form)

        events = await bench.events(pictures(Form(tensors=False, encoded=True)), remake=remake)
        assert isinstance(events[-1], Finished)
        assert len(vllm.received) == 1 and vllm.received[0].mm_inputs.pixel_values.dtype == "float32"
        assert remade and all(form.tensors for form in remade)


async def test_tensors_with_files_serve_who_wants_less(tmp_path):
    async with fleet(tmp_path, "trtllm", "vllm") as (bench, trtllm, vllm):
        for _ in range(4):
            await bench.events(pictures(Form(encoded=True)))
        assert (len(trtllm.received), len(vllm.received)) == (2, 2)


async def test_media_too_large_for_one_engine_go_to_another(tmp_path):
    async with fleet(tmp_path, "sglang", "vllm") as (bench, sglang, vllm):
        (worker,) = [one for one in bench.registry.workers if one.runtime == "sglang"]
        worker.client.learn({"max_message_bytes": "5000"})
        for _ in range(4):
            await bench.events(pictures(Form(encoded=True)))
        assert (len(sglang.received), len(vllm.received)) == (0, 4)
        bench.registry.remove(next(one.id for one in bench.registry.workers if one.runtime == "vllm"))
        with pytest.raises(EngineError) as refused:
            await bench.events(pictures(Form(encoded=True)))
        failure = engine_failure(refused.value)
        assert (failure.status, failure.code) == (413, "multimodal_payload_too_large")
