"""Engine workers come, go, flap and differ from each other; clients notice nothing they could not be spared."""

import concurrent.futures
import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running import Answer, Engine, Running, image_part, picture, running, text_part, until
from tests.e2e.test_stopping import Stream

PHOTO = picture(1080, 1920, kind="JPEG")  # 50 MB of floats, 12 of raw pixels
RAW = ("--label", "mm_device_do_normalize=true")
SLOW = ("--token-ms=15", "--tokens-per-chunk=1")


@pytest.fixture
def late_engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="mediagate-test-") as folder:
        engine = Engine(Path(folder), *SLOW)
        engine.listens()
        yield engine
        engine.stop()


def test_a_worker_that_is_added_later_and_removed(late_engine: Engine) -> None:
    with running("--drain-settle-secs=1", engines=[]) as gateway:
        assert gateway.call("GET", "/readiness").json["reason"] == "insufficient healthy workers"
        assert gateway.chat("hi").error == (404, "model_not_found")
        assert gateway.call("GET", "/v1/models").error == (503, "no_models_available")
        added = gateway.call("POST", "/workers", {"url": late_engine.url})
        assert added.status == 202 and added.json["status"] == "accepted"
        location = added.headers["location"]
        assert location == f"/workers/{added.json['worker_id']}"
        until(gateway.ready)
        assert gateway.call("GET", location).json["is_healthy"]
        stream = Stream(gateway, [image_part(PHOTO), text_part("?")])
        stream.until(b"I")

        assert gateway.call("DELETE", location).status == 202
        assert not gateway.ready()
        assert gateway.call("GET", location).json["status"] == "draining"
        assert gateway.chat("hi").error == (503, "no_available_workers")
        assert stream.until(b"[DONE]").endswith(b"data: [DONE]\n")
        stream.close()
        until(lambda: gateway.call("GET", location).status == 404)
        assert gateway.chat("hi").status in (404, 503) and gateway.workers() == []
        assert late_engine.url not in "".join(line for line in gateway.metrics().splitlines() if "worker=" in line)

        assert gateway.call("POST", "/workers", {"url": late_engine.url}).status == 202
        until(gateway.ready)
        assert gateway.chat("hi").status == 200


