"""Python environments that some checks need beside .venv: the peer, a torch worker.  Cached outside the tree.

They live under $XDG_CACHE_HOME (else ~/.cache)/mediagate/envs/<name>; a stamp holds what was asked for, so a changed
list of requirements is installed again.  Two tools that want the same environment wait for each other.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class EnvironmentFailed(Exception):
    """The packages could not be installed; the text names the log."""


def cache_folder() -> Path:
    """Where everything lies that is expensive to make and belongs to no tree."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mediagate"


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The directory of programs (`bin`) of an environment with these packages.  Raises EnvironmentFailed."""
    folder = cache_folder() / "envs" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder / ".mediagate-stamp"
    wanted = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return folder / "bin"
        print(f"making {folder} ({', '.join(requirements)})", file=sys.stderr, flush=True)
        log = folder.parent / f"{name}.log"
        with log.open("wb") as output:
            # what is there may be another Python's, which cannot be made ours
            _run([sys.executable, "-m", "venv", "--clear", str(folder)], output, log)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
            _run([*pip, *requirements], output, log)
        stamp.write_text(wanted)
    return folder / "bin"


def _run(command: Sequence[str], output: object, log: Path) -> None:
    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # type: ignore[call-overload]
    if done.returncode:
        raise EnvironmentFailed(f"{' '.join(command)} failed, see {log}")
