"""Sounds decoded by the ffmpeg program (`program.py`): `SMG_AUDIO_DECODE_BACKEND=ffmpeg`.

It never sees the client's file: packets are read here whatever decodes, and it gets them as a NUT stream of one track,
with nothing but how many samples of each are padding.  It answers with plain samples in double precision, which holds
every other type exactly, so that channels are averaged by the same arithmetic.
"""

import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.packet import Packet

from pipeline.media.program import Program, Written, reads, running, writes
from pipeline.models.base import MediaError

_FEED = "nut"
# The version of NUT that tells of padding is an experimental one: there since long before the oldest program used here.
_FEED_OPTIONS = {"syncpoints": "none", "strict": "experimental"}
_TIME_BASE = Fraction(1, 1000)
# libavcodec's names of what NUT describes well enough for another decoder; of others it lacks sizes of blocks.
# Not Vorbis, of which programs up to 7.0 at least get a channel wrong where PyAV and libvorbis agree.
_LOSSY = {"mp2", "mp3", "aac", "opus", "ac3", "eac3", "amr_nb", "g722"}
_PLAIN = {f"pcm_{kind}{end}" for kind in ("s16", "s24", "s32", "f32", "f64") for end in ("le", "be")}
_FED = frozenset({*_LOSSY, *_PLAIN, "flac", "pcm_u8", "pcm_alaw", "pcm_mulaw"})
# Sun's AU format, the simplest that tells rate and channels: magic, where samples begin, their bytes, type, rate,
# channels.
_ANSWER = "au"
_HEADER = struct.Struct(">4s5I")
_MOST_HEADER_BYTES = 4096
_DOUBLE = 7
_BLOCK_BYTES = 1 << 18
_MOST_CHANNELS = 64  # that libswresample brings into another form
_ARGUMENTS = (
    *("-max_error_rate", "0.5", *reads(_FEED)),  # more lost than decoded is refused, as with PyAV
    *("-map", "0:a:0", "-filter_threads", "1", "-c:a", "pcm_f64be", *writes(_ANSWER)),
)


def can_feed(stream: AudioStream) -> bool:
    coder = stream.codec_context
    return coder.codec.canonical_name in _FED and coder.layout.nb_channels <= _MOST_CHANNELS


def decode(packets: Iterator[Any], stream: AudioStream, check: Callable[[], None]) -> Iterator[AudioFrame]:
    """The samples of all packets of a stream that `can_feed`, some at a time, as "dbl".

    Raises MediaError: no program, nothing or less than half could be decoded.
    """
    fed = (packet for packet in packets if packet is not None and packet.size)
    first = next(fed, None)
    if first is None:
        return
    with running(_ARGUMENTS, _chunks(chain([first], fed), stream), check) as program:
        header = bytearray(_HEADER.size)
        if program.fill(memoryview(header)) == len(header):
            yield from _frames(program, header)
        code = program.exit_code()
        if code:
            raise MediaError(f"audio decode error: ffmpeg could not decode the sound (exit code {code})")


def _chunks(packets: Iterator[Any], stream: AudioStream) -> Iterator[bytes]:
    """The stream, a packet at a time."""
    written = Written()
    with av.open(written, "w", format=_FEED, container_options=_FEED_OPTIONS) as out:
        track = out.add_stream_from_template(stream, opaque=True)
        track.time_base = _TIME_BASE
        for at, packet in enumerate(packets):
            fed: Any = Packet(bytes(packet))
            if packet.has_sidedata("skip_samples"):
                packet.get_sidedata("skip_samples").to_packet(fed)
            fed.stream, fed.time_base = track, _TIME_BASE
            fed.pts = fed.dts = at
            out.mux_one(fed)
            yield written.taken()
    yield written.taken()


def _frames(program: Program, header: bytearray) -> Iterator[AudioFrame]:
    magic, begin, _, kind, rate, channels = _HEADER.unpack(header)
    is_sound = magic == b".snd" and kind == _DOUBLE and 1 <= channels <= _MOST_CHANNELS
    if not is_sound or not _HEADER.size <= begin <= _MOST_HEADER_BYTES:
        raise MediaError("audio decode error: ffmpeg answers with something else than samples")
    program.fill(memoryview(bytearray(begin - _HEADER.size)))
    item = 8 * channels
    block = bytearray(max(1, _BLOCK_BYTES // item) * item)
    while got := program.fill(memoryview(block)) // item * item:
        values = np.frombuffer(block, ">f8", got // 8).astype("<f8")
        frame = AudioFrame.from_ndarray(values.reshape(1, -1), format="dbl", layout=f"{channels} channels")
        frame.sample_rate = rate
        yield frame
