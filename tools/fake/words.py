"""What the stand-in answers: a sentence about what it saw, as tokens of the bundle's own tokenizer.

The gateway turns the tokens back into the sentence, so a user reads what the engine received.  Ends are vLLM's: the
end token and the tokens of a matched stop string are part of the output, and `finish_reason` is "stop" or "length".
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tools.fake.received import Seen, SeenBatch

_PLURAL = {"image": "images", "video": "clips", "audio": "sounds"}
_SINGULAR = {"image": "image", "video": "clip", "audio": "sound"}
_ALTERNATIVES = 20


@dataclasses.dataclass(frozen=True)
class Answer:
    """The whole output of one choice."""

    token_ids: tuple[int, ...]
    finish_reason: str
    matched_token: int | None = None
    matched_text: str | None = None


def sentence(seen: Seen, text: str) -> str:
    """`I received 1 image: pixel_values float32 (1200, 1536), image_grid_thw [1, 30, 40], 300 image tokens at ...`"""
    if seen.references:
        listed = "; ".join(f"{modality} {url[:60]} of {len(url)} characters" for modality, url in seen.references)
        return f"I received {len(seen.references)} media by reference: {listed}."
    if not seen.batches:
        return f"I received no media, {len(seen.input_ids)} prompt tokens: {text!r}."
    return f"I received {'; and '.join(_batch(batch) for batch in seen.batches)}."


def _batch(batch: SeenBatch) -> str:
    items = len(batch.ranges)
    word = (_SINGULAR if items == 1 else _PLURAL)[batch.modality]
    pixels = batch.tensors["pixel_values"]
    grids = batch.grids
    listed = []
    for at, ((offset, length), digest) in enumerate(zip(batch.ranges, batch.hashes, strict=True)):
        grid = f"{batch.grid_name} {grids[at]}, " if grids is not None else ""
        listed.append(
            f"{grid}{length} {batch.modality} tokens at {offset}..{offset + length - 1}, blake3 {digest[:12]}..."
        )
    return f"{items} {word}: pixel_values {pixels.dtype} {pixels.shape}, {'; '.join(listed)}"


def last_turn(prompt: str) -> str:
    """The user's words in a rendered prompt of the `<|im_start|>` kind; the whole prompt for another template."""
    head, found, tail = prompt.rpartition("<|im_start|>user\n")
    return tail.partition("<|im_end|>")[0] if found else prompt


def told_to_say(turn: str) -> str:
    """`[[say TEXT]]` in the user's words makes the stand-in answer TEXT, which may hold brackets itself."""
    _, found, rest = turn.partition("[[say ")
    return rest.rpartition("]]")[0] if found else ""


def answer(tokenizer: Any, text: str, sampling: Any, ends: Sequence[int]) -> Answer:
    """Tokens of `text` under the request's sampling parameters (a protobuf SamplingParams).

    With `ignore_eos` and a limit the text is repeated until the limit is reached.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    limit = sampling.max_tokens if sampling.HasField("max_tokens") else None
    if sampling.ignore_eos and limit is not None and ids:
        ids = list(itertools.islice(itertools.cycle(ids), limit))
    elif ends:
        ids.append(ends[0])
    end = len(ids)
    matched_token: int | None = None
    matched_text: str | None = None
    for at, token in enumerate(ids[:limit]):
        if token in sampling.stop_token_ids:
            end, matched_token = at + 1, token
            break
    if sampling.stop:
        cut, stop = _first_stop(tokenizer, ids[:end], sampling.stop)
        if stop is not None and (limit is None or cut <= limit):
            end, matched_token, matched_text = cut, None, stop
    if limit is not None and limit < end:
        return Answer(tuple(ids[:limit]), "length")
    complete = matched_token is not None or matched_text is not None or not sampling.ignore_eos
    return Answer(tuple(ids[:end]), "stop" if complete else "length", matched_token, matched_text)


def _first_stop(tokenizer: Any, ids: list[int], stops: Sequence[str]) -> tuple[int, str | None]:
    """How many tokens until the text so far holds one of `stops`, and which."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        for stop in stops:
            if stop in text:
                return count, stop
    return len(ids), None


def logprobs(pb: Any, tokens: Sequence[int], count: int, vocabulary: int) -> Any:
    """Made-up but deterministic log-probabilities: -0.25 for what was said, falling by 1 for each rival."""
    rows = []
    for token in tokens:
        rivals = [token, *((token + step) % vocabulary for step in range(1, min(count, _ALTERNATIVES)))]
        rows.append(pb.TopLogProbs(token_ids=rivals[:count], values=[-0.25 - at for at in range(len(rivals[:count]))]))
    return pb.OutputLogProbs(token_ids=tokens, token_logprobs=[-0.25] * len(tokens), top_logprobs=rows)
