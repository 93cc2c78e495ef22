"""The model's tokenizer: a prompt to ids, ids to text, and the two look-ups families and checks need.

Over `tokenizers` (the library behind transformers' fast tokenizers), so ids are the engine's own.  Special tokens
written in the text are parsed, none is added: chat templates write theirs themselves, and the recorded prompts show
nothing else.  `encode` of the library keeps the interpreter lock, its `encode_batch_fast` does not (0.23, measured:
gaps of 6 ms instead of 600 ms for 2 MB), so long texts go through the latter in a thread.  What was encoded before is
not encoded again (`pipeline.pieces`).
TOKENIZERS_PARALLELISM=false belongs in the environment before the first import (`gateway.py`); without it the library
starts threads of its own.
"""

import asyncio
import json
import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import ByteLevel

from pipeline.detokenize import ByteStream, ByteTable, DecodeStream, WindowStream
from pipeline.errors import GatewayError
from pipeline.pieces import Pieces, cut_of

THREAD_CHARACTERS = 8192  # about 3 ms of encoding
LONG_CHARACTERS = 1 << 18  # from here on few at a time, for their memory
LONG_AT_A_TIME = 2
PIECE_BYTES = 1 << 20
_CUT_TOKENS = 64  # a cut may fall into a special token's spelling, which is then many tokens
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A loaded tokenizer.json.  Owned by the frontend; its methods may be called from threads as well."""

    def __init__(self, library: LibraryTokenizer) -> None:
        """Takes `library` over: truncation and padding, which some checkpoints ship, are switched off."""
        self._long_texts = asyncio.Semaphore(LONG_AT_A_TIME)
        library.no_truncation()
        library.no_padding()
        self._library = library
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = ByteTable(self.token_of) if isinstance(library.decoder, ByteLevel) else None
        self._falls_back_to_bytes = self._bytes is None and _has_byte_fallback(library)
        self._context = None if self._bytes is not None else _context_token(library, self.special_ids)
        cut = cut_of(library)
        self._pieces = None if cut is None else Pieces(cut, self._encode)

    async def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Ids of `text`; a long one is encoded in a thread.  Raises `process_messages_failed` for text that is not
        Unicode.

        A long text of more than `most` tokens raises `context_length_exceeded` as soon as that is known: a token takes
        the library some 150 bytes while it works, and text that will be refused may be megabytes of them.
        """
        if len(text) <= THREAD_CHARACTERS:
            return self.encode_now(text)
        if len(text) <= LONG_CHARACTERS or most is None:
            return await asyncio.to_thread(self.encode_now, text)
        async with self._long_texts:
            return await asyncio.to_thread(self._encode_long, text, most)

    def _encode_long(self, text: str, most: int) -> list[int]:
        """Piece by piece to know how many tokens there are, then the whole; no token has less than a byte."""
        _refuse_surrogates(text)
        data = text.encode()
        tokens = 0
        for start in range(0, len(data), PIECE_BYTES) if len(data) > PIECE_BYTES else ():
            piece = data[start : start + PIECE_BYTES].decode("utf-8", "ignore")
            tokens += max(0, len(self.encode_now(piece)) - _CUT_TOKENS)
            if tokens > most:
                raise GatewayError(
                    "context_length_exceeded",
                    f"This model's maximum context length is {most} tokens. However, your request has at least "
                    f"{tokens} input tokens. Please reduce the length of the input.",
                )
        return self.encode_now(text)

    def encode_now(self, text: str) -> list[int]:
        """As `encode`, in the calling thread."""
        if not text.isascii():
            _refuse_surrogates(text)
        return self._encode([text])[0] if self._pieces is None else self._pieces.ids(text)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoded.ids for encoded in self._library.encode_batch_fast(texts, add_special_tokens=False)]

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, added tokens included."""
        found: int | None = self._library.token_to_id(token)
        return found

    def token_of(self, token_id: int) -> str | None:
        """The vocabulary's spelling (byte-level and metaspace alphabets as they are); None for an unknown id."""
        try:
            found: str | None = self._library.id_to_token(token_id)
        except OverflowError:  # an engine's negative or 64-bit id
            return None
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The library's own decode of everything at once."""
        text: str = self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_stream(self, *, skip_special_tokens: bool = True, kept: Collection[int] = frozenset()) -> DecodeStream:
        """A fresh stream.  `kept`: special tokens whose text appears although the others are skipped."""
        skipped = self.special_ids.difference(kept) if skip_special_tokens else frozenset[int]()
        if self._bytes is not None:
            return ByteStream(self._bytes, skipped)
        return WindowStream(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            lambda token: token not in skipped and self.token_of(token) is not None,
        )

    def bytes_of(self, token_id: int) -> bytes:
        """What one token adds to a running text, as bytes: part of a character for many; its spelling for a special
        one.
        """
        if self._bytes is not None:
            return self._bytes[token_id]
        token = self.token_of(token_id)
        if token is None:
            return b""
        byte = _BYTE_FALLBACK.fullmatch(token) if self._falls_back_to_bytes else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        before = [] if self._context is None else [self._context]
        whole = self.decode([*before, token_id], skip_special_tokens=False)
        return whole[len(self.decode(before, skip_special_tokens=False)) :].encode()


def _refuse_surrogates(text: str) -> None:
    """JSON can spell half a surrogate pair; no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GatewayError(
            "process_messages_failed", "the messages hold an unpaired surrogate, which is not text"
        ) from None


def _has_byte_fallback(library: LibraryTokenizer) -> bool:
    if library.decoder is None:
        return False
    return '"ByteFallback"' in json.dumps(json.loads(library.decoder.__getstate__()))


def _context_token(library: LibraryTokenizer, special_ids: Collection[int]) -> int | None:
    """A plain word to stand before a token whose text in the middle of a sentence is wanted."""
    for token_id in range(library.get_vocab_size()):
        token = library.id_to_token(token_id)
        if token is not None and token_id not in special_ids and token.isascii() and token.isalnum():
            return token_id
    return None
