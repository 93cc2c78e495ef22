"""TensorRT-LLM: an `EngineRequest` becomes a GenerateRequest of `trtllm_service.proto`, its replies become events.

Rule: pictures go as the files they came from and nothing else; the engine's own processor makes pixels of them, while
the token ids still carry the expanded placeholders.  Every field is what SMG sends (`tests/data/engine_messages`),
except that `min_tokens` and `stop_token_ids` are sent as well.
"""

from collections.abc import Mapping
from typing import Any

from smg_grpc_proto.generated import trtllm_service_pb2 as pb

from engines.base import EngineRequest, Form, Modality, Sampling, TokenLogprob
from engines.engine import GrpcEngine
from engines.replies import StreamReplies, ranked
from engines.transport import Placements
from engines.wire import Part, field

_MULTIMODAL_INPUT, _IMAGE_DATA = 15, 1
_GUIDES = pb.GuidedDecodingParams
_CONSTRAINTS = {
    "json_schema": _GUIDES.GUIDE_TYPE_JSON_SCHEMA,
    "regex": _GUIDES.GUIDE_TYPE_REGEX,
    "grammar": _GUIDES.GUIDE_TYPE_EBNF_GRAMMAR,
}
MAX_TOKENS = 2048
"""What is asked for when the client says nothing: the engine wants a number."""


# ---------------------------------------------------------------- the message


def build(request: EngineRequest, attempt_id: str) -> list[Part]:
    """The Generate message of one attempt as a list of buffers; see `engines.vllm.build`."""
    sampling = request.sampling
    message = pb.GenerateRequest(
        request_id=attempt_id,
        tokenized=pb.TokenizedInput(original_text=request.original_text, input_token_ids=request.input_ids),
        sampling_config=sampling_config(sampling),
        output_config=pb.OutputConfig(logprobs=sampling.logprobs, exclude_input_from_output=True),
        max_tokens=MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
        streaming=request.stream,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )
    if (constraint := sampling.constraint) is not None:
        message.guided_decoding.guide_type = _CONSTRAINTS[constraint.kind]
        message.guided_decoding.guide = constraint.text
    parts: list[Part] = [message.SerializeToString()]
    for batch in request.media:
        for item in batch.items:
            parts += field([_MULTIMODAL_INPUT, _IMAGE_DATA], [item.encoded])
    return parts


def sampling_config(sampling: Sampling) -> pb.SamplingConfig:
    """What the client did not say stays unset, but for the three SMG always sends.  There is no seed, as in SMG."""
    return pb.SamplingConfig(
        beam_width=1,
        num_return_sequences=sampling.n,
        top_k=None if sampling.top_k is None else max(sampling.top_k, 0),
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        min_tokens=sampling.min_tokens or None,
        repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_p=sampling.min_p,
    )


# ---------------------------------------------------------------- replies and worker


class TrtllmReplies(StreamReplies):
    """Other names for index and tokens, and log-probabilities by token instead of in columns."""

    index_field = "sequence_index"
    output_field = "output_token_ids"

    def finish_reason(self, body: Any) -> str:
        """A matched stop string or token is "stop" for clients, as with every other engine."""
        return "stop" if body.finish_reason == "stop_word" else str(body.finish_reason)

    def logprobs(self, body: Any) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(
                told.token_id, told.logprob, ranked((rival.token_id, rival.logprob) for rival in told.top_logprobs)
            )
            for told in body.logprobs
        )


class TrtllmEngine(GrpcEngine):
    """One TensorRT-LLM worker behind its channels."""

    name = "trtllm"
    service = "trtllm.TrtllmService"
    messages = pb
    modalities = frozenset({Modality.IMAGE})
    unsendable = ("logit_bias",)

    def form(self, told: Mapping[str, str], dtype: str | None, dtypes: Mapping[Modality, str]) -> Form:
        return Form(tensors=False, encoded=True)

    async def is_healthy(self, timeout_s: float) -> bool:
        """It says so in a word."""
        return str((await self._health(timeout_s)).status).strip().upper() == "OK"

    def build(self, request: EngineRequest, attempt_id: str, placements: Placements) -> list[Part]:
        return build(request, attempt_id)

    def replies(self, request: EngineRequest) -> TrtllmReplies:
        return TrtllmReplies(request)
