"""The published media sidecar (`smg_grpc_servicer.vllm.mm_sidecar`, vLLM's own processors), in vLLM's environment.

It needs a model's configuration and tokenizer, no weights; starting it takes about twenty seconds.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engines_real.vllm_cpu import OFFLINE, programs
from tools.launch import LaunchError, stop


@contextlib.contextmanager
def published_sidecar(model: Path, redis_url: str, log: Path, flags: Sequence[str] = ()) -> Iterator[int]:
    """`flags`: the worker's engine flags, which make its fingerprint.  Gives its process id."""
    command = [str(programs() / "python"), "-m", "smg_grpc_servicer.vllm.mm_sidecar"]
    command += ["--redis-url", redis_url, "--model", str(model), *flags]
    begun = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=os.environ | OFFLINE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_serving(process, log, begun)
            yield process.pid
        finally:
            stop(process, grace_s=20)


def _wait_until_serving(process: subprocess.Popen[bytes], log: Path, begun: int, wait_s: float = 300) -> None:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        text = log.read_bytes()[begun:].decode(errors="replace")
        if "media sidecar serving under" in text:
            return
        if process.poll() is not None:
            raise LaunchError(f"the published sidecar left with exit code {process.returncode}:\n{text[-2000:]}")
        time.sleep(0.2)
    raise LaunchError(f"the published sidecar does not serve after {wait_s:g} s, see {log}")
