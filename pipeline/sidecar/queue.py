"""The sidecar's side of Redis: take a job, give one back, answer, say that one is there.

Rules.  Every call is bounded by its caller or here, because a connection that goes quiet must not take its user with
it; there is no time-out of the client's own, since waiting for a job is meant to sit on the socket.  Nothing is retried
in here: what failed may have happened.  Values larger than a job may be are never read: Redis is trusted less than our
own memory.  A job is out of Redis as soon as it is taken, as the protocol has it, so one whose sidecar is killed is
lost and its worker waits for its time to end (`sidecar_timeout`).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar
from urllib.parse import urlsplit

import redis.asyncio as redis_asyncio
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from pipeline.sidecar.protocol import ANSWER_EXPIRES_S, HELLO_EXPIRES_S, Keys

JOB_WAIT_S = 1  # of one wait for a job: also how long a drain may take to notice
WAIT_MARGIN_S = 2.0  # beyond it, before a silent connection counts as dead
CONNECT_TIMEOUT_S = 1.0
CONTROL_TIMEOUT_S = 5.0  # of a small command
_READ_BYTES = 1 << 20
_HEAD_BYTES = 512  # of a value that is too large: enough for a job's id


class QueueDown(Exception):
    """Redis could not be reached, refused, or did not answer in time; whether it did what was asked is not known."""


class JobTooLarge(Exception):
    """A job larger than may be read was taken out of the queue; `head` is its beginning."""

    def __init__(self, nbytes: int, head: bytes) -> None:
        super().__init__(f"a job of {nbytes} bytes")
        self.nbytes = nbytes
        self.head = head


class _BoundedParser(_AsyncRESP2Parser):
    """Refuses a value by the length that is announced in front of it; its connection is closed then.

    What it does read lies in memory once (the library's own way takes four times as much while it reads).
    """

    limit: ClassVar[int]

    async def _read(self, length: int) -> Any:
        """The next `length` bytes; what is behind them ends the line."""
        if length > self.limit:
            raise JobTooLarge(length, bytes(await self._filled(_HEAD_BYTES)))
        value = await self._filled(length + 2)
        del value[length:]
        return value if length > _READ_BYTES else bytes(value)  # the library hashes small ones

    async def _filled(self, nbytes: int) -> bytearray:
        """From what was read of the stream already, then from the stream itself."""
        have = self._buffer[self._pos : self._pos + nbytes]
        self._pos += nbytes
        filled = bytearray(nbytes)
        filled[: len(have)] = have
        at = len(have)
        stream = self._stream
        assert stream is not None
        while at < nbytes:
            piece = await stream.read(min(nbytes - at, _READ_BYTES))
            if not piece:
                raise ConnectionError("Redis closed the connection within a value")
            filled[at : at + len(piece)] = piece
            at += len(piece)
        return filled


def shown_url(url: str) -> str:
    """A Redis URL for logs: without name and password, also where they stand in the query."""
    parts = urlsplit(url)
    host = parts.netloc.rsplit("@", 1)[-1]
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{host}{parts.path}"


class JobQueue:
    """The keys of one namespace in one Redis.  Made anywhere, used on one event loop, closed there."""

    def __init__(self, url: str, keys: Keys, *, most_job_bytes: int) -> None:
        """Raises ValueError for a URL that names no Redis.  Nothing is connected yet."""
        self.keys = keys
        self.most_job_bytes = max(most_job_bytes, _HEAD_BYTES)
        parser = type("_Parser", (_BoundedParser,), {"limit": self.most_job_bytes})
        self._client: Any = redis_asyncio.from_url(
            url,
            decode_responses=False,
            protocol=2,
            parser_class=parser,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            driver_info=None,  # else its package's files are read at every new connection
        )

    async def take(self) -> bytes | bytearray | None:
        """The oldest job, None when none came for JOB_WAIT_S.  Raises QueueDown, JobTooLarge.

        Not to be cancelled: a job on its way would be lost.
        """
        async with _bounded(JOB_WAIT_S + WAIT_MARGIN_S):
            popped = await self._client.brpop([self.keys.jobs], timeout=JOB_WAIT_S)
        if popped is None:
            return None
        if not isinstance(popped, list | tuple) or len(popped) != 2 or not isinstance(popped[1], bytes | bytearray):
            raise QueueDown("what answered is no Redis")
        return popped[1]

    async def give_back(self, job: bytes | bytearray) -> None:
        """Put a job where the next one is taken from.  Raises QueueDown."""
        async with _bounded(CONTROL_TIMEOUT_S):
            await self._client.rpush(self.keys.jobs, job)

    async def answer(self, job_id: str, answer: bytes | bytearray, *, within_s: float) -> None:
        """Raises QueueDown."""
        key = self.keys.answer(job_id)
        async with _bounded(within_s), self._client.pipeline(transaction=True) as steps:
            steps.lpush(key, answer)
            steps.expire(key, ANSWER_EXPIRES_S)
            await steps.execute()

    async def announce(self, hello: Mapping[str, str]) -> None:
        """Say that a sidecar is there, for HELLO_EXPIRES_S.  Raises QueueDown."""
        async with _bounded(CONTROL_TIMEOUT_S), self._client.pipeline(transaction=True) as steps:
            steps.hset(self.keys.hello, mapping=dict(hello))
            steps.expire(self.keys.hello, HELLO_EXPIRES_S)
            await steps.execute()

    async def waiting(self) -> int:
        """Jobs nobody has taken.  Raises QueueDown."""
        async with _bounded(CONTROL_TIMEOUT_S):
            return int(await self._client.llen(self.keys.jobs))

    async def largest_value(self) -> int | None:
        """What Redis itself takes as one value; None where it may not be asked.  Raises QueueDown."""
        async with _bounded(CONTROL_TIMEOUT_S):
            try:
                found = await self._client.config_get("proto-max-bulk-len")
                return int(next(iter(found.values())))
            except (ResponseError, StopIteration, ValueError):
                return None

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def _bounded(seconds: float) -> AsyncIterator[None]:
    """At most so long; whatever the library raises becomes QueueDown: a server that talks nonsense has many ways."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise QueueDown(f"no answer within {seconds:g} s") from None
    except (JobTooLarge, QueueDown):
        raise
    except Exception as error:
        raise QueueDown(f"{type(error).__name__}: {error}"[:300]) from None
