"""Removes the shared-memory files that a killed gateway left behind, and nothing else.

A name is a candidate when it is `mediagate-<pid>-...` (a master) or `smg-tokenspeed-<pid>-...` (published), a regular
file, and of our own user.  It is removed when both say that its gateway is dead:
- the pid: it does not run, or it is our own (a container's gateway has the same pid in every life);
- the lock: a living gateway holds a shared flock on each of its masters, and a published name is the same inode.
  Locks see across pid namespaces, pids do not: two containers that share /dev/shm do not sweep each other.
With our own pid a published name must besides be a link to such a master: another program of that pid, in another pid
namespace, may have files of the same form without a lock.

Known limits: a pid that meanwhile runs something else keeps its files until that ends; a foreign `smg` gateway in
another pid namespace takes no lock, so its files look dead, as they do to its own kind.
"""

import fcntl
import os
import re
import stat

MASTER_PREFIX = "mediagate-"
PUBLISHED_PREFIX = (
    "smg-tokenspeed-"  # the name readers and the other gateway's sweep know; masters must not begin with it
)

_NAME = re.compile(rf"(?P<prefix>{MASTER_PREFIX}|{PUBLISHED_PREFIX})(?P<pid>[0-9]{{1,10}})-[^/]*")


def sweep_directory(dir_fd: int, own_pid: int) -> int:
    """Remove leftovers in the open directory; how many names went.  What vanishes meanwhile is passed over."""
    removed = 0
    dead_masters: set[int] = set()
    for name in sorted(os.listdir(dir_fd)):  # masters before published names
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        pid = int(match["pid"])
        is_master = match["prefix"] == MASTER_PREFIX
        if pid != own_pid and _may_run(pid):
            continue
        inode = _unheld_inode(name, dir_fd)
        if inode is None or (pid == own_pid and not is_master and inode not in dead_masters):
            continue
        if is_master:
            dead_masters.add(inode)
        try:
            os.unlink(name, dir_fd=dir_fd)
        except OSError:
            continue
        removed += 1
    return removed


def _may_run(pid: int) -> bool:
    if pid == 0:
        return True  # no gateway's: kill(0) would ask about our own group
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _unheld_inode(name: str, dir_fd: int) -> int | None:
    """The inode of a regular file of ours that no living gateway holds; else None."""
    try:
        seen = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid():
            return None
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_ino
    except BlockingIOError:
        return None
    except OSError:
        return os.fstat(fd).st_ino  # no locks here: the pid decided
    finally:
        os.close(fd)
