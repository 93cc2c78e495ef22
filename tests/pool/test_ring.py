"""Rings: order over wrap-around, bounds, taking back; against a simple queue."""

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.mapping import Mapping
from pool.ring import CELLS, MESSAGE_BYTES, RING_BYTES, Doorbell, MessageTooLarge, RingBroken, RingFull
from pool.ring import RingReader as Reader
from pool.ring import RingWriter as Writer


class Ends:
    def __init__(self, *, one_by_one: bool) -> None:
        self.mapping = Mapping(RING_BYTES)
        self.bell = Doorbell(one_by_one=one_by_one)
        self.memory = self.mapping.view(0, RING_BYTES)
        self.writer = Writer(self.memory, self.bell)
        self.reader = Reader(self.memory, self.bell)

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *_: object) -> None:
        self.bell.close()

    def read(self) -> list[bytes]:
        return [self.reader.get() for _ in range(self.bell.answer())]


messages = st.binary(max_size=20) | st.integers(0, MESSAGE_BYTES).map(lambda n: bytes([n % 251]) * n)


@given(st.lists(st.one_of(messages, st.sampled_from(["read", "back", "reset"])), max_size=80))
def test_one_by_one_against_a_queue(steps: list[bytes | str]) -> None:
    with Ends(one_by_one=True) as ends:
        unread: deque[bytes] = deque()
        for step in steps:
            if step == "read":
                got = ends.read()
                assert got == ([unread.popleft()] if unread else [])
            elif step == "back":
                assert ends.writer.take_back() is bool(unread)
                if unread:
                    unread.pop()
            elif step == "reset":
                ends.writer.reset()
                ends.reader.reset()
                unread.clear()
            elif len(unread) == CELLS:
                with pytest.raises(RingFull):
                    ends.writer.put(step)  # type: ignore[arg-type]
            else:
                ends.writer.put(step)  # type: ignore[arg-type]
                unread.append(step)  # type: ignore[arg-type]
        while unread:
            assert ends.read() == [unread.popleft()]
        assert ends.read() == []


@given(st.lists(st.integers(0, CELLS), max_size=40))
def test_all_at_once_over_wrap_around(batches: list[int]) -> None:
    with Ends(one_by_one=False) as ends:
        number = 0
        for size in batches:
            sent = [str(number + i).encode() for i in range(size)]
            for message in sent:
                ends.writer.put(message)
            number += size
            assert ends.read() == sent


def test_messages_have_a_largest_size() -> None:
    with Ends(one_by_one=False) as ends:
        ends.writer.put(b"x" * MESSAGE_BYTES)
        assert ends.read() == [b"x" * MESSAGE_BYTES]
        with pytest.raises(MessageTooLarge) as refused:
            ends.writer.put(b"x" * (MESSAGE_BYTES + 1))
        assert (refused.value.nbytes, refused.value.limit) == (MESSAGE_BYTES + 1, MESSAGE_BYTES)
        assert ends.read() == []


def test_the_count_runs_beyond_32_bits() -> None:
    with Ends(one_by_one=False) as ends:
        ends.writer.count = ends.reader.count = (1 << 32) - 3
        ends.memory[:8].cast("Q")[0] = ends.reader.count
        for number in range(20):
            ends.writer.put(bytes([number]))
            assert ends.read() == [bytes([number])]


def test_sides_that_lost_each_other_are_noticed() -> None:
    with Ends(one_by_one=False) as ends:
        ends.writer.put(b"one")
        ends.reader.count = 1
        with pytest.raises(RingBroken):
            ends.read()
        ends.writer.reset()
        ends.reader.reset()
        ends.writer.put(b"two")
        assert ends.read() == [b"two"]


def test_a_ring_takes_its_size() -> None:
    bell = Doorbell(one_by_one=False)
    with pytest.raises(ValueError):
        Writer(memoryview(bytearray(RING_BYTES - 1)), bell)
    bell.close()
    with pytest.raises(OSError):
        os.fstat(bell.fd)
