"""One strict reading of web addresses: nothing two parsers could read in two ways gets through."""

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from pipeline.errors import GatewayError
from pipeline.httpurl import HttpTarget, join_location, parse_http_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://Host.Example", "http://host.example/"),
        ("HTTPS://host:443/a", "https://host/a"),
        ("http://host:443/a", "http://host:443/a"),
        ("http://host:/a", "http://host/a"),
        ("http://host:080/a", "http://host/a"),
        ("  http://host/a b  ", "http://host/a%20b"),
        ("http://host/a#b?c", "http://host/a"),
        ("http://host?x#y", "http://host/?x"),
        ("http://host/%zz/%41?a=%2F&b=[1]'", "http://host/%zz/%41?a=%2F&b=[1]'"),
        ('http://host/"<>^`{|}\\', "http://host/%22%3C%3E%5E%60%7B%7C%7D%5C"),
        ("http://host/a/../b/./c", "http://host/a/../b/./c"),
        ("http://bücher.example/ü", "http://xn--bcher-kva.example/%C3%BC"),
        ("http://a_b.example./", "http://a_b.example./"),
        ("http://user:p%40ss@host/", "http://host/"),
        ("http://[2001:DB8::0:1]:81/", "http://[2001:db8::1]:81/"),
        ("http://0x7f.1/", "http://127.0.0.1/"),
        ("http://１２７.1/", "http://127.0.0.1/"),
        ("http://host/\U0001f600", "http://host/%F0%9F%98%80"),
        ("http://host/a@b:c", "http://host/a@b:c"),
    ],
)
def test_reading(url: str, expected: str) -> None:
    target = parse_http_url(url)
    assert target.url == expected
    assert parse_http_url(expected).url == expected
    assert str(URL(expected, encoded=True)) == expected, "what the client library is given is what it sends"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "is not a valid http or https URL"),
        ("host/a", "is not a valid http or https URL"),
        ("http:/host/a", "is not a valid http or https URL"),
        ("http:host", "is not a valid http or https URL"),
        ("//host/a", "is not a valid http or https URL"),
        ("ftp://host/a", "is not a valid http or https URL"),
        ("http://host/a\r\nX: y", "is not a valid http or https URL"),
        ("http://ho\tst/a", "is not a valid http or https URL"),
        ("http://host/\x00", "is not a valid http or https URL"),
        ("http://", "has no host"),
        ("http:///a", "has no host"),
        ("http://:80/", "has no host"),
        ("http://user@/", "has no host"),
        ("http://good\\@evil/", "has an ambiguous host"),
        ("http://good\\.evil/", "has an ambiguous host"),
        ("http://a@b@c/", "has an ambiguous host"),
        ("http://host:1:2/", "has an invalid port"),
        ("http://host:0/", "has an invalid port"),
        ("http://host:65536/", "has an invalid port"),
        ("http://host:+80/", "has an invalid port"),
        ("http://host:８０/", "has an invalid port"),
        ("http://ho%73t/", "has an invalid host"),
        ("http://%31%32%37.0.0.1/", "has an invalid host"),
        ("http://ho st/", "has an invalid host"),
        ("http://a..b/", "has an invalid host"),
        ("http://.a/", "has an invalid host"),
        ("http://a;b/", "has an invalid host"),
        ("http://evil.com／.good.com/", "has an invalid host"),
        ("http://evil.com＃.good.com/", "has an invalid host"),
        ("http://good.com＠evil.com/", "has an invalid host"),
        ("http://[fe80::1%25eth0]/", "has an invalid host"),
        ("http://[::1/", "has an invalid host"),
        ("http://[127.0.0.1]/", "has an invalid host"),
        ("http://[::1]x/", "has an invalid host"),
        ("http://::1/", "has an invalid port"),
        ("http://1.2.3.256/", "has an invalid host"),
        ("http://1.2.3.4.5/", "has an invalid host"),
        ("http://example.0x1z.1/", "has an invalid host"),
        (f"http://{'a' * 64}.de/", "has an invalid host"),
        (f"http://{'a.' * 127}de/", "has an invalid host"),
    ],
)
def test_refused(url: str, why: str) -> None:
    with pytest.raises(GatewayError) as refused:
        parse_http_url(url)
    assert refused.value.message == f"media URL {why}"


def test_credentials_are_decoded_and_shown_nowhere() -> None:
    target = parse_http_url("http://us%40er:p%3Ass:w@host/a?token=1")
    assert target.credentials == ("us@er", "p:ss:w")
    assert target.shown == "http://host/a" and "p:ss" not in target.url
    assert parse_http_url("http://user@host/").credentials == ("user", "")
    assert parse_http_url("http://@host/").credentials is None
    assert parse_http_url("http://:@host/").credentials is None


def test_a_long_url_is_cut_for_messages() -> None:
    assert len(parse_http_url("http://host/" + "a" * 5000).shown) < 210


BASE = parse_http_url("http://user:pw@host:81/x/y?q=1")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("z", "http://host:81/x/z"),
        ("/z?r#f", "http://host:81/z?r"),
        ("?r", "http://host:81/x/y?r"),
        ("", "http://host:81/x/y?q=1"),
        ("../../z", "http://host:81/z"),
        ("//other/z", "http://other/z"),
        ("https://other:444/z", "https://other:444/z"),
        ("http://a:b@other/", "http://other/"),
        (" /z ", "http://host:81/z"),
        ("/caf\udcc3\udca9", "http://host:81/caf%C3%A9"),
        ("/caf\udce9", "http://host:81/caf%E9"),
    ],
)
def test_locations(location: str, expected: str) -> None:
    target = join_location(BASE, location)
    assert target.url == expected and target.credentials is None


@pytest.mark.parametrize(
    "location", ["http://[::1", "file:///a", "javascript:x", "http:\\\\evil", "/a\r\nb", "//a\\@b/"]
)
def test_bad_locations(location: str) -> None:
    with pytest.raises(GatewayError):
        join_location(BASE, location)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for url in (text, "http://" + text, "http://host/" + text):
        try:
            target = parse_http_url(url)
        except GatewayError:
            continue
        check(target)


@given(st.from_regex(r"https?://[a-z0-9@:.\[\]\\%\-_]{1,30}(/[ -~]{0,10})?", fullmatch=True))
def test_the_libraries_read_the_same_host(url: str) -> None:
    try:
        target = parse_http_url(url)
    except GatewayError:
        return
    check(target)


def check(target: HttpTarget) -> None:
    """Two other parsers see the same host and port in what we send."""
    split = urllib.parse.urlsplit(target.url)
    assert (split.scheme, split.hostname, split.port or (443 if split.scheme == "https" else 80)) == target.origin
    assert split.username is None and not split.fragment
    url = URL(target.url, encoded=True)
    assert (url.scheme, url.raw_host, url.port) == target.origin
    assert url.raw_path_qs == target.path and target.path.isascii() and " " not in target.path
