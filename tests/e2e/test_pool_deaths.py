"""Pool processes that die: no request is lost, and the gateway tells that it happened."""

import concurrent.futures
import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.running import Answer, Running, image_part, picture, running, until

PICTURES = [picture(400 + 32 * n, 600, seed=n) for n in range(4)]

DIED = 'mediagate_pool_restarts_total{reason="died"}'


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running("--pool-job-timeout-secs=1") as found:
        yield found


class Load:
    """Four clients that ask with pictures until told to stop."""

    def __init__(self, gateway: Running) -> None:
        self._gateway = gateway
        self._clients = concurrent.futures.ThreadPoolExecutor(4)
        self._is_over = False
        self.answers: list[Answer] = []

    def __enter__(self) -> "Load":
        self._asking = [self._clients.submit(self._ask, number) for number in range(4)]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        for asking in self._asking:
            asking.result()
        self._clients.shutdown()

    def _ask(self, number: int) -> None:
        while not self._is_over:
            self.answers.append(self._gateway.chat([image_part(PICTURES[number]), image_part(PICTURES[number - 1])]))

    def some_more(self, count: int = 8) -> None:
        wanted = len(self.answers) + count
        until(lambda: len(self.answers) >= wanted, what="answers")


def all_there(gateway: Running) -> bool:
    return gateway.metric("mediagate_pool_processes ") == 2


def check(gateway: Running, load: Load) -> None:
    assert {answer.status for answer in load.answers} == {200}
    assert all(answer.text.startswith("I received 2 images") for answer in load.answers)
    gateway.given_back()


def test_one_killed_under_load_costs_no_request(gateway: Running) -> None:
    deaths = gateway.metric(DIED)
    with Load(gateway) as load:
        for slot in (0, 1, 0):
            load.some_more()
            until(lambda: all_there(gateway))
            (victim,) = gateway.pids(f"pool{slot}")
            os.kill(victim, signal.SIGKILL)
            until(lambda slot=slot, victim=victim: gateway.pids(f"pool{slot}") not in ([], [victim]))
        load.some_more()
    check(gateway, load)
    until(lambda: all_there(gateway))
    assert gateway.metric(DIED) == deaths + 3


def test_both_killed_at_once(gateway: Running) -> None:
    with Load(gateway) as load:
        load.some_more()
        victims = (*gateway.pids("pool0"), *gateway.pids("pool1"))
        for number in (signal.SIGSTOP, signal.SIGKILL):  # else the second may have begun what the first left
            for victim in victims:
                os.kill(victim, number)
        load.some_more()
    check(gateway, load)
    until(lambda: all_there(gateway))
    assert gateway.ready()


def test_sighup_renews_all_under_load(gateway: Running) -> None:
    before = {*gateway.pids("pool0"), *gateway.pids("pool1")}
    deaths = gateway.metric(DIED)
    with Load(gateway) as load:
        load.some_more()
        os.kill(gateway.gateway.pid, signal.SIGHUP)
        until(lambda: "pool processes replaced" in gateway.log())
        load.some_more()
    check(gateway, load)
    after = {*gateway.pids("pool0"), *gateway.pids("pool1")}
    assert len(after) == 2 and not before & after
    assert gateway.metric('mediagate_pool_restarts_total{reason="renewed"}') == 2
    assert gateway.metric(DIED) == deaths


def test_a_stuck_one_is_replaced(gateway: Running) -> None:
    """Stopped for ever before it begins its job: the job waits for the process that comes in its place."""
    (stuck,) = gateway.pids("pool0")
    os.kill(stuck, signal.SIGSTOP)
    assert gateway.chat([image_part(PICTURES[0])]).status == 200
    until(lambda: gateway.pids("pool0") not in ([], [stuck]))
    gateway.given_back()
