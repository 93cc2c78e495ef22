"""Responses that may be asked for again or continued, and conversations: kept in memory, within a number, an age and a
size for all of them.

A response is kept with its own input and the id of the one it continues.  What was used last goes last, and using a
response uses its whole chain, so the earlier ones do not go before the later.  A conversation holds its items itself.
Nothing outlives the process, and one gateway knows nothing of another's.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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


class Conversation(msgspec.Struct, frozen=True):
    """`created`: seconds of the epoch.  `items`: each as JSON with an id, oldest first."""

    created: int
    metadata: Mapping[str, Any] = {}
    items: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.items)) + len(msgspec.json.encode(self.metadata)) + 64 * (1 + len(self.items))


class ResponseStore:
    """`most`: responses and conversations together; `most_items` of all conversations; `most_bytes` of their JSON;
    `retention_s`: seconds since they were made, or a conversation was changed.
    """

    def __init__(
        self,
        *,
        most: int,
        most_bytes: int,
        retention_s: float,
        most_items: int = 100_000,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_items = most_items
        self._most_bytes = most_bytes
        self._retention_s = retention_s
        self._now = now
        self._entries: OrderedDict[str, tuple[float, Kept | Conversation]] = OrderedDict()  # least recently used first
        self._made: deque[tuple[float, str]] = deque()  # oldest first; some are gone
        self.nbytes = 0
        self.items = 0  # of conversations

    def __len__(self) -> int:
        return len(self._entries)

    def takes(self, nbytes: int) -> bool:
        """Whether an entry of that size would be kept at all."""
        return self._most > 0 and nbytes <= self._most_bytes // LARGEST_SHARE

    def put(self, entry_id: str, kept: Kept | Conversation) -> bool:
        """Whether it is kept: others go when there is no room, and one that is too large is not."""
        self.remove(entry_id)
        if not self.takes(kept.nbytes) or _items(kept) > self._most_items:
            return False
        self._drop_old()
        made = self._now()
        self._entries[entry_id] = made, kept
        self._made.append((made, entry_id))
        self.nbytes += kept.nbytes
        self.items += _items(kept)
        while len(self._entries) > self._most or self.nbytes > self._most_bytes or self.items > self._most_items:
            self.remove(next(iter(self._entries)))
        return True

    def get(self, response_id: str) -> Kept | None:
        kept = self._get(response_id)
        return kept if isinstance(kept, Kept) else None

    def conversation(self, conversation_id: str) -> Conversation | None:
        """One that is asked for is used."""
        kept = self._get(conversation_id)
        if not isinstance(kept, Conversation):
            return None
        self._entries.move_to_end(conversation_id)
        return kept

    def extend(self, conversation_id: str, items: Iterable[bytes]) -> None:
        """Add to a conversation, unless it is gone by now or would be too large."""
        kept = self.conversation(conversation_id)
        if kept is not None:
            longer = msgspec.structs.replace(kept, items=(*kept.items, *items))
            if not self.put(conversation_id, longer):
                self.put(conversation_id, kept)

    def _get(self, entry_id: str) -> Kept | Conversation | None:
        self._drop_old()
        entry = self._entries.get(entry_id)
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

    def remove(self, entry_id: str) -> bool:
        """Whether it was there."""
        entry = self._entries.pop(entry_id, None)
        if entry is None:
            return False
        self.nbytes -= entry[1].nbytes
        self.items -= _items(entry[1])
        return True

    def _drop_old(self) -> None:
        oldest = self._now() - self._retention_s
        while self._made and self._made[0][0] < oldest:
            made, response_id = self._made.popleft()
            entry = self._entries.get(response_id)
            if entry is not None and entry[0] == made:
                self.remove(response_id)


def _items(kept: Kept | Conversation) -> int:
    return len(kept.items) if isinstance(kept, Conversation) else 0
