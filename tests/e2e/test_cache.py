"""The pixel cache from outside: what is found again is byte for byte what was made, counted, and never in the way."""

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.origin import media_host
from tests.e2e.running import Running, data_url, image_part, picture, running, text_part, until

SHM = ("--multimodal-tensor-transport=shm", "--multimodal-shm-min-bytes=0")
INLINE = ("--multimodal-tensor-transport=inline",)
TRANSPORTS = {"inline": INLINE, "shm": SHM}
HITS, MISSES = "mediagate_pixel_cache_hits_total{", "mediagate_pixel_cache_misses_total{"


@pytest.fixture(scope="module", params=TRANSPORTS)
def gateway(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running("--mm-pixel-cache-mb=64", *TRANSPORTS[request.param]) as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """The same without a cache: what bytes have to be."""
    with running() as found:
        yield found


def tensors(gateway: Running, content: list[Any], **fields: Any) -> list[Any]:
    """What the engine got: ids, ranges, hashes, dtypes, shapes, digests."""
    answer = gateway.chat(content, **fields)
    assert answer.status == 200, answer.body
    record = gateway.seen("generate")[-1]
    batches = [
        {name: {k: v for k, v in facts.items() if k != "transport"} for name, facts in batch["tensors"].items()}
        for batch in record["media"]
    ]
    return [record["input_ids"], [(b["ranges"], b["hashes"]) for b in record["media"]], batches]


def counts(gateway: Running) -> tuple[int, int]:
    return int(gateway.metric(HITS)), int(gateway.metric(MISSES))


def looked_up(gateway: Running, content: list[Any], **fields: Any) -> tuple[list[Any], tuple[int, int]]:
    """What the engine got, and the hits and misses it took."""
    before = counts(gateway)
    got = tensors(gateway, content, **fields)
    after = counts(gateway)
    return got, (after[0] - before[0], after[1] - before[1])


def capped(file: bytes, side: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file), "max_long_side_pixel": side}}


def test_a_picture_that_comes_again_is_found(gateway: Running, plain: Running) -> None:
    content = [image_part(picture(seed=1)), text_part("What is it?")]
    expected = tensors(plain, content)
    assert looked_up(gateway, content) == (expected, (0, 1))
    for _ in range(3):
        assert looked_up(gateway, content) == (expected, (1, 0))
    # other words, the same picture
    other = [text_part("Once more: "), image_part(picture(seed=1))]
    assert looked_up(gateway, other) == (tensors(plain, other), (1, 0))


def test_each_picture_of_a_request_on_its_own(gateway: Running, plain: Running) -> None:
    first, second, third = (image_part(picture(200 + 40 * n, 300, seed=10 + n)) for n in range(3))
    for content, expected in (
        ([first, second], (0, 2)),
        ([second], (1, 0)),
        ([third, second, first], (2, 1)),
        ([first, first, third], (2, 0)),
        ([third], (1, 0)),
    ):
        assert looked_up(gateway, content) == (tensors(plain, content), expected)


def test_the_same_picture_under_two_urls_is_made_once(gateway: Running, plain: Running) -> None:
    file = picture(seed=20)
    content = [image_part(file), {"type": "image_url", "image_url": {"url": data_url(file, "image/jpeg")}}]
    assert looked_up(gateway, content) == (tensors(plain, content), (0, 1))
    assert looked_up(gateway, content) == (tensors(plain, content), (1, 0))


def test_never_across_different_settings(gateway: Running, plain: Running) -> None:
    file = picture(300, 400, seed=30)
    for part in (image_part(file), capped(file, 196), capped(file, 224)):
        assert looked_up(gateway, [part]) == (tensors(plain, [part]), (0, 1))
        assert looked_up(gateway, [part]) == (tensors(plain, [part]), (1, 0))


