"""What systemd is told (sd_notify(3)): a datagram to `$NOTIFY_SOCKET`, from the supervisor alone.

Without the variable every call does nothing.  A manager that does not listen is no reason to stop serving: what
cannot be sent is dropped.
"""

import logging
import os
import socket
import time
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """`address`: the value of NOTIFY_SOCKET, "" for none.  `watchdog_s`: how often the manager wants a sign of life,
    0 for never.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self.watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        if not address:
            return
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Notifier":
        """From NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID of `environ`.  A malformed WATCHDOG_USEC is ValueError."""
        usec = environ.get("WATCHDOG_USEC", "")
        pid = environ.get("WATCHDOG_PID", "")
        is_ours = not pid or pid == str(os.getpid())
        return cls(environ.get("NOTIFY_SOCKET", ""), int(usec) / 1e6 if usec and is_ours else 0.0)

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def reloading(self) -> None:
        # the manager orders this against its own request by the time, since messages may overtake each other
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.debug("the service manager was not told: error=%r", str(error))
