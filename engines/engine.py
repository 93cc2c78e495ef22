"""What an engine file provides: the contract that workers, attempts and registration rely on, and the calls all share.

Rule: `Engine` is all that the rest of `engines/` knows of one.  `GrpcEngine` implements what is alike everywhere (the
five services differ in names, not in manners); an engine file adds `build`, its replies and what it takes.  The table
of engines is in `engines.probe`.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2

from engines import labels
from engines.base import (
    EngineError,
    EngineRequest,
    Event,
    Form,
    MessageTooLarge,
    Modality,
    ParameterRefused,
    Sampling,
)
from engines.loads import SchedulerLoad, scheduler_load
from engines.transport import Outgoing, Placements
from engines.wire import Part, nbytes_of, number_field

if TYPE_CHECKING:  # the pure part needs no grpclib
    from engines.channel import Stream, WorkerChannels

ReplyT = TypeVar("ReplyT", bound=Message)

MIB = 1 << 20

Pairing = Literal["prefill_first", "together"]
"""The order of a pair's legs.  `prefill_first`: what the prefill leg's end says goes into the decode leg's message.
`together`: the engines meet where both messages say.
"""

_NOTHING_SAID = Sampling()
_ASKED_BY = {"constraint": "response_format"}  # what clients call it


class Replies(Protocol):
    """Turns one stream's messages into events; `engines.replies` has the rules."""

    @property
    def all_finished(self) -> bool:
        """Whether every choice has its end."""
        ...

    def event(self, message: Any) -> Event:
        """Raises EngineError INTERNAL for a message that has no place in the order."""
        ...

    def end(self) -> None:
        """The stream is over: raises EngineError INTERNAL when a choice has no end."""
        ...


class Engine(Protocol):
    """One worker's engine behind its channels.

    `modalities`: what it takes at all.  `takes_references`: media by URL.  `takes_segments`: tensors by files in
    /dev/shm; `keeps_segments`: it hands their names on, so that each tensor needs a file of its own and an answer does
    not tell that it was read.  `pulls_tensors`: tensors over RDMA.  `pairing`: how its workers serve a request in
    pairs, see `Pairing`; None when they cannot.  `room_bits`: how large the number of a meeting may be;
    `places_by_room`: that number modulo the ranks is the rank both legs go to.  `encodes`: it has encode workers.
    """

    @property
    def name(self) -> str: ...

    @property
    def modalities(self) -> frozenset[Modality]: ...

    @property
    def takes_references(self) -> bool: ...

    @property
    def rank_field(self) -> int | None:
        """Number of its message's field for a data-parallel rank; None: it has none."""
        ...

    def pin(self, rank: int) -> None:
        """All requests go to this data-parallel rank."""
        ...

    @property
    def takes_segments(self) -> bool: ...

    @property
    def keeps_segments(self) -> bool: ...

    @property
    def pulls_tensors(self) -> bool: ...

    @property
    def pairing(self) -> Pairing | None: ...

    @property
    def room_bits(self) -> int: ...

    @property
    def places_by_room(self) -> bool: ...

    @property
    def encodes(self) -> bool: ...

    def form(self, told: Mapping[str, str], dtype: str | None, dtypes: Mapping[Modality, str]) -> Form:
        """In which form it wants media.

        `told`: the worker's labels.  `dtype`, `dtypes`: the operator's variables for this runtime, the second one by
        modality; they are checked already.
        """
        ...

    def flatten(self, reply: Message) -> dict[str, str]:
        """The labels in one of its info replies."""
        ...

    def learn(self, told: Mapping[str, str]) -> None:
        """Its worker's labels, each time they were read."""
        ...

    async def is_healthy(self, timeout_s: float) -> bool:
        """The engine's own word; EngineError when it does not answer."""
        ...

    async def model_info(self, timeout_s: float) -> Message: ...

    async def server_info(self, timeout_s: float) -> Message: ...

    async def loads(self, timeout_s: float) -> list[SchedulerLoad]:
        """EngineError UNIMPLEMENTED when it does not tell."""
        ...

    async def flush_cache(self, timeout_s: float) -> None:
        """Forget cached prefixes.  EngineError when it does not: requests in flight, or no such thing."""
        ...

    async def abort(self, attempt_id: str, timeout_s: float) -> None: ...

    def check(self, request: EngineRequest) -> None:
        """Raises ParameterRefused for what its message cannot say and the answer would miss, MessageTooLarge for media
        that it would not read in any case.
        """
        ...

    def tensors(self, request: EngineRequest) -> list[Outgoing]:
        """Every tensor of the message, as the transport places them."""
        ...

    def generate(self, request: EngineRequest, attempt_id: str, placements: Placements) -> "Stream[Any]":
        """Sends the message and gives the stream of replies.  MessageTooLarge when the engine would not read it."""
        ...

    def replies(self, request: EngineRequest) -> Replies: ...

    def tokenizer_bundle(self) -> AsyncIterator[tuple[bytes, str]]:
        """Pieces of the archive of tokenizer files with the digest, which is set on the last piece only."""
        ...


