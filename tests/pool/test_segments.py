"""Segments against real files in /dev/shm and real reader processes; a reader here does what the servicers do."""

import errno
import mmap
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pool.segment import Segment, SegmentError
from pool.segments import SegmentStore, size_class

SHM = Path("/dev/shm")
MIB = 1 << 20

# What smg-grpc-servicer 0.14.1 does (mm_shm.py): O_NOFOLLOW, regular file, pread of nbytes at 0, unlink.
READER = """
import os, stat, sys
path, nbytes, unlink = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
assert stat.S_ISREG(os.fstat(fd).st_mode)
sys.stdout.buffer.write(os.pread(fd, nbytes, 0))
if unlink:
    os.unlink(path)
"""


def consume(name: str, nbytes: int, directory: Path = SHM) -> bytes:
    """Read and unlink in this process, as the servicer does."""
    path = directory / name
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        assert stat.S_ISREG(os.fstat(fd).st_mode)
        raw = os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)
    os.unlink(path)
    assert len(raw) == nbytes
    return raw


def our_names() -> set[str]:
    prefixes = (f"mediagate-{os.getpid()}-", f"smg-tokenspeed-{os.getpid()}-")
    return {name for name in os.listdir(SHM) if name.startswith(prefixes)}


@pytest.fixture
def store() -> Iterator[SegmentStore]:
    store = SegmentStore(pid=os.getpid(), cap_bytes=64 * MIB)
    yield store
    store.close()
    assert not our_names()
    assert (store.bytes, store.count) == (0, 0)


def taken(store: SegmentStore, nbytes: int, *, handed_on: bool = False) -> Segment:
    segment = store.take(nbytes, handed_on=handed_on)
    assert segment is not None
    return segment


def written(store: SegmentStore, data: bytes, *, handed_on: bool = False) -> Segment:
    segment = store.write([data], handed_on=handed_on)
    assert segment is not None
    return segment


def test_a_reader_in_another_process_gets_the_bytes_and_the_file_is_used_again(store: SegmentStore) -> None:
    data = os.urandom(300_000)
    segment = written(store, data)
    name = segment.publish()
    read = subprocess.run(
        [sys.executable, "-c", READER, str(SHM / name), str(len(data)), "1"], capture_output=True, check=True
    )
    assert read.stdout == data
    segment.settle(consumed=True)
    again = taken(store, len(data))
    assert again.name == segment.name
    again.settle(consumed=True)


def test_names_modes_and_links(store: SegmentStore) -> None:
    segment = taken(store, 100)
    assert segment.name.startswith(f"mediagate-{os.getpid()}-")
    published = segment.publish()
    _, _, pid, nanoseconds, counter = published.split("-")
    assert published.startswith("smg-tokenspeed-") and int(pid) == os.getpid()
    assert abs(int(nanoseconds) - os.stat(SHM / segment.name).st_ctime_ns) < 10**10 and counter.isdigit()
    for name in (segment.name, published):
        found = os.lstat(SHM / name)
        assert stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 2
    assert os.stat(SHM / segment.name).st_size == segment.capacity >= 100
    segment.settle(consumed=False)
    assert not our_names()


def test_a_file_that_is_handed_on_has_the_exact_size_and_is_used_again_by_its_like(store: SegmentStore) -> None:
    data = os.urandom(70_001)
    segment = written(store, data, handed_on=True)
    assert os.stat(SHM / segment.name).st_size == segment.capacity == 70_001
    assert consume(segment.publish(), 70_001) == data
    segment.settle(consumed=True)
    plain = written(store, data)
    assert plain.name != segment.name, "pool processes map those"
    plain.settle(consumed=True)
    shorter = written(store, data[:65_000], handed_on=True)
    assert shorter.name == segment.name and os.stat(SHM / shorter.name).st_size == 65_000
    assert store.bytes == 65_000 + plain.capacity
    assert consume(shorter.publish(), 65_000) == data[:65_000]
    shorter.settle(consumed=True)
    longer = written(store, data, handed_on=True)
    assert longer.name != shorter.name
    longer.settle(consumed=False)


