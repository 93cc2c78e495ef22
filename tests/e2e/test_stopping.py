"""The end of a gateway: in order when it is asked, without a trace when it is killed."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pool.supervisor import ECHO_S
from tests.e2e.running import (
    CHAT,
    MODEL,
    QUICK,
    Running,
    children,
    image_part,
    picture,
    question,
    running,
    text_part,
    until,
)
from tools.launch import ROOT

SLOW = ("--token-ms=15", "--tokens-per-chunk=1")
SHM = ("--multimodal-tensor-transport=shm",)
PHOTO = picture(540, 960, kind="JPEG")


def settle(seconds: int, *flags: str) -> tuple[str, ...]:
    kept = [flag for flag in QUICK if not flag.startswith("--drain-settle")]
    return (*kept, f"--drain-settle-secs={seconds}", *flags)


def ends(gateway: Running, *, seconds: float = 20) -> int:
    return gateway.gateway.process.wait(seconds)


def refused_by(client: socket.socket) -> tuple[int, str]:
    """Status and code of the answer that is all there is on the connection."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    return answer.status, json.loads(answer.read())["error"]["code"]


def refuses(gateway: Running) -> bool:
    try:
        socket.create_connection((gateway.gateway.host, gateway.gateway.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


class Stream:
    """A streamed answer that is read bit by bit."""

    def __init__(self, gateway: Running, content: Any, **fields: Any) -> None:
        self._connection = gateway.open_chat(content, stream=True, **fields)
        self._reply = http.client.HTTPResponse(self._connection)

    @property
    def status(self) -> int:
        """Waits for the head, which comes with the first output."""
        if self._reply.version == "UNKNOWN":
            self._reply.begin()
        return self._reply.status

    def until(self, mark: bytes) -> bytes:
        """Read up to a line with `mark`; everything there is when it does not come."""
        assert self.status == 200
        text = b""
        while line := self._reply.readline():
            text += line
            if mark in line:
                break
        return text

    def close(self) -> None:
        self._reply.close()
        self._connection.close()


def test_sigterm_lets_balancers_and_streams_finish() -> None:
    with running(*SHM, quick=settle(1), engine=SLOW) as gateway:
        stream = Stream(gateway, [image_part(PHOTO), text_part("?")])
        stream.until(b"I")
        begun = time.monotonic()
        gateway.gateway.process.send_signal(signal.SIGTERM)
        until(lambda: not gateway.ready(), what="unready while it still listens")
        assert gateway.call("GET", "/readiness").json == {"status": "not ready", "reason": "draining"}
        assert gateway.call("GET", "/liveness").status == 200
        assert gateway.chat("still there?", max_tokens=3).status == 200  # balancers have not noticed yet
        until(lambda: refuses(gateway), seconds=10, what="the listener closes after the settle time")
        assert time.monotonic() - begun >= 1
        assert stream.until(b"[DONE]").endswith(b"data: [DONE]\n")
        stream.close()
        assert ends(gateway) == 0
        assert not gateway.seen("abort") and not gateway.seen("cancelled")


def test_sigint_does_not_settle() -> None:
    with running(quick=settle(30), engine=SLOW) as gateway:
        stream = Stream(gateway, "?")
        stream.until(b"I")
        gateway.gateway.process.send_signal(signal.SIGINT)
        until(lambda: refuses(gateway), seconds=5)
        assert stream.until(b"[DONE]").endswith(b"data: [DONE]\n")
        stream.close()
        assert ends(gateway) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(second: signal.Signals) -> None:
    with running(*SHM, quick=settle(30)) as gateway:
        client = gateway.open_chat([image_part(PHOTO), text_part("[[fault silent]]")])
        until(lambda: gateway.seen("generate"))
        gateway.gateway.process.send_signal(signal.SIGTERM)
        until(lambda: not gateway.ready())
        time.sleep(ECHO_S + 0.1)
        begun = time.monotonic()
        gateway.gateway.process.send_signal(second)
        assert ends(gateway) == 0
        assert time.monotonic() - begun < 4
        with client:
            assert refused_by(client) == (503, "shutting_down")
        until(lambda: gateway.seen("abort"), what="the engine is told")


def test_a_request_that_outlives_the_grace_is_cut() -> None:
    with running("--shutdown-grace-period-secs=1") as gateway:
        client = gateway.open_chat([image_part(PHOTO), text_part("[[fault silent]]")])
        until(lambda: gateway.seen("generate"))
        gateway.gateway.process.send_signal(signal.SIGTERM)
        assert ends(gateway) == 0
        with client:
            assert refused_by(client) == (503, "shutting_down")
        until(lambda: gateway.seen("abort"), what="the engine is told")
        log = gateway.log()
        assert "ending with 1 requests unfinished" in log and "code=shutting_down" in log


def test_a_stream_that_outlives_the_grace_is_not_blamed_on_its_client() -> None:
    with running("--shutdown-grace-period-secs=1") as gateway:
        client = gateway.open_chat("[[fault slow=60000]] x", stream=True)
        until(lambda: gateway.seen("generate"))
        gateway.gateway.process.send_signal(signal.SIGTERM)
        assert ends(gateway) == 0
        client.close()
        assert "code=shutting_down" in gateway.log() and "client_closed_request" not in gateway.log()


STREAMED = {
    CHAT: question("?"),
    "/v1/completions": {"model": MODEL, "prompt": "?", "max_tokens": 400},
    "/generate": {"model": MODEL, "text": "?", "sampling_params": {"max_new_tokens": 400}},
    "/v1/messages": question("?"),
    "/v1/responses": {"model": MODEL, "input": "?", "max_output_tokens": 400},
}


def test_streams_that_outlive_the_grace_end_with_an_event_of_their_api() -> None:
    """And with the end of the body, so that a client sees a whole answer that failed, not a lost connection."""
    told: dict[str, str] = {}
    with running("--shutdown-grace-period-secs=1", engine=("--token-ms=1000", "--tokens-per-chunk=1")) as gateway:
        with contextlib.ExitStack() as stack:
            replies = {path: begun(gateway, path, asked, stack) for path, asked in STREAMED.items()}
            gateway.gateway.process.send_signal(signal.SIGTERM)
            for path, reply in replies.items():
                told[path] = reply.read().decode()
        assert ends(gateway) == 0
        log = gateway.log()
    assert log.count("code=shutting_down") == len(STREAMED) and "client_closed_request" not in log
    for path in (CHAT, "/v1/completions", "/generate"):
        *_, failure, done = told[path].strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "shutting_down"
    name, data = told["/v1/messages"].strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "shutting_down"
    name, data = told["/v1/responses"].strip().split("\n\n")[-1].split("\n")
    assert name == "event: response.failed"
    assert json.loads(data.removeprefix("data: "))["response"]["error"]["code"] == "shutting_down"


def begun(gateway: Running, path: str, asked: dict[str, Any], stack: contextlib.ExitStack) -> http.client.HTTPResponse:
    """A streamed answer whose first line has been read."""
    connection = http.client.HTTPConnection(gateway.gateway.host, gateway.gateway.port, timeout=30)
    stack.callback(connection.close)
    connection.request("POST", path, json.dumps({**asked, "stream": True}), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200 and reply.readline()
    return reply


def test_a_response_in_the_background_is_waited_for_and_cut_as_any_request() -> None:
    """It has no client that waits; what it holds is given back, and its engine is told."""
    asked = {"model": "qwen3-vl-demo", "background": True}
    quick = (*QUICK, "--shutdown-grace-period-secs=2")
    with running(quick=quick) as gateway:
        for words in ("[[fault slow=700]] short", "[[fault slow=60000]] long"):
            begun = gateway.call("POST", "/v1/responses", {**asked, "input": words})
            assert begun.json["status"] == "queued"
        until(lambda: gateway.workers()[0]["load"] == 2, what="both are asked")
        gateway.gateway.process.send_signal(signal.SIGINT)
        assert ends(gateway) == 0
        log = gateway.log()
        assert "waiting for 2 requests" in log and "ending with 1 requests unfinished" in log
        assert "Traceback" not in log and "never awaited" not in log
        until(lambda: len(gateway.seen("cancelled")) == 1, what="the engine is told")


def test_a_connection_that_is_kept_alive_does_not_keep_the_gateway() -> None:
    """A busy client learns from `Connection: close` that it should go elsewhere, and loses nothing."""
    with running(quick=settle(1)) as gateway:
        connection = http.client.HTTPConnection(gateway.gateway.host, gateway.gateway.port, timeout=10)
        gateway.gateway.process.send_signal(signal.SIGTERM)
        until(lambda: not gateway.ready())
        connection.request("POST", "/v1/chat/completions", *body("hi"))
        reply = connection.getresponse()
        assert reply.status == 200 and reply.read()
        assert reply.headers["connection"] == "close"
        connection.close()
        assert ends(gateway) == 0


def body(content: Any) -> tuple[bytes, dict[str, str]]:
    import json

    return json.dumps(question(content)).encode(), {"Content-Type": "application/json"}


@pytest.mark.parametrize("flag", ["--port", "--prometheus-port"])
def test_a_port_that_is_taken(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        others = {"--port": "--prometheus-port", "--prometheus-port": "--port"}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "gateway.py", flag, str(port), others[flag], str(free), "--pool-processes=1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 3
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dead_frontend_ends_the_gateway() -> None:
    with running(*SHM) as gateway:
        assert gateway.chat([image_part(PHOTO)]).status == 200
        (front,) = gateway.pids("front")
        processes = children(gateway.gateway.pid)
        assert len(processes) == 3
        os.kill(front, signal.SIGKILL)
        assert ends(gateway) not in (0, 1, 2, 3)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    remove_files_of(front)


def test_a_killed_gateway_leaves_nothing_that_lasts() -> None:
    """SIGKILL to the supervisor: its children end by themselves, and the next gateway removes the files."""
    with running(*SHM) as gateway:
        assert gateway.chat([image_part(PHOTO)]).status == 200
        client = gateway.open_chat([image_part(PHOTO), text_part("[[fault silent]]")])
        until(lambda: len(gateway.seen("generate")) == 2)
        (front,) = gateway.pids("front")
        processes = children(gateway.gateway.pid)
        os.kill(gateway.gateway.pid, signal.SIGKILL)
        assert ends(gateway) == -signal.SIGKILL
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), what="its children end")
        client.close()
        until(lambda: gateway.seen("cancelled"))
    with running(*SHM, engines=[]):
        assert not files_of(front)


def files_of(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if re.fullmatch(rf"(mediagate|smg-tokenspeed)-{pid}-.*", name)]


def remove_files_of(pid: int) -> None:
    """What the next gateway would do."""
    for name in files_of(pid):
        os.unlink(f"/dev/shm/{name}")


def test_sigterm_before_it_is_ready() -> None:
    """Whatever has been done so far, it ends in order."""
    for pause_s in (0.3, 0.7):
        with running(wait=False) as gateway:
            time.sleep(pause_s)
            gateway.gateway.process.send_signal(signal.SIGTERM)
            assert ends(gateway) in (0, -signal.SIGTERM), gateway.log()
            assert "Traceback" not in gateway.log()
