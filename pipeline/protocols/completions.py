"""`POST /v1/completions`: a text to go on with.  Its answers are in completions_reply.py.

The prompt goes to the engine as it is, without a template and without media; tokens that stand for media are refused
as in chat.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.errors import GatewayError
from pipeline.plan import MediaPlan
from pipeline.protocols.chat import StreamOptions
from pipeline.protocols.parts import UINT32, decode_body
from pipeline.protocols.sampling import SamplingFields

MOST_CHOICES = 128  # of one request, all prompts together


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    model: str
    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=MOST_CHOICES)]
    max_tokens: Annotated[int, Meta(ge=1, le=UINT32)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=UINT32)] | None = None
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
    def texts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


_DECODER = msgspec.json.Decoder(CompletionRequest)


def read(body: bytes | bytearray) -> CompletionRequest:
    """The request; GatewayError for what does not parse, is out of range or belongs to a later version."""
    request = decode_body(_DECODER, body)
    absent = {"suffix": bool(request.suffix), "best_of": request.best_of not in (None, request.choices)}
    for name, asked in absent.items():
        if asked:
            raise GatewayError("unsupported_parameter", f"'{name}' is not available in this version", param=name)
    if len(request.texts) * request.choices > MOST_CHOICES:
        raise GatewayError(
            "integer_above_max_value",
            f"n: {request.choices} choices for each of {len(request.texts)} prompts are more than {MOST_CHOICES}",
            param="n",
        )
    request.check()
    return request


def plans_of(request: CompletionRequest, defaults: Mapping[str, Any]) -> list[MediaPlan]:
    """One for each prompt.  `defaults`: the worker's sampling defaults."""
    sampling = request.sampling(
        defaults,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        n=request.n,
        logprobs=None if request.logprobs is None else max(request.logprobs, 1),
    )
    return [
        MediaPlan(model=request.model, messages=(), parts=(), sampling=sampling, stream=bool(request.stream), text=text)
        for text in request.texts
    ]
