"""The messages of the sidecar's protocol, version 1, as they lie in Redis: msgpack, no pickle anywhere.

    smg:mm:v1:<namespace>:hello          hash, written by every sidecar each five seconds, expires after 15
    smg:mm:v1:<namespace>:jobs           list, workers push left, sidecars pop right
    smg:mm:v1:<namespace>:res:<job id>   list with one answer, expires after 120 s

A job is read as what a stranger wrote: every field is typed and bounded before anything is made of it, and URLs, which
may hold megabytes, stay views of the message.  Source: `smg_grpc_servicer.mm_sidecar_protocol` 0.14.1, against whose
codec the tests hold this one.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.sidecar.fingerprint import Fingerprint

VERSION = 1
KEY_ROOT = "smg:mm:v1"
HELLO_PERIOD_S = 5
HELLO_EXPIRES_S = 15
ANSWER_EXPIRES_S = 120

MOST_TOKENS = 1 << 22  # of one prompt: the window of a model whose window nobody tells
MOST_ITEMS = 1024  # of one job, before any model's limit is looked at
_MOST_TEXT = 4096  # characters of an id, or of a string of the fingerprint
_JOB_ID = r"^[0-9a-f]{32}$"
_JOB_ID_IN_HEAD = re.compile(rb"\xa6job_id\xd9 ([0-9a-f]{32})")


class Malformed(Exception):
    """A job that cannot be read."""


class Keys:
    """The names of a namespace."""

    def __init__(self, namespace: str) -> None:
        self.prefix = f"{KEY_ROOT}:{namespace}"
        self.hello = f"{self.prefix}:hello"
        self.jobs = f"{self.prefix}:jobs"

    def answer(self, job_id: str) -> str:
        return f"{self.prefix}:res:{job_id}"


class _Item(msgspec.Struct, frozen=True):
    modality: Annotated[str, Meta(max_length=64)]
    url: msgspec.Raw


class _Claims(msgspec.Struct, frozen=True):
    """A fingerprint as a stranger states it."""

    model: Annotated[str, Meta(max_length=_MOST_TEXT)]
    vllm_version: Annotated[str, Meta(max_length=_MOST_TEXT)]
    dtype: Annotated[str, Meta(max_length=_MOST_TEXT)]
    video_backend: Annotated[str, Meta(max_length=_MOST_TEXT)]
    media_io_kwargs: Annotated[str, Meta(max_length=_MOST_TEXT)]
    mm_processor_kwargs: Annotated[str, Meta(max_length=_MOST_TEXT)]
    limit_per_prompt: Annotated[str, Meta(max_length=_MOST_TEXT)]


class _Job(msgspec.Struct, frozen=True):
    """What is read of a job; `prompt`, the text, is of no use here."""

    v: int
    job_id: Annotated[str, Meta(pattern=_JOB_ID)]
    request_id: Annotated[str, Meta(max_length=_MOST_TEXT)]
    fingerprint: _Claims
    prompt_token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=MOST_TOKENS)]
    items: Annotated[list[_Item], Meta(min_length=1, max_length=MOST_ITEMS)]
    enqueued_ms: Annotated[int, Meta(ge=0, lt=1 << 53)]
    deadline_ms: Annotated[int, Meta(ge=0, lt=1 << 53)]


class Item(msgspec.Struct, frozen=True):
    """A media item: `url` is a view of the message, UTF-8 as far as the worker wrote any."""

    modality: str
    url: memoryview


class Job(msgspec.Struct, frozen=True):
    """One prompt's media.  Times are milliseconds since the epoch, by the worker's clock."""

    version: int
    job_id: str
    request_id: str
    fingerprint: Fingerprint
    prompt_token_ids: list[int]
    items: tuple[Item, ...]
    enqueued_ms: int
    deadline_ms: int


_jobs = msgspec.msgpack.Decoder(_Job)


def decode_job(message: bytes | bytearray) -> Job:
    """The job holds views of `message`.  Raises Malformed with a reason that quotes nothing of it."""
    try:
        read = _jobs.decode(message)
        items = tuple(Item(item.modality, _text_of(memoryview(item.url))) for item in read.items)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(_without_values(error)) from None
    return Job(
        version=read.v,
        job_id=read.job_id,
        request_id=read.request_id,
        fingerprint=Fingerprint(**msgspec.structs.asdict(read.fingerprint)),
        prompt_token_ids=read.prompt_token_ids,
        items=items,
        enqueued_ms=read.enqueued_ms,
        deadline_ms=read.deadline_ms,
    )


def job_id_in(head: bytes) -> str | None:
    """The id of a job of which only the beginning was read, as the published worker writes it."""
    found = _JOB_ID_IN_HEAD.search(head)
    return found[1].decode() if found else None


def _without_values(error: Exception) -> str:
    return str(error)[:200] if isinstance(error, msgspec.DecodeError) else type(error).__name__


def _text_of(encoded: memoryview) -> memoryview:
    """The bytes of a msgpack string, as a view.  Raises ValidationError for any other kind of value."""
    kind = encoded[0]
    if kind & 0xE0 == 0xA0:
        return encoded[1:]
    widths = {0xD9: 1, 0xDA: 2, 0xDB: 4}
    if kind not in widths:
        raise msgspec.ValidationError("Expected `str` - at `$.items[...].url`")
    return encoded[1 + widths[kind] :]


class Refusal(Exception):
    """A job's answer is a failure: `code` decides what the worker makes of it, `message` is for people.

    The published worker turns CLIENT_CODES and RESULT_TOO_LARGE into INVALID_ARGUMENT, which no gateway repeats, and
    every other code into UNAVAILABLE, so that the request is tried elsewhere.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


FETCH_FAILED = "fetch_failed"
DOMAIN_NOT_ALLOWED = "domain_not_allowed"
SCHEME_NOT_ACCEPTED = "scheme_not_accepted"
LIMIT_EXCEEDED = "limit_exceeded"
DECODE_FAILED = "decode_failed"
PLACEHOLDER_MISMATCH = "placeholder_mismatch"
CLIENT_CODES = frozenset(
    {FETCH_FAILED, DOMAIN_NOT_ALLOWED, SCHEME_NOT_ACCEPTED, LIMIT_EXCEEDED, DECODE_FAILED, PLACEHOLDER_MISMATCH}
)
RESULT_TOO_LARGE = "result_too_large"
RESULT_PUSH_FAILED = "result_push_failed"
EXPIRED = "expired"
FINGERPRINT_MISMATCH = "fingerprint_mismatch"
PROCESSOR_ERROR = "processor_error"
# ours: the published worker repeats what it does not know
SCHEMA_MISMATCH = "schema_mismatch"
FETCH_UNAVAILABLE = "fetch_unavailable"
SIDECAR_OVERLOADED = "sidecar_overloaded"
CODES = (
    *sorted(CLIENT_CODES),
    RESULT_TOO_LARGE,
    RESULT_PUSH_FAILED,
    EXPIRED,
    FINGERPRINT_MISMATCH,
    PROCESSOR_ERROR,
    SCHEMA_MISMATCH,
    FETCH_UNAVAILABLE,
    SIDECAR_OVERLOADED,
)


class _Failure(msgspec.Struct, frozen=True):
    v: int
    job_id: str
    ok: bool
    code: str
    message: str


def encode_failure(job_id: str, code: str, message: str) -> bytes:
    return msgspec.msgpack.encode(_Failure(VERSION, job_id, False, code, message))
