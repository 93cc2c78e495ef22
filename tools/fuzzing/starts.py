"""From the start of a gateway to its first ready answer, and from SIGINT to its end when it has nothing to do."""

import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.launch import ROOT, Gateway, request

STEP_S = 0.002


@dataclass(frozen=True)
class Life:
    """Seconds: until it accepts connections, until /readiness is 200 (its worker is introduced); SIGINT to its end."""

    listening: float
    ready: float
    ending: float


def live(engine_port: int) -> Life:
    """One gateway with one worker, started, asked, and stopped."""
    with tempfile.TemporaryDirectory(prefix="mediagate-start-") as folder:
        began = time.monotonic()
        gateway = Gateway(
            [sys.executable, str(ROOT / "gateway.py")],
            ["--worker-urls", f"grpc://127.0.0.1:{engine_port}"],
            log=Path(folder) / "log",
        )
        try:
            while not _accepts(gateway):
                time.sleep(STEP_S)
            listening = time.monotonic() - began
            gateway_answers(gateway)
            ready = time.monotonic() - began
            time.sleep(0.2)
            began = time.monotonic()
        finally:
            code = gateway.stop(signal.SIGINT)
        if code != 0:
            raise RuntimeError(f"the gateway ended with {code}{gateway.tail()}")
        return Life(listening, ready, time.monotonic() - began)


def gateway_answers(gateway: Gateway, path: str = "/readiness", *, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while request(gateway.host, gateway.port, path)[0] != 200:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not ready in {within_s:g} s{gateway.tail()}")
        time.sleep(STEP_S)


def _accepts(gateway: Gateway) -> bool:
    if gateway.process.poll() is not None:
        raise RuntimeError(f"the gateway did not start{gateway.tail()}")
    try:
        socket.create_connection((gateway.host, gateway.port), timeout=1).close()
    except OSError:
        return False
    return True
