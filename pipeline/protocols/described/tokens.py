"""Answers of the routes of the tokenizer, and what is said of them."""

from pipeline.protocols.described.operation import BODY_REFUSALS, Operation, Told
from pipeline.protocols.tokens import DetokenizeRequest, TokenizeRequest


class Tokens(Told, frozen=True):
    """Of one text, or a list for each of several."""

    tokens: list[int | list[int]]
    count: int | list[int]
    char_count: int | list[int]


class Detokenized(Told, frozen=True):
    text: str | list[str]


_REFUSES = (*BODY_REFUSALS, "tokenizer_not_found", "tokenizer_not_ready", "context_length_exceeded")

TOKENIZE = Operation(
    tag="Tokens",
    summary="Ids of a text, or of several",
    takes=TokenizeRequest,
    gives=Tokens,
    refuses=_REFUSES,
)
DETOKENIZE = Operation(
    tag="Tokens",
    summary="The text of ids, or of several lists of them",
    takes=DetokenizeRequest,
    gives=Detokenized,
    refuses=_REFUSES,
)
