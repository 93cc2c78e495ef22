"""An engine worker that misbehaves on the wire, one HTTP/2 frame at a time.

It introduces itself properly (or not: `introduction`), and what happens to a Generate call is a script: a list of
steps made from a number.  It runs in a thread of the process that feeds the cases, so that the two agree on whose turn
it is.
"""

import asyncio
import contextlib
import random
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded
from h2.exceptions import H2Error
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tools.fake_engine import BUNDLE
from tools.fuzzing.mutate import number, spoil
from tools.fuzzing.served import MODEL

Step = tuple[Any, ...]
Script = Callable[[str], Sequence[Step]]  # method -> steps

_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
_WINDOW = (1 << 31) - 1


def framed(message: bytes, *, length: int | None = None, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag & 0xFF, (len(message) if length is None else length) & 0xFFFFFFFF) + message


def introduction(method: str) -> Sequence[Step] | None:
    """A worker as it should be; None for methods that have another purpose."""
    replies: dict[str, Any] = {
        "HealthCheck": pb.HealthCheckResponse(healthy=True),
        "GetModelInfo": pb.GetModelInfoResponse(
            served_model_name=MODEL, model_path=MODEL, tokenizer_path=str(BUNDLE), supports_vision=True
        ),
        "GetServerInfo": pb.GetServerInfoResponse(),
        "Abort": pb.AbortResponse(),
    }
    if method not in replies:
        return None
    return (("headers", _HEADERS), ("data", framed(replies[method].SerializeToString())), ("trailers", "0", ""))


def generation(chance: random.Random, messages: Sequence[bytes]) -> list[Step]:
    """Steps of a Generate call: mostly its messages, with one or two steps that are wrong."""
    steps: list[Step] = [("headers", _HEADERS)]
    steps += [("data", framed(message)) for message in messages]
    steps.append(("trailers", "0", ""))
    for _ in range(chance.choice((0, 1, 1, 2))):
        at = chance.randrange(len(steps) + 1)
        kind = chance.randrange(5)
        if kind == 0 and at < len(steps) and (steps[at][0] == "data" or chance.random() < 0.2):
            del steps[at]
        elif kind == 1 and at < len(steps) and steps[at][0] == "data":
            steps[at] = ("data", spoil(chance, steps[at][1]))
        else:
            steps.insert(at, _wrong(chance))
    if any(
        step[0] == "raw" for step in steps
    ):  # both ends may read another frame from now on: the next case begins anew
        steps += [("pause", 0.05), ("abort",)]
    return steps


def _wrong(chance: random.Random) -> Step:
    message = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[40])).SerializeToString()
    many = framed(message) * 2000
    return chance.choice(
        (
            ("data", framed(b"", length=number(chance))),
            ("data", framed(message, length=0xFFFFFFFF)),
            ("data", framed(message, flag=chance.choice((1, 2, 255)))),
            ("data", b""),
            ("data", chance.randbytes(chance.choice((1, 4, 5, 100)))),
            ("data", framed(chance.randbytes(60))),
            ("data", many),
            ("headers", _HEADERS),
            ("headers", [(":status", chance.choice(("404", "500", "200", "302"))), ("content-type", "text/html")]),
            ("headers", [(":status", "200")]),
            ("headers", [(":status", "200"), ("content-type", "application/grpc"), ("grpc-encoding", "gzip")]),
            ("headers", [*_HEADERS, ("x", "y" * chance.choice((10, 20_000)))]),
            ("headers", [*_HEADERS, *((f"k{at}", "v") for at in range(500))]),
            ("trailers", chance.choice(("0", "1", "3", "4", "8", "13", "14", "16", "99", "-1", "x", "")), "words"),
            ("trailers", "13", chance.choice(("%", "%zz", "%ff%fe", "a" * 5000, "\xe9", "%00%0a"))),
            ("end",),
            ("reset", chance.choice(tuple(ErrorCodes))),
            ("goaway", chance.choice(tuple(ErrorCodes))),
            ("raw", chance.randbytes(chance.choice((1, 9, 300)))),
            (
                "raw",
                struct.pack(">IBBI", 5 << 8, chance.randrange(12), chance.randrange(256), number(chance) & 0x7FFFFFFF)[
                    1:
                ],
            ),
            ("raw", b"\0\0\0\4\0\0\0\0\0" * chance.choice((1, 2000))),  # settings
            ("raw", b"\0\0\x08\6\0\0\0\0\0" + bytes(8)),  # a ping
            ("abort",),
            ("pause", chance.choice((0.0, 0.01, 0.05))),
        )
    )


