"""A whole gateway in front of engine stand-ins, each a process of its own, for tests from outside."""

import base64
import contextlib
import http.client
import io
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.launch import Gateway, fake_engine

MODEL = "qwen3-vl-demo"
QUICK = (
    "--pool-processes=2",
    "--pool-ring-bytes=268435456",
    "--worker-startup-check-interval=1",
    "--drain-settle-secs=0",
    "--shutdown-grace-period-secs=5",
    "--health-check-interval-secs=1",
    "--server-timing",
)


class Answer:
    """Status, headers (lower-case names) and body of one reply."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        return self.status, self.json["error"]["code"]

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["message"]["content"])

    @property
    def events(self) -> list[Any]:
        """Payloads of the data events; `[DONE]` as a string."""
        found: list[Any] = []
        for line in self.body.decode().split("\n\n"):
            if line.startswith("data: "):
                payload = line.removeprefix("data: ")
                found.append(payload if payload == "[DONE]" else json.loads(payload))
        return found


class Running:
    """A gateway and the journal of its engine."""

    def __init__(self, gateway: Gateway, journal: Path, engine_port: int) -> None:
        self.gateway = gateway
        self.engine_port = engine_port
        self._journal = journal

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> Answer:
        connection = http.client.HTTPConnection(self.gateway.host, self.gateway.port, timeout=timeout_s)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            given = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, data, given)
            reply = connection.getresponse()
            return Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def chat(self, content: Any, **fields: Any) -> Answer:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 400, **fields}
        return self.call("POST", "/v1/chat/completions", body)

    def metrics(self) -> str:
        connection = http.client.HTTPConnection(self.gateway.host, self.gateway.metrics_port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def metric(self, line_start: str) -> float:
        """The value of the first sample whose line begins so; 0 when there is none."""
        for line in self.metrics().splitlines():
            if line.startswith(line_start):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def seen(self) -> list[dict[str, Any]]:
        """What the engine wrote into its journal."""
        return [json.loads(line) for line in self._journal.read_text().splitlines()]

    def open_chat(self, content: Any, **fields: Any) -> socket.socket:
        """A chat request whose answer nobody has read yet; close the socket to be a client that leaves."""
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.gateway.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection = socket.create_connection((self.gateway.host, self.gateway.port), timeout=30)
        connection.sendall(head.encode() + body)
        return connection


@contextlib.contextmanager
def running(
    *flags: str,
    engine: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    quick: tuple[str, ...] = QUICK,
    wait: bool = True,
) -> Iterator[Running]:
    """Engine stand-in and gateway, ready; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="mediagate-test-") as folder:
        journal = Path(folder, "journal")
        journal.touch()
        with fake_engine("--journal", str(journal), *engine) as port:
            gateway = Gateway(
                [sys.executable, "gateway.py"],
                [*quick, "--worker-urls", f"grpc://127.0.0.1:{port}", *flags],
                log=Path(folder, "log"),
                environment=environment,
            )
            try:
                if wait:
                    gateway.wait_until()
                yield Running(gateway, journal, port)
            except BaseException:
                print(gateway.tail())
                raise
            finally:
                gateway.stop()


def until(condition: Any, *, seconds: float = 20, what: str = "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what or condition}"
        time.sleep(0.05)


def picture(height: int = 200, width: int = 300, *, kind: str = "PNG", seed: int = 0) -> bytes:
    """A picture with smooth parts and noise."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 40, height)[:, None, None]
    pixels = np.clip(ramp + rng.integers(0, 16, (height, width, 3)), 0, 255).astype(np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def data_url(file: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(file).decode()}"


def image_part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
