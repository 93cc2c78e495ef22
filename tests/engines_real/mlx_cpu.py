"""MLX on a CPU, with its published gRPC servicer: installed on first use (0.4 GB), started, stopped.

It takes text only and calls its model by the path of the checkpoint.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tools.environments import environment
from tools.launch import LaunchError, free_port, stop

PACKAGES = ("mlx[cpu]", "mlx-lm<0.32,>=0.22", "transformers<5.13", "smg-grpc-servicer==0.14.1")


@contextlib.contextmanager
def mlx_engine(model: Path, log: Path) -> Iterator[int]:
    """An MLX engine that serves `model` over gRPC; gives its port.  Its log is appended to `log`."""
    port = free_port()
    command = [str(environment("mlx-cpu", PACKAGES) / "python"), "-m", "smg_grpc_servicer.mlx.server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_it_listens(process, port, log)
            yield port
        finally:
            stop(process, grace_s=15)


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path, wait_s: float = 120) -> None:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LaunchError(f"MLX left with exit code {process.returncode}, see {log}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise LaunchError(f"MLX does not listen after {wait_s:g} s, see {log}")
