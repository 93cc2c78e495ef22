"""TokenSpeed: an `EngineRequest` becomes a GenerateRequest of `tokenspeed_scheduler.proto`, its replies become events.

Rule: media are one list of items in prompt order, whatever their modality, each with tensors of its own.  Every field
is what SMG sends (`tests/data/engine_messages`), except that `min_new_tokens` and `logit_bias` are sent as well.  Items
are elements of a repeated field, so each is written whole: its message without the encoder's bytes, then these.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import blake3
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_encoder_pb2 as encoder_pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from engines import labels, scheduler
from engines.base import (
    EngineError,
    EngineRequest,
    Event,
    Finished,
    Form,
    MediaBatch,
    MediaItem,
    Modality,
    Sampling,
)
from engines.engine import MIB, GrpcEngine, Replies
from engines.leg import Leg
from engines.replies import replies_to
from engines.scheduler import abort_request, generate_request
from engines.tensors import BY_VALUE, small_data, tensor_data
from engines.transport import Outgoing, Placements
from engines.wire import Part, field

if TYPE_CHECKING:
    from engines.channel import Stream

_MM_INPUTS, _ITEMS, _ENCODER_INPUT, _INLINE = 9, 1, 3, 3  # GenerateRequest, MultimodalInputs, item, TensorData
_ENCODE_MM_INPUTS = 2  # field of EncodeRequest
_MODALITIES = {
    Modality.IMAGE: common_pb2.IMAGE,
    Modality.VIDEO: common_pb2.VIDEO,
    Modality.AUDIO: common_pb2.AUDIO,
}
_PRIMARY = "encoder_input"
_SERVER_ARGS = (
    "model",
    "served_model_name",
    "tokenizer",
    "tp_size",
    "dp_size",
    "pp_size",
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "max_num_seqs",
    "load_balance_method",
    "is_embedding",
    "vocab_size",
    "weight_version",
)
_ENCODE = "/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode"  # beside the scheduler's service
_MAX_SEED = (1 << 64) - 1


# ---------------------------------------------------------------- the message


def build(request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
    """The Generate message of one attempt as a list of buffers; see `engines.vllm.build`."""
    message = generate_request(pb, request, attempt_id, sampling_params(request.sampling))
    leg = request.leg
    if leg is not None:
        _tell_meetings(message, leg)
    parts: list[Part] = [message.SerializeToString()]
    for key, batch, item in _in_prompt_order(request):
        parts += field([_MM_INPUTS, _ITEMS], _item(key, batch, item, placements, with_pixels=_has_pixels(leg)))
    return parts


def _tell_meetings(message: pb.GenerateRequest, leg: Leg) -> None:
    if leg.meeting is not None:
        message.kv_bootstrap_info.CopyFrom(
            pb.KvBootstrapInfo(
                bootstrap_host=leg.meeting.host, bootstrap_port=leg.meeting.port, bootstrap_room=leg.meeting.room
            )
        )
    for index, encoder in enumerate(leg.encoders):
        message.encode_bootstrap_info.items.add(
            item_index=index,
            bootstrap_host=encoder.host,
            bootstrap_port=encoder.port,
            bootstrap_room=encoder.room,
        )


def _room(request: EngineRequest) -> int | None:
    """An encode worker checks that what it pulls is what it was promised."""
    leg = request.leg
    return leg.meeting.room if leg is not None and leg.role == "encode" and leg.meeting is not None else None


def _has_pixels(leg: Leg | None) -> bool:
    return leg is None or leg.media == "whole"


def build_encode(request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
    """The Encode message of an encode leg: its one item whole, and the room where the prefill worker waits for it."""
    assert request.leg is not None and request.leg.meeting is not None
    assignment = encoder_pb.EncodeItemAssignment(bootstrap_room=request.leg.meeting.room)
    message = encoder_pb.EncodeRequest(request_id=attempt_id, items=[assignment])
    parts: list[Part] = [message.SerializeToString()]
    for key, batch, item in _in_prompt_order(request):
        parts += field([_ENCODE_MM_INPUTS, _ITEMS], _item(key, batch, item, placements, with_pixels=True))
    return parts


def sampling_params(sampling: Sampling) -> pb.SamplingParams:
    """The seed stays unset when nobody gave one."""
    params: pb.SamplingParams = scheduler.sampling_params(pb, sampling)
    params.stop.extend(sampling.stop)
    params.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.seed is not None:
        params.sampling_seed = sampling.seed & _MAX_SEED
    return params


def _in_prompt_order(request: EngineRequest) -> Iterator[tuple[str, MediaBatch, MediaItem]]:
    """Every item of every batch, with the prefix of its tensors' keys."""
    items = [(item.structural.offset, batch, item) for batch in request.media for item in batch.items]
    items.sort(key=lambda one: one[0])
    for number, (_, batch, item) in enumerate(items):
        yield f"{number}/", batch, item


