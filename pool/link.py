"""The frontend's end of everything it shares with its supervisor and the pool: memory, rings, control socket.

Made by the supervisor before the fork and handed to the frontend's main function.  Messages wait in the socket until
the first call that needs a running loop (`open`, or any of the callbacks' setters); from then on they are handled
between turns of the loop.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from pool.arena import Arena
from pool.control import Control, Died, Drain, Ping, Pong, Quit, Ready, Renew, Renewed, Status, line
from pool.mapping import Mapping
from pool.pool import Pool
from pool.row import Row

logger = logging.getLogger(__name__)


class FrontendLink:
    """`inputs` and `outputs`: the two arenas of the mapping.  Requests that hold inputs get outputs in turn, because
    nobody who waits for outputs keeps anybody else from his inputs.
    """

    def __init__(
        self, mapping: Mapping, row: Row, inputs: Arena, outputs: Arena, control: Control, result_type: Any
    ) -> None:
        self.mapping = mapping
        self.inputs = inputs
        self.outputs = outputs
        self._row = row
        self._control = control
        self._result_type = result_type
        self._supervisor_pid = os.getpid()
        self._pool: Pool[Any, Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_writing = False
        self._drain: Callable[[bool], None] | None = None
        self._quit: Callable[[], None] | None = None
        self._asked: Drain | Quit | None = None
        self._died_early: list[Died] = []

    @property
    def has_supervisor(self) -> bool:
        """For the liveness probe; without one nothing would replace a dead pool process."""
        return os.getppid() == self._supervisor_pid

    def open(self) -> None:
        """Begin to listen to the supervisor; in the frontend's loop.  May be called again."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._control.fd, self._on_readable)

    def close(self) -> None:
        """Stop listening."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._control.fd)
        if self._is_writing:
            self._loop.remove_writer(self._control.fd)
            self._is_writing = False
        self._loop = None

    def pool(self, *, overrun_grace_s: float = 2.0) -> Pool[Any, Any]:
        """The pool of this row, once; in the frontend's loop.  `start` it afterwards."""
        if self._pool is not None:
            raise RuntimeError("the pool was made already")
        self.open()
        self._pool = Pool(self._row, self._result_type, self.send, overrun_grace_s=overrun_grace_s)
        for death in self._died_early:
            self._pool.on_death(death.slot, death.how)
        return self._pool

    def ready(self, text: str) -> None:
        """The listener is up: the service manager is told once the pool is up as well."""
        self.send(Ready(line(text)))

    def status(self, text: str) -> None:
        """One line for the service manager."""
        self.send(Status(line(text)))

    def on_drain(self, callback: Callable[[bool], None]) -> None:
        """`callback(settle)` when the gateway shall end: finish what there is, then return from the frontend's main
        function.

        `settle`: first stay `--drain-settle-secs` for balancers to notice.
        """
        self._drain = callback
        self.open()
        if self._asked is not None:
            callback(isinstance(self._asked, Drain) and self._asked.settle)

    def on_quit(self, callback: Callable[[], None]) -> None:
        """`callback()` when the gateway shall end at once; two seconds later the frontend is killed."""
        self._quit = callback
        self.open()
        if isinstance(self._asked, Quit):
            callback()

    def send(self, message: msgspec.Struct) -> None:
        self._control.send(message)
        if self._control.has_unsent and self._loop is not None and not self._is_writing:
            self._loop.add_writer(self._control.fd, self._on_writable)
            self._is_writing = True

    def _on_writable(self) -> None:
        self._control.flush()
        if not self._control.has_unsent and self._loop is not None:
            self._loop.remove_writer(self._control.fd)
            self._is_writing = False

    def _on_readable(self) -> None:
        for message in self._control.receive():
            self._handle(message)
        if not self._control.is_open:  # the kernel kills this process with its supervisor; nothing is left to listen to
            self.close()

    def _handle(self, message: msgspec.Struct) -> None:
        if isinstance(message, Ping):
            self.send(Pong())
        elif isinstance(message, Died):
            if self._pool is None:
                self._died_early.append(message)
            else:
                self._pool.on_death(message.slot, message.how)
        elif isinstance(message, Renew):
            if self._pool is None:
                self.send(Renewed())
            else:
                self._pool.on_renew()
        elif isinstance(message, Drain):
            self._asked = message
            if self._drain is not None:
                self._drain(message.settle)
        elif isinstance(message, Quit):
            self._asked = message
            if self._quit is not None:
                self._quit()
