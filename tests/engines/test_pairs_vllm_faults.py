"""Pairs of vLLM workers: which leg answers for which failure, and what a client that leaves leaves behind."""

import asyncio

import pytest

from engines.base import Finished
from tests.engines.pair_bench import HANDED_OVER, falls, pairs, prefills, waits
from tests.engines.stand_in import answers, chunk, hangs, sends, until
from tests.engines.test_dispatch import picture, text
from tests.engines.test_pairs_vllm import NIXL, refused


@pytest.mark.parametrize(
    ("status", "http", "attempts"), [("INVALID_ARGUMENT", 400, 1), ("UNAVAILABLE", 503, 5), ("INTERNAL", 500, 1)]
)
async def test_a_prefill_leg_that_fails(tmp_path, status, http, attempts):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise = falls(status)
        assert await refused(bench, picture()) == (http, "prefill_worker_failed_to_start")
        assert len(prefill.received) == attempts and not decode.received
        assert bench.free == [False] and bench.figures.retries == ["prefill"] * (attempts - 1)


async def test_another_prefill_worker_takes_over(tmp_path):
    async with pairs(tmp_path, "vllm", prefill=2, labels=NIXL) as (bench, [one, other], [decode]):
        one.otherwise, other.otherwise = falls("UNAVAILABLE"), prefills()
        for _ in range(2):
            events = await bench.events(picture())
            assert isinstance(events[-1], Finished)
        assert len(decode.received) == 2 and bench.free == [True, True]


async def test_a_prefill_leg_that_breaks_off_after_it_began(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise = falls("INTERNAL", after=1)
        assert await refused(bench, picture()) == (500, "prefill_stream_error")
        assert not decode.received


async def test_a_decode_leg_that_is_refused(tmp_path):
    """The tensors are gone when the prefill leg is done, so media are not repeated; text is, from the beginning."""
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise, decode.otherwise = prefills(), falls("UNAVAILABLE", details="busy")
        assert await refused(bench, picture()) == (503, "decode_worker_failed_to_start")
        assert (len(prefill.received), len(decode.received)) == (1, 1) and bench.free == [True]
        assert await refused(bench, text()) == (503, "decode_worker_failed_to_start")
        assert (len(prefill.received), len(decode.received)) == (6, 6)


async def test_a_decode_worker_that_cannot_be_reached_costs_no_prefill(tmp_path):
    """Nobody has taken what was handed over, so another one may."""
    async with pairs(tmp_path, "vllm", decode=2, labels=NIXL) as (bench, [prefill], [gone, other]):
        let_go = asyncio.Event()
        prefill.otherwise = waits(let_go, prefills())
        run = asyncio.create_task(bench.events(picture()))
        await until(lambda: prefill.received)
        chosen = next(one for one in (gone, other) if one.url in dict(bench.figures.selected))
        rest = other if chosen is gone else gone
        await chosen.stop()
        let_go.set()
        events = await run
        assert isinstance(events[-1], Finished)
        assert (len(prefill.received), len(rest.received)) == (1, 1)
        assert rest.received[0].kv_transfer_params_json == HANDED_OVER


async def test_a_decode_leg_that_breaks_off(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise, decode.otherwise = prefills(), falls("UNAVAILABLE", after=2)
        assert await refused(bench, picture()) == (503, "worker_stream_failed")
        assert len(prefill.received) == 1
        await until(lambda: decode.aborted)


# ---------------------------------------------------------------- a client that leaves


async def test_leaving_during_the_prefill_leg_ends_it_at_once(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise = hangs
        run = asyncio.create_task(bench.events(picture()))
        await until(lambda: prefill.received)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(lambda: prefill.cancelled and prefill.aborted)
        assert not decode.received and bench.free == [False]


async def test_leaving_during_the_hand_over_aborts_when_it_is_over(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        let_go = asyncio.Event()
        prefill.otherwise, decode.otherwise = prefills(), waits(let_go, answers(*range(11, 60)))
        run = asyncio.create_task(bench.events(picture()))
        await until(lambda: decode.received)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.sleep(0.05)
        worker = next(one for one in bench.registry.workers if one.worker_type == "decode")
        assert not decode.cancelled and not decode.aborted and worker.load == 1
        let_go.set()
        await until(lambda: decode.aborted and worker.load == 0)
        assert bench.free == [True]


async def test_a_hand_over_that_never_ends_is_aborted_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("engines.attempt.DEFERRED_ABORT_S", 0.1)
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise, decode.otherwise = prefills(), hangs
        run = asyncio.create_task(bench.events(text()))
        await until(lambda: decode.received)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(lambda: decode.cancelled and decode.aborted)


async def test_the_gateway_ends_while_a_hand_over_is_under_way(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise, decode.otherwise = prefills(), hangs
        run = asyncio.create_task(bench.events(text()))
        await until(lambda: decode.received)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await bench.dispatcher.close(grace_s=0.05)
        await until(lambda: decode.cancelled and decode.aborted)


async def test_leaving_in_the_answer_aborts_at_once(tmp_path):
    async with pairs(tmp_path, "vllm", labels=NIXL) as (bench, [prefill], [decode]):
        prefill.otherwise = prefills()
        decode.otherwise = sends(chunk([11]), then="hang")
        async with bench.generate(text()) as generation:
            await anext(generation)
        await until(lambda: decode.cancelled and decode.aborted)
        assert prefill.aborted == []
