"""HTTPS to clients, with Python's own client and with one that is no friend."""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import CHAT, Running, image_part, picture, question, running, until

PEM = Path(__file__).parents[1] / "data" / "engine_tls"
CERTIFICATE, KEY = PEM / "localhost.crt", PEM / "localhost.key"
FLAGS = (f"--tls-cert-path={CERTIFICATE}", f"--tls-key-path={KEY}")
HANDSHAKE_S = 1.0


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(*FLAGS, f"--header-read-timeout-secs={HANDSHAKE_S:g}", wait=False) as started:
        until(lambda: said(started, "GET", "/readiness") == 200)
        yield started


def client(gateway: Running, context: ssl.SSLContext | None = None) -> http.client.HTTPSConnection:
    made = gateway.gateway
    return http.client.HTTPSConnection(made.host, made.port, timeout=20, context=context or trusting())


def said(gateway: Running, method: str, path: str) -> int:
    """The status; 0 when nobody is there yet."""
    connection = client(gateway)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    except ConnectionRefusedError:
        return 0
    finally:
        connection.close()


def test_answers_and_streams_over_one_connection(gateway: Running) -> None:
    connection = client(gateway)
    try:
        for is_stream in (False, True, False):
            body: dict[str, Any] = question([image_part(picture())], stream=is_stream)
            connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            data = reply.read()
            assert reply.status == 200
            assert data.endswith(b"data: [DONE]\n\n") == is_stream
        assert connection.sock is not None
        assert connection.sock.version() in ("TLSv1.2", "TLSv1.3")  # type: ignore[attr-defined]
        assert connection.sock.selected_alpn_protocol() in (None, "http/1.1")  # type: ignore[attr-defined]
    finally:
        connection.close()


def test_a_body_of_megabytes(gateway: Running) -> None:
    """Larger than every buffer on the way."""
    connection = client(gateway)
    try:
        body = json.dumps(question([image_part(picture(1500, 1500))])).encode()
        assert len(body) > 4 << 20
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def test_metrics_tell_when_the_certificate_ends(gateway: Running) -> None:
    (held,) = trusting().get_ca_certs()
    ends = ssl.cert_time_to_seconds(str(held["notAfter"]))
    assert gateway.metric('mediagate_tls_certificate_expiry_timestamp_seconds{certificate="server"}') == ends


def test_strangers_and_old_clients_get_nothing(gateway: Running) -> None:
    """Plain HTTP, TLS 1.1, a client that does not trust the certificate; and the next one is served."""
    address = (gateway.gateway.host, gateway.gateway.port)
    with socket.create_connection(address, timeout=10) as plain:
        plain.sendall(b"GET /liveness HTTP/1.1\r\nHost: a\r\n\r\n")
        assert not plain.recv(1000).startswith(b"HTTP")
    old = trusting()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (old, ssl.create_default_context()):
        with pytest.raises(ssl.SSLError):
            client(gateway, context).request("GET", "/liveness")
    assert said(gateway, "GET", "/liveness") == 200
    assert "Traceback" not in gateway.log()


def test_a_handshake_that_does_not_come_is_cut(gateway: Running) -> None:
    address = (gateway.gateway.host, gateway.gateway.port)
    with socket.create_connection(address, timeout=10) as silent:
        began = time.monotonic()
        assert silent.recv(1) == b""
        assert time.monotonic() - began >= HANDSHAKE_S * 0.9


def test_a_client_that_leaves_without_goodbye_takes_its_work_along(gateway: Running) -> None:
    body = json.dumps(question("slow", stream=True, max_tokens=100000)).encode()
    raw = socket.create_connection((gateway.gateway.host, gateway.gateway.port), timeout=10)
    leaving = trusting().wrap_socket(raw, server_hostname="localhost")
    leaving.sendall(gateway.head(len(body), "left-tls") + body)
    assert leaving.recv(15) == b"HTTP/1.1 200 OK"
    leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    socket.socket.close(leaving)
    until(lambda: gateway.metric("smg_admission_inflight") == 0)


def test_the_key_is_in_no_log_and_the_address_says_https(gateway: Running) -> None:
    log = gateway.log()
    assert f"listening on https://127.0.0.1:{gateway.gateway.port}" in log
    secret = "".join(line for line in KEY.read_text().splitlines() if not line.startswith("-----"))
    assert secret[:30] not in log


def test_it_ends_at_once_with_idle_connections() -> None:
    """A client that does not answer the goodbye does not hold it up."""
    with running(*FLAGS, engines=[], wait=False) as gateway:
        until(lambda: said(gateway, "GET", "/liveness") == 200)
        raw = socket.create_connection((gateway.gateway.host, gateway.gateway.port), timeout=10)
        with trusting().wrap_socket(raw, server_hostname="localhost") as idle:
            idle.sendall(b"GET /liveness HTTP/1.1\r\nHost: a\r\n\r\n")
            assert idle.recv(12) == b"HTTP/1.1 200"
            assert gateway.gateway.stop() == 0
