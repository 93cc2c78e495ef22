"""References of H.264 clips that nobody needs: headers as libavcodec reads them, frames as full decoding shows them."""

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import av
import av.logging
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.media import video, video_frames
from pipeline.media.h264_headers import (
    BIPREDICTED,
    INTRA,
    PREDICTED,
    WINDOW,
    Sets,
    Slice,
    Unclear,
    parameter_sets,
    read_slice,
)
from pipeline.media.h264_references import Headers, Held, Memory, references, referred_to
from pipeline.media.nal_units import length_bytes
from pipeline.media.video_frames import Effort
from pipeline.models.base import Hints, MediaError
from tests.pipeline.clips import clip, moving_noise

# Every third frame would be a reference of nobody's: with one reference, pictures between refer to the nearest.
PYRAMID = "keyint=60:min-keyint=60:scenecut=0:b-adapt=0:bframes=3:b-pyramid=normal:ref=1"


def always() -> None:
    """There is time."""


def made(params: str, count: int = 60, size: tuple[int, int] = (48, 64), **more: Any) -> bytes:
    options = {"x264-params": f"{params}:threads=1", "crf": more.pop("crf", "23")}
    return clip(moving_noise(count, *size), options=options, **more)


def patchwork(count: int, height: int = 96, width: int = 128) -> list[Any]:
    """Frames whose blocks have each been seen before, one to six frames ago: something for every reference."""
    noise = np.random.default_rng(3)
    frames = [noise.integers(0, 256, (height, width, 3), np.uint8) for _ in range(6)]
    for _ in range(count):
        frame = frames[-1].copy()
        for top in range(0, height, 16):
            for left in range(0, width, 16):
                place = slice(top, top + 16), slice(left, left + 16)
                frame[place] = frames[-int(noise.integers(1, 7))][place]
        frame[:16, :32] = noise.integers(0, 256, (16, 32, 3))
        frames.append(frame)
    return frames[6:]


def taken(data: bytes, indices: Sequence[int]) -> Any:
    found = video.frames(memoryview(data), lambda frames, rate: indices, Hints(), always)
    return np.stack([np.asarray(one) for one in found])


