"""Frames decoded by the ffmpeg program (`program.py`): `SMG_VIDEO_DECODE_BACKEND=ffmpeg`.

It reads the feed and writes plain frames, and knows no other format.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from av.codec.context import CodecContext
from av.packet import Packet
from av.video.frame import VideoFrame

from pipeline.media.program import reads, running, writes
from pipeline.media.video_feed import FORMAT, TIME_BASE, Feed
from pipeline.media.video_frames import Missed
from pipeline.models.base import MediaError

_COLOUR_PLACES = "left", "center", "topleft", "top", "bottomleft", "bottom", "unspecified"


def decode(feed: Feed, first: VideoFrame, check: Callable[[], None]) -> Iterator[VideoFrame]:
    """The feed's frames in the size and pixel format of `first`, which is any frame of the clip, one at a time.

    Raises MediaError: no program, damage; Missed when frames do not come out.
    """
    raw = _Raw(first)
    with running(_arguments(feed, raw), feed.chunks(), check) as program:
        for _ in feed.numbers:
            data = bytearray(raw.nbytes)
            if program.fill(memoryview(data)) < len(data):
                break
            yield raw.frame(bytes(data))
        else:
            return
        code = program.exit_code()  # it ends at the first error, wherever in the clip that is
        if code:
            raise MediaError(f"video decode error: ffmpeg could not decode the clip (exit code {code})")
    raise Missed


class _Raw:
    """Frames as the program writes them: in the clip's own pixel format; colours are computed here, as PyAV's."""

    def __init__(self, first: VideoFrame) -> None:
        self.height, self.width, self.format = first.height, first.width, first.format.name
        self._colours = first.colorspace, first.color_range
        coder = self._coder("w")
        coder.time_base = TIME_BASE
        plain = b"".join(bytes(packet) for packet in coder.encode(first))
        self.nbytes = len(plain)
        wanted = first.to_ndarray(format="rgb24")
        # PyAV does not tell where between the pixels a clip has its colours: that with which they come out the same
        for place in _COLOUR_PLACES:
            self._decoder = self._coder("r", chroma_sample_location=place)
            if np.array_equal(self.frame(plain).to_ndarray(format="rgb24"), wanted):
                return

    def _coder(self, mode: Literal["r", "w"], **options: str) -> Any:
        coder: Any = CodecContext.create("rawvideo", mode)
        coder.height, coder.width, coder.pix_fmt, coder.options = self.height, self.width, self.format, options
        return coder

    def frame(self, data: bytes) -> VideoFrame:
        frame: VideoFrame
        (frame,) = self._decoder.decode(Packet(data))
        frame.colorspace, frame.color_range = self._colours
        return frame


def _arguments(feed: Feed, raw: _Raw) -> list[str]:
    filters = [f"settb={TIME_BASE}", "select=not(mod(pts\\,2))"] if feed.is_marked else []
    filters += [f"scale={raw.width}:{raw.height}", f"format={raw.format}"]  # nothing to do, unless the clip changes
    return [
        *("-xerror", "-noautorotate", *reads(FORMAT)),
        *("-map", "0:v:0", "-filter_threads", "1", "-vf", ",".join(filters)),
        *("-fps_mode", "passthrough", "-frames:v", str(len(feed.numbers))),
        *writes("rawvideo"),
    ]
