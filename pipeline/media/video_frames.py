"""The frames of a clip that are wanted, and little else: what nobody wants is decoded as far as others refer to it.

A packet whose frame is not wanted is decoded only when it is a reference (`skip_frame` NONREF), of H.264 only when one
that is decoded may refer to it (`h264_references.py`).  From the last wanted frame of a run of packets that starts with
a key frame to the next such run nothing is decoded at all: the decoder is emptied and starts afresh, as after a seek.
So are frames of a run that are shown before its key frame left out, unless wanted: they refer to the run before.
All savings are given up, and the clip is decoded in full (`thrifty` false), when a frame does not come out at the time
its packet promised.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from pipeline.media.h264_references import Headers, dispensable
from pipeline.media.video_timeline import Note, Timeline, packets
from pipeline.models.base import MediaError


class Missed(Exception):
    """A wanted frame did not come out where its packet said."""


class Effort(IntEnum):
    """What is done with a packet."""

    NONE = 0  # not decoded: the decoder starts afresh behind it
    LEFT_OUT = 1  # not decoded, and nothing behind it refers to it
    HEADERS = 2  # taken in without its macroblocks
    IF_REFERRED_TO = 3
    FULL = 4


def wanted_frames(
    container: InputContainer,
    stream: VideoStream,
    timeline: Timeline,
    indices: Sequence[int],
    check: Callable[[], None],
    *,
    thrifty: bool,
    headers: Headers | None = None,
) -> Iterator[VideoFrame]:
    """The frames at `indices` (ascending, repetitions allowed) of the timeline, one for each index.

    `headers`: of an H.264 stream, when it has seen every packet.  `thrifty`: raises Missed for a frame that does not
    appear; else the next one that does stands for it, at the end the last one.  Raises MediaError when there is none at
    all, and what the decoder raises.
    """
    if timeline.times:
        aims: Sequence[int] = [timeline.times[index] for index in indices]
        efforts = _planned(timeline.notes, frozenset(aims), headers, check) if thrifty else None
        shown = ((frame.pts, frame) for frame in _decoded(container, stream, efforts, headers, check))
    else:
        aims = indices
        shown = enumerate(_decoded(container, stream, None, None, check))  # type: ignore[assignment]
    at, last = 0, None
    for time, frame in shown:
        last = frame
        if time is None:
            continue
        if thrifty and timeline.times and time > aims[at]:
            raise Missed
        while aims[at] <= time:
            yield frame
            at += 1
            if at == len(aims):
                return
    if thrifty and timeline.times:
        raise Missed
    if last is None:
        raise MediaError("video decode error: no frame could be decoded")
    for _ in range(at, len(aims)):
        yield last


def _decoded(
    container: InputContainer,
    stream: VideoStream,
    efforts: Sequence[Effort] | None,
    headers: Headers | None,
    check: Callable[[], None],
) -> Iterator[VideoFrame]:
    """Frames in the order in which they are shown; `efforts` by packet, None: all in full."""
    decoder = stream.codec_context
    has_gap, takes_all = False, True
    decoder.skip_frame = "DEFAULT"
    for packet, effort in _with_efforts(packets(container, stream, check), efforts):
        if effort is Effort.NONE:
            has_gap = True
        if effort <= Effort.LEFT_OUT:
            continue
        if has_gap:
            yield from decoder.decode(None)
            decoder.flush_buffers()
            has_gap = False
        if takes_all is not (effort is Effort.FULL):
            takes_all = not takes_all
            decoder.skip_frame = "DEFAULT" if takes_all else "NONREF"
        if effort is Effort.HEADERS and headers is not None:
            packet = headers.hollow(packet)
        yield from decoder.decode(packet)
    decoder.skip_frame = "DEFAULT"
    yield from decoder.decode(None)


def _with_efforts(
    found: Iterator["Packet[VideoStream]"], efforts: Sequence[Effort] | None
) -> Iterator[tuple["Packet[VideoStream]", Effort]]:
    if efforts is None:
        return ((packet, Effort.FULL) for packet in found)
    return zip(found, efforts, strict=True)


def plan_efforts(notes: Sequence[Note], aims: frozenset[int]) -> list[Effort]:
    """What to do with each packet so that the frames at `aims` come out right.

    A run is a key frame and what follows it up to the next one.  Frames shown before their run's key frame (open
    groups of pictures) also refer to the run before.
    """
    starts = [at for at, note in enumerate(notes) if note.is_key]
    if not starts or starts[0]:
        starts.insert(0, 0)
    ends = [*starts[1:], len(notes)]
    efforts = [Effort.FULL if note.time in aims else Effort.IF_REFERRED_TO for note in notes]
    next_needs_all = False
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        key = notes[start].time
        leading = [at for at in range(start + 1, end) if _is_before(notes[at].time, key)]
        needs_run_before = any(efforts[at] is Effort.FULL for at in leading)
        if not next_needs_all:
            kept = max((at + 1 for at in range(start, end) if efforts[at] is Effort.FULL), default=start)
            efforts[kept:end] = [Effort.NONE] * (end - kept)
        if not needs_run_before:  # their references may not be there
            for at in leading:
                efforts[at] = min(efforts[at], Effort.LEFT_OUT)
        next_needs_all = needs_run_before
    return efforts


def _planned(
    notes: Sequence[Note], aims: frozenset[int], headers: Headers | None, check: Callable[[], None]
) -> list[Effort]:
    if headers is None:
        return plan_efforts(notes, aims)
    begins = {at for at, note in enumerate(notes) if note.is_key and headers.is_beginning(at)} - _led(notes)
    notes = [note._replace(is_key=at in begins) for at, note in enumerate(notes)]
    efforts = plan_efforts(notes, aims)
    spare_references(efforts, notes, headers, check)
    return efforts


def _led(notes: Sequence[Note]) -> set[int]:
    """Key frames of open groups: frames follow that are shown before them.  H.264 counts references, so these cannot be
    left out; without their macroblocks they cost next to nothing, and the group is no run of its own.
    """
    found, key = set(), 0
    for at, note in enumerate(notes):
        if note.is_key:
            key = at
        elif _is_before(note.time, notes[key].time):
            found.add(key)
    return found


def spare_references(efforts: list[Effort], notes: Sequence[Note], headers: Headers, check: Callable[[], None]) -> None:
    """Of references to which nothing refers that is decoded, only the headers are left.

    What follows a gap is looked at on its own: the decoder has been emptied.
    """
    given: list[int] = []
    for at in range(len(efforts) + 1):
        if at < len(efforts) and efforts[at] > Effort.LEFT_OUT:
            if efforts[at] is Effort.FULL or headers.is_referred_to(at):
                given.append(at)
            continue
        kept = frozenset(one for one in given if efforts[one] is Effort.FULL or notes[one].time is None)
        for one in dispensable(headers, given, kept, check):
            efforts[one] = Effort.HEADERS
        given.clear()


def _is_before(time: int | None, key: int | None) -> bool:
    return time is not None and key is not None and time < key
