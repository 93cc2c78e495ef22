"""Generations against real gRPC servers: attempts, failover, aborts, segments, and when the tensors are free."""

import asyncio
import os
import re
import time
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.affinity import Affinity, Mark
from engines.attempt import uuid7
from engines.base import (
    Chunk,
    EngineError,
    EngineRequest,
    Finished,
    Form,
    MediaBatch,
    MediaItem,
    Modality,
    ModalityRefused,
    NoWorker,
    Range,
    Sampling,
    Tensor,
)
from engines.breaker import BreakerSettings, BreakerState
from engines.dispatch import Dispatcher, DispatchSettings, RetrySettings
from engines.generation import RETRIED, Media, is_retried
from engines.health import HealthSettings
from engines.registry import Registry, RegistrySettings
from engines.transport import Transport, TransportSettings
from engines.worker import WorkerSpec
from pipeline.errors import ENGINE_STATUS
from pool.segments import SegmentStore
from tests.engines.fakes import DirectorySegment, DirectoryStore, Figures
from tests.engines.golden import LAYOUTS
from tests.engines.stand_in import answers, chunk, complete, engine, fails, hangs, sends, until

QUICK = RetrySettings(initial_backoff_s=0.001)
FLOATS = Form()
RAW = Form("uint8", normalised=False)
UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Bench:
    """Engines, a registry that knows them, a dispatcher, and what it reported."""

    def __init__(self, directory, *, retry=QUICK, policy="round_robin", encoder_dtypes=None, breaker=None, **transport):
        self.figures = Figures()
        self.store = DirectoryStore(directory)
        self.free = []
        health = HealthSettings(interval_s=600.0, timeout_s=2.0)
        settings = RegistrySettings(health=health, breaker=breaker or BreakerSettings(), drain_settle_s=0.0)
        self.registry = Registry(settings, self.figures)
        transport = {"owner_id": "smg:7", "writable": True, "shm_min_bytes": 1, **transport}
        self.transport = Transport(TransportSettings(**transport), self.store, self.figures)
        settings = DispatchSettings(policy=policy, retry=retry, encoder_dtypes=encoder_dtypes or {})
        self.dispatcher = Dispatcher(self.registry, self.transport, settings, self.figures)

    async def add(self, *engines, **spec):
        workers = [await self.registry.add(WorkerSpec(url=each.url, **spec)) for each in engines]
        await until(lambda: all(worker.is_healthy for worker in workers))
        return workers

    def generate(self, request, **options):
        return self.dispatcher.generate(request, on_media_free=self.free.append, **options)

    async def events(self, request, **options):
        async with self.generate(request, **options) as generation:
            return [event async for event in generation]

    async def close(self):
        await self.dispatcher.close()
        await self.registry.close()
        self.transport.close()

    @property
    def loads(self):
        return {worker.load for worker in self.registry.workers}


@pytest.fixture
def make_bench(tmp_path):
    @asynccontextmanager
    async def make(**options):
        bench = Bench(tmp_path, **options)
        try:
            yield bench
        finally:
            await bench.close()
        assert bench.loads <= {0}
        assert bench.store.files == []

    return make


def text(*, stream=True, n=1):
    return EngineRequest("chatcmpl-1", "qwen3-vl", [1, 2, 3], "hi", Sampling(n=n), stream)


