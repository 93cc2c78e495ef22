"""What the schedulers of SGLang and TokenSpeed are told alike: TokenSpeed's protocol began as SGLang's.

Rule: `messages` is the protobuf module of either; fields have the same names and meanings in both, though other
numbers.  What only one has (stop strings, a seed, media) its own file adds.
"""

from typing import Any

from google.protobuf.message import Message

from engines.base import EngineRequest, Sampling

_CONSTRAINTS = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf_grammar"}  # members of one oneof


def generate_request(messages: Any, request: EngineRequest, attempt_id: str, params: Message) -> Any:
    """A GenerateRequest without media; `params` is its SamplingParams."""
    logprobs = request.sampling.logprobs
    return messages.GenerateRequest(
        request_id=attempt_id,
        tokenized=messages.TokenizedInput(original_text=request.original_text, input_ids=request.input_ids),
        sampling_params=params,
        return_logprob=logprobs is not None,
        logprob_start_len=-1,
        top_logprobs_num=logprobs or 0,
        stream=request.stream,
    )


def sampling_params(messages: Any, sampling: Sampling) -> Any:
    """Unset parameters become the values SMG sends; only `max_new_tokens` stays unset.  Nothing that stops a text and
    no seed is in it yet.
    """
    params = messages.SamplingParams(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=-1 if sampling.top_k is None else sampling.top_k,
        min_p=sampling.min_p or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        n=sampling.n,
        ignore_eos=sampling.ignore_eos,
        logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
    )
    if sampling.constraint is not None:
        setattr(params, _CONSTRAINTS[sampling.constraint.kind], sampling.constraint.text)
    return params


def abort_request(messages: Any, attempt_id: str) -> Message:
    request: Message = messages.AbortRequest(request_id=attempt_id, reason="the gateway dropped the generation")
    return request
