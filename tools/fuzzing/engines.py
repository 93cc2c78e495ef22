"""Subjects with a hostile engine behind a running gateway: generations, and introductions.

Right is any answer that blames the engine and not the gateway; afterwards nothing is held, and the gateway serves a
worker that behaves.
"""

import hashlib
import json
import random
import time
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tools.fake.servicer import bundle_archive
from tools.fake_engine import BUNDLE
from tools.fuzzing import engine, replies
from tools.fuzzing.engine import HostileEngine, framed, introduction
from tools.fuzzing.live import Site, judged
from tools.fuzzing.mutate import spoil
from tools.fuzzing.requests import CHAT, LiveSubject
from tools.fuzzing.rig import Wrong
from tools.fuzzing.served import MODEL


class Generations(LiveSubject):
    """`worker` is registered before the first case; every case is one request."""

    name = "live-engine"

    def prepare(self) -> None:
        self._engine = HostileEngine().__enter__()
        status, body = self.site.ask("POST", "/workers", json.dumps({"url": self._engine.url}).encode())
        if status != 202:
            raise Wrong(f"the worker was not taken: {body[:200]!r}")
        self._until_ready()

    def _until_ready(self) -> None:
        deadline = time.monotonic() + 8
        while self.site.ask("GET", "/readiness")[0] != 200:
            if time.monotonic() > deadline:
                raise Wrong("a worker that behaves again is not ready after 8 s")
            time.sleep(0.01)

    def talk(self, chance: random.Random) -> str:
        choices = chance.choice((1, 1, 2))
        steps = engine.generation(chance, replies.stream(chance, choices))
        again = chance.random() < 0.3  # else the second attempt gets a good answer
        lives = iter([steps])
        good = [("headers", engine._HEADERS), *_good(choices), ("trailers", "0", "")]

        def script(method: str) -> Any:
            if method != "Generate":
                return introduction(method) or ()
            return steps if again else next(lives, good)

        self._engine.script = script
        is_stream = chance.random() < 0.5
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "n": choices}
        body |= {"stream": is_stream, "max_tokens": 50}
        if chance.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": 2}
        status, answer = self.site.ask("POST", CHAT, json.dumps(body).encode(), timeout_s=15)
        self._engine.script = lambda method: introduction(method) or good
        word = _streamed(answer) if is_stream and status == 200 else judged(status, answer)
        self._until_ready()
        return word


def _good(choices: int) -> list[tuple[str, bytes]]:
    ends = [pb.GenerateComplete(output_ids=[40], finish_reason="stop", index=index) for index in range(choices)]
    return [("data", framed(pb.GenerateResponse(complete=end).SerializeToString())) for end in ends]


def _streamed(answer: bytes) -> str:
    events = [part[6:] for part in answer.split(b"\n\n") if part.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return "200 cut"
    for event in events[:-1]:
        told = json.loads(event)
        if "error" in told:
            return f"200 then {told['error']['code']}"
    return "200 stream"


class Introductions(LiveSubject):
    """A new worker that says wrong things about itself; it is removed again."""

    name = "live-introductions"

    def prepare(self) -> None:
        self._archive = bundle_archive(BUNDLE)
        self._digest = hashlib.sha256(self._archive).hexdigest()

    def talk(self, chance: random.Random) -> str:
        hostile = HostileEngine()
        seen = 0

        def script(method: str) -> Any:
            nonlocal seen
            seen += 1
            if method == "GetTokenizer":
                return engine.archive(chance, self._archive, self._digest)
            if method in ("GetModelInfo", "GetServerInfo") and chance.random() < 0.8:
                return (("headers", engine._HEADERS), ("data", framed(_info(chance, method))), ("trailers", "0", ""))
            steps = list(introduction(method) or ())
            if chance.random() < 0.3:
                steps.insert(chance.randrange(len(steps) + 1), engine._wrong(chance))
            return steps

        hostile.script = script
        with hostile:
            status, body = self.site.ask("POST", "/workers", json.dumps({"url": hostile.url}).encode())
            if status != 202:
                return judged(status, body)
            worker = json.loads(body)["worker_id"]
            deadline = time.monotonic() + chance.choice((0.05, 0.3, 1.0))
            told = ""
            while time.monotonic() < deadline and told not in ("ready", "failed"):
                _, shown = self.site.ask("GET", f"/workers/{worker}")
                told = json.loads(shown).get("status", "")
                time.sleep(0.01)
            if told == "ready":
                model = json.loads(shown)["model_id"]
                ask = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
                judged(*self.site.ask("POST", CHAT, json.dumps(ask).encode()))
            for path in ("/v1/models", "/workers"):
                judged(*self.site.ask("GET", path))
            self.site.ask("DELETE", f"/workers/{worker}")
        return told or "pending"


_TEXTS = ("", "\0", "x" * 100_000, "é", "/etc", "/dev/null", "..", "/proc/self", "null", "{", "[]",
          "image=3,video=-1,=,image=x",
          "true", "bfloat16", '{"top_k": 1e99, "temperature": "hot"}', "1" * 400, str(BUNDLE), "float99", "~",
          "a/b")  # fmt: skip


def _info(chance: random.Random, method: str) -> bytes:
    """An info reply whose fields hold anything of their type; sometimes spoiled bytes."""
    reply = pb.GetModelInfoResponse() if method == "GetModelInfo" else pb.GetServerInfoResponse()
    for field in reply.DESCRIPTOR.fields:
        if field.cpp_type == field.CPPTYPE_MESSAGE or chance.random() < 0.4:
            continue
        value: Any = chance.choice(_TEXTS)
        if field.cpp_type == field.CPPTYPE_BOOL:
            value = chance.random() < 0.5
        elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            value = chance.choice((0.0, -1.0, float("nan"), float("inf")))
        elif field.cpp_type != field.CPPTYPE_STRING:
            value = chance.choice((0, 1, 7, 0x7FFFFFFF))
        if field.is_repeated:
            getattr(reply, field.name).extend([value] * chance.choice((0, 1, 50)))
        else:
            setattr(reply, field.name, value)
    data = reply.SerializeToString()
    return spoil(chance, data) if chance.random() < 0.2 else data


__all__ = ["Generations", "Introductions", "Site"]
