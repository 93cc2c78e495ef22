"""More connections than there are descriptors, heads that never end, pipelines without end, silence, what is no HTTP:
others are served."""

import json
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from tests.e2e.running import CHAT, Running, image_part, picture, question, running, until

LIVENESS = b"GET /liveness HTTP/1.1\r\nHost: a\r\n\r\n"
FEW_FILES = ("/bin/sh", "-c", 'ulimit -n 120; exec "$0" gateway.py "$@"', sys.executable)


def connect(gateway: Running) -> socket.socket:
    return socket.create_connection((gateway.gateway.host, gateway.gateway.port), timeout=5)


def alive(client: socket.socket) -> bool:
    """Whether this connection is answered."""
    try:
        client.sendall(LIVENESS)
        return client.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def test_more_connections_than_descriptors() -> None:
    """Those beyond are refused, those before are served, and when they are gone everything is as before."""
    with running(command=FEW_FILES) as gateway:
        first = connect(gateway)
        crowd = [connect(gateway) for _ in range(300)]
        time.sleep(0.5)
        assert alive(first)
        assert not alive(crowd[-1])
        for client in [first, *crowd]:
            client.close()
        answers: list[int] = []

        def served() -> bool:
            try:
                answers.append(gateway.chat([image_part(picture())]).status)
            except OSError:
                return False
            return answers[-1] == 200

        until(served)
        assert "Traceback" not in gateway.log()


def test_unfinished_heads_and_endless_pipelines() -> None:
    """Two hundred heads that do not end, and a client that asks thousands of times and reads nothing."""
    with running() as gateway:
        (front,) = gateway.pids("front")
        unfinished = [connect(gateway) for _ in range(200)]
        for client in unfinished:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX: ")
        pipeline = connect(gateway)
        pipeline.settimeout(0.5)
        sent = 0
        try:
            while sent < 40 << 20:
                sent += pipeline.send(LIVENESS * 2000)
        except OSError:  # it is not read any more
            pass
        assert sent < 40 << 20
        began = time.monotonic()
        assert gateway.chat([image_part(picture())]).status == 200
        assert time.monotonic() - began < 5
        with open(f"/proc/{front}/status") as status:
            private = next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
        assert private < 150 << 10  # KiB
        for client in [*unfinished, pipeline]:
            client.close()
        gateway.given_back()


HEAD_S, IDLE_S = 0.6, 1.2
CHUNKED = (
    f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
).encode()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    with running(f"--header-read-timeout-secs={HEAD_S}", f"--idle-connection-timeout-secs={IDLE_S}") as gateway:
        yield gateway


def conversation(gateway: Running, *pieces: bytes | float) -> bytes:
    """Everything that comes back until the gateway closes; pieces that are numbers are pauses."""
    with connect(gateway) as client:
        for piece in pieces:
            if isinstance(piece, float):
                time.sleep(piece)
            else:
                client.sendall(piece)
        found = b""
        while data := client.recv(1 << 16):
            found += data
        return found


def cut(gateway: Running, reason: str) -> float:
    return gateway.metric(f'mediagate_connections_cut_total{{reason="{reason}"}}')


def test_heads_that_do_not_end_are_cut_and_counted(impatient: Running) -> None:
    """A byte now and then buys nothing; whoever else asks is served meanwhile."""
    before = cut(impatient, "head")
    clients = [connect(impatient) for _ in range(50)]
    began = time.monotonic()
    for client in clients:
        client.sendall(b"POST / HTTP/1.1\r\n")
    while time.monotonic() - began < HEAD_S * 0.7:
        for client in clients:
            client.sendall(b"X")
        time.sleep(0.05)
    assert impatient.chat([image_part(picture())]).status == 200
    for client in clients:
        answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
        client.close()
    assert time.monotonic() - began >= HEAD_S
    assert cut(impatient, "head") == before + 50


def test_connections_without_a_request_are_closed_and_counted(impatient: Running) -> None:
    before = cut(impatient, "idle")
    assert conversation(impatient) == b""
    began = time.monotonic()
    answer = conversation(impatient, LIVENESS, IDLE_S * 0.7, LIVENESS)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert time.monotonic() - began >= IDLE_S * 1.7  # each request starts the time again
    assert cut(impatient, "idle") == before + 2


def test_a_long_answer_is_not_idle(impatient: Running) -> None:
    body = json.dumps(question("[[fault slow=1500]]", stream=True)).encode()
    with impatient.connect() as client:
        client.sendall(impatient.head(len(body), "long") + body)
        assert any(b"[DONE]" in line for line in client.makefile("rb"))


@pytest.mark.parametrize(
    "pieces",
    [
        (CHUNKED, b"5\r\nhello\r\n", 0.1, b"zz\r\n"),
        (CHUNKED, 0.1, b"5\r\nhelloX\r\nzz\r\n"),
        (CHUNKED + b"5\r\nhello\r\nzz\r\n",),
        (LIVENESS + CHUNKED, 0.1, b"-1\r\n"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n",),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",),
    ],
)
def test_what_is_no_http_is_answered_at_once_and_closed(impatient: Running, pieces: tuple[bytes | float, ...]) -> None:
    """A chunk that cannot be read held its handler until the body's time was up."""
    began = time.monotonic()
    *_, head, body = conversation(impatient, *pieces).split(b"\r\n\r\n")
    assert time.monotonic() - began < 5
    assert b" 400 Bad Request\r\n" in head + b"\r\n"
    error = json.loads(body)["error"]
    assert error["code"] == "malformed_request"
    assert b"X-SMG-Error-Code: malformed_request" in head
    assert "aaaa" not in error["message"]
    impatient.given_back()


def test_a_broken_body_leaves_no_stack_and_nothing_held(impatient: Running) -> None:
    assert "Traceback" not in impatient.log()
    assert impatient.metric('smg_http_responses_total{error_code="malformed_request",path="unrouted"') >= 3


# -- Expect


def expecting(expectation: str, length: int) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"{head}Expect: {expectation}\r\n\r\n".encode()


def test_a_body_is_called_for_when_it_has_its_room(impatient: Running) -> None:
    body = json.dumps(question([image_part(picture())])).encode()
    with connect(impatient) as client:
        client.sendall(expecting("100-Continue", len(body)))
        assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("expectation", "length", "status", "code"),
    [
        ("100-continue", 1 << 40, 413, "request_body_too_large"),
        ("200-ok", 100, 417, "expectation_failed"),
    ],
)
def test_a_body_that_is_not_wanted_is_not_called_for(
    impatient: Running, expectation: str, length: int, status: int, code: str
) -> None:
    """And nothing that comes behind is taken for another request."""
    with connect(impatient) as client:
        client.sendall(expecting(expectation, length))
        head, body = client.recv(1 << 16).split(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"Connection: close" in head
        assert json.loads(body)["error"]["code"] == code
        client.sendall(LIVENESS)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