@pytest.mark.parametrize("how", ["open", "mapped", "elsewhere"])
def test_a_file_that_somebody_still_has_is_not_used_again(store: SegmentStore, how: str) -> None:
    """A scheduler may map what it was handed, unlink the name, answer, and look again."""
    data = os.urandom(70_000)
    segment = written(store, data, handed_on=True)
    path = SHM / segment.publish()
    held = os.open(path, os.O_RDONLY)
    mapping = mmap.mmap(held, 70_000, prot=mmap.PROT_READ)
    if how == "mapped":
        os.close(held)
    if how == "elsewhere":
        program = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print('up', flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", program, str(path)]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout is not None and other.stdout.readline() == b"up\n"
        mapping.close()
        os.close(held)
    os.unlink(path)
    segment.settle(consumed=True)
    assert not our_names() and store.count == 0, "retired"
    if how == "elsewhere":
        other.communicate()
        return
    assert mapping[:] == data
    mapping.close()
    if how == "open":
        os.close(held)


def test_idle_files_that_may_be_handed_on_are_for_pool_processes(store: SegmentStore) -> None:
    """New ones are not: they have no pages yet."""
    assert store.take_idle(70_000) is None
    written(store, bytes(70_000)).settle(consumed=True)
    assert store.take_idle(70_000) is None, "not as long as its tensor"
    first = written(store, b"1" * 70_000, handed_on=True)
    assert store.take_idle(70_000) is None, "in use"
    first.settle(consumed=True)
    assert store.take_idle(70_001) is None and store.take_idle(30_000) is None
    again = store.take_idle(69_000)
    assert again is not None and again.name == first.name and again.is_handed_on
    assert os.stat(SHM / again.name).st_size == again.capacity == 69_000
    assert os.stat(SHM / again.name).st_blocks * 512 >= 69_000
    again.settle(consumed=True)


def test_a_closed_store_has_no_idle_files() -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=MIB)
    written(store, b"1" * 1000, handed_on=True).settle(consumed=True)
    store.close()
    assert store.take_idle(1000) is None


@pytest.mark.parametrize("handed_on", [False, True])
def test_what_is_lent_to_pool_processes_is_used_again(store: SegmentStore, handed_on: bool) -> None:
    segment = written(store, b"1" * 70_000, handed_on=handed_on)
    lent: list[int] = []
    assert store.lend(segment.name, lambda fd: lent.append(os.dup(fd)))
    assert not store.lend("mediagate-1-1", lent.append)
    with mmap.mmap(lent.pop(), 70_000) as memory:
        memory[:1] = b"2"
        assert consume(segment.publish(), 70_000)[:2] == b"21"
        segment.settle(consumed=True)
        again = taken(store, 70_000, handed_on=handed_on)
        assert again.name == segment.name
    again.settle(consumed=False)
    assert not store.lend(again.name, lent.append) and not lent


def test_a_reader_that_was_handed_the_name_keeps_its_pages_however_other_uses_end(store: SegmentStore) -> None:
    segment = written(store, b"1" * 70_000, handed_on=True)
    other = segment.share()
    path = SHM / segment.publish()
    with path.open("rb") as kept:
        path.unlink()
        segment.settle(consumed=True)
        other.settle(consumed=False)  # its request left before anything was sent
        assert store.count == 0 and kept.read() == b"1" * 70_000


def test_space_is_reserved_before_anybody_writes(store: SegmentStore) -> None:
    segment = taken(store, 3 * MIB)
    assert os.stat(SHM / segment.name).st_blocks * 512 >= 3 * MIB
    segment.settle(consumed=False)


def test_without_fallocate_the_length_is_set(monkeypatch: pytest.MonkeyPatch, store: SegmentStore) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    segment = taken(store, 5 * MIB)
    assert os.stat(SHM / segment.name).st_size == segment.capacity
    segment.settle(consumed=False)


def test_an_unanswered_request_retires_the_file_although_it_was_read(store: SegmentStore) -> None:
    segment = written(store, b"x" * 1000)
    consume(segment.publish(), 1000)
    segment.settle(consumed=False)
    assert not our_names() and store.count == 0


def test_withdraw_takes_the_name_away_and_the_file_is_doubtful(store: SegmentStore) -> None:
    segment = written(store, b"x" * 1000)
    first = segment.publish()
    segment.withdraw()
    assert not (SHM / first).exists() and (SHM / segment.name).exists()
    second = segment.publish()  # the retry
    assert second != first and consume(second, 1000) == b"x" * 1000
    segment.withdraw()  # the stream ended: nothing is left, that is no harm
    segment.settle(consumed=True)
    assert store.count == 0, "the first reader may still be at work"


