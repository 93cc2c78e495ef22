"""Engines without measure or manners, on the wire behind a whole gateway: one clear answer each, and nothing grows."""

import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.e2e.running import Running, running, until
from tools.fuzzing.engine import HostileEngine, Step, framed, introduction

MIB = 1 << 20
HEADERS: Step = ("headers", [(":status", "200"), ("content-type", "application/grpc")])
END: Step = ("trailers", "0", "")
NOT_HERE: Sequence[Step] = (HEADERS, ("trailers", "12", ""))


def chunk(tokens: Sequence[int]) -> bytes:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=tokens)).SerializeToString()


DONE = pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=[40], finish_reason="stop")).SerializeToString()


@pytest.fixture(scope="module")
def engine() -> Iterator[HostileEngine]:
    with HostileEngine() as found:
        yield found


@pytest.fixture(scope="module")
def gateway(engine: HostileEngine) -> Iterator[Running]:
    flags = ["--retry-max-retries=1", "--request-timeout-secs=10", "--worker-urls", engine.url]
    with running(*flags, engines=[]) as found:
        until(found.ready)
        yield found


@pytest.fixture(autouse=True)
def nothing_is_held(gateway: Running, engine: HostileEngine) -> Iterator[None]:
    yield
    behave(engine, HEADERS, ("data", framed(DONE)), END)
    gateway.given_back()
    until(gateway.ready)
    assert gateway.chat("hi").status == 200
    assert "Traceback" not in gateway.log()


def behave(engine: HostileEngine, *steps: Step) -> None:
    """What every Generate call gets from now on."""
    engine.script = lambda method: steps if method == "Generate" else introduction(method) or ()


WRONG: dict[str, tuple[Sequence[Step], int, str]] = {
    "four gigabytes announced": (
        (HEADERS, ("data", framed(b"", length=0xFFFFFFFF))),
        500,
        "a reply of 4294967295 bytes",
    ),
    "compressed": ((HEADERS, ("data", framed(DONE, flag=1)), END), 500, "cannot be read"),
    "no message": ((HEADERS, ("data", framed(b"\xff" * 40)), END), 500, "cannot be read"),
    "cut within a message": ((HEADERS, ("data", framed(DONE)[:-3]), END), 500, "cannot be read"),
    "trailers alone": ((HEADERS, END), 500, "ended before choice 0 did"),
    "no status": (
        (("headers", [("content-type", "application/grpc")]), ("data", framed(DONE)), END),
        500,
        "cannot be read",
    ),
    "a status of letters": ((HEADERS, ("trailers", "x", "")), 500, ""),
    "words that are not ASCII": ((HEADERS, ("trailers", "3", "\xe9\xe8 is wrong")), 400, "is wrong"),
    "a page": ((("headers", [(":status", "404"), ("content-type", "text/html")]), END), 501, ""),
    "a choice nobody asked for": (
        (
            HEADERS,
            ("data", framed(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(index=7)).SerializeToString())),
            END,
        ),
        500,
        "a choice 7 nobody asked for",
    ),
    "a connection of noise": ((("raw", b"\xff" * 300),), 503, ""),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_the_engine_is_blamed(gateway: Running, engine: HostileEngine, name: str, stream: bool) -> None:
    steps, status, words = WRONG[name]
    behave(engine, *steps)
    began = time.monotonic()
    answer = gateway.chat("hi", stream=stream)
    assert time.monotonic() - began < 5
    assert answer.status == status
    assert answer.json["error"]["code"] in ("start_generation_failed", "worker_stream_failed")
    assert words in answer.message


def test_tokens_without_end(gateway: Running, engine: HostileEngine) -> None:
    """Eight were asked for; the call is ended, and the answer that was collected goes."""
    behave(engine, HEADERS, *[("data", framed(chunk([40] * 30)))] * 2000, END)
    answer = gateway.chat("hi", max_tokens=8)
    assert answer.error == (500, "worker_stream_failed")
    assert answer.message == "The engine failed: the engine sent more tokens than were asked for"
    until(lambda: "Abort" in engine.calls)


