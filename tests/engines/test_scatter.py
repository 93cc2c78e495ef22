"""The scatter sender, and the stock path behind the same function, against a server that does what it is told.

After every test: no task, no stream, no buffer is left, and every `sent` is set.
"""

import asyncio
import gc
import random
from contextlib import asynccontextmanager

import pytest
from grpclib.exceptions import StreamTerminatedError
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import link, scatter
from engines.base import EngineError
from engines.channel import WorkerChannels
from engines.link import CallWrapper
from tests.engines.h2_server import listening

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
WINDOW = 65535
MIB = 1 << 20
PREFIX = 5  # gRPC's length prefix
DATA = random.Random(7).randbytes(8 * MIB)
REPLY = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1, 2, 3]))
WIDE = {"settings": {"INITIAL_WINDOW_SIZE": 64 * MIB, "MAX_FRAME_SIZE": 4 * MIB}, "connection_window": 128 * MIB}

both_paths = pytest.mark.parametrize("scatters", [True, False], ids=["scatter", "stock"])


def body(nbytes, start=0):
    """A message of `nbytes` bytes in three parts."""
    view = memoryview(DATA)[start : start + nbytes]
    return [bytes(view[:20]), view[20 : nbytes // 2], view[max(20, nbytes // 2) :]]


@asynccontextmanager
async def worker(server, scatters=True, **options):
    """Channels to `server`; in the end nothing of them may be left."""
    before = asyncio.all_tasks()
    channels = WorkerChannels(server.url, scatter=scatters, sending_channels=1, **options)
    try:
        async with asyncio.timeout(30):  # a hanging uvloop does not hear pytest-timeout's signal
            yield channels
            await settled(channels)
    finally:
        channels.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def settled(channels):
    """Waits until every feeder is idle and the sockets took everything, then checks that no stream is left."""
    for channel in (channels._control, *channels._senders):
        protocol = channel._protocol
        if protocol is None:
            continue
        async with asyncio.timeout(10):
            while not protocol.feeder.is_idle or protocol._transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
        assert not protocol.processor.streams
        if channel.is_connected:
            assert protocol.connection._connection.open_outbound_streams == 0
        assert channel.unsent_bytes == 0


async def call(channels, parts):
    """A whole call: its replies."""
    stream = channels.stream(GENERATE, parts, pb.GenerateResponse)
    async with stream:
        replies = [reply async for reply in stream]
    await asyncio.wait_for(stream.sent.wait(), 5)
    return replies


async def failing(channels, parts):
    """A call that must fail: its error."""
    stream = channels.stream(GENERATE, parts, pb.GenerateResponse)
    with pytest.raises(EngineError) as caught:
        async with stream:
            async for _ in stream:
                pass
    await asyncio.wait_for(stream.sent.wait(), 5)
    return caught.value


@both_paths
@pytest.mark.parametrize(
    "nbytes",
    [0, 1, 16384 - PREFIX, 16384 - PREFIX + 1, WINDOW - PREFIX - 1, WINDOW - PREFIX, WINDOW - PREFIX + 1, WINDOW + 1]
    + [2 * WINDOW - PREFIX, MIB - PREFIX, MIB - PREFIX + 1, 3 * MIB + 17],
)
async def test_a_message_of_any_size_arrives_whole(scatters, nbytes):
    async with listening(auto_grant=True) as server, worker(server, scatters) as channels:
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


@both_paths
async def test_a_window_reopened_byte_by_byte(scatters):
    async with listening() as server, worker(server, scatters) as channels:
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


@both_paths
async def test_a_reset_with_a_closed_window(scatters):
    async with listening() as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.reset()
        error = await calling
        assert (error.status, error.started) == ("UNAVAILABLE", False)
        assert len(request.body) == WINDOW


@both_paths
async def test_a_reset_with_an_open_window(scatters):
    async with listening(**WIDE) as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(8 * MIB)))
        request = await server.request()
        request.peer.transport.pause_reading()  # the client stands before a full socket
        await asyncio.sleep(0.05)
        request.reset()
        await asyncio.sleep(0.05)
        request.peer.transport.resume_reading()
        assert (await calling).status == "UNAVAILABLE"
        assert not request.has_ended


