"""Frames decoded by the ffmpeg program, as its child process: `SMG_VIDEO_DECODE_BACKEND=ffmpeg`.

It reads the feed from a pipe and writes frames to another, and knows no other protocol, file or format.  It is a child
of the pool process and a member of its group, so it has the same limits of memory and files, and is killed with it; one
that is no longer needed is killed and reaped here.  One thread decodes, as everywhere.
"""

import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal

import numpy as np
from av.codec.context import CodecContext
from av.packet import Packet
from av.video.frame import VideoFrame

from pipeline.media.video_feed import FORMAT, TIME_BASE, Feed
from pipeline.media.video_frames import Missed
from pipeline.models.base import MediaError

PROGRAM = "ffmpeg"
_LOOK_MS = 50  # at the clock, while the program is busy
_COLOUR_PLACES = "left", "center", "topleft", "top", "bottomleft", "bottom", "unspecified"


def decode(feed: Feed, first: VideoFrame, check: Callable[[], None]) -> Iterator[VideoFrame]:
    """The feed's frames in the size and pixel format of `first`, which is any frame of the clip, one at a time.

    Raises MediaError: no program, damage; Missed when frames do not come out.
    """
    raw = _Raw(first)
    with _running(feed, raw) as program:
        incoming = _Pump(program, feed.chunks(), check)
        for _ in feed.numbers:
            data = bytearray(raw.nbytes)
            if incoming.fill(memoryview(data)) < len(data):
                break
            yield raw.frame(bytes(data))
        else:
            return
        code = program.wait()  # it ends at the first error, wherever in the clip that is
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


class _Pump:
    """Both pipes of the program in turn: it is fed while it is read, so that neither side waits for the other."""

    def __init__(self, program: "subprocess.Popen[bytes]", chunks: Iterator[bytes], check: Callable[[], None]) -> None:
        assert program.stdin is not None and program.stdout is not None
        self._stdin, self._stdout = program.stdin, program.stdout
        self._chunks, self._check = chunks, check
        self._pending = memoryview(b"")
        self._poll = select.poll()
        self._poll.register(self._stdin, select.POLLOUT)
        self._poll.register(self._stdout, select.POLLIN)
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    def fill(self, into: memoryview) -> int:
        """Read until `into` is full or the program has no more; the number of bytes."""
        at = 0
        while at < len(into):
            self._check()
            for fd, _ in self._poll.poll(_LOOK_MS):
                if fd == self._stdout.fileno():
                    got = self._stdout.readinto(into[at:])  # type: ignore[attr-defined]
                    if got == 0:
                        return at
                    at += got or 0
                else:
                    self._feed()
        return at

    def _feed(self) -> None:
        try:
            while True:
                if not self._pending:
                    self._pending = memoryview(next(self._chunks))
                wrote = self._stdin.write(self._pending)
                if wrote is None:
                    return
                self._pending = self._pending[wrote:]
        except (StopIteration, BrokenPipeError):  # all fed, or it has all it wants
            self._poll.unregister(self._stdin)
            self._stdin.close()


@contextmanager
def _running(feed: Feed, raw: _Raw) -> Iterator["subprocess.Popen[bytes]"]:
    path = shutil.which(PROGRAM)
    if path is None:
        raise MediaError("ffmpeg executable not found")
    try:
        program = subprocess.Popen(
            [path, *_arguments(feed, raw)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={},
        )
    except OSError as error:
        raise MediaError(f"ffmpeg cannot be started: {error.strerror}") from None
    try:
        yield program
    finally:
        program.kill()
        _close(program.stdin)
        _close(program.stdout)
        program.wait()


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()


def _arguments(feed: Feed, raw: _Raw) -> list[str]:
    filters = [f"settb={TIME_BASE}", "select=not(mod(pts\\,2))"] if feed.is_marked else []
    filters += [f"scale={raw.width}:{raw.height}", f"format={raw.format}"]  # nothing to do, unless the clip changes
    return [
        *("-hide_banner", "-nostdin", "-v", "quiet", "-xerror"),
        *("-protocol_whitelist", "pipe", "-format_whitelist", FORMAT, "-f", FORMAT),
        *("-threads", "1", "-noautorotate", "-copyts", "-i", "pipe:0"),
        *("-map", "0:v:0", "-filter_threads", "1", "-vf", ",".join(filters)),
        *("-fps_mode", "passthrough", "-frames:v", str(len(feed.numbers))),
        *("-f", "rawvideo", "-protocol_whitelist", "pipe", "pipe:1"),
    ]
