"""SGLang: an `EngineRequest` becomes a GenerateRequest of `sglang_scheduler.proto`, its replies become events.

Rule: pictures go as float32 tensors of the whole batch together with the files they came from, always inside the
message.  Stop strings never go as text: one that is a single token goes as that id, the gateway looks for the others
in the text and aborts.  Every field is what SMG sends (`tests/data/engine_messages`), except that `min_new_tokens` and
`logit_bias` are sent as well.
"""

from collections.abc import Mapping

from google.protobuf.message import Message
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from engines import labels, scheduler
from engines.base import EngineRequest, Form, MediaBatch, Modality
from engines.batch import primary_tensor, side_tensors
from engines.engine import MIB, GrpcEngine
from engines.replies import StreamReplies, replies_to
from engines.scheduler import abort_request, generate_request
from engines.transport import Placements
from engines.wire import Part, field, splice

_MM_INPUTS = 3  # field of GenerateRequest
_PIXEL_VALUES, _IMAGE_DATA, _DATA = 4, 5, 1  # fields of MultimodalInputs and of TensorData
_SERVER_ARGS = (
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "tp_size",
    "dp_size",
    "pp_size",
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "load_balance_method",
    "disaggregation_mode",
    "is_embedding",
    "vocab_size",
    "weight_version",
    "disaggregation_transfer_backend",
    "kv_cache_dtype",
    "page_size",
    "attention_backend",
    "mm_item_limits",
    "pairing_protocol",
)


# ---------------------------------------------------------------- the message


def build(request: EngineRequest, attempt_id: str) -> list[Part]:
    """The Generate message of one attempt as a list of buffers; see `engines.vllm.build`."""
    message = generate_request(pb, request, attempt_id, sampling_params(request))
    leg = request.leg
    if leg is not None and leg.meeting is not None:
        message.disaggregated_params.CopyFrom(
            pb.DisaggregatedParams(
                bootstrap_host=leg.meeting.host, bootstrap_port=leg.meeting.port, bootstrap_room=leg.meeting.room
            )
        )
    parts: list[Part] = [message.SerializeToString()]
    for batch in request.media if leg is None or leg.media == "whole" else ():
        parts += _pictures(batch)
    return parts


def sampling_params(request: EngineRequest) -> pb.SamplingParams:
    """There are no stop strings and there is no seed."""
    params: pb.SamplingParams = scheduler.sampling_params(pb, request.sampling)
    params.stop_token_ids.extend(dict.fromkeys((*request.sampling.stop_token_ids, *request.stop_ids)))
    return params


def _pictures(batch: MediaBatch) -> list[Part]:
    """`mm_inputs`: everything small, then the pixels and the files as further occurrences of it."""
    primary = primary_tensor(batch)
    message = pb.MultimodalInputs(
        pixel_values=pb.TensorData(shape=primary.shape, dtype=primary.dtype),
        modalities=[batch.modality.value],
        im_token_id=batch.token_id,
        mm_placeholders=[
            pb.PlaceholderRange(offset=run.offset, length=run.length)
            for item in batch.items
            for run in item.features or (item.structural,)
        ],
    )
    for name, tensor in side_tensors(batch).items():
        data = pb.TensorData(shape=tensor.shape, dtype=tensor.dtype, data=b"".join(tensor.buffers))
        message.model_specific_tensors[name].CopyFrom(data)
    head, *rest = field([_MM_INPUTS], [message.SerializeToString()])
    return [
        *splice(bytes(head), rest, field([_MM_INPUTS, _PIXEL_VALUES, _DATA], primary.buffers)),
        *(part for item in batch.items for part in field([_MM_INPUTS, _IMAGE_DATA], [item.encoded])),
    ]


# ---------------------------------------------------------------- the worker


class SglangEngine(GrpcEngine):
    """One SGLang worker behind its channels."""

    name = "sglang"
    service = "sglang.grpc.scheduler.SglangScheduler"
    messages = pb
    modalities = frozenset({Modality.IMAGE})
    pairing = "together"
    max_message_bytes = 256 * MIB

    def form(self, told: Mapping[str, str], dtype: str | None, dtypes: Mapping[Modality, str]) -> Form:
        """Nothing decides here: float32 and the files."""
        return Form("float32", encoded=True)

    def flatten(self, reply: Message) -> dict[str, str]:
        if not isinstance(reply, pb.GetServerInfoResponse):
            return labels.flatten(reply)
        found = labels.flatten_struct(reply.server_args, _SERVER_ARGS)
        return found | ({"version": reply.sglang_version} if reply.sglang_version else {})

    def build(self, request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
        return build(request, attempt_id)

    def replies(self, request: EngineRequest) -> StreamReplies:
        return replies_to(request)

    def _abortion(self, attempt_id: str) -> Message:
        return abort_request(pb, attempt_id)