def test_a_picture_that_fails_is_asked_for_again(gateway: Running) -> None:
    broken = picture(seed=40)[:4000]
    before = counts(gateway)
    for times in range(1, 4):
        assert gateway.chat([image_part(broken)]).error == (400, "multimodal_processing_failed")
        assert counts(gateway) in (before, (before[0], before[1] + times))  # found out at the first look or later
    entries = gateway.metric("mediagate_pixel_cache_entries")
    assert gateway.chat([image_part(picture(seed=40))]).status == 200
    assert gateway.metric("mediagate_pixel_cache_entries") == entries + 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forms_do_not_meet(transport: str) -> None:
    """The engine comes back and wants raw pixels instead of normalised floats, then floats again."""
    content = [image_part(picture(seed=50)), text_part("?")]
    with running("--mm-pixel-cache-mb=64", *TRANSPORTS[transport]) as gateway:
        for raw, expected in ((False, (0, 1)), (True, (0, 1)), (False, (1, 0)), (True, (1, 0))):
            gateway.engine.stop()
            until(lambda: not gateway.ready())
            gateway.engine.start(*["--label", "mm_device_do_normalize=true"] * raw)
            until(gateway.ready)
            got, counted = looked_up(gateway, content)
            assert (got[2][0]["pixel_values"]["dtype"], counted) == ("uint8" if raw else "float32", expected)
        digests = {json.dumps(record["media"][0]["tensors"]["pixel_values"]["sha256"]) for record in gateway.seen()}
        assert len(digests) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_at_once_decode_once(transport: str, plain: Running) -> None:
    """Without a cache as well: requests that need the same tensor at the same time wait for one job."""
    content = [image_part(picture(900, 1200, seed=60)), text_part("?")]
    expected = tensors(plain, content)
    with running(*TRANSPORTS[transport]) as gateway, concurrent.futures.ThreadPoolExecutor(8) as clients:
        assert [one.status for one in clients.map(lambda _: gateway.chat(content), range(12))] == [200] * 12
        made = gateway.metric('mediagate_stage_duration_seconds_count{modality="image",stage="decode"}')
        shared = gateway.metric("mediagate_pixels_shared_total{")
        assert made + shared == 12 and shared >= 2
        digests = {
            json.dumps([batch["tensors"]["pixel_values"]["sha256"] for batch in record["media"]])
            for record in gateway.seen("generate")
        }
        assert digests == {json.dumps([batch["pixel_values"]["sha256"] for batch in expected[2]])}
        assert counts(gateway) == (0, 0)
        gateway.given_back()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_first_client_leaves_and_the_second_gets_its_answer(transport: str, plain: Running) -> None:
    with (
        running(*TRANSPORTS[transport], "--mm-pixel-cache-mb=512") as gateway,
        concurrent.futures.ThreadPoolExecutor(1) as clients,
    ):
        made = 'mediagate_stage_duration_seconds_count{modality="image",stage="decode"}'
        for seed in range(70, 80):  # until the second has come while the first one's job ran
            content = [image_part(picture(1200, 1800, seed=seed)), text_part("?")]
            leaving = gateway.open_chat(content)
            second = clients.submit(tensors, gateway, content)
            until(lambda: gateway.metric("mediagate_pixels_shared_total{") > 0 or second.done())  # noqa: B023
            leaving.close()
            assert second.result() == tensors(plain, content)
            if gateway.metric("mediagate_pixels_shared_total{") and gateway.metric(made) == gateway.metric(MISSES):
                return
        raise AssertionError("never at the same time")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_small_cache_gives_up_the_oldest(transport: str, plain: Running) -> None:
    """Pictures of 1.7 MB of tensors each, room for four."""
    contents = [[image_part(picture(256, 256, seed=80 + n)), text_part("?")] for n in range(6)]
    with running(*TRANSPORTS[transport], "--mm-pixel-cache-mb=7") as gateway:
        for content in contents:
            assert looked_up(gateway, content) == (tensors(plain, content), (0, 1))
        assert gateway.metric("mediagate_pixel_cache_used_bytes") <= 7 << 20
        assert gateway.metric("mediagate_pixel_cache_evictions_total") == 2
        assert looked_up(gateway, contents[-1])[1] == (1, 0)
        assert looked_up(gateway, contents[0]) == (tensors(plain, contents[0]), (0, 1))


def test_a_full_ring_serves_requests_as_without_a_cache(plain: Running) -> None:
    """The ring holds one and a half such tensors: each request needs what the one before left in the cache."""
    contents = [[image_part(picture(1024, 1024, seed=90 + n)), text_part("?")] for n in range(4)]
    flags = ("--pool-ring-bytes=52428800", "--mm-pixel-cache-mb=1024")  # 37.5 MiB for tensors of 24 MiB
    with running(*INLINE, *flags) as gateway, concurrent.futures.ThreadPoolExecutor(6) as clients:
        for content in contents:
            assert tensors(gateway, content) == tensors(plain, content)
        answers = list(clients.map(lambda n: gateway.chat(contents[n % 4]), range(12)))
        assert [one.status for one in answers] == [200] * 12
        until(lambda: gateway.metric("smg_admission_inflight") == 0)
        assert gateway.metric('mediagate_ring_used_bytes{ring="outputs"}') == gateway.metric(
            "mediagate_pixel_cache_used_bytes"
        )


def test_a_full_shm_serves_requests_as_without_a_cache(plain: Running) -> None:
    contents = [[image_part(picture(1024, 1024, seed=90 + n)), text_part("?")] for n in range(4)]
    flags = ("--mm-shm-max-bytes=67108864", "--mm-pixel-cache-mb=1024")
    with running(*SHM, *flags) as gateway:
        for _ in range(2):
            for content in contents:
                assert tensors(gateway, content) == tensors(plain, content)
        both = [*contents[0][:1], *contents[1][:1]]
        assert tensors(gateway, both) == tensors(plain, both)
        primary = [record["media"][0]["tensors"]["pixel_values"]["transport"] for record in gateway.seen("generate")]
        assert set(primary) == {"shm"}
        assert gateway.metric("mediagate_pixel_cache_used_bytes") <= 33554432


def test_one_fetch_for_requests_at_the_same_time() -> None:
    """The host takes a second; what came before or afterwards is fetched again."""
    with media_host() as host, running() as gateway, concurrent.futures.ThreadPoolExecutor(6) as clients:
        base = host.serve({"/a.png": {"mode": "delay", "seconds": 1.0, "file": "pictures/oracle/png_rgb_300x200.png"}})
        content = [{"type": "image_url", "image_url": {"url": f"{base}/a.png"}}, text_part("?")]
        for rounds in (1, 2):
            answers = list(clients.map(lambda _: gateway.chat(content), range(6)))
            assert [one.status for one in answers] == [200] * 6 and len({one.text for one in answers}) == 1
            assert host.hits["/a.png"] == rounds
        assert gateway.metric("mediagate_fetches_shared_total") == 10
        made = gateway.metric('mediagate_stage_duration_seconds_count{modality="image",stage="decode"}')
        assert made + gateway.metric("mediagate_pixels_shared_total{") == 12
        gateway.given_back()
