"""Inline or shared memory: who gets segments, from which size on, and that every failure goes inline and leaves
nothing.
"""

import asyncio
import os
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from engines.base import Tensor
from engines.transport import Outgoing, Transport, TransportSettings, shm_namespace
from tests.engines.fakes import DirectorySegment, DirectoryStore, Figures


@dataclass
class Reader:
    url: str = "grpc://engine:1"
    runtime: str = "vllm"
    takes_segments: bool = True
    keeps_segments: bool = False
    pulls_tensors: bool = False
    tensor_transport: str | None = None
    shm_min_bytes: int | None = None
    namespace: str = "boot:1"

    def shares_memory(self, namespace):
        return namespace is not None and namespace == self.namespace


def tensor(nbytes):
    data = bytes(range(256)) * (nbytes // 256 + 1)
    half = nbytes // 2
    return Tensor("uint8", (nbytes,), (memoryview(data)[:half], memoryview(data)[half:nbytes]))


def out(key, nbytes, **options):
    return Outgoing(key, tensor(nbytes), **options)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path)


@pytest.fixture
def figures():
    return Figures()


@pytest.fixture
def transport(store, figures):
    made = []

    def make(**settings):
        settings = {"mode": "shm", "writable": True, "namespace": "boot:1", "owner_id": "smg:7", **settings}
        made.append(Transport(TransportSettings(**settings), store, figures))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("settings", "reader", "expected"),
    [
        ({}, Reader(), True),
        ({"writable": False}, Reader(), False),
        ({}, Reader(takes_segments=False), False),
        ({}, Reader(namespace="elsewhere"), True),  # shm: the operator vouches
        ({"mode": "auto"}, Reader(), True),
        ({"mode": "auto"}, Reader(namespace="elsewhere"), False),
        ({"mode": "auto", "namespace": None}, Reader(), False),
        ({"mode": "inline"}, Reader(), False),
        ({"mode": "rdma"}, Reader(), False),
        ({"mode": "inline"}, Reader(tensor_transport="shm"), True),
        ({"mode": "shm"}, Reader(tensor_transport="inline"), False),
        ({"mode": "inline"}, Reader(tensor_transport="auto"), True),
    ],
)
def test_who_is_given_segments(transport, settings, reader, expected):
    assert transport(**settings).reads_segments(reader) is expected


@pytest.mark.parametrize(
    ("gateway", "worker", "placed"),
    [(1000, None, {"big"}), (0, None, {"big", "small"}), (1000, 0, {"big", "small"}), (0, 5000, set())],
)
async def test_from_which_size_on(transport, store, figures, gateway, worker, placed):
    """The worker's own threshold wins; 0 means every tensor, but an empty one has nothing to put into a file."""
    tensors = [out("big", 1000), out("small", 24), out("empty", 0), out("grid", 2000, inline_only=True)]
    sender = transport(shm_min_bytes=gateway)
    placement = await sender.place(tensors, Reader(shm_min_bytes=worker))
    assert set(placement.handles) == placed
    paths = {out.key: "shm" if out.key in placed else "inline" for out in tensors}
    assert figures.tensors == [("vllm", paths[out.key], out.tensor.nbytes) for out in tensors]
    await sender.end(placement, consumed=True)
    assert store.files == []


async def test_handle_names_a_file_with_the_bytes(transport, store):
    sender = transport(shm_min_bytes=1)
    placement = await sender.place([out("a", 1000)], Reader())
    handle = placement.handles["a"]
    assert (handle.nbytes, handle.owner_id) == (1000, "smg:7")
    assert (store.directory / handle.name).read_bytes() == b"".join(tensor(1000).buffers)
    await sender.end(placement, consumed=False)


async def test_own_segment_is_published_not_copied_and_stays_the_callers(transport, store):
    mine = DirectorySegment(store, tensor(1000).buffers)
    sender = transport(shm_min_bytes=1)
    placement = await sender.place([out("a", 1000, segment=mine)], Reader())
    assert os.stat(store.directory / placement.handles["a"].name).st_nlink == 2
    assert store.segments == []
    await sender.end(placement, consumed=True)
    assert mine.settled is None
    mine.settle(consumed=True)
    assert store.files == []


@pytest.mark.parametrize("is_handed_on", [True, False])
async def test_who_hands_names_on_takes_only_segments_that_may_be(transport, store, is_handed_on):
    mine = DirectorySegment(store, tensor(1000).buffers, is_handed_on=is_handed_on)
    sender = transport(shm_min_bytes=1)
    keeper = Reader(runtime="tokenspeed", keeps_segments=True)
    placement = await sender.place([out("a", 1000, segment=mine)], keeper)
    assert [copied.is_handed_on for copied in store.segments] == ([] if is_handed_on else [True])
    assert (store.directory / placement.handles["a"].name).read_bytes() == b"".join(tensor(1000).buffers)
    await sender.end(placement, consumed=True)
    mine.settle(consumed=True)
    assert store.files == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_each_attempt_has_a_use_of_its_own_of_what_is_handed_on(transport, store, order):
    """Encode workers are done with the items of a request one after the other, and perhaps after the request is."""
    mine = DirectorySegment(store, tensor(1000).buffers, is_handed_on=True)
    sender = transport(shm_min_bytes=1)
    keepers = [Reader(url=url, runtime="tokenspeed", keeps_segments=True) for url in "ab"]
    placements = [await sender.place([out("x", 1000, segment=mine)], keeper) for keeper in keepers]
    names = [placement.handles["x"].name for placement in placements]
    mine.settle(consumed=True, reader="prefill")
    first, second = order
    await sender.end(placements[first], consumed=first == 0)
    assert store.files == [mine.master.name, names[second]]
    await sender.end(placements[second], consumed=second == 0)
    assert store.files == []
    assert [(use.settled, use.reader) for use in mine.uses] == [(True, "prefill"), (True, "a"), (False, "b")]


