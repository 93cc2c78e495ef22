"""What kind of media URL a client sent, and where the payload of a `data:` URL begins; nothing is copied or decoded.

Rules of RFC 2397 as far as clients keep them: the scheme and `;base64` in any case, white space around both, any
media type or none (the bytes decide the format).  Percent-encoded data without base64 is refused.  No text of the URL
gets into a message but its scheme: a bare payload, or one with a broken head, would be echoed otherwise.  Base64
itself is `pipeline.media.base64text`'s; who may be fetched is `pipeline.address`'s.
"""

import re

import msgspec

from pipeline.models.base import MediaError

_BREAKS = b"\t\r\n"
_WHITE = b" \t\r\n"
LONGEST_URL = 65536  # bytes, but for data URLs; what is longer is a payload in the wrong place
_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]{0,31}(?=:)")
_COMMA = re.compile(rb",")
_IS_BASE64 = re.compile(rb";[ \t]*base64[ \t]*\Z", re.IGNORECASE)


class DataUrl(msgspec.Struct, frozen=True):
    """A whole `data:` URL: a view of what the client sent, from the scheme on."""

    url: memoryview


class HttpUrl(msgspec.Struct, frozen=True):
    """A whole `http(s):` URL, trimmed, otherwise as the client wrote it; its host is not looked at."""

    url: str


class OtherUrl(msgspec.Struct, frozen=True):
    """Bytes of another scheme (lower-case, without colon), or of none (empty), trimmed; they may be anything and any
    size.
    """

    scheme: str
    url: memoryview


def split_media_url(raw: bytes | memoryview) -> DataUrl | HttpUrl:
    """Which of the two kinds that can be fetched here `raw` is; MediaError for every other."""
    found = split_url(raw)
    if not isinstance(found, OtherUrl):
        return found
    if found.scheme:
        raise MediaError(f"media URL scheme '{found.scheme}' is not accepted, only data, http and https")
    raise MediaError("media URL has no scheme; accepted are data:, http:// and https:// URLs")


def split_url(raw: bytes | memoryview) -> DataUrl | HttpUrl | OtherUrl:
    """What kind of URL `raw` (UTF-8, JSON escapes already undone) is.

    MediaError for an empty one, and for a web address that is no text or far too long.
    """
    url = _skip(memoryview(raw), _WHITE)
    scheme = _SCHEME.match(url)
    word = bytes(scheme.group()).lower() if scheme else b""
    if word == b"data":
        return DataUrl(url)
    url = _trim_end(url, _WHITE)
    if not len(url):
        raise MediaError("media URL is empty")
    if word in (b"http", b"https"):
        return HttpUrl(url_text(url))
    return OtherUrl(word.decode(), url)


def parse_data_url(url: memoryview | bytes) -> memoryview:
    """The base64 text after the comma: a view of `url`, line breaks at its ends taken off.  MediaError otherwise.

    Spaces at its ends are left for the decoder: they may have been `+`.
    """
    whole = _skip(memoryview(url), _WHITE)
    if bytes(whole[:5]).lower() != b"data:":
        raise MediaError("not a data URL")
    comma = _COMMA.search(whole)
    if comma is None:
        raise MediaError("missing comma in data url")
    if not _IS_BASE64.search(whole, 4, comma.start()):
        raise MediaError("only base64 encoded data URLs are supported")
    payload = _trim_end(_skip(whole[comma.end() :], _BREAKS), _BREAKS)
    if not len(_skip(payload, _WHITE)):
        raise MediaError("data URL has an empty payload")
    return payload


def _skip(text: memoryview, unwanted: bytes) -> memoryview:
    """Without `unwanted` at the start; in large steps, for a text of nothing but spaces."""
    start = 0
    while start < len(text):
        head = bytes(text[start : start + 4096])
        kept = len(head.lstrip(unwanted))
        start += len(head) - kept
        if kept:
            break
    return text[start:]


def _trim_end(text: memoryview, unwanted: bytes) -> memoryview:
    end = len(text)
    while end:
        tail = bytes(text[max(0, end - 4096) : end])
        kept = len(tail.rstrip(unwanted))
        end -= len(tail) - kept
        if kept:
            break
    return text[:end]


def payload_bytes(url: memoryview | bytes) -> int:
    """About how many bytes a data URL stands for, as SMG reckons: three for four base64 letters, padding included."""
    whole = memoryview(url)
    comma = _COMMA.search(whole)
    if comma is None:
        return len(whole)
    nbytes = len(whole) - comma.end()
    return nbytes * 3 // 4 if _IS_BASE64.search(whole, 4, comma.start()) else nbytes


def url_text(url: memoryview) -> str:
    """A URL that is no data URL, as text; MediaError when it is none, or longer than any URL."""
    if len(url) > LONGEST_URL:
        raise MediaError(f"media URL of {len(url)} bytes is longer than {LONGEST_URL}")
    try:
        return str(url, "utf-8")
    except UnicodeDecodeError:
        raise MediaError("media URL is not UTF-8 text") from None
