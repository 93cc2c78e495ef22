"""Sound files for tests: WAV written byte by byte, everything else by PyAV's encoders; tones whose samples are
known.
"""

import io
import struct

import av
import numpy as np
from av.audio.frame import AudioFrame

EXTENSIBLE = 0xFFFE
PCM, FLOAT, ALAW, MULAW = 1, 3, 6, 7
UNKNOWN = 0xFFFFFFFF


def tone(rate: int, seconds: float = 0.5, *, hertz: float = 440, level: float = 0.4) -> np.ndarray:
    """float32 [samples], exact in 16-bit PCM."""
    wave = level * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)
    return (np.round(wave * 32768) / 32768).astype(np.float32)


def chunk(name: bytes, data: bytes, nbytes: int | None = None) -> bytes:
    return name + struct.pack("<I", len(data) if nbytes is None else nbytes) + data + bytes(len(data) % 2)


def wav(
    data: bytes,
    *,
    rate: int = 16_000,
    channels: int = 1,
    bits: int = 16,
    code: int = PCM,
    before: bytes = b"",
    nbytes: int | None = None,
) -> bytes:
    """`data`: the samples' bytes.  `before`: chunks before them; `nbytes`: what both size fields claim."""
    plain = PCM if code == EXTENSIBLE else code
    block = channels * bits // 8
    head = struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits)
    if code == EXTENSIBLE:
        head += struct.pack("<HHIH", 22, bits, (1 << channels) - 1, plain) + bytes.fromhex(
            "000000001000800000aa00389b71"
        )
    body = b"WAVE" + chunk(b"fmt ", head) + before + chunk(b"data", data, nbytes)
    return b"RIFF" + struct.pack("<I", len(body) if nbytes is None else nbytes) + body


def pcm16(samples: np.ndarray) -> bytes:
    return np.round(samples * 32768).clip(-32768, 32767).astype("<i2").tobytes()


def wav_of(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """16-bit, one channel."""
    return wav(pcm16(samples), rate=rate)


def encoded(samples: np.ndarray, rate: int, *, container: str, codec: str, layout: str = "mono") -> bytes:
    """The samples, the same in every channel, through one of ffmpeg's encoders."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        interleaved = np.repeat(samples.astype(np.float32), stream.codec_context.layout.nb_channels)
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        frame = AudioFrame.from_ndarray(interleaved[None], format="flt", layout=layout)
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        fifo = av.AudioFifo()
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            piece.pts = None
            fifo.write(piece)
        while (piece := fifo.read(size, True)) is not None:
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return file.getvalue()
