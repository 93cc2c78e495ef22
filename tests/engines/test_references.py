"""Media references at an engine: the message, which workers get them, and what is tried again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines.base import EngineError, EngineRequest, MediaReference, Modality, NoWorker, Sampling, SchemeRefused
from engines.vllm import build
from tests.engines.stand_in import engine, fails, until
from tests.engines.test_dispatch import Bench, text

PROCESSOR = {"mm_processor": "inprocess", "mm_media_ref_schemes": "http,https,data"}
WITH_FILES = {**PROCESSOR, "mm_media_ref_schemes": "http,https,data,file"}
REDIS = {"mm_processor": "redis"}  # says nothing of schemes
WORDS = {Modality.IMAGE: common_pb2.IMAGE, Modality.VIDEO: common_pb2.VIDEO}


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    await made.close()
    assert made.loads <= {0}


def web(number: int = 1) -> MediaReference:
    return MediaReference(Modality.IMAGE, (f"http://host/{number}.png".encode(),), "http")


FILE = MediaReference(Modality.IMAGE, (b"file:///srv/a.png",), "file")


def asking(*references: MediaReference, stream: bool = True) -> EngineRequest:
    return msgspec.structs.replace(text(stream=stream), references=references or (web(),))


def sent(request: EngineRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest.FromString(b"".join(build(request, "id-1", {})))


# ---------------------------------------------------------------- the message


URLS = st.lists(st.text("ab:/,;=é図", max_size=20).map(str.encode), min_size=1, max_size=3).map(tuple)
REFERENCES = st.lists(st.builds(MediaReference, st.sampled_from(list(WORDS)), URLS, st.just("http")), max_size=5)


@given(REFERENCES)
def test_message(references: list[MediaReference]) -> None:
    """Against protobuf's own serialisation."""
    request = EngineRequest("id", "m", [1, 2], "text", Sampling(), stream=True, references=tuple(references))
    expected = sent(msgspec.structs.replace(request, references=()))
    for reference in references:
        url = b"".join(reference.url).decode()
        expected.media_refs.items.add(modality=WORDS[reference.modality], url=url)
    assert sent(request) == expected
    assert sent(request).HasField("media_refs") == bool(references)


def test_a_data_url_is_not_copied() -> None:
    view = memoryview(b"data:image/png;base64," + b"A" * 100_000)
    request = asking(web(), MediaReference(Modality.IMAGE, (b"", view), "data"))
    assert [part for part in build(request, "id-1", {}) if part is view] == [view]


# ---------------------------------------------------------------- who gets them


async def test_only_those_with_a_processor(bench) -> None:
    async with engine() as plain, engine(server_info=PROCESSOR) as ready:
        await bench.add(plain, ready)
        for _ in range(4):
            await bench.events(asking())
        assert len(ready.received) == 4 and plain.received == []
        await bench.events(text())
        await bench.events(text())
        assert len(plain.received) == 1, "other requests go to both"
        assert bench.free == [True] * 6


async def test_labels_of_the_registration_count(bench) -> None:
    async with engine() as served:
        await bench.add(served, labels={"mm_processor": "inprocess"})
        await bench.events(asking(FILE))
        assert served.received[0].media_refs.items[0].url == "file:///srv/a.png"


async def test_an_engine_without_the_field_is_never_asked(bench) -> None:
    async with engine(runtime="sglang") as served:
        await bench.add(served, runtime_type="sglang", labels=PROCESSOR)
        with pytest.raises(NoWorker):
            await bench.events(asking())
        assert served.received == [] and bench.free == [False]


async def test_retries_stay_among_them(bench) -> None:
    async with engine() as plain, engine(server_info=PROCESSOR) as ready:
        await bench.add(plain, ready)
        ready.script = [fails("UNAVAILABLE", "worker is saturated: 64 multimodal requests in flight")] * 2
        await bench.events(asking(web(1), web(2)))
        assert len(ready.received) == 3 and plain.received == []
        assert {tuple(item.url for item in one.media_refs.items) for one in ready.received} == {
            ("http://host/1.png", "http://host/2.png")
        }


