"""Sounds to samples: WAV in every form, what browsers, telephones and cameras write, and what is refused."""

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.media.audio import Sound, decode, inspect
from pipeline.models.base import MediaError
from tests.pipeline.sounds import ALAW, EXTENSIBLE, FLOAT, MULAW, UNKNOWN, chunk, encoded, pcm16, tone, wav, wav_of

DATA = Path(__file__).parent.parent / "data" / "sounds"
ROOM = 512 << 20
TONE = tone(16_000)


def never() -> None:
    """A deadline that does not come."""


def heard(data: bytes) -> Sound:
    facts = inspect(memoryview(data), ROOM, never)
    sound = decode(memoryview(data), facts.samples, never)
    assert (len(sound.samples), sound.rate) == (facts.samples, facts.rate)
    assert sound.samples.dtype == np.float32
    return sound


def refusal(data: bytes) -> str:
    with pytest.raises(MediaError) as caught:
        heard(data)
    return str(caught.value)


def levels(bits: int) -> np.ndarray:
    return np.round(TONE.astype(np.float64) * 2 ** (bits - 1)).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


WAVS = {
    "8 bit": (wav((levels(8) + 128).astype(np.uint8).tobytes(), bits=8), 2**-7),
    "16 bit": (wav_of(TONE), 0),
    "24 bit": (wav(levels(24).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(), bits=24), 0),
    "32 bit": (wav(levels(32).astype("<i4").tobytes(), bits=32), 0),
    "float": (wav(TONE.astype("<f4").tobytes(), bits=32, code=FLOAT), 0),
    "double": (wav(TONE.astype("<f8").tobytes(), bits=64, code=FLOAT), 0),
    "extensible": (wav(pcm16(TONE), code=EXTENSIBLE), 0),
    "LIST before the samples": (
        wav(pcm16(TONE), before=chunk(b"LIST", b"INFOISFT" + struct.pack("<I", 4) + b"x" * 4)),
        0,
    ),
    "sizes of 0, as recorders leave them": (wav(pcm16(TONE), nbytes=0), 0),
    "sizes unknown, as pipes have them": (wav(pcm16(TONE), nbytes=UNKNOWN), 0),
}


@pytest.mark.parametrize("name", WAVS)
def test_wav(name: str) -> None:
    data, apart = WAVS[name]
    sound = heard(data)
    assert sound.rate == 16_000
    assert len(sound.samples) == len(TONE)
    assert np.abs(sound.samples - TONE).max() <= apart


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000, 96_000, 384_000])
def test_the_rate_is_the_file_s_own(rate: int) -> None:
    sound = heard(wav_of(TONE, rate))
    assert (sound.rate, len(sound.samples)) == (rate, len(TONE))


@pytest.mark.parametrize("code", [ALAW, MULAW])
def test_telephone_companding(code: int) -> None:
    """ITU-T G.711: 0xD5 and 0xFF are next to silence, 0xAA and 0x80 the loudest there is."""
    quiet, loud = (b"\xd5", b"\xaa") if code == ALAW else (b"\xff", b"\x80")
    assert np.abs(heard(wav(quiet * 800, code=code, bits=8, rate=8000)).samples).max() < 0.0003
    assert heard(wav(loud * 800, code=code, bits=8, rate=8000)).samples.min() > 0.98


@pytest.mark.parametrize("channels", [3, 16, 17, 512])
def test_many_channels(channels: int) -> None:
    """The header of a file may claim any number of them."""
    one = np.full(channels, 0.25, np.float32)
    found = heard(wav(pcm16(np.tile(one, 20)), channels=channels, rate=8000)).samples
    assert len(found) == 20 and found == pytest.approx(0.25)


def test_channels_that_pyav_cannot_count_are_refused() -> None:
    said = refusal((DATA / "many_channels.aac").read_bytes())
    assert said == "audio decode error: a sound with 44 channels is not taken from such a file"


def test_channels_are_averaged() -> None:
    six = np.stack([np.full(800, level, np.float32) for level in (0.5, 0.25, 0.125, -0.5, 0.0, 0.375)], axis=1)
    assert heard(wav(pcm16(six), channels=6)).samples == pytest.approx(0.125)
    opposite = np.stack([TONE, -TONE], axis=1)
    assert not heard(wav(pcm16(opposite), channels=2)).samples.any()
    assert heard(wav((np.full((800, 2), [0, 255])).astype(np.uint8).tobytes(), channels=2, bits=8)).samples == (
        pytest.approx(-1 / 256)
    )


CODED = [
    # container, codec, rate, layout, largest difference of the root mean square, most samples more than there were
    ("mp3", "libmp3lame", 44_100, "stereo", 0.03, 0),
    ("mp3", "libmp3lame", 16_000, "mono", 0.03, 0),
    ("ipod", "aac", 44_100, "stereo", 0.02, 2048),
    ("adts", "aac", 48_000, "mono", 0.02, 2048),
    ("ipod", "alac", 44_100, "stereo", 0, 0),
    ("flac", "flac", 44_100, "stereo", 0, 0),
    ("ogg", "flac", 16_000, "mono", 0, 0),
    ("ogg", "libopus", 48_000, "mono", 0.01, 0),
    ("webm", "libopus", 48_000, "stereo", 0.01, 0),
    ("aiff", "pcm_s16be", 44_100, "stereo", 0, 0),
    ("au", "pcm_s16be", 8000, "mono", 0, 0),
    ("caf", "pcm_s16le", 16_000, "mono", 0, 0),
    ("matroska", "pcm_f32le", 16_000, "mono", 0, 0),
    ("matroska", "ac3", 48_000, "stereo", 0.01, 1536),
    ("mpegts", "mp2", 48_000, "stereo", 0.01, 1152),
    ("ipod", "aac", 48_000, "5.1", 0.06, 2048),  # the channel for low tones has none of this one
    ("ipod", "aac", 48_000, "7.1(wide)", 0.06, 2048),
    ("amr", "libopencore_amrnb", 8000, "mono", 0.05, 160),
    ("wav", "g726", 8000, "mono", 0.01, 0),
    ("wav", "adpcm_ima_wav", 8000, "mono", 0.01, 1024),
    ("wav", "g722", 16_000, "mono", 0.01, 0),
]


