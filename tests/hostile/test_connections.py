"""More connections than there are descriptors, heads that never end, pipelines without end: others are served."""

import socket
import sys
import time

from tests.e2e.running import Running, image_part, picture, running, until

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
