"""How the next token is drawn and where an answer stops: the fields that OpenAI's APIs and `/generate` share.

Ranges and defaults: SMG 1.13's measured answers.  A worker may tell defaults of its own, its model's generation config.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engines.base import Constraint, Sampling
from pipeline.errors import GatewayError
from pipeline.protocols.parts import UINT32


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """null means absent wherever clients send it."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=UINT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=4)] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0, le=UINT32)]] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """What types and ranges alone cannot say."""
        if self.stop == "":
            raise GatewayError("invalid_value", "stop: a stop sequence must not be empty", param="stop")

    def sampling(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int | None,
        min_tokens: int | None = None,
        n: int | None = None,
        logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Sampling:
        """The client's value, else the worker's of `defaults`, else unset.  Raises `invalid_value` for a biased token
        that is none.
        """

        def chosen(name: str) -> Any:
            value = getattr(self, name)
            return defaults.get(name) if value is None else value

        return Sampling(
            temperature=chosen("temperature"),
            top_p=chosen("top_p"),
            top_k=chosen("top_k"),
            min_p=chosen("min_p"),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=chosen("repetition_penalty"),
            max_tokens=max_tokens,
            min_tokens=min_tokens or 0,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            n=n or 1,
            seed=self.seed,
            logprobs=logprobs,
            logit_bias=token_biases(self.logit_bias or {}),
            constraint=constraint,
        )


def token_biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for text, bias in given.items():
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31):
            raise GatewayError("invalid_value", f"logit_bias: {text[:40]!r} is not a token id", param="logit_bias")
        biases[int(text)] = bias
    return biases
