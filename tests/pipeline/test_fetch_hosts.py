"""Whom a fetch may reach: redirects, names and their addresses, domains, certificates."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from pipeline.address import MediaHostPolicy
from pipeline.fetch import Fetcher
from pipeline.fetch_once import SharingFetcher
from tests.pipeline.origin import BODY, Exchange, Origin, fetch, redirects, refusal, running, sends

OPEN = MediaHostPolicy(allow_private=None, listening_on_loopback=True)
TLS = Path(__file__).parents[1] / "data" / "tls"


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with running() as origin:
        yield origin


@pytest.fixture(params=[Fetcher, SharingFetcher])
async def fetcher(request: pytest.FixtureRequest) -> AsyncIterator[Fetcher]:
    fetcher: Fetcher = request.param(OPEN, version="1.2.3")
    yield fetcher
    await fetcher.close()


# -- redirects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(origin: Origin, fetcher: Fetcher, status: int) -> None:
    origin.routes |= {"/x/a": redirects("../y/b?q=1#f", status), "/y/b?q=1": sends()}
    assert (await fetch(fetcher, origin.url("/x/a"))).nbytes == len(BODY)
    assert [request.method for request in origin.requests] == ["GET", "GET"]


@pytest.mark.parametrize(("hops", "is_fine"), [(10, True), (11, False)])
async def test_ten_redirects_are_the_most(origin: Origin, fetcher: Fetcher, hops: int, is_fine: bool) -> None:
    origin.routes = {f"/{hop}": redirects(f"/{hop + 1}") for hop in range(hops)} | {f"/{hops}": sends()}
    if is_fine:
        assert (await fetch(fetcher, origin.url("/0"))).nbytes == len(BODY)
    else:
        message = await refusal(fetcher, origin.url("/0"))
        assert message == f"media fetch of {origin.url('/0')} was redirected more than 10 times"
    assert len(origin.requests) == 11


async def test_a_loop_ends(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes["/a"] = redirects("/a")
    assert "redirected more than 10 times" in await refusal(fetcher, origin.url("/a"))


async def test_a_redirect_with_a_body_without_end(origin: Origin, fetcher: Fetcher) -> None:
    async def serve(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 302 X\r\nLocation: /b\r\nContent-Length: 99999999999\r\n\r\nbla")
        await exchange.gone()

    origin.routes |= {"/a": serve, "/b": sends()}
    assert (await fetch(fetcher, origin.url("/a"))).nbytes == len(BODY)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("file:///etc/passwd", "media URL is not a valid http or https URL"),
        ("ftp://127.0.0.1/x", "media URL is not a valid http or https URL"),
        ("data:image/png;base64,AAAA", "media URL is not a valid http or https URL"),
        ("http://[::1", "media URL is redirected to an invalid URL"),
        ("http://a@b@c/", "media URL has an ambiguous host"),
        (
            "http://169.254.169.254/latest/",
            "media host '169.254.169.254' is a cloud metadata address, which media is not",
        ),
    ],
)
async def test_redirects_are_as_strict_as_the_first_url(
    origin: Origin, fetcher: Fetcher, location: str, message: str
) -> None:
    origin.routes["/a"] = redirects(location)
    assert (await refusal(fetcher, origin.url("/a"))).startswith(message)


async def test_a_location_in_raw_utf8(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes |= {"/a": redirects("/ñ x"), "/%C3%B1%20x": sends()}
    assert (await fetch(fetcher, origin.url("/a"))).nbytes == len(BODY)


async def test_credentials_stay_with_their_origin(origin: Origin, fetcher: Fetcher) -> None:
    async with running() as other:
        origin.routes |= {"/a": redirects("/b"), "/b": redirects(other.url("/c")), "/d": sends()}
        other.routes["/c"] = redirects(f"http://evil:idea@127.0.0.1:{origin.port}/d")
        await fetch(fetcher, f"http://us%40er:p%3Aw@127.0.0.1:{origin.port}/a")
        logins = [request.headers.get("authorization") for request in (*origin.requests, *other.requests)]
    expected = "Basic dXNAZXI6cDp3"  # us@er:p:w
    assert logins == [expected, expected, expected, None]
    assert all(request.headers["host"].startswith("127.0.0.1:") for request in origin.requests)
    message = await refusal(fetcher, f"http://us%40er:p%3Aw@127.0.0.1:{origin.port}/none")
    assert message == f"media fetch of {origin.url('/none')} failed: the host answered with status 404"


# -- who may be asked -------------------------------------------------------------------------------------------------


class Names:
    """A name server: every look-up of a name takes the next of its answers, the last for ever."""

    def __init__(self, **answers: list[Sequence[str]]) -> None:
        self.answers = {name.replace("_", "."): list(found) for name, found in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.answers.get(host)
        if not answers:
            raise socket.gaierror(-2, "Name or service not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]


async def test_the_checked_address_is_the_one_connected_to(origin: Origin) -> None:
    names = Names(media_test=[["127.0.0.1"], ["169.254.169.254"]])  # a second look-up would be refused
    fetcher = Fetcher(OPEN, version="0", resolve=names)
    origin.routes["/a"] = sends()
    await fetch(fetcher, origin.url("/a", "MEDIA.test"))
    assert names.asked == ["media.test"]
    assert origin.requests[0].headers["host"] == f"media.test:{origin.port}"
    await fetcher.close()


@pytest.mark.parametrize("order", [["127.0.0.1", "169.254.169.254"], ["fe80::1%eth0", "127.0.0.1"]])
async def test_one_bad_address_of_many_is_enough(origin: Origin, order: list[str]) -> None:
    fetcher = Fetcher(OPEN, version="0", resolve=Names(media_test=[order]))
    message = await refusal(fetcher, origin.url("/a", "media.test"))
    assert message.startswith("media host 'media.test' resolves to an address which media is not fetched from")
    assert origin.connections == 0
    await fetcher.close()


async def test_addresses_are_for_the_log_not_for_the_client(origin: Origin, caplog: pytest.LogCaptureFixture) -> None:
    policy = MediaHostPolicy(allow_private=False, listening_on_loopback=True)
    fetcher = Fetcher(policy, version="0", resolve=Names(media_test=[["10.1.2.3"]]))
    message = await refusal(fetcher, origin.url("/a", "media.test"))
    assert "10.1.2.3" not in message and "private address" not in message
    assert "10.1.2.3, a private address" in caplog.text
    await fetcher.close()


async def test_connection_failures_name_no_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fetcher = Fetcher(OPEN, version="0", resolve=Names(media_test=[["127.0.0.1"]]))
        message = await refusal(fetcher, f"http://media.test:{free.getsockname()[1]}/a")
        await fetcher.close()
    assert message.endswith("the host cannot be connected to") and "127.0.0.1" not in message
    assert "127.0.0.1" in caplog.text


async def test_a_redirect_to_a_name_is_checked(origin: Origin) -> None:
    names = Names(media_test=[["127.0.0.1"]], inner_test=[["169.254.169.254"]])
    fetcher = Fetcher(OPEN, version="0", resolve=names)
    origin.routes["/a"] = redirects("http://inner.test/latest")
    message = await refusal(fetcher, origin.url("/a", "media.test"))
    assert message.startswith("media host 'inner.test' resolves to") and names.asked == ["media.test", "inner.test"]
    await fetcher.close()


async def test_unresolvable_names(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    none = Fetcher(OPEN, version="0", resolve=Names(media_test=[[]]))
    for name in ("nowhere.test", "media.test"):
        assert await refusal(none, f"http://{name}/a") == f"media host '{name}' cannot be resolved"
    await none.close()

    def fails(*arguments: object, **others: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fails)  # the system's resolver, without a network
    assert await refusal(fetcher, "http://x.invalid/a") == "media host 'x.invalid' cannot be resolved"


async def test_a_name_refused_after_the_client_left_is_nobodys_error(origin: Origin) -> None:
    looking, answer = asyncio.Event(), asyncio.Event()

    async def slowly(host: str, port: int) -> Sequence[str]:
        looking.set()
        await answer.wait()
        return ["169.254.169.254"]

    fetcher = Fetcher(OPEN, version="0", resolve=slowly)
    leaves = asyncio.create_task(fetch(fetcher, "http://media.test/a"))
    await looking.wait()
    stays = asyncio.create_task(refusal(fetcher, "http://media.test/b"))
    await asyncio.sleep(0)
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    answer.set()
    assert (await stays).startswith("media host 'media.test' resolves to an address")
    await fetcher.close()


async def test_the_systems_resolver(origin: Origin, fetcher: Fetcher) -> None:
    origin.routes["/a"] = sends()
    strict = Fetcher(MediaHostPolicy(allow_private=False, listening_on_loopback=True), version="0")
    assert (await refusal(strict, origin.url("/a", "localhost"))).startswith("media host 'localhost' resolves to")
    assert origin.connections == 0
    await strict.close()
    assert (await fetch(fetcher, origin.url("/a", "localhost"))).nbytes == len(BODY)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "0x7f.1", "2130706433", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0", "127.0.0.1."],
)
async def test_no_spelling_of_loopback_gets_past(origin: Origin, fetcher: Fetcher, host: str) -> None:
    origin.routes["/a"] = sends()
    message = await refusal(fetcher, origin.url("/a", host), outside=True)
    assert "which media is not fetched from unless private media hosts are allowed" in message
    assert origin.connections == 0
    if ":" not in host:
        assert (await fetch(fetcher, origin.url("/a", host))).nbytes == len(BODY)


async def test_the_socket_itself_is_checked(origin: Origin) -> None:
    """Even for a host that got past every earlier check: aiohttp asks no resolver for an address."""
    fetcher = Fetcher(MediaHostPolicy(allow_private=False, listening_on_loopback=True), version="0")
    with pytest.raises(OSError, match="Cannot connect"):
        await fetcher._session(False).get(origin.url("/a"))
    assert origin.connections == 0
    await fetcher.close()


async def test_a_connection_from_inside_does_not_serve_the_outside(origin: Origin) -> None:
    fetcher = Fetcher(OPEN, version="0", resolve=Names(media_test=[["127.0.0.1"]]))
    origin.routes["/a"] = sends()
    url = origin.url("/a", "media.test")
    await fetch(fetcher, url)
    assert "resolves to an address" in await refusal(fetcher, url, outside=True)
    await fetch(fetcher, url)
    assert origin.connections == 1 and len(origin.requests) == 2
    await fetcher.close()


async def test_the_domain_list_holds_for_every_hop(origin: Origin) -> None:
    names = Names(media_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    policy = MediaHostPolicy(allow_private=True, listening_on_loopback=False, allowed_domains=frozenset({"media.test"}))
    fetcher = Fetcher(policy, version="0", resolve=names)
    origin.routes |= {"/a": sends(), "/b": redirects(origin.url("/a", "other.test"))}
    await fetch(fetcher, origin.url("/a", "Media.Test"))
    for url in (origin.url("/b", "media.test"), origin.url("/a", "other.test")):
        assert await refusal(fetcher, url) == "media host 'other.test' is not an allowed media domain"
    for host in ("media.test.", "sub.media.test", "127.0.0.1"):
        assert "is not an allowed media domain" in await refusal(fetcher, origin.url("/a", host))
    assert names.asked == ["media.test"]
    await fetcher.close()


async def test_a_slow_look_up_is_under_the_deadline() -> None:
    looking = asyncio.Event()

    async def never(host: str, port: int) -> Sequence[str]:
        looking.set()
        await asyncio.sleep(60)
        return []

    fetcher = Fetcher(OPEN, version="0", resolve=never)
    message = await refusal(fetcher, "http://media.test/a", deadline_s=0.1)
    assert looking.is_set() and message == "media fetch of http://media.test/a timed out after 0.1s"
    await fetcher.close()


# -- TLS --------------------------------------------------------------------------------------------------------------


async def test_certificates_are_verified_for_the_name_not_the_address() -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    seen: list[str | None] = []
    server.sni_callback = lambda connection, name, context: seen.append(name)
    trusting = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
    names = Names(media_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    async with running(tls=server) as origin:
        origin.routes["/a"] = sends()
        fetcher = Fetcher(OPEN, version="0", resolve=names, tls=trusting)
        assert (await fetch(fetcher, origin.url("/a", "media.test", "https"))).nbytes == len(BODY)
        message = await refusal(fetcher, origin.url("/a", "other.test", "https"))
        assert message.endswith("failed: the host's certificate cannot be verified")
        await fetcher.close()
        strict = Fetcher(OPEN, version="0", resolve=names)
        message = await refusal(strict, origin.url("/a", "media.test", "https"))
        assert message.endswith("failed: the host's certificate cannot be verified")
        await strict.close()
        assert len(origin.requests) == 1 and seen == ["media.test", "other.test", "media.test"]


async def test_a_host_that_speaks_no_tls(fetcher: Fetcher) -> None:
    async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.example.com ready\r\n")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(greets, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/a"
    assert await refusal(fetcher, url) == f"media fetch of {url} failed: no secure connection could be made"
    server.close()
    await server.wait_closed()
