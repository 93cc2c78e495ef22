"""Clients that leave: at whatever stage, everything that was taken for them is given back, and the engine is told."""

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.running import Running, image_part, picture, question, running, text_part, until

PHOTO = picture(720, 1280, kind="JPEG")


@pytest.fixture(scope="module", params=["inline", "shm"])
def gateway(request: pytest.FixtureRequest) -> Iterator[Running]:
    flags = ["--max-concurrent-requests=4", "--pool-ring-bytes=536870912"]
    with running(*flags, "--multimodal-tensor-transport", request.param, engine=("--token-ms=1",)) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_held(gateway: Running) -> Iterator[None]:
    before = len(gateway.log().splitlines())
    yield
    gateway.given_back()
    lines = gateway.log().splitlines()[before:]
    assert not [line for line in lines if " ERROR " in line or "Traceback" in line]
    assert gateway.chat([image_part(picture())]).status == 200


def left(gateway: Running, request_id: str) -> None:
    """The access line says that the client went."""
    until(lambda: gateway.access(request_id), what="access line")
    (line,) = gateway.access(request_id)
    assert "status=499 code=client_closed_request" in line


@contextlib.contextmanager
def frozen_pool(gateway: Running) -> Iterator[None]:
    pids = [pid for name in ("pool0", "pool1") for pid in gateway.pids(name)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_while_the_body_is_uploaded(gateway: Running) -> None:
    body = json.dumps(question([image_part(PHOTO)])).encode()
    client = gateway.connect()
    client.sendall(gateway.head(len(body), "upload") + body[: len(body) // 2])
    until(lambda: gateway.held() == {"slots": 1})
    client.close()
    left(gateway, "upload")


def test_while_a_slow_origin_is_read(gateway: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as origin:
        url = f"http://127.0.0.1:{origin.getsockname()[1]}/a.png"
        client = gateway.open_chat(
            [image_part(PHOTO), {"type": "image_url", "image_url": {"url": url}}], request_id="fetching"
        )
        connection, _ = origin.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(5000))
        client.close()
        left(gateway, "fetching")
        connection.settimeout(5)
        with connection, contextlib.suppress(ConnectionError):
            assert not connection.recv(1)  # the origin is not read any more


@pytest.mark.parametrize("pictures", [1, 6])
def test_while_it_waits_for_the_pool(gateway: Running, pictures: int) -> None:
    with frozen_pool(gateway):
        content = [image_part(picture(700, 700, seed=seed)) for seed in range(pictures)]
        client = gateway.open_chat(content, request_id=f"pool-{pictures}")
        until(lambda: gateway.held().get("busy processes"))
        client.close()
        left(gateway, f"pool-{pictures}")
        until(lambda: "queued jobs" not in gateway.held(), what="jobs that nobody has begun are withdrawn")


def test_while_it_waits_for_a_slot(gateway: Running) -> None:
    with frozen_pool(gateway):
        serving = [gateway.open_chat([image_part(picture())]) for _ in range(4)]
        until(lambda: gateway.held().get("slots") == 4)
        client = gateway.open_chat("hi", request_id="slot")
        until(lambda: gateway.held().get("queued") == 1)
        client.close()
        left(gateway, "slot")
        assert "queued" not in gateway.held()
        for one in serving:
            one.close()


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(gateway: Running, stream: bool) -> None:
    name = f"silent-{stream}"
    client = gateway.open_chat([image_part(PHOTO), text_part("[[fault silent]]")], request_id=name, stream=stream)
    until(lambda: [line for line in gateway.seen("generate") if line["request_id"].startswith(name)])
    client.close()
    left(gateway, name)
    until(lambda: told(gateway, name))


def told(gateway: Running, request_id: str) -> bool:
    """Whether the engine was told to abort; that the stream was reset shows in its `load`."""
    return any(one.startswith(request_id) for line in gateway.seen("abort") for one in line["request_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_in_mid_answer(gateway: Running, stream: bool) -> None:
    name = f"mid-{stream}"
    client = gateway.open_chat(
        [image_part(PHOTO), text_part("?")], request_id=name, stream=stream, ignore_eos=True, max_tokens=100_000
    )
    if stream:
        assert b"data: " in client.recv(65536) + client.recv(65536)
        assert gateway.held().keys() == {"slots", "in flight", f"load {gateway.engine.url}"}  # no span any more
    else:
        until(lambda: [line for line in gateway.seen("generate") if line["request_id"].startswith(name)])
    client.close()
    left(gateway, name)
    until(lambda: told(gateway, name))


def test_at_any_moment(gateway: Running) -> None:
    """Forty clients that leave at forty moments of a request with three pictures."""
    rng = random.Random(7)
    content = [*(image_part(picture(600 + 40 * n, 900, seed=n)) for n in range(3)), text_part("?")]
    for number in range(40):
        client = gateway.open_chat(content, stream=number % 2 == 0)
        time.sleep(rng.uniform(0, 0.08))
        client.close()
