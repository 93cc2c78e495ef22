"""Fetches media over HTTP for one item: bounded in bytes, in time and in whom it may reach.

What is connected to is what was checked: names are resolved here, every address of the answer is checked, and the
socket is made for a checked address only (the host name stays for TLS and the Host header).  Redirects are followed
by hand, each as strictly as the first URL.  Two pools of connections are kept, for requests from inside and from
outside, since a connection made under the looser rule must not serve the stricter one.  Content type and content
coding are not looked at: the bytes decide.  Nothing is taken from the environment: no proxy (an address policy cannot
see through one), no netrc, no cookies.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import msgspec
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from engines.base import Modality
from pipeline.address import MediaHostPolicy
from pipeline.errors import FetchCause, GatewayError
from pipeline.httpurl import HttpTarget, join_location, parse_http_url

_log = logging.getLogger(__name__)

MOST_REDIRECTS = 10
_TRANSIENT = frozenset({408, 429})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SMALL = 16 * 1024  # pieces below are joined: a body of tiny chunks must not cost an object each
_JOINED = 64 * 1024
_IDLE_S = 5.0
_LOOKUP_THREADS = 16

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # host, port -> addresses; OSError when there are none


class Fetched(msgspec.Struct, frozen=True):
    """The body as it arrived: `pieces` joined are `nbytes` long; each has 16 to a few hundred KiB, but for the last."""

    nbytes: int
    pieces: list[bytes]


class Fetcher:
    """All fetches of a gateway.  Made anywhere, used on one event loop, closed there.

    `slots`: fetches at a time.  `resolve`: how names become addresses (the system's resolver in threads of its own,
    so that slow name servers hold up nothing else).
    """

    def __init__(
        self,
        policy: MediaHostPolicy,
        *,
        version: str,
        slots: int = 128,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        self._user_agent = f"mediagate/{version}"
        self._slots = asyncio.Semaphore(slots)
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, "lookup")
        self._resolve = resolve or self._look_up
        self._tls = tls
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def fetch(
        self,
        url: str,
        *,
        modality: Modality,
        max_bytes: int,
        deadline_s: float = 10.0,
        outside: bool = False,
        slots: asyncio.Semaphore | None = None,
        account: Callable[[int], None] | None = None,
    ) -> Fetched:
        """The body of `url`, at most `max_bytes`.

        `deadline_s` covers everything from the first look-up to the last byte, redirects included, but not the wait
        for a free slot.  `outside`: the request came through a proxy.  `slots`: the request's own limit on fetches at
        a time.  `account` is called with the size of what arrived before it is kept, may raise to stop the fetch, and
        keeps its own count to give back.  Every failure of the fetch is a GatewayError `multimodal_processing_failed`
        without an item.
        """
        target = parse_http_url(url)
        async with slots or contextlib.nullcontext(), self._slots:
            try:
                async with asyncio.timeout(deadline_s) as clock:
                    return await self._follow(target, modality, max_bytes, outside, account)
            except TimeoutError:
                if not clock.expired():
                    raise _unavailable(target, "the connection timed out") from None
                raise _refused(
                    f"media fetch of {target.shown} timed out after {deadline_s:g}s", "unavailable"
                ) from None

    async def close(self) -> None:
        """Close idle connections; fetches that run are cut."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        for session in sessions:
            await session.close()
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _follow(
        self,
        first: HttpTarget,
        modality: Modality,
        max_bytes: int,
        outside: bool,
        account: Callable[[int], None] | None,
    ) -> Fetched:
        session = self._session(outside)
        target = first
        for _ in range(MOST_REDIRECTS + 1):
            self._policy.check_host(target.host)
            if target.address is not None:
                self._policy.check_literal_address(target.host, target.address, outside=outside)
            # Credentials go to the origin they were written for, and to no other.
            headers = _login(first) if target.origin == first.origin else {}
            try:
                url = yarl.URL(target.url, encoded=True)
                response = await session.get(url, allow_redirects=False, headers=headers)
                try:
                    if response.status not in _REDIRECTS or "Location" not in response.headers:
                        return await _read(response, first, modality, max_bytes, account)
                finally:
                    response.close()  # a body read to its end has given its connection back already
            except (aiohttp.ClientError, OSError, ValueError) as error:
                if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                    raise
                raise self._translated(first, target, error) from None
            target = join_location(target, response.headers["Location"])
        raise _refused(f"media fetch of {first.shown} was redirected more than {MOST_REDIRECTS} times")

    def _session(self, outside: bool) -> aiohttp.ClientSession:
        session = self._sessions.get(outside)
        if session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                resolver=_CheckedResolver(self._policy, self._resolve, outside),
                socket_factory=lambda info: self._open_socket(info, outside),
                keepalive_timeout=_IDLE_S,
                ssl=self._tls or True,
            )
            session = self._sessions[outside] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": self._user_agent, "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
                auto_decompress=False,
                trust_env=False,
            )
        return session

    def _open_socket(self, info: aiohttp.AddrInfoType, outside: bool) -> socket.socket:
        """The last look, at the very address that is connected to: nothing may have come here another way."""
        family, kind, protocol, _, name = info
        if not self._policy.permits(ipaddress.ip_address(str(name[0]).split("%")[0]), outside=outside):
            raise OSError("address not permitted")
        return socket.socket(family, kind, protocol)

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._lookups,
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG),
        )
        return [str(name[0]) for *_, name in found]

    def _translated(self, first: HttpTarget, target: HttpTarget, error: Exception) -> GatewayError:
        """For the client without addresses and foreign text, for the log with them."""
        _log.info("media fetch of %s: %s: %r", first.shown, target.shown, error)
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return _refused(f"media host '{target.host}' cannot be resolved", "unavailable")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return _failed(first, "the host's certificate cannot be verified")
        if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
            return _unavailable(first, "no secure connection could be made")
        if isinstance(error, aiohttp.ClientConnectorError):
            return _unavailable(first, "the host cannot be connected to")
        if isinstance(error, aiohttp.ClientPayloadError):
            return _unavailable(first, "the body ended before it was complete")
        if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
            return _unavailable(first, "the host closed the connection")
        return _failed(first, "the host's answer is not valid HTTP")


