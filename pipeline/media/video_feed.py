"""The packets that wanted frames need, as a NUT stream for a decoder outside this library.

Whoever decodes instead of PyAV never sees the client's file: containers are read here, by the same code whatever the
backend, and what comes out of it is a plain stream of one track that refers to nothing.  Packets nobody needs are left
out (`video_frames.plan_efforts`).  The times are made anew: frames count up by two in the order they are shown, and a
frame that is wanted has an even time, every other an odd one, so that one short rule picks any number of them.

A stream without times is fed whole, its frames told apart by their order alone.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from pipeline.media.nal_units import length_bytes, units
from pipeline.media.program import Written
from pipeline.media.video_frames import Effort, plan_efforts
from pipeline.media.video_timeline import Timeline, packets

FORMAT = "nut"
TIME_BASE = Fraction(1, 1000)
BEGIN = (
    1 << 24
)  # no time is below, none from its stream's first one on is above: more than twice as many as packets may be


class Beginnings:
    """Notes, while packets are read, with which of them a decoder may begin although it was given none before.

    What a container marks as a key frame of H.264, HEVC or VVC may also be the first of several that repair the picture
    bit by bit.  PyAV's decoder is emptied at every gap and tells; one at the other end of a pipe would not.
    """

    def __init__(self, stream: VideoStream) -> None:
        self.found: list[bool] = []
        self._codec = stream.codec_context.name
        self._prefix = length_bytes(self._codec, stream.codec_context.extradata or b"")

    def see(self, packet: "Packet[VideoStream]") -> None:
        self.found.append(packet.is_keyframe and self._is_fresh(packet))

    def _is_fresh(self, packet: "Packet[VideoStream]") -> bool:
        if self._codec == "vvc":
            return False
        if self._codec not in ("h264", "hevc"):
            return True
        data = bytes(packet)
        firsts = (data[begin] for begin, end in units(data, self._prefix) if begin < min(end, len(data)))
        if self._codec == "h264":  # IDR
            return any(first & 0x1F == 5 for first in firsts)
        return any(16 <= first >> 1 & 0x3F <= 21 for first in firsts)  # BLA, IDR, CRA


class Feed:
    """One reading of a clip.

    `is_marked`: wanted frames have even times; else every frame up to the last wanted one is to be handed out.
    `numbers`: of the frames that are to be handed out, in order.
    """

    def __init__(
        self,
        container: InputContainer,
        stream: VideoStream,
        timeline: Timeline,
        indices: Sequence[int],
        beginnings: Beginnings,
        check: Callable[[], None],
    ) -> None:
        self._container, self._stream, self._check = container, stream, check
        self.is_marked = bool(timeline.times)
        self.numbers: Sequence[int] = tuple(dict.fromkeys(indices)) if self.is_marked else range(indices[-1] + 1)
        aims = frozenset(timeline.times[index] for index in indices) if self.is_marked else frozenset[int]()
        notes = [note._replace(is_key=key) for note, key in zip(timeline.notes, beginnings.found, strict=True)]
        self._efforts = plan_efforts(notes, aims) if self.is_marked else None
        self._times = _made_times(timeline, aims)

    @property
    def first_time(self) -> int:
        """The earliest time in the stream, which some decoders count from."""
        efforts = self._efforts or [Effort.FULL] * len(self._times)
        return min(time for time, effort in zip(self._times, efforts, strict=True) if effort > Effort.LEFT_OUT)

    def chunks(self) -> Iterator[bytes]:
        """The stream, a packet at a time.  Raises what reading packets raises."""
        written = Written()
        with av.open(written, "w", format=FORMAT) as out:
            track = out.add_stream_from_template(self._stream, opaque=True)
            track.time_base = TIME_BASE
            for at, packet in enumerate(packets(self._container, self._stream, self._check)):
                if self._efforts is not None and self._efforts[at] <= Effort.LEFT_OUT:
                    continue
                packet.stream, packet.time_base = track, TIME_BASE
                packet.pts, packet.dts, packet.duration = self._times[at], BEGIN + 2 * at, 0
                out.mux_one(packet)
                yield written.taken()
        yield written.taken()


def can_feed(stream: VideoStream) -> bool:
    """Whether a NUT stream carries this codec (not ProRes, QuickTime RLE, and pixels that are not coded at all)."""
    if stream.codec_context.name == "rawvideo":
        return False
    with av.open(Written(), "w", format=FORMAT) as out:
        try:
            out.add_stream_from_template(stream, opaque=True)
        except ValueError:
            return False
    return True


def _made_times(timeline: Timeline, aims: frozenset[int]) -> list[int]:
    """The new time of every packet, in the order they are decoded."""
    orders = [note.order for note in timeline.notes if note.order is not None]
    if len(orders) < len(timeline.notes):
        return [BEGIN + 2 * at for at in range(len(timeline.notes))]
    ranks = {order: rank for rank, order in enumerate(sorted(set(orders)))}
    placed = [ranks[order] for order in orders]
    delay = max(at - rank for at, rank in enumerate(placed))  # no packet is shown before it is decoded
    return [
        BEGIN + 2 * (rank + delay) + (note.time not in aims) for rank, note in zip(placed, timeline.notes, strict=True)
    ]
