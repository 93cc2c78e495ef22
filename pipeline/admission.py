"""Who may come in, and how much may be held: request slots, body bytes, preprocessed media.

Theory of operation.  Four gates, each first come first served, each with one `Grant` per holder that is given back
exactly once:

1. `Slots` counts requests, from the moment their head is read to the end of their answer.  A full gateway queues up to
   `queue_size` requests for at most `queue_timeout_s`: one more is 429 `admission_queue_full`, too long a wait 503
   `admission_queue_timeout`.
2. `Bodies` counts the bytes of request bodies in memory, as they arrive.  A body with a length reserves it before the
   first byte is read and waits like a request; a chunked one takes pieces and is refused when there is none left,
   because two half-read bodies that wait for each other would wait for ever.
3. `InflightMedia` counts the bytes of preprocessed media until the engine's answer has ended
   (`--multimodal-max-inflight-bytes`). A request larger than the budget is 413 at once; one that fits waits `wait_s`;
   all waiters together may hold at most one more budget, and one that would overfill that is 429 at once.  So the media
   in memory stay within two budgets.

4. `Backlog` keeps tensors from being made long before their engine takes them: per model, at most so many bytes that no
   worker has read yet.  An engine that reads (a few milliseconds) never waits for us, one that is busy reading finds
   the next tensors ready, and sixteen waiting requests do not cost sixteen tensors of memory.  A worker that takes its
   time is not waited for (`engines.attempt`, READER_PATIENCE_S), so one that hangs slows the others and does not stop
   them.

Nobody overtakes: while somebody waits, a newcomer waits behind, however small.  State changes are synchronous; only the
waiting is asynchronous, and a waiter that is cancelled leaves as if it had never come.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pipeline.errors import GatewayError

RETRY_AFTER_S = 2


class Grant:
    """A share of a gate, given back once; giving back twice is harmless so that every path may do it."""

    __slots__ = ("_gate", "amount")

    def __init__(self, gate: "Gate", amount: int) -> None:
        self._gate: Gate | None = gate
        self.amount = amount

    def release(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.give_back(self.amount)

    def shrink(self, amount: int) -> None:
        """Keep at most `amount`, give the rest back."""
        if self._gate is not None and amount < self.amount:
            rest, self.amount = self.amount - amount, amount
            self._gate.give_back(rest)

    def grow(self, amount: int) -> bool:
        """Take `amount` more without waiting; False when the gate has not that much.

        Goes before those who wait: they came later, and what is held here only comes back when its holder can end.
        """
        if self._gate is None or not self._gate.fits(amount):
            return False
        self._gate.hold(amount)
        self.amount += amount
        return True


class Gate:
    """A counter with a limit and a first-come-first-served queue.  `limit` None: unbounded, only counting."""

    def __init__(self, limit: int | None, changed: Callable[["Gate"], None] = lambda gate: None) -> None:
        self.limit = limit
        self.held = 0
        self.waiting = 0  # amount the waiters ask for together
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._changed = changed

    @property
    def waiters(self) -> int:
        return len(self._waiters)

    def fits(self, amount: int) -> bool:
        return self.limit is None or self.held + amount <= self.limit

    def take_now(self, amount: int) -> bool:
        if self._waiters or not self.fits(amount):
            return False
        self.hold(amount)
        return True

    def hold(self, amount: int) -> None:
        self.held += amount
        self._changed(self)

    def give_back(self, amount: int) -> None:
        self.held -= amount
        self._admit()
        self._changed(self)

    def _admit(self) -> None:
        while self._waiters and self.fits(self._waiters[0][0]):
            amount, turn = self._waiters.popleft()
            self.waiting -= amount
            if not turn.done():
                self.held += amount
                turn.set_result(None)

    async def take(self, amount: int, wait_s: float | None) -> Grant:
        """Wait in the queue for `amount`; TimeoutError after `wait_s` seconds, never when it is None."""
        if self.take_now(amount):
            return Grant(self, amount)
        turn = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._waiters.append(entry)
        self.waiting += amount
        self._changed(self)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back(amount)  # granted in the same turn of the loop as the cancellation
            else:
                self._leave(entry)
            raise
        return Grant(self, amount)

    def _leave(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        if entry not in self._waiters:
            return
        self._waiters.remove(entry)
        self.waiting -= entry[0]
        self._admit()  # what stood behind a large waiter may fit now
        self._changed(self)


class Slots:
    """Gate 1: requests being served."""

    def __init__(
        self,
        limit: int | None,
        queue_size: int,
        queue_timeout_s: float,
        rejected: Callable[[str], None],
        changed: Callable[[Gate], None],
    ) -> None:
        self.gate = Gate(limit, changed)
        self._queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self._rejected = rejected

    async def enter(self) -> Grant:
        if self.gate.take_now(1):
            return Grant(self.gate, 1)
        if self.gate.waiters >= self._queue_size:
            self._rejected("full")
            raise GatewayError(
                "admission_queue_full",
                f"the gateway serves {self.gate.limit} requests and {self._queue_size} are queued; retry shortly",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            return await self.gate.take(1, self._queue_timeout_s)
        except TimeoutError:
            self._rejected("timeout")
            raise GatewayError(
                "admission_queue_timeout",
                f"no request slot became free within {self._queue_timeout_s:g} s",
                retry_after_s=RETRY_AFTER_S,
            ) from None


class Bodies:
    """Gate 2: bytes of request bodies in memory, and of media fetched for them."""

    PIECE = 1 << 20  # a chunked body asks for this much at a time

    def __init__(self, limit: int, wait_s: float, rejected: Callable[[str], None]) -> None:
        self.gate = Gate(limit)
        self._wait_s = wait_s
        self._rejected = rejected

    async def enter(self, length: int | None) -> Grant:
        """Room for a body of `length` bytes; None when the client did not say."""
        if length is not None and self.gate.limit is not None and length > self.gate.limit:
            raise GatewayError(
                "request_body_too_large",
                f"the request body of {length} bytes is larger than the {self.gate.limit} bytes "
                "this gateway holds of all bodies",
            )
        try:
            return await self.gate.take(length or 0, self._wait_s)
        except TimeoutError:
            self._rejected("timeout")
            raise GatewayError(
                "admission_queue_timeout",
                f"no room for the request body became free within {self._wait_s:g} s",
                retry_after_s=RETRY_AFTER_S,
            ) from None

    def begin(self) -> Grant:
        """An empty grant that will grow, for a request that holds its body already and must not wait for others."""
        return Grant(self.gate, 0)

    def grow(self, grant: Grant, needed: int) -> None:
        """Make `grant` cover `needed` bytes."""
        if (
            needed <= grant.amount
            or grant.grow(max(self.PIECE, needed - grant.amount))
            or grant.grow(needed - grant.amount)
        ):
            return
        self._rejected("full")
        raise GatewayError(
            "admission_queue_full",
            "the gateway is holding its limit of request bytes; retry shortly",
            retry_after_s=RETRY_AFTER_S,
        )


class InflightMedia:
    """Gate 3: bytes of preprocessed media that engines may still need."""

    def __init__(
        self, limit: int | None, wait_s: float, rejected: Callable[[str], None], changed: Callable[[Gate], None]
    ) -> None:
        self.gate = Gate(limit, changed)
        self._wait_s = wait_s
        self._rejected = rejected

    def check_size(self, nbytes: int) -> None:
        """413 for media that can never fit; known before anything is decoded."""
        limit = self.gate.limit
        if limit is None or nbytes <= limit:
            return
        self._rejected("multimodal_too_large")
        raise GatewayError(
            "multimodal_payload_too_large",
            f"the request carries {nbytes} bytes of preprocessed media, "
            f"more than the {limit} bytes this gateway holds in flight",
        )

    async def enter(self, nbytes: int) -> Grant:
        self.check_size(nbytes)
        if self.gate.take_now(nbytes):
            return Grant(self.gate, nbytes)
        try:
            if self.gate.limit is not None and self.gate.waiting + nbytes > self.gate.limit:
                raise TimeoutError
            return await self.gate.take(nbytes, self._wait_s)
        except TimeoutError:
            self._rejected("multimodal_inflight")
            raise GatewayError(
                "multimodal_inflight_budget",
                "the gateway is already holding its budget of preprocessed media in flight; retry shortly",
                retry_after_s=RETRY_AFTER_S,
            ) from None


class Backlog:
    """Gate 4: bytes of tensors no engine worker has read yet, by model.

    `per_worker` bytes for each healthy worker of the model; one request may exceed that alone.
    """

    def __init__(self, per_worker: int | None) -> None:
        self._per_worker = per_worker
        self._gates: dict[str, Gate] = {}

    async def enter(self, model: str, workers: int, nbytes: int) -> Grant:
        """Wait for room; the caller bounds the wait (the request's own time limit)."""
        gate = self._gates.setdefault(model, Gate(None))
        gate.limit = self._per_worker * max(workers, 1) if self._per_worker is not None else None
        amount = nbytes if gate.limit is None else min(nbytes, gate.limit)
        return await gate.take(amount, None)
