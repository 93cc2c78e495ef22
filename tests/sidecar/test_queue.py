"""The queue against a real Redis: order, sizes, time, and a Redis that is not what it should be."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from pipeline.sidecar.protocol import Keys
from pipeline.sidecar.queue import JobQueue, JobTooLarge, QueueDown, shown_url
from tools.redis_server import RedisServer, redis_server

MOST = 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")) as running:
        yield running


@pytest.fixture
async def queue(server: RedisServer) -> AsyncIterator[JobQueue]:
    made = JobQueue(server.url, Keys("test"), most_job_bytes=MOST)
    await made._client.flushall()
    yield made
    await made.close()


async def test_the_oldest_first_and_what_is_given_back_before_it(queue: JobQueue) -> None:
    await queue._client.lpush(queue.keys.jobs, b"one", b"two")
    assert await queue.waiting() == 2
    first = await queue.take()
    assert first == b"one"
    await queue.give_back(first)
    assert [await queue.take(), await queue.take(), await queue.take()] == [b"one", b"two", None]


@pytest.mark.parametrize("nbytes", [0, 1, 511, 512, 4096, 65_535, MOST])
async def test_jobs_of_any_size_come_whole(nbytes: int, queue: JobQueue) -> None:
    job = bytes(range(256)) * (nbytes // 256 + 1)
    await queue._client.lpush(queue.keys.jobs, job[:nbytes], b"next")
    assert await queue.take() == job[:nbytes]
    assert await queue.take() == b"next"


async def test_a_larger_one_is_not_read(queue: JobQueue) -> None:
    head = b"h" * 512
    await queue._client.lpush(queue.keys.jobs, head + b"x" * 2_000_000, b"next")
    with pytest.raises(JobTooLarge) as refused:
        await queue.take()
    assert (refused.value.nbytes, refused.value.head) == (2_000_512, head)
    assert await queue.take() == b"next"


async def test_answers_of_megabytes_arrive(queue: JobQueue) -> None:
    answer = bytearray(range(256)) * 8192
    await queue.answer("7", answer, within_s=10)
    key = queue.keys.answer("7")
    assert 0 < await queue._client.ttl(key) <= 120
    reader = JobQueue(
        "unix://" + str(queue._client.connection_pool.connection_kwargs["path"]), queue.keys, most_job_bytes=1 << 22
    )
    assert await reader._client.rpop(key) == answer
    await reader.close()


async def test_a_full_redis_is_said_to_be(queue: JobQueue) -> None:
    with pytest.raises(QueueDown, match="OOM|memory"):
        for number in range(40):
            await queue.answer(str(number), bytes(1 << 20), within_s=10)


async def test_what_redis_takes_is_asked(queue: JobQueue) -> None:
    assert await queue.largest_value() == 512 << 20
    await queue._client.acl_setuser("strange", enabled=True, nopass=True, keys="*", commands=["+@all", "-config"])
    url = f"unix://strange:@{queue._client.connection_pool.connection_kwargs['path']}"
    other = JobQueue(url.replace("strange:@", "strange:x@"), queue.keys, most_job_bytes=MOST)
    assert await other.largest_value() is None
    await other.close()


async def test_nobody_there_is_told_at_once() -> None:
    for url in ("unix:///nonexistent/redis.sock", "redis://127.0.0.1:9/0"):
        queue = JobQueue(url, Keys("test"), most_job_bytes=MOST)
        for call in (queue.take(), queue.waiting(), queue.announce({"a": "b"}), queue.answer("1", b"", within_s=5)):
            with pytest.raises(QueueDown):
                await call
        await queue.close()


async def test_one_that_never_answers_is_bounded() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            pass
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    queue = JobQueue(f"redis://127.0.0.1:{port}/0", Keys("test"), most_job_bytes=MOST)
    with pytest.raises(QueueDown, match="no answer within"):
        await queue.answer("1", b"x", within_s=0.2)
    await queue.close()
    listening.close()


@pytest.mark.parametrize(
    "said",
    [
        b"+PONG\r\n" * 20,
        b"$99999999999999\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"garbage\r\n",
        b"",
        b"*9999999\r\n$1\r\na\r\n",
        b"+" + b"x" * 300_000 + b"\r\n",
    ],
)
async def test_one_that_talks_nonsense_is_down_and_nothing_else(said: bytes) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        writer.close()

    listening = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    queue = JobQueue(f"redis://127.0.0.1:{port}/0", Keys("test"), most_job_bytes=MOST)
    with pytest.raises((QueueDown, JobTooLarge)):
        await queue.take()
    await queue.close()
    listening.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@h:6379/0", "redis://***@h:6379/0"),
        ("rediss://user:secret@h/0?password=secret", "rediss://***@h/0"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
    ],
)
def test_logs_name_no_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown
