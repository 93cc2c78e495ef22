"""What every forked child does first: end with its parent, leave the terminal's signals to the supervisor, take a name.

Called by the frontend's and the pool processes' entry with signals still blocked (`supervisor.py` blocks them around
the fork, so that a signal which arrives in between is never written into the supervisor's own pipe).
"""

import ctypes
import faulthandler
import logging
import os
import resource
import signal
import sys

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# when memory runs out the kernel shall take a pool process, which costs one job, and not the frontend, which costs
# them all
_POOL_OOM_SCORE = "400"
# a pool process has its two bells, the log and, while it works, a file or two
_POOL_FILES = 256


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def begin(name: str, parent_pid: int, *, ignore: frozenset[signal.Signals]) -> None:
    """Tie this process to `parent_pid`: SIGKILL when that ends, however it ends; the signals in `ignore` do nothing
    here.

    Exits at once when the parent has ended already.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number in ignore else signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent_pid:  # it ended between the fork and the line above
        os._exit(1)
    _prctl(_PR_SET_NAME, name.encode()[:15])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def begin_pool_process(index: int, parent_pid: int) -> None:
    """As `begin`, for a pool process: in a process group of its own, so that it can be killed with whatever it
    started.
    """
    os.setpgid(0, 0)
    # SIGTERM keeps its meaning: such a process has nothing to put in order and is replaced
    begin(f"mediagate:pool{index}", parent_pid, ignore=frozenset({signal.SIGINT, signal.SIGHUP}))
    # what it works on is private, and a hostile file must not fill the disk with images of the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_POOL_FILES, hard), min(_POOL_FILES, hard)))
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(_POOL_OOM_SCORE)
    except OSError as error:  # some containers mount /proc read-only
        logger.debug("no oom score: error=%r", str(error))
    if sys.stderr is not None and not faulthandler.is_enabled():
        faulthandler.enable()  # a codec's segmentation fault leaves a stack in the log
