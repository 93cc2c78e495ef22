"""Sends a message of many buffers over a connection of grpclib without copying it.

Theory of operation.  One `Feeder` belongs to each connection.  A message in it (`Outgoing`) is a queue of views; on
every turn the feeder takes up to `SLICE_BYTES` of one message, cuts them into DATA frames that fit both flow-control
windows and the peer's frame size, and hands header and views to the transport in one `writelines`, so that whatever
is written afterwards (an acknowledged PING, another stream's frame) comes behind a whole frame.  Then the next
message has its turn.  The connection's write limits are such that it is writable only while the transport's buffer is
empty (`engines.link`): at most one slice is ever in user space, and "writable again" means that nothing refers to
anybody's buffers any more.  Between two slices the event loop runs.

States of a message: queued (in the feeder) -> sent (END_STREAM is out), stopped early (the engine has already
answered) or dropped (call cancelled, stream reset, connection lost).  Its `Drain` is set once it is in none of the
feeder's hands and the transport's buffer has been empty since, or the connection is gone.  Nobody may write to the
buffers before that.

Messages below `SCATTER_MIN_BYTES` go out with their headers in one piece when they fit (`engines.call`).  grpclib's
own way makes about eight copies of every byte.  Figures for 50 MiB messages to grpcio: grpclib 0.23 CPU s per 100 MiB,
the loop held for 60 ms; here 0.027 s and 2 to 5 ms (`tools/sending.py`).
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engines.wire import Part, nbytes_of

if TYPE_CHECKING:
    from engines.call import Call

SLICE_BYTES = 1 << 20
"""Most bytes handed to the transport in one callback: 0.2 to 0.6 ms of kernel copying."""

SCATTER_MIN_BYTES = 64 << 10
MAX_MESSAGE_BYTES = (1 << 31) - 1
"""Protobuf's own limit of a message."""

_JOIN_BELOW = 4096  # smaller neighbours are copied together: a frame of many small views costs more than the copy
_DATA = 0
_FRAME_HEADER_BYTES = 9


class Drain:
    """Becomes set, once, when no buffer of a message is needed for sending any more.

    The event loop's thread only.  Waiting may be cancelled without any effect on the state.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._callbacks: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback()` soon after the drain is set (soon, too, when it already is)."""
        if self.is_set():
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._callbacks.append(callback)

    def set(self) -> None:
        if self.is_set():
            return
        self._event.set()
        # not at once: an aborted transport forgets its buffers only after it has told its protocol
        loop = asyncio.get_running_loop()
        for callback in self._callbacks:
            loop.call_soon(callback)
        self._callbacks.clear()


class Outgoing:
    """One message on its way out; `result` becomes True (sent) or False (stopped early)."""

    def __init__(self, call: "Call", parts: Sequence[Part], drain: Drain) -> None:
        self.call = call
        self.drain = drain
        self.result: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._views = _grpc_message(parts)
        self.left = sum(len(view) for view in self._views)

    def take(self, nbytes: int) -> list[memoryview]:
        """The next `nbytes` bytes, as views."""
        taken = []
        self.left -= nbytes
        while nbytes:
            view = self._views[0]
            if len(view) <= nbytes:
                taken.append(self._views.popleft())
                nbytes -= len(view)
                continue
            taken.append(view[:nbytes])
            self._views[0] = view[nbytes:]
            nbytes = 0
        return taken

    def forget(self) -> None:
        """Give up what was not yet handed to the transport."""
        self._views.clear()
        self.left = 0

    def stop(self) -> None:
        """The engine has answered: send no more."""
        self.forget()
        self.finish(False)

    def finish(self, sent: bool) -> None:
        if not self.result.done():
            self.result.set_result(sent)

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


def _grpc_message(parts: Sequence[Part]) -> deque[memoryview]:
    """Length prefix (uncompressed) and `parts` as byte views; small neighbours joined."""
    views: deque[memoryview] = deque()
    small = bytearray(struct.pack(">?I", False, nbytes_of(parts)))
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:  # nor can an empty view be cast
            continue
        view = view.cast("B")
        if len(view) < _JOIN_BELOW:
            small += view
            continue
        if small:
            views.append(memoryview(small))
            small = bytearray()
        views.append(view)
    if small:
        views.append(memoryview(small))
    return views


