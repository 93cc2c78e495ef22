"""A whole gateway to be hostile to, and what must be true of it afterwards.

The gateway runs with small limits in a process group of its own; the engine is the stand-in of `tools.fake_engine` or a
hostile one.  `judged` looks at one answer, `Site.aftermath` at the gateway as a whole.
"""

import contextlib
import http.client
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.fuzzing.rig import Wrong
from tools.launch import Gateway, fake_engine

SMALL = (
    "--pool-processes=2",
    "--pool-ring-bytes=134217728",
    "--max-payload-size=33554432",
    "--worker-startup-check-interval=1",
    "--health-check-interval-secs=1",
    "--drain-settle-secs=0",
    "--shutdown-grace-period-secs=3",
    "--retry-max-retries=2",
    "--retry-initial-backoff-ms=5",
    "--request-timeout-secs=8",
    "--pool-job-timeout-secs=5",
)
DOCUMENTED = frozenset({"start_generation_failed", "worker_stream_failed", "no_available_workers", "request_timeout",
                        "admission_queue_timeout", "no_models_available", "tokenizer_not_ready"})  # fmt: skip
_HELD = (
    "smg_admission_inflight",
    "smg_admission_queue_depth",
    'mediagate_ring_used_bytes{ring="inputs"}',
    'mediagate_ring_used_bytes{ring="outputs"}',
    "mediagate_inflight_bytes",
    "mediagate_pool_busy_processes",
    "mediagate_pool_queue_jobs",
)
_FAULT = re.compile(r"Traceback|request failed|giving back failed|job crashed|the frontend (?:died|failed)")
GROWTH_BYTES = 96 << 20
_LINE = re.compile(r"\d{4}-\d\d-\d\dT")


class Site:
    """A running gateway.  `front`: pid of its frontend."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.address = (gateway.host, gateway.port)
        self.front = next(pid for pid in _children(gateway.pid) if _comm(pid) == "mediagate:front")
        self._read = 0

    def ask(self, method: str, path: str, body: bytes | None = None, timeout_s: float = 20) -> tuple[int, bytes]:
        """Status and body; Wrong when there is no answer in time."""
        connection = http.client.HTTPConnection(*self.address, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except TimeoutError:
            raise Wrong(f"no answer to {method} {path} in {timeout_s:g} s") from None
        except http.client.HTTPException as error:
            return 0, repr(error).encode()  # cut in the middle: what an engine's failure in a stream becomes
        finally:
            connection.close()

    def send(self, pieces: Sequence[bytes | float], *, half_close: bool, reset: bool, wait_s: float) -> bytes:
        """Raw bytes, with pauses where a number stands; whatever comes back until the end or for `wait_s`."""
        with socket.create_connection(self.address, timeout=5) as client:
            with contextlib.suppress(OSError):  # the gateway may hang up at any time
                for piece in pieces:
                    if isinstance(piece, float):
                        time.sleep(piece)
                    else:
                        client.sendall(piece)
                if half_close:
                    client.shutdown(socket.SHUT_WR)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return b""
            client.settimeout(wait_s)
            found = b""
            with contextlib.suppress(OSError):
                while len(found) < 1 << 20 and (piece := client.recv(1 << 16)):
                    found += piece
            return found

    def check_log(self) -> None:
        """Wrong when the log tells a fault since the last look."""
        assert self.gateway.log is not None
        with self.gateway.log.open(errors="replace") as log:
            log.seek(self._read)
            new = log.read()
            self._read = log.tell()
        found = _FAULT.search(new)
        if found:
            lines = new[found.start() :].splitlines()
            told = next((at for at, line in enumerate(lines) if at > 1 and _LINE.match(line)), len(lines))
            raise Wrong("the log tells a fault: " + "\n".join(lines[max(0, told - 12) : told]))

    def check_alive(self) -> None:
        began = time.monotonic()
        status, _ = self.ask("GET", "/liveness", timeout_s=5)
        if status != 200 or time.monotonic() - began > 3:
            raise Wrong(f"liveness {status} after {time.monotonic() - began:.1f} s")

    def aftermath(self, *, seconds: float = 12) -> None:
        """Nothing is held any more, everybody lives.  Wrong otherwise."""
        deadline = time.monotonic() + seconds
        while held := self.held():
            if time.monotonic() > deadline:
                raise Wrong(f"still held after {seconds:g} s: {held}")
            time.sleep(0.05)
        if _comm(self.front) != "mediagate:front":
            raise Wrong("the frontend was replaced")
        self.check_alive()
        self.check_log()

    def held(self) -> dict[str, float]:
        lines = self.gauges()
        found = {name: lines.get(name, 0) for name in _HELD}
        found |= {name: value for name, value in lines.items() if name.startswith("smg_worker_requests_active")}
        found["published"] = sum(f"smg-tokenspeed-{self.front}-" in name for name in os.listdir("/dev/shm"))
        return {name: value for name, value in found.items() if value}

    def gauges(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        connection = http.client.HTTPConnection(self.gateway.host, self.gateway.metrics_port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def memory_bytes(self) -> int:
        """The frontend's own memory."""
        for line in Path(f"/proc/{self.front}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return 0


def judged(status: int, body: bytes) -> str:
    """The word an answer is counted by; Wrong for one that blames the gateway."""
    if status in (0, 200, 202):
        return str(status)
    try:
        error = json.loads(body)
        error = error["error"] if isinstance(error.get("error"), dict) else error
        code = "of /parse" if error.get("success") is False else str(error["code"])
        text = str(error.get("message") or error.get("error"))
    except (ValueError, KeyError, AttributeError):
        raise Wrong(f"an answer {status} of another shape: {body[:200]!r}") from None
    if status >= 500 and code not in DOCUMENTED:
        raise Wrong(f"{status} {code}: {text[:300]}")
    if len(text) > 1500:
        raise Wrong(f"{status} {code} with a message of {len(text)} characters")
    return f"{status} {code}"


@contextlib.contextmanager
def site(*flags: str, engine: bool = True) -> Iterator[Site]:
    """A gateway that is ready, in front of an engine stand-in unless `engine` is False."""
    root = Path(__file__).resolve().parent.parent.parent
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mediagate-fuzz-")))
        urls = []
        if engine:
            urls = ["--worker-urls", f"grpc://127.0.0.1:{stack.enter_context(fake_engine('--light'))}"]
        command = [sys.executable, str(root / "gateway.py")]
        gateway = Gateway(command, [*SMALL, *urls, *flags], log=folder / "log")
        stack.callback(gateway.stop)
        gateway.wait_until("/readiness" if engine else "/liveness")
        yield Site(gateway)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