def picture(*, nbytes=4096, form=FLOATS, modality=Modality.IMAGE, segment=None, stream=True):
    """One item of `nbytes` of pixels."""
    pixels = memoryview(bytes(range(256)) * (nbytes // 256))
    sizes = f"patches_per_{modality.value}"
    side = {sizes: Tensor("int64", (1,), (b"\x04" + bytes(7),))}
    item = MediaItem("0" * 64, Range(1, 1), (Range(1, 1),), Tensor(form.dtype, (4, nbytes // 16), (pixels,)), side)
    batch = MediaBatch(modality, (item,), 7, LAYOUTS[modality], form, segment)
    return msgspec.structs.replace(text(stream=stream), media=(batch,))


# ---------------------------------------------------------------- the regular way


async def test_stream(make_bench):
    async with make_bench() as bench, engine() as served:
        (worker,) = await bench.add(served)
        async with bench.generate(text()) as generation:
            first = await anext(generation)
            assert first == Chunk(0, [11], prompt_tokens=5)
            assert generation.worker is worker and worker.load == 1 and bench.free == [True]
            rest = [event async for event in generation]
        assert rest[-1] == Finished(0, "stop", [], prompt_tokens=5, completion_tokens=3)
        assert bench.figures.selected == [(served.url, "round_robin")]
        assert bench.figures.loads == {served.url: 0}
        assert bench.figures.retries == []
        await until(lambda: len(served.finished) == 1)
        assert served.aborted == [] and served.cancelled == []
        assert re.fullmatch(f"chatcmpl-1-{UUID7.pattern}", served.received[0].request_id)


async def test_several_choices_at_once(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        events = await bench.events(text(stream=False, n=3))
        assert [(event.index, event.token_ids, event.completion_tokens) for event in events] == [
            (index, [11, 12, 13], 3) for index in range(3)
        ]


async def test_inline_tensors_arrive(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        request = picture(nbytes=1 << 20)
        await bench.events(request)
        received = served.received[0].mm_inputs
        assert received.pixel_values.inline == bytes(request.media[0].items[0].primary.buffers[0])
        assert bench.figures.tensors == [("vllm", "inline", 8), ("vllm", "inline", 1 << 20)]
        assert bench.free == [True]


@pytest.mark.parametrize(
    ("messages", "then", "told", "is_reset"),
    [
        ([], "hang", "silence", True),
        ([], "INTERNAL", "in mid-stream", False),
        ([chunk([12])], "hang", "the worker's answer cannot be read: more than was to come", True),
        ([], None, None, False),
    ],
    ids=["hangs", "fails", "says more", "ends"],
)
async def test_a_complete_answer_stays_whatever_the_engine_says_behind_it(
    make_bench, monkeypatch, caplog, messages, then, told, is_reset
):
    caplog.set_level("INFO", "engines.attempt")
    monkeypatch.setattr("engines.attempt.LAST_WORD_S", 0.1)
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.script = [sends(complete([11]), *messages, then=then)]
        assert [event.finish_reason for event in await bench.events(text())] == ["stop"]
        worker = bench.registry.workers[0]
        await until(lambda: not calls_of(worker))
        await until(lambda: len(served.cancelled) == is_reset)
        assert served.aborted == [] and len(await bench.events(text())) == 4  # the connection is as it was
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ([f"worker {served.url}: {told} after its answer was complete"] if told else [])


async def test_a_connection_that_goes_takes_calls_along_that_were_left_to_end(make_bench, caplog):
    caplog.set_level("INFO", "engines.attempt")
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.otherwise = sends(complete([11]), then="hang")
        for _ in range(3):
            assert len(await bench.events(text())) == 1
        worker = bench.registry.workers[0]
        assert len(calls_of(worker)) == 3
        await served.stop()
        await until(lambda: caplog.text.count("after its answer was complete") == 3)
        assert not calls_of(worker)


def calls_of(worker):
    """Calls that the worker's sending connections still know."""
    senders = [channel for channel in worker.client._channels._senders if channel.is_connected]
    return [call for channel in senders for call in channel._protocol.processor.calls.values()]


# ---------------------------------------------------------------- attempts


@pytest.mark.parametrize("status", sorted(ENGINE_STATUS))
async def test_attempts_by_status(make_bench, status):
    """Five attempts for what may pass, one for the rest, each with an id of its own."""
    is_retried_by_table = ENGINE_STATUS[status][1]
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.otherwise = fails(status, "engine text")
        with pytest.raises(EngineError) as failure:
            await bench.events(text())
        error = failure.value
        assert (error.status, error.message, error.started, error.worker) == (status, "engine text", False, served.url)
        assert len(served.received) == (5 if is_retried_by_table else 1)
        ids = [request.request_id for request in served.received]
        assert len(set(ids)) == len(ids) and all(each.startswith("chatcmpl-1-") for each in ids)
        assert bench.figures.retries == ["regular"] * (len(ids) - 1)
        assert bench.free == [False]
        assert served.aborted == []


def test_retried_statuses_are_those_of_the_error_table():
    assert {status for status, (_, again) in ENGINE_STATUS.items() if again} == RETRIED


async def test_sidecar_timeout_is_not_retried(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.otherwise = fails("UNAVAILABLE", "sidecar_timeout: no result for job 7 within 30000 ms")
        with pytest.raises(EngineError):
            await bench.events(text())
        assert len(served.received) == 1


async def test_attempts_are_counted_in_all(make_bench):
    async with make_bench(retry=RetrySettings(max_attempts=2, initial_backoff_s=0.001)) as bench, engine() as served:
        await bench.add(served)
        served.script = [fails("UNAVAILABLE"), answers(21)]
        async with bench.generate(text()) as generation:
            assert [event.token_ids async for event in generation] == [[21], []]
            assert generation.attempts == 2
        served.script = [fails("UNAVAILABLE"), fails("UNAVAILABLE"), answers(21)]
        with pytest.raises(EngineError):
            await bench.events(text())


def test_pauses_grow_within_bounds():
    retry = RetrySettings()
    for failures in range(1, 30):
        steady = min(30.0, 0.05 * 1.5 ** (failures - 1))
        assert all(steady * 0.8 - 1e-9 <= retry.pause_s(failures) <= min(30.0, steady * 1.2) for _ in range(20))


def test_nothing_started_is_retried():
    assert is_retried(EngineError("UNAVAILABLE", "lost"))
    assert not is_retried(EngineError("UNAVAILABLE", "lost", started=True))


def test_request_ids_sort_by_time():
    ids = []
    for _ in range(5):
        ids.append(uuid7())
        time.sleep(0.002)
    assert ids == sorted(ids) and all(UUID7.fullmatch(each) for each in ids)
    assert abs(int(ids[0].replace("-", "")[:12], 16) / 1000 - time.time()) < 5


# ---------------------------------------------------------------- failover


async def test_the_other_worker_is_tried(make_bench):
    async with make_bench() as bench, engine() as bad, engine() as good:
        bad.otherwise = fails("RESOURCE_EXHAUSTED")
        await bench.add(bad, good)
        for _ in range(4):
            events = await bench.events(text())
            assert events[-1].finish_reason == "stop"
        assert len(good.received) == 4
        assert len(bad.received) == len(bench.figures.retries) <= 4


async def test_a_dead_worker_costs_one_attempt(make_bench):
    async with make_bench() as bench, engine() as dying, engine() as living:
        await bench.add(dying, living)
        dying.otherwise = hangs
        serving = asyncio.create_task(bench.events(text()))
        await until(lambda: dying.received)
        await dying.stop()
        assert (await serving)[-1].finish_reason == "stop"
        assert len(living.received) == 1
        await until(lambda: len(bench.registry.workers_of("qwen3-vl")) == 1)
        await bench.events(text())
        assert len(living.received) == 2


async def test_the_only_worker_dies(make_bench):
    """The attempt fails; afterwards nobody is there, at once."""
    async with make_bench() as bench, engine() as dying:
        await bench.add(dying)
        dying.otherwise = hangs
        serving = asyncio.create_task(bench.events(text()))
        await until(lambda: dying.received)
        await dying.stop()
        with pytest.raises(EngineError) as failure:
            await serving
        assert failure.value.status == "UNAVAILABLE"
        with pytest.raises(NoWorker):
            await bench.events(text())


async def test_restart_between_two_requests_is_noticed(make_bench):
    """A request that comes while the labels are read again waits for them, and gets the new form."""
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        await bench.events(picture())
        await served.stop()
        served.server_info["mm_device_do_normalize"] = True
        await served.start()
        asked = []

        async def remake(form):
            asked.append(form)
            return picture(form=form)

        async with asyncio.timeout(10):
            while True:
                try:
                    await bench.events(picture(), remake=remake)
                    break
                except NoWorker:
                    await asyncio.sleep(0.02)
        assert asked == [RAW]
        assert served.received[-1].mm_inputs.pixel_values.dtype == "uint8"
        assert [request.mm_inputs.pixel_values.dtype for request in served.received] == ["float32", "uint8"]


async def test_request_waits_while_labels_are_read_again(make_bench):
    async with make_bench() as bench, engine() as served:
        (worker,) = await bench.add(served)
        worker.is_stale = True
        worker.examined.clear()
        waiting = asyncio.create_task(bench.events(text()))
        await asyncio.sleep(0.05)
        assert not waiting.done() and served.received == []
        worker.is_stale = False
        worker.examined.set()
        assert (await waiting)[-1].finish_reason == "stop"


# ---------------------------------------------------------------- who can serve


async def test_no_worker(make_bench):
    async with make_bench() as bench:
        with pytest.raises(NoWorker, match="No available workers for model 'qwen3-vl'"):
            await bench.events(picture())
        assert bench.free == [False]
        with pytest.raises(NoWorker):
            bench.dispatcher.outlook("qwen3-vl", [])


async def test_modality_is_refused_before_sending(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        audio = msgspec.structs.replace(picture().media[0], modality=Modality.AUDIO)
        request = msgspec.structs.replace(picture(), media=(audio,))
        with pytest.raises(ModalityRefused, match="backend vllm does not support audio inputs"):
            await bench.events(request)
        with pytest.raises(ModalityRefused):
            bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE, Modality.AUDIO])
        assert served.received == [] and bench.figures.retries == []


async def test_media_go_to_workers_with_vision(make_bench):
    async with make_bench() as bench, engine(model_info={"supports_vision": False}) as blind, engine() as seeing:
        await bench.add(blind, seeing)
        for _ in range(3):
            await bench.events(picture())
        await bench.events(text())
        assert len(blind.received) == 1 and len(seeing.received) == 3
        assert bench.dispatcher.outlook("qwen3-vl", [Modality.VIDEO]).workers[0].url == seeing.url


async def test_routing_key(make_bench):
    async with make_bench(policy="consistent_hashing") as bench, engine() as first, engine() as second:
        await bench.add(first, second)
        for _ in range(4):
            await bench.events(text(), affinity=Affinity(key="user-1"))
        assert sorted((len(first.received), len(second.received))) == [0, 4]


async def test_an_outlook_waits_for_a_worker_that_is_examined(make_bench):
    """A connection that was lost for a moment is no reason to refuse a request with media."""
    async with make_bench() as bench, engine() as served:
        (worker,) = await bench.add(served)
        served.unheld.clear()
        worker.client._channels._control._protocol._transport.abort()
        await until(lambda: worker.is_stale)
        with pytest.raises(NoWorker):
            bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE])
        asyncio.get_running_loop().call_later(0.05, served.unheld.set)
        await bench.dispatcher.examined("qwen3-vl")
        assert bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE]).workers == (worker,)


@pytest.mark.parametrize("policy", ["consistent_hashing", "prefix_hash", "cache_aware"])
async def test_tensors_are_made_in_the_form_of_the_worker_the_picture_belongs_to(make_bench, policy):
    raw = {"mm_device_do_normalize": True}
    async with make_bench(policy=policy) as bench, engine(server_info=raw) as first, engine() as second:
        await bench.add(first, second)
        homes = {}
        for number in (*range(12), *range(12)):
            item = picture().media[0].items[0]
            affinity = Affinity(range(64), [Mark(1, 60, f"{number:064x}")])
            outlook = bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE], affinity)
            request = picture(form=outlook.form)
            async with bench.generate(request, affinity=affinity) as generation:
                assert [event async for event in generation] and item
            home = homes.setdefault(number, generation.worker.url)
            assert generation.worker.url == home, "the same picture, whatever forms there are"
        assert len({*homes.values()}) == 2


# ---------------------------------------------------------------- circuit breakers


async def test_a_worker_whose_requests_fail_is_left_out_and_tried_again(make_bench):
    settings = BreakerSettings(failure_threshold=2, success_threshold=1, timeout_duration_s=0.3)
    async with make_bench(breaker=settings) as bench, engine() as bad, engine() as good:
        sick, _ = await bench.add(bad, good)
        bad.otherwise = fails("UNAVAILABLE")
        for _ in range(8):
            await bench.events(text())
        assert len(bad.received) == 2, "the breaker opened at the second failure"
        assert sick.is_healthy and not sick.is_available
        assert sick.describe()["circuit_breaker"] == {"state": "open", "failures": 2}
        assert bench.figures.breakers == [(bad.url, "closed", "open")]
        assert bench.figures.outcomes.count((bad.url, True)) == 2
        assert bench.figures.outcomes.count((good.url, False)) == 8
        bad.otherwise = answers(1)
        await until(lambda: sick.breaker.state is BreakerState.HALF_OPEN)
        for _ in range(4):
            await bench.events(text())
        assert sick.breaker.state is BreakerState.CLOSED and len(bad.received) == 4


async def test_when_every_breaker_is_open_nobody_is_asked(make_bench):
    settings = BreakerSettings(failure_threshold=2)
    async with make_bench(breaker=settings) as bench, engine() as served:
        await bench.add(served)
        served.otherwise = fails("UNKNOWN")
        with pytest.raises(NoWorker):  # in the middle of its attempts
            await bench.events(text())
        with pytest.raises(NoWorker):
            bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE])
        assert len(served.received) == 2


