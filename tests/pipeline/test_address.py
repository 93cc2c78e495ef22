"""The address policy: every class and spelling of the specification; `ipaddress` and the C library are the judges."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.address import MediaHostPolicy, kind_of, parse_domains
from pipeline.errors import GatewayError
from pipeline.httpurl import literal_address

LOOPBACK = MediaHostPolicy(allow_private=None, listening_on_loopback=True)
EXPOSED = MediaHostPolicy(allow_private=None, listening_on_loopback=False)
ALLOWED = MediaHostPolicy(allow_private=True, listening_on_loopback=False)
FORBIDDEN = MediaHostPolicy(allow_private=False, listening_on_loopback=True)

LOCAL = {
    "loopback": ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1"],
    "unspecified": ["0.0.0.0", "0.1.2.3", "::", "::ffff:0.0.0.0"],
    "private": [
        "10.0.0.1",
        "10.255.255.255",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "fc00::1",
        "fdff::1",
        "fec0::1",
    ],
    "shared": ["100.64.0.1", "100.127.255.255"],
    "benchmarking": ["198.18.0.1", "198.19.255.255", "2001:2::1"],
}
CLOSED = {
    "cloud metadata": ["169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "100.100.100.200"]
    + ["168.63.129.16", "192.0.0.192", "169.254.170.2", "fd00:ec2::254", "fd20:ce::254"],
    "link-local": ["169.254.0.1", "169.254.255.255", "fe80::1", "febf::1", "::ffff:169.254.1.1"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"],
    "broadcast": ["255.255.255.255"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1", "3fff:fff::1"],
    "reserved": ["240.0.0.1", "192.0.0.1", "192.88.99.1", "2001::1", "2001:20::1", "100::1", "5f00::1", "64:ff9b:1::1"]
    + ["::8.8.8.8", "::ffff:0:8.8.8.8", "4000::1", "8000::1"],
}
EMBEDDED = {
    "2002:7f00:1::": "loopback",  # 6to4
    "2002:a00:1::5": "private",
    "2002:a9fe:a9fe::": "cloud metadata",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "reserved",  # Teredo
    "2606:4700::5efe:10.0.0.1": "private",  # ISATAP
    "2606:4700::200:5efe:127.0.0.1": "loopback",
    "::ffff:0:127.0.0.1": "loopback",
}
PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "172.15.255.255",
    "172.32.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "192.167.1.1",
    "198.20.0.1",
]
PUBLIC += ["169.253.1.1", "223.255.255.255", "2606:4700::1111", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
PUBLIC += ["2002:808:808::1", "2606:4700::5efe:8.8.8.8", "2001:4860:4860::8888", "2620:fe::fe"]


def test_kinds() -> None:
    for table, is_local in ((LOCAL, True), (CLOSED, False)):
        for word, addresses in table.items():
            for text in addresses:
                kind = kind_of(ipaddress.ip_address(text))
                assert kind is not None and (kind.word, kind.is_local) == (word, is_local), text
    for text, word in EMBEDDED.items():
        kind = kind_of(ipaddress.ip_address(text))
        assert kind is not None and kind.word == word, text
    for text in PUBLIC:
        assert kind_of(ipaddress.ip_address(text)) is None, text


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_nothing_that_is_not_global_is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if kind_of(address) is None:
        carried = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
        assert (carried or address).is_global and not address.is_multicast and not address.is_loopback


@given(st.ip_addresses(v=4), st.sampled_from(["::ffff:{}", "64:ff9b::{}"]))
def test_an_embedded_address_is_what_it_stands_for(address: ipaddress.IPv4Address, form: str) -> None:
    assert kind_of(ipaddress.ip_address(form.format(address))) == kind_of(address)


@pytest.mark.parametrize(
    ("policy", "outside", "local", "closed"),
    [
        (LOOPBACK, False, True, False),
        (LOOPBACK, True, False, False),
        (EXPOSED, False, False, False),
        (FORBIDDEN, False, False, False),
        (ALLOWED, False, True, True),
        (ALLOWED, True, True, True),
    ],
)
def test_the_rule(policy: MediaHostPolicy, outside: bool, local: bool, closed: bool) -> None:
    for texts, expected in ((sum(LOCAL.values(), []), local), (sum(CLOSED.values(), []), closed), (PUBLIC, True)):
        for text in texts:
            assert policy.permits(ipaddress.ip_address(text), outside=outside) is expected, text


def message(policy: MediaHostPolicy, url: str, *, outside: bool = False) -> str | None:
    try:
        policy.check_literal(url, outside=outside)
    except GatewayError as refused:
        assert refused.code == "multimodal_processing_failed"
        return refused.message
    return None


SPELLINGS = [
    *(
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "017700000001",
        "0X7F.0.0.0X1",
    ),
    *("127.0.0.1.", "0", "0.0.0.0", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
    *(
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "１２７.0.0.1",
        "127。0。0。1",
        "localhost",
        "LOCALHOST.",
    ),
    *("a.b.localhost", "10.1", "0xa9fea9fe", "[fe80::1]"),
]


@pytest.mark.parametrize("host", SPELLINGS)
def test_every_spelling_of_a_literal(host: str) -> None:
    found = message(EXPOSED, f"http://user:pw@{host}:8080/a.png?q")
    assert found is not None and "which media is not fetched from unless private media hosts are allowed" in found
    assert message(ALLOWED, f"http://{host}/a.png") is None


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://8.8.8.8/",
        "http://[2606:4700::1111]/",
        "http://127.0.0.1.example.com/",
        "http://localhost.example.com",
    ],
)
def test_public_references_pass(url: str) -> None:
    assert message(EXPOSED, url) is None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "0x7f.1",
        "2130706433",
        "0177.0.0.1",
        "0x7f.0.0.0x1",
        "1.2.65535",
        "1.16777215",
        "0xffffffff",
    ]
    + [
        "08.1.1.1",
        "256.1.1.1",
        "1.2.3.4.5",
        "4294967296",
        "1.2.3.256",
        "0x",
        "1..2",
        "0x7f.0x",
        "1.2.3.08",
        "00.0x0.0.1",
    ],
)
def test_literals_are_read_as_the_c_library_reads_them(host: str) -> None:
    """What the C library takes for an address must be seen as that address; what it refuses may be refused."""
    try:
        expected = ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        if host not in ("0x", "0x7f.0x"):  # zero for the URL standard, nothing for the C library
            with pytest.raises(ValueError):
                literal_address(host)
        return
    assert literal_address(host) == expected


def test_domains() -> None:
    assert parse_domains(" Example.COM, cdn.example.com ,,bücher.de") == {
        "example.com",
        "cdn.example.com",
        "xn--bcher-kva.de",
    }
    assert parse_domains("") is None and parse_domains(" , ") is None
    policy = MediaHostPolicy(
        allow_private=None, listening_on_loopback=True, allowed_domains=parse_domains("example.com,BÜCHER.de,10.0.0.1")
    )
    for url in ("http://EXAMPLE.com/", "https://example.com:8443/x", "http://u:p@example.com/", "http://bücher.de/a"):
        assert message(policy, url) is None
    assert message(policy, "http://10.1/") is None  # 10.0.0.1, and local hosts are allowed
    for url in ("http://sub.example.com/", "http://example.com./", "http://example.org/", "http://localhost/"):
        assert "is not an allowed media domain" in (message(policy, url) or "")


def test_messages() -> None:
    assert message(EXPOSED, "http://0x7f.1/") == (
        "media host '127.0.0.1' is a loopback address, which media is not fetched from unless private media hosts are "
        "allowed"
    )
    with pytest.raises(GatewayError) as refused:
        EXPOSED.check_address("inner.example", ipaddress.ip_address("10.9.8.7"), outside=False)
    assert refused.value.message == (
        "media host 'inner.example' resolves to an address which media is not fetched from unless private media hosts "
        "are allowed"
    )


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            LOOPBACK,
            ["any domain", "allowed while listening on loopback only", "link-local and metadata hosts are refused"],
        ),
        (EXPOSED, ["private hosts are refused (not listening on loopback only)"]),
        (FORBIDDEN, ["private hosts are refused (--no-mm-allow-private-media-hosts)"]),
        (ALLOWED, ["link-local and metadata hosts are allowed (--mm-allow-private-media-hosts)"]),
        (
            MediaHostPolicy(
                allow_private=True, listening_on_loopback=True, allowed_domains=frozenset({"b.de", "a.de"})
            ),
            ["only the domains a.de, b.de;"],
        ),
    ],
)
def test_the_rule_describes_itself(policy: MediaHostPolicy, words: list[str]) -> None:
    assert all(word in policy.describe() for word in words) and "\n" not in policy.describe()
