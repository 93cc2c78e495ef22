"""When certificates hold: the one thing the gateway must know of them that Python's `ssl` does not tell.

A walk over the fixed beginning of a certificate (RFC 5280, 4.1), which OpenSSL has accepted already.
"""

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
_BEFORE_VALIDITY = 3  # serial number, signature algorithm, issuer


class Validity(NamedTuple):
    since: datetime
    until: datetime


def validity(pem: str) -> Validity:
    """When all certificates of a file hold, which is as long as any chain of them does.  ValueError when that cannot
    be read.
    """
    found = [_of_one(ssl.PEM_cert_to_DER_cert(block)) for block in _PEM.findall(pem)]
    if not found:
        raise ValueError("no certificate")
    return Validity(max(one.since for one in found), min(one.until for one in found))


def _of_one(der: bytes) -> Validity:
    ((_, certificate),) = _elements(der)
    _, signed = next(_elements(certificate))
    parts = _elements(signed)
    tag, _ = next(parts)
    for _ in range(_BEFORE_VALIDITY if tag == _VERSION else _BEFORE_VALIDITY - 1):
        next(parts)
    _, times = next(parts)
    return Validity(*(_time(tag, value.decode()) for tag, value in _elements(times)))


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of what stands in `data`, one behind the other (DER)."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length >= 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        yield tag, data[at : at + length]
        at += length


def _time(tag: int, text: str) -> datetime:
    """UTCTime has two digits for the year: 1950 to 2049."""
    if tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