@pytest.mark.parametrize("status", ["RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"])
async def test_refusals_and_busy_workers_open_no_breaker(make_bench, status):
    async with make_bench(breaker=BreakerSettings(failure_threshold=1)) as bench, engine() as served:
        (worker,) = await bench.add(served)
        served.otherwise = fails(status)
        for _ in range(3):
            with pytest.raises(EngineError, match="because"):
                await bench.events(text())
        assert worker.is_available and bench.figures.outcomes == []


async def test_a_client_that_leaves_says_nothing_of_the_worker(make_bench):
    async with make_bench(breaker=BreakerSettings(failure_threshold=1)) as bench, engine() as served:
        (worker,) = await bench.add(served)
        served.otherwise = sends(chunk([1]), then="hang")
        async with bench.generate(text()) as generation:
            await anext(generation)
        assert worker.is_available and bench.figures.outcomes == []


def test_unknown_policy_stops_the_start(tmp_path):
    with pytest.raises(KeyError):
        Dispatcher(None, None, DispatchSettings(policy="psychic"), None)


# ---------------------------------------------------------------- forms


async def test_outlook_takes_one_of_the_forms(make_bench, monkeypatch):
    near_labels = {"shm_namespace_id": "boot:1"}
    async with (
        make_bench(mode="auto", namespace="boot:1", encoder_dtypes={"vllm": "bfloat16"}) as bench,
        engine(server_info={"mm_device_do_normalize": True}) as raw,
        engine(server_info=near_labels) as near,
        engine(server_info=near_labels) as frugal,
    ):
        await bench.add(raw, near)
        await bench.add(frugal, multimodal_shm_min_bytes=0)
        chosen = {bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE]).workers for _ in range(100)}
        assert {len(workers) for workers in chosen} == {1, 2}, "each form has its turn"
        monkeypatch.setattr("random.choice", lambda forms: forms[1])
        outlook = bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE])
        assert (outlook.form, outlook.by_segment, outlook.min_segment_bytes) == (Form("bfloat16"), True, 0)
        assert [worker.url for worker in outlook.workers] == [near.url, frugal.url]
        async with engine() as far:
            await bench.add(far)
            assert not bench.dispatcher.outlook("qwen3-vl", [Modality.IMAGE]).by_segment


