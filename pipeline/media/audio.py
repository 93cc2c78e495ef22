"""A sound's bytes to its samples: one channel, float32, at the file's own rate.

Read and decoded by PyAV (ffmpeg's libraries) in this process, on one thread; another decoder may be chosen, which is
given the packets (`audio_program.py`).  The channels' mean is taken here, and rates are changed by `pipeline.resample`,
never by libswresample.  Only formats and codecs listed here are opened, and nothing a file refers to is.  No header
figure is believed: `inspect` decodes everything to count it.  A packet that cannot be decoded is left out, as players
do (recordings cut out of a stream begin and end with one); a file of which more is lost than decoded is refused.  Every
failure is a MediaError; `check` is asked between packets and may raise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import av
import av.logging
import msgspec
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from pipeline.media import audio_program
from pipeline.media.image_header import HTML, is_html
from pipeline.media.window import Window
from pipeline.models.base import MediaError

Check = Callable[[], None]
Decode = Callable[[Iterator[Any], AudioStream, Check], Iterator[AudioFrame]]
# Who else may decode, by the name of SMG_AUDIO_DECODE_BACKEND.
OTHERS: Mapping[str, Decode] = {"ffmpeg": audio_program.decode}

# libavformat's names.  Playlists and everything else that opens further files are not among them; raw formats neither,
# whose data says neither rate nor codec.
_FORMATS = (
    "wav,w64,aiff,au,caf,mp3,aac,mov,mp4,m4a,3gp,3g2,mj2,flac,ogg,matroska,webm,amr,avi,mpegts,mpeg,asf,flv,ac3,eac3,"
    "wv,gsm"
)
_CODEC_NAMES = (
    "mp1 mp1float mp2 mp2float mp3 mp3float aac aac_latm alac flac vorbis libvorbis opus libopus ac3 eac3 dca wavpack "
    "wmav1 wmav2 wmapro wmalossless wmavoice amrnb amrwb libopencore_amrnb libopencore_amrwb gsm gsm_ms libgsm "
    "libgsm_ms speex libspeex g722 g723_1 g726 g726le g728 g729 ilbc libilbc nellymoser truespeech"
)
_CODECS = frozenset(_CODEC_NAMES.split())
# Of a WAV file 100 KB are looked at to tell whether it holds something else than samples, not 5 MB, and it is read in
# pieces of 64 KB instead of 4: for half a minute at 44.1 kHz 4 ms instead of 17.
_WAV = (b"RIFF", b"RF64")
_WAV_OPTIONS = {"probesize": "100000", "max_size": "65536"}
_CODEC_KINDS = ("pcm_", "adpcm_")
_RATES = (1000, 384_000)  # Hz
# Channels that lie apart: beyond it the list of them has no end that PyAV would find, and it reads what is behind.
_MAX_PLANES = 8
_NOTHING = "audio decode error: the file holds no sound that can be decoded"
_LOUDEST = 1e9  # of float samples, where 1 is full scale: beyond it spectra would leave float32
# libavutil's sample formats: numpy's type, and what 1.0 is.
_SAMPLES = {
    "u8": ("u1", 128.0),
    "s16": ("i2", 32768.0),
    "s32": ("i4", 2147483648.0),
    "s64": ("i8", 9223372036854775808.0),
    "flt": ("f4", 1.0),
    "dbl": ("f8", 1.0),
}


class Facts(msgspec.Struct, frozen=True):
    """What a sound holds: `samples` of each channel, `rate` of them a second; `format`: container and codec."""

    format: str
    samples: int
    rate: int


class Sound(NamedTuple):
    """Decoded: float32 [samples], the mean of the channels, about -1..1; `rate` in Hz."""

    samples: NDArray[np.float32]
    rate: int


def preload() -> None:
    """Before the fork: what the libraries say about clients' bytes goes nowhere."""
    av.logging.set_level(av.logging.PANIC)


def inspect(data: memoryview, max_bytes: int, check: Check, by: Decode | None = None) -> Facts:
    """Decode once, keeping nothing.  `max_bytes`: of one channel's samples in float32, at the file's rate.

    `by`: who decodes instead of PyAV, of codecs that can be fed to it.  Raises MediaError: no sound, nothing in it,
    more than `max_bytes`.
    """
    with _opened(data) as (container, stream):
        _check_length(_stated_samples(stream), max_bytes)
        samples, rate = 0, 0
        for frame in _frames(container, stream, check, by):
            samples, rate = samples + frame.samples, frame.sample_rate
            _check_length(samples, max_bytes)
        name = f"{container.format.name.split(',')[0]}/{stream.codec_context.name}"
    return Facts(name, samples, rate)


def decode(data: memoryview, count: int, check: Check, by: Decode | None = None) -> Sound:
    """The samples of a file of which `inspect`, with the same `by`, found `count`.

    Raises MediaError, also for samples that are no numbers.
    """
    samples, at, rate = np.empty(count, np.float32), 0, 0
    with _opened(data) as (container, stream):
        for frame in _frames(container, stream, check, by):
            piece = _mono(frame)[: count - at]
            samples[at : at + len(piece)] = piece
            at, rate = at + len(piece), frame.sample_rate
    if at != count:
        raise MediaError(f"audio decode error: the sound holds {at} samples, and a moment ago {count}")
    if not max(samples.max(), -samples.min()) < _LOUDEST:  # false for what is no number, too
        raise MediaError("audio decode error: the sound holds samples that are no numbers or out of any range")
    return Sound(samples, rate)


