"""A clip's bytes to what it holds (size, frames, rate) and to the frames a family wants, one at a time.

Read and decoded by PyAV (ffmpeg's libraries) in this process, on one thread; another decoder may be chosen, which is
given the packets (`video_feed.py`).  Frames are converted to rgb24 as ffmpeg converts them by default, turned as the
display matrix says, and shrunk for a long-side cap.  Only formats and codecs listed here are opened, and nothing a file
refers to is.  Which frames there are stands in `video_timeline.py`, which of them are decoded in `video_frames.py`.
Every failure is a MediaError; `check` is called between packets and may raise.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from typing import Any, NoReturn, cast

import av
import av.error
import av.logging
import msgspec
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from pipeline.media import video_opencv, video_program
from pipeline.media.cap import capped, capped_size
from pipeline.media.h264_references import Headers
from pipeline.media.image import MAX_PIXELS
from pipeline.media.image_header import HTML, is_html, sniff
from pipeline.media.video_feed import Beginnings, Feed, can_feed
from pipeline.media.video_frames import Missed, wanted_frames
from pipeline.media.video_timeline import frame_rate, read_timeline
from pipeline.media.window import Window
from pipeline.models.base import Hints, MediaError

Check = Callable[[], None]
Choose = Callable[[int, float], Sequence[int]]
Decode = Callable[[Feed, VideoFrame, Check], Iterator[VideoFrame]]
# Who else may decode, by the name of SMG_VIDEO_DECODE_BACKEND.
OTHERS: Mapping[str, Decode] = {"ffmpeg": video_program.decode, "opencv": video_opencv.decode}

# libavformat's names.  Playlists, image sequences and everything else that opens further files are not among them.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,h264,hevc,m4v,ivf,obu,mjpeg"
_CODECS = (
    "h264,hevc,vvc,vp8,vp9,libvpx,libvpx-vp9,libdav1d,libaom-av1,av1,mpeg4,mpeg1video,mpeg2video,mjpeg,gif,theora,h263,"
    "h263i,flv,wmv1,wmv2,wmv3,vc1,msmpeg4,msmpeg4v1,msmpeg4v2,prores,dnxhd,rawvideo,ffv1,png,qtrle"
)
_READ_BYTES = 256 * 1024
_TURNS = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}


class Clip(msgspec.Struct, frozen=True):
    """What a clip holds.  `height`, `width`: after rotation and the long-side cap; `frames` are shown, `rate` of them
    a second on average.
    """

    format: str
    stored_height: int
    stored_width: int
    height: int
    width: int
    frames: int
    rate: float


def preload(backend: str = "pyav") -> None:
    """Before the fork: what the libraries say about clients' bytes goes nowhere."""
    av.logging.set_level(av.logging.PANIC)
    if backend == "opencv":
        video_opencv.preload()


def inspect(data: memoryview, hints: Hints, check: Check) -> Clip:
    """Read the packets, decode the first frame.  Raises MediaError: no clip, no picture track, a limit."""
    with _opened(data, probe=False) as (container, stream):
        decoding = _FirstFrame(stream, for_pixels=False)
        timeline = read_timeline(container, stream, check, decoding.see)
        rate = frame_rate(stream, timeline)
        first = decoding.frame()
        name = f"{container.format.name.split(',')[0]}/{stream.codec_context.name}"
    height, width = _turned_size(first)
    size = capped_size(height, width, hints.max_long_side)
    return Clip(name, first.height, first.width, *size, len(timeline), rate)


def frames(
    data: memoryview, choose: Choose, hints: Hints, check: Check, decode: Decode | None = None
) -> Iterator[Image.Image]:
    """The chosen frames in mode RGB, in the size `inspect` tells.

    `choose(frames, rate)`: indices in ascending order, repetitions allowed.  `decode`: who decodes instead of PyAV;
    what it does not hand out is decoded here.  One picture at a time is in memory.  Raises MediaError.
    """
    delivered = 0
    try:
        first = _frames(data, choose, hints, check) if decode is None else _others(decode, data, choose, hints, check)
        for picture in first:
            yield picture
            delivered += 1
    except Missed:
        yield from islice(_frames(data, choose, hints, check, thrifty=False), delivered, None)


def _frames(
    data: memoryview, choose: Choose, hints: Hints, check: Check, *, thrifty: bool = True
) -> Iterator[Image.Image]:
    with _opened(data, probe=False) as (container, stream):
        headers = Headers.of(stream) if thrifty else None
        timeline = read_timeline(container, stream, check, *([] if headers is None else [headers.see]))
        indices = choose(len(timeline), frame_rate(stream, timeline))
        track = stream.index
    with _opened(data, track, probe=not thrifty) as (container, stream):
        size: tuple[int, int] | None = None
        last: tuple[VideoFrame, Image.Image] | None = None
        found = wanted_frames(container, stream, timeline, indices, check, thrifty=thrifty, headers=headers)
        for frame in found:
            if size is not None and (frame.height, frame.width) != size:
                raise MediaError(
                    f"video decode error: the size changes from {size[1]}x{size[0]} to {frame.width}x{frame.height}"
                )
            size = frame.height, frame.width
            if last is None or last[0] is not frame:
                last = frame, _picture(frame, hints)
            yield last[1]


def _others(decode: Decode, data: memoryview, choose: Choose, hints: Hints, check: Check) -> Iterator[Image.Image]:
    """As `_frames`: packets are read here and decoded elsewhere, all but the first, which tells size and rotation."""
    with _opened(data, probe=False) as (container, stream):
        decoding, beginnings = _FirstFrame(stream), Beginnings(stream)
        timeline = read_timeline(container, stream, check, decoding.see, beginnings.see)
        indices = choose(len(timeline), frame_rate(stream, timeline))
        first, track = decoding.frame(), stream.index
        if not can_feed(stream):
            raise Missed
    _check_size(first.height, first.width)
    times = Counter(indices)
    with _opened(data, track, probe=False) as (container, stream):
        feed = Feed(container, stream, timeline, indices, beginnings, check)
        for number, frame in zip(feed.numbers, decode(feed, first, check), strict=True):
            if number in times:
                picture = _turned(_pixels(frame), _quarter_turns(first), hints)
                yield from repeat(picture, times[number])


