"""An engine worker that speaks HTTP/2 by hand, so that a test decides every frame of a generation.

It introduces itself like any other; what happens to a Generate call is up to `serve`, which is awaited with the
stream (`tests.engines.h2_server.Request`) once for each call.  Runs in a thread with a loop of its own.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.e2e.running import MODEL
from tests.engines.h2_server import listening
from tools.fake_engine import BUNDLE

Serve = Callable[[Any], Awaitable[None]]
_CONNECTION_WINDOW = (1 << 31) - 1


class RudeEngine:
    """`serve` may be changed between two requests."""

    def __init__(self) -> None:
        self.serve: Serve = answer
        self.url = ""
        self.failures: list[BaseException] = []
        self.streams: list[Any] = []
        self.aborted: list[str] = []

    async def run(self, settings: dict[str, int], is_up: threading.Event, is_over: threading.Event) -> None:
        async with listening(settings=settings, connection_window=_CONNECTION_WINDOW) as server:
            self.url = server.url
            is_up.set()
            serving: set[asyncio.Task[None]] = set()
            accepting = asyncio.create_task(self._accept(server, serving))
            await asyncio.to_thread(is_over.wait)
            for task in (accepting, *serving):
                task.cancel()
            await asyncio.gather(accepting, *serving, return_exceptions=True)

    async def _accept(self, server: Any, serving: set[asyncio.Task[None]]) -> None:
        while True:
            stream = await server.request()
            task = asyncio.create_task(self._serve(stream))
            serving.add(task)
            task.add_done_callback(serving.discard)

    async def _serve(self, stream: Any) -> None:
        try:
            service, _, method = stream.headers[":path"].rpartition("/")
            if service != "/vllm.grpc.engine.VllmEngine":
                stream.refuse(12, "not here")
            elif method == "Generate":
                self.streams.append(stream)
                await self.serve(stream)
            else:
                await self._introduce(method, stream)
        except Exception as error:
            self.failures.append(error)

    async def _introduce(self, method: str, stream: Any) -> None:
        await stream.until_ended()
        if method == "HealthCheck":
            stream.answer(pb.HealthCheckResponse(healthy=True))
        elif method == "GetModelInfo":
            info = pb.GetModelInfoResponse(
                served_model_name=MODEL, model_path=MODEL, tokenizer_path=str(BUNDLE), supports_vision=True
            )
            stream.answer(info)
        elif method == "Abort":
            self.aborted += pb.AbortRequest.FromString(stream.message).request_ids
            stream.answer(pb.AbortResponse())
        else:
            stream.refuse(12, "not here")


async def answer(stream: Any) -> None:
    """Take everything, say one token, end."""
    while not stream.has_ended:
        before = len(stream.body)
        await stream.until(lambda before=before: stream.has_ended or len(stream.body) > before)
        grant(stream, len(stream.body) - before)
    stream.answer(
        pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=[40], finish_reason="stop", prompt_tokens=1))
    )


def grant(stream: Any, nbytes: int) -> None:
    """Let `nbytes` more of this stream come."""
    if nbytes and not stream.has_ended:
        stream.grant(nbytes)


@contextlib.contextmanager
def rude_engine(**settings: int) -> Iterator[RudeEngine]:
    """`settings`: HTTP/2 settings the engine announces, such as INITIAL_WINDOW_SIZE."""
    engine, is_up, is_over = RudeEngine(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(engine.run(settings, is_up, is_over)))
    thread.start()
    try:
        assert is_up.wait(10)
        yield engine
    finally:
        is_over.set()
        thread.join()
    assert not engine.failures, engine.failures
