"""Channels of a worker against a real grpcio server."""

import asyncio
import hashlib
import random

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.base import EngineError
from engines.channel import worker_tls
from engines.wire import field, splice
from tests.engines.grpcio_engine import (
    CERTIFICATE,
    GENERATE,
    KEY,
    MIB,
    PIXELS,
    TOKENIZER,
    Engine,
    client_tls,
    connected,
    generate,
    health,
    reply,
    request_parts,
    serving,
)


async def test_many_large_messages_at_once():
    """39 messages of 0 to 20 MB over three channels: every digest is right."""
    sizes = [0, 1, 65535, 65536, 20 * MIB, 17 * MIB + 3] + [random.Random(i).randrange(6 * MIB) for i in range(33)]
    engine = Engine()
    async with serving(engine) as server, connected(server.address) as channels:

        async def one(nbytes, start):
            (answer,) = await generate(channels, request_parts(nbytes, start))
            assert answer.complete.finish_reason == hashlib.sha256(PIXELS[start : start + nbytes]).hexdigest()

        await asyncio.gather(*(one(size, min(i * 1000, 20 * MIB - size)) for i, size in enumerate(sizes)))


async def test_health_is_answered_while_fifty_megabytes_go_out():
    engine = Engine()
    async with serving(engine) as server, connected(server.address) as channels:
        parts = [request_parts(0)[0], *field((7, 2, 1), [PIXELS, PIXELS, PIXELS[: 10 * MIB]])]
        assert (await health(channels)).healthy  # connected
        sending = asyncio.create_task(generate(channels, parts))
        while not channels.unsent_bytes:
            await asyncio.sleep(0)
        answered_meanwhile = 0
        while not sending.done():
            assert (await health(channels)).healthy
            answered_meanwhile += bool(channels.unsent_bytes)
        assert answered_meanwhile
        (answer,) = await sending
        assert answer.complete.finish_reason == hashlib.sha256(PIXELS + PIXELS + PIXELS[: 10 * MIB]).hexdigest()


async def test_an_oversized_message_is_refused_with_the_engines_status():
    engine = Engine()
    options = [("grpc.max_receive_message_length", MIB)]
    async with serving(engine, options=options) as server, connected(server.address) as channels:
        with pytest.raises(EngineError, match="larger than max") as caught:
            await generate(channels, request_parts(12 * MIB))
        assert (caught.value.status, caught.value.started) == ("RESOURCE_EXHAUSTED", False)
        assert (await generate(channels, request_parts(1000)))[0].complete.finish_reason
        assert (await health(channels)).healthy


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_every_status_is_kept(code):
    engine = Engine()
    engine.refusal = (code, "  because of ünïcode\nand 100 % reasons ")

    async def refuse(request, context):
        await context.abort(*engine.refusal)
        yield

    async def break_off(request, context):
        yield reply("one")
        await context.abort(*engine.refusal)

    async with serving(engine) as server, connected(f"grpc://{server.address}") as channels:
        with pytest.raises(EngineError) as unary:
            await health(channels)
        engine.behave = refuse
        with pytest.raises(EngineError) as start:
            await generate(channels, request_parts(100))
        engine.behave = break_off
        with pytest.raises(EngineError) as later:
            await generate(channels, request_parts(100))
        for caught, started in ((unary, False), (start, False), (later, True)):
            error = caught.value
            assert (error.status, error.message) == (code.name, "because of ünïcode\nand 100 % reasons")
            assert (error.started, error.worker) == (started, f"grpc://{server.address}")


async def test_long_details_are_cut():
    engine = Engine()
    engine.refusal = (grpc.StatusCode.INTERNAL, "x" * 5000)
    async with serving(engine) as server, connected(server.address) as channels:
        with pytest.raises(EngineError) as caught:
            await health(channels)
        assert len(caught.value.message) == 1000 and caught.value.message.endswith("x…")


async def test_no_deadline_is_sent_and_metadata_is():
    engine = Engine()
    async with serving(engine) as server, connected(server.address) as channels:
        await health(channels, metadata={"traceparent": "00-1"})
        assert engine.remaining is None
        assert engine.metadata["traceparent"] == "00-1"
        await generate(channels, request_parts(10), metadata={"tracestate": "a=b"})
        assert engine.remaining is None
        assert engine.metadata["tracestate"] == "a=b"
        await health(channels)
        assert set(engine.metadata) == {"user-agent"}


async def test_a_new_connection_after_the_engine_was_restarted():
    engine = Engine()
    async with serving(engine) as server, connected(server.address) as channels:
        assert (await health(channels)).healthy
        assert await generate(channels, request_parts(100))
        address = server.address
        await server.stop(0)
        with pytest.raises(EngineError) as caught:
            await health(channels)
        assert caught.value.status == "UNAVAILABLE"
        async with serving(Engine(), port=int(address.rpartition(":")[2])):
            assert (await health(channels)).healthy
            assert await generate(channels, request_parts(100))


async def test_a_generation_is_lost_with_its_engine():
    engine, begun = Engine(), asyncio.Event()

    async def endless(request, context):
        yield reply("one")
        begun.set()
        await asyncio.sleep(60)

    engine.behave = endless
    async with serving(engine) as server, connected(server.address) as channels:
        calling = asyncio.create_task(generate(channels, request_parts(MIB)))
        await begun.wait()
        await server.stop(0)
        with pytest.raises(EngineError) as caught:
            await calling
        assert (caught.value.status, caught.value.started) == ("UNAVAILABLE", True)


