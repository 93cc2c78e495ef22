"""Media bytes into the shared mapping: data URLs copied, http(s) URLs fetched, once per distinct item.

The spans of a request are reserved together, in the arena of inputs, when all its bytes are here.  Base64 is not
decoded here: the text goes into the span as it is and a pool process decodes it in place.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from engines.base import Modality
from pipeline.admission import Bodies, Grant
from pipeline.config import Config
from pipeline.dataurl import DataUrl, HttpUrl, parse_data_url, split_media_url
from pipeline.errors import FetchCause, GatewayError
from pipeline.fetch import Fetched, Fetcher
from pipeline.models.base import Hints, MediaError
from pipeline.plan import MediaPart
from pipeline.ticket import Ticket
from pool.arena import Arena
from pool.spans import ArenaTooSmall, Lease, Span

COPY_SLICE = 4 << 20  # bytes copied between two turns of the loop: about a millisecond


class Item(msgspec.Struct, frozen=True):
    """A distinct media item of a request: `positions` are its places in prompt order, the first one names it in
    errors.
    """

    positions: tuple[int, ...]
    modality: Modality
    hints: Hints
    source: Span
    base64: bool


class Intake(msgspec.Struct, frozen=True):
    """The request's distinct items and the lease of their spans."""

    items: tuple[Item, ...]
    lease: Lease


def failed(error: MediaError | str, item: int, cause: FetchCause | None = None) -> GatewayError:
    message = f"Multimodal processing failed: {error}"
    return GatewayError("multimodal_processing_failed", message, item=item, cause=cause)


def distinct(parts: Sequence[MediaPart]) -> list[tuple[MediaPart, tuple[int, ...]]]:
    """Parts that name the same media with the same settings, once, with all their positions."""
    if len(parts) == 1:
        return [(parts[0], (0,))]
    groups: dict[tuple[object, ...], list[tuple[MediaPart, list[int]]]] = {}
    ordered: list[tuple[MediaPart, list[int]]] = []
    for position, part in enumerate(parts):
        # The ends of a URL sort it; whole URLs, which may be megabytes, are compared only where both ends agree.
        ends = (bytes(part.url[:64]), bytes(part.url[-256:]))
        rough = (part.modality, part.hints, part.is_bare_base64, len(part.url), *ends)
        same = groups.setdefault(rough, [])
        for known, positions in same:
            if known.url == part.url:
                positions.append(position)
                break
        else:
            entry = (part, [position])
            same.append(entry)
            ordered.append(entry)
    return [(part, tuple(positions)) for part, positions in ordered]


