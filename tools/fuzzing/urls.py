"""Media URLs: data URLs to their bytes, http URLs to whom would be asked, and where a redirect leads.

Right is a refusal, or bytes that are what a strict decoder makes of the same text once it is cleaned, or a target
whose host another reader of URLs sees as well.
"""

import base64
import ipaddress
import random
import re
from urllib.parse import urlsplit

from pipeline.address import MediaHostPolicy
from pipeline.dataurl import DataUrl, parse_data_url, split_media_url
from pipeline.errors import GatewayError
from pipeline.httpurl import HttpTarget, join_location, parse_http_url
from pipeline.media.base64text import decode_base64
from pipeline.models.base import MediaError
from tools.fuzzing.mutate import spoil
from tools.fuzzing.rig import Wrong

_HEADS = (
    b"data:image/png;base64,",
    b"DATA:;BASE64,",
    b"data:,",
    b"data:image/png;charset=utf-8;base64,",
    b" data:;base64,",
)
_HTTP = (
    "http://example.com/a.png?x=1#f", "https://user:pw@example.com:8443/a%20b", "http://[::1]:80/", "http://127.1/a",
    "http://0x7f.1/", "http://2130706433/", "http://[::ffff:169.254.169.254]/latest/meta-data", "http://017700000001/",
    "http://example.com\\@evil.com/", "http://a@b@c/", "http://ex\u00e4mple.com/\u00e9", "http://xn--a/", "http://a..b/",
    "http://EXAMPLE.com.:80/", "http://1.2.3.4.5/", "http://localhost/", "//h/p", "http:/h", "http:h", "https://[v1.x]/",
    "http://169.254.169.254%2f@h/", "http://h:99999/", "http://h:/", "http://\u2460.com/", "http://%31/",
)  # fmt: skip
_LETTERS = ("/", "\\", "@", ":", "#", "?", "[", "]", "%", ".", " ", "\t", "\n", "\0", "\u3002", "\uff0e", "\u212a",
            "0x", "::",
            "127.0.0.1", "169.254.169.254", "localhost", "%00", "%2f", "\udc80", "a" * 300)  # fmt: skip
_POLICY = MediaHostPolicy(allow_private=False, listening_on_loopback=False)


class Urls:
    name = "urls"
    may_die = False

    def prepare(self) -> None:
        """Nothing to prepare."""

    def feed(self, chance: random.Random) -> str:
        try:
            return _data_url(chance) if chance.random() < 0.6 else _http_url(chance)
        except (MediaError, GatewayError) as error:
            if len(str(error)) > 600:
                raise Wrong(f"a refusal of {len(str(error))} characters") from None
            return f"refused: {type(error).__name__}"


def _data_url(chance: random.Random) -> str:
    plain = chance.randbytes(chance.choice((0, 1, 2, 3, 30, 3000)))
    text = chance.choice((base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes))(plain)
    kind = chance.randrange(7)
    if kind == 0:
        text = text.rstrip(b"=\n")
    elif kind == 1:
        text = text.replace(b"+", b"%2B").replace(b"=", b"%3D").replace(b"\n", b"%0A")
    elif kind == 2:
        text = text.replace(b"+", b" ")
    elif kind <= 4:
        text = spoil(chance, text)
    url = chance.choice(_HEADS) + text
    if kind == 5:
        url = spoil(chance, url)
    found = split_media_url(url)
    if not isinstance(found, DataUrl):
        return "no data URL"
    most = chance.choice((len(plain), 1 << 20))
    decoded = decode_base64(parse_data_url(found.url), most)
    if len(decoded) > most:
        raise Wrong(f"{len(decoded)} bytes, {most} were allowed")
    if kind in (0, 1, 6) and decoded != plain:
        raise Wrong(f"other bytes than were meant, from {url[:200]!r}")
    return "decoded"


def _http_url(chance: random.Random) -> str:
    url = chance.choice(_HTTP)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        at = chance.randrange(len(url) + 1)
        url = url[:at] + chance.choice(_LETTERS) + url[at + chance.choice((0, 0, 1, 3)) :]
    target = parse_http_url(url)
    _check(target)
    if chance.random() < 0.3:
        location = chance.choice(_HTTP) if chance.random() < 0.5 else url[chance.randrange(len(url)) :]
        _check(join_location(target, location))
    return "target"


def _check(target: HttpTarget) -> None:
    """Another reader sees the same host, and an address that is not public is refused."""
    seen = urlsplit(target.url)
    if (seen.hostname or "") != target.host or (seen.port or target.port) != target.port:
        raise Wrong(f"{target.url!r} is {seen.hostname}:{seen.port} for others, {target.host}:{target.port} for us")
    if re.search(r"[\s\x00-\x1f\x7f]", target.url) or not target.url.isascii():
        raise Wrong(f"{target.url!r} cannot stand in a request line")
    if target.address is not None:
        is_public = ipaddress.ip_address(str(target.address)).is_global
        if _POLICY.permits(target.address, outside=True) and not is_public:
            raise Wrong(f"{target.address} is permitted")
