"""Base64 leniency: the bytes the client meant in whatever spelling, or a MediaError; the standard library judges."""

import base64
import binascii
import re
import urllib.parse
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import Modality
from pipeline.media.base64text import decode_base64
from pipeline.models.base import MediaError

PICTURE = bytes(range(256)) * 3 + b"\xfb\xff\xfe>?>?" * 5  # both '+' and '/' occur, and in many positions
PICTURES = [PICTURE[:length] for length in (len(PICTURE), len(PICTURE) - 1, len(PICTURE) - 2)]  # 0 to 2 padding signs
NO_PLUS = b"\x00" * 300


def strict(data: bytes) -> bytes:
    return base64.b64encode(data)


def wrapped(text: bytes, width: int, separator: bytes) -> bytes:
    return separator.join(text[at : at + width] for at in range(0, len(text), width))


SPELLINGS: dict[str, Callable[[bytes], bytes]] = {
    "strict": strict,
    "no padding": lambda data: strict(data).rstrip(b"="),
    "URL-safe": base64.urlsafe_b64encode,
    "URL-safe, no padding": lambda data: base64.urlsafe_b64encode(data).rstrip(b"="),
    "MIME lines": lambda data: wrapped(strict(data), 76, b"\r\n"),
    "base64.encodebytes": base64.encodebytes,
    "PEM lines, no padding": lambda data: wrapped(strict(data), 64, b"\n").rstrip(b"="),
    "one newline": lambda data: strict(data) + b"\n",
    "one leading space": lambda data: b" " + strict(data),
    "a newline inside": lambda data: strict(data)[:40] + b"\n" + strict(data)[40:],
    "a space inside": lambda data: strict(data)[:41] + b" " + strict(data)[41:],
    "spaces at 76": lambda data: wrapped(strict(data), 76, b" "),
    "indented lines": lambda data: b"\n    " + wrapped(strict(data), 60, b"\n    ") + b"\n",
    "tabs and form feeds": lambda data: wrapped(strict(data), 50, b"\t\x0b\x0c"),
    "percent-encoded": lambda data: urllib.parse.quote(strict(data), safe="").encode(),
    "percent, lower case": lambda data: strict(data).replace(b"+", b"%2b").replace(b"/", b"%2f").replace(b"=", b"%3d"),
    "every character percent-encoded": lambda data: b"".join(b"%%%02X" % code for code in strict(data)),
    "percent-encoded lines": lambda data: urllib.parse.quote(base64.encodebytes(data), safe="").encode(),
    "mixed alphabets": lambda data: strict(data)[:400] + base64.urlsafe_b64encode(data)[400:],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("data", PICTURES)
def test_every_accepted_spelling(spelling: str, data: bytes) -> None:
    text = SPELLINGS[spelling](data)
    for form in (text, memoryview(text), memoryview(bytearray(text))):
        assert decode_base64(form, len(data)) == data


@given(data=st.binary(min_size=1, max_size=200), spelling=st.sampled_from(sorted(SPELLINGS)))
def test_an_accepted_text_never_gives_other_bytes(data: bytes, spelling: str) -> None:
    try:
        found = decode_base64(SPELLINGS[spelling](data), 200)
    except MediaError as error:
        assert "spaces where '+' may have been" in str(error) and b" " in SPELLINGS[spelling](data)
    else:
        assert found == data


@given(text=st.binary(max_size=60))
def test_whatever_the_strict_decoder_takes_is_taken(text: bytes) -> None:
    try:
        expected = base64.b64decode(text, validate=True)
    except binascii.Error:
        return
    if not expected or re.search(rb"={3}", text):  # CPython 3.11 overlooks padding after a whole quad
        return
    assert decode_base64(text, 100) == expected


@settings(max_examples=500)
@given(text=st.text("QUJDabz019+/-_= \n%2BF*", max_size=24).map(str.encode))
def test_what_is_accepted_is_what_an_encoder_wrote(text: bytes) -> None:
    """Encoding the result again gives the text back, cleaned: nothing was skipped, nothing was guessed."""
    try:
        found = decode_base64(text, 100)
    except MediaError:
        return
    clean = re.sub(rb"\s", b"", urllib.parse.unquote_to_bytes(text)).replace(b"-", b"+").replace(b"_", b"/")
    again = strict(found)
    length = len(clean.rstrip(b"="))
    last = length if length % 4 == 0 else length - 1  # left-over bits of a padded text
    assert again[:last] == clean[:last] and len(again.rstrip(b"=")) == length
    if b"=" not in clean:
        assert again.rstrip(b"=") == clean


@settings(max_examples=500)
@given(data=st.binary(min_size=1, max_size=120), unpadded=st.booleans())
def test_a_form_decoders_spaces_never_give_other_bytes(data: bytes, unpadded: bool) -> None:
    text = strict(data).replace(b"+", b" ")
    if unpadded and b" " not in text:
        text = text.rstrip(b"=")
    try:
        assert decode_base64(text, 200) == data
    except MediaError as error:
        assert "spaces" in str(error) or "padding" in str(error) or "symbols" in str(error)


@pytest.mark.parametrize("data", PICTURES)
def test_lost_plus_signs_are_refused(data: bytes) -> None:
    for count in range(1, 9):
        text = strict(NO_PLUS + data)
        while text.count(b"+") > count:
            text = text.replace(b"+", b"/", 1)
        with pytest.raises(MediaError, match="base64 decode error: (spaces where|invalid padding|[0-9]+ symbols)"):
            decode_base64(text.replace(b"+", b" "), 10_000)


def test_four_spaces_in_a_text_without_plus_are_fine_at_line_ends() -> None:
    text = strict(NO_PLUS)
    assert decode_base64(wrapped(text, 80, b" "), 300) == NO_PLUS
    assert wrapped(text, 80, b" ").count(b" ") == 4
    with pytest.raises(MediaError, match="spaces where"):
        decode_base64(b" ".join((text[:7], text[7:90], text[90:120], text[120:333], text[333:])), 300)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the payload is empty"),
        (b"\r\n \r\n", "the payload is empty"),
        (b"=", "invalid padding"),
        (b"====", "invalid padding"),
        (b"QQ=", "invalid padding"),
        (b"QQ===", "invalid padding"),
        (b"QUI==", "invalid padding"),
        (b"QUJD=", "invalid padding"),
        (b"QUJD====", "invalid padding"),
        (b"QQ==QQ==", "padding before the end"),
        (b"Q=Q=", "padding before the end"),
        (b"QUJDQ", "5 symbols are the text of no whole number of bytes"),
        (b"QUJDQ===", "5 symbols are the text of no whole number of bytes"),
        (b"QR", "the text ends within a byte"),
        (b"QUJ", "the text ends within a byte"),
        (b"QUJD*!QU", "invalid symbol 42, offset 4"),
        (b"QUJD\xc3\xa9QQ==", "invalid symbol 195, offset 4"),
        (b"QUJD\x00QUI=", "invalid symbol 0, offset 4"),
        (b"data:image/png;base64,QUJD", "invalid symbol 58, offset 4 (a data: URL where bare base64 belongs)"),
        (b"QUJD%", "invalid symbol 37, offset 4"),
        (b"QUJD%2", "invalid symbol 37, offset 4"),
        (b"QUJD%2GQQ", "invalid symbol 37, offset 4"),
        (b"QUJD%252B", "invalid symbol 37, offset 4"),  # escaped twice
        (b"QUJD%00", "invalid symbol 37, offset 4"),
        (b"QUJD\\nQUJD", "invalid symbol 92, offset 4"),
        (b"QUJD\\/QUJ", "invalid symbol 92, offset 4"),  # JSON escapes are the caller's
    ],
)
def test_refused(text: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=f"^base64 decode error: {re.escape(message)}$"):
        decode_base64(text, 1000)


