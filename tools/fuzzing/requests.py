"""Subjects that talk to a running gateway: bodies and pictures as real requests, HTTP that is none, worker admin.

Each case is one conversation.  Right is any documented answer, or a closed connection for what is no HTTP; now and
then, and at the end, the gateway must be alive, hold nothing and have no fault in its log.
"""

import base64
import json
import random
from typing import Any

from tools.fuzzing import apis, bodies
from tools.fuzzing.bodies import anything, like, pairs, written
from tools.fuzzing.formats import seeds
from tools.fuzzing.live import Site, judged
from tools.fuzzing.mutate import spoil
from tools.fuzzing.pictures import Pictures
from tools.fuzzing.rig import Wrong
from tools.fuzzing.served import MODEL

CHAT = "/v1/chat/completions"
ROUTES = (
    CHAT,
    "/v1/messages",
    "/v1/responses",
    "/v1/conversations",
    "/v1/conversations/x/items",
    "/generate",
    "/parse/function_call",
    "/openapi.json",
    "/loads",
    "/v1/models",
    "/workers",
    "/workers/x",
    "/health",
    "/readiness",
    "/",
    "/a" * 5000,
)


class LiveSubject:
    """`prepare` is called in the process that runs the cases; the site is there before."""

    name = ""
    may_die = False

    def __init__(self, site: Site) -> None:
        self.site = site
        self._cases = 0

    def prepare(self) -> None:
        """Nothing to prepare."""

    def feed(self, chance: random.Random) -> str:
        word = self.talk(chance)
        self._cases += 1
        self.site.check_log()
        if self._cases % 50 == 0:
            self.site.check_alive()
        return word

    def talk(self, chance: random.Random) -> str:
        raise NotImplementedError


class LiveBodies(LiveSubject):
    name = "live-bodies"

    def prepare(self) -> None:
        self._picture = base64.b64encode(seeds()["PNG"][4])

    def talk(self, chance: random.Random) -> str:
        path, base = chance.choice(apis.BODIES)
        body = bodies.make(chance, base)
        body = body.replace(b'"ignore_eos":true', b'"ignore_eos":false')  # the stand-in would go on for hours
        if chance.random() < 0.7:  # media that can be had
            for nothing in (b"data:image/png;base64,AAAA", b"http://127.0.0.1:9/a.png"):
                body = body.replace(nothing, b"data:image/png;base64," + self._picture)
            body = body.replace(b'"data":"AAAA"', b'"data":"' + self._picture + b'"')
        return judged(*self.site.ask("POST", path, body))


class LivePictures(LiveSubject):
    name = "live-pictures"

    def prepare(self) -> None:
        self._pictures = Pictures()

    def talk(self, chance: random.Random) -> str:
        files = [self._pictures.make(chance)[1] for _ in range(chance.choice((1, 1, 2, 5)))]
        if sum(map(len, files)) > 20 << 20:
            return "too large"
        urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        return judged(*self.site.ask("POST", CHAT, json.dumps(body).encode()))


class LiveWorkers(LiveSubject):
    """Registrations; what is taken is removed again."""

    name = "live-workers"

    SPEC: dict[str, Any] = {
        "url": "grpc://127.0.0.1:1",
        "runtime_type": "vllm",
        "worker_type": "regular",
        "labels": {"a": "b", "mm_item_limits": "image=3"},
        "models": [{"id": "m", "aliases": ["n"], "context_length": 5}],
        "priority": 5,
        "cost": 1.5,
        "health": {"timeout_secs": 1, "check_interval_secs": 1, "disable_health_check": True},
        "multimodal_tensor_transport": "auto",
        "multimodal_shm_min_bytes": 0,
    }
    URLS = ("127.0.0.1:2", "grpcs://127.0.0.1:3", "http://127.0.0.1:4", "ipc:///x", "grpc://127.0.0.1", "grpc://[::1]:5",
            "grpc://[::1", "grpc://127.0.0.1:99999", "grpc://127.0.0.1:0", "grpc://u@127.0.0.1:6", "grpc://127.0.0.1:7/p?q",
            "grpc://", "", "://", "grpc://127.0.0.1:+8", "grpc://127.0.0.1:\u0663", "GRPC://127.0.0.1:9",
            "grpc://\0:1")  # fmt: skip

    def talk(self, chance: random.Random) -> str:
        pick = chance.random()
        if pick < 0.15:
            path = "/workers/" + chance.choice(("x", "%00", "..", "%2e%2e/x", "a" * 3000, "é", "?", "x/y"))
            method = chance.choice(("GET", "DELETE", "PATCH", "PUT"))
            return judged(*self.site.ask(method, path.encode("ascii", "ignore").decode()))
        spec = pairs({**self.SPEC, "url": chance.choice(self.URLS) if chance.random() < 0.3 else self.SPEC["url"]})
        for _ in range(chance.choice((0, 1, 2))):
            container, at = chance.choice(bodies.places(spec))
            is_pair = isinstance(container, bodies.Pairs)
            old = container[at][1] if is_pair else container[at]
            if is_pair and container[at][0] == "url":
                continue  # it may name a host out there
            new = like(chance, old) if chance.random() < 0.5 else anything(chance)
            container[at] = (container[at][0], new) if is_pair else new
        text = written(spec).encode("utf-8", "surrogatepass")
        if chance.random() < 0.3:
            return self._changed(chance.choice(("PATCH", "PUT")), text)
        status, body = self.site.ask("POST", "/workers", text)
        if status == 202:
            self.site.ask("DELETE", f"/workers/{json.loads(body)['worker_id']}")
            return "202"
        return judged(status, body)

    def _changed(self, method: str, change: bytes) -> str:
        """A worker that is there is told to be otherwise."""
        status, body = self.site.ask("POST", "/workers", json.dumps(self.SPEC).encode())
        if status != 202:
            return judged(status, body)
        path = f"/workers/{json.loads(body)['worker_id']}"
        try:
            return f"{method} {judged(*self.site.ask(method, path, change))}"
        finally:
            self.site.ask("DELETE", path)


