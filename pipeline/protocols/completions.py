"""`POST /v1/completions`: a text to go on with.  Its answers are in completions_reply.py.

The prompt goes to the engine as it is, without a template and without media; tokens that stand for media are refused
as in chat.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engines.base import Sampling
from pipeline.errors import GatewayError
from pipeline.plan import MediaPlan
from pipeline.protocols.chat import StreamOptions, token_biases
from pipeline.protocols.parts import UINT32, decode_body


class CompletionRequest(msgspec.Struct, frozen=True):
    model: str
    prompt: str | Annotated[list[str], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=UINT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=UINT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=4)] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0, le=UINT32)]] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=UINT32)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


_DECODER = msgspec.json.Decoder(CompletionRequest)


def read(body: bytes | bytearray) -> CompletionRequest:
    """The request; GatewayError for what does not parse, is out of range or belongs to a later version."""
    request = decode_body(_DECODER, body)
    absent = {
        "prompt": len(request.prompt) > 1 and not isinstance(request.prompt, str),
        "suffix": bool(request.suffix),
        "best_of": request.best_of not in (None, request.choices),
    }
    for name, asked in absent.items():
        if asked:
            detail = "several prompts in one request are" if name == "prompt" else f"'{name}' is"
            raise GatewayError("unsupported_parameter", f"{detail} not available in this version", param=name)
    if request.stop == "":
        raise GatewayError("invalid_value", "stop: a stop sequence must not be empty", param="stop")
    return request


def plan_of(request: CompletionRequest, defaults: Mapping[str, Any]) -> MediaPlan:
    """`defaults`: the worker's sampling defaults."""
    return MediaPlan(
        model=request.model,
        messages=(),
        parts=(),
        sampling=sampling_of(request, defaults),
        stream=bool(request.stream),
        text=request.text,
    )


def sampling_of(request: CompletionRequest, defaults: Mapping[str, Any]) -> Sampling:
    """The client's value, else the worker's, else unset."""

    def chosen(name: str) -> Any:
        value = getattr(request, name)
        return defaults.get(name) if value is None else value

    stop = request.stop or ()
    return Sampling(
        temperature=chosen("temperature"),
        top_p=chosen("top_p"),
        top_k=chosen("top_k"),
        min_p=chosen("min_p"),
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=chosen("repetition_penalty"),
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        n=request.choices,
        seed=request.seed,
        logprobs=None if request.logprobs is None else max(request.logprobs, 1),
        logit_bias=token_biases(request.logit_bias or {}),
    )
