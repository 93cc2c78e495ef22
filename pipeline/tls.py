"""Certificates and keys: checked before anything listens, made into the listener's context by the frontend.

A certificate comes with its key or not at all.  OpenSSL's own words ("PEM lib") help nobody, so each thing that can be
wrong with a file is looked for and told by its flag.  A key is never shown: not in a message, not when somebody gives
the key itself where its path belongs.
"""

import contextlib
import os
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.certificate import validity
from pipeline.checks import refuse
from pipeline.config import Tls

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"
_ENCRYPTED = b"ENCRYPTED"  # in the head of a PKCS #8 key, in a line of its own in older ones
SOON = timedelta(days=14)  # before its end a certificate is warned of at every start
_PAIRS = (("cert_path", "key_path", "tls_"), ("client_cert_path", "client_key_path", ""))


def check_tls(tls: dict[str, Any]) -> Iterator[str]:
    """Check the files that the section's values name, `~` expanded in place; ConfigError says which flag and why.
    Yields what to warn of.
    """
    for name in ("cert_path", "key_path", "client_cert_path", "client_key_path"):
        tls[name] = None if tls[name] is None else os.path.expanduser(tls[name])
    tls["ca_cert_paths"] = tuple(map(os.path.expanduser, tls["ca_cert_paths"]))
    for certificate, key, prefix in _PAIRS:
        _check_pair(prefix + certificate, tls[certificate], prefix + key, tls[key])
    for path in tls["ca_cert_paths"]:
        _read("ca_cert_paths", path, _CERTIFICATE, "a PEM certificate")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        except ssl.SSLError:
            refuse("ca_cert_paths", path, "holds a certificate that cannot be read")
    for certificate, _, prefix in _PAIRS:
        if tls[certificate] is not None:
            yield from _check_validity(f"--{(prefix + certificate).replace('_', '-')}", tls[certificate])


def expiries(tls: Tls) -> dict[str, float]:
    """When certificates end, in Unix time, by whose they are: the listener's (server), the one shown to workers
    (client).
    """
    found = {}
    for name, path in (("server", tls.cert_path), ("client", tls.client_cert_path)):
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                found[name] = validity(Path(path).read_text()).until.timestamp()
    return found


def listening_context(tls: Tls) -> ssl.SSLContext | None:
    """For the listener of clients: TLS 1.2 or later, HTTP/1.1; None for plain HTTP."""
    if tls.cert_path is None or tls.key_path is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(tls.cert_path, tls.key_path)
    return context


def _check_pair(certificate_field: str, certificate: str | None, key_field: str, key: str | None) -> None:
    if certificate is None and key is None:
        return
    if key is None:
        refuse(certificate_field, certificate, f"Needs --{key_field.replace('_', '-')} as well")
    if certificate is None:
        refuse(key_field, key, f"Needs --{certificate_field.replace('_', '-')} as well")
    _read(certificate_field, certificate, _CERTIFICATE, "a PEM certificate")
    if _ENCRYPTED in _read(key_field, key, _KEY, "a PEM private key"):
        refuse(key_field, key, "has a passphrase, which nobody could be asked for")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            refuse(key_field, key, f"is not the key of {certificate}")
        refuse(certificate_field, certificate, f"cannot be used with {key} ({_reason(error)})")


def _check_validity(flag: str, path: str) -> Iterator[str]:
    try:
        since, until = validity(Path(path).read_text())
    except ValueError as error:
        yield f"{flag} {path}: when the certificate holds cannot be read ({error})"
        return
    now = _now()
    if now < since:
        yield f"{flag} {path}: the certificate does not hold before {since:%Y-%m-%d %H:%M} UTC"
    if now > until:
        yield f"{flag} {path}: the certificate expired on {until:%Y-%m-%d %H:%M} UTC; nobody who checks it connects"
    elif until - now < SOON:
        left = (until - now) / timedelta(days=1)
        yield f"{flag} {path}: the certificate expires on {until:%Y-%m-%d %H:%M} UTC, in {left:.1f} days"


def _now() -> datetime:
    return datetime.now(UTC)


def _no_passphrase() -> str:
    """OpenSSL would ask the terminal."""
    return ""


def _read(field: str, path: str, wanted: bytes, what: str) -> bytes:
    if "-----BEGIN" in path:
        refuse(field, "...", "Must be the path of a file, not its content")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        refuse(field, path, "does not exist" if isinstance(error, FileNotFoundError) else f"{error.strerror}")
    if wanted not in data:
        refuse(field, path, f"does not hold {what}")
    return data


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "it cannot be read").lower().replace("_", " ")
