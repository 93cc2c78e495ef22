"""What the machine allows, against trees of /proc and /sys written as the kernel writes them."""

import os
from pathlib import Path

import pytest

from pipeline.machine import memory_bytes, shm_bytes, usable_cores

CORES = len(os.sched_getaffinity(0))


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal:       16000000 kB\nMemFree: 1 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_control_group(tmp_path: Path) -> None:
    root = tree(tmp_path, {})
    assert memory_bytes(root) == 16_000_000 * 1024
    assert usable_cores(root) == CORES


def test_version_2_takes_the_smallest_of_all_ancestors(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/gate.service\n",
            "sys/fs/cgroup/system.slice/gate.service/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/memory.max": "4294967296\n",
            "sys/fs/cgroup/system.slice/gate.service/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
        },
    )
    assert memory_bytes(root) == 4 << 30
    assert usable_cores(root) == 1


def test_version_2_inside_a_container(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1073741824\n"})
    assert memory_bytes(root) == 1 << 30


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            # the container's own path is not visible inside it: the mount's root is asked as well
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_bytes(root) == 2 << 30
    assert usable_cores(root) == min(CORES, 1)


@pytest.mark.parametrize("quota", ["-1", "9223372036854771712"])
def test_version_1_without_a_limit(tmp_path: Path, quota: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_bytes(root) == 16_000_000 * 1024
    assert usable_cores(root) == CORES


def test_half_a_core_is_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert usable_cores(root) == 1


def test_shared_memory(tmp_path: Path) -> None:
    facts = os.statvfs(tmp_path)
    assert shm_bytes(str(tmp_path)) == facts.f_blocks * facts.f_frsize
    assert shm_bytes(str(tmp_path / "absent")) == 0
