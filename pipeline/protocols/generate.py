"""`POST /generate`: SGLang's own form of a text, or of token ids, to go on with.  Its answers are in generate_reply.py.

Shapes are SMG 1.13's.  What it drops in silence (media, the prompt's log-probabilities) is refused here.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engines.base import Constraint
from pipeline.errors import GatewayError
from pipeline.plan import MediaPlan
from pipeline.protocols.constraints import one_constraint
from pipeline.protocols.parts import UINT32, decode_body
from pipeline.protocols.sampling import SamplingFields
from pipeline.tooluse import schema_constraint

UNNAMED = "unknown"  # the model of a request that names none

TokenId = Annotated[int, Meta(ge=0, le=UINT32)]


class SamplingParams(SamplingFields, frozen=True, kw_only=True):
    """`json_schema`: a schema as text, as SGLang has it."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=UINT32)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=UINT32)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def constraint(self) -> Constraint | None:
        """At most one of the three may say something."""
        return one_constraint(
            {
                "json_schema": None if self.json_schema is None else _schema(self.json_schema),
                "regex": Constraint("regex", self.regex) if self.regex else None,
                "ebnf": Constraint("grammar", self.ebnf) if self.ebnf else None,
            }
        )


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`text` comes before `input_ids`, as in SMG.  `rid`: what answers call the request."""

    model: str = UNNAMED
    text: str | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: SamplingParams = SamplingParams()
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=20)] | None = None
    logprob_start_len: int | None = None
    rid: str | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None

    @property
    def logprobs(self) -> int | None:
        """Rivals wanted for each token, None for no log-probabilities at all."""
        return (self.top_logprobs_num or 0) if self.return_logprob else None


_DECODER = msgspec.json.Decoder(GenerateRequest)
_ABSENT = ("image_data", "video_data", "audio_data")


def read(body: bytes | bytearray) -> GenerateRequest:
    """The request; GatewayError for what does not parse, is out of range or cannot be honoured."""
    request = decode_body(_DECODER, body)
    for name in _ABSENT:
        if getattr(request, name):
            raise GatewayError("unsupported_parameter", f"{name}: media come by the chat APIs", param=name)
    if request.return_logprob and request.logprob_start_len not in (None, -1):
        raise GatewayError(
            "unsupported_parameter",
            "logprob_start_len: the prompt has no log-probabilities here",
            param="logprob_start_len",
        )
    request.sampling_params.check()
    request.sampling_params.constraint  # noqa: B018  (raises)
    return request


def plan_of(request: GenerateRequest, defaults: Mapping[str, Any]) -> MediaPlan:
    """`defaults`: the worker's sampling defaults; where nobody says a temperature it is 1, as in SMG.

    Raises `resolve_input_failed` when there is no prompt, or more than one.
    """
    params = request.sampling_params
    sampling = params.sampling(
        {**defaults, "temperature": 1.0} if defaults.get("temperature") is None else defaults,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        n=params.n,
        logprobs=None if request.logprobs is None else max(request.logprobs, 1),
        constraint=params.constraint,
    )
    if params.sampling_seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=params.sampling_seed)
    return MediaPlan(
        model=request.model,
        messages=(),
        parts=(),
        sampling=sampling,
        stream=bool(request.stream),
        text=request.text,
        ids=None if request.text is not None else _ids(request.input_ids),
    )


def _ids(given: list[Any] | None) -> list[int]:
    if given is None:
        raise GatewayError("resolve_input_failed", "Either `text` or `input_ids` must be provided", param="text")
    if any(isinstance(one, list) for one in given):
        raise GatewayError(
            "resolve_input_failed", "input_ids: several prompts in one request are not supported", param="input_ids"
        )
    return given


def _schema(text: str) -> Constraint:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GatewayError("invalid_value", f"json_schema: no JSON: {error}", param="sampling_params") from None
    return schema_constraint(schema, "sampling_params.json_schema")