@both_paths
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_goaway_in_mid_message(scatters, is_open):
    async with listening(**(WIDE if is_open else {})) as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(8 * MIB)))
        request = await server.request()
        if is_open:
            request.peer.transport.pause_reading()
            await asyncio.sleep(0.05)
        else:
            await request.until_body(WINDOW)
        request.peer.goaway()
        error = await calling
        assert (error.status, error.started) == ("UNAVAILABLE", False)
        again = asyncio.create_task(call(channels, body(1000)))
        second = await server.request()
        await second.until_ended()
        second.answer(REPLY)
        assert await again == [REPLY]
        assert len(server.peers) == 2


@both_paths
async def test_a_connection_that_ends_lets_its_calls_finish(scatters):
    async with listening() as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(call(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.peer.announce_end(2**31 - 1)
        await asyncio.sleep(0.05)
        request.peer.announce_end(request.stream_id)
        await asyncio.sleep(0.05)
        meanwhile = asyncio.create_task(call(channels, body(1000)))
        second = await server.request()
        assert second.peer is not request.peer
        await second.until_ended()
        second.answer(REPLY)
        assert await meanwhile == [REPLY]
        request.peer.grant(MIB)
        request.grant(MIB)
        await request.until_ended()
        assert request.message == DATA[:MIB]
        assert not request.peer.is_lost
        request.answer(REPLY)
        assert await calling == [REPLY]
        await request.until(lambda: request.peer.is_lost)


@both_paths
async def test_a_connection_that_ends_does_not_take_what_it_has_not_seen(scatters):
    async with listening() as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.peer.announce_end(0)
        error = await calling
        assert (error.status, error.started) == ("UNAVAILABLE", False)
        await request.until(lambda: request.peer.is_lost)


@both_paths
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_a_connection_lost_in_mid_message(scatters, is_open):
    async with listening(**(WIDE if is_open else {})) as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(8 * MIB)))
        request = await server.request()
        if is_open:
            request.peer.transport.pause_reading()
            await asyncio.sleep(0.05)
        else:
            await request.until_body(WINDOW)
        request.peer.transport.abort()
        assert (await calling).status == "UNAVAILABLE"
        again = asyncio.create_task(call(channels, body(1000)))
        second = await server.request()
        await second.until_ended()
        second.answer(REPLY)
        assert await again == [REPLY]


@both_paths
@pytest.mark.parametrize("resets", [False, True], ids=["", "reset"])
async def test_an_early_refusal_keeps_its_status(scatters, resets):
    async with listening() as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.refuse(8, "too many, %E2%82%AC")
        if resets:
            request.reset(ErrorCodes.NO_ERROR)
        error = await calling
        assert (error.status, error.message, error.started) == ("RESOURCE_EXHAUSTED", "too many, €", False)
        if not resets:
            await request.until_reset()
        assert len(request.body) == WINDOW


@both_paths
@pytest.mark.parametrize("resets", [False, True], ids=["", "reset"])
async def test_an_early_answer_is_an_answer(scatters, resets):
    async with listening() as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(call(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.answer(REPLY, REPLY)
        if resets:
            request.reset(ErrorCodes.NO_ERROR)
        assert await calling == [REPLY, REPLY]


@both_paths
@pytest.mark.parametrize("ending", ["goaway", "lost"])
async def test_a_complete_answer_survives_what_comes_behind(scatters, ending):
    async with listening(auto_grant=True) as server, worker(server, scatters) as channels:
        stream = channels.stream(GENERATE, body(100_000), pb.GenerateResponse)
        async with stream:
            request = await server.request()
            await request.until_ended()
            request.respond()
            for _ in range(3):
                request.reply(REPLY)
            request.finish()
            if ending == "goaway":
                request.peer.goaway()
            else:
                request.peer.transport.close()
            await asyncio.sleep(0.05)
            assert [reply async for reply in stream] == [REPLY] * 3
        assert stream.sent.is_set()


@both_paths
async def test_a_status_behind_replies(scatters):
    async with listening(auto_grant=True) as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(100_000)))
        request = await server.request()
        await request.until_ended()
        request.respond()
        request.reply(REPLY)
        request.finish(13, "out of cards")
        error = await calling
        assert (error.status, error.message, error.started) == ("INTERNAL", "out of cards", True)


