"""Engines that break the connection in the middle of fifty megabytes: their own status comes out, no span stays held.

The HTTP/2 frames are written by hand (`rude_engine.py`).  Requests carry one picture of 1080p, whose tensor is 50 MB.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from h2.errors import ErrorCodes

from tests.e2e.rude_engine import RudeEngine, Serve, answer, grant, rude_engine
from tests.e2e.running import Running, image_part, picture, running, text_part, until

MIB = 1 << 20
PHOTO = picture(1080, 1920, kind="JPEG")
WINDOW = 4 * MIB


@pytest.fixture(scope="module")
def engine() -> Iterator[RudeEngine]:
    with rude_engine(INITIAL_WINDOW_SIZE=WINDOW) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(engine: RudeEngine) -> Iterator[Running]:
    flags = ["--retry-max-retries=2", "--retry-initial-backoff-ms=5", "--worker-urls", engine.url]
    with running(*flags, engines=[]) as found:
        until(found.ready)
        yield found


@pytest.fixture(autouse=True)
def nothing_is_held(gateway: Running, engine: RudeEngine) -> Iterator[None]:
    engine.serve = answer
    engine.streams.clear()
    yield
    gateway.given_back()
    engine.serve = answer
    until(gateway.ready)
    assert gateway.chat([image_part(picture())]).status == 200  # and the next request is served


def after(nbytes: int, act: Any) -> Serve:
    """Let about `nbytes` come, then `act(stream)`; the window is closed from then on."""

    async def serve(stream: Any) -> None:
        if nbytes > WINDOW:
            await stream.until_body(WINDOW)
            grant(stream, nbytes - WINDOW)
        await stream.until_body(nbytes)
        act(stream)

    return serve


def refuse(stream: Any) -> None:
    stream.refuse(3, "that is too much for me")


def refuse_and_reset(stream: Any) -> None:
    refuse(stream)
    stream.reset(ErrorCodes.NO_ERROR)


STATUSES = {
    "refuses early": (refuse, 400, "that is too much for me", 1),
    "refuses early and resets": (refuse_and_reset, 400, "that is too much for me", 1),
    "resets": (lambda stream: stream.reset(ErrorCodes.INTERNAL_ERROR), 503, "", 2),
    "refuses the stream": (lambda stream: stream.reset(ErrorCodes.REFUSED_STREAM), 503, "", 2),
    "goes away": (lambda stream: stream.peer.goaway(), 503, "", 2),
    "drops the connection": (lambda stream: stream.peer.transport.abort(), 503, "", 2),
}


@pytest.mark.parametrize("nbytes", [0, 20 * MIB])
@pytest.mark.parametrize("name", STATUSES)
def test_its_own_status_comes_out(gateway: Running, engine: RudeEngine, name: str, nbytes: int) -> None:
    act, status, words, attempts = STATUSES[name]
    engine.serve = after(nbytes, act)
    reply = gateway.chat([image_part(PHOTO), text_part("?")])
    assert reply.error == (status, "start_generation_failed")
    assert reply.message.startswith("Failed to start generation: ") and words in reply.message
    assert len(engine.streams) == attempts


def test_an_announced_end_lets_the_message_through(gateway: Running, engine: RudeEngine) -> None:
    """GOAWAY without an error, as every rolling restart sends it."""

    async def serve(stream: Any) -> None:
        await stream.until_body(MIB)
        stream.peer.announce_end(stream.stream_id)
        await answer(stream)

    engine.serve = serve
    assert gateway.chat([image_part(PHOTO)]).status == 200
    assert len(engine.streams) == 1


def test_it_restarts_in_the_middle_and_the_second_try_is_whole(gateway: Running, engine: RudeEngine) -> None:
    lives = iter([after(9 * MIB, lambda stream: stream.peer.goaway()), answer])

    async def serve(stream: Any) -> None:
        await next(lives)(stream)

    engine.serve = serve
    assert gateway.chat([image_part(PHOTO)]).status == 200
    first, second = engine.streams
    assert len(first.body) < 20 * MIB and len(second.body) > 50_000_000


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_leaves_before_a_closed_window(gateway: Running, engine: RudeEngine, stream: bool) -> None:
    async def serve(stream: Any) -> None:
        await stream.until_reset()

    engine.serve = serve
    client = gateway.open_chat([image_part(PHOTO)], stream=stream)
    until(lambda: engine.streams and len(engine.streams[0].body) == WINDOW)
    assert gateway.held()["outputs"] > 50_000_000
    client.close()
    gateway.given_back(seconds=3)  # the rest was never handed to the socket: nothing has to drain
    until(lambda: engine.streams[0].reset_code == ErrorCodes.CANCEL)
    until(lambda: len(engine.aborted) >= 1)


def test_the_client_leaves_while_the_socket_is_stuck(gateway: Running, engine: RudeEngine) -> None:
    """A peer that reads nothing while windows are open: what lies in the socket's queue belongs to the request until
    the connection is aborted, five seconds after the client left."""

    async def serve(stream: Any) -> None:
        stream.peer.transport.pause_reading()
        stream.grant(60 * MIB)

    engine.serve = serve
    client = gateway.open_chat([image_part(PHOTO)])
    until(lambda: engine.streams)
    time.sleep(0.5)  # until the kernel's buffers are full
    client.close()
    until(lambda: "load" not in str(gateway.held()))
    assert gateway.held()["outputs"] > 50_000_000
    gateway.given_back(seconds=8)
