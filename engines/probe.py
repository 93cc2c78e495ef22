"""The engines there are, and which of them answers at an address.

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
from engines.mlx import MlxEngine
from engines.sglang import SglangEngine
from engines.tokenspeed import TokenSpeedEngine
from engines.trtllm import TrtllmEngine
from engines.vllm import VllmEngine

ReplyT = TypeVar("ReplyT", bound=Message)

ENGINES: Mapping[str, type[GrpcEngine]] = {
    engine.name: engine for engine in (SglangEngine, VllmEngine, TrtllmEngine, TokenSpeedEngine, MlxEngine)
}
"""Every engine there is, in the order they are asked."""

_NOBODY_THERE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})


class Caller(Protocol):
    """The control channel of `engines.channel.WorkerChannels`."""

    async def unary(self, path: str, request: Message, reply_type: type[ReplyT], *, timeout_s: float) -> ReplyT: ...


async def runtime_at(channels: Caller, *, timeout_s: float) -> str:
    """The name of the engine that answers; EngineError when nobody does (yet)."""
    unwell: EngineError | None = None
    for name, engine in ENGINES.items():
        try:  # request and reply are not looked at: any message will do
            await channels.unary(f"/{engine.service}/HealthCheck", Empty(), Empty, timeout_s=timeout_s)
        except EngineError as error:
            if error.status in _NOBODY_THERE:
                raise
            unwell = unwell if error.status == "UNIMPLEMENTED" else error
            continue
        return name
    raise unwell or EngineError("UNIMPLEMENTED", "something listens there, but it is none of the known engines")
