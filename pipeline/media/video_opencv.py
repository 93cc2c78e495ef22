"""Frames decoded by OpenCV in the pool process: `SMG_VIDEO_DECODE_BACKEND=opencv`, where cv2 is installed.

OpenCV opens files only by name, so the feed goes into one that is on no disk (a memfd), and nothing but that file and
that format is allowed.  Colours are OpenCV's: those of clips with 8 bits and even sizes equal PyAV's, of others they
differ a little.  It also tells of no damage: a frame that was repaired by guessing looks like any other.  What it has
no decoder for (AV1), PyAV decodes.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

from av.video.frame import VideoFrame

from pipeline.media.video_feed import BEGIN, FORMAT, Feed
from pipeline.media.video_frames import Missed
from pipeline.models.base import MediaError


def preload() -> None:
    """Before the fork: the library, quiet, on one thread, and kept to the one format."""
    os.putenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", f"protocol_whitelist;file|format_whitelist;{FORMAT}")
    os.putenv("OPENCV_FFMPEG_LOGLEVEL", "-8")
    cv2 = _library()
    cv2.setNumThreads(1)
    cv2.utils.logging.setLogLevel(0)


def decode(feed: Feed, first: VideoFrame, check: Callable[[], None]) -> Iterator[VideoFrame]:
    """The feed's frames, one at a time, as bgr24.

    Raises MediaError: another size than `first`, which is any frame of the clip; Missed when frames do not come out.
    """
    cv2 = _library()
    file = os.memfd_create("mediagate-clip", os.MFD_CLOEXEC)
    try:
        for chunk in feed.chunks():
            os.write(file, chunk)
        film = cv2.VideoCapture(f"/proc/self/fd/{file}", cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        film.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
        try:
            yield from _frames(cv2, film, feed, (first.height, first.width), check)
        finally:
            film.release()
    finally:
        os.close(file)


def _frames(cv2: Any, film: Any, feed: Feed, size: tuple[int, int], check: Callable[[], None]) -> Iterator[VideoFrame]:
    first_time, given = feed.first_time, 0
    while given < len(feed.numbers):
        check()
        if not film.grab():
            raise Missed
        time = round(film.get(cv2.CAP_PROP_POS_MSEC))
        time += first_time if time < BEGIN else 0  # it counts from the first one when it knows that
        if feed.is_marked and time % 2:
            continue
        is_there, pixels = film.retrieve()
        if not is_there:
            raise Missed
        if pixels.shape[:2] != size:
            raise MediaError(f"video decode error: the size changes from {size[1]}x{size[0]}")
        yield VideoFrame.from_ndarray(pixels, format="bgr24")
        given += 1


def _library() -> Any:
    import cv2  # not before it is wanted: few installations have it

    return cv2