async def test_wrong_form_is_never_sent(make_bench):
    async with make_bench() as bench, engine(server_info={"mm_device_do_normalize": True}) as raw:
        await bench.add(raw)
        with pytest.raises(NoWorker):
            await bench.events(picture())
        assert raw.received == []
        await bench.events(picture(form=RAW))
        await bench.events(text())
        assert len(raw.received) == 2


async def test_same_form_is_preferred_then_remade(make_bench):
    """Float workers first; when they fail, the tensors are made again for the raw one."""
    remade = []

    async def remake(form):
        remade.append(form)
        return picture(form=form)

    async with (
        make_bench() as bench,
        engine(server_info={"mm_device_do_normalize": True}) as raw,
        engine() as one,
        engine() as two,
    ):
        await bench.add(raw, one, two)
        for _ in range(4):
            await bench.events(picture(), remake=remake)
        assert (len(raw.received), len(one.received), len(two.received)) == (0, 2, 2) and remade == []
        one.otherwise = two.otherwise = fails("UNAVAILABLE")
        with pytest.raises(EngineError):  # without remake the raw worker is no candidate
            await bench.events(picture())
        assert raw.received == []
        bench.registry.remove(bench.registry.workers[2].id)
        await bench.events(picture(), remake=remake)
        assert remade == [RAW] and raw.received[0].mm_inputs.pixel_values.dtype == "uint8"


