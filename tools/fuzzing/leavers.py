"""Clients that leave at a random moment: while they still send, while they wait, in the middle of a stream."""

import json
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tools.fuzzing.kills import questions
from tools.fuzzing.live import Site

_RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER on, no time: the connection is reset, not ended


def leave(site: Site, clients: int, *, at_once: int, seed: int, longest_s: float = 0.25) -> Counter[str]:
    """So many clients, each gone at a moment that chance chooses; how far each had come.

    Whoever waits does so for at most `longest_s`: about the time of a request or a little more, so that some are gone
    before its answer and some in it.
    """
    asked = [json.loads(body) for body in questions(8, 360, 640)]
    bodies = [
        json.dumps({**one, "stream": is_stream, "max_tokens": 64}).encode()
        for one in asked
        for is_stream in (True, False)
    ]
    with ThreadPoolExecutor(at_once) as threads:
        chances = (random.Random(seed + number) for number in range(clients))
        return Counter(threads.map(lambda chance: _leave(site, bodies, chance, longest_s), chances))


def _leave(site: Site, bodies: list[bytes], chance: random.Random, longest_s: float) -> str:
    body = chance.choice(bodies)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    message = head + body
    try:
        with socket.create_connection(site.address, timeout=30) as client:
            if chance.random() < 0.3:
                client.sendall(message[: chance.randrange(len(message))])
                stage = "while it sent"
            else:
                client.sendall(message)
                stage = _wait(client, chance.uniform(0, longest_s))
            if chance.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return stage
    except OSError as error:
        return f"was refused: {type(error).__name__}"


def _wait(client: socket.socket, seconds: float) -> str:
    """What came of the answer until then."""
    deadline = time.monotonic() + seconds
    found = b""
    while (left := deadline - time.monotonic()) > 0:
        client.settimeout(left)
        try:
            piece = client.recv(1 << 16)
        except TimeoutError:
            break
        if not piece:
            break
        found += piece
    if not found:
        return "before the answer"
    return "after the answer" if found.endswith((b"}", b"data: [DONE]\n\n", b"0\r\n\r\n")) else "in the answer"
