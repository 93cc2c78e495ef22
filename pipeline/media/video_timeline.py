"""Which frames a clip has, told from its packets alone: when each is shown, and which packets show none.

A packet that carries a time shows one frame at that time; what an edit list cuts off is decoded and not shown.  A
stream without times (raw H.264, AVI with B-frames) shows its frames in the order in which they leave the decoder.  No
index and no header figure is believed: a live recording has none, and a damaged file has wrong ones.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from pipeline.models.base import MediaError

UNKNOWN_RATE = 24.0  # frames a second where nothing tells: what transformers assumes
HIGHEST_RATE = 1000.0
MOST_PACKETS = 4_000_000  # of a stream: 18 hours at 60 a second; packets without bytes cost time all the same


class Note(NamedTuple):
    """A packet: when its frame is shown, in the stream's time base; None when it has no time or is not shown.

    `order`: the same for a packet whose frame is not shown: it has its place among the others all the same.
    """

    time: int | None
    is_key: bool
    order: int | None = None


class Timeline:
    """`notes`: every packet in the order it is decoded.  `times`: of the frames that are shown, ascending; empty for a
    stream without times, whose frames are only counted.
    """

    def __init__(self, notes: list[Note], *, has_times: bool, seconds: float) -> None:
        self.notes = notes
        self.times = sorted({note.time for note in notes if note.time is not None}) if has_times else []
        self.count = len(self.times) if has_times else len(notes)
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count


def packets(
    container: InputContainer, stream: VideoStream, check: Callable[[], None]
) -> Iterator["Packet[VideoStream]"]:
    """The stream's packets with data.  Raises MediaError for one that is known to be cut, or for too many."""
    for count, packet in enumerate(container.demux(stream)):
        check()
        if count > MOST_PACKETS:
            raise MediaError(f"video decode error: more than {MOST_PACKETS} frames")
        if packet.size == 0:
            continue
        if packet.is_corrupt:
            raise MediaError("video decode error: the file is damaged or ends early")
        yield packet


def read_timeline(
    container: InputContainer,
    stream: VideoStream,
    check: Callable[[], None],
    *seers: Callable[["Packet[VideoStream]"], None],
) -> Timeline:
    """Read the whole file once; `seers` are shown every packet.  Raises MediaError when it shows no frame."""
    notes: list[Note] = []
    has_times, last_time, last_duration = not _tells_only_decoding_order(container, stream), None, 0
    for packet in packets(container, stream, check):
        for see in seers:
            see(packet)
        if packet.is_discard:
            notes.append(Note(None, packet.is_keyframe, packet.pts))
            continue
        notes.append(Note(packet.pts, packet.is_keyframe, packet.pts))
        if packet.pts is None:
            has_times = False
        elif last_time is None or packet.pts > last_time:
            last_time, last_duration = packet.pts, packet.duration or 0
    base = float(stream.time_base or Fraction(1))
    timeline = Timeline(notes, has_times=has_times, seconds=0.0)
    if not len(timeline):
        raise MediaError("video decode error: the clip shows no frame")
    if timeline.times:
        timeline.seconds = (timeline.times[-1] - timeline.times[0] + last_duration) * base
    return timeline


def _tells_only_decoding_order(container: InputContainer, stream: VideoStream) -> bool:
    """AVI knows no times of showing: with frames that are decoded early, ffmpeg makes up wrong ones."""
    return container.format.name == "avi" and stream.codec_context.has_b_frames


def frame_rate(stream: VideoStream, timeline: Timeline) -> float:
    """Frames a second over the whole clip: the container's average where it explains the times, else the times' own.

    A variable rate may be far from what a header or the first frames say.
    """
    stated = float(stream.average_rate or stream.guessed_rate or 0)
    count, seconds = len(timeline), timeline.seconds
    if not 0 < stated <= HIGHEST_RATE:
        stated = 0.0
    if stated and (not timeline.times or count == 1 or abs(count / stated - seconds) <= 1.5 / stated):
        return stated
    if not timeline.times or seconds <= 0:
        return UNKNOWN_RATE
    return min(count / seconds, HIGHEST_RATE)
