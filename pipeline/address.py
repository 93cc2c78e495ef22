"""Who may be fetched from: the rule that keeps a client from using the gateway to reach what only the gateway can
reach.

Every address has a *kind*; None is public.  *Local* kinds (loopback, private networks, ...) are allowed by an
explicit flag, or, without one, while the gateway itself listens on loopback only and the request did not come through
a proxy.  All other kinds (link-local with the cloud metadata service, multicast, reserved, ...) only by the flag.
IPv4 inside IPv6 counts as what it stands for.  Clients are never told what a name resolves to; the log is.
`pipeline.fetch` asks about every address it connects to; references that a worker will fetch itself are checked by
domain and literal address only, our resolver not being theirs.
"""

import ipaddress
import logging

import msgspec
import yarl

from pipeline.errors import GatewayError, shorten_url
from pipeline.httpurl import Address, parse_http_url

_log = logging.getLogger(__name__)


class AddressKind(msgspec.Struct, frozen=True):
    """Why an address is not public: `word` as in "a loopback address".  `is_local`: what a gateway on loopback may
    reach."""

    word: str
    is_local: bool


_RESERVED = AddressKind("reserved", False)
_LOOPBACK = AddressKind("loopback", True)

# Most special first.  Sources: the IANA special-purpose registries, and the metadata services of the cloud providers.
_KINDS: tuple[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, AddressKind], ...] = tuple(
    (ipaddress.ip_network(network), AddressKind(word, is_local))
    for word, is_local, networks in (
        (
            "cloud metadata",
            False,
            ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
        ),
        ("cloud metadata", False, ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:42::42")),
        ("loopback", True, ("127.0.0.0/8", "::1")),
        ("unspecified", True, ("0.0.0.0/8", "::")),  # connecting to it reaches this host
        ("private", True, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")),
        ("shared", True, ("100.64.0.0/10",)),
        ("benchmarking", True, ("198.18.0.0/15", "2001:2::/48")),
        ("link-local", False, ("169.254.0.0/16", "fe80::/10")),
        ("multicast", False, ("224.0.0.0/4", "ff00::/8")),
        ("broadcast", False, ("255.255.255.255",)),
        ("documentation", False, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")),
        ("reserved", False, ("192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4")),
        (
            "reserved",
            False,
            ("2001::/23", "100::/64", "5f00::/16", "64:ff9b:1::/48"),
        ),  # the first with Teredo and ORCHID
    )
    for network in networks
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_TRANSLATED = ipaddress.IPv6Network("::ffff:0:0:0/96")
_SIXTOFOUR = ipaddress.IPv6Network("2002::/16")
_ISATAP = (0x00005EFE, 0x02005EFE)  # upper half of the interface identifier


def kind_of(address: Address) -> AddressKind | None:
    """The kind of an address that is not public; IPv6 forms that carry an IPv4 address have that one's kind."""
    for network, kind in _KINDS:
        if address in network:
            return kind
    if isinstance(address, ipaddress.IPv4Address):
        return None if address.is_global else _RESERVED
    return _kind_of_v6(address)


def _kind_of_v6(address: ipaddress.IPv6Address) -> AddressKind | None:
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _MAPPED or address in _NAT64:
        return kind_of(low)
    if address in _COMPATIBLE or address in _TRANSLATED:
        return kind_of(low) or _RESERVED
    if address in _SIXTOFOUR:
        return kind_of(ipaddress.IPv4Address(int(address) >> 80 & 0xFFFFFFFF))
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return kind_of(low)
    if address not in _GLOBAL_UNICAST or not address.is_global:
        return _RESERVED
    return None


def parse_domains(text: str) -> frozenset[str] | None:
    """The comma list of `--mm-allowed-media-domains`: trimmed, lower-case, IDNA; None when it names nothing."""
    names = frozenset(_ascii(name.strip().lower()) for name in text.split(",") if name.strip())
    return names or None


def _ascii(name: str) -> str:
    return name if name.isascii() else yarl.URL.build(scheme="http", host=name).raw_host or name


class MediaHostPolicy(msgspec.Struct, frozen=True):
    """The rule in force.

    `allow_private`: the flag, None when not given.  `listening_on_loopback`: all listeners.  `allowed_domains`: exact
    hosts, lower-case (`parse_domains`); None means every host.
    """

    allow_private: bool | None
    listening_on_loopback: bool
    allowed_domains: frozenset[str] | None = None

    def permits(self, address: Address, *, outside: bool) -> bool:
        """`outside`: the request carries `Forwarded` or `X-Forwarded-For`, so it came from elsewhere."""
        if self.allow_private:
            return True
        kind = kind_of(address)
        if kind is None:
            return True
        return kind.is_local and self.allow_private is None and self.listening_on_loopback and not outside

    def check_host(self, host: str) -> None:
        """GatewayError when there is a list of domains and `host` (as in `HttpTarget.host`) is not on it."""
        if self.allowed_domains is not None and host not in self.allowed_domains:
            raise _refused(f"media host '{shorten_url(host)}' is not an allowed media domain")

    def check_literal_address(self, host: str, address: Address, *, outside: bool) -> None:
        """GatewayError for a URL whose host is an address that may not be fetched from; its kind is no secret."""
        if not self.permits(address, outside=outside):
            kind = kind_of(address) or _RESERVED
            raise _refused(
                f"media host '{host}' is a {kind.word} address, which media is not fetched from unless private media "
                "hosts are allowed"
            )

    def check_address(self, host: str, address: Address, *, outside: bool) -> None:
        """GatewayError when `host` resolves to an address that may not be fetched from; which one is only logged."""
        if not self.permits(address, outside=outside):
            kind = kind_of(address) or _RESERVED
            _log.warning(
                "media host %s refused: it resolves to %s, a %s address", shorten_url(host), address, kind.word
            )
            raise _refused(
                f"media host '{shorten_url(host)}' resolves to an address which media is not fetched from unless "
                "private media hosts are allowed"
            )

    def check_literal(self, url: str, *, outside: bool = False) -> None:
        """GatewayError for an `http(s)` reference that may not even be forwarded: by domain list, address or
        `localhost`."""
        target = parse_http_url(url)
        self.check_host(target.host)
        address = target.address
        name = target.host.removesuffix(".")
        if name == "localhost" or name.endswith(".localhost"):  # RFC 6761: loopback for every resolver
            address = ipaddress.IPv4Address("127.0.0.1")
        if address is not None:
            self.check_literal_address(target.host, address, outside=outside)

    def describe(self) -> str:
        """One line for the start-up log."""
        domains = "any domain"
        if self.allowed_domains is not None:
            domains = "only the domains " + ", ".join(sorted(self.allowed_domains))
        if self.allow_private:
            hosts = "private, link-local and metadata hosts are allowed (--mm-allow-private-media-hosts)"
        elif self.allow_private is False:
            hosts = "private hosts are refused (--no-mm-allow-private-media-hosts)"
        elif self.listening_on_loopback:
            hosts = (
                "private hosts are allowed while listening on loopback only, except for requests that came through a "
                "proxy; link-local and metadata hosts are refused"
            )
        else:
            hosts = "private hosts are refused (not listening on loopback only)"
        return f"media is fetched from {domains}; {hosts}"


def _refused(message: str) -> GatewayError:
    return GatewayError("multimodal_processing_failed", message, cause="host_refused")