def test_a_retry_after_a_consumed_name_is_doubtful_as_well(store: SegmentStore) -> None:
    segment = written(store, b"x" * 1000)
    consume(segment.publish(), 1000)
    segment.withdraw()  # read, then the worker failed
    consume(segment.publish(), 1000)
    segment.settle(consumed=True)
    assert store.count == 0


def test_two_readers_of_one_request(store: SegmentStore) -> None:
    segment = written(store, b"y" * 1000)
    names = [segment.publish(), segment.publish()]  # prefill and decode
    assert len(set(names)) == 2
    for name in names:
        assert consume(name, 1000) == b"y" * 1000
    segment.settle(consumed=True)
    assert store.idle_bytes == segment.capacity


def test_a_reader_that_keeps_its_name_is_not_recycled_for(store: SegmentStore) -> None:
    segment = written(store, b"z" * 1000)
    name = segment.publish()
    subprocess.run([sys.executable, "-c", READER, str(SHM / name), "1000", "0"], capture_output=True, check=True)
    assert store.recycles("grpc://a")
    segment.settle(consumed=True, reader="grpc://a")
    assert not our_names() and not store.recycles("grpc://a") and store.recycles("grpc://b")
    clean = written(store, b"z" * 1000)
    consume(clean.publish(), 1000)
    clean.settle(consumed=True, reader="grpc://a")
    assert store.count == 0
    store.forget("grpc://a")
    clean = written(store, b"z" * 1000)
    consume(clean.publish(), 1000)
    clean.settle(consumed=True, reader="grpc://a")
    assert store.count == 1


def test_a_name_left_in_place_retires_the_file(store: SegmentStore) -> None:
    segment = written(store, b"z" * 1000)
    segment.publish()
    segment.settle(consumed=True)
    assert store.count == 0 and not our_names()


def test_a_further_link_somebody_made_keeps_the_file_from_being_used(store: SegmentStore, tmp_path: Path) -> None:
    segment = written(store, b"z" * 1000)
    consume(segment.publish(), 1000)
    other = SHM / f"other-{os.getpid()}"
    os.link(SHM / segment.name, other)
    try:
        segment.settle(consumed=True)
        assert store.count == 0 and not (SHM / segment.name).exists()
        assert other.read_bytes()[:1000] == b"z" * 1000, "a reader that still has it sees its own bytes"
    finally:
        os.unlink(other)


def test_a_slow_reader_of_an_aborted_request_sees_its_own_bytes(store: SegmentStore) -> None:
    segment = written(store, b"1" * 200_000)
    fd = os.open(SHM / segment.publish(), os.O_RDONLY)
    segment.settle(consumed=False)
    other = written(store, b"2" * 200_000)
    assert os.pread(fd, 200_000, 0) == b"1" * 200_000
    os.close(fd)
    other.settle(consumed=True)


def test_a_living_view_of_a_failed_request_keeps_its_bytes(store: SegmentStore) -> None:
    segment = written(store, b"v" * 100_000)
    view = segment.view()
    assert view.readonly and view.nbytes == 100_000 and bytes(view[:3]) == b"vvv"
    piece = view[10:20]
    del view
    segment.settle(consumed=False)
    assert store.count == 0, "a socket may still hold it"
    other = written(store, b"w" * 100_000)
    assert bytes(piece) == b"v" * 10
    other.settle(consumed=True)


def test_a_recycled_file_is_mapped_once(store: SegmentStore) -> None:
    segment = written(store, b"v" * 100_000)
    first = segment.view()
    segment.settle(consumed=True)
    again = written(store, b"w" * 90_000)
    second = again.view()
    assert again.name == segment.name and second.obj is first.obj
    assert bytes(second) == b"w" * 90_000
    again.settle(consumed=True)


def test_shared_uses_are_read_withdrawn_and_settled_each_on_its_own(store: SegmentStore) -> None:
    kept = written(store, b"a" * 100_000)
    first, second = kept.share(), kept.share()
    names = first.publish(), second.publish(), second.publish()
    first.withdraw()
    assert not (SHM / names[0]).exists() and (SHM / names[1]).exists() and (SHM / names[2]).exists()
    assert consume(names[1], 100_000) == b"a" * 100_000
    second.settle(consumed=False)
    assert not (SHM / names[2]).exists()
    assert kept.share().publish() in our_names()  # an end in doubt is no reason not to be read any more
    with pytest.raises(SegmentError):
        second.share()


