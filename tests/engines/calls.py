"""Calls to `tests.engines.h2_server`: bodies, channels of which nothing may be left, calls that work and calls that
fail."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.base import EngineError
from engines.channel import WorkerChannels
from tests.engines.h2_server import closed

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
WINDOW = 65535
MIB = 1 << 20
PREFIX = 5  # gRPC's length prefix
DATA = random.Random(7).randbytes(8 * MIB)
REPLY = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1, 2, 3]))
WIDE = {"settings": {"INITIAL_WINDOW_SIZE": 64 * MIB, "MAX_FRAME_SIZE": 4 * MIB}, "connection_window": 128 * MIB}


def body(nbytes, start=0):
    """A message of `nbytes` bytes in three parts."""
    view = memoryview(DATA)[start : start + nbytes]
    return [bytes(view[:20]), view[20 : nbytes // 2], view[max(20, nbytes // 2) :]]


@asynccontextmanager
async def worker(server, **options):
    """Channels to `server`; in the end nothing of them may be left."""
    before = asyncio.all_tasks()
    channels = WorkerChannels(server.url, sending_channels=1, **options)
    try:
        async with asyncio.timeout(30):  # a hanging uvloop does not hear pytest-timeout's signal
            yield channels
            await settled(channels)
    finally:
        channels.close()
    await closed(channels)
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
        assert not protocol.processor.calls
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
