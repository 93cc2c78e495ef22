"""Starting and stopping the processes a tool needs: an engine stand-in, this gateway, another gateway.

Children get a session of their own, so that Ctrl-C reaches the tool alone and the tool stops them in order, by their
process id.
"""

import contextlib
import errno
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_HINDRANCES = {
    errno.EADDRINUSE: "it is taken; --port chooses another one",
    errno.EADDRNOTAVAIL: "this machine has no such address; --host chooses another one",
    errno.EACCES: "a port below 1024 is not for everybody; --port chooses another one",
}
_READY = re.compile(r"ready port=(\d+)")


class LaunchError(Exception):
    """A child did not come up; the text ends with the last lines of its log."""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def hindrance(host: str, port: int) -> str | None:
    """Why nothing can listen there, in words; None when it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return _HINDRANCES.get(error.errno or 0, error.strerror or str(error))
    return None


def stop(process: subprocess.Popen[Any], *, grace_s: float = 10.0, number: int = signal.SIGTERM) -> int:
    """End a child of ours and reap it; killed when it takes longer than `grace_s`."""
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


@contextlib.contextmanager
def fake_engine(*arguments: str, log: IO[bytes] | None = None) -> Iterator[int]:
    """An engine stand-in of its own process; gives its port."""
    command = [sys.executable, str(ROOT / "tools" / "fake_engine.py"), "--with-stdin", *arguments]
    with listening(command, log=log) as port:
        yield port


@contextlib.contextmanager
def listening(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    wait_s: float = 60,
) -> Iterator[int]:
    """A child that prints `ready port=N` on its standard output; gives N.  Its standard input stays open."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield _port(process, process.stdout, time.monotonic() + wait_s)
    finally:
        stop(process, grace_s=5)
        process.stdin.close()
        process.stdout.close()


def _port(process: subprocess.Popen[bytes], output: IO[bytes], deadline: float) -> int:
    os.set_blocking(output.fileno(), False)
    text = ""
    while time.monotonic() < deadline and process.poll() is None:
        text += (output.read() or b"").decode()
        found = _READY.search(text)
        if found:
            return int(found[1])
        time.sleep(0.02)
    raise LaunchError(f"{process.args!r} did not say that it listens (exit code {process.poll()}): {text[-500:]}")


class Gateway:
    """A gateway in front of one or more workers; `command` is what comes before the flags: `["smg", "launch"]`."""

    def __init__(
        self,
        command: Sequence[str],
        flags: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.host, self.port = host, port or free_port(host)
        self.metrics_port = free_port(host)
        self.log = log
        self._output = log.open("wb") if log else None
        addresses = ["--host", host, "--port", str(self.port), "--prometheus-port", str(self.metrics_port)]
        self.process = subprocess.Popen(
            [*command, *addresses, *flags],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT if self._output else None,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        return f"http://{_bracketed(self.host)}:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{_bracketed(self.host)}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until(
        self, path: str = "/readiness", body: Mapping[str, Any] | None = None, *, wait_s: float = 60
    ) -> None:
        """Until `path` answers 200 (POST when there is a body).  Raises LaunchError and leaves the child to `stop`."""
        deadline, last = time.monotonic() + wait_s, "no answer"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise LaunchError(f"the gateway left with exit code {self.process.returncode}{self.tail()}")
            try:
                status, text = request(self.host, self.port, path, body, timeout_s=5)
            except OSError as error:
                last = str(error)
            else:
                if status == 200:
                    return
                last = f"{status} {text[:200]!r}"
            time.sleep(0.1)
        raise LaunchError(f"the gateway is not ready after {wait_s:g} s: {last}{self.tail()}")

    def tail(self) -> str:
        if self.log is None or not self.log.exists():
            return ""
        return "\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def stop(self, number: int = signal.SIGINT) -> int:
        """SIGINT: drain without the settle time for balancers."""
        code = stop(self.process, number=number)
        if self._output is not None:
            self._output.close()
        return code


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def request(
    host: str, port: int, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60
) -> tuple[int, bytes]:
    """One HTTP request on a connection of its own: status and body.  Raises OSError."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request("POST" if data else "GET", path, data, {"content-type": "application/json"} if data else {})
        reply = connection.getresponse()
        return reply.status, reply.read()
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def known_flags(command: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Those of `flags` (with their values) that the command lists in its help."""
    listed = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    kept: list[str] = []
    keep = True
    for flag in flags:
        if flag.startswith("--"):
            keep = re.search(re.escape(flag) + r"(?![\w-])", listed) is not None
        if keep:
            kept.append(flag)
    return kept