class GrpcEngine(ABC):
    """What is alike in all engines.

    `service`: its gRPC service.  `messages`: the protobuf module of that service.  `max_message_bytes`: what its server
    reads by default, None when that is unlimited; a worker's label `max_message_bytes` says otherwise.  `unsendable`:
    sampling parameters its message has no field for.
    """

    name: ClassVar[str]
    service: ClassVar[str]
    messages: ClassVar[Any]
    modalities: ClassVar[frozenset[Modality]] = frozenset()
    takes_references: ClassVar[bool] = False
    takes_segments: ClassVar[bool] = False
    keeps_segments: ClassVar[bool] = False
    pulls_tensors: ClassVar[bool] = False
    pairing: ClassVar[Pairing | None] = None
    room_bits: ClassVar[int] = 31
    places_by_room: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    unsendable: ClassVar[tuple[str, ...]] = ()
    max_message_bytes: int | None = None

    def __init__(self, channels: "WorkerChannels") -> None:
        self._channels = channels
        self._rank: int | None = None

    # ------------------------------------------------------------ registration

    def form(self, told: Mapping[str, str], dtype: str | None, dtypes: Mapping[Modality, str]) -> Form:
        return labels.form(told, dtype)

    def flatten(self, reply: Message) -> dict[str, str]:
        return labels.flatten(reply)

    @property
    def rank_field(self) -> int | None:
        field = self.messages.GenerateRequest.DESCRIPTOR.fields_by_name.get("data_parallel_rank")
        return None if field is None else int(field.number)

    def pin(self, rank: int) -> None:
        self._rank = rank

    def learn(self, told: Mapping[str, str]) -> None:
        text = told.get("max_message_bytes", "")
        if text.isdecimal():
            self.max_message_bytes = int(text)

    async def is_healthy(self, timeout_s: float) -> bool:
        return bool((await self._health(timeout_s)).healthy)

    async def model_info(self, timeout_s: float) -> Message:
        pb = self.messages
        return await self._unary("GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse, timeout_s)

    async def server_info(self, timeout_s: float) -> Message:
        pb = self.messages
        return await self._unary("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse, timeout_s)

    async def loads(self, timeout_s: float) -> list[SchedulerLoad]:
        self._require("GetLoads")
        pb = self.messages
        reply = await self._unary("GetLoads", pb.GetLoadsRequest(), pb.GetLoadsResponse, timeout_s)
        return [scheduler_load(row) for row in reply.loads]

    async def flush_cache(self, timeout_s: float) -> None:
        self._require("FlushCache")
        reply = await self._unary(
            "FlushCache", common_pb2.FlushCacheRequest(), common_pb2.FlushCacheResponse, timeout_s
        )
        if not reply.success:
            raise EngineError("FAILED_PRECONDITION", reply.message or "the engine did not flush its cache")

    async def tokenizer_bundle(self) -> AsyncIterator[tuple[bytes, str]]:
        async with self._channels.server_stream(
            f"/{self.service}/GetTokenizer", common_pb2.GetTokenizerRequest(), common_pb2.GetTokenizerChunk
        ) as chunks:
            async for chunk in chunks:
                yield chunk.data, chunk.sha256

    # ------------------------------------------------------------ generation

    def check(self, request: EngineRequest) -> None:
        for parameter in self.unsendable:
            if getattr(request.sampling, parameter) != getattr(_NOTHING_SAID, parameter):
                raise ParameterRefused(self.name, _ASKED_BY.get(parameter, parameter))
        limit = self.max_message_bytes
        if limit is not None and not self.takes_segments and request.media_bytes > limit:
            raise MessageTooLarge(self.name, request.media_bytes, limit)

    def tensors(self, request: EngineRequest) -> list[Outgoing]:
        return []

    def generate(self, request: EngineRequest, attempt_id: str, placements: Placements) -> "Stream[Any]":
        parts = [*self.build(request, attempt_id, placements), *self._pinned(request)]
        return self._sending(f"/{self.service}/Generate", parts, self.messages.GenerateResponse)

    def _sending(self, path: str, parts: Sequence[Part], reply_type: Any) -> "Stream[Any]":
        if self.max_message_bytes is not None and (nbytes := nbytes_of(parts)) > self.max_message_bytes:
            raise MessageTooLarge(self.name, nbytes, self.max_message_bytes)
        return self._channels.stream(path, parts, reply_type)

    def _pinned(self, request: EngineRequest) -> list[Part]:
        if request.leg is not None and self.places_by_room:
            return []
        return [number_field(self.rank_field, self._rank)] if self._rank is not None and self.rank_field else []

    @abstractmethod
    def build(self, request: EngineRequest, attempt_id: str, placements: Placements) -> Sequence[Part]:
        """The Generate message as a list of buffers (see an engine's function of this name)."""

    @abstractmethod
    def replies(self, request: EngineRequest) -> Replies: ...

    async def abort(self, attempt_id: str, timeout_s: float) -> None:
        await self._unary("Abort", self._abortion(attempt_id), self.messages.AbortResponse, timeout_s)

    def _abortion(self, attempt_id: str) -> Message:
        request: Message = self.messages.AbortRequest(request_id=attempt_id)
        return request

    def close(self) -> None:
        self._channels.close()

    async def _health(self, timeout_s: float) -> Any:
        pb = self.messages
        return await self._unary("HealthCheck", pb.HealthCheckRequest(), pb.HealthCheckResponse, timeout_s)

    def _require(self, method: str) -> None:
        """Not every protocol has every method."""
        service = self.messages.DESCRIPTOR.services_by_name[self.service.rpartition(".")[2]]
        if method not in service.methods_by_name:
            raise EngineError("UNIMPLEMENTED", f"{self.name} engines have no {method}")

    async def _unary(self, method: str, request: Message, reply_type: type[ReplyT], timeout_s: float) -> ReplyT:
        return await self._channels.unary(f"/{self.service}/{method}", request, reply_type, timeout_s=timeout_s)