def all_of(data: bytes) -> Any:
    """Every frame, by a loop that saves nothing."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture
def efforts(monkeypatch: pytest.MonkeyPatch) -> Counter[Effort]:
    """How many packets were treated how, of the clips of this test."""
    counted: Counter[Effort] = Counter()
    spare = video_frames.spare_references

    def noted(found: list[Effort], *rest: Any) -> None:
        spare(found, *rest)
        counted.update(found)

    monkeypatch.setattr(video_frames, "spare_references", noted)
    return counted


STRUCTURES = {
    "pyramid": PYRAMID,
    "strict pyramid": PYRAMID.replace("normal", "strict"),
    "deep pyramid": PYRAMID.replace("bframes=3", "bframes=9"),
    "several slices": f"{PYRAMID}:slices=3",
    "vectors in time": f"{PYRAMID}:direct=temporal",
    "no arithmetic coding": f"{PYRAMID}:cabac=0:weightp=0",
    "references with weights": f"{PYRAMID}:weightp=2:weightb=1",
    "many key frames": PYRAMID.replace("keyint=60:min-keyint=60", "keyint=12:min-keyint=12"),
    "delimiters, sets repeated": f"{PYRAMID}:aud=1:repeat-headers=1",
}


@pytest.mark.parametrize("container", ["mp4", "mpegts"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_references_nobody_needs_are_not_decoded(name: str, container: str, efforts: Counter[Effort]) -> None:
    data = made(STRUCTURES[name], container=container)
    whole = all_of(data)
    for indices in ([0, 29, 59], [5, 21, 38, 52], [13], [2, 3, 30]):
        assert np.array_equal(taken(data, indices), whole[indices]), indices
    assert efforts[Effort.HEADERS] > 3


# Not followed, or with nothing to leave out: everything is decoded as far as others refer to it.
WHOLE = {
    "no pyramid": PYRAMID.replace("normal", "none"),
    "two references": PYRAMID.replace("ref=1", "ref=2"),
    "all refer to all": f"{PYRAMID.replace('ref=1', 'ref=16')}:mixed-refs=1",
    "fields": f"{PYRAMID}:tff=1",
    "fields in name only": f"{PYRAMID}:fake-interlaced=1",
    "intra refresh": "intra-refresh=1:keyint=12:min-keyint=12:bframes=0:ref=3",
    "no key frame but the first is IDR": PYRAMID.replace("keyint=60:min-keyint=60", "keyint=9:min-keyint=9:open-gop=1"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_structures_are_decoded_as_before(name: str, efforts: Counter[Effort]) -> None:
    data = made(WHOLE[name])
    whole = all_of(data)
    for indices in ([0, 29, 59], [5, 21, 38, 52], [9, 14, 42, 50, 55]):
        assert np.array_equal(taken(data, indices), whole[indices]), indices
    if name.startswith(("no pyramid", "fields", "intra")):
        assert not efforts[Effort.HEADERS]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_choice_from_any_structure(data: st.DataObject) -> None:
    def one_of(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    params = {
        "keyint": one_of(7, 20, 250),
        "bframes": one_of(1, 2, 3, 5, 7, 16),
        "b-adapt": one_of(0, 0, 2),
        "b-pyramid": one_of("normal", "strict"),
        "ref": one_of(1, 1, 2, 3, 5),
        "open-gop": one_of(0, 0, 1),
        "weightp": one_of(0, 1, 2),
        "weightb": one_of(0, 1),
        "direct": one_of("none", "spatial", "temporal", "auto"),
        "slices": one_of(1, 1, 2),
        "cabac": one_of(0, 1),
    }
    joined = ":".join(f"{name}={value}" for name, value in params.items())
    written = clip(patchwork(40, 48, 64), options={"x264-params": f"{joined}:threads=1"})
    indices = sorted(data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=5)))
    assert np.array_equal(taken(written, indices), all_of(written)[indices])


def packets_of(data: bytes) -> Iterator[tuple[Any, Any]]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        for packet in container.demux(stream):
            if packet.size:
                yield stream, packet


def headers_of(data: bytes) -> Headers:
    headers = None
    for stream, packet in packets_of(data):
        headers = headers or Headers(stream)
        headers.see(packet)
    assert headers is not None
    return headers


def decoded(data: bytes, hollow: Sequence[int]) -> list[tuple[Any, Any, Any]]:
    """Time, kind and pixels of every frame when these packets come without macroblocks."""
    found, headers = [], headers_of(data)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        for at, packet in enumerate(container.demux(stream)):
            given = headers.hollow(packet) if at in hollow else packet
            for frame in stream.codec_context.decode(given if given.size else None):
                found.append((frame.pts, frame.pict_type, frame.to_ndarray(format="rgb24")))
    return found


@pytest.mark.parametrize("container", ["mp4", "mpegts"])
def test_a_hollow_picture_takes_its_place(container: str) -> None:
    """All but the first without macroblocks: the decoder shows as many frames, at the same times, of the same kinds."""
    data = made(f"{PYRAMID}:slices=2", container=container)
    full, hollow = decoded(data, ()), decoded(data, range(1, 60))
    assert [one[:2] for one in hollow] == [one[:2] for one in full]
    assert np.array_equal(hollow[0][2], full[0][2])
    assert not any(np.array_equal(one[2], other[2]) for one, other in zip(hollow[1:], full[1:], strict=True))


EXAMINED = {
    "pyramid": PYRAMID,
    "strict pyramid": PYRAMID.replace("normal", "strict"),
    "deep pyramid, several slices": f"{PYRAMID.replace('bframes=3', 'bframes=7').replace('ref=1', 'ref=4')}:slices=2",
    "no pyramid": f"{PYRAMID.replace('normal', 'none').replace('ref=1', 'ref=3')}",
    "weights, references twice": f"{PYRAMID.replace('ref=1', 'ref=3')}:weightp=2:direct=temporal",
    "numbers that start anew": PYRAMID.replace("keyint=60:min-keyint=60", "keyint=8:min-keyint=8:open-gop=1"),
    "no arithmetic coding": f"{PYRAMID.replace('ref=1', 'ref=2')}:bframes=1:cabac=0",
}
PATCHWORKS = 40


@pytest.mark.parametrize("name", EXAMINED)
def test_what_looks_otherwise_without_a_reference(name: str) -> None:
    """References come without macroblocks, one at a time: nothing looks otherwise but what depends on it, directly or
    not, and of that nearly all.
    """
    data = clip(patchwork(PATCHWORKS), options={"x264-params": f"{EXAMINED[name]}:threads=1", "crf": "15"})
    pictures = [packet.pts for _, packet in packets_of(data)]
    lists = references(headers_of(data), range(PATCHWORKS), always)
    right = {time: pixels for time, _, pixels in decoded(data, ())}
    said, seen = 0, 0
    for at in sorted(set().union(*lists.values()))[::2]:
        depends = {at}
        for later in range(at + 1, PATCHWORKS):
            if lists[later] & depends:
                depends.add(later)
        shown = {time: pixels for time, _, pixels in decoded(data, [at])}
        changed = {place for place, time in enumerate(pictures) if not np.array_equal(shown[time], right[time])}
        assert changed <= depends
        said, seen = said + len(depends), seen + len(changed)
    assert seen >= 0.97 * said, (seen, said)


_FIELD = re.compile(r"^\d+ +(\w+)(?:\[\d+\])* +[01]+ = (-?\d+)$")


def traced(data: bytes) -> list[list[tuple[str, int]]]:
    """The slice headers as libavcodec's own tracer reads them: names and values, slice by slice."""
    av.logging.set_level(av.logging.INFO)
    try:
        with av.logging.Capture() as lines, av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            tracer = BitStreamFilterContext("trace_headers", stream)
            for packet in container.demux(stream):
                tracer.filter(packet if packet.size else None)
    finally:
        av.logging.set_level(av.logging.PANIC)
    found: list[list[tuple[str, int]]] = []
    is_slice = False
    for _, name, line in lines:
        text = line.strip()
        if name != "trace_headers":
            continue
        if not text[:1].isdigit():
            is_slice = text == "Slice Header"
            found += [[]] if is_slice else []
        elif is_slice and (field := _FIELD.match(text)):
            found[-1].append((field[1], int(field[2])))
    return found


