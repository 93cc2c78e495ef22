"""Messages that do not arrive whole: reset, refused, answered early, cancelled, connections that end.

After every test: no task, no stream, no buffer is left, and every `sent` is set.
"""

import asyncio

import pytest
from h2.errors import ErrorCodes
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import link
from tests.engines.calls import (
    DATA,
    GENERATE,
    MIB,
    PREFIX,
    REPLY,
    WIDE,
    WINDOW,
    body,
    call,
    failing,
    worker,
)
from tests.engines.h2_server import listening


async def test_a_reset_with_a_closed_window():
    async with listening() as server, worker(server) as channels:
        calling = asyncio.create_task(failing(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.reset()
        error = await calling
        assert (error.status, error.started) == ("UNAVAILABLE", False)
        assert len(request.body) == WINDOW


async def test_a_reset_with_an_open_window():
    async with listening(**WIDE) as server, worker(server) as channels:
        calling = asyncio.create_task(failing(channels, body(8 * MIB)))
        request = await server.request()
        request.peer.transport.pause_reading()  # the client stands before a full socket
        await asyncio.sleep(0.05)
        request.reset()
        await asyncio.sleep(0.05)
        request.peer.transport.resume_reading()
        assert (await calling).status == "UNAVAILABLE"
        assert not request.has_ended


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_goaway_in_mid_message(is_open):
    async with listening(**(WIDE if is_open else {})) as server, worker(server) as channels:
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


async def test_a_connection_that_ends_lets_its_calls_finish():
    async with listening() as server, worker(server) as channels:
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


async def test_a_connection_that_ends_does_not_take_what_it_has_not_seen():
    async with listening() as server, worker(server) as channels:
        calling = asyncio.create_task(failing(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.peer.announce_end(0)
        error = await calling
        assert (error.status, error.started) == ("UNAVAILABLE", False)
        await request.until(lambda: request.peer.is_lost)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_a_connection_lost_in_mid_message(is_open):
    async with listening(**(WIDE if is_open else {})) as server, worker(server) as channels:
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


@pytest.mark.parametrize("resets", [False, True], ids=["", "reset"])
async def test_an_early_refusal_keeps_its_status(resets):
    async with listening() as server, worker(server) as channels:
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


@pytest.mark.parametrize("resets", [False, True], ids=["", "reset"])
async def test_an_early_answer_is_an_answer(resets):
    async with listening() as server, worker(server) as channels:
        calling = asyncio.create_task(call(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        request.answer(REPLY, REPLY)
        if resets:
            request.reset(ErrorCodes.NO_ERROR)
        assert await calling == [REPLY, REPLY]


@pytest.mark.parametrize("ending", ["goaway", "lost"])
async def test_a_complete_answer_survives_what_comes_behind(ending, monkeypatch):
    monkeypatch.setattr(link, "STREAM_WINDOW_BYTES", WINDOW)  # so small that reading the answer acknowledges some of it
    monkeypatch.setattr(link, "CONNECTION_WINDOW_BYTES", WINDOW)
    long_reply = pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="x" * 15_000))
    async with listening(auto_grant=True) as server, worker(server) as channels:
        stream = channels.stream(GENERATE, body(100_000), pb.GenerateResponse)
        async with stream:
            request = await server.request()
            await request.until_ended()
            request.respond()
            for _ in range(3):
                request.reply(long_reply)
            request.finish()
            if ending == "goaway":
                request.peer.goaway()
            else:
                request.peer.transport.close()
            await asyncio.sleep(0.05)
            assert [reply async for reply in stream] == [long_reply] * 3
        assert stream.sent.is_set()


async def test_a_status_behind_replies():
    async with listening(auto_grant=True) as server, worker(server) as channels:
        calling = asyncio.create_task(failing(channels, body(100_000)))
        request = await server.request()
        await request.until_ended()
        request.respond()
        request.reply(REPLY)
        request.finish(13, "out of cards")
        error = await calling
        assert (error.status, error.message, error.started) == ("INTERNAL", "out of cards", True)


async def test_an_answer_cut_short_is_an_error():
    async with listening(auto_grant=True) as server, worker(server) as channels:
        calling = asyncio.create_task(failing(channels, body(100_000)))
        request = await server.request()
        await request.until_ended()
        request.respond()
        request.peer.h2.send_data(request.stream_id, b"\0\0\0\0\x09only")
        request.finish()
        assert (await calling).status == "INTERNAL"


async def test_cancelled_before_a_window_that_stays_closed():
    async with listening() as server, worker(server) as channels:
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


@pytest.mark.parametrize("outer_first", [True, False])
async def test_a_cancellation_from_outside_wins(outer_first):
    async with listening() as server, worker(server) as channels:
        calling = asyncio.create_task(failing(channels, body(MIB)))
        request = await server.request()
        await request.until_body(WINDOW)
        call_of = next(iter(channels._senders[0]._protocol.processor.calls.values()))
        for ends in (calling.cancel, lambda: call_of.terminate("reset"))[:: 1 if outer_first else -1]:
            ends()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert calling.cancelled()


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
