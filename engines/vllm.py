"""vLLM: an `EngineRequest` becomes a GenerateRequest of `vllm_engine.proto`, its replies become events.

Rule: `build` is pure and gives the message as a list of buffers; big tensors are the very views the pool processes
wrote, and every field is what SMG 1.13 sends (`tests/data/engine_messages`), except that `min_tokens` and
`logit_bias` are sent as well and `original_text` always.  `VllmEngine` binds that to the channels of one worker;
attempts, retries and aborts are decided in `engines.generation`.
"""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from engines.base import EngineRequest, MediaBatch, MediaReference, Modality, Sampling, Tensor
from engines.batch import primary_tensor, side_tensors
from engines.engine import GrpcEngine
from engines.leg import Handoff, Leg, MediaShare
from engines.replies import StreamReplies
from engines.tensors import BY_VALUE, small_data, tensor_data
from engines.transport import Outgoing, Placements
from engines.wire import Part, field

_PRIMARY = "pixel_values"  # the primary tensor's name in MediaBatch, and its field in the message
_MM_INPUTS, _EXTRA_MM_INPUTS = 7, 11  # fields of GenerateRequest
_PIXEL_VALUES, _INLINE = 2, 1  # fields of MultimodalInputs and of TensorData
_MEDIA_REFS, _ITEMS, _URL = 10, 1, 2  # fields of GenerateRequest, MediaRefs and MediaRef
_MODALITIES = {
    Modality.IMAGE: common_pb2.IMAGE,
    Modality.VIDEO: common_pb2.VIDEO,
}
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
_MAX_LOGPROBS = 20


# ---------------------------------------------------------------- the message


def build(request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
    """The Generate message of one attempt as a list of buffers; joined they are the serialised GenerateRequest.

    `placements`: handles of the tensors that lie in shared memory, by the keys of `tensors`; all others are inline.
    Primary tensors and URLs are passed on as the buffers of their items, uncopied: they must stay unchanged until the
    sender is done.  Raises EngineError INVALID_ARGUMENT when the message would be larger than protobuf allows.
    """
    message = vllm_engine_pb2.GenerateRequest(
        request_id=attempt_id,
        tokenized=vllm_engine_pb2.TokenizedInput(original_text=request.original_text, input_ids=request.input_ids),
        sampling_params=sampling_params(request.sampling),
        stream=request.stream,
    )
    if request.leg is not None:
        _tell_handover(message, request.leg)
    parts: list[Part] = [message.SerializeToString()]
    for number, batch in zip(_batch_fields(request), request.media, strict=True):
        parts += field([number], _share(batch, media_share(request), placements))
    if request.references:
        parts += field([_MEDIA_REFS], _media_refs(request.references))
    return parts


def _tell_handover(message: vllm_engine_pb2.GenerateRequest, leg: Leg) -> None:
    if leg.kv_params:
        message.kv_transfer_params_json = leg.kv_params
    if leg.kv_address is not None:
        host, port = leg.kv_address
        message.kv_transfer_params.CopyFrom(vllm_engine_pb2.KvTransferParams(remote_host=host, remote_port=port))
    if leg.identity:  # of media that the prefill worker has fetched and processed: they are part of its prompt now
        told = vllm_engine_pb2.MediaIdentity.FromString(leg.identity)
        message.tokenized.input_ids[:] = told.prompt_token_ids
        if told.HasField("mm_inputs"):
            message.mm_inputs.CopyFrom(told.mm_inputs)
        message.extra_mm_inputs.extend(told.extra_mm_inputs)


def media_share(request: EngineRequest) -> MediaShare:
    return "whole" if request.leg is None else request.leg.media


def _batch_fields(request: EngineRequest) -> list[int]:
    """The first batch is `mm_inputs`, further ones are `extra_mm_inputs`."""
    return [_MM_INPUTS if index == 0 else _EXTRA_MM_INPUTS for index in range(len(request.media))]


def sampling_params(sampling: Sampling) -> vllm_engine_pb2.SamplingParams:
    """Unset parameters become the values SMG sends; `temperature`, `max_tokens`, `seed` and `logprobs` stay unset."""
    params = vllm_engine_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=max(sampling.top_k or 0, 0),
        min_p=sampling.min_p or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n,
        logit_bias=dict(sampling.logit_bias),
    )
    if sampling.seed is not None:
        params.seed = min(max(sampling.seed, _INT32_MIN), _INT32_MAX)
    if sampling.logprobs is not None:
        params.logprobs = min(sampling.logprobs or 1, _MAX_LOGPROBS)
    if sampling.constraint is not None:
        setattr(params, sampling.constraint.kind, sampling.constraint.text)  # members of one oneof
    return params


def tensors(request: EngineRequest) -> list[Outgoing]:
    """Every tensor of the message, side tensors first, as the transport places them."""
    share = media_share(request)
    return [outgoing for batch in request.media for outgoing in _batch_tensors(batch, share)]


def _batch_tensors(batch: MediaBatch, share: MediaShare) -> list[Outgoing]:
    if share == "hashes":
        return []
    if share == "identity":
        found = _identifying_tensors(batch).items()
        return [Outgoing(_placement_key(batch, name), tensor, inline_only=True) for name, tensor in found]
    side = [
        Outgoing(_placement_key(batch, name), tensor, inline_only=name in BY_VALUE)
        for name, tensor in side_tensors(batch).items()
    ]
    return [*side, Outgoing(_placement_key(batch, _PRIMARY), primary_tensor(batch), batch.segment)]


