"""The RDMA lane's slots, read as a worker reads them: by address, out of the process's own memory."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from engines.base import Tensor
from engines.rdma import LaneUnavailable, RdmaLane, RdmaSettings
from engines.rdma_nixl import NixlExporter
from engines.tensors import tensor_data
from engines.transport import Outgoing, RemoteHandle, Transport, TransportSettings
from tests.engines.fakes import DirectoryStore, Figures
from tests.engines.test_transport import Reader

SLOT = 4096


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Exporter:
    """Memory that is readable because it is our own; notifications that tests put in."""

    def __init__(self):
        self.registered = None
        self.notes = []
        self.closed = False

    def register(self, address, nbytes):
        self.registered = (address, nbytes)

    def notifications(self):
        notes, self.notes = self.notes, []
        return notes

    def close(self):
        self.closed = True


class Torn(Exception):
    """The worker's check of the stamps."""


def lane(slots=2, **settings):
    exporter, clock = Exporter(), Clock()
    settings = {"listen_ip": "10.1.2.3", "pool_slots": slots, "slot_bytes": SLOT, **settings}
    return RdmaLane(RdmaSettings(**settings), exporter, clock), exporter, clock


def parsed(descriptor):
    """As the published servicer reads it."""
    assert descriptor.startswith(b"SMGRDMA1")
    address, generation, key = (int.from_bytes(descriptor[at : at + 8], "little") for at in (8, 16, 24))
    return address, generation, key, int.from_bytes(descriptor[32:34], "little"), descriptor[34:].decode()


def pulled(descriptor, nbytes):
    """Frame and payload in one read, then the stamps."""
    address, generation, *_ = parsed(descriptor)
    frame = ctypes.string_at(address, nbytes + 16)
    if any(int.from_bytes(stamp, "little") != generation for stamp in (frame[:8], frame[-8:])):
        raise Torn
    return frame[8:-8]


def test_a_worker_finds_what_the_descriptor_says():
    made, exporter, _ = lane(slots=3, listen_port=18516)
    lease = made.lease(1000)
    lease.fill([b"a" * 400, memoryview(b"b" * 600)])
    address, _, key, port, ip = parsed(lease.descriptor)
    assert pulled(lease.descriptor, 1000) == b"a" * 400 + b"b" * 600
    assert (port, ip) == (18516, "10.1.2.3") and 0 <= key < 2**63
    begin, nbytes = exporter.registered
    assert begin <= address < begin + nbytes and nbytes == 3 * SLOT
    assert lease.is_unread and made.free == 2
    exporter.notes = [str(key).encode()]
    assert not lease.is_unread and made.free == 3


def test_the_key_may_be_a_room():
    made, exporter, _ = lane()
    lease = made.lease(10, 4242)
    assert parsed(lease.descriptor)[2] == 4242
    assert made.lease(10, 4242) is None, "two readers would answer alike"
    exporter.notes = [b"4242"]
    assert not lease.is_unread


def test_what_does_not_fit_or_finds_no_slot():
    made, _, _ = lane(slots=1)
    assert made.lease(SLOT - 15) is None
    assert made.lease(SLOT - 16) is not None
    assert made.lease(1) is None


def test_slots_take_turns():
    made, _, _ = lane(slots=3)
    addresses = []
    for _ in range(6):
        lease = made.lease(10)
        addresses.append(parsed(lease.descriptor)[0])
        lease.release()
    assert addresses[:3] == addresses[3:] and len({*addresses}) == 3


def test_a_slot_nobody_reads_is_free_when_no_reader_can_be_at_work():
    made, _, clock = lane(slots=1, landing_wait_s=5.0, read_timeout_s=5.0)
    lease = made.lease(10)
    clock.now = 39.9
    assert made.lease(10) is None and lease.is_unread
    clock.now = 40.0
    assert made.lease(10) is not None and not lease.is_unread
    lease.release()
    assert made.free == 0, "that was another lease"


@pytest.mark.parametrize("note", [b"", b"x", b"-1", b"9" * 30, b"12345", "٣".encode()])
def test_words_that_are_no_slot(note):
    made, exporter, _ = lane()
    lease = made.lease(10)
    exporter.notes = [note]
    assert lease.is_unread


def test_a_late_reader_never_takes_another_picture_for_its_own():
    made, _, clock = lane(slots=1)
    first = made.lease(3000)
    first.fill([b"1" * 3000])
    clock.now = 1000.0
    for nbytes in (10, 3000, 2999):
        second = made.lease(nbytes)
        with pytest.raises(Torn):
            second._slot.fill([memoryview(b"2" * nbytes), _Peek(lambda: pulled(first.descriptor, 3000))])
        second.fill([b"2" * nbytes])
        with pytest.raises(Torn):
            pulled(first.descriptor, 3000)
        assert pulled(second.descriptor, nbytes) == b"2" * nbytes
        second.release()


class _Peek:
    """A buffer whose copying is a look at the slot in mid-copy."""

    def __init__(self, look):
        self._look = look

    def __len__(self):
        return self._look() and 0


LEASES = st.tuples(st.just("lease"), st.integers(0, SLOT - 16), st.integers(0, 255))
STEPS = st.lists(LEASES | st.tuples(st.sampled_from(["read", "notify", "consume", "wait"]), st.integers(0, 9)))


