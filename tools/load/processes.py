"""What a process and all its descendants used: CPU, page faults, memory.  Read from /proc, like `ps` does.

CPU and faults count children that ended and were reaped, too: a decoder started for one clip is part of the price.
Memory is the sum of PSS, in which a page that several processes share counts once.
"""

import dataclasses
import os
import threading
from types import TracebackType

_TICK = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Usage:
    """Since the processes began.  `minor_faults`: pages mapped without reading a disk."""

    user_s: float
    system_s: float
    minor_faults: int

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.user_s - other.user_s, self.system_s - other.system_s, self.minor_faults - other.minor_faults)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on; None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def tree(pid: int) -> list[int]:
    """The process and its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += children.get(one, [])
    return found


def usage(pid: int) -> Usage:
    """Of the whole tree, reaped children included."""
    user = system = faults = 0
    for one in tree(pid):
        fields = _stat(one)
        if fields is None:
            continue
        faults += int(fields[7]) + int(fields[8])
        user += int(fields[11]) + int(fields[13])
        system += int(fields[12]) + int(fields[14])
    return Usage(user / _TICK, system / _TICK, faults)


def pss_bytes(pid: int) -> int:
    """Memory of the whole tree now; a page shared by several of its processes counts once."""
    return sum(_kib(f"/proc/{one}/smaps_rollup", "Pss:") for one in tree(pid)) * 1024


def segment_bytes(directory: str = "/dev/shm") -> int:
    """Pages in use on the file system of shared-memory segments.  PSS does not hold those that nobody has mapped."""
    facts = os.statvfs(directory)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def _kib(path: str, name: str) -> int:
    try:
        with open(path) as file:
            return next((int(line.split()[1]) for line in file if line.startswith(name)), 0)
    except OSError:
        return 0


@dataclasses.dataclass(frozen=True)
class Sample:
    """`at_s`: since the watch began.  `segment_bytes`: everything in /dev/shm, whoever wrote it."""

    at_s: float
    pss_bytes: int
    cpu_s: float
    segment_bytes: int


class Watch:
    """Samples memory and CPU of a tree in a thread while a `with` block runs."""

    def __init__(self, pid: int, *, every_s: float = 0.25) -> None:
        self._pid, self._every_s = pid, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> "Watch":
        self._begun, self._usage = _monotonic(), usage(self._pid)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._take()
        self.used = usage(self._pid) - self._usage

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._take()

    def _take(self) -> None:
        spent = (usage(self._pid) - self._usage).cpu_s
        at = round(_monotonic() - self._begun, 3)
        self.samples.append(Sample(at, pss_bytes(self._pid), round(spent, 3), segment_bytes()))

    @property
    def peak_bytes(self) -> int:
        return max((sample.pss_bytes for sample in self.samples), default=0)

    @property
    def peak_segment_bytes(self) -> int:
        return max((sample.segment_bytes for sample in self.samples), default=0)


def _monotonic() -> float:
    return os.times().elapsed
