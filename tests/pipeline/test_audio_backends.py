"""Sounds decoded by the ffmpeg program: the samples PyAV finds, and nothing left behind."""

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.base import Form, Modality
from pipeline.media import audio
from pipeline.media.audio import Sound
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, Hints, MediaError, Source
from tests.pipeline.ffmpeg import made_ffmpeg, real_ffmpeg
from tests.pipeline.sounds import FLOAT, UNKNOWN, encoded, pcm16, tone, wav, wav_of
from tests.pipeline.test_audio import CODED, DATA, ROOM, TONE, WAVS

BY = audio.OTHERS["ffmpeg"]
# Of full scale: another build of ffmpeg adds up the same numbers in another order.  What is not lossy is equal.
APART = 5e-7


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(real_ffmpeg(tmp_path_factory.mktemp("program"))))
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before = len(os.listdir("/proc/self/fd"))
    yield
    with pytest.raises(ChildProcessError):  # no child, dead or alive
        os.waitpid(-1, os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) == before


def always() -> None:
    """There is time."""


def heard(data: bytes, by: audio.Decode | None = None) -> Sound:
    facts = audio.inspect(memoryview(data), ROOM, always, by)
    sound = audio.decode(memoryview(data), facts.samples, always, by)
    assert (len(sound.samples), sound.rate) == (facts.samples, facts.rate)
    return sound


def is_heard_alike(data: bytes, *, apart: float = 0.0) -> None:
    mine, others = heard(data), heard(data, BY)
    assert (mine.rate, len(mine.samples)) == (others.rate, len(others.samples))
    assert np.abs(mine.samples - others.samples).max() <= apart


@pytest.mark.parametrize("name", WAVS)
def test_wav(name: str) -> None:
    is_heard_alike(WAVS[name][0])


MORE = [
    ("matroska", "eac3", 48_000, "stereo"),
    ("wav", "pcm_alaw", 8000, "mono"),
    ("wav", "pcm_mulaw", 8000, "stereo"),
    ("aiff", "pcm_s24be", 44_100, "stereo"),
    ("aiff", "pcm_s32be", 44_100, "stereo"),
    ("caf", "pcm_f32be", 44_100, "stereo"),
    ("au", "pcm_f64be", 16_000, "stereo"),
    ("w64", "pcm_s24le", 16_000, "5.1"),
]


@pytest.mark.parametrize(("container", "codec", "rate", "layout"), [*(row[:4] for row in CODED), *MORE])
def test_coded(container: str, codec: str, rate: int, layout: str) -> None:
    """Padding at both ends is left out alike; what NUT does not describe (ALAC, G.726, ADPCM), PyAV decodes."""
    data = encoded(tone(rate), rate, container=container, codec=codec, layout=layout)
    is_heard_alike(data, apart=APART if codec in ("aac", "ac3", "eac3", "libopus") else 0.0)


@pytest.mark.parametrize("name", ["vorbis.ogg", "opus.ogg", "opus.webm", "film.mp4"])
def test_files_of_others(name: str) -> None:
    is_heard_alike((DATA / name).read_bytes(), apart=APART)


def test_channels_are_averaged_by_the_same_arithmetic() -> None:
    noise = np.random.default_rng(2)
    for channels in (2, 3, 6, 16, 512):
        is_heard_alike(wav(pcm16(noise.uniform(-1, 1, (40, channels))), channels=channels, rate=8000))
    wide = noise.integers(-(2**31), 2**31, (4000, 2)).astype("<i4")
    is_heard_alike(wav(wide.tobytes(), channels=2, bits=32))
    is_heard_alike(wav(noise.uniform(-1, 1, (4000, 2)).astype("<f4").tobytes(), channels=2, bits=32, code=FLOAT))


