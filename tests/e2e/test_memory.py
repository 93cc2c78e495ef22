"""Memory stays where it was: four times as many pictures need no more, pages are touched once, nothing is kept."""

import concurrent.futures

import pytest

from pipeline import ceiling
from pipeline.flags import parse
from tests.e2e.running import Running, clip_part, image_part, picture, running, text_part, until
from tests.pipeline.clips import clip, moving_noise
from tools.load.processes import Watch, memory

CLIENTS = 4
PHOTOS = [picture(1080, 1920, kind="JPEG", seed=seed) for seed in range(CLIENTS)]
TENSOR_PAGES = 8160 * 1536 * 4 // 4096


def ask(gateway: Running, count: int) -> int:
    """`count` pictures of 1080p by four clients; the most bytes the gateway's processes and segments took."""
    with Watch(gateway.gateway.pid, every_s=0.1) as watch, concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
        asked = [
            clients.submit(gateway.chat, [image_part(PHOTOS[n % CLIENTS]), text_part("?")], max_tokens=2)
            for n in range(count)
        ]
        assert {one.result().status for one in asked} == {200}
    return watch.peak()


@pytest.mark.parametrize("transport, few", [("inline", 6), ("shm", 20)])  # grpcio takes 0.2 s for 50 MB inline
def test_four_times_as_many_pictures_take_no_more_memory(transport: str, few: int) -> None:
    flags = ["--multimodal-tensor-transport", transport, "--pool-ring-bytes=1073741824"]
    with running(*flags, engine=("--light",)) as gateway:
        first = ask(gateway, few)
        faults = gateway.metric("mediagate_page_faults_total")
        second = ask(gateway, 4 * few)
        assert second < 1.1 * first, (first, second)
        per_picture = (gateway.metric("mediagate_page_faults_total") - faults) / (4 * few)
        assert per_picture < TENSOR_PAGES / 5, "the pages of a tensor are used again"
        gateway.given_back()
        print(f"{transport}: {first / 1e6:.0f} MB, then {second / 1e6:.0f} MB; {per_picture:.0f} faults a picture")


def test_what_a_large_request_took_is_given_back() -> None:
    """Four pictures at once, 200 MB of tensors: of the ring a quarter stays touched, the rest goes back in a while."""
    ring = 268435456
    with running(f"--pool-ring-bytes={ring}", engine=("--light",)) as gateway:
        before = memory(gateway.gateway.pid).held
        assert gateway.chat([image_part(photo) for photo in PHOTOS], max_tokens=2).status == 200
        gateway.given_back()
        most = before + ring // 4 + 100_000_000  # and the heaps of two decoders
        until(lambda: memory(gateway.gateway.pid).held < most, what="pages go back")


def test_eight_clips_at_once_stay_within_the_formula() -> None:
    """Eight times 22 MB of tensors, two decoders: who finds no room waits, and none runs out of time."""
    ring, decode = 160 << 20, 384 << 20
    limits = [f"--pool-ring-bytes={ring}", f"--pool-process-memory-bytes={decode}", "--pool-processes=2"]
    limits += ["--max-payload-size=8388608", "--max-inflight-body-bytes=33554432", "--max-concurrent-requests=16"]
    config = parse(limits, {}).config
    assert config is not None
    films = [clip(moving_noise(40, 360, 640, seed), options={"preset": "ultrafast", "crf": "40"}) for seed in range(2)]
    with running(*limits, engine=("--light",)) as gateway:
        with (
            Watch(gateway.gateway.pid, every_s=0.1) as watch,
            concurrent.futures.ThreadPoolExecutor(8) as clients,
        ):
            asked = [clients.submit(gateway.chat, [clip_part(films[n % 2])], max_tokens=2) for n in range(8)]
            assert {one.result().status for one in asked} == {200}
        assert watch.peak() < ceiling.ceiling_bytes(config)
        assert watch.peak() < 2 * ring + 2 * decode  # far below it: what was decoded is not kept
        assert gateway.metric("mediagate_pool_restarts_total") == 0
        gateway.given_back()