@pytest.mark.parametrize(("mode", "ahead"), [("shm", True), ("inline", False), ("rdma", False)])
async def test_nothing_is_written_ahead_where_slots_come_first(store, figures, mode, ahead):
    settings = TransportSettings("smg:7", mode=mode, writable=True, namespace="boot:1")
    sender = Transport(settings, store, figures, lane=SimpleNamespace())
    keeper = Reader(runtime="tokenspeed", keeps_segments=True, pulls_tensors=True)
    assert sender.writes_ahead(keeper) is ahead
    assert sender.reads_segments(keeper) is (mode != "inline")


async def test_own_segment_of_a_failed_attempt_can_be_published_again(transport, store):
    mine = DirectorySegment(store, tensor(1000).buffers)
    sender = transport(shm_min_bytes=1)
    first = await sender.place([out("a", 1000, segment=mine)], Reader())
    await sender.end(first, consumed=False)
    assert store.files == [mine.master.name]
    second = await sender.place([out("a", 1000, segment=mine)], Reader())
    assert second.handles["a"].name != first.handles["a"].name
    mine.settle(consumed=True)


@pytest.mark.parametrize("consumed", [True, False])
async def test_end_withdraws_and_settles_once(transport, store, consumed):
    sender = transport(shm_min_bytes=1)
    placement = await sender.place([out("a", 10), out("b", 10)], Reader())
    (store.directory / placement.handles["a"].name).unlink()  # the engine has read this one
    await sender.end(placement, consumed=consumed)
    await sender.end(placement, consumed=not consumed)
    assert store.files == []
    assert [(segment.settled, segment.reader) for segment in store.segments] == [(consumed, "grpc://engine:1")] * 2


@pytest.mark.parametrize("trouble", ["no room", "write", "publish", "own segment", "no store"])
async def test_every_failure_goes_inline(transport, store, figures, trouble, caplog):
    tensors = [out("a", 100), out("b", 100)]
    sender = transport(shm_min_bytes=1)
    if trouble == "no room":
        store.room = False
    elif trouble == "write":
        store.write_error = OSError(28, "No space left on device")
    elif trouble == "no store":
        sender._store = None
    else:
        store.publish_error = OSError(1, "not permitted")
    if trouble == "own segment":
        tensors = [out(key, 100, segment=DirectorySegment(store, [b"x"])) for key in "ab"]
    placement = await sender.place(tensors, Reader())
    assert placement.handles == {}
    assert figures.failures == ["vllm", "vllm"]
    assert figures.tensors == [("vllm", "inline", 100)] * 2
    assert "goes inline" in caplog.text
    await sender.end(placement, consumed=False)
    assert [name for name in store.files if name.startswith("published")] == []
    assert all(segment.settled is False for segment in store.segments)


async def test_one_stuck_file_does_not_keep_the_others(transport, store, caplog):
    sender = transport(shm_min_bytes=1)
    placement = await sender.place([out("a", 10), out("b", 10)], Reader())

    def refuse():
        raise OSError(1, "not permitted")

    store.segments[0].withdraw = refuse
    await sender.end(placement, consumed=False)
    assert [segment.settled for segment in store.segments] == [False, False]
    assert not store.segments[1].master.exists()
    assert "could not be removed" in caplog.text


async def test_cancelled_while_copying(transport, store):
    """The buffers are read to the end before the caller may go on, and nothing stays."""
    started, go_on = threading.Event(), threading.Event()
    write = store.write

    def slow(buffers, *, handed_on):
        started.set()
        go_on.wait(10)
        return write(buffers, handed_on=handed_on)

    store.write = slow
    sender = transport(shm_min_bytes=1)
    placing = asyncio.create_task(sender.place([out("a", 10)], Reader()))
    while not started.is_set():
        await asyncio.sleep(0.001)
    placing.cancel()
    await asyncio.sleep(0.02)
    placing.cancel()
    await asyncio.sleep(0.02)
    assert not placing.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await placing
    assert store.files == []
    assert [segment.settled for segment in store.segments] == [False]


def test_namespace_is_boot_id_and_device(tmp_path):
    found = shm_namespace()
    boot, device = found.rsplit(":", 1)
    assert len(boot) == 36 and int(device) == os.stat("/dev/shm").st_dev
    assert shm_namespace(str(tmp_path / "missing")) is None
