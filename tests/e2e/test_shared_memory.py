"""Tensors through /dev/shm: recycled while all is well, inline when there is no room, and nothing left in the end."""

import concurrent.futures
import os
import shutil
import subprocess
import sys

import pytest

from tests.e2e.running import Engine, Running, image_part, picture, running, text_part, until

PHOTO = picture(540, 960, kind="JPEG")
TENSOR_BYTES = 34 * 60 * 1536 * 4
SHM = ("--multimodal-tensor-transport=shm",)
FAILURES = "smg_mm_shm_write_failures_total{"


def transports(engine: Engine) -> set[str]:
    """How the pixels of all requests so far came."""
    lines = engine.seen("generate")
    return {batch["tensors"]["pixel_values"]["transport"] for line in lines for batch in line["media"]}


def digests(engine: Engine) -> list[str]:
    lines = engine.seen("generate")
    return [batch["tensors"]["pixel_values"]["sha256"] for line in lines for batch in line["media"]]


def masters(gateway: Running) -> list[str]:
    (front,) = gateway.pids("front")
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"mediagate-{front}-"))


def front_of(gateway: Running) -> int:
    (front,) = gateway.pids("front")
    return front


def ask(gateway: Running, count: int, size: int = 1) -> None:
    with concurrent.futures.ThreadPoolExecutor(size) as clients:
        asked = [clients.submit(gateway.chat, [image_part(PHOTO), text_part("?")]) for _ in range(count)]
        assert {one.result().status for one in asked} == {200}


def test_segments_are_recycled_and_gone_in_the_end() -> None:
    with running(*SHM) as gateway:
        front = front_of(gateway)
        ask(gateway, 6)
        names = masters(gateway)
        faults = gateway.metric("mediagate_page_faults_total")
        ask(gateway, 10)
        assert masters(gateway) == names and len(names) <= 2  # two processes took turns: one file, perhaps two
        per_request = (gateway.metric("mediagate_page_faults_total") - faults) / 10
        assert per_request < TENSOR_BYTES / 4096 / 5, "most pages are used again"
        ask(gateway, 12, size=4)
        assert len(masters(gateway)) <= 5
        assert transports(gateway.engine) == {"shm"} and len({*digests(gateway.engine)}) == 1
        assert gateway.metric(FAILURES) == 0
        gateway.given_back()
        gateway.gateway.stop()
        assert not [name for name in os.listdir("/dev/shm") if f"-{front}-" in name]


def test_both_transports_carry_the_same_bytes() -> None:
    """One worker takes what is offered, the other was registered as one that wants everything inline."""
    with running("--multimodal-tensor-transport=auto", engines=[(), ()]) as gateway:
        url = gateway.engines[1].url
        (known,) = [worker["id"] for worker in gateway.workers() if worker["url"] == url]
        assert gateway.call("DELETE", f"/workers/{known}").status == 202
        until(lambda: len(gateway.workers()) == 1)
        assert gateway.call("POST", "/workers", {"url": url, "multimodal_tensor_transport": "inline"}).status == 202
        until(lambda: [worker["is_healthy"] for worker in gateway.workers()] == [True, True])
        ask(gateway, 8)
        assert [transports(engine) for engine in gateway.engines] == [{"shm"}, {"inline"}]
        assert len({*digests(gateway.engines[0]), *digests(gateway.engines[1])}) == 1
        gateway.given_back()


def test_an_engine_that_keeps_the_names() -> None:
    """Told not to unlink: the gateway does it, and does not use the files again, since nobody knows who reads them."""
    with running(*SHM, engine=("--keep-names",)) as gateway:
        for _ in range(4):
            ask(gateway, 1)
            gateway.given_back()
        assert len({*digests(gateway.engine)}) == 1 and transports(gateway.engine) == {"shm"}
        assert masters(gateway) == []
        assert gateway.log().count("leaves shared-memory names in place") == 1


def test_no_room_by_the_flag() -> None:
    with running(*SHM, "--mm-shm-max-bytes=1") as gateway:
        ask(gateway, 3)
        assert transports(gateway.engine) == {"inline"} and len({*digests(gateway.engine)}) == 1
        assert masters(gateway) == []
        assert gateway.metric(FAILURES) > 0
        gateway.given_back()


def test_room_for_one_of_several() -> None:
    with running(*SHM, "--mm-shm-max-bytes=15000000") as gateway:
        ask(gateway, 8, size=4)
        assert transports(gateway.engine) == {"inline", "shm"} and len({*digests(gateway.engine)}) == 1
        gateway.given_back()


def may_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    trial = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "t", "/dev/shm"], capture_output=True)
    return trial.returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_a_small_or_read_only_dev_shm(options: str) -> None:
    script = f'mount -t tmpfs -o {options} t /dev/shm && exec {sys.executable} gateway.py "$@"'
    with running(*SHM, command=["unshare", "-m", "sh", "-c", script, "sh"]) as gateway:
        ask(gateway, 3, size=3)
        assert transports(gateway.engine) == {"inline"} and len({*digests(gateway.engine)}) == 1
        assert "Traceback" not in gateway.log()
        gateway.given_back()


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_auto_is_inline_when_the_engine_has_another_dev_shm() -> None:
    script = f'mount -t tmpfs t /dev/shm && exec {sys.executable} gateway.py "$@"'
    flags = ["--multimodal-tensor-transport=auto"]
    with running(*flags, command=["unshare", "-m", "sh", "-c", script, "sh"]) as gateway:
        ask(gateway, 1)
        assert transports(gateway.engine) == {"inline"}


def test_an_engine_that_dies_with_segments_in_its_hands() -> None:
    with running(*SHM, "--retry-max-retries=2", "--retry-initial-backoff-ms=1", engines=[(), ()]) as gateway:
        until(lambda: all(worker["is_healthy"] for worker in gateway.workers()))
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(gateway.chat, [image_part(PHOTO)]) for _ in range(12)]
            asked[2].result()
            gateway.engines[0].kill()
            assert {one.result().status for one in asked} == {200}
        assert len({*digests(gateway.engines[1])}) == 1 and not gateway.engines[1].seen("refused")
        gateway.given_back()
