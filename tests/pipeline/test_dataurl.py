"""Kinds of media URLs and heads of data URLs: what is accepted and refused, and that nothing is copied or echoed."""

import base64

import pytest

from pipeline.dataurl import DataUrl, HttpUrl, parse_data_url, split_media_url
from pipeline.media.base64text import decode_base64
from pipeline.models.base import MediaError

BYTES = bytes(range(250)) * 2
TEXT = base64.b64encode(BYTES)


@pytest.mark.parametrize(
    "head",
    [
        b"data:image/png;base64,",
        b"data:;base64,",
        b"data:image/jpeg;base64,",
        b"data:text/plain;base64,",
        b"data:application/octet-stream;base64,",
        b"data:image/png;charset=utf-8;base64,",
        b"DATA:image/png;base64,",
        b"Data:;Base64,",
        b"data:image/png;BASE64,",
        b"data:image/png; base64,",
        b"data:image/png;base64 ,",
        b"  \r\n data:image/png;base64,",
        b"data: image/png ;base64,",
        b'data:image/png;name="a;b";base64,',
    ],
)
def test_accepted_heads(head: bytes) -> None:
    url = head + TEXT
    split = split_media_url(url)
    assert isinstance(split, DataUrl)
    payload = parse_data_url(split.url)
    assert payload == TEXT and payload.obj is url, "a view of what came, no copy"
    assert decode_base64(payload, 1000) == BYTES


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (b"data:base64," + TEXT, "only base64 encoded data URLs are supported"),
        (b"data:image/png," + TEXT, "only base64 encoded data URLs are supported"),
        (b"data:," + TEXT, "only base64 encoded data URLs are supported"),
        (b"data:image/svg+xml,%3Csvg%20xmlns=%22http://www.w3.org/2000/svg%22/%3E", "only base64 encoded data URLs"),
        (b"data:image/png;xbase64," + TEXT, "only base64 encoded data URLs are supported"),
        (b"data:image/png;base64;x=1," + TEXT, "only base64 encoded data URLs are supported"),
        (b"data:image/png,;base64," + TEXT, "only base64 encoded data URLs are supported"),
        (b"data:image/png%3Bbase64," + TEXT, "only base64 encoded data URLs are supported"),
        (b"data:image/png;base64", "missing comma in data url"),
        (b"data:", "missing comma in data url"),
        (b"data:image/png;base64,", "data URL has an empty payload"),
        (b"data:image/png;base64, \r\n", "data URL has an empty payload"),
        (b"dat:image/png;base64,QUJD", "not a data URL"),
        (b"", "not a data URL"),
    ],
)
def test_refused_heads(url: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message) as refused:
        parse_data_url(url)
    assert TEXT[:20].decode() not in str(refused.value)


def test_the_first_comma_counts() -> None:
    assert parse_data_url(b"data:;base64,QU,JD") == b"QU,JD"
    with pytest.raises(MediaError, match="invalid symbol 44, offset 2"):
        decode_base64(parse_data_url(b"data:;base64,QU,JD"), 100)


def test_line_breaks_at_the_ends_go_spaces_are_the_decoders() -> None:
    assert parse_data_url(b"data:;base64,\r\nQUJD\n\n") == b"QUJD"
    assert parse_data_url(b"data:;base64, QUJD ") == b" QUJD "
    with pytest.raises(MediaError, match="spaces where"):
        decode_base64(parse_data_url(b"data:;base64,QUJDQUI "), 100)  # its last '+' became a space


@pytest.mark.parametrize(
    "url",
    [
        "http://host/a.png",
        "https://host/a.png",
        "HTTP://host/",
        "hTTps://host",
        "http://host/図/ñ.png?x=1#f",
        "http://",
    ],
)
def test_web_addresses_stay_as_written(url: str) -> None:
    assert split_media_url(f" \t{url}\r\n ".encode()) == HttpUrl(url)
    assert split_media_url(memoryview(url.encode())) == HttpUrl(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (b"ftp://127.0.0.1/a.png", "media URL scheme 'ftp' is not accepted, only data, http and https"),
        (b"file:///etc/hostname", "media URL scheme 'file' is not accepted"),
        (b"javascript:alert(1)", "media URL scheme 'javascript' is not accepted"),
        (b"blob:http://x/1", "media URL scheme 'blob' is not accepted"),
        (b"cat.png", "media URL has no scheme"),
        (b"//127.0.0.1/a.png", "media URL has no scheme"),
        (b"/etc/passwd", "media URL has no scheme"),
        (TEXT, "media URL has no scheme"),
        (b"", "media URL is empty"),
        (b"  \n", "media URL is empty"),
        (b"1http://x/", "media URL has no scheme"),
        (b"http\n://x/", "media URL has no scheme"),
        (b"http://\xff\xfe/", "media URL is not UTF-8 text"),
        (b"http://x/" + b"a" * 65536, "media URL of 65545 bytes is longer than 65536"),
        (b"a" * 40 + b":x", "media URL has no scheme"),
    ],
)
def test_everything_else_is_refused_without_echo(url: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message) as refused:
        split_media_url(url)
    assert len(str(refused.value)) < 120 and "passwd" not in str(refused.value)


def test_a_prefix_written_twice() -> None:
    payload = parse_data_url(b"data:image/png;base64,data:image/png;base64," + TEXT)
    with pytest.raises(MediaError, match="invalid symbol 58, offset 4"):
        decode_base64(payload, 1000)


def test_large_urls() -> None:
    """64 MB of spaces, of head without a comma, of payload."""
    size = 64 << 20
    with pytest.raises(MediaError, match="empty"):
        split_media_url(b" " * size)
    with pytest.raises(MediaError, match="missing comma"):
        parse_data_url(b"data:" + b";" * size)
    assert len(parse_data_url(b"data:;base64,\n" + b"A" * size + b"\n" * 10_000)) == size
