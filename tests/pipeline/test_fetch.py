"""The fetch against a media host on loopback that behaves and misbehaves as real ones do."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator

import pytest

from engines.base import Modality
from pipeline.address import MediaHostPolicy
from pipeline.errors import GatewayError
from pipeline.fetch import Fetcher
from pipeline.fetch_once import SharingFetcher
from tests.pipeline.origin import BODY, Exchange, Origin, fetch, refusal, running, sends

OPEN = MediaHostPolicy(allow_private=None, listening_on_loopback=True)


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with running() as origin:
        yield origin


@pytest.fixture(params=[Fetcher, SharingFetcher])
async def fetcher(request: pytest.FixtureRequest) -> AsyncIterator[Fetcher]:
    fetcher: Fetcher = request.param(OPEN, version="1.2.3")
    yield fetcher
    await fetcher.close()


async def test_a_body_arrives_whole_and_the_request_is_as_promised(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes["/a"] = sends()
    fetched = await fetch(fetcher, origin.url("/a"))
    assert b"".join(fetched.pieces) == BODY
    (request,) = origin.requests
    assert request.method == "GET"
    assert request.headers == {
        "host": f"127.0.0.1:{origin.port}",
        "user-agent": "mediagate/1.2.3",
        "accept": "*/*",
        "accept-encoding": "identity",
    }


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("/my photo.png", "/my%20photo.png"),
        ("/図/ñ.png", "/%E5%9B%B3/%C3%B1.png"),
        ("/a.png#page=2", "/a.png"),
        ("/a%2Fb?x=%2F%20+&y=a b", "/a%2Fb?x=%2F%20+&y=a%20b"),
        ("/%41%7e?sig=%2bA", "/%41%7e?sig=%2bA"),
        ("", "/"),
        ("?q", "/?q"),
    ],
)
async def test_urls_go_out_as_written(origin: Origin, fetcher: Fetcher, written: str, sent: str) -> None:
    origin.routes[sent] = sends()
    await fetch(fetcher, origin.url(written))
    assert [request.target for request in origin.requests] == [sent]


async def test_content_type_and_coding_are_not_looked_at(origin: Origin, fetcher: Fetcher) -> None:
    packed = gzip.compress(BODY)
    origin.routes["/a"] = sends(packed, Content_Encoding="gzip", Content_Type="text/html")
    fetched = await fetch(fetcher, origin.url("/a"))
    assert b"".join(fetched.pieces) == packed


async def test_a_body_without_length_ends_with_the_connection(origin: Origin, fetcher: Fetcher) -> None:
    async def serve(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 X\r\nConnection: close\r\n\r\n" + BODY)
        exchange.writer.close()

    origin.routes["/a"] = serve
    assert (await fetch(fetcher, origin.url("/a"))).nbytes == len(BODY)


async def test_connections_are_used_again(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes["/a"] = sends()
    for _ in range(3):
        await fetch(fetcher, origin.url("/a"))
    assert origin.connections == 1


async def test_cookies_and_proxies_are_not_taken_up(
    origin: Origin, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    origin.routes["/a"] = sends(Set_Cookie="a=b; Path=/")
    await fetch(fetcher, origin.url("/a"))
    await fetch(fetcher, origin.url("/a"))
    assert "cookie" not in origin.requests[1].headers


# -- size -------------------------------------------------------------------------------------------------------------


async def test_a_length_over_the_limit_is_refused_at_once(origin: Origin, fetcher: Fetcher) -> None:
    async def serve(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 X\r\nContent-Length: 200001\r\n\r\n")
        await exchange.gone()
        origin.closed.set()

    origin.routes["/a"] = serve
    message = await refusal(fetcher, origin.url("/a"), max_bytes=200_000)
    assert message == "image input payload exceeds the maximum size of 200000 bytes"
    await asyncio.wait_for(origin.closed.wait(), 5)


@pytest.mark.parametrize("limit", [len(BODY), len(BODY) - 1])
async def test_the_limit_is_exact(origin: Origin, fetcher: Fetcher, limit: int) -> None:
    async def chunked(exchange: Exchange) -> None:
        await exchange.start_chunks()
        for at in range(0, len(BODY), 7000):
            await exchange.chunk(BODY[at : at + 7000])
        await exchange.send(b"0\r\n\r\n")

    origin.routes |= {"/length": sends(), "/chunked": chunked}
    for target in origin.routes:
        if limit == len(BODY):
            assert (await fetch(fetcher, origin.url(target), max_bytes=limit)).nbytes == limit
        else:
            message = await refusal(fetcher, origin.url(target), max_bytes=limit, modality=Modality.AUDIO)
            assert message == f"audio input payload exceeds the maximum size of {limit} bytes"


async def test_an_endless_body_is_cut(origin: Origin, fetcher: Fetcher) -> None:
    sent = 0

    async def endless(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start_chunks()
        while True:
            await exchange.chunk(bytes(65536))
            sent += 65536

    origin.routes["/a"] = endless
    assert "exceeds the maximum size of 300000" in await refusal(fetcher, origin.url("/a"), max_bytes=300_000)
    await asyncio.wait_for(origin.closed.wait(), 5)
    assert sent < 64 << 20, "socket buffers, not more"


async def test_tiny_chunks_are_joined(origin: Origin, fetcher: Fetcher) -> None:
    async def drops(exchange: Exchange) -> None:
        await exchange.start_chunks()
        for at in range(0, 20_000, 10):
            await exchange.send(b"a\r\n%s\r\n" % BODY[at : at + 10])
            if at % 1000 == 0:
                await asyncio.sleep(0)
        await exchange.chunk(BODY[20_000:])
        await exchange.send(b"0\r\n\r\n")

    origin.routes["/a"] = drops
    fetched = await fetch(fetcher, origin.url("/a"))
    assert b"".join(fetched.pieces) == BODY
    assert all(len(piece) >= 16 * 1024 for piece in fetched.pieces[1:-1]) and len(fetched.pieces) < 20


async def test_bytes_are_accounted_before_they_are_kept(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes["/a"] = sends()
    counted: list[int] = []
    await fetch(fetcher, origin.url("/a"), account=counted.append)
    assert sum(counted) == len(BODY) and max(counted) <= 1 << 20

    def full(nbytes: int) -> None:
        raise GatewayError("multimodal_inflight_budget", "no room")

    with pytest.raises(GatewayError, match="no room") as refused:
        await fetch(fetcher, origin.url("/a"), account=full)
    assert refused.value.status == 429


# -- answers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [300, 304, 400, 401, 403, 404, 410, 429, 500, 503])
async def test_any_status_but_2xx_fails(origin: Origin, fetcher: Fetcher, status: int) -> None:
    origin.routes["/a?token=secret"] = sends(b"" if status == 304 else b"secret text", status)
    message = await refusal(fetcher, origin.url("/a?token=secret"))
    assert message == f"media fetch of {origin.url('/a')} failed: the host answered with status {status}"


async def test_a_redirect_without_location_fails(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes["/a"] = sends(b"", 302)
    assert (await refusal(fetcher, origin.url("/a"))).endswith("the host answered with status 302")


@pytest.mark.parametrize("status", [200, 204, 206])
async def test_an_empty_body_fails(origin: Origin, fetcher: Fetcher, status: int) -> None:
    async def nothing(exchange: Exchange) -> None:
        length = b"" if status == 204 else b"Content-Length: 0\r\n"
        await exchange.send(b"HTTP/1.1 %d X\r\n%s\r\n" % (status, length))

    origin.routes["/a"] = nothing
    assert (await refusal(fetcher, origin.url("/a"))).endswith("failed: the body is empty")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\nshort", "the body ended before it was complete"),
        (
            b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
            "the body ended before it was complete",
        ),
        (b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "the host's answer is not valid HTTP"),
        (b"HTTP/1.1 200 X\r\nContent-Length: x\r\n\r\nabc", "the host's answer is not valid HTTP"),
        (b"220 smtp.example.com ready\r\n", "the host's answer is not valid HTTP"),
        (b"HTTP/1.1 200 X\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", "the host's answer is not valid HTTP"),
        (b"", "the host closed the connection"),
        (b"HTTP/1.1 200", "the host closed the connection"),
    ],
)
async def test_broken_answers(origin: Origin, fetcher: Fetcher, answer: bytes, why: str) -> None:
    async def serve(exchange: Exchange) -> None:
        await exchange.send(answer)
        exchange.writer.close()

    origin.routes["/a"] = serve
    assert await refusal(fetcher, origin.url("/a")) == f"media fetch of {origin.url('/a')} failed: {why}"


async def test_nobody_listens(fetcher: Fetcher) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/a"
        assert await refusal(fetcher, url) == f"media fetch of {url} failed: the host cannot be connected to"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://", "media URL has no host"),
        ("ftp://127.0.0.1/a", "media URL is not a valid http or https URL"),
        ("//127.0.0.1/a", "media URL is not a valid http or https URL"),
        ("http://a@b@c/", "media URL has an ambiguous host"),
        ("http://127.0.0.1:99999/", "media URL has an invalid port"),
    ],
)
async def test_bad_urls(fetcher: Fetcher, url: str, message: str) -> None:
    assert await refusal(fetcher, url) == message


# -- time -------------------------------------------------------------------------------------------------------------


async def hangs(exchange: Exchange) -> None:
    await exchange.gone()
    raise ConnectionError


async def test_a_host_that_never_answers(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes["/a?x"] = hangs
    message = await refusal(fetcher, origin.url("/a?x"), deadline_s=0.2)
    assert message == f"media fetch of {origin.url('/a')} timed out after 0.2s"
    await asyncio.wait_for(origin.closed.wait(), 5)


async def test_dripping_bytes_do_not_extend_the_deadline(origin: Origin, fetcher: Fetcher) -> None:
    async def drips(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n")
        while True:
            await exchange.send(b"x")
            await asyncio.sleep(0.02)

    origin.routes["/a"] = drips
    assert "timed out after 0.3s" in await refusal(fetcher, origin.url("/a"), deadline_s=0.3)
    await asyncio.wait_for(origin.closed.wait(), 5)


async def test_the_deadline_is_for_all_redirects_together(origin: Origin, fetcher: Fetcher) -> None:
    async def slowly(exchange: Exchange) -> None:
        await asyncio.sleep(0.15)
        await exchange.answer(302, Location=f"{exchange.target}a")

    for length in range(1, 12):
        origin.routes["/" + "a" * length] = slowly
    assert "timed out after 0.4s" in await refusal(fetcher, origin.url("/a"), deadline_s=0.4)
    assert 2 <= len(origin.requests) <= 3


async def test_waiting_for_a_slot_is_not_the_hosts_time(origin: Origin) -> None:
    active = most = 0

    async def slowly(exchange: Exchange) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.1)
        active -= 1
        await exchange.answer(200, b"x")

    origin.routes["/a"] = slowly
    fetcher = Fetcher(OPEN, version="0", slots=4)
    own = asyncio.Semaphore(2)
    mine = [fetch(fetcher, origin.url("/a"), deadline_s=0.5, slots=own) for _ in range(12)]
    others = [fetch(fetcher, origin.url("/a"), deadline_s=0.5) for _ in range(6)]
    answers = await asyncio.gather(*mine, *others)
    assert len(answers) == 18 and most == 4
    most = 0
    await asyncio.gather(*[fetch(fetcher, origin.url("/a"), slots=own) for _ in range(4)])
    assert most == 2
    await fetcher.close()


async def test_a_client_that_leaves_closes_the_connection_and_frees_the_slot(origin: Origin) -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n" + bytes(50_000))
        await hangs(exchange)

    origin.routes |= {"/half": half, "/hangs": hangs, "/a": sends()}
    fetcher = Fetcher(OPEN, version="0", slots=1)
    for target in ("/half", "/hangs"):
        origin.closed.clear()
        task = asyncio.create_task(fetch(fetcher, origin.url(target)))
        while not origin.requests or origin.requests[-1].target != target:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(origin.closed.wait(), 5)
    await fetch(fetcher, origin.url("/a"))
    await fetcher.close()