@pytest.mark.parametrize("doubtful", [(), (0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_shared_file_is_used_again_when_every_use_ended_well(
    store: SegmentStore, order: tuple[int, ...], doubtful: tuple[int, ...]
) -> None:
    kept = written(store, b"a" * 100_000)
    uses = [kept, kept.share(), kept.share()]
    for index in order:
        assert taken_and_given_back(store) != kept.name  # as long as anybody has it
        consume(uses[index].publish(), 100_000)
        uses[index].settle(consumed=index not in doubtful)
    assert (taken_and_given_back(store) == kept.name) is (not doubtful)
    assert (SHM / kept.name).exists() is (not doubtful)


def taken_and_given_back(store: SegmentStore) -> str:
    other = taken(store, 100_000)
    other.settle(consumed=True)
    return other.name


def test_a_shared_file_that_may_be_read_keeps_its_pages(store: SegmentStore) -> None:
    """The last use is clean, but the reader of an earlier one may be at work."""
    kept = written(store, b"a" * 100_000)
    use = kept.share()
    fd = os.open(SHM / use.publish(), os.O_RDONLY)
    try:
        use.settle(consumed=False)
        kept.settle(consumed=True)
        assert not (SHM / kept.name).exists()
        assert os.pread(fd, 100_000, 0) == b"a" * 100_000
    finally:
        os.close(fd)


def test_has_room_says_what_take_would_find() -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=4 * MIB, max_files=3)
    try:
        assert store.has_room(4 * MIB) and not store.has_room(4 * MIB + 1)
        first = taken(store, 2 * MIB)
        assert store.has_room(2 * MIB) and not store.has_room(3 * MIB)
        first.settle(consumed=True)
        assert store.has_room(4 * MIB)  # what is idle makes room
        uses = [taken(store, 1000) for _ in range(3)]
        assert not store.has_room(1000)
        uses[0].settle(consumed=True)
        assert store.has_room(1000)
        for use in uses[1:]:
            use.settle(consumed=True)
    finally:
        store.close()


def test_a_settled_segment_refuses_everything(store: SegmentStore) -> None:
    segment = written(store, b"x")
    segment.settle(consumed=True)
    for use in (segment.publish, segment.withdraw, segment.view, lambda: segment.settle(consumed=True)):
        with pytest.raises(SegmentError):
            use()


def test_nothing_and_less_is_a_fault(store: SegmentStore) -> None:
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="at least one byte"):
            store.take(nbytes)


def test_write_joins_buffers_of_any_kind(store: SegmentStore) -> None:
    floats = memoryview(b"\0\0\x80?" * 3).cast("f")
    pieces = [b"head", floats, b"", bytearray(b"tail"), *[bytes([i % 251]) for i in range(3000)]]
    expected = b"head" + b"\0\0\x80?" * 3 + b"tail" + bytes(i % 251 for i in range(3000))
    segment = store.write([memoryview(piece) for piece in pieces])
    assert segment is not None and segment.nbytes == len(expected)
    assert consume(segment.publish(), len(expected)) == expected
    segment.settle(consumed=True)


def test_short_writes_are_continued(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    segment = store.write([b"0123456789", b"abcdefghij"])
    assert segment is not None and bytes(segment.view()) == b"0123456789abcdefghij"
    segment.settle(consumed=False)


async def test_an_idle_segment_may_be_used_from_the_event_loop(store: SegmentStore) -> None:
    """The suite fails what blocks a running loop; names in a tmpfs do not."""
    written(store, b"x" * 10).settle(consumed=True)
    segment = taken(store, 10)
    segment.publish()
    segment.withdraw()
    segment.settle(consumed=False)


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_cap_counts_what_is_in_use_and_idle_makes_room() -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=4 * MIB, keep_bytes=4 * MIB)
    try:
        first, second = taken(store, 2 * MIB), taken(store, 2 * MIB)
        assert store.take(1) is None and store.failures == 1
        first.settle(consumed=True)
        small = taken(store, 1000)
        assert small.name == first.name, "no room for a new one: the larger idle one"
        small.settle(consumed=True)
        assert store.take(3 * MIB) is None, "only 2 MiB can be made free"
        second.settle(consumed=True)
        whole = taken(store, 4 * MIB)
        assert (store.bytes, store.count) == (4 * MIB, 1)
        whole.settle(consumed=True)
        assert store.take(4 * MIB + 1) is None
        assert store.count == 1, "an impossible wish throws nothing away"
    finally:
        store.close()


def test_the_number_of_files_is_bounded() -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=64 * MIB, max_files=2)
    try:
        held = [taken(store, 10), taken(store, 10)]
        assert store.take(10) is None
        held[0].settle(consumed=True)
        taken(store, MIB)  # the idle one is too small and goes
        assert store.count == 2
    finally:
        store.close()


