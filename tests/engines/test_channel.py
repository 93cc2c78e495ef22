"""Channels of a worker against a real grpcio server, and against one that misbehaves as it is told."""

import asyncio
import hashlib
import random
import socket
import ssl
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import link
from engines.base import EngineError
from engines.channel import WorkerChannels, parse_url
from engines.wire import field, splice
from tests.engines.h2_server import listening

SERVICE = "vllm.grpc.engine.VllmEngine"
GENERATE, HEALTH, TOKENIZER = (f"/{SERVICE}/{name}" for name in ("Generate", "HealthCheck", "GetTokenizer"))
MIB = 1 << 20
PIXELS = random.Random(11).randbytes(20 * MIB)
TLS = Path(__file__).parents[1] / "data" / "engine_tls"
CERTIFICATE, KEY = TLS / "localhost.crt", TLS / "localhost.key"

both_paths = pytest.mark.parametrize("scatters", [True, False], ids=["scatter", "stock"])


class Engine:
    """A grpcio engine: `behave` is awaited with (request, context) inside Generate and yields the replies."""

    def __init__(self):
        self.metadata = None
        self.remaining = "unset"
        self.cancelled = asyncio.Event()
        self.refusal = None
        self.behave = self.digest

    async def digest(self, request, context):
        pixels = request.mm_inputs.pixel_values.inline
        yield reply(hashlib.sha256(pixels).hexdigest())

    async def generate(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        try:
            async for one in self.behave(request, context):
                yield one
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def health(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        return pb.HealthCheckResponse(healthy=True, message="fine")

    async def tokenizer(self, request, context):
        for number in range(100):
            yield pb.HealthCheckResponse(message=f"chunk {number}")


def reply(text):
    return pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=text))


