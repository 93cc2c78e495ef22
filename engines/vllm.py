"""vLLM: an `EngineRequest` becomes a GenerateRequest of `vllm_engine.proto`, its replies become events.

Rule: `build` is pure and gives the message as a list of buffers; big tensors are the very views the pool processes
wrote, and every field is what SMG 1.13 sends (`tests/data/engine_messages`), except that `min_tokens` and
`logit_bias` are sent as well and `original_text` always.  `VllmEngine` binds that to the channels of one worker;
attempts, retries and aborts are decided in `engines.dispatch`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from engines.base import (
    Chunk,
    EngineError,
    EngineRequest,
    Event,
    Finished,
    MediaBatch,
    Modality,
    Sampling,
    Tensor,
    TokenLogprob,
    TopLogprob,
)
from engines.transport import Handle, Outgoing
from engines.wire import Part, field

if TYPE_CHECKING:  # the pure part needs no grpclib
    from engines.channel import Stream, WorkerChannels

SERVICE = "vllm.grpc.engine.VllmEngine"

_PRIMARY = "pixel_values"  # the primary tensor's name in MediaBatch, and its field in the message
_MM_INPUTS, _EXTRA_MM_INPUTS = 7, 11  # fields of GenerateRequest
_PIXEL_VALUES, _INLINE = 2, 1  # fields of MultimodalInputs and of TensorData
_MODALITIES = {
    Modality.IMAGE: common_pb2.IMAGE,
    Modality.VIDEO: common_pb2.VIDEO,
}
# What identifies a clip or picture to a decode worker travels by value at any threshold: both SMG versions recorded
# do so.
_BY_VALUE = frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid"})
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
_MAX_LOGPROBS = 20


# ---------------------------------------------------------------- the message


def build(request: EngineRequest, attempt_id: str, placements: Mapping[str, Handle]) -> list[Part]:
    """The Generate message of one attempt as a list of buffers; joined they are the serialised GenerateRequest.

    `placements`: handles of the tensors that lie in shared memory, by the keys of `tensors`; all others are
    inline.  Primary tensors are passed on as the buffers of their items, uncopied: they must stay unchanged until the
    sender is done.  Raises EngineError INVALID_ARGUMENT when the message would be larger than protobuf allows.
    """
    message = vllm_engine_pb2.GenerateRequest(
        request_id=attempt_id,
        tokenized=vllm_engine_pb2.TokenizedInput(original_text=request.original_text, input_ids=request.input_ids),
        sampling_params=sampling_params(request.sampling),
        stream=request.stream,
    )
    parts: list[Part] = [message.SerializeToString()]
    for number, batch in zip(_batch_fields(request), request.media, strict=True):
        parts += field([number], _multimodal_inputs(batch, placements))
    return parts


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
    return params


def tensors(request: EngineRequest) -> list[Outgoing]:
    """Every tensor of the message, side tensors first, as the transport places them."""
    return [outgoing for batch in request.media for outgoing in _batch_tensors(batch)]


def _batch_tensors(batch: MediaBatch) -> list[Outgoing]:
    side = [
        Outgoing(_placement_key(batch, name), tensor, inline_only=name in _BY_VALUE)
        for name, tensor in side_tensors(batch).items()
    ]
    return [*side, Outgoing(_placement_key(batch, _PRIMARY), primary_tensor(batch), batch.segment)]


def _placement_key(batch: MediaBatch, name: str) -> str:
    return f"{batch.modality.value}/{name}"


def primary_tensor(batch: MediaBatch) -> Tensor:
    """All items' rows of the primary tensor, one after the other."""
    return _along_first_axis([item.primary for item in batch.items])


def side_tensors(batch: MediaBatch) -> dict[str, Tensor]:
    """All items' rows of every side tensor; a tensor that is shared by all items is the first item's."""
    split = {*batch.layout.batched, *batch.layout.flat, *batch.layout.flat.values()}
    joined = {}
    for name, first in batch.items[0].side.items():
        joined[name] = _along_first_axis([item.side[name] for item in batch.items]) if name in split else first
    return joined


def _along_first_axis(rows: Sequence[Tensor]) -> Tensor:
    first = rows[0]
    if any(row.dtype != first.dtype or row.shape[1:] != first.shape[1:] for row in rows):
        raise ValueError(f"items of one batch differ: {[(row.dtype, row.shape) for row in rows]}")
    shape = (sum(row.shape[0] for row in rows), *first.shape[1:])
    return Tensor(first.dtype, shape, tuple(buffer for row in rows for buffer in row.buffers))