@pytest.mark.parametrize(("container", "codec", "rate", "layout", "apart", "more"), CODED)
def test_coded(container: str, codec: str, rate: int, layout: str, apart: float, more: int) -> None:
    wave = tone(rate)
    sound = heard(encoded(wave, rate, container=container, codec=codec, layout=layout))
    assert sound.rate == rate
    assert len(wave) <= len(sound.samples) <= len(wave) + more
    assert abs(loudness(sound.samples) - loudness(wave)) <= apart
    if apart == 0:
        assert np.array_equal(sound.samples, wave)


def loudness(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


@pytest.mark.parametrize(
    ("name", "rate", "seconds"),
    [("vorbis.ogg", 44_100, 0.6), ("opus.ogg", 48_000, 0.6), ("opus.webm", 48_000, 0.6), ("film.mp4", 48_000, 1.0)],
)
def test_files_of_others(name: str, rate: int, seconds: float) -> None:
    sound = heard((DATA / name).read_bytes())
    assert sound.rate == rate
    assert abs(len(sound.samples) / rate - seconds) < 0.05
    assert loudness(sound.samples) > 0.1


def test_a_file_that_breaks_off_gives_what_is_there() -> None:
    whole = wav_of(TONE)
    assert np.array_equal(heard(whole[:6000]).samples, TONE[: (6000 - 44) // 2])
    mp3 = encoded(tone(44_100, 2.0), 44_100, container="mp3", codec="libmp3lame")
    assert 0.9 < len(heard(mp3[: len(mp3) // 2]).samples) / 44_100 < 1.2


def test_a_recording_cut_out_of_a_stream() -> None:
    """Its first frames refer to what is missing."""
    mp3 = encoded(tone(44_100, 2.0), 44_100, container="mp3", codec="libmp3lame")
    assert 0.9 < len(heard(mp3[len(mp3) // 2 + 5 :]).samples) / 44_100 < 1.1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no known format"),
        (b"hello", "no known format"),
        (b"<html><body>404", "this is an HTML page"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "no known format"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no known format"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "no known format"),
        (wav(b""), "no sound that can be decoded"),
        (wav(pcm16(TONE), rate=999), "999 Hz is not between 1 and 384 kHz"),
        (wav(pcm16(TONE), rate=2_000_000_000), "not between 1 and 384 kHz"),
        (wav(np.full(800, np.nan, "<f4").tobytes(), bits=32, code=FLOAT), "no numbers"),
        (wav(np.full(800, np.inf, "<f4").tobytes(), bits=32, code=FLOAT), "no numbers"),
        (wav(np.full(800, -1e30, "<f4").tobytes(), bits=32, code=FLOAT), "no numbers"),
        (wav(pcm16(TONE), code=0x4444), "nobody knows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(data: bytes, words: str) -> None:
    said = refusal(data)
    assert said.startswith("audio decode error: ")
    assert words in said


def test_a_picture_track_alone_is_no_sound() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        for _ in range(3):
            output.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        output.mux(stream.encode(None))
    assert refusal(file.getvalue()) == "audio decode error: the file holds no sound"


def test_length_is_bounded_by_what_there_is_and_by_what_a_header_says() -> None:
    data = memoryview(wav_of(TONE))
    assert inspect(data, len(TONE) * 4, never).samples == len(TONE)
    with pytest.raises(MediaError, match=r"SMG_AUDIO_MAX_DECODED_BYTES=31999"):
        inspect(data, len(TONE) * 4 - 1, never)
    streamed = memoryview(wav(pcm16(TONE), nbytes=UNKNOWN))  # says nothing of its length
    with pytest.raises(MediaError, match=r"SMG_AUDIO_MAX_DECODED_BYTES=31999"):
        inspect(streamed, len(TONE) * 4 - 1, never)


def test_a_deadline_ends_the_work_between_packets() -> None:
    asked = 0

    def late() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        inspect(memoryview(wav_of(tone(16_000, 10.0))), ROOM, late)
    assert asked == 3


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        [wav_of(TONE[:2000]), *((DATA / name).read_bytes() for name in ("vorbis.ogg", "opus.webm", "film.mp4"))]
    ),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=30),
    st.floats(0.05, 1),
)
def test_damaged_files_are_sounds_or_refused(data: bytes, spots: list[tuple[float, int]], kept: float) -> None:
    spoiled = bytearray(data[: int(len(data) * kept)])
    for place, value in spots:
        spoiled[int(place * len(spoiled))] = value
    try:
        sound = heard(bytes(spoiled))
    except MediaError as error:
        assert len(str(error)) < 300
    else:
        assert np.isfinite(sound.samples).all()