def ask_many(gateway: Running, count: int, *, meanwhile: object = None, size: int = 8) -> list[Answer]:
    """`count` requests with a picture, eight at a time; `meanwhile()` is called in the middle."""
    content = [image_part(picture(300, 500)), text_part("?")]
    with concurrent.futures.ThreadPoolExecutor(size) as clients:
        asked = [clients.submit(gateway.chat, content) for _ in range(count)]
        if callable(meanwhile):
            asked[count // 3].result()
            meanwhile()
        return [one.result() for one in asked]


def test_one_of_two_dies_and_no_request_is_lost() -> None:
    with running(engines=[("--token-ms=2",), ("--token-ms=2",)]) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        answers = ask_many(gateway, 40, meanwhile=gateway.engines[0].kill)
        assert {answer.status for answer in answers} == {200}
        assert gateway.engines[0].seen("generate") and gateway.engines[1].seen("generate")
        assert gateway.ready()
        gateway.given_back()


@pytest.mark.parametrize("transport", ["inline", "shm"])
def test_a_worker_killed_under_load_fails_what_had_begun_and_nothing_else(transport: str) -> None:
    """32 streams at once.  The worker that dies answers half of its requests, slowly, and the others not at all; the
    other worker takes those over, and no picture is decoded again.
    """
    dying = ("--fault=silent", "--token-ms=500", "--tokens-per-chunk=1")  # half a minute for an answer
    flags = ["--multimodal-tensor-transport", transport, "--multimodal-shm-min-bytes=0"]
    with running(*flags, engines=[dying, ()]) as gateway, contextlib.ExitStack() as stack:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        dead, alive = gateway.engines
        answered = {f"stream-{number}" for number in range(32) if number % 4 >= 2}  # on both workers
        streams = {}
        for number in range(32):
            name = f"stream-{number}"
            words = text_part("[[fault slow=0]]" if name in answered else "?")
            streams[name] = Stream(gateway, [image_part(picture(64, 96, seed=number)), words], request_id=name)
            stack.callback(streams[name].close)
        until(lambda: len(_streams(dead)) + len(_streams(alive)) == 32)
        begun = answered & set(_streams(dead))
        assert 0 < len(begun) < len(_streams(dead))
        for name in begun:
            streams[name].until(b"content")
        dead.kill()
        broken = {name for name, stream in streams.items() if b"worker_stream_failed" in stream.until(b"[DONE]")}
        assert broken == begun
        assert sorted(_streams(alive)) == sorted({*streams} - begun)
        assert gateway.metric('mediagate_stage_duration_seconds_count{modality="image",stage="decode"}') == 32
        gateway.given_back()


def _streams(engine: Engine) -> list[str]:
    """The clients' ids of the requests it got."""
    return [line["request_id"].rsplit("-", 5)[0] for line in engine.seen("generate")]


def test_health_that_flaps(tmp_path: Path) -> None:
    flag, other = tmp_path / "unwell", tmp_path / "other"
    flags = ["--health-failure-threshold=1", "--health-success-threshold=1"]
    with running(*flags, engines=[("--unhealthy-file", str(flag)), ("--unhealthy-file", str(other))]) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        for _ in range(2):
            flag.touch()
            until(lambda: not gateway.workers()[0]["is_healthy"])
            assert gateway.metric(f'smg_worker_health{{worker="{gateway.engines[0].url}"}}') == 0
            before = len(gateway.engines[0].seen("generate"))
            assert {answer.status for answer in ask_many(gateway, 10)} == {200}
            assert len(gateway.engines[0].seen("generate")) == before
            flag.unlink()
            until(lambda: gateway.workers()[0]["is_healthy"])
            assert {answer.status for answer in ask_many(gateway, 10)} == {200}
            assert len(gateway.engines[0].seen("generate")) > before
        flag.touch()
        other.touch()
        until(lambda: not gateway.ready())
        refused = gateway.chat("hi")
        assert refused.error == (503, "no_available_workers") and refused.headers["retry-after"] == "1"
        other.unlink()
        until(gateway.ready)
        assert gateway.chat("hi").status == 200


@pytest.mark.parametrize("transport, engines", [("inline", [RAW, ()]), ("shm", [(), RAW])])
def test_a_fleet_of_two_forms(transport: str, engines: list[tuple[str, ...]]) -> None:
    """One normalises pixels itself, the other does not; a stand-in refuses the wrong form."""
    with running("--multimodal-tensor-transport", transport, engines=engines) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        answers = ask_many(gateway, 24)
        assert {answer.status for answer in answers} == {200}
        forms = [re.search(r"pixel_values (\w+)", answer.text)[1] for answer in answers]  # type: ignore[index]
        assert {*forms} == {"uint8", "float32"}, "every worker has its share"
        assert not [line for engine in gateway.engines for line in engine.seen("refused")]
        gateway.given_back()


def test_the_other_form_is_made_in_a_tight_ring() -> None:
    """Made for the first worker, refused by it, made again for the second from what was kept.  Outputs of 57 MiB: both
    tensors do not fit together."""
    flags = ["--pool-ring-bytes=79691776", "--request-timeout-secs=10", "--retry-initial-backoff-ms=1"]
    with running(*flags, engines=[(*RAW, "--fault", "refuse=UNAVAILABLE"), ()]) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(gateway.chat, [image_part(PHOTO)]) for _ in range(4)]
            answers = [one.result() for one in asked]
        assert [answer.status for answer in answers] == [200] * 4
        assert all("pixel_values float32" in answer.text for answer in answers)
        assert gateway.engines[0].seen("generate")
        gateway.given_back()


def test_the_same_picture_goes_to_the_same_worker() -> None:
    """The default policy: pictures and conversations stay where they were, everything else is spread by load."""
    with running("--policy=cache_aware", engines=[RAW, ()]) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        homes: dict[int, str] = {}
        for shade in (*range(8), *range(8)):
            answer = gateway.chat([text_part(f"{shade} again"), image_part(picture(64, 96, seed=shade))])
            form = re.search(r"pixel_values (\w+)", answer.text)[1]  # type: ignore[index]
            assert homes.setdefault(shade, form) == form
        assert len({*homes.values()}) == 2, "of one form each"
        assert not [line for engine in gateway.engines for line in engine.seen("refused")]
        gateway.given_back()