@given(STEPS, st.integers(1, 3))
@examples(max_examples=60)
def test_no_order_of_events_shows_wrong_pixels(steps, slots):
    made, exporter, clock = lane(slots=slots, landing_wait_s=1.0, read_timeout_s=1.0)
    leases = []  # (lease, payload), the newest last
    for step in steps:
        if step[0] == "lease":
            lease = made.lease(step[1])
            if lease is not None:
                payload = bytes([step[2]]) * step[1]
                lease.fill([payload])
                leases.append((lease, payload))
        elif step[0] == "wait":
            clock.now += 4.0 * step[1]
        elif leases:
            lease, payload = leases[-1 - step[1] % len(leases)]
            if step[0] == "notify":
                exporter.notes.append(str(parsed(lease.descriptor)[2]).encode())
            elif step[0] == "consume":
                lease.release()
            elif lease.is_unread:
                assert pulled(lease.descriptor, len(payload)) == payload
            else:
                try:
                    assert pulled(lease.descriptor, len(payload)) == payload
                except Torn:
                    pass
        assert made.free + sum(lease.is_unread for lease, _ in leases) == slots


# ---------------------------------------------------------------- as a transport


def primary(nbytes=1000, **options):
    data = bytes(range(250)) * (nbytes // 250)
    return Outgoing("0/encoder_input", Tensor("uint8", (nbytes,), (data[:400], data[400:])), **options)


GRID = Outgoing("0/image_grid_thw", Tensor("int64", (1, 3), (bytes(24),)), inline_only=True)
TOKENSPEED = Reader(runtime="tokenspeed", keeps_segments=True, pulls_tensors=True)


@pytest.fixture
def sender(tmp_path):
    def make(made, **settings):
        settings = {"mode": "rdma", "writable": True, "namespace": "boot:1", "owner_id": "smg:7", **settings}
        figures = Figures()
        return Transport(TransportSettings(**settings), DirectoryStore(tmp_path), figures, made), figures

    return make


async def test_a_tensor_is_pulled_and_side_tensors_are_in_the_message(sender):
    made, exporter, _ = lane()
    transport, figures = sender(made)
    placement = await transport.place([GRID, primary(may_be_pulled=True, room=7)], TOKENSPEED)
    handle = placement.handles["0/encoder_input"]
    assert pulled(handle.descriptor, 1000) == b"".join(primary().tensor.buffers)
    assert set(placement.handles) == {"0/encoder_input"}
    assert figures.tensors == [("tokenspeed", "inline", 24), ("tokenspeed", "remote", 1000)]
    assert placement.is_unread
    exporter.notes = [b"7"]
    assert not placement.is_unread
    await transport.end(placement, consumed=True)
    assert made.free == 2


@pytest.mark.parametrize("consumed", [True, False])
async def test_a_failed_attempts_slot_waits_for_its_reader(sender, consumed):
    made, _, clock = lane()
    transport, _ = sender(made)
    placement = await transport.place([primary(may_be_pulled=True)], TOKENSPEED)
    await transport.end(placement, consumed=consumed)
    assert made.free == (2 if consumed else 1)
    clock.now = 210.0
    assert made.free == 2


@pytest.mark.parametrize(("namespace", "path"), [("boot:1", "shm"), ("elsewhere", "inline")])
async def test_without_a_free_slot_by_segment_where_it_is_shared(sender, namespace, path):
    made, _, _ = lane(slots=1)
    transport, figures = sender(made, shm_min_bytes=1)
    held = made.lease(1)
    reader = Reader(runtime="tokenspeed", keeps_segments=True, pulls_tensors=True, namespace=namespace)
    placement = await transport.place([GRID, primary(may_be_pulled=True)], reader)
    assert figures.tensors == [("tokenspeed", "inline", 24), ("tokenspeed", path, 1000)]
    await transport.end(placement, consumed=True)
    assert held.is_unread


@pytest.mark.parametrize("reader", [Reader(), Reader(runtime="tokenspeed", keeps_segments=True, pulls_tensors=True)])
async def test_without_a_lane_everything_is_inline(sender, reader):
    transport, figures = sender(None, shm_min_bytes=1)
    assert not transport.reads_segments(reader) and not transport.writes_ahead(reader)
    placement = await transport.place([GRID, primary(may_be_pulled=True)], reader)
    assert placement.handles == {} and {path for _, path, _ in figures.tensors} == {"inline"}


async def test_an_engine_that_cannot_pull_gets_the_message(sender):
    made, _, _ = lane()
    transport, figures = sender(made, shm_min_bytes=1)
    await transport.place([primary()], Reader())
    assert figures.tensors == [("vllm", "inline", 1000)] and made.free == 2


def test_a_remote_tensor_in_the_message():
    data = tensor_data(pb.TensorData, primary().tensor, RemoteHandle(b"SMGRDMA1...", 1000))
    assert (data.remote.transport, data.remote.descriptor, data.remote.nbytes) == ("nixl", b"SMGRDMA1...", 1000)
    assert data.WhichOneof("payload") == "remote" and list(data.shape) == [1000]


def test_without_the_package_there_is_no_lane(monkeypatch):
    monkeypatch.setattr("engines.rdma_nixl._PACKAGES", ("no_such_nixl._api",))
    with pytest.raises(LaneUnavailable, match="nixl is not installed"):
        NixlExporter(18515)
