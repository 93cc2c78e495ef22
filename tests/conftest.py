"""Rules of the whole suite: no blocking call on the event loop, no child and no /dev/shm file left behind."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import settings

# The same examples in every run, so that a failure is the change's and not the dice's; `--hypothesis-profile search`
# throws new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile("steady")


def _children() -> set[int]:
    me = os.getpid()
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == me:
            found.add(int(stat.parent.name))
    return found


def _segments() -> set[str]:
    """Files of gateways in /dev/shm, less those of processes that live and are not ours: others may run here."""
    found = set()
    for name in os.listdir("/dev/shm"):
        owner = re.match(r"(?:smg-tokenspeed|mediagate)-(\d+)-", name)
        if owner and (int(owner[1]) == os.getpid() or not Path(f"/proc/{owner[1]}").exists()):
            found.add(name)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After a test: no child process, no file in /dev/shm that was not there before."""
    children, segments = _children(), _segments()
    yield
    left = _children() - children
    assert not left, f"children left behind: {left}"
    files = _segments() - segments
    assert not files, f"segments left behind: {files}"


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """A blocking call on a running event loop is a failure with a stack."""
    with blockbuster_ctx(scanned_modules=["pool", "engines", "pipeline"]) as blocker:
        for function in ("os.link", "os.unlink", "os.stat"):  # names in a tmpfs: microseconds, no device behind it
            blocker.functions[function].can_block_in("pool/shm_directory.py", {"publish", "unlink", "has"})
        # the store's lock, also taken in threads: bookkeeping, and files that are removed
        moments = {"take", "take_idle", "_find_or_create", "lend", "begin_use", "end_use", "has_room", "idle_bytes"}
        blocker.functions["threading.Lock.acquire"].can_block_in("pool/segments.py", moments)
        yield blocker