@asynccontextmanager
async def serving(engine, *, port=0, options=(("grpc.max_receive_message_length", -1),), credentials=None):
    server = grpc.aio.server(options=list(options))

    def stream(method, request):
        return grpc.unary_stream_rpc_method_handler(method, request.FromString, lambda one: one.SerializeToString())

    handlers = {
        "Generate": stream(engine.generate, pb.GenerateRequest),
        "GetTokenizer": stream(engine.tokenizer, pb.HealthCheckRequest),
        "HealthCheck": grpc.unary_unary_rpc_method_handler(
            engine.health, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    address = f"127.0.0.1:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    server.address = f"127.0.0.1:{bound}"
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(url, **options):
    channels = WorkerChannels(url, **options)
    try:
        async with asyncio.timeout(60):
            yield channels
            await no_stream_left(channels)
    finally:
        channels.close()


async def no_stream_left(channels):
    for channel in (channels._control, *channels._senders):
        if channel._protocol is None:
            continue
        while not channel._protocol.feeder.is_idle:
            await asyncio.sleep(0.01)
        assert not channel._protocol.processor.streams
        assert channel.unsent_bytes == 0


def request_parts(nbytes, start=0):
    head = pb.GenerateRequest(
        request_id="r", mm_inputs=pb.MultimodalInputs(pixel_values=pb.TensorData(dtype="uint8", shape=[nbytes]))
    )
    pixels = memoryview(PIXELS)[start : start + nbytes]
    middle = nbytes // 3
    return splice(head.SerializeToString(), field((7, 2, 1), [pixels[:middle], pixels[middle:]]))


async def generate(channels, parts, **options):
    stream = channels.stream(GENERATE, parts, pb.GenerateResponse, **options)
    async with stream:
        replies = [one async for one in stream]
    await stream.sent.wait()
    return replies


async def health(channels, timeout_s=10.0, **options):
    return await channels.unary(HEALTH, pb.HealthCheckRequest(), pb.HealthCheckResponse, timeout_s=timeout_s, **options)


@both_paths
async def test_many_large_messages_at_once(scatters):
    """39 messages of 0 to 20 MB over three channels: every digest is right."""
    sizes = [0, 1, 65535, 65536, 20 * MIB, 17 * MIB + 3] + [random.Random(i).randrange(6 * MIB) for i in range(33)]
    engine = Engine()
    async with serving(engine) as server, connected(server.address, scatter=scatters) as channels:

        async def one(nbytes, start):
            (answer,) = await generate(channels, request_parts(nbytes, start))
            assert answer.complete.finish_reason == hashlib.sha256(PIXELS[start : start + nbytes]).hexdigest()

        await asyncio.gather(*(one(size, min(i * 1000, 20 * MIB - size)) for i, size in enumerate(sizes)))


@both_paths
async def test_health_is_answered_while_fifty_megabytes_go_out(scatters):
    engine = Engine()
    async with serving(engine) as server, connected(server.address, scatter=scatters) as channels:
        parts = [request_parts(0)[0], *field((7, 2, 1), [PIXELS, PIXELS, PIXELS[: 10 * MIB]])]
        assert (await health(channels)).healthy  # connected
        sending = asyncio.create_task(generate(channels, parts))
        while not channels.unsent_bytes:
            await asyncio.sleep(0)
        answered_meanwhile = 0
        while not sending.done():
            assert (await health(channels)).healthy
            answered_meanwhile += bool(channels.unsent_bytes)
        assert answered_meanwhile or not scatters  # the stock path may hold the loop until all is out
        (answer,) = await sending
        assert answer.complete.finish_reason == hashlib.sha256(PIXELS + PIXELS + PIXELS[: 10 * MIB]).hexdigest()


@both_paths
async def test_an_oversized_message_is_refused_with_the_engines_status(scatters):
    engine = Engine()
    options = [("grpc.max_receive_message_length", MIB)]
    async with serving(engine, options=options) as server, connected(server.address, scatter=scatters) as channels:
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


async def test_a_unary_call_in_vain_is_deadline_exceeded():
    async with listening() as server, connected(server.url) as channels:
        with pytest.raises(EngineError, match="no answer within 0.1 s") as caught:
            await health(channels, timeout_s=0.1)
        assert caught.value.status == "DEADLINE_EXCEEDED"
        request = await server.request()
        await request.until_reset()
        assert request.headers[":path"] == HEALTH
        assert "grpc-timeout" not in request.headers


@pytest.mark.parametrize("replies", [0, 2])
async def test_a_unary_call_has_one_reply(replies):
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        request = await server.request()
        request.answer(*[pb.HealthCheckResponse(healthy=True)] * replies)
        with pytest.raises(EngineError, match=f"{replies} replies") as caught:
            await calling
        assert caught.value.status == "INTERNAL"


async def test_an_http_status_without_grpc():
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        request = await server.request()
        request.peer.h2.send_headers(request.stream_id, [(":status", "503")], end_stream=True)
        request.peer.flush()
        with pytest.raises(EngineError) as caught:
            await calling
        assert caught.value.status == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("payload", "text"),
    [(b"\x01\0\0\0\x01x", "ompress"), (b"\0\0\0\0\x02\x12\xff", "cannot be read"), (b"\0\0\0", "cannot be read")],
    ids=["compressed", "garbage", "short"],
)
async def test_an_answer_that_cannot_be_read(payload, text):
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        request = await server.request()
        request.respond()
        request.peer.h2.send_data(request.stream_id, payload)
        request.finish()
        with pytest.raises(EngineError, match=text) as caught:
            await calling
        assert caught.value.status == "INTERNAL"


async def test_connection_refused_names_no_address():
    async with listening() as server:
        url = server.url
    async with connected(url) as channels:
        for attempt in (lambda: health(channels), lambda: generate(channels, request_parts(10))):
            with pytest.raises(EngineError) as caught:
                await attempt()
            assert (caught.value.status, caught.value.started) == ("UNAVAILABLE", False)
            assert caught.value.message == "worker cannot be reached: Connection refused"


async def test_a_failed_call_needs_its_buffers_no_more():
    async with listening() as server:
        url = server.url
    async with connected(url) as channels:
        stream = channels.stream(GENERATE, request_parts(MIB), pb.GenerateResponse)
        with pytest.raises(EngineError):
            await stream.__aenter__()
        assert stream.sent.is_set()


async def test_connecting_takes_its_time_limit_once_for_all_callers():
    """A listener that never shakes hands: five callers, one connection, one time limit."""
    accepted = []

    async def silent(reader, writer):
        accepted.append(writer)
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with connected(f"grpcs://127.0.0.1:{port}", connect_timeout_s=0.3) as channels:
        errors = await asyncio.gather(*(health(channels) for _ in range(5)), return_exceptions=True)
        assert {error.status for error in errors} == {"UNAVAILABLE"}
        assert {error.message for error in errors} == {"worker cannot be reached: timed out"}
        assert len(accepted) == 1
        leaving = asyncio.create_task(health(channels))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        waiting = asyncio.create_task(health(channels))
        await asyncio.sleep(0.05)
        assert len(accepted) == 2  # joined the attempt that the first caller left behind
        channels.close()
        with pytest.raises(EngineError) as caught:
            await waiting
        assert caught.value.status == "UNAVAILABLE"
    listener.close()
    await listener.wait_closed()


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


async def test_the_channel_with_the_fewest_unsent_bytes_is_taken():
    async with listening() as server, connected(server.url, sending_channels=2) as channels:
        calls, requests = [], []
        for nbytes in (3 * MIB, 2 * MIB, 2 * MIB, 100):
            calls.append(asyncio.create_task(generate(channels, request_parts(nbytes))))
            requests.append(await server.request())
        peers = [server.peers.index(request.peer) for request in requests]
        assert peers == [0, 1, 1, 0]
        assert channels.unsent_bytes > 7 * MIB
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert channels.unsent_bytes == 0


async def test_a_closed_worker():
    async with listening() as server, connected(server.url) as channels:
        waiting = asyncio.create_task(generate(channels, request_parts(MIB)))
        request = await server.request()
        await request.until_body(1000)
        channels.close()
        with pytest.raises(EngineError) as caught:
            await waiting
        assert caught.value.status == "UNAVAILABLE"
        with pytest.raises(EngineError, match="closed"):
            await health(channels)
        with pytest.raises(EngineError, match="closed"):
            channels.stream(GENERATE, request_parts(1), pb.GenerateResponse)
        channels.close()


async def test_waiting_for_a_stream_ends_with_the_connection():
    """The engine allows one stream; whoever waits for the second is woken when the connection goes."""
    async with listening(settings={"MAX_CONCURRENT_STREAMS": 1}) as server, connected(server.url) as channels:
        first = asyncio.create_task(health(channels))
        request = await server.request()
        second = asyncio.create_task(health(channels))
        await asyncio.sleep(0.05)
        assert server.arrivals.empty()
        request.peer.transport.abort()
        for call in (first, second):
            with pytest.raises(EngineError) as caught:
                await call
            assert caught.value.status == "UNAVAILABLE"


async def test_waiting_for_a_stream_goes_on_when_one_is_over():
    async with listening(settings={"MAX_CONCURRENT_STREAMS": 1}) as server, connected(server.url) as channels:
        calls = [asyncio.create_task(health(channels)) for _ in range(3)]
        for _ in calls:
            (await server.request()).answer(pb.HealthCheckResponse(healthy=True))
        assert all([(await call).healthy for call in calls])


async def test_a_silent_peer_is_given_up(monkeypatch):
    monkeypatch.setattr(link, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(link, "KEEPALIVE_TIMEOUT_S", 0.2)
    async with listening() as server, connected(server.url) as channels:
        waiting = asyncio.create_task(generate(channels, request_parts(30 * 1000)))
        request = await server.request()
        await asyncio.sleep(0.5)  # pings are answered: nothing happens
        assert not waiting.done()
        request.peer.transport.pause_reading()
        with pytest.raises(EngineError, match="keepalive") as caught:
            await waiting
        assert caught.value.status == "UNAVAILABLE"


async def test_an_idle_connection_is_kept_alive(monkeypatch):
    monkeypatch.setattr(link, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(link, "KEEPALIVE_TIMEOUT_S", 0.05)
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        (await server.request()).answer(pb.HealthCheckResponse(healthy=True))
        await calling
        pings = []
        peer = server.peers[0]
        receive = peer.h2.receive_data

        def count(data):
            pings.append(data)
            return receive(data)

        monkeypatch.setattr(peer.h2, "receive_data", count)
        await asyncio.sleep(0.4)
        assert len(pings) >= 3
        assert channels._control.is_connected


async def test_sockets_are_set_up():
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        (await server.request()).answer(pb.HealthCheckResponse(healthy=True))
        await calling
        sock = channels._control._protocol._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        remote = server.peers[0].h2.remote_settings
        assert remote.initial_window_size == 16 * MIB
        assert server.peers[0].h2.outbound_flow_control_window > 32 * MIB - 100  # less this reply


def client_tls():
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    context.set_alpn_protocols(["h2"])
    return context


@both_paths
async def test_tls_with_grpcio(scatters):
    engine = Engine()
    credentials = grpc.ssl_server_credentials([(KEY.read_bytes(), CERTIFICATE.read_bytes())])
    async with (
        serving(engine, credentials=credentials) as server,
        connected(f"grpcs://{server.address}", tls=client_tls(), scatter=scatters) as channels,
    ):
        assert (await health(channels)).healthy
        for nbytes in (0, 65536, 9 * MIB):
            (answer,) = await generate(channels, request_parts(nbytes))
            assert answer.complete.finish_reason == hashlib.sha256(PIXELS[:nbytes]).hexdigest()


async def test_tls_cancelled_before_a_peer_that_does_not_read():
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE, KEY)
    tls.set_alpn_protocols(["h2"])
    wide = {"settings": {"INITIAL_WINDOW_SIZE": 64 * MIB}, "connection_window": 128 * MIB}
    async with listening(tls=tls, **wide) as server:
        url = server.url.replace("grpc://", "grpcs://")
        async with connected(url, tls=client_tls()) as channels:
            stream = channels.stream(GENERATE, request_parts(20 * MIB), pb.GenerateResponse)
            calling = asyncio.create_task(stream.__aenter__())
            request = await server.request()
            request.peer.transport.pause_reading()
            await asyncio.sleep(0.2)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            request.peer.transport.resume_reading()
            await stream.sent.wait()
            await request.until_reset()


async def test_an_unknown_authority_is_refused():
    credentials = grpc.ssl_server_credentials([(KEY.read_bytes(), CERTIFICATE.read_bytes())])
    async with (
        serving(Engine(), credentials=credentials) as server,
        connected(f"grpcs://{server.address}") as channels,
    ):
        with pytest.raises(EngineError, match="self.signed certificate") as caught:
            await health(channels)
        assert caught.value.status == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("grpc://engine:50051", ("engine", 50051, False)),
        ("grpcs://engine:443", ("engine", 443, True)),
        ("10.0.0.7:9000", ("10.0.0.7", 9000, False)),
        ("[::1]:9000", ("::1", 9000, False)),
        ("grpc://[fd00::1]:9000/", ("fd00::1", 9000, False)),
    ],
)
def test_urls(url, address):
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    ["http://engine:80", "ipc:///tmp/x", "grpc://engine", "engine", "grpc://:1", "grpc://e:1/x", "grpc://e:99999", ""],
)
def test_no_urls(url):
    with pytest.raises(ValueError):
        parse_url(url)


def test_grpcio_is_never_imported():
    code = "import sys, engines.channel, smg_grpc_proto.generated.vllm_engine_pb2; print('grpc' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
