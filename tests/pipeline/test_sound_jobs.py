"""Sounds through the jobs of a pool process: bytes or base64 in a span, facts, features in the sink, refusals."""

import base64
import math

import blake3
import msgspec
import numpy as np
import pytest

from engines.base import Form, Modality
from pipeline.jobs import Encode, Encoded, Inspect, Inspected, MediaWorkshop, ModelSettings, SpanSink
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, Hints, Source
from pool.process import JobError
from pool.spans import Span
from tests.pipeline.sounds import chunk, pcm16, tone, wav, wav_of

FAMILY = by_name("qwen3_asr")
SETTINGS = FAMILY.settings(BundleConfig({}))
MODEL, SOURCE, OUT = 3, 4096, 1 << 20
TONE = wav_of(tone(16_000, 1.0))


class Desk:
    """A bench over one buffer.  `times`: how often it says that there is time left."""

    def __init__(self, times: int = 1 << 30) -> None:
        self.memory = memoryview(bytearray(4 << 20))
        self.times = times

    def span(self, span: Span) -> memoryview:
        return self.memory[span.offset : span.offset + span.nbytes]

    def file(self, name: str, nbytes: int) -> memoryview:
        raise AssertionError("no sound asks for a file here")

    def remaining(self) -> float:
        self.times -= 1
        return 1.0 if self.times >= 0 else 0.0

    def put(self, data: bytes) -> Span:
        self.memory[SOURCE : SOURCE + len(data)] = data
        return Span(SOURCE, len(data))


@pytest.fixture(scope="module")
def workshop() -> MediaWorkshop:
    made = MediaWorkshop()
    made.configure(MODEL, msgspec.json.encode(ModelSettings(FAMILY.name, msgspec.Raw(msgspec.json.encode(SETTINGS)))))
    return made


def look(source: Span, *, text: bool = False, most: int = 1 << 28, samples: int = 1 << 28) -> Inspect:
    return Inspect(0, Modality.AUDIO, source, text, Hints(), most, max_sound_bytes=samples)


@pytest.mark.parametrize("text", [False, True], ids=["plain", "base64"])
def test_a_sound_from_bytes_to_features(workshop: MediaWorkshop, text: bool) -> None:
    desk = Desk()
    source = desk.put(base64.b64encode(TONE) if text else TONE)
    facts = workshop.run(look(source, text=text), desk)
    assert isinstance(facts, Inspected)
    assert bytes(desk.memory[SOURCE : SOURCE + facts.nbytes]) == TONE
    assert facts.content_hash == blake3.blake3(TONE).hexdigest()
    assert (facts.frames, facts.rate, facts.format, facts.height) == (16_000, 16_000.0, "wav/pcm_s16le", 0)

    measured = FAMILY.measure(SETTINGS, Modality.AUDIO, Source(0, 0, facts.frames, Hints(), facts.rate))
    sink = Span(OUT, math.prod(measured.primary_shape) * 4)
    job = Encode(0, MODEL, Modality.AUDIO, source, facts.nbytes, Hints(), measured, Form(), (SpanSink(sink),))
    encoded = workshop.run(msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Encode), desk)
    assert isinstance(encoded, Encoded)
    assert encoded.decode_s > 0 and encoded.preprocess_s > 0
    features = np.frombuffer(desk.span(sink), np.float32).reshape(128, 100)
    assert (features.argmax(axis=0) == features[:, 50].argmax()).mean() > 0.9  # one tone: the same band all along
    assert features.max() - features.min() == pytest.approx(2, abs=1e-5)


@pytest.mark.parametrize(
    ("data", "most", "samples", "words"),
    [
        (b"no sound", 1 << 20, 1 << 20, "audio decode error: no known format"),
        (TONE, len(TONE) - 1, 1 << 20, f"audio input payload of {len(TONE)} bytes exceeds the maximum size"),
        (TONE, 1 << 20, 63_999, "more than SMG_AUDIO_MAX_DECODED_BYTES=63999 bytes"),
    ],
)
def test_what_is_refused_in_words(workshop: MediaWorkshop, data: bytes, most: int, samples: int, words: str) -> None:
    desk = Desk()
    with pytest.raises(JobError, match=words):
        workshop.run(look(desk.put(data), most=most, samples=samples), desk)


def test_base64_is_bounded_before_it_is_decoded(workshop: MediaWorkshop) -> None:
    desk = Desk()
    text = base64.b64encode(TONE)
    source = desk.put(text)
    with pytest.raises(JobError, match="audio input payload"):
        workshop.run(look(source, text=True, most=1000), desk)
    assert bytes(desk.span(source)) == text


def test_a_late_sound_is_given_up(workshop: MediaWorkshop) -> None:
    desk = Desk(times=2)
    long = wav_of(tone(16_000, 10.0))
    with pytest.raises(TimeoutError):
        workshop.run(look(desk.put(long)), desk)


def test_a_file_that_changes_between_the_jobs_is_refused(workshop: MediaWorkshop) -> None:
    """The span is ours alone; were it not, the tensor would keep bytes of another request."""
    desk = Desk()
    source = desk.put(TONE)
    facts = workshop.run(look(source), desk)
    assert isinstance(facts, Inspected)
    measured = FAMILY.measure(SETTINGS, Modality.AUDIO, Source(0, 0, facts.frames, Hints(), facts.rate))
    shorter = wav(pcm16(tone(16_000, 0.5)), before=chunk(b"LIST", bytes(16_000 - 8)))
    sink = Span(OUT, math.prod(measured.primary_shape) * 4)
    job = Encode(
        0, MODEL, Modality.AUDIO, desk.put(shorter), len(shorter), Hints(), measured, Form(), (SpanSink(sink),)
    )
    with pytest.raises(JobError, match="holds 8000 samples, and a moment ago 16000"):
        workshop.run(job, desk)