async def test_a_saturated_worker_is_left_for_another(bench) -> None:
    async with engine(server_info=PROCESSOR) as full, engine(server_info=REDIS) as idle:
        await bench.add(full, idle)
        full.otherwise = fails("UNAVAILABLE", "worker is saturated: 64 multimodal requests in flight")
        for _ in range(4):
            await bench.events(asking())
        assert len(idle.received) == 4 and len(full.received) > 0


async def test_one_that_lost_its_processor_is_not_asked(bench) -> None:
    """It says so when it comes back; what was decided for the fleet before does not matter."""
    async with engine(server_info=PROCESSOR) as served:
        (worker,) = await bench.add(served)
        assert worker.takes_references
        await served.stop()
        served.server_info = {**served.server_info, "mm_processor": "", "mm_media_ref_schemes": ""}
        await served.start()
        await until(lambda: worker.is_healthy and not worker.takes_references)
        with pytest.raises(NoWorker):
            await bench.events(asking())
        assert served.received == []


# ---------------------------------------------------------------- schemes


async def test_a_worker_that_fetches_the_scheme_is_chosen(bench) -> None:
    async with engine(server_info=PROCESSOR) as one, engine(server_info=WITH_FILES) as other:
        await bench.add(one, other)
        for _ in range(3):
            await bench.events(asking(web(), FILE))
        assert one.received == [] and len(other.received) == 3


@pytest.mark.parametrize(
    ("scheme", "told"),
    [("file", "'file' URLs (accepts: data,http,https)"), ("ftp", "'ftp' URLs"), ("", "'' URLs")],
)
async def test_a_scheme_nobody_fetches(bench, scheme: str, told: str) -> None:
    async with engine() as plain, engine(server_info=PROCESSOR) as ready:
        await bench.add(plain, ready)
        with pytest.raises(SchemeRefused, match="the selected worker does not fetch ") as refused:
            await bench.events(asking(web(), MediaReference(Modality.IMAGE, (b"x:y",), scheme)))
        assert refused.value.item == 1 and told in refused.value.message
        assert ready.received == plain.received == [] and bench.free == [False]


async def test_a_worker_that_does_not_say_takes_all(bench) -> None:
    async with engine(server_info=REDIS) as served:
        await bench.add(served)
        await bench.events(asking(FILE))
        assert len(served.received) == 1


# ---------------------------------------------------------------- what the worker says


@pytest.mark.parametrize(
    ("status", "details", "attempts"),
    [
        ("INVALID_ARGUMENT", "media_refs[0]: fetch failed: 404", 1),
        ("INVALID_ARGUMENT", "media processing failed (domain_not_allowed): host", 1),
        ("INVALID_ARGUMENT", "media_too_large: 600000000 bytes", 1),
        ("UNAVAILABLE", "media_refs[0]: fetch failed: timeout", 5),
        ("UNAVAILABLE", "worker is saturated: 64 multimodal requests in flight and as many waiting", 5),
        ("UNAVAILABLE", "sidecar_overloaded: 256 jobs queued (cap 256)", 5),
        ("UNAVAILABLE", "sidecar_unavailable: redis is down", 5),
        ("UNAVAILABLE", "fingerprint_mismatch: dtype", 5),
        ("UNAVAILABLE", "sidecar_timeout: no result for job 1f within 30000 ms", 1),
        ("INTERNAL", "anything else", 1),
    ],
)
async def test_causes(bench, status: str, details: str, attempts: int) -> None:
    async with engine(server_info=PROCESSOR) as served:
        await bench.add(served)
        served.otherwise = fails(status, details)
        with pytest.raises(EngineError) as refused:
            await bench.events(asking())
        assert (refused.value.status, refused.value.message) == (status, details)
        assert len(served.received) == attempts and bench.free == [False]


@pytest.mark.parametrize(
    ("details", "state"),
    [
        ("media_refs[0]: fetch failed: 503", "closed"),  # a client must not be able to shut a worker out
        ("worker is saturated: 64 multimodal requests in flight and as many waiting", "closed"),
        ("sidecar_unavailable: redis is down", "open"),
    ],
)
async def test_what_a_worker_is_blamed_for(bench, details: str, state: str) -> None:
    async with engine(server_info=PROCESSOR) as served:
        (worker,) = await bench.add(served)
        served.otherwise = fails("UNAVAILABLE", details)
        for _ in range(2):
            with pytest.raises(EngineError):
                await bench.events(asking())
        assert len(served.received) == 10 and worker.breaker.state.value == state