# ---------------------------------------------------------------- dropped generations


async def test_closing_early_aborts(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.otherwise = sends(chunk([11]), then="hang")
        generation = bench.generate(text())
        await anext(generation)
        await generation.aclose()
        await until(lambda: served.cancelled and served.aborted)
        assert served.aborted == served.cancelled == [served.received[0].request_id]
        assert bench.free == [True]
        await generation.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(generation)


async def test_cancelling_while_the_engine_is_silent_aborts(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.otherwise = hangs
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await bench.events(picture())
        await until(lambda: served.cancelled and served.aborted)
        assert served.aborted == [served.received[0].request_id]
        await until(lambda: bench.free == [False])


async def test_closed_after_the_last_event_is_a_regular_end(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        async with bench.generate(text()) as generation:
            async for event in generation:
                if isinstance(event, Finished):
                    break
        await asyncio.sleep(0.05)
        assert served.aborted == []


async def test_never_iterated(make_bench):
    async with make_bench() as bench:
        await bench.generate(picture()).aclose()
        assert bench.free == [False]


async def test_cancelled_between_attempts(make_bench):
    async with make_bench(retry=RetrySettings(initial_backoff_s=5.0)) as bench, engine() as served:
        await bench.add(served)
        served.otherwise = fails("UNAVAILABLE")
        task = asyncio.create_task(bench.events(picture()))
        await until(lambda: bench.figures.retries)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(served.received) == 1 and bench.free == [False]


async def test_status_that_comes_with_a_cancellation_is_not_retried(make_bench, monkeypatch):
    """grpclib may raise the engine's status in place of the cancellation it was interrupted by."""
    entered = asyncio.Event()

    async def enter(stream):
        entered.set()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            stream.sent.set()
            raise EngineError("UNAVAILABLE", "status in place of the cancellation") from None

    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        monkeypatch.setattr("engines.channel.Stream.send", enter)
        task = asyncio.create_task(bench.events(picture()))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.figures.retries == []
        await until(lambda: bench.free == [False])
        monkeypatch.undo()


async def test_an_abort_that_fails_is_only_logged(make_bench, caplog):
    caplog.set_level("INFO")
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.fail_method["Abort"] = "INTERNAL"
        served.otherwise = hangs
        generation = bench.generate(text())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(generation)
        await generation.aclose()
        await until(lambda: "could not abort" in caplog.text)


# ---------------------------------------------------------------- engines that misbehave


@pytest.mark.parametrize(
    ("messages", "then", "status"),
    [
        ([chunk([11])], "UNAVAILABLE", "UNAVAILABLE"),
        ([chunk([11])], "INTERNAL", "INTERNAL"),
        ([chunk([11])], None, "INTERNAL"),
        ([chunk([11]), chunk([12], index=3)], "hang", "INTERNAL"),
        ([chunk([11]), b"\xff\xff\xff"], "hang", "INTERNAL"),
        ([b"\x0a\xff\xff\xff\xff\xff"], "hang", "INTERNAL"),
        ([b""], "hang", "INTERNAL"),
    ],
    ids=["fails later", "fails later for good", "no end", "unknown choice", "garbage later", "garbage first",
         "empty message"],
)  # fmt: skip
async def test_misbehaviour_is_an_error_and_never_retried(make_bench, messages, then, status):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.otherwise = sends(*messages, then=then)
        with pytest.raises(EngineError) as failure:
            await bench.events(picture())
        assert failure.value.status == status and failure.value.worker == served.url
        assert len(served.received) == 1 and bench.figures.retries == []
        assert len(bench.free) == 1


async def test_dropping_a_misbehaving_engine_aborts(make_bench):
    async with make_bench() as bench, engine() as served:
        await bench.add(served)
        served.otherwise = sends(chunk([1], index=9), then="hang")
        with pytest.raises(EngineError):
            await bench.events(text())
        await until(lambda: served.aborted == [served.received[0].request_id])


async def test_killed_in_mid_stream(make_bench):
    async with make_bench() as bench, engine() as dying, engine() as living:
        await bench.add(dying, living)
        dying.otherwise = sends(chunk([11]), then="hang")
        generation = bench.generate(picture())
        assert (await anext(generation)).token_ids == [11]
        await dying.stop()
        with pytest.raises(EngineError) as failure:
            await anext(generation)
        await generation.aclose()
        assert failure.value.status in RETRIED and failure.value.started
        assert living.received == []
        assert (await bench.events(picture()))[-1].finish_reason == "stop"


async def test_never_reading_engine(make_bench):
    """A peer that accepts the connection and takes nothing: leaving works, and the tensors come free."""
    accepted = []

    async def swallow(reader, writer):
        accepted.append(writer)
        await asyncio.Event().wait()

    async with make_bench() as bench, engine() as served:
        (worker,) = await bench.add(served)
        deaf = await asyncio.start_server(swallow, "127.0.0.1", 0)
        worker.client._channels._senders[0]._port = deaf.sockets[0].getsockname()[1]
        for sender in worker.client._channels._senders[1:]:
            sender.unsent_bytes = 1 << 40
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await bench.events(picture(nbytes=32 << 20))
            await until(lambda: bench.free == [False], within=15)
        finally:
            for sender in worker.client._channels._senders[1:]:
                sender.unsent_bytes = 0
            deaf.close()
            for writer in accepted:
                writer.transport.abort()


# ---------------------------------------------------------------- segments


async def test_segments_are_read_and_settled(make_bench, tmp_path):
    async with make_bench(mode="shm") as bench, engine(segments=tmp_path) as served:
        await bench.add(served)
        request = picture()
        await bench.events(request)
        handle = served.received[0].mm_inputs.pixel_values.shm
        assert (handle.nbytes, handle.offset, handle.owner_id) == (4096, 0, "smg:7")
        assert served.tensors[handle.name] == bytes(request.media[0].items[0].primary.buffers[0])
        assert bench.figures.tensors == [("vllm", "shm", 8), ("vllm", "shm", 4096)]
        await until(lambda: [segment.settled for segment in bench.store.segments] == [True, True])
        assert {segment.reader for segment in bench.store.segments} == {served.url}


async def test_own_segment_over_two_attempts(make_bench, tmp_path):
    """Published anew for each attempt, withdrawn when one fails; the owner settles it with what he is told."""
    async with make_bench(mode="shm", shm_min_bytes=100) as bench, engine(segments=tmp_path) as served:
        await bench.add(served)
        mine = DirectorySegment(bench.store, [bytes(range(256)) * 16])
        published = []

        async def refuses_unread(engine, request, context):
            published.extend(path.name for path in tmp_path.iterdir() if path.name.startswith("published"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
            yield

        served.segments = None
        served.otherwise = refuses_unread
        with pytest.raises(EngineError):
            await bench.events(picture(segment=mine))
        assert len(published) == 5 and len(set(published)) == 5  # one name at a time
        assert bench.store.files == [mine.master.name] and bench.free == [False]
        served.segments, served.otherwise = tmp_path, answers(11)
        await bench.events(picture(segment=mine))
        assert bench.free == [False, True] and mine.settled is None
        mine.settle(consumed=True)


@pytest.mark.parametrize("how", ["closed", "cancelled", "killed"])
async def test_no_segment_stays_after_an_unread_generation(make_bench, how):
    async with make_bench(mode="shm") as bench, engine() as served:
        await bench.add(served)
        served.otherwise = hangs
        task = asyncio.create_task(bench.events(picture()))
        await until(lambda: served.received)
        assert len(bench.store.files) == 4  # two masters, two names
        if how == "killed":
            await served.stop()
            with pytest.raises(EngineError):
                await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: bench.store.files == [])
        assert [segment.settled for segment in bench.store.segments] == [False, False]
        await until(lambda: bench.free == [False])


async def test_full_shared_memory_goes_inline(make_bench):
    async with make_bench(mode="shm") as bench, engine() as served:
        await bench.add(served)
        bench.store.room = False
        await bench.events(picture())
        assert served.received[0].mm_inputs.pixel_values.WhichOneof("payload") == "inline"
        assert bench.figures.failures == ["vllm", "vllm"]


async def test_transport_is_chosen_for_each_worker(make_bench, tmp_path):
    near_labels = {"shm_namespace_id": "boot:1"}
    async with (
        make_bench(mode="auto", namespace="boot:1") as bench,
        engine(server_info=near_labels, segments=tmp_path) as near,
        engine() as far,
    ):
        await bench.add(near, far)
        await bench.events(picture())
        await bench.events(picture())
        assert near.received[0].mm_inputs.pixel_values.WhichOneof("payload") == "shm"
        assert far.received[0].mm_inputs.pixel_values.WhichOneof("payload") == "inline"


async def test_recycled_segment_of_the_real_store(make_bench):
    """In /dev/shm itself: read by the engine, settled by its owner, used again; retired after a failure."""
    store = SegmentStore(pid=os.getpid(), cap_bytes=1 << 24)
    try:
        async with make_bench(mode="shm", shm_min_bytes=100) as bench, engine(segments=Path("/dev/shm")) as served:
            await bench.add(served)
            names = []
            for number, consumed in enumerate([True, True, False, True]):
                mine = store.take(4096)
                mine.copy_in([memoryview(bytes([number]) * 4096)])
                names.append(mine.name)
                served.script = [] if consumed else [fails("INVALID_ARGUMENT")]
                served.segments = Path("/dev/shm") if consumed else None
                with nullcontext() if consumed else pytest.raises(EngineError):
                    await bench.events(picture(segment=mine))
                assert bench.free.pop() is consumed
                mine.settle(consumed=consumed, reader=served.url)
            assert names[0] == names[1] == names[2] != names[3]
            assert [data[0] for data in served.tensors.values()] == [0, 1, 3]
    finally:
        store.close()


# ---------------------------------------------------------------- removal, and many at once


async def test_worker_that_is_removed_finishes_its_work(make_bench):
    async with make_bench() as bench, engine() as served:
        (worker,) = await bench.add(served)
        go_on = asyncio.Event()

        async def slowly(engine, request, context):
            yield chunk([11])
            await go_on.wait()
            yield complete([])

        served.otherwise = slowly
        async with bench.generate(text()) as generation:
            await anext(generation)
            bench.registry.remove(worker.id)
            await asyncio.sleep(0.05)
            with pytest.raises(NoWorker):
                await bench.events(text())
            go_on.set()
            assert isinstance(await anext(generation), Finished)
        await until(lambda: bench.registry.workers == [])


class HeldDrain:
    """A drain that a test sets."""

    def add_done_callback(self, callback):
        self.set = callback


@given(st.lists(st.sampled_from(["read", "drain", "consumed", "over"]), max_size=30))
def test_media_are_told_free_once_and_not_before(steps):
    told, reads, drains, verdict = [], [], [], None
    media = Media(lambda: reads.append(len(told)), told.append)
    for step in steps:
        if step == "read" and verdict is None:  # no attempt begins after the verdict
            drains.append(HeldDrain())
            media.reading(drains[-1])
        elif step == "drain" and drains:
            drains.pop().set()
        elif step in ("consumed", "over"):
            verdict = (step == "consumed") if verdict is None else verdict
            getattr(media, step)()
            assert reads == [0]  # once, and before the tensors are told free
        assert told == ([verdict] if verdict is not None and not drains else [])


@pytest.mark.parametrize("mode", ["shm", "inline"])
async def test_media_are_told_read_before_the_engine_answers(make_bench, tmp_path, mode):
    """A worker that has taken the tensors but not begun to answer keeps nobody else's tensors from being made."""
    async with make_bench(mode=mode) as bench, engine(segments=tmp_path) as served:
        served.script.append(hangs)
        await bench.add(served)
        reads = []
        generation = bench.generate(picture(), on_media_read=lambda: reads.append(list(bench.free)))
        answer = asyncio.create_task(anext(generation))
        await until(lambda: reads)
        assert reads == [[]] and not answer.done()
        answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer
        await generation.aclose()
        await until(lambda: bench.free == [False])
        assert len(reads) == 1


async def test_a_reader_that_takes_its_time_is_not_waited_for(make_bench, tmp_path, monkeypatch):
    monkeypatch.setattr("engines.attempt.READER_PATIENCE_S", 0.05)
    async with make_bench(mode="shm") as bench, engine(segments=None) as served:
        served.script.append(hangs)
        await bench.add(served)
        reads = []
        generation = bench.generate(picture(), on_media_read=lambda: reads.append(True))
        answer = asyncio.create_task(anext(generation))
        await until(lambda: reads)
        assert all(segment.is_unread for segment in bench.store.segments) and bench.free == []
        answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer
        await generation.aclose()


async def test_hundred_generations_at_once(make_bench, tmp_path):
    """Every third is cut off; loads, segments and verdicts balance."""
    async with (
        make_bench(mode="shm", policy="power_of_two") as bench,
        engine(segments=tmp_path) as one,
        engine(segments=tmp_path) as two,
    ):
        await bench.add(one, two)

        async def run(number):
            if number % 3:
                return len(await bench.events(picture(nbytes=65536)))
            async with bench.generate(picture(nbytes=65536)) as generation:
                await anext(generation)
            return 0

        lengths = await asyncio.gather(*map(run, range(100)))
        assert lengths == [4 if number % 3 else 0 for number in range(100)]
        await until(lambda: len(bench.free) == 100)
        assert set(bench.free) == {True}
        assert len(one.received) + len(two.received) == 100 and min(len(one.received), len(two.received)) > 20
        await until(lambda: len(one.aborted) + len(two.aborted) == 34)
