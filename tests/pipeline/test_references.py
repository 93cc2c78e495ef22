"""URLs on their way to a worker: verbatim, in order, each checked as far as that can be done without fetching."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import EngineError, MediaReference, Modality
from pipeline.address import MediaHostPolicy
from pipeline.dataurl import payload_bytes
from pipeline.errors import GatewayError, engine_failure, without_payloads
from pipeline.intake import COPY_SLICE, Receiver
from pipeline.models.base import Anchor
from pipeline.plan import MediaPart
from pipeline.references import Forwarder, marks_of
from pipeline.ticket import Ticket
from pool.arena import Arena
from pool.mapping import PAGE, Mapping

LIMIT = 1000
OPEN = MediaHostPolicy(allow_private=True, listening_on_loopback=True)
DATA = b"data:image/png;base64,iVBORw0KGgo="


class Desk:
    """A forwarder over an arena of its own."""

    def __init__(self, policy: MediaHostPolicy = OPEN, *, pages: int = 16, limit: int = LIMIT) -> None:
        self.arena = Arena(Mapping(pages * PAGE), 0, pages * PAGE, keep_bytes=0)
        media = SimpleNamespace(
            image_max_input_bytes=limit,
            video_max_input_bytes=2 * limit,
            audio_max_input_bytes=limit,
            max_fetches_per_request=1,
            fetch_timeout_s=1.0,
        )
        receiver = Receiver(cast(Any, SimpleNamespace(media=media)), cast(Any, None), self.arena, cast(Any, None))
        self.forwarder = Forwarder(policy, receiver)
        self.ticket = Ticket("id", "/")

    async def forward(self, *parts: MediaPart, outside: bool = False) -> tuple[MediaReference, ...]:
        self.ticket.outside = outside
        return await self.forwarder.take_over(parts, self.ticket)

    async def refusal(self, *parts: MediaPart, outside: bool = False) -> GatewayError:
        with pytest.raises(GatewayError) as refused:
            await self.forward(*parts, outside=outside)
        self.ticket.custody.close()
        assert self.arena.used == 0
        return refused.value


Make = Callable[..., Desk]


@pytest.fixture
def make() -> Iterator[Make]:
    """Desks; when the test is over nothing is left in their arenas."""
    made: list[Desk] = []

    def desk(*args: Any, **settings: Any) -> Desk:
        made.append(Desk(*args, **settings))
        return made[-1]

    yield desk
    for one in made:
        one.ticket.custody.close()
        assert one.arena.used == 0


def picture(url: bytes | memoryview, **fields: Any) -> MediaPart:
    return MediaPart(Modality.IMAGE, url, **fields)


def written(reference: MediaReference) -> bytes:
    return b"".join(reference.url)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        (DATA, "data"),
        (b"DATA:;base64,QUJD", "data"),
        (b"data:image/png;base64,@@@@", "data"),  # the worker decodes it, and refuses it
        (b"data:text/plain,hello", "data"),
        (b"http://host/a.png?x=1#f", "http"),
        (b"HTTPS://User:pw@Host:8443/%41/../b", "https"),
        ("http://host/図.png".encode(), "http"),
        (b"file:///srv/media/a.png", "file"),
        (b"s3://bucket/a.png", "s3"),
        (b"cat.png", ""),
        (b"//host/a.png", ""),
    ],
)
async def test_verbatim(make: Make, url: bytes, scheme: str) -> None:
    desk = make()
    for sent in (url, b" \r\n" + url + (b"" if scheme == "data" else b"\t ")):
        (reference,) = await desk.forward(picture(sent))
        assert (written(reference), reference.scheme, reference.modality) == (url, scheme, Modality.IMAGE)
        assert reference.nbytes == len(url)


async def test_order_and_modalities(make: Make) -> None:
    urls = [b"http://host/1", DATA, b"http://host/2", DATA, b"http://host/1"]
    kinds = [Modality.IMAGE, Modality.IMAGE, Modality.VIDEO, Modality.VIDEO, Modality.IMAGE]
    desk = make()
    found = await desk.forward(*map(MediaPart, kinds, urls))
    assert [written(reference) for reference in found] == urls
    assert [reference.modality for reference in found] == kinds


async def test_data_urls_lie_in_the_input_arena_until_they_are_free(make: Make) -> None:
    desk = make()
    body = bytearray(b'"' + DATA + b'"')
    (first, again, other) = await desk.forward(
        picture(memoryview(body)[1:-1]), picture(DATA), picture(b"http://host/a.png")
    )
    body[:] = bytes(len(body))  # the body is gone
    assert written(first) == written(again) == DATA and desk.arena.used == PAGE, "one place for equal ones"
    assert isinstance(other.url[0], bytes)
    desk.ticket.dispatched()
    desk.ticket.custody.close()
    assert desk.arena.used == PAGE, "the worker may still read it"
    desk.ticket.media_free(True)


async def test_nothing_is_reserved_for_web_addresses(make: Make) -> None:
    desk = make()
    taken = desk.arena.try_reserve([16 * PAGE])
    (reference,) = await desk.forward(picture(b"http://host/a.png"))
    assert written(reference) == b"http://host/a.png" and taken is not None
    taken.release()


@pytest.mark.parametrize(
    ("media_type", "head"),
    [
        ("image/png", b"data:image/png;base64,"),
        ("image/svg+xml", b"data:image/svg+xml;base64,"),
        ("", b"data:application/octet-stream;base64,"),
        ("image/png;base64,x", b"data:application/octet-stream;base64,"),
        ("video/j\u00e9pg", b"data:application/octet-stream;base64,"),
    ],
)
async def test_bare_base64_becomes_a_data_url(make: Make, media_type: str, head: bytes) -> None:
    desk = make()
    (reference,) = await desk.forward(picture(b"iVBORw0KGgo=", is_bare_base64=True, media_type=media_type))
    assert written(reference) == head + b"iVBORw0KGgo=" and reference.scheme == "data"


@pytest.mark.parametrize(
    ("part", "nbytes"),
    [
        (picture(b"data:;base64," + b"A" * 1340), 1005),
        (picture(b"data:image/png," + b"A" * 1001), 1001),
        (picture(b"data:" + b"A" * 1000), 1005),  # no comma: all of it
        (picture(b"A" * 1340, is_bare_base64=True), 1005),
        (MediaPart(Modality.VIDEO, b"data:;base64," + b"A" * 2668), 2001),
    ],
)
async def test_too_large(make: Make, part: MediaPart, nbytes: int) -> None:
    limit = LIMIT * (2 if part.modality is Modality.VIDEO else 1)
    error = await make().refusal(picture(b"http://host/a.png"), part)
    assert (error.code, error.status, error.item) == ("media_ref_too_large", 400, 1)
    assert error.message == f"media item 1: inline payload is {nbytes} bytes, above the {limit}-byte cap"


@given(st.integers(0, 4000))
def test_sizes_as_smg_reckons_them(letters: int) -> None:
    assert payload_bytes(b"data:image/png;base64," + b"A" * letters) == letters * 3 // 4
    assert payload_bytes(b"data:image/png," + b"A" * letters) == letters


async def test_at_the_limit(make: Make) -> None:
    (reference,) = await make().forward(picture(b"data:;base64," + b"A" * 1334))  # 1000 and a half
    assert reference.nbytes == 1347


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (b"", "media URL is empty"),
        (b" \n", "media URL is empty"),
        (b"http://" + b"a" * 65536, "is longer than 65536"),
        (b"A" * 65537, "is longer than 65536"),
        (b"http://\xff/", "not UTF-8 text"),
        (b"file:///\xff", "not UTF-8 text"),
        (b"data:image/png;base64,\xc3\xa9", "not ASCII"),
        (b"file:///a b", "white space or control characters"),
        (b"ht\ntp://host/", "white space or control characters"),
        (b"\x01http://host/", "white space or control characters"),
        (b"http://host/\x00", "not a valid http or https URL"),
        (b"http://good.example\\@evil.example/", "ambiguous host"),
        (b"http://good.example@bad@evil.example/", "ambiguous host"),
        (b"http:///path", "has no host"),
    ],
)
async def test_what_two_parsers_might_read_in_two_ways(make: Make, url: bytes, words: str) -> None:
    error = await make(limit=1 << 20).refusal(picture(DATA), picture(url))
    assert (error.code, error.item) == ("multimodal_processing_failed", 1)
    assert words in error.message and len(error.message) < 200


LISTED = MediaHostPolicy(
    allow_private=None, listening_on_loopback=True, allowed_domains=frozenset({"good.example", "127.0.0.1"})
)
UNLISTED = MediaHostPolicy(allow_private=None, listening_on_loopback=True)


@pytest.mark.parametrize(
    ("policy", "url", "outside", "words"),
    [
        (LISTED, b"http://evil.example/a.png", False, "is not an allowed media domain"),
        (LISTED, b"https://good.example.evil.example/", False, "is not an allowed media domain"),
        (LISTED, b"http://127.0.0.1/", True, "is a loopback address"),
        (UNLISTED, b"http://169.254.169.254/latest/", False, "is a cloud metadata address"),
        (UNLISTED, b"http://2852039166/latest/", False, "is a cloud metadata address"),
        (UNLISTED, b"http://[fe80::1]/", False, "is a link-local address"),
        (UNLISTED, b"http://10.0.0.1/", True, "is a private address"),
        (UNLISTED, b"http://localhost:8080/", True, "is a loopback address"),
    ],
)
async def test_hosts_are_held_to_our_rule(
    make: Make, policy: MediaHostPolicy, url: bytes, outside: bool, words: str
) -> None:
    error = await make(policy).refusal(picture(DATA), picture(url), outside=outside)
    assert (error.code, error.status, error.item) == ("multimodal_processing_failed", 400, 1)
    assert error.message.startswith("media item 1: Multimodal processing failed: media host") and words in error.message


@pytest.mark.parametrize(
    ("policy", "url"),
    [
        (LISTED, b"http://good.example/a.png"),
        (LISTED, b"HTTPS://GOOD.example:8443/"),
        (LISTED, b"http://127.0.0.1:9/a.png"),
        (LISTED, DATA),
        (LISTED, b"file:///srv/a.png"),  # no host; whether it is fetched is the worker's to say
        (UNLISTED, b"http://10.0.0.1/"),
        (UNLISTED, b"http://any.example/"),  # what it resolves to is the worker's affair
    ],
)
async def test_hosts_that_may_be_named(make: Make, policy: MediaHostPolicy, url: bytes) -> None:
    (reference,) = await make(policy).forward(picture(url))
    assert written(reference) == url


async def test_a_large_one_lets_others_have_their_turn(make: Make) -> None:
    size = 3 * COPY_SLICE + 17
    desk = make(pages=size // PAGE + 2, limit=size)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    url = b"data:;base64," + bytes(range(48, 58)) * (size // 10)
    (reference,) = await desk.forward(picture(url))
    task.cancel()
    assert written(reference) == url and turns >= 3


async def test_more_than_there_is_room_for(make: Make) -> None:
    error = await make(pages=1, limit=1 << 20).refusal(picture(b"data:;base64," + b"A" * 2 * PAGE))
    assert (error.code, error.status) == ("multimodal_payload_too_large", 413)


async def test_where_they_stand(make: Make) -> None:
    """Each at its anchor, by a name that is the same for the same URL; two modalities may share a token."""
    urls = [b"http://host/1", DATA, b"http://host/1", b"data:;base64," + b"A" * 1000, b"data:;base64," + b"B" * 1000]
    kinds = [Modality.IMAGE, Modality.VIDEO, Modality.IMAGE, Modality.IMAGE, Modality.VIDEO]
    found = await make().forward(*map(MediaPart, kinds, urls))
    ids = [5, 8, 9, 8, 7, 8, 9, 1]
    anchors = {Modality.IMAGE: Anchor(8, "i"), Modality.VIDEO: Anchor(9, "v")}
    marks = marks_of(found, ids, anchors)
    assert [mark.offset for mark in marks] == [1, 2, 3, 5, 6] and {mark.length for mark in marks} == {1}
    names = [mark.content_hash for mark in marks]
    assert names[0] == names[2] and len(set(names)) == 4
    shared = {Modality.IMAGE: Anchor(8, "i"), Modality.VIDEO: Anchor(8, "i")}
    assert [mark.offset for mark in marks_of(found[:3], ids, shared)] == [1, 3, 5]


@settings(max_examples=60)
@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
async def test_whatever_comes_is_forwarded_as_text_or_refused_by_name(raw: bytes) -> None:
    desk = Desk()
    try:
        (reference,) = await desk.forward(picture(raw))
    except GatewayError as error:
        assert error.item == 0 and error.code in ("multimodal_processing_failed", "media_ref_too_large")
    else:
        assert written(reference).decode() == raw.decode().strip(" \t\r\n") or reference.scheme == "data"
        assert written(reference) in raw
    desk.ticket.custody.close()
    assert desk.arena.used == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("media_refs[0]: fetch failed: http://h/a?token=1#x", "media_refs[0]: fetch failed: http://h/a"),
        (f"bad url '{DATA.decode()}' here", "bad url 'data:...' here"),
        ("DATA:;base64,QUJD", "data:..."),
        ("data:,plain", "data:..."),
        ("Invalid base64 data: Incorrect padding, sorry", "Invalid base64 data: Incorrect padding, sorry"),
        ("media_too_large: 600 bytes", "media_too_large: 600 bytes"),
        ("url=https://h/" + "a" * 500 + " end", "url=https://h/" + "a" * 190 + "..." + " end"),
    ],
)
def test_urls_in_what_a_worker_says(said: str, told: str) -> None:
    assert without_payloads(said) == told
    failure = engine_failure(EngineError("INVALID_ARGUMENT", said))
    assert failure.message == f"Failed to start generation: {told}" and failure.status == 400