def test_idle_files_above_the_mark_go_oldest_first() -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=64 * MIB, keep_bytes=3 * MIB)
    try:
        sizes = [MIB, 2 * MIB, MIB]
        segments = [taken(store, nbytes) for nbytes in sizes]
        for segment in segments:
            segment.settle(consumed=True)
        assert store.idle_bytes == 3 * MIB
        assert not (SHM / segments[0].name).exists()
        assert all((SHM / segment.name).exists() for segment in segments[1:])
    finally:
        store.close()


def test_a_small_tensor_does_not_take_a_large_file(store: SegmentStore) -> None:
    large = taken(store, 8 * MIB)
    large.settle(consumed=True)
    small = taken(store, MIB)
    assert small.name != large.name and small.capacity == MIB
    near = taken(store, 7 * MIB + 1)
    assert near.name == large.name
    small.settle(consumed=True)
    near.settle(consumed=True)


def test_the_pages_of_a_dropped_file_are_freed_although_it_is_mapped() -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=64 * MIB, keep_bytes=0)
    try:
        segment = written(store, b"x" * MIB)
        fd = os.open(SHM / segment.name, os.O_RDWR)
        with mmap.mmap(fd, segment.capacity) as kept:  # a pool process keeps its mapping for a while
            segment.settle(consumed=True)
            assert os.fstat(fd).st_blocks == 0
            kept[:4] = b"late"  # and may even write: no SIGBUS
        os.close(fd)
    finally:
        store.close()


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_little(nbytes: int) -> None:
    capacity = size_class(nbytes)
    assert nbytes <= capacity <= max(65536, nbytes + nbytes // 8 + 65536)
    assert size_class(capacity) == capacity


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB; where mounting is not allowed, a child in a user namespace cannot help us either: see the
    next test."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root; the same path is tested with a failing fallocate")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_tmpfs_is_none_and_leaves_nothing(small_tmpfs: Path) -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=64 * MIB, directory=str(small_tmpfs))
    assert store.writable
    held = taken(store, 600_000)
    assert store.take(600_000) is None and store.failures == 1
    assert os.listdir(small_tmpfs) == [held.name]
    held.settle(consumed=True)
    larger = taken(store, 900_000)  # the idle one gives way
    assert os.listdir(small_tmpfs) == [larger.name]
    with larger.view() as view:
        assert view.nbytes == 900_000
    larger.settle(consumed=True)
    store.close()
    assert os.listdir(small_tmpfs) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EDQUOT])
def test_a_failing_reservation_is_none_and_leaves_nothing(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for _ in range(3):
            assert store.take(1000) is None and store.write([b"abc"]) is None
    assert store.failures == 6 and (store.bytes, store.count) == (0, 0) and not our_names()
    assert len(caplog.records) == 1, "one line for a run of equal failures"
    taken(store, 1000).settle(consumed=True)


def test_a_failing_write_is_none_and_leaves_nothing(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pwritev", fails)
    assert store.write([b"abc"]) is None
    assert store.failures == 1 and store.count == 0 and not our_names()


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=MIB, directory=str(tmp_path / "absent"))
    assert not store.writable and store.take(10) is None and store.write([b"x"]) is None
    assert store.failures == 2 and store.sweep() == 0
    store.close()


def test_a_master_that_somebody_removed_cannot_be_published(store: SegmentStore) -> None:
    segment = taken(store, 10)
    os.unlink(SHM / segment.name)
    with pytest.raises(FileNotFoundError):
        segment.publish()
    segment.settle(consumed=True)
    assert store.count == 0


def test_close_with_segments_in_use() -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=MIB)
    segment, other = written(store, b"abc"), written(store, b"def")
    segment.publish()
    store.close()
    assert not our_names() and (store.bytes, store.count) == (0, 0)
    assert not store.writable and store.take(10) is None
    with pytest.raises(SegmentError):
        segment.view()
    with pytest.raises(OSError):
        other.publish()
    segment.settle(consumed=True)
    other.settle(consumed=False)
    store.close()