def _placement_key(batch: MediaBatch, name: str) -> str:
    return f"{batch.modality.value}/{name}"


def _share(batch: MediaBatch, share: MediaShare, placements: Placements) -> list[Part]:
    """What of a batch this message has, as one MultimodalInputs."""
    if share == "hashes":
        hashes = [item.content_hash for item in batch.items]
        told = vllm_engine_pb2.MultimodalInputs(mm_hashes=hashes, modality=_MODALITIES[batch.modality])
        return [told.SerializeToString()]
    return [_identity(batch).SerializeToString()] if share == "identity" else _multimodal_inputs(batch, placements)


def _identity(batch: MediaBatch) -> vllm_engine_pb2.MultimodalInputs:
    """For a decode worker that gets keys and values of every token: where the items are, which, and their grids."""
    layout, side = batch.layout, _identifying_tensors(batch)
    told = _placed(batch)
    told.batched_keys.extend(key for key in layout.batched if key in side)
    told.keep_on_cpu_keys.extend(key for key in layout.keep_on_cpu if key in side)
    told.flat_keys.update({key: sizes for key, sizes in layout.flat.items() if key in side})
    for name, tensor in side.items():
        told.model_specific_tensors[name].CopyFrom(small_data(vllm_engine_pb2.TensorData, tensor, None))
    return told


def _identifying_tensors(batch: MediaBatch) -> dict[str, Tensor]:
    """Grids and times, and the sizes of those that are flat."""
    side = side_tensors(batch)
    names = {name for name in side if name in BY_VALUE}
    names |= {sizes for name, sizes in batch.layout.flat.items() if name in names}
    return {name: tensor for name, tensor in side.items() if name in names}


def _placed(batch: MediaBatch) -> vllm_engine_pb2.MultimodalInputs:
    """Which items, and where in the prompt."""
    return vllm_engine_pb2.MultimodalInputs(
        im_token_id=batch.token_id,
        mm_placeholders=[
            vllm_engine_pb2.PlaceholderRange(offset=item.structural.offset, length=item.structural.length)
            for item in batch.items
        ],
        mm_hashes=[item.content_hash for item in batch.items],
        modality=_MODALITIES[batch.modality],
        encoder_input_key=batch.layout.encoder_input_key,
    )


def _multimodal_inputs(batch: MediaBatch, placements: Placements) -> list[Part]:
    """One MultimodalInputs, its primary tensor written by hand behind the rest."""
    layout = batch.layout
    wire_name = layout.encoder_input_key or _PRIMARY
    side = side_tensors(batch)
    present = {wire_name, *side}
    message = _placed(batch)
    message.batched_keys.extend(key for key in layout.batched if key in present)
    message.flat_keys.update({key: sizes for key, sizes in layout.flat.items() if key in present and sizes in present})
    message.keep_on_cpu_keys.extend(layout.keep_on_cpu)
    for name, tensor in side.items():
        data = small_data(vllm_engine_pb2.TensorData, tensor, placements.get(_placement_key(batch, name)))
        message.model_specific_tensors[name].CopyFrom(data)
    primary = primary_tensor(batch)
    placed = placements.get(_placement_key(batch, _PRIMARY))
    data = tensor_data(vllm_engine_pb2.TensorData, primary, placed)
    payload = field([_INLINE], primary.buffers) if placed is None else []
    return [message.SerializeToString(), *field([_PIXEL_VALUES], [data.SerializeToString(), *payload])]


def _media_refs(references: Sequence[MediaReference]) -> list[Part]:
    """A MediaRefs; a data URL of many megabytes stays the view it is."""
    parts: list[Part] = []
    for reference in references:
        head = vllm_engine_pb2.MediaRef(modality=_MODALITIES[reference.modality]).SerializeToString()
        parts += field([_ITEMS], [head, *field([_URL], reference.url)])
    return parts


# ---------------------------------------------------------------- replies and worker


class VllmReplies(StreamReplies):
    """A streamed `complete` repeats the last tokens of its choice or has none, and its completion tokens are not the
    total: they are counted from the chunks.
    """

    repeats_all = False

    def handoff(self, body: Any) -> Handoff | None:
        identity = body.media_identity.SerializeToString() if body.HasField("media_identity") else b""
        params = body.kv_transfer_params_json
        return Handoff(params, identity) if params or identity else None


class VllmEngine(GrpcEngine):
    """One vLLM worker behind its channels."""

    name = "vllm"
    service = "vllm.grpc.engine.VllmEngine"
    messages = vllm_engine_pb2
    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    takes_references = True
    takes_segments = True
    pairing = "prefill_first"

    def tensors(self, request: EngineRequest) -> list[Outgoing]:
        return tensors(request)

    def build(self, request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
        return build(request, attempt_id, placements)

    def replies(self, request: EngineRequest) -> VllmReplies:
        return VllmReplies(request)

    def _abortion(self, attempt_id: str) -> Message:
        request: Message = vllm_engine_pb2.AbortRequest(request_ids=[attempt_id])
        return request