@contextmanager
def _opened(data: memoryview) -> Iterator[tuple[InputContainer, AudioStream]]:
    """The file and its best sound track, ready to decode.  What the libraries raise in here becomes a MediaError."""
    options = {"format_whitelist": _FORMATS, **(_WAV_OPTIONS if bytes(data[:4]) in _WAV else {})}
    try:
        container = av.open(Window(data), mode="r", metadata_errors="replace", container_options=options)
    except (av.error.InvalidDataError, av.error.ArgumentError):  # the second: a format that is not on the list
        raise MediaError(f"audio decode error: {HTML if is_html(data) else 'no known format'}") from None
    except (av.error.FFmpegError, ValueError) as error:
        raise MediaError(f"audio decode error: {_described(error)}") from None
    with container:
        try:
            assert isinstance(container, InputContainer)
            yield container, _track(container)
        except (av.error.FFmpegError, ValueError) as error:
            raise MediaError(f"audio decode error: {_described(error)}") from None


def _track(container: InputContainer) -> AudioStream:
    stream = container.streams.best("audio")
    if not isinstance(stream, AudioStream):
        raise MediaError("audio decode error: the file holds no sound")
    codec = stream.codec_context.name if stream.codec_context is not None else "nobody knows what"
    if codec not in _CODECS and not codec.startswith(_CODEC_KINDS):
        raise MediaError(f"audio decode error: sounds coded as {codec} are not decoded here")
    stream.codec_context.thread_count = 1
    return stream


def _frames(container: InputContainer, stream: AudioStream, check: Check, by: Decode | None) -> Iterator[AudioFrame]:
    """The frames in order, all of one rate.  Raises MediaError when the rate changes, or nothing can be decoded."""
    rate, packets = 0, _packets(container, stream)
    decode = by if by is not None and audio_program.can_feed(stream) else _decoded
    for frame in decode(packets, stream, check):
        _check_channels(frame)
        if not rate and not _RATES[0] <= frame.sample_rate <= _RATES[1]:
            raise MediaError(f"audio decode error: a rate of {frame.sample_rate} Hz is not between 1 and 384 kHz")
        rate = rate or frame.sample_rate
        if frame.sample_rate != rate:
            raise MediaError(f"audio decode error: the rate changes from {rate} to {frame.sample_rate} Hz")
        yield frame
    if not rate:
        raise MediaError(_NOTHING)


def _decoded(packets: Iterator[Any], stream: AudioStream, check: Check) -> Iterator[AudioFrame]:
    good, lost = 0, 0
    for packet in packets:
        check()
        try:
            frames = stream.codec_context.decode(packet)
        except av.error.FFmpegError:
            lost += 1
            continue
        good += len(frames)
        yield from frames
    if lost > good:
        raise MediaError(_NOTHING)


def _packets(container: InputContainer, stream: AudioStream) -> Iterator[Any]:
    """Every packet and the last, empty one, which has the decoder hand out what it still holds.  A file that breaks off
    ends there, and one whose tracks are other ones than PyAV was told of (IndexError).
    """
    try:
        yield from container.demux(stream)
    except (av.error.FFmpegError, IndexError):
        yield None


def _check_channels(frame: AudioFrame) -> None:
    channels, kind = frame.layout.nb_channels, frame.format.name
    if channels < 1 or (frame.format.is_planar and channels > _MAX_PLANES):
        raise MediaError(f"audio decode error: a sound with {channels} channels is not taken from such a file")
    if kind.removesuffix("p") not in _SAMPLES:
        raise MediaError(f"audio decode error: samples of type {kind} are not known")


def _check_length(samples: int, max_bytes: int) -> None:
    if samples * 4 > max_bytes:
        raise MediaError(
            f"audio decode error: the decoded samples are more than SMG_AUDIO_MAX_DECODED_BYTES={max_bytes} bytes"
        )


def _stated_samples(stream: AudioStream) -> int:
    """What the header says, 0 where it says nothing: good enough to refuse early."""
    if not stream.duration or not stream.time_base or not stream.codec_context.sample_rate:
        return 0
    return int(stream.duration * stream.time_base * stream.codec_context.sample_rate)


def _mono(frame: AudioFrame) -> NDArray[np.float32]:
    """The mean of the channels, float32 [samples]."""
    dtype, full_scale = _SAMPLES[frame.format.name.removesuffix("p")]
    channels, count = frame.layout.nb_channels, frame.samples
    planes = frame.planes  # of one with eight channels the last is none: PyAV counts to the first null it finds
    rows: Sequence[NDArray[Any]] | NDArray[Any]
    if frame.format.is_planar:
        rows = [np.frombuffer(memoryview(plane), dtype, count) for plane in planes[:channels]]
    else:
        rows = np.frombuffer(memoryview(planes[0]), dtype, count * channels).reshape(count, channels).T
    mixed: NDArray[np.float32]
    if channels > _MAX_PLANES:
        mixed = np.add.reduce(rows, axis=0, dtype=np.float32)
    else:  # row by row is ten times as fast for samples that lie channel by channel
        mixed = rows[0].astype(np.float32)
        for row in rows[1:]:
            mixed += row
    if dtype == "u1":
        mixed -= np.float32(128 * channels)
    mixed /= np.float32(channels * full_scale)
    return mixed


def _described(error: Exception) -> str:
    """The library's sentence without the address it puts before it."""
    text = str(getattr(error, "strerror", None) or error)
    return " ".join(text.split())[:200]