class Feeder:
    """Gives the messages of one connection their turns.  Made, woken and ended by `engines.link.EngineProtocol`."""

    def __init__(self, connection: Any, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._h2 = connection._connection
        self._transport = transport
        self._queue: deque[Outgoing] = deque()
        self._in_transport: set[Outgoing] = set()
        self._turn: asyncio.Handle | None = None

    @property
    def is_idle(self) -> bool:
        """No message waits, and no buffer is left in the transport."""
        return not self._queue and not self._in_transport and self._turn is None

    def holds(self, drain: Drain) -> bool:
        """Whether buffers of the message with this drain may still be sent."""
        return any(outgoing.drain is drain for outgoing in (*self._queue, *self._in_transport))

    def add(self, outgoing: Outgoing) -> None:
        self._queue.append(outgoing)
        self.wake()

    def remove(self, outgoing: Outgoing) -> None:
        """Take a message back, whatever its state; its drain follows as soon as the transport is empty."""
        if outgoing in self._queue:
            self._queue.remove(outgoing)
        outgoing.forget()
        if outgoing not in self._in_transport:
            outgoing.drain.set()

    def wake(self) -> None:
        """Something changed (a window, a frame size, the write buffer): have a turn soon."""
        if self._turn is None and self._queue:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def drained(self) -> None:
        """The transport's buffer is empty: nothing refers to the buffers of finished messages any more."""
        for outgoing in tuple(self._in_transport):
            if not outgoing.left:
                outgoing.drain.set()
        self._in_transport.clear()
        self.wake()

    def lost(self) -> None:
        """The connection is gone, and with it the transport's buffers.  The calls learn it from their wrappers."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for outgoing in (*self._queue, *self._in_transport):
            outgoing.forget()
            outgoing.drain.set()
        self._queue.clear()
        self._in_transport.clear()

    def _take_turn(self) -> None:
        self._turn = None
        if self._transport.is_closing() or not self._connection.write_ready.is_set():
            return
        for _ in range(len(self._queue)):
            if self._h2.outbound_flow_control_window <= 0:
                return
            outgoing = self._queue.popleft()
            try:
                wrote = self._send_slice(outgoing)
            except Exception as error:  # h2 refused: this message's fault or its stream's, not the others'
                self._fail(outgoing, error)
                continue
            if outgoing.left:
                self._queue.append(outgoing)
            if wrote:
                break
        else:
            return  # every stream's own window is closed
        self.wake()

    def _fail(self, outgoing: Outgoing, error: Exception) -> None:
        self.remove(outgoing)
        outgoing.fail(error)

    def _send_slice(self, outgoing: Outgoing) -> bool:
        """Hand one slice to the transport; False when the stream's window is closed."""
        call = outgoing.call
        window = self._h2.local_flow_control_window(call.id)  # raises when the stream is closed
        nbytes = min(window, SLICE_BYTES, outgoing.left)
        if nbytes <= 0:
            return False
        pieces: list[bytes | memoryview] = []
        left, frame_bytes = nbytes, self._h2.max_outbound_frame_size
        while left:
            size = min(left, frame_bytes)
            pieces.append(struct.pack(">HBBBL", size >> 8, size & 0xFF, _DATA, 0, call.id))
            pieces += outgoing.take(size)
            left -= size
        self._h2.streams[call.id].outbound_flow_control_window -= nbytes
        self._h2.outbound_flow_control_window -= nbytes
        self._transport.writelines(pieces)
        if not outgoing.left:
            self._h2.end_stream(call.id)  # an empty frame with END_STREAM
            self._connection.flush()
            outgoing.finish(True)
        self._note_drain(outgoing)
        return True

    def _note_drain(self, outgoing: Outgoing) -> None:
        if self._transport.get_write_buffer_size():
            self._in_transport.add(outgoing)
        elif not outgoing.left:
            outgoing.drain.set()
