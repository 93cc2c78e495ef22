"""The mapping: untouched at start, shared across a fork, pages given back."""

import os
from pathlib import Path

import pytest

from pool.mapping import PAGE, Mapping


def shared_kib() -> int:
    """Shared memory this process has pages of."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0])


def test_nothing_is_touched_at_start() -> None:
    before = shared_kib()
    mapping = Mapping(4 << 30)
    assert shared_kib() - before < 64
    mapping.view(1 << 30, 1 << 20)[:] = b"x" * (1 << 20)
    assert shared_kib() - before >= 1024
    mapping.give_back(1 << 30, 1 << 20)
    assert shared_kib() - before < 64
    assert not any(mapping.view(1 << 30, 1 << 20))
    mapping.close()


def test_only_whole_pages_are_given_back() -> None:
    mapping = Mapping(4 * PAGE)
    mapping.view(0, 4 * PAGE)[:] = b"x" * 4 * PAGE
    mapping.give_back(1, 3 * PAGE - 2)
    assert bytes(mapping.view(0, 4 * PAGE)) == b"x" * PAGE + bytes(PAGE) + b"x" * 2 * PAGE
    mapping.give_back(PAGE + 1, PAGE - 1)
    assert bytes(mapping.view(PAGE, 2 * PAGE)) == bytes(PAGE) + b"x" * PAGE
    mapping.close()


def test_bounds() -> None:
    mapping = Mapping(PAGE + 1)
    assert mapping.nbytes == 2 * PAGE
    for offset, nbytes in ((0, 2 * PAGE + 1), (2 * PAGE, 1), (-1, 1), (0, -1)):
        with pytest.raises(IndexError):
            mapping.view(offset, nbytes)
    with pytest.raises(ValueError):
        Mapping(0)
    mapping.close()


def test_children_share_it() -> None:
    mapping = Mapping(PAGE)
    pid = os.fork()
    if not pid:
        mapping.view(10, 5)[:] = b"hello"
        os._exit(0)
    os.waitpid(pid, 0)
    assert bytes(mapping.view(10, 5)) == b"hello"
    mapping.close()
