"""A vLLM engine made of grpcio, and calls to it: what the published servicers are, without a model."""

import asyncio
import hashlib
import random
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.channel import WorkerChannels
from engines.wire import field, splice
from tests.engines.h2_server import closed

SERVICE = "vllm.grpc.engine.VllmEngine"
GENERATE, HEALTH, TOKENIZER = (f"/{SERVICE}/{name}" for name in ("Generate", "HealthCheck", "GetTokenizer"))
MIB = 1 << 20
PIXELS = random.Random(11).randbytes(20 * MIB)
TLS = Path(__file__).parents[1] / "data" / "engine_tls"
CERTIFICATE, KEY = TLS / "localhost.crt", TLS / "localhost.key"


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
    await closed(channels)


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


def client_tls():
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    context.set_alpn_protocols(["h2"])
    return context
