"""One reading of an `http(s)` URL, strict where parsers differ: what is checked must be what is connected to.

The authority decides who is asked, so anything in it that two parsers could read in two ways is refused (backslash,
control characters, two `@`, percent-encoding, zone ids).  Hosts are lower-case ASCII (IDNA); every spelling of an
IPv4 address that C libraries accept (`127.1`, `0x7f.1`, decimal, octal) becomes the canonical one.  Path and query go
out as written; only what may not stand there (spaces, non-ASCII, quotes) is percent-encoded.  The fragment stays at
home.
"""

import ipaddress
import re
import urllib.parse

import msgspec
import yarl

from pipeline.errors import GatewayError, shorten_url

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PARTS = re.compile(r"(https?)://([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.IGNORECASE | re.DOTALL)
_HALF_ABSOLUTE = re.compile(r"https?:(?!//)", re.IGNORECASE)  # relative for some parsers, a host for others
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HOST = re.compile(r"(?=.{1,253}\.?\Z)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
_NUMBER = re.compile(r"[0-9]{1,63}|0[xX][0-9a-fA-F]{0,63}")
_PORT = re.compile(r"[0-9]{1,5}")
_UNSAFE = re.compile(r"[^!#$%&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~]")  # what RFC 3986 lets stand, and the percent sign


class HttpTarget(msgspec.Struct, frozen=True):
    """Whom to ask for what.

    `host`: lower-case ASCII, no brackets.  `address`: the host, when it is one.  `path`: with the query,
    percent-encoded. `credentials`: user and password, decoded; they are in no text made from this.
    """

    scheme: str
    host: str
    port: int
    path: str
    address: Address | None = None
    credentials: tuple[str, str] | None = None

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        """Without credentials and fragment."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == (443 if self.scheme == "https" else 80) else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    @property
    def shown(self) -> str:
        """For messages and logs: no query, no credentials, not long."""
        return shorten_url(self.url)


def parse_http_url(url: str) -> HttpTarget:
    """Read an absolute URL; GatewayError `multimodal_processing_failed` when it is none, or ambiguous."""
    found = _PARTS.fullmatch(url.strip(" "))
    if found is None or _CONTROL.search(url):
        raise _refused("is not a valid http or https URL")
    scheme, authority, path, query = found.groups()
    userinfo, at, hostport = authority.rpartition("@")
    if "@" in userinfo or "\\" in authority:
        raise _refused("has an ambiguous host")
    host, port = _split_port(hostport)
    host, address = _read_host(host)
    scheme = scheme.lower()
    return HttpTarget(
        scheme=scheme,
        host=host,
        port=port or (443 if scheme == "https" else 80),
        path=_quote((path or "/") + (query if query and query != "?" else "")),  # "?" alone is no query: yarl drops it
        address=address,
        credentials=_read_credentials(userinfo) if at else None,
    )


def join_location(base: HttpTarget, location: str) -> HttpTarget:
    """Where a `Location` header leads; credentials in it are the origin's choice, not the client's: dropped."""
    if _CONTROL.search(location) or _HALF_ABSOLUTE.match(location.strip(" ")):
        raise _refused("is redirected to an invalid URL")
    try:
        joined = urllib.parse.urljoin(base.url, location.strip(" "))
    except ValueError:
        raise _refused("is redirected to an invalid URL") from None
    return msgspec.structs.replace(parse_http_url(joined), credentials=None)


def literal_address(host: str) -> Address | None:
    """The address a host without brackets spells, None for a name; ValueError when it looks like IPv4 but is none.

    As the URL standard has it: a host whose last label is a number is an IPv4 address, in up to four parts of
    decimal, octal (leading 0) or hex (0x), of which the last fills the remaining bytes.
    """
    if ":" in host:
        if "%" in host:
            raise ValueError("zone id")
        return ipaddress.IPv6Address(host)
    labels = host.removesuffix(".").split(".")
    if not _NUMBER.fullmatch(labels[-1]):
        return None
    if len(labels) > 4:
        raise ValueError("too many parts")
    *head, last = [_number(label) for label in labels]
    if any(part > 255 for part in head) or last >= 256 ** (4 - len(head)):
        raise ValueError("part too large")
    return ipaddress.IPv4Address(sum(part << (24 - 8 * at) for at, part in enumerate(head)) + last)


def _number(label: str) -> int:
    if not _NUMBER.fullmatch(label):
        raise ValueError("not a number")
    if label[:2] in ("0x", "0X"):
        return int(label[2:] or "0", 16)
    return int(label, 8 if label.startswith("0") else 10)


def host_and_port(host: str, port: int) -> str:
    """As a URL has them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split_port(hostport: str) -> tuple[str, int | None]:
    if hostport.startswith("["):
        host, bracket, rest = hostport[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise _refused("has an invalid host")
        port = rest[1:]
    else:
        host, _, port = hostport.partition(":")
    if not port:
        return host, None
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise _refused("has an invalid port")
    return host, int(port)


def _read_host(written: str) -> tuple[str, Address | None]:
    host = written.lower()
    if not host:
        raise _refused("has no host")
    if not host.isascii():
        try:
            host = yarl.URL.build(scheme="http", host=host).raw_host or ""
        except ValueError:  # UnicodeError is one
            raise _refused("has an invalid host") from None
    if ":" not in host and not _HOST.fullmatch(host):
        raise _refused("has an invalid host")
    try:
        address = literal_address(host)
    except ValueError:
        raise _refused("has an invalid host") from None
    return (host, None) if address is None else (str(address), address)


def _read_credentials(userinfo: str) -> tuple[str, str] | None:
    user, _, password = userinfo.partition(":")
    return (urllib.parse.unquote(user), urllib.parse.unquote(password)) if userinfo.strip(":") else None


def _quote(text: str) -> str:
    """Percent-encode what may not stand in a path or query; header bytes that are no UTF-8 keep their values."""
    return _UNSAFE.sub(lambda found: urllib.parse.quote(found[0].encode("utf-8", "surrogateescape"), safe=""), text)


def _refused(why: str) -> GatewayError:
    return GatewayError("multimodal_processing_failed", f"media URL {why}", cause="failed")
