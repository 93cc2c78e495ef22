"""One request's companion: its id, where its time went, what it holds.

Everything a request takes (a slot, budget bytes, spans, a segment) is put into its custody at the moment it is taken,
and comes back exactly once when custody ends, whichever way the request ends.  Nothing here waits.
"""

import asyncio
import logging
import os
import string
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pipeline.admission import Grant
from pipeline.errors import GatewayError

_LETTERS = (string.ascii_letters + string.digits).encode()
_LETTER_OF_BYTE = (_LETTERS * 5)[:256]  # some letters a little likelier than others: fine for an id
_log = logging.getLogger("mediagate.ticket")

SHUTTING_DOWN = GatewayError("shutting_down", "the gateway was stopped before the answer was complete")

# What a request's time is told by, in its order.  admit: a place, and its body's way in.  prompt: template and
# tokens.  fetch: media bytes into spans.  inspect: base64, hash and header, in the pool.  wait: for room (backlog,
# arena, in-flight budget) and for a pool process.  decode, preprocess: in the pool, sums over the items, which run in
# parallel.  send: the whole message to the worker's socket.  engine: from then on, to its first output (streamed) or
# its last.
STAGES = ("admit", "prompt", "fetch", "inspect", "wait", "decode", "preprocess", "send", "engine")


def new_id(prefix: str) -> str:
    """`prefix` and 24 random letters or digits."""
    return prefix + os.urandom(24).translate(_LETTER_OF_BYTE).decode()


class Custody:
    """What must be given back, in reverse order of taking.  Closing twice is harmless; a fault in one release does
    not stop the rest.
    """

    def __init__(self) -> None:
        self._releases: list[Callable[[], object]] = []

    def keep(self, release: Callable[[], object]) -> None:
        self._releases.append(release)

    def close(self) -> None:
        while self._releases:
            release = self._releases.pop()
            try:
                release()
            except Exception:
                _log.exception("giving back failed")


class Stage:
    """One stretch of a request's time; a class, because a generator's machinery costs more than what it times."""

    __slots__ = ("_begun", "_name", "_ticket")

    def __init__(self, ticket: "Ticket", name: str) -> None:
        self._ticket = ticket
        self._name = name

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self._ticket.add(self._name, time.perf_counter() - self._begun)


class Ticket:
    """`stages`: seconds by stage; decode and preprocess are sums over the request's items, which run in parallel."""

    def __init__(self, request_id: str, route: str) -> None:
        self.request_id = request_id
        self.route = route
        self.started = time.perf_counter()
        self.stages: dict[str, float] = {}
        self.custody = Custody()
        self.inputs = Custody()  # encoded media: until no job, engine or socket can need them any more
        self.media = Custody()  # tensors: until no engine and no socket reads them any more
        self.media_consumed = False  # an engine answered after reading them: their segment may be used again
        self._dispatched = False
        self.unread: Grant | None = None  # room in the backlog, until the engine worker has read the tensors
        self.custody.keep(self._close_media)
        self.custody.keep(self._close_inputs)
        self.routing_key: str | None = None  # the client's, for policies that keep its requests together
        self.model = ""
        self.items = 0
        self.media_bytes = 0
        self.tensor_bytes = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.worker = ""  # whose answer it is
        self.reader = ""  # who was sent the tensors
        self.code = ""
        self.message = ""  # of the error answered with, as the client reads it
        self.id_header: str | None = None  # in which an API tells the id beside `x-request-id`
        self.is_answering = False  # the status line is out
        self.is_cut = False  # its task is cancelled because the gateway ends; otherwise because the client left
        self.goes_on = False  # after its answer: custody ends with the work
        self.explains = False  # the client wants to be told what was done with its media
        self.outside = False  # came through a proxy: media policy treats it as from outside whatever the bind address

    def take_back_cut(self) -> None:
        """In the request's own task, which was cut and has a little time to tell its client so."""
        task = asyncio.current_task()
        assert task is not None and self.is_cut
        task.uncancel()

    def dispatched(self) -> None:
        """From now on the dispatcher says when nothing reads the tensors any more, which may be after the answer."""
        self._dispatched = True

    def media_read(self) -> None:
        """The engine worker has read the tensors: others may be made."""
        if self.unread is not None:
            self.unread.release()

    def media_free(self, consumed: bool) -> None:
        """Nothing reads the tensors any more or makes them again; `consumed`: the engine answered after reading
        them.
        """
        self.media_consumed = consumed
        self.media.close()
        self.inputs.close()

    def _close_media(self) -> None:
        if not self._dispatched:
            self.media.close()

    def _close_inputs(self) -> None:
        """An engine may be sent the encoded media too, and is read by a socket then."""
        if not self._dispatched:
            self.inputs.close()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def add(self, stage: str, seconds: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def stage(self, name: str) -> "Stage":
        """A block whose time counts as that stage's."""
        return Stage(self, name)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts as waiting what of the block's time no decoding and preprocessing accounts for."""
        begun, before = time.perf_counter(), self._worked()
        try:
            yield
        finally:
            self.add("wait", max(0.0, time.perf_counter() - begun - (self._worked() - before)))

    def _worked(self) -> float:
        return self.stages.get("decode", 0.0) + self.stages.get("preprocess", 0.0)

    def server_timing(self) -> str:
        """The `Server-Timing` header: milliseconds by stage, and the total so far."""
        rows = [f"{name};dur={self.stages[name] * 1e3:.1f}" for name in STAGES if name in self.stages]
        return ", ".join([*rows, f"total;dur={self.elapsed_s * 1e3:.1f}"])

    def stage_ms(self) -> Mapping[str, float]:
        return {f"{name}_ms": round(seconds * 1e3, 1) for name, seconds in self.stages.items()}
