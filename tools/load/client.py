"""One request of the load test, timed, and the two ways of sending many.

Closed loop: so many clients, each sends its next request when the last is answered.  Open loop: requests leave at
random moments of a given mean rate (Poisson), whatever comes back, and a latency is counted from the moment the
request *should* have left: a server that stalls cannot hide its queue.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Iterator

import aiohttp

from tools.demo.ask import stages_of
from tools.load.bodies import Body

ROUTE = "/v1/chat/completions"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`status` 0: no answer (lost connection, time-out, broken stream).  Seconds run from the intended sending."""

    status: int
    begun_s: float
    total_s: float
    first_s: float | None
    media_bytes: int
    stages: dict[str, float]
    problem: str = ""


Report = Callable[[Outcome], None]


async def send(session: aiohttp.ClientSession, url: str, body: Body, intended: float, origin: float) -> Outcome:
    """Never raises for what a server does.  `intended`, `origin`: time.perf_counter() values."""
    first: float | None = None
    stages: dict[str, float] = {}
    status, problem, tail = 0, "", b""
    try:
        async with session.post(url + ROUTE, data=body.data, headers={"content-type": "application/json"}) as reply:
            stages = stages_of(reply.headers.get("server-timing"))
            async for piece in reply.content.iter_any():
                if first is None and b'"content"' in piece:
                    first = time.perf_counter() - intended
                tail = (tail + piece)[-400:]
            status = reply.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"[:200]
    if status not in (0, 200):
        problem = f"{status} {tail.decode(errors='replace')}"[:200]
    elif status == 200 and b"event-stream" in reply.headers.get("content-type", "").encode():
        if b"[DONE]" not in tail:
            status, problem = 0, "the stream broke off"
    else:
        first = None
    total = time.perf_counter() - intended
    return Outcome(status, intended - origin, total, first, body.media_bytes, stages, problem)


def session(connections: int, key: str = "", *, timeout_s: float = 300) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=connections)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s))


async def closed_loop(
    url: str, bodies: Iterator[Body], *, clients: int, requests: int, report: Report, key: str = ""
) -> None:
    """`requests` requests by `clients` clients.  `key`: the server's, if it asks for one."""
    origin = time.perf_counter()
    numbers = iter(range(requests))

    async def client(open_session: aiohttp.ClientSession) -> None:
        for _ in numbers:
            report(await send(open_session, url, next(bodies), time.perf_counter(), origin))

    async with session(clients, key) as open_session:
        await asyncio.gather(*[client(open_session) for _ in range(clients)])


async def open_loop(
    url: str, bodies: Iterator[Body], *, rate: float, requests: int, report: Report, seed: int = 1, key: str = ""
) -> None:
    """`requests` requests, `rate` a second on average; there is no limit of how many are out at once."""
    generator = random.Random(seed)
    origin = time.perf_counter()
    due = origin

    async def one(open_session: aiohttp.ClientSession, intended: float) -> None:
        report(await send(open_session, url, next(bodies), intended, origin))

    async with session(0, key) as open_session, asyncio.TaskGroup() as tasks:
        for _ in range(requests):
            due += generator.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(one(open_session, due))
