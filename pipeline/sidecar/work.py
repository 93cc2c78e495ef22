"""One job, in one direction: the steps from a worker's references to the answer it reads.

The same stations as a request's (`pipeline.prepare`), with the same limits: what differs is where the prompt comes from
and where the tensors go.  Each step is a line of `JobWork.run`; what a step takes is in the ticket's custody.
"""

import time
from collections import Counter
from collections.abc import Sequence

from engines.base import Form, Modality
from engines.dispatch import Outlook
from pipeline.encode import Encoder, Look, batches, tensor_bytes
from pipeline.errors import GatewayError
from pipeline.intake import Receiver
from pipeline.plan import MediaPart, ServedModel, check_length
from pipeline.prepare import expanded_prompt
from pipeline.prompt import check_anchors
from pipeline.sidecar.answer import Timing, encode_answer, joined
from pipeline.sidecar.fingerprint import Fingerprint
from pipeline.sidecar.protocol import (
    DECODE_FAILED,
    DOMAIN_NOT_ALLOWED,
    FETCH_FAILED,
    FETCH_UNAVAILABLE,
    FINGERPRINT_MISMATCH,
    LIMIT_EXCEEDED,
    PLACEHOLDER_MISMATCH,
    PROCESSOR_ERROR,
    RESULT_TOO_LARGE,
    SCHEMA_MISMATCH,
    SCHEME_NOT_ACCEPTED,
    SIDECAR_OVERLOADED,
    VERSION,
    Item,
    Job,
    Refusal,
)
from pipeline.ticket import Ticket

SCHEMES = ("http", "https", "data")
_LONGEST_SCHEME = 32

# What a step of the pipeline refuses with -> what the protocol calls it; a failed fetch by its cause.
_CODES = {
    "multimodal_processing_failed": DECODE_FAILED,
    "multimodal_prompt_contract_mismatch": PLACEHOLDER_MISMATCH,
    "multimodal_payload_too_large": RESULT_TOO_LARGE,
    "context_length_exceeded": LIMIT_EXCEEDED,
    "admission_queue_full": SIDECAR_OVERLOADED,
}
_CAUSES = {"host_refused": DOMAIN_NOT_ALLOWED, "unavailable": FETCH_UNAVAILABLE, "failed": FETCH_FAILED}


def refusal_of(error: GatewayError) -> Refusal:
    """What a worker is told of an error of the pipeline: what a client caused is final, what may pass is not."""
    code = _CAUSES[error.cause] if error.cause else _CODES.get(error.code, PROCESSOR_ERROR)
    return Refusal(code, error.message)


class JobWork:
    """The steps, with the stations they need.

    `form`: in what shape the worker's engine takes pixels.  `most_answer_bytes`: an answer as large is not made.
    """

    def __init__(
        self,
        model: ServedModel,
        fingerprint: Fingerprint,
        form: Form,
        receiver: Receiver,
        encoder: Encoder,
        *,
        most_answer_bytes: int,
    ) -> None:
        assert model.family is not None and model.family.vllm_items is not None
        self.fingerprint = fingerprint
        self.most_answer_bytes = most_answer_bytes
        self._model = model
        self._items = model.family.vllm_items
        self._outlook = Outlook(form, by_segment=False, min_segment_bytes=0, workers=())
        self._receiver = receiver
        self._encoder = encoder
        self._limits = {modality: fingerprint.limit(modality.value) for modality in model.anchors}

    async def run(self, job: Job, ticket: Ticket) -> bytearray:
        """The answer.  Raises Refusal."""
        try:
            return await self._run(job, ticket)
        except GatewayError as error:
            raise refusal_of(error) from None

    async def _run(self, job: Job, ticket: Ticket) -> bytearray:
        begun = time.time()
        model, form, ids = self._model, self._outlook.form, job.prompt_token_ids
        self._check_job(job)
        parts = self._parts(job.items)
        self._check_prompt(ids, parts)

        intake = await self._receiver.take_in(parts, ticket)
        fetched = time.time()
        looks = await self._encoder.inspect(model, intake, ticket)
        in_order = _in_order(looks)
        expanded = expanded_prompt(model, ids, in_order)
        check_length(model, len(expanded.ids))
        self._check_answer(sum(tensor_bytes(look, form) for look in in_order))

        pixels = await self._encoder.encode(model, intake, looks, form, self._outlook, ticket)
        timing = Timing(
            queue_ms=max(0, int(begun * 1000) - job.enqueued_ms),
            fetch_ms=int((fetched - begun) * 1000),
            process_ms=int((time.time() - fetched) * 1000),
        )
        message = encode_answer(
            job.job_id,
            self.fingerprint,
            expanded.ids,
            batches(model, pixels, expanded),
            self._items.side,
            timing,
            seconds=self._seconds(in_order),
        )
        self._check_answer(sum(map(len, message)))
        return await joined(message)

    def _check_job(self, job: Job) -> None:
        if job.version != VERSION:
            raise Refusal(SCHEMA_MISMATCH, f"the job is of version {job.version}, this sidecar speaks {VERSION}")
        names = self.fingerprint.mismatches(job.fingerprint)
        if names:
            raise Refusal(FINGERPRINT_MISMATCH, ",".join(names))

    def _parts(self, items: Sequence[Item]) -> list[MediaPart]:
        parts = []
        for index, item in enumerate(items):
            scheme = _scheme(item.url)
            if scheme not in SCHEMES:
                known = ",".join(SCHEMES)
                raise Refusal(SCHEME_NOT_ACCEPTED, f"item {index}: scheme '{scheme or 'none'}' not in {known}")
            modality = _modality(item.modality)
            if modality not in self._limits:
                raise Refusal(LIMIT_EXCEEDED, f"item {index}: this model's media are {self._served()}")
            parts.append(MediaPart(modality, item.url))
        for modality, count in Counter(part.modality for part in parts).items():
            limit = self._limits[modality]
            if count > limit:
                raise Refusal(LIMIT_EXCEEDED, f"at most {limit} {modality.value} items in one prompt; got {count}")
        return parts

    def _served(self) -> str:
        return ", ".join(sorted(modality.value for modality in self._limits))

    def _check_prompt(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> None:
        """No more ids than the window takes, and an anchor for each item."""
        model = self._model
        check_length(model, len(ids))
        counts = Counter(part.modality for part in parts)
        anchors = {**model.anchors, **model.guards}
        check_anchors(ids, {modality: (anchor, counts[modality]) for modality, anchor in anchors.items()})

    def _check_answer(self, nbytes: int) -> None:
        limit = self.most_answer_bytes
        if nbytes >= limit:
            raise Refusal(RESULT_TOO_LARGE, f"the media make an answer of {nbytes} bytes, the limit is {limit}")

    def _seconds(self, looks: Sequence[Look]) -> list[tuple[float, ...]]:
        if not self._items.times:
            return []
        return [look.measured.seconds for look in looks if look.item.modality is Modality.VIDEO]


def _modality(word: str) -> Modality | None:
    try:
        return Modality(word)
    except ValueError:
        return None


def _scheme(url: memoryview) -> str:
    """Lower-cased; empty for a URL that has none."""
    head = bytes(url[: _LONGEST_SCHEME + 1]).lstrip(b" \t\r\n")
    word, colon, _ = head.partition(b":")
    return word.decode("ascii", "replace").lower() if colon else ""


def _in_order(looks: Sequence[Look]) -> list[Look]:
    """By position: an item that stands twice is looked at once."""
    by_position = {position: look for look in looks for position in look.item.positions}
    return [by_position[position] for position in sorted(by_position)]