def test_cut_out_of_a_stream_and_broken_off() -> None:
    mp3 = encoded(tone(44_100, 2.0), 44_100, container="mp3", codec="libmp3lame")
    is_heard_alike(wav_of(TONE)[:6000])
    is_heard_alike(mp3[: len(mp3) // 2])
    found = heard(mp3[len(mp3) // 2 + 5 :], BY)
    assert 0.9 < len(found.samples) / 44_100 < 1.1


def test_a_rate_that_changes() -> None:
    """The program goes on at the first one."""
    data = b"".join(
        encoded(tone(rate, 1.0), rate, container="adts", codec="aac", layout=layout)
        for rate, layout in ((48_000, "mono"), (24_000, "stereo"))
    )
    with pytest.raises(MediaError, match="the rate changes from 48000 to 24000 Hz"):
        heard(data)
    found = heard(data, BY)
    assert found.rate == 48_000 and 1.9 < len(found.samples) / 48_000 < 2.2


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        wav(b""),
        wav(pcm16(TONE), rate=999),
        wav(np.full(800, np.nan, "<f4").tobytes(), bits=32, code=FLOAT),
    ],
)
def test_refused_in_the_same_words(data: bytes) -> None:
    said = []
    for by in (None, BY):
        with pytest.raises(MediaError, match="^audio decode error: ") as caught:
            heard(data, by)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_damage_is_a_sound_or_refused() -> None:
    noise = np.random.default_rng(4)
    whole = encoded(tone(44_100), 44_100, container="ipod", codec="aac")
    outcomes = set()
    for _ in range(6):
        spoiled = bytearray(whole)
        for place in noise.integers(0, len(whole), 12):
            spoiled[place] ^= 0x55
        try:
            outcomes.add(np.isfinite(heard(bytes(spoiled), BY).samples).all())
        except MediaError as error:
            outcomes.add(str(error).split(":")[0])
    assert outcomes <= {True, "audio decode error"}


def test_length_is_bounded_while_it_works() -> None:
    streamed = memoryview(wav(pcm16(tone(16_000, 60)), nbytes=UNKNOWN))  # says nothing of its length
    with pytest.raises(MediaError, match="SMG_AUDIO_MAX_DECODED_BYTES=400000 bytes"):
        audio.inspect(streamed, 400_000, always, BY)


def test_features_are_the_same() -> None:
    """Of what is lossless all bytes; of AAC what the last bits of samples make of them."""
    family = by_name("qwen3_asr")
    rules = family.settings(BundleConfig({}))
    aac = encoded(tone(48_000, 1.0), 48_000, container="ipod", codec="aac")
    for data, apart in ((wav_of(tone(16_000, 1.0)), 0.0), (aac, 1e-4)):
        made = []
        for by in (None, BY):
            sound = heard(data, by)
            measured = family.measure(rules, Modality.AUDIO, Source(0, 0, len(sound.samples), Hints(), sound.rate))
            out = np.empty(math.prod(measured.primary_shape) * 4, np.uint8)
            family.encode(rules, Modality.AUDIO, sound, measured, Form(), out)
            made.append(out.view(np.float32))
        assert np.abs(made[0] - made[1]).max() <= apart


def test_no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MediaError, match="^ffmpeg executable not found$"):
        heard(wav_of(TONE), BY)


def put_in_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_what_the_program_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No protocol but its two pipes, no format but the one that is fed, and nothing of our environment."""
    told = tmp_path / "told"
    put_in_path(monkeypatch, made_ffmpeg(tmp_path / "bin", f'(echo "$@"; env) >{told}; exit 3'))
    monkeypatch.setenv("MEDIAGATE_API_KEY", "secret")
    with pytest.raises(MediaError, match=r"ffmpeg could not decode the sound \(exit code 3\)"):
        heard(wav_of(TONE), BY)
    words = told.read_text()
    assert words.count("-protocol_whitelist pipe") == 2 and "-format_whitelist nut" in words
    assert " -i pipe:0 " in words and words.splitlines()[0].endswith(" pipe:1")
    assert "secret" not in words


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("head -c 200 /dev/zero", "something else than samples"),
        (
            "printf '.snd\\0\\0\\0\\030\\377\\377\\377\\377\\0\\0\\0\\003\\0\\0\\076\\200\\0\\0\\0\\001'",
            "something else",
        ),
        ("exit 0", "no sound that can be decoded"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_program_that_answers_otherwise(
    script: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_in_path(monkeypatch, made_ffmpeg(tmp_path / "bin", script))
    with pytest.raises(MediaError, match=f"^audio decode error: .*{words}"):
        heard(wav_of(TONE), BY)


@pytest.mark.parametrize("script", ["exec sleep 60", "exec >&-; exec sleep 60"])
def test_a_program_that_hangs_is_ended_by_the_clock(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It neither reads nor writes, or has closed its end; the fixture sees that it is gone and reaped."""
    put_in_path(monkeypatch, made_ffmpeg(tmp_path / "bin", script))
    deadline = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        audio.inspect(memoryview(wav_of(tone(16_000, 10.0))), ROOM, check, BY)
