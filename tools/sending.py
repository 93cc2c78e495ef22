"""What sending pixels costs: our channel with scatter-gather frames, and the same call over grpclib as it comes.

    .venv/bin/python tools/sending.py [--mib 50] [--calls 6] [--pairs 2]

A grpc.aio server in a process of its own receives `--calls` messages of `--mib` MiB, in alternation; printed is the
CPU this process spent for 100 MiB, the rate, and the lag of its event loop while it sent.
"""

import argparse
import asyncio
import mmap
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from grpclib.client import Channel, UnaryStreamMethod
from grpclib.encoding.proto import ProtoCodec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.channel import WorkerChannels
from engines.wire import Part, field, splice
from tools.usage import Usage, count

SERVICE = "vllm.grpc.engine.VllmEngine"
METHOD = f"/{SERVICE}/Generate"
MIB = 1 << 20


async def serve() -> None:
    """An engine that only counts the bytes of the tensor; prints its port."""
    import grpc.aio

    async def generate(request: Any, context: Any) -> Any:
        size = len(request.mm_inputs.pixel_values.inline)
        yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=str(size)))

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.unary_stream_rpc_method_handler(
        generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


class BytesCodec(ProtoCodec):
    """A request that is already bytes goes out as it is."""

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)


class Ours:
    name = "scatter"

    def __init__(self, port: int) -> None:
        self._channels = WorkerChannels(f"127.0.0.1:{port}")

    async def answers(self, message: list[Part]) -> list[Any]:
        async with self._channels.stream(METHOD, message, pb.GenerateResponse) as stream:
            return [answer async for answer in stream]

    def close(self) -> None:
        self._channels.close()


class AsItComes:
    name = "grpclib"

    def __init__(self, port: int) -> None:
        self._channel = Channel("127.0.0.1", port, codec=BytesCodec())
        self._generate = UnaryStreamMethod(self._channel, METHOD, bytes, pb.GenerateResponse)

    async def answers(self, message: list[Part]) -> list[Any]:
        return await self._generate(b"".join(message))

    def close(self) -> None:
        self._channel.close()


async def send(channel: Ours | AsItComes, pixels: memoryview) -> None:
    message = splice(b"", field((7, 2, 1), [pixels]))  # GenerateRequest.mm_inputs.pixel_values.inline
    answers = await channel.answers(message)
    assert answers[0].complete.finish_reason == str(len(pixels))


async def watch(lags: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - begun - 0.001)


async def measure(channel: Ours | AsItComes, pixels: memoryview, calls: int) -> None:
    await send(channel, pixels)
    lags: list[float] = []
    watcher = asyncio.create_task(watch(lags))
    await asyncio.sleep(0.01)
    cpu, begun = cpu_s(), time.perf_counter()
    for _ in range(calls):
        await send(channel, pixels)
    cpu, wall = cpu_s() - cpu, time.perf_counter() - begun
    watcher.cancel()
    channel.close()
    sent, lags = len(pixels) * calls / MIB, sorted(lags)
    print(
        f"{channel.name}  {cpu * 100 / sent:.3f} CPU s / 100 MiB  {sent / wall:6.0f} MiB/s  "
        f"loop lag p99 {lags[int(len(lags) * 0.99)] * 1e3:.1f} ms, most {lags[-1] * 1e3:.1f} ms"
    )


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def compare(port: int, mib: int, calls: int, pairs: int) -> None:
    with mmap.mmap(-1, mib * MIB) as pages:
        pages[:] = bytes(mib * MIB)
        with memoryview(pages) as pixels:
            for _ in range(pairs):
                await measure(Ours(port), pixels, calls)
                await measure(AsItComes(port), pixels, calls)


def main() -> None:
    options = Usage(__doc__)
    options.add_argument("--mib", type=count, default=50)
    options.add_argument("--calls", type=count, default=6)
    options.add_argument("--pairs", type=count, default=2)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.serve:
        asyncio.run(serve())
        return
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            uvloop.run(compare(int(engine.stdout.readline()), given.mib, given.calls, given.pairs))
        finally:
            engine.terminate()


if __name__ == "__main__":
    main()
