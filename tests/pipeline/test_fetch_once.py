"""Requests that need the same URL at the same time: one fetch, and everybody's answer is as if it were alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engines.base import Modality
from pipeline.address import MediaHostPolicy
from pipeline.errors import GatewayError
from pipeline.fetch import Fetched
from pipeline.fetch_once import SharingFetcher
from tests.pipeline.origin import BODY, Exchange, Origin, fetch, running, sends

OPEN = MediaHostPolicy(allow_private=None, listening_on_loopback=True)


class Tap:
    """A route whose body comes piece by piece, as the test says; an empty piece is its end."""

    def __init__(self, origin: Origin, target: str = "/a") -> None:
        self.began = 0
        self.gone = asyncio.Event()
        self._pieces: list[bytes] = []
        origin.routes[target] = self._serve

    def give(self, *pieces: bytes) -> None:
        self._pieces += pieces

    async def _serve(self, exchange: Exchange) -> None:
        self.began += 1
        await exchange.start_chunks()
        leaving = asyncio.ensure_future(exchange.gone())
        sent = 0
        while not leaving.done():
            if sent == len(self._pieces):
                await asyncio.sleep(0.002)
                continue
            await exchange.chunk(self._pieces[sent])
            sent += 1
            if not self._pieces[sent - 1]:
                leaving.cancel()
                await asyncio.wait([leaving])
                return
        self.gone.set()
        raise ConnectionError


class Account:
    """Counts, and has room for `room` bytes."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.nbytes = 0
        self.room = room

    def __call__(self, nbytes: int) -> None:
        if self.nbytes + nbytes > self.room:
            raise GatewayError("admission_queue_full", "no room")
        self.nbytes += nbytes


class Saved:
    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with running() as origin:
        yield origin


@pytest.fixture
def saved() -> Saved:
    return Saved()


@pytest.fixture
async def fetcher(saved: Saved) -> AsyncIterator[SharingFetcher]:
    fetcher = SharingFetcher(OPEN, version="1", saved=saved)
    yield fetcher
    await fetcher.close()


def begin(fetcher: SharingFetcher, url: str, **others: object) -> "asyncio.Task[Fetched]":
    return asyncio.ensure_future(fetch(fetcher, url, **others))


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_several_at_once_are_one_fetch(origin: Origin, fetcher: SharingFetcher, saved: Saved) -> None:
    tap, accounts = Tap(origin), [Account() for _ in range(4)]
    first = begin(fetcher, origin.url(), account=accounts[0])
    await until(lambda: tap.began)
    tap.give(b"a" * 100_000)
    await until(lambda: accounts[0].nbytes == 100_000)
    others = [begin(fetcher, origin.url(), account=account) for account in accounts[1:]]
    await until(lambda: accounts[3].nbytes == 100_000)  # what was there counts at once
    tap.give(b"b" * 50_000, b"")
    for task in (first, *others):
        assert b"".join((await task).pieces) == b"a" * 100_000 + b"b" * 50_000
    assert [account.nbytes for account in accounts] == [150_000] * 4
    assert len(origin.requests) == 1 and saved.count == 3


async def test_what_was_fetched_is_not_kept(origin: Origin, fetcher: SharingFetcher, saved: Saved) -> None:
    origin.routes["/a"] = sends()
    for _ in range(2):
        assert b"".join((await fetch(fetcher, origin.url())).pieces) == BODY
    assert len(origin.requests) == 2 and saved.count == 0


@pytest.mark.parametrize(
    "other",
    [{"outside": True}, {"modality": Modality.VIDEO}, {"max_bytes": 1 << 19}, {"deadline_s": 4.0}, {"url": "/a?"}],
)
async def test_only_what_is_the_same_is_shared(origin: Origin, saved: Saved, other: dict[str, object]) -> None:
    settings = dict(other)
    fetcher = SharingFetcher(MediaHostPolicy(allow_private=True, listening_on_loopback=False), version="1", saved=saved)
    taps = [Tap(origin, "/a"), Tap(origin, "/a?")]
    first = begin(fetcher, origin.url())
    await until(lambda: taps[0].began)
    second = begin(fetcher, origin.url(str(settings.pop("url", "/a"))), **settings)
    await until(lambda: taps[0].began + taps[1].began == 2)
    for tap in taps:
        tap.give(b"x", b"")
    assert (await first).nbytes == (await second).nbytes == 1 and saved.count == 0
    await fetcher.close()


async def test_what_one_policy_lets_in_serves_nobody_of_the_stricter_one(
    origin: Origin, fetcher: SharingFetcher
) -> None:
    tap = Tap(origin)
    inside = begin(fetcher, origin.url())
    await until(lambda: tap.began)
    with pytest.raises(GatewayError, match="not permitted|refused|private|loopback"):
        await fetch(fetcher, origin.url(), outside=True)
    tap.give(b"x", b"")
    assert (await inside).nbytes == 1


@pytest.mark.parametrize("leaves", [0, 1])
async def test_one_that_leaves_stops_nothing(origin: Origin, fetcher: SharingFetcher, leaves: int) -> None:
    tap = Tap(origin)
    tasks = [begin(fetcher, origin.url())]
    await until(lambda: tap.began)
    tasks.append(begin(fetcher, origin.url()))
    await asyncio.sleep(0)
    tasks[leaves].cancel()
    await asyncio.wait([tasks[leaves]])
    tap.give(b"x" * 1000, b"")
    assert (await tasks[1 - leaves]).nbytes == 1000 and tap.began == 1


