"""What the machine lets this process use: cores, memory, /dev/shm.  Only defaults of the configuration depend on it.

Containers and services are limited by control groups, version 1 or 2; a limit may stand on any ancestor, so all are
asked and the smallest counts.  A file that is missing or says "no limit" limits nothing.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT_V1 = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's control group and its ancestors; `controller` "" is version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup" / controller
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        own = Path(path.lstrip("/"))
        yield from (mount / folder for folder in (own, *own.parents))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _positive(words: list[str]) -> Iterator[int]:
    yield from (int(word) for word in words[:1] if word.isdigit() and 0 < int(word) < _NO_LIMIT_V1)


def memory_bytes(root: Path = Path("/")) -> int:
    """The memory this process may use: the machine's, or less when a control group says so."""
    limits: list[int] = []
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for group in _groups(root, ""):
        limits.extend(_positive(_words(group / "memory.max")))
    for group in _groups(root, "memory"):
        limits.extend(_positive(_words(group / "memory.limit_in_bytes")))
    return min(limits)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on, at least 1: its affinity, or less when a control group's quota says so."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, ""):
        match _words(group / "cpu.max"):
            case [quota, period] if quota.isdigit():
                cores = min(cores, int(quota) / int(period))
    for group in _groups(root, "cpu"):
        quotas = list(_positive(_words(group / "cpu.cfs_quota_us")))
        periods = list(_positive(_words(group / "cpu.cfs_period_us")))
        if quotas and periods:
            cores = min(cores, quotas[0] / periods[0])
    return max(1, int(cores))


def shm_bytes(directory: str = "/dev/shm") -> int:
    """The size of the file system that shared-memory segments live in; 0 when there is none."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return 0
    return facts.f_blocks * facts.f_frsize