@both_paths
async def test_an_answer_cut_short_is_an_error(scatters):
    async with listening(auto_grant=True) as server, worker(server, scatters) as channels:
        calling = asyncio.create_task(failing(channels, body(100_000)))
        request = await server.request()
        await request.until_ended()
        request.respond()
        request.peer.h2.send_data(request.stream_id, b"\0\0\0\0\x09only")
        request.finish()
        assert (await calling).status == "INTERNAL"


@both_paths
async def test_cancelled_before_a_window_that_stays_closed(scatters):
    async with listening() as server, worker(server, scatters) as channels:
        stream = channels.stream(GENERATE, body(MIB), pb.GenerateResponse)
        calling = asyncio.create_task(stream.__aenter__())
        request = await server.request()
        await request.until_body(WINDOW)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert calling.cancelled()
        await request.until_reset()
        assert request.reset_code == ErrorCodes.CANCEL
        await asyncio.wait_for(stream.sent.wait(), 5)
        # the connection lives: another request passes once it has a window
        request.peer.grant(WINDOW)
        again = asyncio.create_task(call(channels, body(1000)))
        second = await server.request()
        await second.until_ended()
        second.answer(REPLY)
        assert await again == [REPLY]
        assert len(server.peers) == 1


async def test_a_cancelled_message_drains_before_its_buffers_are_free():
    pixels = bytearray(DATA)
    async with listening(**WIDE) as server, worker(server) as channels:
        stream = channels.stream(GENERATE, [memoryview(pixels)], pb.GenerateResponse)
        calling = asyncio.create_task(stream.__aenter__())
        request = await server.request()
        request.peer.transport.pause_reading()
        await asyncio.sleep(0.1)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert not stream.sent.is_set()
        freed = []
        stream.sent.add_done_callback(lambda: freed.append(True))
        request.peer.transport.resume_reading()
        await stream.sent.wait()
        pixels[:] = bytes(len(pixels))  # the next owner writes
        await request.until_reset()
        assert freed
        assert len(request.body) > PREFIX
        assert request.body[PREFIX:] == DATA[: len(request.body) - PREFIX]
        assert not request.has_ended


async def test_a_peer_that_does_not_drain_is_aborted(monkeypatch):
    monkeypatch.setattr(link, "DRAIN_LIMIT_S", 0.2)
    async with listening(**WIDE) as server, worker(server) as channels:
        stream = channels.stream(GENERATE, body(8 * MIB), pb.GenerateResponse)
        calling = asyncio.create_task(stream.__aenter__())
        request = await server.request()
        request.peer.transport.pause_reading()
        await asyncio.sleep(0.1)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert not stream.sent.is_set()
        await asyncio.wait_for(stream.sent.wait(), 5)
        assert not channels._senders[0].is_connected


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


@both_paths
async def test_settings_changed_in_mid_message(scatters):
    async with listening(connection_window=64 * MIB) as server, worker(server, scatters) as channels:
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


@both_paths
async def test_pings_are_answered_while_sending(scatters):
    async with listening() as server, worker(server, scatters) as channels:
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


async def test_a_closed_stream_window_holds_back_nobody_else():
    async with listening(connection_window=64 * MIB) as server, worker(server) as channels:
        stuck = asyncio.create_task(call(channels, body(MIB)))
        first = await server.request()
        await first.until_body(WINDOW)
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


