"""MLX: an `EngineRequest` becomes a GenerateRequest of `mlx_engine.proto`, its replies become events.

Rule: text only, one choice, and no stop strings: what the message cannot say and the answer would miss is refused, and
another worker of the model is asked if there is one.  Every field is what SMG sends (`tests/data/engine_messages`).
"""

from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from engines.base import EngineRequest, Sampling
from engines.engine import MIB, GrpcEngine
from engines.replies import StreamReplies
from engines.transport import Placements
from engines.wire import Part

_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
_MAX_LOGPROBS = 20


def build(request: EngineRequest, attempt_id: str) -> list[Part]:
    """The Generate message of one attempt."""
    message = pb.GenerateRequest(
        request_id=attempt_id,
        tokenized=pb.TokenizedInput(original_text=request.original_text, input_ids=request.input_ids),
        sampling_params=sampling_params(request.sampling),
        stream=request.stream,
    )
    return [message.SerializeToString()]


def sampling_params(sampling: Sampling) -> pb.SamplingParams:
    """Unset parameters become the values SMG sends; a seed that is no int32 is left out."""
    params = pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=max(sampling.top_k or 0, 0),
        min_p=sampling.min_p or 0.0,
        repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        logit_bias=dict(sampling.logit_bias),
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )
    if sampling.seed is not None and _INT32_MIN <= sampling.seed <= _INT32_MAX:
        params.seed = sampling.seed
    if sampling.logprobs is not None:
        params.logprobs = min(sampling.logprobs or 1, _MAX_LOGPROBS)
    return params


class MlxReplies(StreamReplies):
    """A matched stop is always a token."""

    def matched_stop(self, body: Any) -> int | str | None:
        return int(body.matched_stop_token_id) if body.HasField("matched_stop_token_id") else None


class MlxEngine(GrpcEngine):
    """One MLX worker behind its channels."""

    name = "mlx"
    service = "mlx.grpc.engine.MlxEngine"
    messages = pb
    unsendable = ("n", "stop", "min_tokens", "constraint")
    max_message_bytes = 256 * MIB

    def build(self, request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
        return build(request, attempt_id)

    def replies(self, request: EngineRequest) -> MlxReplies:
        return MlxReplies(request)

    def _abortion(self, attempt_id: str) -> Message:
        request: Message = pb.AbortRequest(request_ids=[attempt_id])
        return request
