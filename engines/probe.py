"""Which engine answers at an address.

Rule: every engine of the family has its own gRPC service, and each service its own HealthCheck; the first that
answers without an error wins, in SMG's order.  A service that is not there answers UNIMPLEMENTED, so asking is
harmless.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from engines.base import EngineError
from engines.engine import GrpcEngine
from engines.vllm import VllmEngine

ReplyT = TypeVar("ReplyT", bound=Message)

SERVICES = {
    "sglang": "sglang.grpc.scheduler.SglangScheduler",
    "vllm": VllmEngine.service,
    "trtllm": "trtllm.TrtllmService",
    "tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
    "mlx": "mlx.grpc.engine.MlxEngine",
}
ENGINES: Mapping[str, type[GrpcEngine]] = {VllmEngine.name: VllmEngine}

_NOBODY_THERE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})


class Unsupported(Exception):
    """An engine this version cannot talk to; the message is one sentence for the operator."""


class Caller(Protocol):
    """The control channel of `engines.channel.WorkerChannels`."""

    async def unary(self, path: str, request: Message, reply_type: type[ReplyT], *, timeout_s: float) -> ReplyT: ...


async def runtime_at(channels: Caller, *, timeout_s: float) -> str:
    """The name of the engine that answers; EngineError when nobody does (yet)."""
    unwell: EngineError | None = None
    for name, service in SERVICES.items():
        try:  # request and reply are not looked at: any message will do
            await channels.unary(f"/{service}/HealthCheck", Empty(), Empty, timeout_s=timeout_s)
        except EngineError as error:
            if error.status in _NOBODY_THERE:
                raise
            unwell = unwell if error.status == "UNIMPLEMENTED" else error
            continue
        return name
    raise unwell or EngineError("UNIMPLEMENTED", "something listens there, but it is none of the known engines")


def check_supported(runtime: str) -> None:
    """Raises Unsupported with the engine's name."""
    if runtime not in ENGINES:
        raise Unsupported(f"the worker runs {runtime}, which is not supported yet: this version speaks to vllm workers")
