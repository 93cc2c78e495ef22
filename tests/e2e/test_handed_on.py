"""Tensors through /dev/shm to TokenSpeed, which hands their names on: one file for each item, written by pool processes
once files are there to be used again; always the right bytes, and nothing left.
"""

import concurrent.futures
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running import Running, image_part, picture, running, text_part, until
from tests.e2e.test_other_engines import Worker, fleet
from tests.e2e.test_pairs_faults import Crew
from tests.e2e.test_shared_memory import front_of, masters
from tests.pipeline.bundles import unpack_bundle
from tools.demo.flow import MODEL

PHOTOS = [picture(540, 960, kind="JPEG", seed=seed) for seed in range(3)]
TENSOR_BYTES = 34 * 60 * 1536 * 2
SHM = ("--multimodal-tensor-transport=shm", "--policy=round_robin")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))


class Front:
    """A gateway before one TokenSpeed worker."""

    def __init__(self, gateway: Running, worker: Worker, hold: Path) -> None:
        self.gateway = gateway
        self.worker = worker
        self._hold = hold
        self.before = 0  # requests of earlier tests

    def ask(self, *photos: int) -> None:
        content = [*(image_part(PHOTOS[photo]) for photo in photos), text_part("?")]
        assert self.gateway.chat(content).status == 200

    def at_once(self, count: int, *photos: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(count) as clients:
            for asked in [clients.submit(self.ask, *photos) for _ in range(count)]:
                asked.result()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The worker reads and does not answer."""
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()

    @property
    def digests(self) -> list[list[str]]:
        """Of each request, those of its tensors, which all came by shared memory."""
        found = []
        for record in self.worker.seen()[self.before :]:
            items = record["message"]["mm_inputs"]["items"]
            assert len(record["by_segment"]) == len(items), "one file each"
            found.append([item["encoder_input"]["inline"]["sha256"] for item in items])
        return found

    def in_place(self, photo: int) -> bool:
        """Whether a pool process writes a new tensor of that picture into a file: no span is used meanwhile."""
        with self.held():
            before = len(self.worker.seen())
            client = self.gateway.open_chat([image_part(PHOTOS[photo]), text_part("?")])
            until(lambda: len(self.worker.seen()) > before)
            is_in_place = "outputs" not in self.gateway.held()
            client.close()
        self.gateway.given_back()
        return is_in_place


@pytest.fixture(scope="module")
def only(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    hold = folder / "hold"
    worker = Worker(folder, "tokenspeed", MODEL, bundle, "--hold", str(hold))
    with fleet(folder, worker, flags=SHM) as gateway:
        yield Front(gateway, worker, hold)
        pid = front_of(gateway)
        gateway.gateway.stop()
        assert not [name for name in os.listdir("/dev/shm") if f"-{pid}-" in name]


@pytest.fixture
def front(only: Front) -> Iterator[Front]:
    only.before = len(only.worker.seen())
    yield only
    only.gateway.given_back()
    assert only.gateway.published() == []


def test_files_are_written_in_place_once_they_are_there(front: Front) -> None:
    gateway = front.gateway
    for number in range(4):
        front.ask(number % 3)
    names = masters(gateway)
    faults = gateway.metric("mediagate_page_faults_total")
    for number in range(9):
        front.ask(number % 3)
    assert masters(gateway) == names
    assert (gateway.metric("mediagate_page_faults_total") - faults) / 9 < TENSOR_BYTES / 4096 / 5
    digests = [digest for [digest] in front.digests]
    assert len(set(digests)) == 3 and digests == [digests[number % 3] for number in (*range(4), *range(9))]
    assert front.in_place(1)


def test_several_items_have_a_file_each(front: Front) -> None:
    for _ in range(3):
        front.ask(0, 1, 1, 2)
    front.at_once(4, 1, 2)
    front.at_once(4, 1, 2)
    [first, *others] = front.digests
    assert first[1] == first[2] and len(set(first)) == 3
    assert all(digests == (first if len(digests) == 4 else first[2:]) for digests in others)


def test_clients_that_leave_and_processes_that_die(front: Front) -> None:
    """What was given up half-way is never written again; those who ask meanwhile get their own bytes."""
    for _ in range(2):
        front.at_once(3, 0)
    assert front.in_place(1)  # its client has left: the file is gone
    front.ask(2)
    pids = [pid for name in ("pool0", "pool1") for pid in front.gateway.pids(name)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    clients = [front.gateway.open_chat([image_part(PHOTOS[photo])], request_id=f"left-{photo}") for photo in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor(4) as others:
        asked = [others.submit(front.ask, photo) for photo in (1, 2)]
        until(lambda: front.gateway.held().get("slots") == 4 and front.gateway.held().get("busy processes"))
        clients[0].close()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for one in asked:
            one.result()
    clients[1].close()
    front.gateway.given_back()
    for photo in range(3):
        front.ask(photo)
    digests = [digest for [digest] in front.digests]
    assert len(set(digests[-3:])) == 3 and set(digests) == set(digests[-3:])


def test_a_worker_killed_with_files_in_its_hands(tmp_path: Path, bundle: Path) -> None:
    hold = tmp_path / "hold"
    workers = [Worker(tmp_path, "tokenspeed", MODEL, bundle, "--hold", str(hold)) for _ in range(2)]
    with fleet(tmp_path, *workers, flags=(*SHM, "--retry-initial-backoff-ms=1")) as gateway:
        for photo in (0, 1, 2, 0):
            assert gateway.chat([image_part(PHOTOS[photo])]).status == 200
        hold.touch()
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(gateway.chat, [image_part(PHOTOS[photo])]) for photo in (0, 1, 2, 0)]
            until(lambda: sum(len(worker.seen()) for worker in workers) == 8)
            workers[0].kill()
            hold.unlink()
            assert {one.result().status for one in asked} == {200}
        gateway.given_back()
        found = [record["message"]["mm_inputs"]["items"][0] for worker in workers for record in worker.seen()]
        assert len({(str(item["content_hash"]), item["encoder_input"]["inline"]["sha256"]) for item in found}) == 3


def test_beside_a_vllm_worker_of_the_same_form(tmp_path: Path, bundle: Path) -> None:
    """Files that may be handed on serve both."""
    workers = [Worker(tmp_path, runtime, MODEL, bundle) for runtime in ("tokenspeed", "vllm")]
    bfloat16 = {"SMG_VLLM_ENCODER_INPUT_DTYPE": "bfloat16"}
    with fleet(tmp_path, *workers, flags=SHM, environment=bfloat16) as gateway:
        for photos in ((0,), (1,), (2,), (0,), (0, 1), (1, 2), (0, 1), (1, 2)):
            assert gateway.chat([image_part(PHOTOS[photo]) for photo in photos]).status == 200
        gateway.given_back()
        assert gateway.published() == []
        assert [len(worker.seen()) for worker in workers] == [4, 4]
        assert all(record["by_segment"] for worker in workers for record in worker.seen())


def test_encode_workers_take_them_too(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = unpack_bundle("llava15", tmp_path_factory.mktemp("llava"))
    with running("--epd-disaggregation", *SHM, engines=()) as gateway, contextlib.ExitStack() as stack:
        crew = Crew(gateway, tmp_path, bundle, "tokenspeed", "encode", "prefill", "decode")
        stack.callback(crew.stop)
        encode, names = crew.workers["encode"], set()
        for number in range(6):
            crew.hold("prefill", "decode")  # as those that wait for what the encode worker sends
            asking = crew.ask()
            until(lambda number=number: len(encode.seen("encode")) > number, what="the item")  # type: ignore[misc]
            for role in ("prefill", "decode"):
                crew.holds[role].unlink()
            assert asking.answer.status == 200
            gateway.given_back()
            names |= set(masters(gateway))
        assert 1 <= len(names) <= 2, "used again"
        items = [record["message"]["mm_inputs"]["items"] for record in encode.seen("encode")]
        assert len(items) == 6 and all("shm" in item["encoder_input"] for [item] in items)
        assert "leaves shared-memory names" not in gateway.log()