def test_a_flood_of_messages_leaves_others_their_turn(gateway: Running, engine: HostileEngine) -> None:
    """A hundred thousand empty chunks at once: the loop is never held for as long as they take together."""
    behave(engine, HEADERS, ("data", framed(chunk([])) * 100_000), ("data", framed(DONE)), END)
    lag = "mediagate_event_loop_lag_seconds_bucket{le="
    before = buckets(gateway, lag)
    assert gateway.chat("hi").status == 200
    after = buckets(gateway, lag)
    slow = (after["+Inf"] - before["+Inf"]) - (after["1.0"] - before["1.0"])
    assert slow == 0


def buckets(gateway: Running, start: str) -> dict[str, float]:
    """The histogram's cumulative counts by upper bound."""
    found = {}
    for line in gateway.metrics().splitlines():
        if line.startswith(start):
            name, value = line.rsplit(" ", 1)
            found[name.split('"')[1]] = float(value)
    return found


INFO: dict[str, dict[str, Any]] = {
    "megabytes of name": {"served_model_name": "m" * 4_000_000},
    "a path that is no path": {"tokenizer_path": "\0" * 10, "model_path": "x" * 100_000},
    "defaults of another kind": {"default_sampling_params_json": '{"top_k": 1e99, "temperature": "hot"}'},
    "a window of one token": {"max_context_length": 1},
}


@pytest.mark.parametrize("name", INFO)
def test_what_a_worker_says_about_itself(gateway: Running, name: str) -> None:
    """A worker that introduces itself with nonsense serves or does not; the routes that show it answer."""
    fields = INFO[name]
    plain = introduction("GetModelInfo")
    assert plain is not None
    known = pb.GetModelInfoResponse.FromString(plain[1][1][5:])
    for key, value in {"served_model_name": "stranger", **fields}.items():
        if key in known.DESCRIPTOR.fields_by_name:
            setattr(known, key, value)
    told = (HEADERS, ("data", framed(known.SerializeToString())), END)
    with HostileEngine() as stranger:
        stranger.script = lambda method: told if method == "GetModelInfo" else introduction(method) or NOT_HERE
        added = gateway.call("POST", "/workers", {"url": stranger.url})
        assert added.status == 202
        path = f"/workers/{added.json['worker_id']}"
        until(
            lambda: gateway.call("GET", path).json["status"] != "pending" or "error" in gateway.call("GET", path).json
        )
        for shown in ("/workers", "/v1/models", path):
            assert gateway.call("GET", shown).status == 200
        assert gateway.call("DELETE", path).status == 202


def test_a_tokenizer_archive_that_is_none(gateway: Running) -> None:
    """Garbage and lies from GetTokenizer: the worker does not become ready and says why."""
    info = pb.GetModelInfoResponse(served_model_name="elsewhere", supports_vision=True).SerializeToString()
    data = b"PK\3\4" + struct.pack("<I", 0xFFFFFFFF) * 500
    piece = b"\x0a" + bytes([0x80 | len(data) & 0x7F, len(data) >> 7]) + data
    with HostileEngine() as stranger:
        steps = {
            "GetModelInfo": (HEADERS, ("data", framed(info)), END),
            "GetTokenizer": (HEADERS, *[("data", framed(piece))] * 20, END),
        }
        stranger.script = lambda method: steps.get(method) or introduction(method) or ()
        worker = gateway.call("POST", "/workers", {"url": stranger.url}).json["worker_id"]
        until(lambda: "error" in gateway.call("GET", f"/workers/{worker}").json)
        told = gateway.call("GET", f"/workers/{worker}").json
        assert told["status"] == "pending" and "tokenizer archive: the last chunk carries no SHA-256" in told["error"]
        assert gateway.call("DELETE", f"/workers/{worker}").status == 202


def test_the_frontend_has_not_grown(gateway: Running) -> None:
    (pid,) = gateway.pids("front")
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(int(row.split()[1]) << 10 for row in rows if row.startswith("VmHWM:"))
    assert peak < 300 * MIB
    json.dumps(gateway.workers())
