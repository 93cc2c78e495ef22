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


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes now.  `pss`: sum over the tree, with mapped segments.  `segments`: the tree's files in /dev/shm, each once.

    `held` is the honest total: a segment counts once, whether the process that wrote it has it mapped or not.
    """

    pss: int
    mapped_segments: int
    segments: int

    @property
    def held(self) -> int:
        return self.pss - self.mapped_segments + self.segments


def memory(pid: int, directory: str = "/dev/shm") -> Memory:
    pids = tree(pid)
    rows = [_pss(one, directory) for one in pids]
    return Memory(sum(row[0] for row in rows), sum(row[1] for row in rows), _segments(pids, directory))


def _pss(pid: int, directory: str) -> tuple[int, int]:
    """Bytes of all mappings, and of those of files in `directory`."""
    total = segments = 0
    inside = False
    try:
        with open(f"/proc/{pid}/smaps") as file:
            for line in file:
                if line.startswith("Pss:"):
                    size = int(line.split()[1]) * 1024
                    total += size
                    segments += size if inside else 0
                elif (
                    "-" in line[:18] and not line[0].isupper()
                ):  # the head of a mapping: its addresses, at last its file
                    inside = f" {directory}/" in line
    except OSError:
        return 0, 0
    return total, segments


def _segments(pids: list[int], directory: str) -> int:
    """Bytes of files named after one of the processes; two names of one file count once."""
    marks = tuple(f"-{pid}-" for pid in pids)
    files: dict[int, int] = {}
    for entry in os.scandir(directory):
        if any(mark in entry.name for mark in marks):
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError:  # consumed meanwhile
                continue
            files[facts.st_ino] = facts.st_blocks * 512
    return sum(files.values())


@dataclasses.dataclass(frozen=True)
class Sample:
    """`at_s`: since the watch began; bytes as in `Memory`."""

    at_s: float
    held: int
    pss: int
    segments: int
    cpu_s: float


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
        now = memory(self._pid)
        at = round(_monotonic() - self._begun, 3)
        self.samples.append(Sample(at, now.held, now.pss, now.segments, round(spent, 3)))

    def peak(self, name: str = "held") -> int:
        """Largest `held`, `pss` or `segments` of all samples."""
        return max((getattr(sample, name) for sample in self.samples), default=0)


def _monotonic() -> float:
    return os.times().elapsed