def tensors(request: EngineRequest) -> list[Outgoing]:
    """Every tensor of every item, side tensors first."""
    found = []
    for key, _, item in _in_prompt_order(request):
        found += [Outgoing(key + name, tensor, inline_only=name in BY_VALUE) for name, tensor in item.side.items()]
        if _has_pixels(request.leg):
            primary = Outgoing(key + _PRIMARY, item.primary, item.segment, may_be_pulled=True, room=_room(request))
            found.append(primary)
    return found


def _item(key: str, batch: MediaBatch, item: MediaItem, placements: Placements, *, with_pixels: bool) -> Sequence[Part]:
    """One MultimodalItem, the encoder's bytes written by hand behind the rest."""
    message = pb.MultimodalItem(
        modality=_MODALITIES[batch.modality],
        content_hash=blake3.blake3(item.content_hash.encode()).digest(),
        placeholders=[
            pb.PlaceholderRange(offset=run.offset, length=run.length) for run in item.features or (item.structural,)
        ],
        placeholder_token_id=batch.token_id,
    )
    for name, tensor in item.side.items():
        message.model_specific_tensors[name].CopyFrom(small_data(pb.TensorData, tensor, placements.get(key + name)))
    if not with_pixels:
        return [message.SerializeToString()]
    placed = placements.get(key + _PRIMARY)
    data = tensor_data(pb.TensorData, item.primary, placed)
    payload = field([_INLINE], item.primary.buffers) if placed is None else []
    return [message.SerializeToString(), *field([_ENCODER_INPUT], [data.SerializeToString(), *payload])]


class EncodeReplies:
    """An Encode call has one answer, yes or no."""

    all_finished = False

    def event(self, message: Any) -> Event:
        if not message.accepted:
            raise EngineError("FAILED_PRECONDITION", "the encode worker did not accept the item")
        self.all_finished = True
        return Finished(0, "encoded")

    def end(self) -> None:
        if not self.all_finished:
            raise EngineError("INTERNAL", "the encode worker did not answer")


# ---------------------------------------------------------------- the worker


class TokenSpeedEngine(GrpcEngine):
    """One TokenSpeed worker behind its channels.

    It hands the names of segments on to its scheduler, so every tensor gets a file of its own, which is used again when
    the scheduler has let go of it (`pool.segments`).
    """

    name = "tokenspeed"
    service = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"
    messages = pb
    modalities = frozenset(Modality)
    takes_segments = True
    keeps_segments = True
    pulls_tensors = True
    pairing = "together"
    room_bits = 63
    places_by_room = True
    encodes = True
    max_message_bytes = 256 * MIB

    def form(self, told: Mapping[str, str], dtype: str | None, dtypes: Mapping[Modality, str]) -> Form:
        """The operator's width for the modality, else for all, else the worker's label, else bfloat16."""
        usual = labels.form({**told, "mm_device_do_normalize": ""}, dtype, otherwise="bfloat16").dtype
        others = ((modality, dtypes[modality]) for modality in Modality if modality in dtypes)
        return Form(usual, others=tuple(other for other in others if other[1] != usual))

    def flatten(self, reply: Message) -> dict[str, str]:
        if not isinstance(reply, pb.GetServerInfoResponse):
            return labels.flatten(reply)
        found = labels.flatten_struct(reply.server_args, _SERVER_ARGS)
        found |= labels.flatten_struct(reply.scheduler_info, ("shm_namespace_id",))
        return found | ({"version": reply.tokenspeed_version} if reply.tokenspeed_version else {})

    def tensors(self, request: EngineRequest) -> list[Outgoing]:
        return tensors(request)

    def build(self, request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
        return build(request, attempt_id, placements)

    def generate(self, request: EngineRequest, attempt_id: str, placements: Placements) -> "Stream[Any]":
        if request.leg is None or request.leg.role != "encode":
            return super().generate(request, attempt_id, placements)
        return self._sending(_ENCODE, build_encode(request, attempt_id, placements), encoder_pb.EncodeResponse)

    def replies(self, request: EngineRequest) -> Replies:
        is_encode = request.leg is not None and request.leg.role == "encode"
        return EncodeReplies() if is_encode else replies_to(request)

    def _abortion(self, attempt_id: str) -> Message:
        return abort_request(pb, attempt_id)