class _CheckedResolver(AbstractResolver):
    """Resolves and checks in one step; refuses a name when any of its addresses is refused."""

    def __init__(self, policy: MediaHostPolicy, resolve: Resolve, outside: bool) -> None:
        self._policy = policy
        self._resolve = resolve
        self._outside = outside

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        try:
            found = [ipaddress.ip_address(text.split("%")[0]) for text in await self._resolve(host, port)]
        except UnicodeError as error:  # a name no look-up takes
            raise OSError(str(error)) from None
        if not found:
            raise OSError(f"no address of {host}")
        for address in found:
            self._policy.check_address(host, address, outside=self._outside)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in dict.fromkeys(found)
        ]

    async def close(self) -> None:
        """Nothing of its own to close."""


def _login(target: HttpTarget) -> dict[str, str]:
    if target.credentials is None:
        return {}
    return {"Authorization": aiohttp.encode_basic_auth(*target.credentials, encoding="utf-8")}


async def _read(
    response: aiohttp.ClientResponse,
    target: HttpTarget,
    modality: Modality,
    max_bytes: int,
    account: Callable[[int], None] | None,
) -> Fetched:
    if not 200 <= response.status < 300:
        told = _unavailable if response.status in _TRANSIENT or response.status >= 500 else _failed
        raise told(target, f"the host answered with status {response.status}")
    if (response.content_length or 0) > max_bytes:
        raise _too_large(modality, max_bytes)
    pieces: list[bytes] = []
    small = bytearray()
    total = 0
    while piece := await response.content.readany():
        total += len(piece)
        if total > max_bytes:
            raise _too_large(modality, max_bytes)
        if account is not None:
            account(len(piece))
        if len(piece) < _SMALL:
            small += piece
            if len(small) < _JOINED:
                continue
            piece = b""
        if small:
            pieces.append(bytes(small))
            small.clear()
        if piece:
            pieces.append(piece)
    if small:
        pieces.append(bytes(small))
    if not total:
        raise _failed(target, "the body is empty")
    return Fetched(total, pieces)


def _too_large(modality: Modality, max_bytes: int) -> GatewayError:
    return _refused(f"{modality.value} input payload exceeds the maximum size of {max_bytes} bytes")


def _failed(target: HttpTarget, why: str) -> GatewayError:
    return _refused(f"media fetch of {target.shown} failed: {why}")


def _unavailable(target: HttpTarget, why: str) -> GatewayError:
    return _refused(f"media fetch of {target.shown} failed: {why}", "unavailable")


def _refused(message: str, cause: FetchCause = "failed") -> GatewayError:
    return GatewayError("multimodal_processing_failed", message, cause=cause)
