"""Messages that arrive: any size through any window, in turn, beside control frames; by scattering and by the stock
path.

After every test: no task, no stream, no buffer is left, and every `sent` is set.
"""

import asyncio
import gc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import scatter
from tests.engines.calls import DATA, GENERATE, MIB, PREFIX, REPLY, WIDE, WINDOW, body, call, worker
from tests.engines.h2_server import listening


@pytest.mark.parametrize(
    "nbytes",
    [0, 1, 16384 - PREFIX, 16384 - PREFIX + 1, WINDOW - PREFIX - 1, WINDOW - PREFIX, WINDOW - PREFIX + 1, WINDOW + 1]
    + [2 * WINDOW - PREFIX, MIB - PREFIX, MIB - PREFIX + 1, 3 * MIB + 17],
)
async def test_a_message_of_any_size_arrives_whole(nbytes):
    async with listening(auto_grant=True) as server, worker(server) as channels:
        calling = asyncio.create_task(call(channels, body(nbytes)))
        request = await server.request()
        await request.until_ended()
        assert request.message == DATA[:nbytes]
        assert max(request.frames) <= 16384
        request.answer(REPLY)
        assert await calling == [REPLY]


@given(
    sizes=st.lists(st.integers(0, 60_000), min_size=1, max_size=12),
    frame=st.integers(16384, 200_000),
    window=st.integers(0, 90_000),
    grants=st.lists(st.integers(3_000, 50_000), min_size=1, max_size=5),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_split_passes_any_window(sizes, frame, window, grants):
    parts, start = [], 0
    for size in [*sizes, 70_000]:
        parts.append(memoryview(DATA)[start : start + size])
        start += size
    limits = {"INITIAL_WINDOW_SIZE": window, "MAX_FRAME_SIZE": frame}
    async with listening(settings=limits, connection_window=64 * MIB) as server, worker(server) as channels:
        calling = asyncio.create_task(call(channels, parts))
        request = await server.request()
        granted, total = window, start + PREFIX
        while granted < total:
            await request.until_body(granted)
            assert len(request.body) == granted
            step = grants[granted % len(grants)]
            granted += step
            request.grant(step)
        await request.until_ended()
        assert request.message == DATA[:start]
        assert max(request.frames) <= frame
        request.answer(REPLY)
        assert await calling == [REPLY]


async def test_a_window_reopened_byte_by_byte():
    async with listening() as server, worker(server) as channels:
        calling = asyncio.create_task(call(channels, body(WINDOW + 200)))
        request = await server.request()
        for granted in range(WINDOW, WINDOW + 200 + PREFIX):
            await request.until_body(granted)
            assert len(request.body) == granted
            request.peer.grant(1)
            request.grant(1)
        await request.until_ended()
        assert request.message == DATA[: WINDOW + 200]
        request.answer(REPLY)
        assert await calling == [REPLY]


async def test_a_sent_message_drains_when_the_peer_reads():
    """All frames are handed over, the last slice is still in user space: `sent` waits for it."""
    async with listening(**WIDE) as server, worker(server) as channels:
        warm = asyncio.create_task(call(channels, body(1000)))
        first = await server.request()
        await first.until_ended()
        first.answer(REPLY)
        await warm
        first.peer.transport.pause_reading()
        sent = []
        for _ in range(20):  # until the socket takes no more: the last one is half in user space
            stream = channels.stream(GENERATE, body(MIB - 100), pb.GenerateResponse)
            entering = asyncio.create_task(stream.__aenter__())
            await asyncio.sleep(0.02)
            sent.append((stream, entering))
            if not stream.sent.is_set():
                break
        assert not stream.sent.is_set()
        first.peer.transport.resume_reading()
        for stream, entering in sent:
            await entering
            await asyncio.wait_for(stream.sent.wait(), 5)
            await stream.__aexit__(None, None, None)


async def test_settings_changed_in_mid_message():
    async with listening(connection_window=64 * MIB) as server, worker(server) as channels:
        calling = asyncio.create_task(call(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.peer.change(INITIAL_WINDOW_SIZE=20_000)  # the stream's window is below zero now
        await asyncio.sleep(0.05)
        assert len(request.body) == WINDOW
        request.grant(WINDOW - 20_000)  # zero
        await asyncio.sleep(0.05)
        assert len(request.body) == WINDOW
        request.grant(10)
        await request.until_body(WINDOW + 10)
        request.peer.change(INITIAL_WINDOW_SIZE=2 * MIB, MAX_FRAME_SIZE=100_000)
        await request.until_ended()
        assert request.message == DATA[:MIB]
        assert 16384 < max(request.frames) <= 100_000
        request.answer(REPLY)
        assert await calling == [REPLY]


async def test_pings_are_answered_while_sending():
    async with listening() as server, worker(server) as channels:
        calling = asyncio.create_task(call(channels, body(2 * MIB)))
        request = await server.request()
        pings = 0
        while not request.has_ended:
            request.peer.ping()
            pings += 1
            body_bytes = len(request.body)
            if not request.peer.h2.inbound_flow_control_window:
                await request.until(lambda pings=pings: request.peer.pongs == pings)
                assert len(request.body) == body_bytes
                request.peer.grant(WINDOW)
                request.grant(WINDOW)
            await request.until(lambda seen=body_bytes: len(request.body) > seen or request.has_ended)
        await request.until(lambda: request.peer.pongs == pings)
        assert request.message == DATA[: 2 * MIB]
        request.answer(REPLY)
        assert await calling == [REPLY]


async def test_a_large_message_lets_small_ones_pass():
    async with listening(auto_grant=True) as server, worker(server) as channels:
        large = asyncio.create_task(call(channels, body(8 * MIB)))
        first = await server.request()
        await first.until_body(MIB)
        small = asyncio.create_task(call(channels, body(200_000, start=MIB)))
        second = await server.request()
        await second.until_ended()
        assert not first.has_ended
        assert second.message == DATA[MIB : MIB + 200_000]
        await first.until_ended()
        assert first.message == DATA
        first.answer(REPLY)
        second.answer(REPLY)
        assert await large == await small == [REPLY]


async def test_a_closed_stream_window_holds_back_nobody_else(monkeypatch):
    turns = []
    take_turn = scatter.Feeder._take_turn
    monkeypatch.setattr(scatter.Feeder, "_take_turn", lambda feeder: (turns.append(1), take_turn(feeder)))
    async with listening(connection_window=64 * MIB) as server, worker(server) as channels:
        stuck = asyncio.create_task(call(channels, body(MIB)))
        first = await server.request()
        await first.until_body(WINDOW)
        before = len(turns)
        await asyncio.sleep(0.1)
        assert len(turns) <= before + 1  # nothing to do, nothing done
        other = asyncio.create_task(call(channels, body(70_000)))
        second = await server.request()
        second.grant(10_000)
        await second.until_ended()
        second.answer(REPLY)
        assert await other == [REPLY]
        first.grant(MIB)
        await first.until_ended()
        first.answer(REPLY)
        assert await stuck == [REPLY]


async def test_small_messages_with_room_are_not_scattered(monkeypatch):
    scattered = []
    add = scatter.Feeder.add
    monkeypatch.setattr(scatter.Feeder, "add", lambda feeder, one: (scattered.append(one.left), add(feeder, one))[1])
    async with listening(auto_grant=True, **WIDE) as server:

        async def pass_by(nbytes):
            async with worker(server) as channels:
                calling = asyncio.create_task(call(channels, body(nbytes)))
                request = await server.request()
                await request.until_ended()
                assert request.message == DATA[:nbytes]
                request.answer(REPLY)
                assert await calling == [REPLY]

        await pass_by(scatter.SCATTER_MIN_BYTES - 1)
        assert scattered == []
        await pass_by(scatter.SCATTER_MIN_BYTES)
        assert scattered == [scatter.SCATTER_MIN_BYTES + PREFIX]


async def test_buffers_are_let_go():
    pixels = bytearray(DATA[:MIB])
    async with listening(auto_grant=True) as server, worker(server) as channels:
        view = memoryview(pixels)
        calling = asyncio.create_task(call(channels, [b"head", view]))
        request = await server.request()
        await request.until_ended()
        request.answer(REPLY)
        await calling
        view.release()
        gc.collect()
        pixels.extend(b"may be resized only when nobody holds a view")


async def test_a_buffer_with_gaps_is_refused():
    gaps = memoryview(DATA)[: 2 * MIB : 2]
    async with listening(auto_grant=True) as server, worker(server) as channels:
        stream = channels.stream(GENERATE, [gaps], pb.GenerateResponse)
        with pytest.raises(TypeError):
            await stream.__aenter__()
        assert stream.sent.is_set()
        request = await server.request()
        await request.until_reset()


async def test_a_drain_tells_later_and_once():
    """Later: an aborted transport lets go of its buffers only after it has told its protocol."""
    drain, told = scatter.Drain(), []
    drain.add_done_callback(lambda: told.append("before"))
    waiting = asyncio.create_task(drain.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not drain.is_set()
    drain.set()
    drain.set()
    drain.add_done_callback(lambda: told.append("after"))
    assert told == []
    await asyncio.sleep(0)
    assert told == ["before", "after"]
