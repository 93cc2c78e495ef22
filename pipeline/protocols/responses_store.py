"""Responses that may be asked for again or continued: kept in memory, within a number, an age and a size.

A response is kept with its own input and the id of the one it continues; a conversation is the chain of these.  What
was used last goes last, and using a response uses its whole chain, so the earlier ones do not go before the later.
Nothing outlives the process, and one gateway knows nothing of another's.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

LARGEST_SHARE = 4  # an entry has at most this part of the whole


class Kept(msgspec.Struct, frozen=True):
    """`response`: the whole response object; `input`, `output`: arrays of items; all JSON.  `previous`: the id of the
    response this one continues.
    """

    response: bytes
    input: bytes
    output: bytes
    previous: str | None = None

    @property
    def nbytes(self) -> int:
        return len(self.response) + len(self.input) + len(self.output)


class ResponseStore:
    """`most`: responses; `most_bytes` of their JSON; `retention_s`: seconds since they were made."""

    def __init__(
        self, *, most: int, most_bytes: int, retention_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._retention_s = retention_s
        self._now = now
        self._entries: OrderedDict[str, tuple[float, Kept]] = OrderedDict()  # least recently used first
        self._made: deque[tuple[float, str]] = deque()  # oldest first; some are gone
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def takes(self, nbytes: int) -> bool:
        """Whether an entry of that size would be kept at all."""
        return self._most > 0 and nbytes <= self._most_bytes // LARGEST_SHARE

    def put(self, response_id: str, kept: Kept) -> None:
        """Others go when there is no room; one that is too large is not kept."""
        self.remove(response_id)
        if not self.takes(kept.nbytes):
            return
        self._drop_old()
        made = self._now()
        self._entries[response_id] = made, kept
        self._made.append((made, response_id))
        self.nbytes += kept.nbytes
        while len(self._entries) > self._most or self.nbytes > self._most_bytes:
            self.remove(next(iter(self._entries)))

    def get(self, response_id: str) -> Kept | None:
        self._drop_old()
        entry = self._entries.get(response_id)
        return None if entry is None else entry[1]

    def chain(self, response_id: str) -> list[Kept] | None:
        """The conversation up to this response, earliest first; None when any of it is not there."""
        found: list[Kept] = []
        wanted: str | None = response_id
        while wanted is not None:
            kept = self.get(wanted)
            if kept is None:
                return None
            self._entries.move_to_end(wanted)
            found.append(kept)
            wanted = kept.previous
        return found[::-1]

    def remove(self, response_id: str) -> bool:
        """Whether it was there."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.nbytes -= entry[1].nbytes
        return True

    def _drop_old(self) -> None:
        oldest = self._now() - self._retention_s
        while self._made and self._made[0][0] < oldest:
            made, response_id = self._made.popleft()
            entry = self._entries.get(response_id)
            if entry is not None and entry[0] == made:
                self.remove(response_id)