def _picture(frame: VideoFrame, hints: Hints) -> Image.Image:
    if frame.is_corrupt:
        raise MediaError("video decode error: a frame is damaged")
    _check_size(frame.height, frame.width)
    return _turned(_pixels(frame), _quarter_turns(frame), hints)


def _pixels(frame: VideoFrame) -> Image.Image:
    return Image.fromarray(frame.to_ndarray(format="rgb24"))


def _turned(picture: Image.Image, turns: int, hints: Hints) -> Image.Image:
    if turns:
        picture = picture.transpose(_TURNS[turns])
    return capped(picture, *capped_size(picture.height, picture.width, hints.max_long_side))


def _turned_size(frame: VideoFrame) -> tuple[int, int]:
    return (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)


def _quarter_turns(frame: VideoFrame) -> int:
    """Counterclockwise, 0 to 3; other angles do not occur in practice and are rounded."""
    return round(frame.rotation / 90) % 4


class _FirstFrame:
    """Decodes until a frame has come out: there rotation and size are told for certain.

    One key frame is enough for nearly every clip: the decoder is asked for it at once, before it has seen what else it
    might show first.  Without `for_pixels` an H.264 frame's headers are enough: rotation and size stand there.
    """

    def __init__(self, stream: VideoStream, *, for_pixels: bool = True) -> None:
        self._decoder = stream.codec_context
        self._headers = None if for_pixels else Headers.of(stream)
        self._found: VideoFrame | None = None
        self._is_begun = False

    def see(self, packet: "Packet[VideoStream]") -> None:
        if self._found is not None:
            return
        if not self._is_begun:
            self._is_begun = True
            self._found = self._hollow(packet) or self._at_once(packet)
        if self._found is None:
            self._found = next(iter(self._decoder.decode(packet)), None)

    def _hollow(self, packet: "Packet[VideoStream]") -> VideoFrame | None:
        if self._headers is None:
            return None
        try:
            return self._at_once(self._headers.hollow(packet))
        except av.error.FFmpegError:  # something rare, or damage: who decodes it all tells
            self._decoder.flush_buffers()
            return None

    def _at_once(self, packet: "Packet[VideoStream]") -> VideoFrame | None:
        found = next(iter([*self._decoder.decode(packet), *self._decoder.decode(None)]), None)
        self._decoder.flush_buffers()
        return found

    def frame(self) -> VideoFrame:
        """Raises MediaError when there is none in the whole clip."""
        found = self._found or next(iter(self._decoder.decode(None)), None)
        if found is None:
            raise MediaError("video decode error: no frame could be decoded")
        return found


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise MediaError(
            f"video decode error: {width}x{height} are {height * width} pixels, above the limit of {MAX_PIXELS}"
        )


def _refuse_file(*_: Any) -> NoReturn:
    raise MediaError("video decode error: the file refers to other files")


@contextmanager
def _opened(
    data: memoryview, track: int | None = None, *, probe: bool = True
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its picture track (number `track`), ready to decode.  Whatever the libraries raise is the
    client's error.

    `probe`: let them decode some frames while they open it, which tells an H.264 decoder how many frames to hold back.
    Without, it may find that out by handing out frames in a wrong order at the beginning (Missed, then).  Probing costs
    as much as ten frames and changes no packet of an MP4 file.
    """
    options = {} if probe or bytes(data[4:8]) != b"ftyp" else {"skip_frame": "all"}
    try:
        with cast(
            InputContainer,
            av.open(
                Window(data),
                options=options,
                container_options={"format_whitelist": _FORMATS, "protocol_whitelist": "none"},
                metadata_errors="replace",
                buffer_size=_READ_BYTES,
                io_open=_refuse_file,
            ),
        ) as container:
            yield container, _picture_track(container, track)
    except (MediaError, Missed, TimeoutError):
        raise
    except av.error.ArgumentError as error:
        raise MediaError(f"video decode error: {_no_clip(data)}") from error
    except MemoryError as error:
        raise MediaError("video decode error: the clip asks for more memory than there is") from error
    except (
        av.error.FFmpegError,
        ValueError,
        OSError,
        OverflowError,
        IndexError,
    ) as error:  # IndexError: tracks PyAV was not told of
        reason = HTML if is_html(data) else getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MediaError(f"video decode error: {reason[:200]}") from error


def _no_clip(data: memoryview) -> str:
    """What is wrong where ffmpeg's word is "Invalid argument": mostly, that the format is not on the list."""
    if picture := sniff(data):
        return f"this is a {picture} picture, not a clip"
    return "this is no clip, or one of a format that is not read"


def _picture_track(container: InputContainer, track: int | None) -> VideoStream:
    """The best picture track that is no cover art; the one looked at before, when its number is known."""
    best = container.streams.best("video") if track is None else container.streams[track]
    found = cast(VideoStream | None, best)
    if found is None or Disposition.attached_pic in found.disposition:
        raise MediaError("video decode error: the file has no picture track")
    decoder = found.codec_context
    if decoder is None or decoder.name not in _CODECS.split(","):
        known = decoder.name if decoder is not None else "its codec"
        raise MediaError(f"video decode error: {known} is not supported")
    _check_size(decoder.height, decoder.width)
    decoder.thread_count = 1  # clips run in parallel, one in each pool process
    return found
