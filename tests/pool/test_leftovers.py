"""What a sweep removes and what it must leave: killed and living gateways are real processes."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pool.segments import Segment, SegmentStore

MIB = 1 << 20


def taken(store: SegmentStore, nbytes: int) -> Segment:
    segment = store.take(nbytes)
    assert segment is not None
    return segment


def written(store: SegmentStore, data: bytes) -> Segment:
    segment = store.write([data])
    assert segment is not None
    return segment


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return child.pid


# A gateway that is killed (or lives on) with one published segment.
GATEWAY = """
import os, sys
from pool.segments import SegmentStore
store = SegmentStore(pid=int(sys.argv[2]) or os.getpid(), cap_bytes=1 << 20, directory=sys.argv[1])
segment = store.write([b"left"])
store.take(10)  # before it says so: a third name
print(segment.name, segment.publish(), flush=True)
sys.stdin.readline()
os._exit(9)
"""


class Gateway:
    """A gateway in a process of its own; `pid` 0: its real one."""

    def __init__(self, directory: Path, pid: int = 0) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-c", GATEWAY, str(directory), str(pid)]
        self.process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.names = self.process.stdout.readline().split()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_sweep_takes_what_a_killed_gateway_left(tmp_path: Path) -> None:
    dead, alive = Gateway(tmp_path), Gateway(tmp_path)
    try:
        dead.kill()
        foreign = {"smg-tokenspeed-x", f"other-{dead.process.pid}-1", f"mediagate-{dead.process.pid}", "mediagate-0-1"}
        for name in foreign:
            (tmp_path / name).write_bytes(b"")
        (tmp_path / f"smg-tokenspeed-{dead.process.pid}-5-5").symlink_to("smg-tokenspeed-x")
        os.mkdir(tmp_path / f"mediagate-{dead.process.pid}-dir")
        before = set(os.listdir(tmp_path))
        store = SegmentStore(pid=os.getpid(), cap_bytes=MIB, directory=str(tmp_path))
        mine = taken(store, 10)
        assert store.sweep() == 3
        gone = before - set(os.listdir(tmp_path))
        assert set(dead.names) < gone and len(gone) == 3
        assert set(alive.names) < set(os.listdir(tmp_path)) and (tmp_path / mine.name).exists()
        assert store.sweep() == 0
        store.close()
    finally:
        alive.kill()


def test_a_lock_protects_a_living_gateway_whose_pid_means_nothing_here(tmp_path: Path) -> None:
    elsewhere = Gateway(tmp_path, pid=dead_pid())  # as if from another pid namespace
    try:
        store = SegmentStore(pid=os.getpid(), cap_bytes=MIB, directory=str(tmp_path))
        assert store.sweep() == 0
        elsewhere.kill()
        assert store.sweep() == 3 and os.listdir(tmp_path) == []
        store.close()
    finally:
        elsewhere.kill()


def test_the_same_pid_in_an_earlier_life(tmp_path: Path) -> None:
    earlier = Gateway(tmp_path, pid=os.getpid())
    twin = Gateway(tmp_path, pid=os.getpid())  # and one that lives, in another container
    try:
        earlier.kill()
        foreign = tmp_path / f"smg-tokenspeed-{os.getpid()}-123-0"
        foreign.write_bytes(b"of another program with this pid")
        store = SegmentStore(pid=os.getpid(), cap_bytes=MIB, directory=str(tmp_path))
        mine = written(store, b"mine")
        assert mine.name not in earlier.names + twin.names
        name = mine.publish()
        assert store.sweep() == 3
        assert {*twin.names, mine.name, name, foreign.name} < set(os.listdir(tmp_path))
        store.close()
    finally:
        twin.kill()


def test_files_of_another_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"mediagate-{dead_pid()}-1").write_bytes(b"")
    store = SegmentStore(pid=os.getpid(), cap_bytes=MIB, directory=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert store.sweep() == 0
    assert store.sweep() == 1
    store.close()


def test_a_file_swept_between_creation_and_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SegmentStore(pid=os.getpid(), cap_bytes=MIB, directory=str(tmp_path))
    real, swept = fcntl.flock, []

    def sweeping(fd: int, operation: int) -> None:
        if not swept:
            swept.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(swept[0])
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweeping)
    segment = taken(store, 10)
    assert segment.name != Path(swept[0]).name and os.listdir(tmp_path) == [segment.name]
    store.close()
