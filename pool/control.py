"""The control socket between supervisor and frontend: a SOCK_SEQPACKET pair, one msgpack message a packet.

The supervisor alone sees a pool process die, the frontend alone knows its jobs.  So a replacement takes three steps:
`Died`, then `Reset` (the frontend has taken the slot's jobs back and wiped its rings), and only then the fork.  A
`Kill` names a slot and not a process and still never meets the wrong one: the next process of the slot exists only
after a `Reset` sent later.
"""

import socket
from collections import deque

import msgspec

_PACKET_BYTES = 65536
_TEXT_CHARACTERS = 500


class Died(msgspec.Struct, frozen=True, tag="died"):
    """Supervisor: the process of `slot` is gone; `how` in words."""

    slot: int
    how: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Supervisor: take nothing new, finish what there is, then end.  `settle`: let balancers notice first."""

    settle: bool


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """Supervisor: end at once."""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Supervisor: let the pool processes be replaced, one by one."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Supervisor: does the loop turn?"""


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Frontend: nothing of the dead process of `slot` is left, another may be forked."""

    slot: int


class Up(msgspec.Struct, frozen=True, tag="up"):
    """Frontend: the process of `slot` is prepared and configured."""

    slot: int


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Frontend: end the process of `slot`; `why` in words."""

    slot: int
    why: str


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    """Frontend: every pool process has been replaced."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Frontend: the listener is up; `text` for the service manager's status line."""

    text: str


class Status(msgspec.Struct, frozen=True, tag="status"):
    text: str


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Frontend: answer to Ping."""


ToFrontend = Died | Drain | Quit | Renew | Ping
ToSupervisor = Reset | Up | Kill | Renewed | Ready | Status | Pong


class Control:
    """One end; never blocks.  `receives` is the union of the messages the other end sends."""

    def __init__(self, end: socket.socket, receives: object) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._unsent: deque[bytes] = deque()
        self.is_open = True

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Messages wait until the socket is writable; call `flush` then."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        self._unsent.append(msgspec.msgpack.encode(message))
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                self._socket.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:  # the other end is gone: who needs to know learns it from the child's or parent's death
            self._unsent.clear()
            self.is_open = False

    def receive(self) -> list[msgspec.Struct]:
        """All messages that have arrived; `is_open` is False afterwards when the other end is gone."""
        messages: list[msgspec.Struct] = []
        while True:
            try:
                packet = self._socket.recv(_PACKET_BYTES)
            except BlockingIOError:
                return messages
            except OSError:
                packet = b""
            if not packet:
                self.is_open = False
                return messages
            messages.append(self._decoder.decode(packet))

    def close(self) -> None:
        self.is_open = False
        self._socket.close()


def line(text: str) -> str:
    """`text` as it may go into a packet and a status: one line, not endless."""
    return " ".join(text.split())[:_TEXT_CHARACTERS]


def control_pair() -> tuple[Control, Control]:
    """The supervisor's and the frontend's end; made before the first fork."""
    upper, lower = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Control(upper, ToSupervisor), Control(lower, ToFrontend)