def test_threads_publish_and_settle_at_once(store: SegmentStore) -> None:
    names: list[str] = []
    faults: list[BaseException] = []

    def work(mark: int) -> None:
        try:
            for turn in range(40):
                data = bytes([mark]) * (1000 + turn)
                segment = written(store, data)
                for _ in range(3):
                    name = segment.publish()
                    names.append(name)
                    assert consume(name, len(data)) == data
                segment.settle(consumed=turn % 5 > 0)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and len(set(names)) == len(names) == 6 * 40 * 3
    assert store.bytes == store.idle_bytes <= 6 * 65536


# -- the rule ---------------------------------------------------------------------------------------------------------


class Reader:
    """It has opened a published name; `reads`: it unlinks it as well."""

    def __init__(self, name: str, mark: bytes, *, reads: bool) -> None:
        self.mark = mark
        self.fd = os.open(SHM / name, os.O_RDONLY)
        self.is_over = False
        if reads:
            os.unlink(SHM / name)


REQUEST = st.fixed_dictionaries(
    {
        "nbytes": st.sampled_from([1000, 60_000, 600_000]),
        "handed_on": st.booleans(),
        "attempts": st.lists(st.sampled_from(["unread", "opened", "read"]), max_size=2),
        "answered": st.booleans(),
        "after": st.integers(0, 2),  # requests that begin before this one ends
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(REQUEST, min_size=2, max_size=12))
def test_a_segment_handed_out_is_nobody_elses(requests: list[dict[str, Any]]) -> None:
    """No published name of a segment handed out exists; a reader that no answer has ended sees its own bytes, and one
    that may have handed the name on does so as long as it has the file open.  Files that pool processes keep mapped are
    written through their mapping.
    """
    store = SegmentStore(pid=os.getpid(), cap_bytes=2 * MIB, keep_bytes=MIB)
    readers: list[Reader] = []
    running: list[tuple[int, Segment, dict[str, Any], list[Reader]]] = []
    mapped: dict[str, mmap.mmap] = {}

    def write(segment: Segment, mark: bytes) -> None:
        if segment.name not in mapped:
            store.lend(segment.name, lambda fd: mapped.update({segment.name: mmap.mmap(fd, segment.capacity)}))
        mapped[segment.name][: len(mark)] = mark

    def begin(turn: int, request: dict[str, Any]) -> None:
        segment = store.take_idle(request["nbytes"]) if request["handed_on"] else None
        if segment is None:
            segment = store.take(request["nbytes"], handed_on=request["handed_on"])
        if segment is None:
            return
        assert os.stat(SHM / segment.name).st_nlink == 1, "a published name of it still exists"
        assert all(segment.name != other.name for _, other, _, _ in running)
        mark = os.urandom(8)
        write(segment, mark)
        mine = []
        for number, kind in enumerate(request["attempts"]):
            if number:
                segment.withdraw()
            name = segment.publish()
            if kind != "unread":
                mine.append(Reader(name, mark, reads=kind == "read"))
        readers.extend(mine)
        running.append((turn + request["after"], segment, request, mine))

    def end(segment: Segment, request: dict[str, Any], mine: list[Reader]) -> None:
        segment.settle(consumed=request["answered"])
        if request["answered"] and request["attempts"][-1:] == ["read"] and not request["handed_on"]:
            mine[-1].is_over = True  # the engine that answered has read; of those that failed before nothing is known

    try:
        for turn, request in enumerate(requests):
            begin(turn, request)
            for entry in [entry for entry in running if entry[0] <= turn]:
                running.remove(entry)
                end(*entry[1:])
            assert store.bytes <= 2 * MIB and store.idle_bytes <= MIB
            for reader in readers:
                assert reader.is_over or os.pread(reader.fd, 8, 0) == reader.mark
    finally:
        for reader in readers:
            os.close(reader.fd)
        store.close()
        assert not our_names()