TRACED = {
    "pyramid": f"{PYRAMID}:slices=2",
    "weights": "bframes=3:b-adapt=0:weightp=2:ref=4",
    "strict": f"{PYRAMID.replace('normal', 'strict')}:cabac=0",
    "gray": "bframes=2:weightp=2:ref=3",
    "high": "bframes=2:weightp=2:ref=3:cqm=jvt",
}


@pytest.mark.parametrize("name", TRACED)
def test_headers_are_read_as_libavcodec_reads_them(name: str) -> None:
    pixels = {"gray": "gray", "high": "yuv444p"}.get(name, "yuv420p")
    data = made(TRACED[name], 40, pixels=pixels)
    headers, expected = headers_of(data), iter(traced(data))
    for at in range(40):
        for mine in headers.picture(at):
            fields = next(expected)
            first = dict(reversed(fields))
            assert mine.kind == first["slice_type"] % 5
            assert mine.is_idr == (first["nal_unit_type"] == 5)
            assert mine.is_referred_to == bool(first["nal_ref_idc"])
            assert mine.frame_number == first["frame_num"]
            assert mine.order == first["pic_order_cnt_lsb"]
            if first.get("num_ref_idx_active_override_flag"):
                assert mine.active[0] == first["num_ref_idx_l0_active_minus1"] + 1
                if mine.kind == BIPREDICTED:
                    assert mine.active[1] == first["num_ref_idx_l1_active_minus1"] + 1
            changes = [value + 1 for name, value in fields if name == "abs_diff_pic_num_minus1"]
            assert [change for _, change in mine.changes[0] + mine.changes[1]] == changes
            if mine.is_referred_to and not mine.is_idr:
                assert (mine.unmarked is not None) == bool(first["adaptive_ref_pic_marking_mode_flag"])
                dropped = [value + 1 for name, value in fields if name == "difference_of_pic_nums_minus1"]
                assert list(mine.unmarked or ()) == dropped
    assert next(expected, None) is None