def archive(chance: random.Random, whole: bytes, digest: str) -> list[Step]:
    """GetTokenizer: the archive in pieces, spoiled somewhere."""
    data = spoil(chance, whole) if chance.random() < 0.7 else whole
    size = chance.choice((1000, 65536, 1 << 20))
    pieces = [data[at : at + size] for at in range(0, len(data), size)][:300]
    told = digest if chance.random() < 0.7 else chance.choice(("", "0" * 64, "x", digest.upper()))
    chunks = [common_pb2.GetTokenizerChunk(data=piece) for piece in pieces]
    if chunks:
        chunks[-1].sha256 = told
    return [("headers", _HEADERS), *(("data", framed(c.SerializeToString())) for c in chunks), ("trailers", "0", "")]


class HostileEngine:
    """`script(method)` gives the steps of the next call.  Start it with `with`."""

    def __init__(self) -> None:
        self.script: Script = lambda method: introduction(method) or ()
        self.url = ""
        self.calls: list[str] = []
        self.peers: set[_Peer] = set()
        self._is_up = threading.Event()
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "HostileEngine":
        self._thread.start()
        self._is_up.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(5)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await self._loop.create_server(lambda: _Peer(self), "127.0.0.1", 0)
        self.url = f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        await self._over.wait()
        server.close()
        for peer in list(self.peers):
            peer.abort()


class _Peer(asyncio.Protocol):
    def __init__(self, engine: HostileEngine) -> None:
        self._engine = engine
        self._h2 = H2Connection(H2Configuration(client_side=False, validate_outbound_headers=False))
        self._paths: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._engine.peers.add(self)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW - 65535)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.peers.discard(self)

    def abort(self) -> None:
        self._transport.abort()
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                if isinstance(event, RequestReceived):
                    headers = {bytes(k): bytes(v) for k, v in event.headers}
                    service, _, method = headers[b":path"].decode().rpartition("/")
                    self._paths[event.stream_id] = method if service == "/vllm.grpc.engine.VllmEngine" else ""
                elif isinstance(event, DataReceived):
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, StreamEnded):
                    task = asyncio.ensure_future(self._answer(event.stream_id, self._paths[event.stream_id]))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except H2Error:
            self._transport.abort()
            return
        self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    async def _answer(self, stream_id: int, method: str) -> None:
        if not method:
            with contextlib.suppress(H2Error):  # the gateway has given the call up
                self._h2.send_headers(stream_id, [*_HEADERS, ("grpc-status", "12")], end_stream=True)
            self._flush()
            return
        self._engine.calls.append(method)
        for step in self._engine.script(method):
            if step[0] == "pause":
                await asyncio.sleep(step[1])
                continue
            try:
                await self._take(stream_id, *step)
            except (H2Error, KeyError, ValueError):
                continue  # this state does not allow it: the next step perhaps
            self._flush()

    async def _take(self, stream_id: int, kind: str, *what: Any) -> None:
        h2 = self._h2
        if kind == "headers":
            h2.send_headers(stream_id, what[0])
        elif kind == "data":
            await self._data(stream_id, what[0])
        elif kind == "trailers":
            h2.send_headers(stream_id, [("grpc-status", what[0]), ("grpc-message", what[1])], end_stream=True)
        elif kind == "end":
            h2.end_stream(stream_id)
        elif kind == "reset":
            h2.reset_stream(stream_id, what[0])
        elif kind == "goaway":
            h2.close_connection(what[0])
        elif kind == "raw" and not self._transport.is_closing():
            self._transport.write(what[0])
        elif kind == "abort":
            self._transport.abort()

    async def _data(self, stream_id: int, data: bytes) -> None:
        if not data:
            self._h2.send_data(stream_id, b"")
        while data:
            room = min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size)
            if room <= 0:
                await asyncio.sleep(0.005)
                if self._transport.is_closing():
                    return
                continue
            self._h2.send_data(stream_id, data[:room])
            data = data[room:]
            self._flush()