async def test_the_last_one_that_leaves_ends_it(origin: Origin, fetcher: SharingFetcher) -> None:
    tap = Tap(origin)
    tasks = [begin(fetcher, origin.url()) for _ in range(2)]
    await until(lambda: tap.began)
    for task in tasks:
        task.cancel()
    later = begin(fetcher, origin.url())  # finds nothing of what is being cut
    await asyncio.wait(tasks)
    async with asyncio.timeout(2):
        await tap.gone.wait()
    await until(lambda: tap.began == 2)
    tap.give(b"x", b"")
    assert (await later).nbytes == 1


@pytest.mark.parametrize("poor", [0, 1])
async def test_one_without_room_is_refused_alone(origin: Origin, fetcher: SharingFetcher, poor: int) -> None:
    tap = Tap(origin)
    accounts = [Account(), Account()]
    accounts[poor].room = 150_000
    tasks = [begin(fetcher, origin.url(), account=accounts[0])]
    await until(lambda: tap.began)
    tasks.append(begin(fetcher, origin.url(), account=accounts[1]))
    tap.give(b"a" * 100_000)
    await until(lambda: accounts[1].nbytes == 100_000)
    tap.give(b"b" * 100_000)
    with pytest.raises(GatewayError, match="no room"):
        await tasks[poor]
    tap.give(b"")
    assert (await tasks[1 - poor]).nbytes == 200_000 and accounts[1 - poor].nbytes == 200_000


async def test_one_that_comes_without_room_for_what_is_there(origin: Origin, fetcher: SharingFetcher) -> None:
    tap, account = Tap(origin), Account()
    first = begin(fetcher, origin.url(), account=account)
    await until(lambda: tap.began)
    tap.give(b"a" * 100_000)
    await until(lambda: account.nbytes)
    with pytest.raises(GatewayError, match="no room"):
        await fetch(fetcher, origin.url(), account=Account(room=1000))
    tap.give(b"")
    assert (await first).nbytes == 100_000


async def test_when_nobody_has_room_it_stops(origin: Origin, fetcher: SharingFetcher) -> None:
    tap = Tap(origin)
    tasks = [begin(fetcher, origin.url(), account=Account(room=1000)) for _ in range(2)]
    await until(lambda: tap.began)
    tap.give(b"a" * 100_000)
    for task in tasks:
        with pytest.raises(GatewayError, match="no room"):
            await task
    async with asyncio.timeout(5):
        await tap.gone.wait()


async def test_a_failure_is_the_first_ones_and_the_second_tries_for_itself(
    origin: Origin, fetcher: SharingFetcher, saved: Saved
) -> None:
    """The connection breaks; the host answers the next time."""
    held = asyncio.Event()

    async def serve(exchange: Exchange) -> None:
        if len(origin.requests) > 1:
            await exchange.answer(200, b"a" * 1000)
            return
        await exchange.start_chunks()
        await exchange.chunk(b"a" * 600)
        await held.wait()
        exchange.writer.close()

    origin.routes["/a"] = serve
    accounts = [Account(), Account()]
    first = begin(fetcher, origin.url(), account=accounts[0])
    await until(lambda: accounts[0].nbytes)
    second = begin(fetcher, origin.url(), account=accounts[1])
    await until(lambda: accounts[1].nbytes)
    held.set()
    with pytest.raises(GatewayError, match="the body ended before it was complete"):
        await first
    assert (await second).nbytes == accounts[1].nbytes == 1000  # what was accounted for counts once
    assert saved.count == 0


async def test_a_time_out_is_everybodys_when_little_time_is_left(origin: Origin, fetcher: SharingFetcher) -> None:
    tap = Tap(origin)
    tasks = [begin(fetcher, origin.url(), deadline_s=0.5)]
    await until(lambda: tap.began)
    tasks.append(begin(fetcher, origin.url(), deadline_s=0.5))
    for task in tasks:
        with pytest.raises(GatewayError, match="timed out"):
            await task
    assert tap.began == 1


async def test_the_requests_own_limit_is_its_own(origin: Origin, fetcher: SharingFetcher) -> None:
    """A request that waits for its own places holds up nobody who needs the same URL."""
    tap, quick = Tap(origin, "/slow"), Tap(origin, "/quick")
    places = asyncio.Semaphore(1)
    slow = begin(fetcher, origin.url("/slow"), slots=places)
    await until(lambda: tap.began)
    waiting = begin(fetcher, origin.url("/quick"), slots=places)
    await asyncio.sleep(0.05)
    assert quick.began == 0
    other = begin(fetcher, origin.url("/quick"), slots=asyncio.Semaphore(1))
    quick.give(b"x", b"")
    assert (await other).nbytes == 1
    tap.give(b"x", b"")
    await asyncio.gather(slow, waiting)


async def test_close_cuts_what_is_under_way(origin: Origin) -> None:
    fetcher = SharingFetcher(OPEN, version="1")
    tap = Tap(origin)
    task = begin(fetcher, origin.url())
    await until(lambda: tap.began)
    async with asyncio.timeout(2):
        await fetcher.close()
    await asyncio.wait([task], timeout=2)
    assert task.done()
