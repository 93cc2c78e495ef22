"""Token ids to text while they arrive: pieces that joined are what the tokenizer's own decode gives for all ids.

Two ways.  A byte-level vocabulary (GPT-2's byte alphabet: Qwen, Llama 3 and 4, DeepSeek, GLM, ...) maps every token
to bytes, so a table and an incremental UTF-8 decoder are exact and cost no call into the tokenizer.  Every other
decoder (Metaspace, byte fallback, WordPiece, ...) writes a token differently depending on what stands before it;
there the last settled tokens are decoded again with the new ones and the difference is the new text.  A character
whose bytes are not all there is held back; what never becomes whole comes out as U+FFFD at the end.
`pipeline.tokenizer` chooses; `pipeline.reply` reads.
"""

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

SLICE = 32  # tokens settled at a time by WindowStream: bounds what is decoded twice
MOST_CUT = 3  # tokens that may be the beginning of a character
MOST_HELD = 16  # an incomplete character is at most four byte tokens; more held ones will never become text


class DecodeStream(Protocol):
    """One output being detokenized."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became certain; unknown ids are nothing, as in the tokenizer's decode."""
        ...

    def finish(self) -> str:
        """The rest: U+FFFD for bytes that never became a character.  The stream is spent."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of bytes to printable characters, turned round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    found.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return found


_BYTE_OF = _byte_alphabet()


def bytes_of_token(token: str) -> bytes:
    """A byte-level token's bytes; one with a foreign character (an added token, mostly) stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


class ByteTable(dict[int, bytes]):
    """Token id to bytes, filled on demand; b"" for an id the vocabulary lacks."""

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._token_of = token_of

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        found = self[token_id] = b"" if token is None else bytes_of_token(token)
        return found


class ByteStream:
    """DecodeStream of a byte-level vocabulary.  `skipped`: ids that give no text."""

    def __init__(self, table: Mapping[int, bytes], skipped: Collection[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._table, self._skipped
        return self._utf8.decode(b"".join([table[token] for token in token_ids if token not in skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class WindowStream:
    """DecodeStream of any other tokenizer, by `decode` over a short window.

    `decode`: ids to text, special tokens kept.  `is_text`: whether an id gives text at all (known and not skipped);
    only those enter the window, so that the first of it is never a token that decode drops (the next would then be
    written like the first of a text, without its leading space).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], is_text: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_text = is_text
        self._settled: list[int] = []  # the context: text of these is out
        self._held: list[int] = []
        self._known = 0  # characters of decode(settled + held) that are out

    def feed(self, token_ids: Sequence[int]) -> str:
        fresh = [token for token in token_ids if self._is_text(token)]
        return "".join([self._push(fresh[start : start + SLICE]) for start in range(0, len(fresh), SLICE)])

    def finish(self) -> str:
        return self._decode(self._settled + self._held)[self._known :]

    def _push(self, fresh: list[int]) -> str:
        """Settle what is whole.  A character that lacks bytes spoils the text of all byte tokens before it: it is set
        aside, at most three tokens of it, before they are looked at.
        """
        self._held += fresh
        whole = len(self._held)
        text = self._decode(self._settled + self._held)
        while text.endswith("\ufffd") and whole and len(self._held) - whole < MOST_CUT:
            whole -= 1
            text = self._decode(self._settled + self._held[:whole])
        if text.endswith("\ufffd"):
            if len(self._held) < MOST_HELD + len(fresh):
                return ""
            whole = len(self._held)
            text = self._decode(self._settled + self._held)
        if not whole:
            return ""
        piece = text[self._known :]
        self._settled, self._held = self._held[:whole], self._held[whole:]
        self._known = len(self._decode(self._settled))
        return piece