class Receiver:
    """Brings the bytes of a request's media into spans."""

    def __init__(self, config: Config, fetcher: Fetcher, inputs: Arena, bodies: Bodies) -> None:
        self._max_bytes = {
            Modality.IMAGE: config.media.image_max_input_bytes,
            Modality.VIDEO: config.media.video_max_input_bytes,
            Modality.AUDIO: config.media.audio_max_input_bytes,
        }
        self._per_request = config.media.max_fetches_per_request
        self._deadline_s = config.media.fetch_timeout_s
        self._fetcher = fetcher
        self._inputs = inputs
        self._bodies = bodies

    def max_bytes(self, modality: Modality) -> int:
        return self._max_bytes[modality]

    async def take_in(self, parts: Sequence[MediaPart], ticket: Ticket) -> Intake:
        """Fetch what must be fetched and copy everything into spans; the lease is in the ticket's `inputs` custody.

        Raises `multimodal_processing_failed` with the item's index, `multimodal_payload_too_large`.
        """
        with ticket.stage("fetch"):
            return await self._take_in(parts, ticket)

    async def _take_in(self, parts: Sequence[MediaPart], ticket: Ticket) -> Intake:
        groups = distinct(parts)
        payloads = await self._collect(groups, ticket)
        lease = await self.reserve([payload.nbytes for payload in payloads], ticket)
        items = []
        for index, ((part, positions), payload) in enumerate(zip(groups, payloads, strict=True)):
            await _copy(payload, lease.view(index))
            span = lease.spans[index]
            source = Span(offset=span.offset, nbytes=payload.nbytes)
            items.append(Item(positions, part.modality, part.hints, source, payload.base64))
        for payload in payloads:
            payload.forget()
        return Intake(tuple(items), lease)

    async def reserve(self, sizes: Sequence[int], ticket: Ticket) -> Lease:
        """Spans for encoded media of so many bytes, in the ticket's `inputs` custody; waits for its turn.

        Raises `multimodal_payload_too_large`.
        """
        try:
            lease = await self._inputs.reserve([max(1, nbytes) for nbytes in sizes])
        except ArenaTooSmall as error:
            raise GatewayError(
                "multimodal_payload_too_large",
                f"the request's media take {error.needed} bytes, "
                f"more than the {error.size} bytes this gateway has for inputs",
            ) from None
        ticket.inputs.keep(lease.release)
        return lease

    async def _collect(self, groups: Sequence[tuple[MediaPart, tuple[int, ...]]], ticket: Ticket) -> list["Payload"]:
        """Every item's payload; fetches run side by side, and the first failure ends the others."""
        places = asyncio.Semaphore(self._per_request)
        found: list[Payload | None] = [None] * len(groups)
        fetches: dict[asyncio.Task[Payload], int] = {}
        try:
            for index, (part, positions) in enumerate(groups):
                try:
                    kind = split_media_url(part.url) if not part.is_bare_base64 else memoryview(part.url)
                    if isinstance(kind, memoryview):
                        found[index] = self._inline(kind, part.modality)
                    elif isinstance(kind, DataUrl):
                        found[index] = self._inline(parse_data_url(kind.url), part.modality)
                    else:
                        fetch = self._fetch(kind, part.modality, places, ticket)
                        fetches[asyncio.create_task(fetch)] = index
                except MediaError as error:
                    raise failed(error, positions[0]) from None
            if fetches:
                await asyncio.wait(fetches, return_when=asyncio.FIRST_EXCEPTION)
            for task, index in fetches.items():
                if task.done():
                    found[index] = _result(task, groups[index][1][0])
        finally:
            for task in fetches:
                task.cancel()
            if fetches:
                await asyncio.wait(fetches)
        return [payload for payload in found if payload is not None]

    def _inline(self, text: memoryview, modality: Modality) -> "Payload":
        """`text`: base64."""
        limit = self.max_bytes(modality)
        # Longer than the limit's base64 text even when a third of it were line breaks: refused before it is copied.
        if len(text) > 2 * limit + 1024:
            raise MediaError(f"{modality.value} input payload exceeds the maximum size of {limit} bytes")
        return Payload([text], base64=True)

    async def _fetch(self, url: HttpUrl, modality: Modality, places: asyncio.Semaphore, ticket: Ticket) -> "Payload":
        grant = self._bodies.begin()
        ticket.custody.keep(grant.release)
        arrived = 0

        def account(nbytes: int) -> None:
            nonlocal arrived
            arrived += nbytes
            self._bodies.grow(grant, arrived)

        fetched = await self._fetcher.fetch(
            url.url,
            modality=modality,
            max_bytes=self.max_bytes(modality),
            deadline_s=self._deadline_s,
            outside=ticket.outside,
            slots=places,
            account=account,
        )
        return Payload.of_fetched(fetched, grant)


class Payload:
    """One item's bytes in pieces, before they are copied into its span."""

    def __init__(self, pieces: Sequence[memoryview | bytes], *, base64: bool, grant: Grant | None = None) -> None:
        self.pieces: Sequence[memoryview | bytes] = pieces
        self.base64 = base64
        self.nbytes = sum(len(piece) for piece in pieces)
        self._grant = grant

    @classmethod
    def of_fetched(cls, fetched: Fetched, grant: Grant) -> "Payload":
        return cls(fetched.pieces, base64=False, grant=grant)

    def forget(self) -> None:
        """The bytes are in their span: drop ours and give their budget back."""
        self.pieces = ()
        if self._grant is not None:
            self._grant.release()


def _result(task: "asyncio.Task[Payload]", item: int) -> Payload:
    error = task.exception() if not task.cancelled() else None
    if isinstance(error, GatewayError) and error.item is None and error.code == "multimodal_processing_failed":
        raise failed(error.message, item, error.cause)
    return task.result()


async def _copy(payload: Payload, target: memoryview) -> None:
    at = 0
    for piece in payload.pieces:
        for begin in range(0, len(piece), COPY_SLICE):
            part = piece[begin : begin + COPY_SLICE]
            target[at : at + len(part)] = part
            at += len(part)
            if at > COPY_SLICE:
                await asyncio.sleep(0)
