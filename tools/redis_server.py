"""A Redis server of one's own, for as long as a block lasts: a fresh one on a unix socket, nothing kept on disk.

Needs Redis' program, on the path or beside Python (`tools/setup tests` puts it there).
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.launch import LaunchError, stop

_QUIET = ("--save", "", "--appendonly", "no", "--loglevel", "warning", "--daemonize", "no")


class RedisServer:
    """`start` again after `stop` on the same socket: what a restart looks like to its clients."""

    def __init__(self, folder: Path, settings: Sequence[str] = ()) -> None:
        self.socket = folder / "redis.sock"
        program = shutil.which("redis-server") or str(Path(sys.executable).with_name("redis-server"))
        self._command = [program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)]
        self._command += [*_QUIET, *settings]
        self._log = folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Until it listens; raises LaunchError."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 20
        while not self.socket.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise LaunchError(f"redis-server does not listen: {self._log.read_text()[-500:]}")
            time.sleep(0.01)

    def stop(self) -> None:
        """As a crash would: nothing is said to anybody, nothing is kept."""
        if self._process is not None:
            self._process.kill()
            stop(self._process)
            self.socket.unlink(missing_ok=True)
            self._process = None


@contextlib.contextmanager
def redis_server(settings: Sequence[str] = ()) -> Iterator[RedisServer]:
    """A running one; `settings`: further arguments, such as ("--maxmemory", "10mb")."""
    with tempfile.TemporaryDirectory(prefix="mediagate-redis-") as folder:
        server = RedisServer(Path(folder), settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
