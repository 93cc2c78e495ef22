"""Files lent to pool processes over a socket: the very open file, answers to the right question, nothing left over."""

import contextlib
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool.lending import Lending, nothing_to_lend

Give = Callable[[int], None]


@pytest.fixture
def lending() -> Iterator[Lending]:
    made = Lending()
    yield made
    made.close()


@pytest.fixture
def shelf() -> Iterator[dict[str, int]]:
    """Open files by name."""
    fds = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in ("a", "b"):
            fds[name] = os.open(Path(folder) / name, os.O_RDWR | os.O_CREAT, 0o600)
            os.write(fds[name], name.encode() * 4096)
        yield fds
    for fd in fds.values():
        os.close(fd)


class Desk:
    """The frontend's side, in a thread; `borrow` waits."""

    def __init__(self, lending: Lending, shelf: dict[str, int]) -> None:
        self.asked: list[str] = []
        self._lending = lending
        self._shelf = shelf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Desk":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._over.is_set():
            self._lending.answer(self._lend)
            time.sleep(0.001)

    def _lend(self, name: str, give: Give) -> bool:
        self.asked.append(name)
        if name in self._shelf:
            give(self._shelf[name])
        return name in self._shelf


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_lent_is_the_very_open_file(lending: Lending, shelf: dict[str, int]) -> None:
    with Desk(lending, shelf):
        fd = lending.borrow("b")
    assert fd != shelf["b"] and os.get_inheritable(fd) is False
    os.lseek(shelf["b"], 7, os.SEEK_SET)
    assert os.lseek(fd, 0, os.SEEK_CUR) == 7, "one place in the file for both"
    with mmap.mmap(fd, 4096) as memory:
        os.close(fd)
        memory[:3] = b"xyz"
        assert os.pread(shelf["b"], 4, 0) == b"xyzb"
        fcntl.fcntl(shelf["b"], fcntl.F_SETLEASE, fcntl.F_WRLCK)  # nobody else has opened it
        fcntl.fcntl(shelf["b"], fcntl.F_SETLEASE, fcntl.F_UNLCK)


def test_a_file_that_nobody_lends(lending: Lending, shelf: dict[str, int]) -> None:
    with Desk(lending, shelf) as desk:
        for name in ("c", "../a", "", "é" * 200, "a"):
            with contextlib.ExitStack() as expected:
                if name != "a":
                    expected.enter_context(pytest.raises(OSError))
                os.close(lending.borrow(name))
    assert desk.asked[-1] == "a"


def test_the_frontend_does_not_answer(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.lending._PATIENCE_S", 0.01)
    with pytest.raises(TimeoutError):
        lending.borrow("a")
    lending.answer(nothing_to_lend)
    lending.answer(nothing_to_lend)  # nothing was asked


def test_a_late_answer_is_passed_over(lending: Lending, shelf: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    with monkeypatch.context() as impatient, Desk(lending, {}):
        impatient.setattr("pool.lending._PATIENCE_S", 0.0)
        for _ in range(3):
            with pytest.raises(OSError):
                lending.borrow("a")
    with Desk(lending, shelf):
        fd = lending.borrow("b")
        assert os.pread(fd, 1, 0) == b"b"
        os.close(fd)
    assert open_descriptors() == before


def test_what_a_dead_process_asked_is_thrown_away(
    lending: Lending, shelf: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.lending._PATIENCE_S", 0.0)
    before = open_descriptors()

    def lend(name: str, give: Give) -> bool:
        give(shelf[name])
        return True

    for answered in (True, False):
        for _ in range(2):
            with pytest.raises(TimeoutError):
                lending.borrow("a")
        if answered:
            lending.answer(lend)
        lending.reset()
        assert open_descriptors() == before
    monkeypatch.undo()
    lending.answer(lend)  # nothing is asked any more
    with Desk(lending, shelf):
        os.close(lending.borrow("b"))


def test_a_process_that_asks_and_never_listens_costs_nothing_more(
    lending: Lending, shelf: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """What it does not fetch is bounded by the socket; the frontend goes on."""

    def lend(name: str, give: Give) -> bool:
        give(shelf[name])
        return True

    for _ in range(1000):
        with contextlib.suppress(BlockingIOError):
            lending._process.send(b"a")
        lending.answer(lend)
    assert "could not be lent" in caplog.text
    lending.reset()
    with Desk(lending, shelf):
        os.close(lending.borrow("a"))
