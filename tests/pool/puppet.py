"""Pool processes played by the test, one step at a time, on real rings: every interleaving can be set up and none
needs luck.
"""

import asyncio
import os
from typing import Any

import msgspec

from pool.control import Kill, Reset, Up
from pool.mapping import Mapping
from pool.messages import Answer, Configure, Configured, Ending, Prepared, RunJob, Submission, stow, unstow
from pool.pool import Pool
from pool.ring import RingReader, RingWriter
from pool.row import CONFIGURATION, PoolSlot, Row
from tests.pool.shop import Echo, Result, Said


class Puppet:
    """The process of one slot.  A message goes through: take, answer (written), ring (announced)."""

    def __init__(self, slot: PoolSlot) -> None:
        self.slot = slot
        self.is_alive = False
        self.kept: dict[int, bytes] = {}

    def prepare(self) -> None:
        self.is_alive = True
        self.kept.clear()
        self.payload = b""
        self.current: RunJob | Configure | None = None
        self.unrung = 0
        self.reader = RingReader(self.slot.submission, self.slot.submission_bell)
        self.writer = RingWriter(self.slot.completion, self.slot.completion_bell)
        self.slot.board.set_prepared()
        self.put(Prepared(os.getpid()))

    def put(self, message: msgspec.Struct) -> None:
        self.writer.put(msgspec.msgpack.encode(message))

    def take(self) -> bool:
        """Begin the next message, if there is one."""
        if self.current is not None or not self.slot.submission_bell.answer():
            return False
        self.current = msgspec.msgpack.decode(self.reader.get(), type=Submission)
        if isinstance(self.current, RunJob):
            self.slot.board.running = self.current.job_id
        return True

    @property
    def job(self) -> Any:
        assert isinstance(self.current, RunJob)
        body = unstow(self.current.long_bytes, self.current.body, self.slot.long[self.current.place])
        return msgspec.msgpack.decode(body, type=Echo)

    def answer(self, ending: Ending = Ending.DONE, *, rings: bool = True) -> None:
        """End what was begun.  Without `rings` the answer is only written: the moment before the bell."""
        current, self.current = self.current, None
        if isinstance(current, Configure):
            self.payload += bytes(self.slot.long[CONFIGURATION][: current.nbytes])
            if current.is_last:
                self.kept[current.key], self.payload = self.payload, b""
            message: msgspec.Struct = Configured(current.version)
        else:
            assert current is not None
            self.current = current
            text = self.job.text
            self.current = None
            bodies = {
                Ending.DONE: Said(text, self.slot.index),
                Ending.FAILED: text,
                Ending.CRASHED: ["ValueError", text],
                Ending.OVERRAN: None,
            }
            body = msgspec.msgpack.encode(bodies[ending])
            long_bytes, raw = stow(body, self.slot.long[current.place], "result")
            message = Answer(current.job_id, ending, 0.0, 0.25, 7, long_bytes, raw)
        if rings:
            self.put(message)
            self.slot.board.running = 0
            return
        bell, self.writer.bell = self.writer.bell, _Silent()
        self.put(message)
        self.writer.bell = bell
        self.unrung = 1

    def ring(self) -> None:
        self.slot.completion_bell.ring()
        self.slot.board.running = 0
        self.unrung = 0

    def die(self) -> None:
        self.is_alive = False


class _Silent:
    def ring(self) -> None:
        return


class Stand:
    """A pool, its puppets, and the supervisor's part: a puppet is prepared again only after its slot was reset."""

    def __init__(self, processes: int = 2, **options: Any) -> None:
        self.mapping = Mapping(Row.nbytes(processes))
        self.row = Row(self.mapping, 0, processes)
        self.sent: list[msgspec.Struct] = []
        self.pool: Pool[Echo, Said] = Pool(self.row, Result, self.sent.append, **options)
        self.puppets = [Puppet(slot) for slot in self.row.slots]

    async def __aenter__(self) -> "Stand":
        self.pool.start()
        for puppet in self.puppets:
            puppet.prepare()
        await self.turn()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()
        self.row.close()

    async def turn(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    def submit(self, text: str, leases: Any = (), deadline_s: float = 60.0) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.pool.submit(Echo(text), deadline_s=deadline_s, leases=leases))

    async def die(self, index: int) -> None:
        """The process dies, is reaped, replaced."""
        self.puppets[index].die()
        self.pool.on_death(index, "killed")
        assert self.sent.pop() == Reset(index)
        self.puppets[index].prepare()
        await self.turn()

    def take_sent(self) -> list[msgspec.Struct]:
        sent, self.sent[:] = list(self.sent), []
        return [message for message in sent if not isinstance(message, Up)]

    def kills(self) -> list[int]:
        return [message.slot for message in self.take_sent() if isinstance(message, Kill)]


async def finish(stand: Stand) -> None:
    """Let the puppets do all there is to do."""
    idle = 0
    while idle < 3:
        is_busy = False
        for puppet in stand.puppets:
            if puppet.is_alive and (puppet.current is not None or puppet.take()):
                puppet.answer()
                is_busy = True
        await stand.turn()
        idle = 0 if is_busy else idle + 1