async def test_a_generation_outlives_the_shutdown_of_its_engine():
    """grpcio's graceful stop: GOAWAY, then the generation goes on to its end."""
    engine, begun, go_on = Engine(), asyncio.Event(), asyncio.Event()

    async def long(request, context):
        yield reply("one")
        begun.set()
        await go_on.wait()
        yield reply("two")

    engine.behave = long
    async with serving(engine) as server, connected(server.address, sending_channels=1) as channels:
        calling = asyncio.create_task(generate(channels, request_parts(MIB)))
        await begun.wait()
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError) as caught:
            await generate(channels, request_parts(10))
        assert caught.value.status == "UNAVAILABLE"
        go_on.set()
        assert [one.complete.finish_reason for one in await calling] == ["one", "two"]
        await stopping


async def test_many_cancelled_messages_never_show_anothers_bytes():
    """Buffers are reused as soon as `sent` is set; the engine must never see a byte of the next owner."""
    seen, dice = [], random.Random(3)

    async def check(request, context):
        pixels = request.mm_inputs.pixel_values.inline
        owner = int(request.request_id)
        seen.append(pixels.count(owner) == len(pixels) > 0)
        yield reply("ok")

    engine = Engine()
    engine.behave = check
    free = asyncio.Queue()
    for _ in range(6):
        free.put_nowait(bytearray(3 * MIB))
    async with serving(engine) as server, connected(server.address, sending_channels=2) as channels:

        async def one(number):
            buffer = await free.get()
            owner = 1 + number % 250
            buffer[:] = bytes([owner]) * len(buffer)
            head = pb.GenerateRequest(request_id=str(owner)).SerializeToString()
            parts = splice(head, field((7, 2, 1), [memoryview(buffer)]))
            stream = channels.stream(GENERATE, parts, pb.GenerateResponse)
            stream.sent.add_done_callback(lambda: free.put_nowait(buffer))
            limit = dice.choice([0.001, 0.005, 0.02, 30])
            try:
                async with asyncio.timeout(limit), stream:
                    return [answer async for answer in stream]
            except TimeoutError:
                return None

        answers = await asyncio.gather(*(one(number) for number in range(150)))
        assert all(seen)
        assert len(seen) >= sum(answer is not None for answer in answers) >= 20
        assert answers.count(None) >= 20


@pytest.mark.parametrize("leaves", ["cancelled", "early"])
async def test_leaving_tells_the_engine(leaves):
    engine = Engine()

    async def endless(request, context):
        while True:
            yield reply("more")
            await asyncio.sleep(0.01)

    engine.behave = endless
    async with serving(engine) as server, connected(server.address) as channels:
        if leaves == "early":
            async with channels.stream(GENERATE, request_parts(MIB), pb.GenerateResponse) as stream:
                async for _ in stream:
                    break
            assert [one async for one in stream] == []
        else:
            calling = asyncio.create_task(generate(channels, request_parts(MIB)))
            await asyncio.sleep(0.3)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
        await engine.cancelled.wait()


async def test_a_server_stream_on_the_control_channel():
    engine = Engine()
    async with serving(engine) as server, connected(server.address) as channels:
        stream = channels.server_stream(TOKENIZER, pb.HealthCheckRequest(), pb.HealthCheckResponse)
        async with stream:
            chunks = [one.message async for one in stream]
        assert chunks == [f"chunk {number}" for number in range(100)]
        assert [channel.is_connected for channel in channels._senders] == [False] * 3


async def test_tls_with_grpcio():
    engine = Engine()
    credentials = grpc.ssl_server_credentials([(KEY.read_bytes(), CERTIFICATE.read_bytes())])
    async with (
        serving(engine, credentials=credentials) as server,
        connected(f"grpcs://{server.address}", tls=client_tls()) as channels,
    ):
        assert (await health(channels)).healthy
        for nbytes in (0, 65536, 9 * MIB):
            (answer,) = await generate(channels, request_parts(nbytes))
            assert answer.complete.finish_reason == hashlib.sha256(PIXELS[:nbytes]).hexdigest()


async def test_an_unknown_authority_is_refused():
    credentials = grpc.ssl_server_credentials([(KEY.read_bytes(), CERTIFICATE.read_bytes())])
    async with (
        serving(Engine(), credentials=credentials) as server,
        connected(f"grpcs://{server.address}") as channels,
    ):
        with pytest.raises(EngineError, match="self.signed certificate") as caught:
            await health(channels)
        assert caught.value.status == "UNAVAILABLE"


async def test_a_worker_that_asks_for_a_certificate():
    """Shown one it trusts it answers; without one it does not."""
    pair = (KEY.read_bytes(), CERTIFICATE.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], CERTIFICATE.read_bytes(), require_client_auth=True)
    known = worker_tls([str(CERTIFICATE)], (str(CERTIFICATE), str(KEY)))
    async with serving(Engine(), credentials=credentials) as server:
        async with connected(f"grpcs://{server.address}", tls=known) as channels:
            assert (await health(channels)).healthy
        async with connected(f"grpcs://{server.address}", tls=worker_tls([str(CERTIFICATE)])) as channels:
            with pytest.raises(EngineError) as caught:
                await health(channels)
            assert caught.value.status == "UNAVAILABLE"
