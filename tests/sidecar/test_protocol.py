"""Jobs as the published codec writes them, and as nobody should: read, bounded, refused."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_servicer import mm_sidecar_protocol as published

from pipeline.sidecar import protocol
from pipeline.sidecar.fingerprint import Fingerprint
from pipeline.sidecar.protocol import Keys, Malformed, decode_job, encode_failure, job_id_in
from tests.sidecar.records import record

FIELDS = ("model", "vllm_version", "dtype", "video_backend", "media_io_kwargs", "mm_processor_kwargs")
TEXTS = st.text(max_size=40)
URLS = st.one_of(
    st.text(max_size=70_000), st.builds("data:image/png;base64,{}".format, st.text("AbZ+/=", max_size=300))
)
JOBS = st.builds(
    published.Job,
    v=st.integers(-3, 300),
    job_id=st.text("0123456789abcdef", min_size=32, max_size=32),
    request_id=TEXTS,
    fingerprint=st.builds(published.Fingerprint, *(TEXTS for _ in FIELDS), TEXTS),
    prompt_token_ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=50),
    prompt=st.none() | TEXTS,
    items=st.lists(st.builds(published.JobItem, modality=TEXTS, url=URLS), min_size=1, max_size=4),
    enqueued_ms=st.integers(0, (1 << 53) - 1),
    deadline_ms=st.integers(0, (1 << 53) - 1),
)


@given(JOBS)
@settings(max_examples=150, deadline=None)
def test_what_the_published_worker_writes_is_read_as_it_meant(job: published.Job) -> None:
    message = published.encode_job(job)
    read = decode_job(message)
    assert (read.version, read.job_id, read.request_id) == (job.v, job.job_id, job.request_id)
    assert read.fingerprint.fields() == job.fingerprint.to_hello()
    assert read.prompt_token_ids == job.prompt_token_ids
    assert [(item.modality, str(item.url, "utf-8")) for item in read.items] == [
        (item.modality, item.url) for item in job.items
    ]
    assert (read.enqueued_ms, read.deadline_ms) == (job.enqueued_ms, job.deadline_ms)
    assert job_id_in(message[:512]) == job.job_id


def test_urls_are_views_of_the_message() -> None:
    message = bytearray(record("qwen3_vl").of("photo").job)
    (item,) = decode_job(message).items
    assert item.url.nbytes > 20_000
    message[message.index(b"data:image")] = ord("D")  # what is changed there is changed here: nothing was copied
    assert bytes(item.url[:5]) == b"Data:"


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_is_malformed_and_nothing_else(noise: bytes) -> None:
    with pytest.raises(Malformed):
        decode_job(noise)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_job_is_read_or_malformed(data: st.DataObject) -> None:
    message = bytearray(record("qwen3_vl").of("other scheme").job)
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    for damaged in (bytes(message), bytes(message[:cut])):
        try:
            decode_job(damaged)
        except Malformed as error:
            assert len(str(error)) <= 200


def _with(**changes: object) -> bytes:
    whole = msgspec.msgpack.decode(record("qwen3_vl").of("other scheme").job)
    return msgspec.msgpack.encode(whole | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": "../../etc/passwd"},
        {"job_id": "0" * 33},
        {"job_id": "A" * 32},
        {"items": []},
        {"items": [{"modality": "image", "url": "http://a"}] * (protocol.MOST_ITEMS + 1)},
        {"items": [{"modality": "image", "url": b"http://a"}]},
        {"items": [{"modality": "image", "url": 7}]},
        {"items": [{"modality": "i" * 65, "url": "http://a"}]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [1 << 32]},
        {"prompt_token_ids": [0] * (protocol.MOST_TOKENS + 1)},
        {"request_id": "r" * 5000},
        {"deadline_ms": 1 << 60},
        {"enqueued_ms": -1},
        {"fingerprint": {"model": "m"}},
        {"fingerprint": {**dict.fromkeys(FIELDS, ""), "limit_per_prompt": "x" * 5000}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_out_of_bounds_is_malformed(changes: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        decode_job(_with(**changes))


@pytest.mark.parametrize("deep", [b"\x91" * 200_000, b"\x81\xa1a" * 100_000], ids=["arrays", "maps"])
def test_nesting_ends_before_the_stack_does(deep: bytes) -> None:
    whole = _with()
    assert whole[0] == 0x89  # a map of nine entries: a tenth, unknown one, is skipped
    with pytest.raises(Malformed):
        decode_job(bytes([0x8A]) + whole[1:] + b"\xa1z" + deep)


def test_lengths_that_are_not_there_take_no_memory() -> None:
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(Malformed):
            decode_job(claim)


def test_failures_are_what_the_published_worker_reads() -> None:
    read = published.decode_result(encode_failure("0" * 32, "decode_failed", "item 0: no picture"))
    assert read == published.failure("0" * 32, "decode_failed", "item 0: no picture")


def test_codes_are_of_the_kind_the_published_worker_takes_them_for() -> None:
    assert protocol.CLIENT_CODES == published.CLIENT_ERROR_CODES
    assert protocol.RESULT_TOO_LARGE == published.CODE_RESULT_TOO_LARGE
    assert protocol.RESULT_PUSH_FAILED == published.CODE_RESULT_PUSH_FAILED
    assert set(protocol.CODES) >= published.RETRYABLE_ERROR_CODES


def test_keys_and_times_are_the_published_ones() -> None:
    ours, theirs = Keys("name"), published.Keys.for_namespace("name")
    assert (ours.hello, ours.jobs, ours.answer("7")) == (theirs.hello, theirs.jobs, theirs.result("7"))
    assert (protocol.HELLO_EXPIRES_S, protocol.HELLO_PERIOD_S, protocol.ANSWER_EXPIRES_S, protocol.VERSION) == (
        published.HELLO_TTL_S,
        published.HELLO_REFRESH_S,
        published.RESULT_TTL_S,
        published.SCHEMA_VERSION,
    )


def test_fingerprints_have_the_published_fields() -> None:
    assert Fingerprint.__struct_fields__ == published.Fingerprint.__struct_fields__
