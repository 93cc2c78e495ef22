"""What the gateway refuses so that it stays within its memory: always with a code, and early."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.running import CHAT, Running, image_part, picture, question, running, text_part, until

MIB = 1 << 20
PHOTO = picture(1080, 1920, kind="JPEG")  # its tensor takes 50 MB
SMALL = picture(64, 64)
PADDING = "x" * 1_200_000  # in a field that is ignored


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(
        "--max-concurrent-requests=2",
        "--queue-size=2",
        "--queue-timeout-secs=1",
        "--max-payload-size=1500000",
        "--max-inflight-body-bytes=2000000",
        "--multimodal-max-inflight-bytes=60000000",
        engine=("--token-ms=1",),
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_held(gateway: Running) -> Iterator[None]:
    yield
    gateway.given_back()
    assert gateway.chat([image_part(SMALL)]).status == 200


@contextlib.contextmanager
def occupied(gateway: Running, count: int, content: Any = "[[fault silent]]") -> Iterator[list[socket.socket]]:
    """Requests that hold a place until the block ends."""
    before = len(gateway.seen("generate"))
    clients = [gateway.open_chat(content) for _ in range(count)]
    until(lambda: len(gateway.seen("generate")) == before + count)
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def rejected(gateway: Running, reason: str) -> float:
    return gateway.metric(f'smg_admission_queue_rejected_total{{reason="{reason}"}}')


def test_a_full_queue(gateway: Running) -> None:
    full, timeout = rejected(gateway, "full"), rejected(gateway, "timeout")
    with occupied(gateway, 2):
        waiting = [gateway.open_chat("hi", request_id=f"waiting-{n}") for n in range(2)]
        until(lambda: gateway.held().get("queued") == 2)
        answer = gateway.chat("hi")
        assert answer.error == (429, "admission_queue_full") and answer.headers["retry-after"] == "2"
        for client in waiting:
            with client:
                client.settimeout(10)
                reply = client.recv(65536)
                assert reply.startswith(b"HTTP/1.1 503") and b"admission_queue_timeout" in reply
                assert b"Retry-After: 2" in reply
        assert gateway.call("GET", "/health").status == 200  # needs no place
    assert (rejected(gateway, "full"), rejected(gateway, "timeout")) == (full + 1, timeout + 2)


def test_one_in_the_queue_is_served_in_turn(gateway: Running) -> None:
    with occupied(gateway, 2) as clients:
        waiting = gateway.open_chat("hi")
        until(lambda: gateway.held().get("queued") == 1)
        clients[0].close()
        with waiting:
            waiting.settimeout(10)
            assert waiting.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_body_with_a_length_above_the_limit(gateway: Running) -> None:
    answer = gateway.call("POST", CHAT, b" " * 1_500_001)
    assert answer.error == (413, "request_body_too_large")
    assert "1500001" in answer.message and "1500000" in answer.message


def test_a_body_with_a_length_is_refused_before_it_is_sent(gateway: Running) -> None:
    with gateway.connect() as client:
        client.sendall(gateway.head(500_000_000, "unsent"))
        client.settimeout(10)
        reply = client.recv(65536)
    assert reply.startswith(b"HTTP/1.1 413") and b"request_body_too_large" in reply


def test_a_body_without_a_length_above_the_limit(gateway: Running) -> None:
    with gateway.connect() as client:
        head = gateway.head(0, "chunked").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        client.sendall(head)
        with contextlib.suppress(ConnectionError):  # it may be cut off while it still sends
            for _ in range(30):
                client.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
        client.settimeout(10)
        reply = client.recv(65536)
    assert reply.startswith(b"HTTP/1.1 413") and b"request_body_too_large" in reply


def test_the_sum_of_bodies(gateway: Running) -> None:
    """A second body waits for the first, which takes its time, and is told when that takes too long."""
    body = json.dumps(question("hi", user=PADDING)).encode()
    with gateway.connect() as slow:
        slow.sendall(gateway.head(len(body), "slow") + body[:-1])
        until(lambda: gateway.held().get("slots") == 1)
        refused = gateway.call("POST", CHAT, body)
        assert refused.error == (503, "admission_queue_timeout") and refused.headers["retry-after"] == "2"
        with gateway.connect() as second:
            second.sendall(gateway.head(len(body), "second") + body)
            until(lambda: gateway.held().get("slots") == 2)
            slow.sendall(body[-1:])
            for client in (slow, second):
                client.settimeout(10)
                assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_fetched_media_do_not_wait_for_the_body_that_holds_them(gateway: Running) -> None:
    """One request holds its body and fetches; another waits for room.  The first must be able to end."""
    with socket.create_server(("127.0.0.1", 0)) as origin:
        url = f"http://127.0.0.1:{origin.getsockname()[1]}/a.png"
        body = json.dumps(question([{"type": "image_url", "image_url": {"url": url}}], user=PADDING)).encode()
        other = json.dumps(question("hi", user=PADDING)).encode()
        with gateway.connect() as first, gateway.connect() as second:
            first.sendall(gateway.head(len(body), "first") + body[:-1])
            until(lambda: gateway.held().get("slots") == 1)
            second.sendall(gateway.head(len(other), "second") + other)
            until(lambda: gateway.held().get("slots") == 2)
            first.sendall(body[-1:])
            origin.settimeout(5)
            connection, _ = origin.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(SMALL) + SMALL)
            for client in (first, second):
                client.settimeout(10)
                assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_media_above_the_budget_in_flight(gateway: Running) -> None:
    before = rejected(gateway, "multimodal_too_large")
    answer = gateway.chat([image_part(PHOTO), image_part(PHOTO)])
    assert answer.error == (413, "multimodal_payload_too_large")
    assert "60000000" in answer.message
    assert rejected(gateway, "multimodal_too_large") == before + 1


def test_a_busy_budget(gateway: Running) -> None:
    before = rejected(gateway, "multimodal_inflight")
    with occupied(gateway, 1, [image_part(PHOTO), text_part("[[fault silent]]")]):
        answer = gateway.chat([image_part(PHOTO)])
        assert answer.error == (429, "multimodal_inflight_budget") and answer.headers["retry-after"] == "2"
        assert gateway.chat([image_part(SMALL)]).status == 200  # what fits is served
    assert rejected(gateway, "multimodal_inflight") == before + 1


class Decoded:
    """How often something was decoded so far."""

    def __init__(self, gateway: Running) -> None:
        self._gateway = gateway

    @property
    def count(self) -> float:
        return self._gateway.metric('mediagate_stage_duration_seconds_count{modality="image",stage="decode"}')


def test_larger_than_the_ring() -> None:
    with running("--pool-ring-bytes=33554432") as gateway:
        before = Decoded(gateway).count
        answer = gateway.chat([image_part(PHOTO)])
        assert answer.error == (413, "multimodal_payload_too_large")
        assert "50135040" in answer.message and str(24 * MIB) in answer.message
        assert Decoded(gateway).count == before, "nothing is decoded for a request that cannot be served"
        many = [image_part(picture(1200, 1200, seed=seed)) for seed in range(3)]  # encoded, 12 MB; the inputs have 8
        answer = gateway.chat(many)
        assert answer.error == (413, "multimodal_payload_too_large") and str(8 * MIB) in answer.message
        fitting = gateway.chat([image_part(picture(900, 900))])
        assert fitting.status == 200
        gateway.given_back()


def test_more_than_the_ring_together() -> None:
    """Requests that fit alone are served one after the other."""
    with running("--pool-ring-bytes=83886080") as gateway:
        clients = [gateway.open_chat([image_part(PHOTO)], request_id=f"ring-{n}") for n in range(6)]
        for client in clients:
            with client:
                client.settimeout(30)
                assert client.recv(65536).startswith(b"HTTP/1.1 200")
        gateway.given_back()