SETS = Sets(4, True, 4, 4, True, False, (1, 1), False, False)
P = Slice(PREDICTED, False, True, SETS, 0, 0, 0, (2, 0), ((), ()), None)
B = P._replace(kind=BIPREDICTED, active=(2, 1))


def held(*orders: int) -> list[Held]:
    """References of these orders of showing, the youngest first; `at` as their order."""
    return [Held(order, len(orders) - 1 - place, order) for place, order in enumerate(orders)]


@pytest.mark.parametrize(
    ("header", "orders", "expected"),
    [
        (P, (4, 2, 8, 0), [4, 2]),
        (P._replace(active=(1, 0)), (4, 2, 8, 0), [4]),
        (B, (4, 2, 8, 0), [4, 2, 8]),
        (B._replace(active=(1, 2)), (4, 2, 8, 0), [4, 8, 4]),
        (B._replace(active=(3, 1)), (8, 6, 0), [0, 6, 8, 6]),
        # all on one side: the second list would be the first, so its first two change places
        (B._replace(active=(1, 1)), (4, 2, 0), [4, 2]),
        (B._replace(active=(1, 1)), (4,), [4, 4]),
        # changes: steps back and forth among the numbers, 4 being the picture's own
        (P._replace(changes=(((0, 3),), ())), (4, 2, 8, 0), [8, 4]),
        (P._replace(changes=(((0, 3), (1, 1)), ())), (4, 2, 8, 0), [8, 2]),
        (P._replace(changes=(((1, 13),), ())), (4, 2, 8, 0), [8, 4]),
        (P._replace(active=(3, 0), changes=(((0, 1), (1, 16)), ())), (4, 2, 8, 0), [4, 4, 2]),
        (B._replace(active=(1, 1), changes=((), ((0, 4),))), (4, 2, 8, 0), [4, 0]),
    ],
)
def test_lists_as_the_standard_has_them(header: Slice, orders: tuple[int, ...], expected: list[int]) -> None:
    """8.2.4.2 and 8.2.4.3, by hand; the picture is shown at 5, its number follows the youngest's."""
    found = referred_to(header, held(*orders), len(orders), 5)
    assert [one.order for one in found] == expected


@pytest.mark.parametrize(
    "header",
    [
        P._replace(active=(5, 0)),
        B._replace(active=(1, 5)),
        P._replace(changes=(((0, 5),), ())),
        P._replace(changes=(((0, 16),), ())),
        P._replace(active=(1, 0), changes=(((0, 1), (0, 1)), ())),
    ],
)
def test_a_list_that_lacks_something_is_unclear(header: Slice) -> None:
    with pytest.raises(Unclear):
        list(referred_to(header, held(4, 2, 8, 0), 4, 5))


def test_every_slice_of_a_picture_has_its_own_lists() -> None:
    """Its youngest reference, and the one before."""
    memory = Memory()
    memory.take(10, [P._replace(kind=INTRA, is_idr=True, active=(0, 0), unmarked=())])
    memory.take(11, [P._replace(frame_number=1, order=4, active=(1, 0))])
    other = P._replace(frame_number=2, order=8, active=(1, 0), changes=(((0, 2),), ()))
    assert memory.take(12, [other._replace(changes=((), ())), other]) == {10, 11}


def test_other_parameter_sets_on_the_way_are_not_followed() -> None:
    """As when two recordings are put one behind the other."""
    first, second = (made(f"{PYRAMID}:repeat-headers=1", 20, size, container="mpegts") for size in ((48, 64), (32, 48)))
    headers = headers_of(first)
    for data in (second, first):
        for _, packet in packets_of(data):
            headers.see(packet)
    assert len(headers.picture(0)) == 1
    for at in (20, 40):  # nor, from then on, what looks like the first ones
        with pytest.raises(Unclear):
            headers.picture(at)
        assert not headers.is_idr(at)
        assert headers.is_beginning(at)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80), st.binary(min_size=1, max_size=WINDOW))
