"""Media references: a request's URLs as they are sent to a worker that fetches and processes the media itself.

What is forwarded is what the client wrote, white space around it taken off.  It is checked as far as that can be done
without fetching: a data URL by its size, a web address by the gateway's own rule for media hosts (its list of domains,
and a literal address; what a name resolves to is the worker's affair), everything for being one text that two parsers
cannot read in two ways.  Which schemes a worker takes is known once it is chosen (`engines.worker`).  Data URLs are
copied into the input arena, so that the body can go; they stay there until the worker has begun to answer.
"""

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from engines.affinity import Mark
from engines.base import MediaReference, Modality
from pipeline.address import MediaHostPolicy
from pipeline.dataurl import DataUrl, HttpUrl, payload_bytes, split_url, url_text
from pipeline.errors import GatewayError
from pipeline.intake import COPY_SLICE, Receiver, distinct, failed
from pipeline.models.base import Anchor, MediaError
from pipeline.plan import MediaPart
from pipeline.prompt import positions
from pipeline.ticket import Ticket

_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,100}/[\w.+-]{1,100}", re.ASCII)
_PIECE = 64 << 10
_LONG = 512  # bytes
_UNSAID = "application/octet-stream"


class _Inline(msgspec.Struct, frozen=True):
    """A data URL that is still in the body; `head`: what the client left out of it.  `item`: its index."""

    modality: Modality
    item: int
    text: memoryview
    head: bytes = b""


class Forwarder:
    """Checks a request's URLs and brings them where they can wait for a worker."""

    def __init__(self, policy: MediaHostPolicy, receiver: Receiver) -> None:
        self._policy = policy
        self._receiver = receiver

    async def take_over(self, parts: Sequence[MediaPart], ticket: Ticket) -> tuple[MediaReference, ...]:
        """One reference for each part, in their order; what holds their bytes is in the ticket's `inputs` custody.

        Raises `media_ref_too_large` and `multimodal_processing_failed` with the item's index,
        `multimodal_payload_too_large`.
        """
        with ticket.stage("fetch"):
            groups = distinct(parts)
            checked = [self._checked(part, positions[0], ticket) for part, positions in groups]
            copies = iter(await self._copied([one for one in checked if isinstance(one, _Inline)], ticket))
        references = [next(copies) if isinstance(one, _Inline) else one for one in checked]
        by_position = {
            position: reference
            for (_, positions), reference in zip(groups, references, strict=True)
            for position in positions
        }
        return tuple(by_position[position] for position in range(len(parts)))

    async def _copied(self, urls: Sequence[_Inline], ticket: Ticket) -> list[MediaReference]:
        if not urls:
            return []
        lease = await self._receiver.reserve([len(url.text) for url in urls], ticket)
        found = []
        for index, url in enumerate(urls):
            view = lease.view(index)[: len(url.text)]
            await _copy(url.text, view, url.item)
            found.append(MediaReference(url.modality, (url.head, view), "data"))
        return found

    def _checked(self, part: MediaPart, item: int, ticket: Ticket) -> _Inline | MediaReference:
        try:
            if part.is_bare_base64:
                known = _MEDIA_TYPE.fullmatch(part.media_type)
                self._check_size(part.modality, len(part.url) * 3 // 4, item)
                head = f"data:{known[0] if known else _UNSAID};base64,"
                return _Inline(part.modality, item, memoryview(part.url), head.encode())
            url = split_url(part.url)
            if isinstance(url, DataUrl):
                self._check_size(part.modality, payload_bytes(url.url), item)
                return _Inline(part.modality, item, url.url)
            if isinstance(url, HttpUrl):
                self._check_host(url.url, item, outside=ticket.outside)
                return _reference(part.modality, url.url, url.url.partition(":")[0].lower())
            text = url_text(url.url)
            if _CONTROL.search(text):
                raise MediaError("media URL holds white space or control characters")
            return _reference(part.modality, text, url.scheme)
        except MediaError as error:
            raise failed(error, item) from None

    def _check_size(self, modality: Modality, nbytes: int, item: int) -> None:
        limit = self._receiver.max_bytes(modality)
        if nbytes > limit:
            raise GatewayError(
                "media_ref_too_large",
                f"inline payload is {nbytes} bytes, above the {limit}-byte cap",
                item=item,
            )

    def _check_host(self, url: str, item: int, *, outside: bool) -> None:
        try:
            self._policy.check_literal(url, outside=outside)
        except GatewayError as error:
            raise failed(error.message, item) from None


def marks_of(
    references: Sequence[MediaReference], ids: Sequence[int], anchors: Mapping[Modality, Anchor]
) -> list[Mark]:
    """Where each reference stands in the prompt, and a name of it instead of the hash that only its bytes have: the
    same URL goes to the worker that may have it in its encoder cache.
    """
    places = {anchor.token_id: positions(ids, anchor.token_id) for anchor in anchors.values()}
    return [Mark(next(places[anchors[one.modality].token_id]), 1, _name(one)) for one in references]


def _name(reference: MediaReference) -> str:
    """Of a long URL only its length and ends: data URLs are not read for this."""
    url = reference.url[-1]
    ends = bytes(url) if len(url) <= _LONG else b"".join((url[:64], url[-256:]))
    return hashlib.blake2b(b"%d %b" % (reference.nbytes, ends), digest_size=16).hexdigest()


def _reference(modality: Modality, url: str, scheme: str) -> MediaReference:
    return MediaReference(modality, (url.encode(),), scheme)


async def _copy(text: memoryview, target: memoryview, item: int) -> None:
    """In pieces that stay in the processor's cache; other requests get their turn between slices of a large one."""
    for begin in range(0, len(text), _PIECE):
        if begin and begin % COPY_SLICE == 0:
            await asyncio.sleep(0)
        piece = bytes(text[begin : begin + _PIECE])
        if not piece.isascii():  # a message's string must be UTF-8, and base64 is less
            raise failed("data URL holds characters that are not ASCII", item)
        target[begin : begin + len(piece)] = piece
