"""The rendered prompt's ids against the media it must carry: one anchor per item, then every anchor becomes its
item's tokens.

`check_anchors` runs before anything is fetched, `expand` when the items' sizes are known.  Anchors are counted in
ids, not in text, so a literal anchor token in a message is seen however it is spelt around.  Ranges are relative to
the expanded prompt: structural ones cover the whole replacement (vLLM), feature ones the runs that receive embeddings
(TokenSpeed, SGLang). Text comes from `pipeline.template`, ids from `pipeline.tokenizer`, replacements from the
model's family.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from engines.base import Modality, Range
from pipeline.errors import GatewayError
from pipeline.models.base import Anchor, Replacement


class Expanded(msgspec.Struct, frozen=True):
    """The prompt as the engine gets it; `structural` and `features` have one entry per item, in the order of the
    items.
    """

    ids: list[int]
    structural: list[Range]
    features: list[tuple[Range, ...]]


def check_anchors(ids: Sequence[int], anchors: Mapping[Modality, tuple[Anchor, int]]) -> None:
    """Exactly one anchor in the prompt for every item, none for a modality without items.

    `anchors`: every modality the model takes, with the number of its items (0 too: a literal anchor would otherwise
    reach the engine with no pixels behind it).  Modalities may share a token; their items are then counted together.
    Raises `multimodal_prompt_contract_mismatch`.
    """
    expected: dict[int, int] = {}
    words: dict[int, str] = {}
    for modality, (anchor, count) in anchors.items():
        expected[anchor.token_id] = expected.get(anchor.token_id, 0) + count
        if count or anchor.token_id not in words:
            words[anchor.token_id] = modality.value
    for token_id, count in expected.items():
        found = ids.count(token_id)
        if found != count:
            raise GatewayError(
                "multimodal_prompt_contract_mismatch",
                f"rendered {words[token_id]} anchor count mismatch: expected {count}, found {found}; "
                "verify the chat template contract and escape literal media anchors in user text",
            )


def expand(ids: Sequence[int], anchors: Sequence[int], replacements: Sequence[Replacement]) -> Expanded:
    """Put every item's tokens in place of its anchor.

    `anchors[i]` is the anchor token of item i, `replacements[i]` what it becomes.  Items with the same anchor token
    take its occurrences in turn, so a template may move one modality before the other.  Raises ValueError when the
    prompt does not hold exactly these anchors, or a prefix reaches before the prompt: `check_anchors` was not asked,
    or the family is wrong.
    """
    turns: dict[int, list[int]] = {}
    for item, token_id in enumerate(anchors):
        turns.setdefault(token_id, []).append(item)
    places = [
        (position, item)
        for token_id, items in turns.items()
        for position, item in zip(positions(ids, token_id), items, strict=True)
    ]
    expanded: list[int] = []
    structural = [Range(0, 0)] * len(anchors)
    features: list[tuple[Range, ...]] = [()] * len(anchors)
    copied = 0
    for position, item in sorted(places):
        replacement = replacements[item]
        expanded += ids[copied:position]
        copied = position + 1
        start = len(expanded)
        if replacement.prefix > start:
            raise ValueError(f"item {item}: {replacement.prefix} structural tokens before an anchor at {start}")
        expanded += replacement.token_ids
        structural[item] = Range(start - replacement.prefix, len(replacement.token_ids) + replacement.prefix)
        features[item] = tuple(Range(start + offset, length) for offset, length in replacement.features)
    expanded += ids[copied:]
    return Expanded(expanded, structural, features)


def positions(ids: Sequence[int], token_id: int) -> Iterator[int]:
    """Where a token stands, by the list's own search."""
    position = -1
    for _ in range(ids.count(token_id)):
        position = ids.index(token_id, position + 1)
        yield position
