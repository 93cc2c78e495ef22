"""The RDMA pixel lane: tensors that a worker reads out of the gateway's memory by itself.

Theory of operation.  One arena of slots of one size is registered with the network card once.  A tensor gets a *slot*:
it is copied in, framed by the slot's generation on both sides, and the message carries a descriptor (address,
generation, key, where the listener is) instead of bytes.  The worker reads frame and payload at once, compares both
stamps with the generation it was promised, and notifies the gateway with the slot's key.

    free --lease--> filled --notification, answer of the engine, or TTL--> free (at the end of the queue)

Rule: nobody reads wrong pixels.  A slot's generation rises with every lease, the stamps of the last tenant are wiped
before its payload is touched, and a slot whose reader may still be at work is used again only after the longest time
such a reader waits and reads (`RdmaSettings.ttl_s`).  Keys are random, or the room of an encode worker's request, so a
late notification frees nobody else's slot.  Leasing and freeing belong to the event loop, `Slot.fill` to any thread.
"""

import ctypes
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

log = logging.getLogger(__name__)

AGENT_NAME = "smg-gateway-encode"
"""What workers call the gateway: fixed in the published servicers."""
MAGIC = b"SMGRDMA1"
STAMP = 8
FRAME = 2 * STAMP
MOST_ARENA_BYTES = 8 << 30
GRACE_S = 30.0
"""Added to the longest time a worker holds a slot."""


class LaneUnavailable(Exception):
    """There is no RDMA here; the message says why."""


class RdmaSettings(msgspec.Struct, frozen=True):
    """Field names follow the variables; bytes and seconds.

    `landing_wait_s`, `read_timeout_s`: how long a worker waits for room of its own, and then reads at most; the
    servicer reads the same variables.  `slot_ttl_s`: the operator's, which counts only when it is longer than both.
    """

    listen_ip: str
    listen_port: int = 18515
    pool_slots: int = 64
    slot_bytes: int = 32 << 20
    landing_wait_s: float = 120.0
    read_timeout_s: float = 60.0
    slot_ttl_s: float | None = None

    @property
    def hold_s(self) -> float:
        """The longest a worker may have a slot."""
        return self.landing_wait_s + self.read_timeout_s

    @property
    def ttl_s(self) -> float:
        """When a slot is free without a word of its reader."""
        if self.slot_ttl_s is not None and self.slot_ttl_s > self.hold_s:
            return self.slot_ttl_s
        return self.hold_s + GRACE_S

    @property
    def slots(self) -> int:
        """No more than fit into 8 GiB."""
        return max(1, min(self.pool_slots, MOST_ARENA_BYTES // self.slot_bytes))


class Exporter(Protocol):
    """What makes memory readable from outside; `engines.rdma_nixl` has the real one."""

    def register(self, address: int, nbytes: int) -> None:
        """Raises LaneUnavailable."""
        ...

    def notifications(self) -> Sequence[bytes]:
        """What readers have sent since the last call; never waits."""
        ...

    def close(self) -> None: ...


class Slot:
    """One place of the arena; only `RdmaLane` makes, leases and frees them.

    `generation` is that of the lease under way; `key` is None while the slot is free.
    """

    def __init__(self, memory: memoryview, address: int, generation: int) -> None:
        self.address = address
        self.generation = generation
        self.key: int | None = None
        self.until = 0.0
        self._memory = memory
        self._nbytes = 0

    def fill(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Copy the payload in; blocks for as long as that takes."""
        memory, stamp = self._memory, self.generation.to_bytes(STAMP, "little")
        memory[STAMP + self._nbytes : FRAME + self._nbytes] = memory[:STAMP] = bytes(STAMP)
        place = STAMP
        for buffer in buffers:
            memory[place : place + len(buffer)] = buffer
            place += len(buffer)
        self._nbytes = place - STAMP
        memory[place : place + STAMP] = memory[:STAMP] = stamp


class Lease:
    """One payload's use of a slot: `descriptor` is what the message says of it."""

    def __init__(self, lane: "RdmaLane", slot: Slot, descriptor: bytes) -> None:
        self.descriptor = descriptor
        self._lane = lane
        self._slot = slot
        self._generation = slot.generation

    def fill(self, buffers: Sequence[memoryview | bytes]) -> None:
        """See `Slot.fill`."""
        self._slot.fill(buffers)

    @property
    def is_unread(self) -> bool:
        """Whether its reader has not said yet that it has everything."""
        self._lane.collect()
        return self._slot.key is not None and self._slot.generation == self._generation

    def release(self) -> None:
        """Nobody reads it any more; harmless when the reader has said so already."""
        if self.is_unread:
            self._lane.give_back(self._slot)


class RdmaLane:
    """One for the gateway.  Raises LaneUnavailable when the arena cannot be registered."""

    def __init__(self, settings: RdmaSettings, exporter: Exporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._exporter = exporter
        self._clock = clock
        self._arena = mmap.mmap(-1, settings.slots * settings.slot_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        exporter.register(address, len(self._arena))
        first = int.from_bytes(os.urandom(4))  # what a gateway before this one promised is never kept by chance
        size, whole = settings.slot_bytes, memoryview(self._arena)
        self._free = deque(
            Slot(whole[place : place + size], address + place, first) for place in range(0, len(self._arena), size)
        )
        self._leased: dict[int, Slot] = {}

    @property
    def free(self) -> int:
        self.collect()
        return len(self._free)

    def lease(self, nbytes: int, key: int | None = None) -> Lease | None:
        """A slot for a payload of that size; None when it is too large for one or none is free.

        `key`: what the reader answers with; by default a random one.
        """
        self.collect()
        if nbytes + FRAME > self._settings.slot_bytes or not self._free:
            return None
        key = int.from_bytes(os.urandom(8)) >> 1 if key is None else key
        if key in self._leased:
            return None
        slot = self._free.popleft()
        slot.key, slot.until = key, self._clock() + self._settings.ttl_s
        slot.generation += 1
        self._leased[key] = slot
        descriptor = (
            MAGIC,
            slot.address.to_bytes(8, "little"),
            slot.generation.to_bytes(8, "little"),
            key.to_bytes(8, "little", signed=True),
            self._settings.listen_port.to_bytes(2, "little"),
            self._settings.listen_ip.encode(),
        )
        return Lease(self, slot, b"".join(descriptor))

    def close(self) -> None:
        self._exporter.close()

    # ------------------------------------------------------------ told by readers and leases

    def collect(self) -> None:
        """Give back what readers have read, and what nobody can be reading any more."""
        for text in self._exporter.notifications():
            slot = self._leased.get(int(text)) if text.isdigit() and len(text) < 20 else None
            if slot is not None:
                self.give_back(slot)
        now = self._clock()
        while self._leased and (oldest := next(iter(self._leased.values()))).until <= now:
            log.info("an RDMA slot was not read within %g s", self._settings.ttl_s)
            self.give_back(oldest)

    def give_back(self, slot: Slot) -> None:
        assert slot.key is not None
        del self._leased[slot.key]
        slot.key = None
        self._free.append(slot)