async def test_small_or_unscattered_messages_take_the_stock_path(monkeypatch):
    scattered = []
    add = scatter.Feeder.add
    monkeypatch.setattr(scatter.Feeder, "add", lambda feeder, one: (scattered.append(one.left), add(feeder, one))[1])
    async with listening(auto_grant=True, **WIDE) as server:

        async def pass_by(nbytes, scatters):
            async with worker(server, scatters) as channels:
                calling = asyncio.create_task(call(channels, body(nbytes)))
                request = await server.request()
                await request.until_ended()
                assert request.message == DATA[:nbytes]
                request.answer(REPLY)
                assert await calling == [REPLY]

        await pass_by(scatter.SCATTER_MIN_BYTES - 1, True)
        await pass_by(MIB, False)
        assert scattered == []
        await pass_by(scatter.SCATTER_MIN_BYTES, True)
        assert scattered == [scatter.SCATTER_MIN_BYTES + PREFIX]
        monkeypatch.delattr(H2Connection, "end_stream")  # a library that looks different
        await pass_by(MIB, True)
        assert len(scattered) == 1


@both_paths
async def test_buffers_are_let_go(scatters):
    pixels = bytearray(DATA[:MIB])
    async with listening(auto_grant=True) as server, worker(server, scatters) as channels:
        view = memoryview(pixels)
        calling = asyncio.create_task(call(channels, [b"head", view]))
        request = await server.request()
        await request.until_ended()
        request.answer(REPLY)
        await calling
        view.release()
        gc.collect()
        pixels.extend(b"may be resized only when nobody holds a view")


@both_paths
async def test_a_buffer_with_gaps_is_refused(scatters):
    gaps = memoryview(DATA)[: 2 * MIB : 2]
    async with listening(auto_grant=True) as server, worker(server, scatters) as channels:
        stream = channels.stream(GENERATE, [gaps], pb.GenerateResponse)
        if scatters:
            with pytest.raises(TypeError):
                await stream.__aenter__()
            assert stream.sent.is_set()
            request = await server.request()
            await request.until_reset()


async def test_a_task_is_not_left_marked_as_cancelled():
    wrapper, task = CallWrapper(), asyncio.current_task()
    with pytest.raises(StreamTerminatedError), wrapper:
        asyncio.get_running_loop().call_soon(wrapper.cancel, StreamTerminatedError("reset"))
        await asyncio.sleep(10)
    assert task.cancelling() == 0
    with pytest.raises(StreamTerminatedError), wrapper:  # and it stays ended
        pass


async def test_an_interrupted_step_can_be_followed_by_others():
    wrapper = CallWrapper()
    with pytest.raises(scatter.AnsweredEarly), wrapper:
        asyncio.get_running_loop().call_soon(wrapper.interrupt)
        await asyncio.sleep(10)
    assert asyncio.current_task().cancelling() == 0
    with wrapper:
        await asyncio.sleep(0)


@pytest.mark.parametrize("outer_first", [True, False])
async def test_a_cancellation_from_outside_wins(outer_first):
    wrapper = CallWrapper()

    async def inside():
        with wrapper:
            await asyncio.sleep(10)

    task = asyncio.create_task(inside())
    await asyncio.sleep(0)
    if outer_first:
        task.cancel()
    wrapper.cancel(StreamTerminatedError("reset"))
    if not outer_first:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_time_out_around_a_reset_is_no_confusion():
    """asyncio.timeout counts cancellations: one that grpclib leaves behind would turn into a TimeoutError later."""
    async with listening() as server, worker(server) as channels:

        async def caller():
            assert (await failing(channels, body(MIB))).status == "UNAVAILABLE"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asyncio.sleep(10)
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0))
            return asyncio.current_task().cancelling()

        task = asyncio.create_task(caller())
        request = await server.request()
        await request.until_body(WINDOW)
        request.reset()
        assert await task == 0
