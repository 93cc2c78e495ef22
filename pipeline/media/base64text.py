"""Base64 text as clients write it, to the bytes they meant, or a refusal; never to other bytes.

Accepted beyond the strict alphabet: white space (MIME encoders wrap lines), missing padding, the URL-safe alphabet,
percent-encoding (`%2B`, `%0A`).  Refused: any other character, padding that is too long or not at the end, a length
no encoder writes.  Clean text, nearly all of it, takes one pass straight from the shared mapping; the rest is cleaned
in a copy.  What could be damage is decided like this:
- `+` and `-`, `/` and `_` stand for the same values, so a mixed text has one meaning: accepted, as Node's Buffer
  does.
- Bits left over in the last character are dropped when the padding is there (CPython, browsers, Go, Node, vLLM do
  so); without padding they say that the text was cut: refused.
- A form decoder turns every `+` into a space.  Where spaces occur and no `+` or `-` is left, the padding must be
  complete and, when the number of spaces would hide in it (a multiple of four), they must part the text into equal
  lines.
"""

import re

import pybase64

from engines.base import Modality
from pipeline.models.base import MediaError

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_WHITE = b"\t\n\v\f\r "
_STANDARD = bytes.maketrans(b"-_", b"+/")

# Likely ones first; an escape may stand for any character that may stand for itself, but not for the percent sign.
_ESCAPED = b"+/=\n\r -_\t\v\f" + _ALPHABET
_ESCAPES = tuple(
    (spelling, bytes((code,)))
    for code in dict.fromkeys(_ESCAPED)
    for spelling in dict.fromkeys((b"%%%02X" % code, b"%%%02x" % code))
)
_HEX = b"|".join(spelling[1:] for spelling, _ in _ESCAPES)
_FOREIGN = re.compile(rb"[^A-Za-z0-9+/=_\-\t\n\v\f\r %]|%(?!" + _HEX + rb")")
_FIRST_SPACE = re.compile(rb"[\t\n\v\f\r ]")


def decode_base64(text: memoryview | bytes, max_bytes: int, modality: Modality = Modality.IMAGE) -> bytes:
    """The bytes `text` stands for, at most `max_bytes`; text that must give more is refused before it is decoded.

    `text` is contiguous and only read.  Raises MediaError, which names the offset in `text` of the first wrong
    character and never shows any of it.
    """
    longest = 4 * -(-max_bytes // 3)
    if len(text) > longest and _count_symbols(text) > longest:
        raise _too_large(max_bytes, modality)
    plain = _decode_clean(text)
    if plain is None:
        plain = _decode_lenient(text)
    if len(plain) > max_bytes:
        raise _too_large(max_bytes, modality)
    if not plain:
        raise MediaError("base64 decode error: the payload is empty")
    return plain


def _decode_clean(text: memoryview | bytes) -> bytes | None:
    """Strict decoding, as most texts want; None when the text is not of that kind."""
    if len(text) % 4:
        return None
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one
        return None


def _decode_lenient(text: memoryview | bytes) -> bytes:
    foreign = _FOREIGN.search(text)
    if foreign:
        at = foreign.start()
        hint = " (a data: URL where bare base64 belongs)" if bytes(text[:5]).lower() == b"data:" else ""
        raise MediaError(f"base64 decode error: invalid symbol {text[at]}, offset {at}{hint}")
    raw = _unescape(bytes(text))
    symbols = raw.translate(_STANDARD, _WHITE)
    data = symbols.rstrip(b"=")
    if b"=" in data:
        raise MediaError("base64 decode error: padding before the end")
    padding = len(symbols) - len(data)
    if len(data) % 4 == 1:
        raise MediaError(f"base64 decode error: {len(data)} symbols are the text of no whole number of bytes")
    if padding and padding != -len(data) % 4:
        raise MediaError("base64 decode error: invalid padding")
    _check_spaces(raw, len(symbols))
    if not padding:
        _check_left_over_bits(data)
    return pybase64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


def _unescape(raw: bytes) -> bytes:
    """Every escape replaced; passes over the whole text, since a text of nothing but escapes must not cost an object
    each."""
    for spelling, character in _ESCAPES:
        if b"%" not in raw:
            return raw
        raw = raw.replace(spelling, character)
    return raw


def _check_spaces(raw: bytes, symbols: int) -> None:
    spaces = raw.count(b" ")
    if not spaces or b"+" in raw or b"-" in raw:
        return
    if symbols % 4 or (spaces % 4 == 0 and not _has_equal_lines(raw.strip(_WHITE))):
        raise MediaError("base64 decode error: spaces where '+' may have been")


def _has_equal_lines(body: bytes) -> bool:
    first = _FIRST_SPACE.search(body)
    if first is None:
        return True
    length = first.start()
    if length % 4:
        return False
    # some at a time: a text of many short lines must not fill a backtracking stack
    lines = re.compile(rb"(?:[^\t\n\v\f\r ]{%d}[\t\n\v\f\r ]+){1,1000}" % length)
    end = 0
    while found := lines.match(body, end):
        end = found.end()
    return re.compile(rb"[^\t\n\v\f\r ]{1,%d}" % length).fullmatch(body, end) is not None


def _check_left_over_bits(data: bytes) -> None:
    unused = (0x00, 0x00, 0x0F, 0x03)[len(data) % 4]
    if unused and _ALPHABET.index(data[-1]) & unused:
        raise MediaError("base64 decode error: the text ends within a byte")


def _count_symbols(text: memoryview | bytes) -> int:
    """Characters that stand for something: without white space, an escape as one."""
    raw = bytes(text)
    escaped_white = sum(raw.count(spelling) for spelling, character in _ESCAPES if character in _WHITE)
    return len(raw.translate(None, _WHITE)) - 2 * raw.count(b"%") - escaped_white


def _too_large(max_bytes: int, modality: Modality) -> MediaError:
    return MediaError(f"{modality.value} input payload exceeds the maximum size of {max_bytes} bytes")