def _multimodal_inputs(batch: MediaBatch, placements: Mapping[str, Handle]) -> list[Part]:
    """One MultimodalInputs, its primary tensor written by hand behind the rest."""
    layout = batch.layout
    wire_name = layout.encoder_input_key or _PRIMARY
    side = side_tensors(batch)
    present = {wire_name, *side}
    message = vllm_engine_pb2.MultimodalInputs(
        im_token_id=batch.token_id,
        mm_placeholders=[
            vllm_engine_pb2.PlaceholderRange(offset=item.structural.offset, length=item.structural.length)
            for item in batch.items
        ],
        mm_hashes=[item.content_hash for item in batch.items],
        batched_keys=[key for key in layout.batched if key in present],
        flat_keys={key: sizes for key, sizes in layout.flat.items() if key in present and sizes in present},
        keep_on_cpu_keys=layout.keep_on_cpu,
        modality=_MODALITIES[batch.modality],
        encoder_input_key=layout.encoder_input_key,
    )
    for name, tensor in side.items():
        data = _tensor_data(tensor, placements.get(_placement_key(batch, name)))
        if not data.HasField("shm"):
            data.inline = b"".join(tensor.buffers)
        message.model_specific_tensors[name].CopyFrom(data)
    primary = primary_tensor(batch)
    data = _tensor_data(primary, placements.get(_placement_key(batch, _PRIMARY)))
    payload = [] if data.HasField("shm") else field([_INLINE], primary.buffers)
    return [message.SerializeToString(), *field([_PIXEL_VALUES], [data.SerializeToString(), *payload])]


def _tensor_data(tensor: Tensor, handle: Handle | None) -> vllm_engine_pb2.TensorData:
    """Shape, dtype and, when there is one, the handle; the caller adds inline bytes."""
    data = vllm_engine_pb2.TensorData(shape=tensor.shape, dtype=tensor.dtype)
    if handle is not None:
        data.shm.CopyFrom(
            common_pb2.ShmHandle(name=handle.name, offset=0, nbytes=handle.nbytes, owner_id=handle.owner_id)
        )
    return data


# ---------------------------------------------------------------- the replies


class VllmReplies:
    """Turns one stream's GenerateResponse messages into events, and holds the engine to its order.

    A chunk carries new tokens only.  The `complete` that ends a streamed choice repeats its last tokens or none, so
    tokens are never emitted twice and completion tokens are counted from the chunks; without streaming it carries
    everything.
    """

    def __init__(self, request: EngineRequest) -> None:
        self._streams = request.stream
        self._tokens = [0] * request.sampling.n  # emitted by chunks, per choice
        self._open = set(range(request.sampling.n))

    @property
    def all_finished(self) -> bool:
        return not self._open

    def event(self, message: vllm_engine_pb2.GenerateResponse) -> Event:
        """Raises EngineError INTERNAL for a message that has no place in the order."""
        kind = message.WhichOneof("response")
        if kind is None:
            raise EngineError("INTERNAL", "the engine sent a message that is neither chunk nor end", started=True)
        body = getattr(message, kind)
        if body.index not in self._open:
            known = body.index < len(self._tokens)
            told = f"more of choice {body.index} after its end" if known else f"a choice {body.index} nobody asked for"
            raise EngineError("INTERNAL", f"the engine sent {told}", started=True)
        return self._chunk(body) if kind == "chunk" else self._finished(body)

    def end(self) -> None:
        """The stream is over: raises EngineError INTERNAL when a choice has no end."""
        if self._open:
            raise EngineError(
                "INTERNAL", f"the engine's stream ended before choice {min(self._open)} did", started=True
            )

    def _chunk(self, body: vllm_engine_pb2.GenerateStreamChunk) -> Chunk:
        self._tokens[body.index] += len(body.token_ids)
        return Chunk(
            index=body.index,
            token_ids=list(body.token_ids),
            logprobs=_logprobs(body),
            prompt_tokens=body.prompt_tokens,
            cached_tokens=body.cached_tokens,
        )

    def _finished(self, body: vllm_engine_pb2.GenerateComplete) -> Finished:
        self._open.discard(body.index)
        emitted = self._tokens[body.index]
        told = list(body.output_ids)
        if self._streams:
            new, logprobs = ([], ()) if emitted else (told, _logprobs(body))
            total = emitted + len(new)
        else:
            new, logprobs = told[emitted:], _logprobs(body)[emitted:]
            total = body.completion_tokens or len(told)
        matched = body.WhichOneof("matched_stop")
        return Finished(
            index=body.index,
            finish_reason=body.finish_reason,
            token_ids=new,
            logprobs=logprobs,
            matched_stop=None if matched is None else getattr(body, matched),
            prompt_tokens=body.prompt_tokens,
            completion_tokens=total,
            cached_tokens=body.cached_tokens,
        )


