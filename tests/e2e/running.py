"""A whole gateway in front of engine stand-ins, each a process of its own, for tests from outside."""

import base64
import contextlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.launch import ROOT, Gateway, free_port, stop

MODEL = "qwen3-vl-demo"
CHAT = "/v1/chat/completions"
QUICK = (
    "--pool-processes=2",
    "--pool-ring-bytes=268435456",
    "--worker-startup-check-interval=1",
    "--drain-settle-secs=0",
    "--shutdown-grace-period-secs=5",
    "--health-check-interval-secs=1",
    "--server-timing",
    "--policy=round_robin",
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
    def message(self) -> str:
        return str(self.json["error"]["message"])

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

    @property
    def streamed_text(self) -> str:
        choices = [event["choices"][0] for event in self.events if event != "[DONE]" and event.get("choices")]
        return "".join(choice["delta"].get("content", "") for choice in choices)


class Engine:
    """An engine stand-in that can be ended, brought back on its port, and kept from reading."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._journal = folder / f"journal-{len(list(folder.iterdir()))}"
        self._journal.touch()
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._launch(*flags)

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def start(self, *flags: str) -> None:
        """On the same port as before; `flags` are the new life's own."""
        self._launch(*flags)
        self.listens()

    def _launch(self, *flags: str) -> None:
        command = [sys.executable, str(ROOT / "tools" / "fake_engine.py"), "--with-stdin", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--journal", str(self._journal), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def listens(self) -> None:
        """Wait until it does."""
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith(b"ready "), f"the stand-in did not start: {line!r}"

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        stop(process, grace_s=5)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()

    def kill(self) -> None:
        """As a crash: no goodbye to anybody."""
        assert self._process is not None
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Until it has ended by itself; its exit code."""
        assert self._process is not None
        code = self._process.wait(20)
        self.stop()
        return code

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """As long as this lasts the process reads nothing, and its kernel buffers fill.  It may be killed meanwhile."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if self._process is not None:
                self._process.send_signal(signal.SIGCONT)

    def seen(self, event: str = "") -> list[dict[str, Any]]:
        """What it wrote into its journal: `generate`, `refused`, `cancelled`, `abort`."""
        whole, _, _ = self._journal.read_text().rpartition("\n")  # one that was killed may have begun another line
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if event in ("", line["event"])]


class Running:
    """A gateway and its engine workers; `engine` is the first of them."""

    def __init__(self, gateway: Gateway, engines: Sequence[Engine]) -> None:
        self.gateway = gateway
        self.engines = engines

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    def seen(self, event: str = "") -> list[dict[str, Any]]:
        return self.engine.seen(event)

    # -- asking

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
        return self.call("POST", CHAT, question(content, **fields))

    def open_chat(self, content: Any, *, request_id: str = "left", **fields: Any) -> socket.socket:
        """A chat request whose answer nobody has read yet; close the socket to be a client that leaves."""
        body = json.dumps(question(content, **fields)).encode()
        connection = self.connect()
        connection.sendall(self.head(len(body), request_id) + body)
        return connection

    def connect(self) -> socket.socket:
        return socket.create_connection((self.gateway.host, self.gateway.port), timeout=30)

    def head(self, length: int, request_id: str) -> bytes:
        """The head of a chat request with a body of `length` bytes."""
        return (
            f"POST {CHAT} HTTP/1.1\r\nHost: {self.gateway.host}\r\nContent-Type: application/json\r\n"
            f"x-request-id: {request_id}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    # -- looking inside

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

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", "/workers").json["workers"]
        return found

    def ready(self) -> bool:
        return self.call("GET", "/readiness").status == 200

    def log(self) -> str:
        assert self.gateway.log is not None
        return self.gateway.log.read_text()

    def access(self, request_id: str) -> list[str]:
        """The access lines of one request."""
        return [line for line in self.log().splitlines() if " INFO request " in line and f"id={request_id} " in line]

    def pids(self, name: str) -> list[int]:
        """Processes of this gateway that are called so: `front`, `pool0`, `pool1`."""
        return [pid for pid in children(self.gateway.pid) if comm(pid) == f"mediagate:{name}"]

    def held(self) -> dict[str, float]:
        """What the gateway holds for requests at this moment, without what is zero."""
        names = {
            "slots": "smg_admission_inflight",
            "queued": "smg_admission_queue_depth",
            "inputs": 'mediagate_ring_used_bytes{ring="inputs"}',
            "outputs": 'mediagate_ring_used_bytes{ring="outputs"}',
            "in flight": "mediagate_inflight_bytes",
            "in flight, waiting": "mediagate_inflight_waiting_bytes",
            "busy processes": "mediagate_pool_busy_processes",
            "queued jobs": "mediagate_pool_queue_jobs",
        }
        lines = dict(line.rsplit(" ", 1) for line in self.metrics().splitlines() if not line.startswith("#"))
        found = {word: float(lines.get(name, 0)) for word, name in names.items()}
        found |= {f"load {worker['url']}": worker["load"] for worker in self.workers()}
        found["published segments"] = len(self.published())
        return {word: value for word, value in found.items() if value}

    def published(self) -> list[str]:
        """Names in /dev/shm that engines have not consumed."""
        fronts = self.pids("front")
        return [name for name in os.listdir("/dev/shm") if any(f"smg-tokenspeed-{pid}-" in name for pid in fronts)]

    def given_back(self, *, seconds: float = 10) -> None:
        """Wait until nothing is held for any request."""
        deadline = time.monotonic() + seconds
        while held := self.held():
            assert time.monotonic() < deadline, f"still held after {seconds} s: {held}"
            time.sleep(0.02)


def question(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 400, **fields}


@contextlib.contextmanager
def running(
    *flags: str,
    engine: tuple[str, ...] = (),
    engines: Sequence[tuple[str, ...]] | None = None,
    environment: Mapping[str, str] | None = None,
    quick: tuple[str, ...] = QUICK,
    wait: bool = True,
    command: Sequence[str] = (sys.executable, "gateway.py"),
) -> Iterator[Running]:
    """Engine stand-ins (`engines`: the flags of each) and a gateway, ready; all are gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mediagate-test-")))
        fleet = []
        for its_flags in [engine] if engines is None else engines:
            fleet.append(Engine(folder, *its_flags))
            stack.callback(fleet[-1].stop)
        urls = ["--worker-urls", *(one.url for one in fleet)] if fleet else []
        gateway = Gateway(command, [*quick, *urls, *flags], log=folder / "log", environment=environment)
        stack.callback(gateway.stop)
        try:
            for one in fleet:  # they come up side by side
                one.listens()
            if wait:
                gateway.wait_until("/readiness" if fleet else "/liveness")
            yield Running(gateway, fleet)
        except BaseException:
            print(gateway.tail())
            raise


def children(pid: int) -> list[int]:
    """Living children of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def until(condition: Callable[[], Any], *, seconds: float = 20, what: str = "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what or condition}"
        time.sleep(0.02)


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


def clip_part(file: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(file, "video/mp4")}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
