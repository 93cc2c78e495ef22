"""First come, first served at every gate, from outside: a large request among a stream of small ones gets its turn.

Small requests come without end and would always fit into what is left; the large one fits only when most of them are
gone.  Whoever let small ones overtake would starve it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.running import QUICK, Running, image_part, picture, running, text_part, until

MIB = 1 << 20
SMALL = picture(448, 448, kind="JPEG")  # a tensor of 4.8 MB
LARGE = [picture(1000, 1500, kind="JPEG", seed=seed) for seed in range(3)]  # of 35 MB each
SLOW = text_part("[[fault slow=150]]")  # what the engine has not answered is held


class Stream:
    """Clients that each ask for a small picture again and again."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway
        self.statuses: list[int] = []
        self.is_over = False

    def ask(self, seed: int) -> None:
        turn = 0
        while not self.is_over:
            turn += 1
            answer = self.gateway.chat([image_part(SMALL), SLOW, text_part(f"{seed} {turn}")])
            self.statuses.append(answer.status)


@contextmanager
def stream(gateway: Running, clients: int) -> Iterator[Stream]:
    found = Stream(gateway)
    threads = [threading.Thread(target=found.ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(found.statuses) > clients)
        yield found
    finally:
        found.is_over = True
        for thread in threads:
            thread.join()


# While the large one waits for nearly all of the in-flight budget, newcomers beyond one more budget are told at once.
MEANWHILE = {"outputs": {200}, "in flight": {200, 429}}
GATES: dict[str, list[str]] = {
    # 12 clients keep 58 MB of small tensors in a place that holds 110 MB: the large one's 106 MB must wait for all
    "outputs": ["--pool-ring-bytes=153092096"],
    "in flight": ["--pool-ring-bytes=402653184", "--multimodal-max-inflight-bytes=115343360"],
}


@pytest.mark.parametrize("gate", GATES)
def test_a_large_request_gets_its_turn(gate: str) -> None:
    flags = [flag for flag in QUICK if "ring-bytes" not in flag]
    with running(*GATES[gate], quick=tuple(flags), engine=("--light",)) as gateway, stream(gateway, 12) as small:
        done, began = len(small.statuses), time.monotonic()
        answer = gateway.chat([*map(image_part, LARGE), SLOW])
        took, meanwhile = time.monotonic() - began, len(small.statuses) - done
        assert answer.status == 200, answer.body
        rate = meanwhile / took
        assert set(small.statuses) <= MEANWHILE[gate]
    # nobody who came after it went before it: what was answered meanwhile is what was there, and what came after it
    # was admitted; a starved request would have met the end of the stream only
    assert took < 10, f"{took:.1f} s, {rate:.0f} small ones a second meanwhile"


def test_a_large_body_gets_its_turn() -> None:
    """The budget of bodies: small ones of 2 MB without end, one that takes nearly all."""
    noise = picture(900, 900)  # two megabytes as PNG
    flags = ["--max-payload-size=16777216", "--max-inflight-body-bytes=16777216", "--queue-timeout-secs=20"]
    with running(*flags, engine=("--light",)) as gateway:
        statuses: list[int] = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                statuses.append(gateway.chat([image_part(noise)]).status)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(statuses) > 8)
            body: dict[str, Any] = {"padding": "a" * (15 * MIB)}
            assert gateway.chat("hi", **body).status == 200
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert set(statuses) == {200}
        gateway.given_back()