def test_whatever_is_read_is_an_answer_or_unclear(sets: bytes, unit: bytes) -> None:
    """Of made-up bytes, and of a real header that goes on with made-up bytes."""
    for extradata in (sets, b"\0\0\1\x67" + sets, b"\1" + sets):
        try:
            parameter_sets(extradata)
        except Unclear:
            continue
    pictures, _ = parameter_sets(REAL_SETS)
    for start in (b"", b"\x41\x9a", b"\x01\x9e", b"\x65\x88"):
        try:
            macroblock, header = read_slice(start + unit, pictures)
        except Unclear:
            continue
        assert macroblock >= 0
        assert max(header.active) <= 32


REAL_SETS = next(stream.codec_context.extradata for stream, _ in packets_of(made(PYRAMID, 4)))


def test_damage_is_an_answer() -> None:
    """Whatever is missing or wrong in a clip whose references are left out: frames of the right size, or a refusal."""
    data = made(PYRAMID, 24)
    noise = np.random.default_rng(7)
    outcomes = Counter[Any]()
    for at in noise.integers(0, len(data), 80):
        broken = data[:at] + bytes([data[at] ^ 1 << int(noise.integers(0, 8))]) + data[at + 1 :]
        try:
            outcomes[taken(broken, [1, 6, 14, 23]).shape] += 1
        except MediaError as error:
            assert len(str(error)) < 400
            outcomes["refused"] += 1
    assert outcomes["refused"] < 80 and outcomes[4, 48, 64, 3] > 0


def with_lengths(extradata: bytes) -> bytes:
    """The one sequence and the one picture parameter set of an MP4 file, as units of a packet."""
    middle = 8 + int.from_bytes(extradata[6:8], "big")
    end = middle + 3 + int.from_bytes(extradata[middle + 1 : middle + 3], "big")
    sets = extradata[8:middle], extradata[middle + 3 : end]
    return b"".join(len(one).to_bytes(4, "big") + one for one in sets)


def test_two_recordings_in_one_track() -> None:
    """Joined without coding them again: the second one's parameter sets come with its key frames."""
    params = PYRAMID.replace("keyint=60:min-keyint=60", "keyint=10:min-keyint=10")
    parts = made(params, 30), made(f"{params}:ref=3:weightp=0", 30)
    joined, at = io.BytesIO(), 0
    with av.open(joined, "w", format="matroska") as out:
        track: Any = None
        for part in parts:
            for stream, packet in packets_of(part):
                track = track or out.add_stream_from_template(stream)
                if part is parts[1] and packet.is_keyframe:
                    sets = with_lengths(stream.codec_context.extradata)
                    fresh = av.Packet(sets + bytes(packet))
                    fresh.is_keyframe, fresh.time_base = True, packet.time_base
                    fresh.pts, fresh.dts = packet.pts, packet.dts
                    packet = fresh
                packet.stream = track
                packet.pts, packet.dts = packet.pts + at, packet.dts + at
                out.mux(packet)
            at += 30 * 1024
    data = joined.getvalue()
    whole = all_of(data)
    assert len(whole) == 60
    for indices in ([3, 17, 29], [3, 33, 47, 58], [44, 52]):
        assert np.array_equal(taken(data, indices), whole[indices])


def test_a_packet_of_nothing_but_start_codes_is_left_alone() -> None:
    """However long it is, only its beginning is looked at."""
    stream, _ = next(packets_of(made(PYRAMID, 4, container="mpegts")))
    headers = Headers(stream)
    packet = av.Packet(b"\0\0\1\x65" * 3_000_000)
    packet.time_base, packet.is_keyframe = Fraction(1, 10), True
    headers.see(packet)
    assert not headers.is_beginning(0)
    with pytest.raises(Unclear):
        headers.picture(0)
    assert headers.hollow(packet) is packet


def test_lengths_without_room_leave_a_packet_as_it_is() -> None:
    """Where the length before a unit is one byte, seven more may not fit."""
    data = made(PYRAMID, 4)
    stream, _ = next(packets_of(data))
    headers = Headers(stream)
    assert length_bytes("h264", stream.codec_context.extradata) == 4
    headers._prefix = 1
    for data, fits in ((b"\xff\x41" + bytes(254), False), (b"\x03\x41\x9a\x02", True)):
        packet = av.Packet(data)
        packet.time_base = Fraction(1, 10)
        assert (headers.hollow(packet) is packet) is not fits
