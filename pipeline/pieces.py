"""What a tokenizer made of the pieces of earlier prompts: system prompts, a template's own words, past turns.

Theory of operation.  The library looks for added tokens first, in the raw text, from the left and the longest first.
What stands between two of them is normalised, split and encoded by itself, whatever stands before or behind it.  So a
prompt may be cut at its added tokens by us, and a piece that was seen before need not be encoded again: a
conversation's new turn costs its own length, not the conversation's.

That holds for tokenizers whose added tokens take no white space with them (`lstrip`, `rstrip`) and no account of their
neighbours (`single_word`), and whose normaliser and pre-tokeniser do not ask where in the text a piece stands, as
Metaspace does for the first one.  For all others `cut_of` says None.
"""

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

MOST_BYTES = 16 << 20  # of one tokenizer's pieces
LONGEST_TEXT = 1 << 17  # characters: cutting holds the interpreter, 10 ms for the worst text of this length
_TOKEN_BYTES = 40  # an int and its place in a tuple
_ENTRY_BYTES = 200

_BLIND_TO_PLACE = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace", "Prepend")  # normalisers
    + (
        "ByteLevel",
        "Split",
        "Digits",
        "Punctuation",
        "Whitespace",
        "WhitespaceSplit",
    )  # pre-tokenisers
)

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Ids of each text, special tokens in it parsed, none added."""


class Cut:
    """Where prompts are cut: `tokens` are the added tokens of one tokenizer with their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._pattern = re.compile(f"({_any_of(tokens)})")

    def parts(self, text: str) -> list[str]:
        """Pieces at even places, which may be empty, and the tokens between them at odd ones."""
        return self._pattern.split(text)

    def id_of(self, token: str) -> int:
        return self._tokens[token]


class Pieces:
    """Encodes prompts piece by piece; may be used from threads.  At most about `most_bytes` are kept."""

    def __init__(self, cut: Cut, encode: Encode, most_bytes: int = MOST_BYTES) -> None:
        self._cut = cut
        self._encode = encode
        self._most_bytes = most_bytes
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # the longest unused first
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """What is kept, about."""
        return self._nbytes

    def ids(self, text: str) -> list[int]:
        """The ids of `text`, as the library encodes the whole; a text beyond LONGEST_TEXT is left to it."""
        if len(text) > LONGEST_TEXT:
            return self._encode([text])[0]
        parts = self._cut.parts(text)
        known = self._ids_of({part for part in parts[::2] if part})
        found: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                found.append(self._cut.id_of(part))
            elif part:
                found += known[part]
        return found

    def _ids_of(self, pieces: set[str]) -> Mapping[str, Sequence[int]]:
        found: dict[str, Sequence[int]] = {}
        with self._lock:
            for piece in pieces:
                if (ids := self._known.get(piece)) is not None:
                    self._known.move_to_end(piece)
                    found[piece] = ids
        new = [piece for piece in pieces if piece not in found]
        for piece, encoded in zip(new, self._encode(new) if new else (), strict=True):
            found[piece] = encoded
            self._keep(piece, tuple(encoded))
        return found

    def _keep(self, piece: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            if piece in self._known:  # another thread was as quick
                return
            self._known[piece] = ids
            self._nbytes += _cost(piece, ids)
            while self._nbytes > self._most_bytes:
                self._nbytes -= _cost(*self._known.popitem(last=False))


def _any_of(words: Collection[str]) -> str:
    """An expression for the longest of the words that stands at a place.  Words that begin alike share their beginning,
    so that a place costs the words' length and not their number: some tokenizers have a thousand.
    """
    tails: dict[str, list[str]] = {}
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    choices = [_branch(letter, further) for letter, further in tails.items()]
    expression = choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
    return f"(?:{expression})?" if "" in words else expression


def _branch(begin: str, tails: list[str]) -> str:
    while len(heads := {tail[:1] for tail in tails}) == 1 and "" not in heads:
        begin += heads.pop()
        tails = [tail[1:] for tail in tails]
    return re.escape(begin) + (_any_of(tails) if any(tails) else "")


def _cost(piece: str, ids: tuple[int, ...]) -> int:
    return _ENTRY_BYTES + sys.getsizeof(piece) + _TOKEN_BYTES * len(ids)


def cut_of(library: LibraryTokenizer) -> Cut | None:
    """Where this tokenizer's prompts may be cut; None where pieces say nothing about the whole."""
    added = library.get_added_tokens_decoder()
    tokens = {token.content: token_id for token_id, token in added.items() if not token.normalized}
    is_clean = all(
        token.normalized or not (token.lstrip or token.rstrip or token.single_word) for token in added.values()
    )
    if not tokens or "" in tokens or not is_clean or library.encode_special_tokens:
        return None
    steps = (*_steps(library.normalizer), *_steps(library.pre_tokenizer))
    try:
        return Cut(tokens) if _BLIND_TO_PLACE.issuperset(steps) else None
    except RecursionError:  # hundreds of tokens, each the beginning of the next
        return None


def _steps(component: Any) -> list[str]:
    """The kinds of a normaliser or pre-tokeniser, those of a sequence one by one."""
    if component is None:
        return []
    told = json.loads(component.__getstate__())
    members = told.get("normalizers", told.get("pretokenizers")) if told["type"] == "Sequence" else [told]
    return [member["type"] for member in members]