def _logprobs(
    body: vllm_engine_pb2.GenerateStreamChunk | vllm_engine_pb2.GenerateComplete,
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of the tokens of this message; empty when the engine sent none."""
    if not body.HasField("output_logprobs"):
        return ()
    told = body.output_logprobs
    if len(told.token_ids) != len(told.token_logprobs):
        raise EngineError("INTERNAL", "the engine sent log-probabilities without their tokens", started=True)
    rivals = [_top(entry) for entry in told.top_logprobs]
    rivals += [()] * (len(told.token_ids) - len(rivals))
    return tuple(map(TokenLogprob, told.token_ids, told.token_logprobs, rivals))


def _top(entry: vllm_engine_pb2.TopLogProbs) -> tuple[TopLogprob, ...]:
    """Most likely first, as `TokenLogprob` promises; the engine puts the sampled token in front."""
    pairs = sorted(zip(entry.token_ids, entry.values, strict=False), key=lambda pair: -pair[1])
    return tuple(TopLogprob(token_id, value) for token_id, value in pairs)


# ---------------------------------------------------------------- the worker


class VllmEngine:
    """One vLLM worker behind its channels."""

    name = "vllm"
    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    takes_references = True
    takes_segments = True
    service = SERVICE

    def __init__(self, channels: "WorkerChannels") -> None:
        self._channels = channels

    async def is_healthy(self, timeout_s: float) -> bool:
        """The engine's own word; EngineError when it does not answer."""
        reply = await self._unary(
            "HealthCheck", vllm_engine_pb2.HealthCheckRequest(), vllm_engine_pb2.HealthCheckResponse, timeout_s
        )
        return bool(reply.healthy)

    async def model_info(self, timeout_s: float) -> vllm_engine_pb2.GetModelInfoResponse:
        return await self._unary(
            "GetModelInfo", vllm_engine_pb2.GetModelInfoRequest(), vllm_engine_pb2.GetModelInfoResponse, timeout_s
        )

    async def server_info(self, timeout_s: float) -> vllm_engine_pb2.GetServerInfoResponse:
        return await self._unary(
            "GetServerInfo", vllm_engine_pb2.GetServerInfoRequest(), vllm_engine_pb2.GetServerInfoResponse, timeout_s
        )

    async def abort(self, attempt_id: str, timeout_s: float) -> None:
        await self._unary(
            "Abort", vllm_engine_pb2.AbortRequest(request_ids=[attempt_id]), vllm_engine_pb2.AbortResponse, timeout_s
        )

    def tensors(self, request: EngineRequest) -> list[Outgoing]:
        return tensors(request)

    def generate(
        self, request: EngineRequest, attempt_id: str, placements: Mapping[str, Handle]
    ) -> "Stream[vllm_engine_pb2.GenerateResponse]":
        """Sends the message and gives the stream of GenerateResponse."""
        parts = build(request, attempt_id, placements)
        return self._channels.stream(f"/{SERVICE}/Generate", parts, vllm_engine_pb2.GenerateResponse)

    def replies(self, request: EngineRequest) -> VllmReplies:
        return VllmReplies(request)

    async def tokenizer_bundle(self) -> AsyncIterator[tuple[bytes, str]]:
        """Pieces of the archive of tokenizer files with the digest, which is set on the last piece only."""
        async with self._channels.server_stream(
            f"/{SERVICE}/GetTokenizer", common_pb2.GetTokenizerRequest(), common_pb2.GetTokenizerChunk
        ) as chunks:
            async for chunk in chunks:
                yield chunk.data, chunk.sha256

    def close(self) -> None:
        self._channels.close()

    async def _unary(self, method: str, request: Message, reply_type: type[Message], timeout_s: float) -> Any:
        return await self._channels.unary(f"/{SERVICE}/{method}", request, reply_type, timeout_s=timeout_s)