class LiveHttp(LiveSubject):
    """HTTP that is spoiled, cut, slow, or no HTTP at all."""

    name = "live-http"

    def talk(self, chance: random.Random) -> str:
        pieces = _conversation(chance)
        answer = self.site.send(
            pieces,
            half_close=chance.random() < 0.5,
            reset=chance.random() < 0.1,
            wait_s=chance.choice((0.05, 0.3, 1.0)),
        )
        if not answer:
            return "closed"
        if not answer.startswith(b"HTTP/"):
            raise Wrong(f"an answer that is no HTTP: {answer[:100]!r}")
        status = int(answer[9:12])
        if status >= 500 and not any(code.encode() in answer for code in ("request_timeout", "no_available_workers")):
            raise Wrong(f"{status} for {b''.join(p for p in pieces if isinstance(p, bytes))[:300]!r}: {answer[:600]!r}")
        return str(status)


def _conversation(chance: random.Random) -> list[bytes | float]:
    kind = chance.randrange(12)
    if kind == 0:
        return [chance.choice(_NO_HTTP), chance.randbytes(chance.choice((0, 10, 3000)))]
    if kind == 1:
        count = chance.choice((2, 50, 2000))
        return [b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * count]
    body = bodies.make(chance)[: 1 << 16] if chance.random() < 0.7 else chance.randbytes(100)
    head = _head(chance, len(body))
    if chance.random() < 0.3:
        head = spoil(chance, head)
    if b"chunked" in head:
        body = _chunked(chance, body)
    if kind == 2:
        return [head + body[: chance.randrange(len(body) + 1)]]
    if kind == 3:
        return [head, 0.01, body[:10], 0.02, body[10:20], 0.02, body[20:]]
    if kind == 4:
        return [head[: chance.randrange(len(head) + 1)]]
    if kind == 5:
        return [head + body + chance.choice((head, b"\0" * 50, b"GET", body))]
    return [head + body]


_NO_HTTP = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"\x16\3\1\2\0\1\0\1\xfc\3\3",
    b"\0" * 100,
    b"GET /\r\n\r\n",
    b"SSH-2.0-x\r\n",
    b"\r\n" * 500,
    b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 5000 + b"\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
)
_HEADERS = (
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Content-Length: -1",
    b"Content-Length: 99999999999999",
    b"Content-Length: 5", b"Content-Length: 0x10", b"Content-Encoding: gzip", b"Expect: 100-continue", b"Expect: x",
    b"Connection: close", b"Connection: upgrade",
    b"Upgrade: websocket\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13",
    b"Content-Type: multipart/form-data; boundary=x", b"Content-Type: application/json; charset=utf-16", b"Host: b",
    b"X-Request-Id: \xff\xfe", b"Authorization: Bearer \xe9", b"X-Forwarded-For: 1", b"Cookie: a=b; c",
    b"Range: bytes=0-1",
    b"X-SMG-Routing-Key: " + b"k" * 3000, b" folded", b"No-Colon", b": empty", b"A\0: b", b"Accept-Encoding: gzip",
    b"Origin: \xff",
)  # fmt: skip


def _head(chance: random.Random, length: int) -> bytes:
    method = chance.choice(
        (b"POST", b"POST", b"POST", b"GET", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE", b"post", b"P\xf6ST")
    )
    path = chance.choice(
        (CHAT, CHAT, CHAT, chance.choice(ROUTES), "/%ff%00", "*", "//a", "/v1/models?model=%ff&model=")
    ).encode()
    lines = [method + b" " + path + b" HTTP/1." + chance.choice((b"1", b"1", b"0")), b"Host: a"]
    lines += [b"Content-Type: application/json"] if chance.random() < 0.9 else []
    lines += [chance.choice(_HEADERS) for _ in range(chance.choice((0, 0, 1, 2)))]
    if not any(b"chunked" in line or b"Length" in line for line in lines) or chance.random() < 0.05:
        lines.append(b"Content-Length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _chunked(chance: random.Random, body: bytes) -> bytes:
    out, at = b"", 0
    while at < len(body):
        size = chance.choice((1, 10, 1000, 65536))
        piece = body[at : at + size]
        out += b"%x%s\r\n%s\r\n" % (len(piece), chance.choice((b"", b"", b";a=b")), piece)
        at += size
        if len(out) > 100_000:
            break
    out += chance.choice(
        (
            b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"0\r\nA: b\r\n\r\n",
            b"",
            b"-1\r\n",
            b"fffffffffffffffff\r\n",
            b"zz\r\n",
            b"5\r\nab",
        )
    )
    return spoil(chance, out) if chance.random() < 0.3 else out


__all__ = ["LiveBodies", "LiveHttp", "LivePictures", "LiveSubject", "LiveWorkers"]