def test_left_over_bits_with_padding_are_dropped_as_other_decoders_do() -> None:
    for text in (b"QR==", b"QUJDQf==", b"QUJ="):
        assert decode_base64(text, 10) == base64.b64decode(text, validate=True)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_cut_text_is_never_taken_for_the_whole(cut: int) -> None:
    """Cut at a whole byte it is indistinguishable from a lost padding: then the bytes are a prefix, which decoding
    refuses."""
    for data in PICTURES:
        try:
            found = decode_base64(strict(data).rstrip(b"=")[:-cut], 10_000)
        except MediaError:
            continue
        assert data.startswith(found) and len(found) < len(data)


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [99, 100, 101])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_limit_is_in_decoded_bytes(limit: int, spelling: str) -> None:
    exact, more = bytes(range(limit)), bytes(range(limit + 1))
    text = SPELLINGS[spelling](exact)
    if spelling not in ("one leading space", "a space inside"):  # no other limit, but a rule of their own
        assert decode_base64(text, limit) == exact
    with pytest.raises(MediaError, match=f"^image input payload exceeds the maximum size of {limit} bytes$"):
        decode_base64(SPELLINGS[spelling](more + bytes(8)), limit)


def test_one_byte_too_many_is_found_after_decoding() -> None:
    # 100 and 101 bytes give texts of the same length
    assert len(strict(bytes(100))) == len(strict(bytes(101)))
    with pytest.raises(MediaError, match="exceeds the maximum size of 100 bytes"):
        decode_base64(strict(bytes(101)), 100)


def test_too_long_is_refused_before_anything_is_looked_at() -> None:
    with pytest.raises(MediaError, match="^video input payload exceeds the maximum size of 9 bytes$"):
        decode_base64(b"*" * 13, 9, Modality.VIDEO)
    with pytest.raises(MediaError, match="invalid symbol 42, offset 0"):
        decode_base64(b"*" * 12, 9)


def test_white_space_and_escapes_do_not_count() -> None:
    data = bytes(range(90))
    assert decode_base64(b"\n" * 100_000 + strict(data), 90) == data
    assert decode_base64(b"".join(b"%%%02x" % code for code in strict(data)), 90) == data


def test_no_text_gets_into_a_message() -> None:
    for text in (b"secretsecret*", b"secre", b"secret===", b"sec=ret=", b"secret secret secret secret sec"):
        with pytest.raises(MediaError) as refused:
            decode_base64(text, 1000)
        assert "sec" not in str(refused.value)


def test_a_text_of_escapes_or_short_lines_costs_no_object_each() -> None:
    """4 MB of the dearest texts; they end, and within the memory of a few copies."""
    many = strict(b"\x00" * 300_000)
    assert len(decode_base64(b"".join(b"%%%02X" % code for code in many), 300_000)) == 300_000
    short_lines = wrapped(many, 4, b" ")
    assert short_lines.count(b" ") % 4 == 3
    assert len(decode_base64(short_lines, 300_000)) == 300_000
    assert len(decode_base64(wrapped(many[:-12], 4, b" "), 300_000)) == 299_991
