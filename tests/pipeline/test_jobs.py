"""The work of a pool process: spans afterwards, hashes, sinks, refusals; and the pages it does not touch again."""

import base64
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np
import pytest

from engines.base import Form, Modality
from pipeline import allocator
from pipeline.jobs import (
    Copied,
    Copy,
    Encode,
    Encoded,
    FileSink,
    Inspect,
    Inspected,
    Job,
    MediaWorkshop,
    ModelSettings,
    Result,
    Sink,
    SpanSink,
    content_hash,
)
from pipeline.media.image import decode
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, Hints, Measured, Source
from pool.process import JobError
from pool.spans import Span

ROOT = Path(__file__).parent.parent.parent
PICTURES = Path(__file__).parent.parent / "data" / "pictures"
GOLDEN: dict[str, Any] = json.loads((PICTURES / "golden.json").read_text())
FAMILY = by_name("qwen3_vl")
SETTINGS = FAMILY.settings(BundleConfig({}))
PLAIN = Hints()
MODEL = 7


class Desk:
    """A bench over one buffer and named files that are buffers too."""

    def __init__(self, nbytes: int) -> None:
        self.memory = memoryview(bytearray(nbytes))
        self.files: dict[str, memoryview] = {}

    def span(self, span: Span) -> memoryview:
        return self.memory[span.offset : span.offset + span.nbytes]

    def file(self, name: str, nbytes: int) -> memoryview:
        found = self.files[name]
        assert len(found) == nbytes
        return found

    def put(self, data: bytes, offset: int = 0) -> Span:
        self.memory[offset : offset + len(data)] = data
        return Span(offset, len(data))


@pytest.fixture
def workshop() -> MediaWorkshop:
    made = MediaWorkshop()
    payload = ModelSettings(FAMILY.name, msgspec.Raw(msgspec.json.encode(SETTINGS)))
    made.configure(MODEL, msgspec.json.encode(payload))
    return made


def picture(name: str) -> bytes:
    return (PICTURES / "oracle" / name).read_bytes()


def look(source: Span, *, base64: bool = False, hints: Hints = PLAIN, most: int = 1 << 28) -> Inspect:
    return Inspect(0, Modality.IMAGE, source, base64, hints, most)


def measure(facts: Inspected) -> Measured:
    return FAMILY.measure(SETTINGS, Modality.IMAGE, Source(facts.height, facts.width))


def expected_tensor(data: bytes, hints: Hints = PLAIN, form: Form = Form()) -> bytes:  # noqa: B008
    decoded = decode(memoryview(data), hints)
    measured = FAMILY.measure(SETTINGS, Modality.IMAGE, Source(decoded.height, decoded.width))
    out = np.empty(math.prod(measured.primary_shape) * 4, np.uint8)
    FAMILY.encode(SETTINGS, Modality.IMAGE, decoded, measured, form, out)
    return out.tobytes()


@pytest.mark.parametrize("text", [False, True], ids=["plain", "base64"])
def test_inspect_leaves_plain_bytes_and_tells_the_header(workshop: MediaWorkshop, text: bool) -> None:
    data = picture("jpg_exif6_320x200.jpg")
    desk = Desk(1 << 20)
    source = desk.put(base64.b64encode(data) if text else data, 4096)
    facts = workshop.run(look(source, base64=text), desk)
    assert isinstance(facts, Inspected)
    assert bytes(desk.memory[4096 : 4096 + facts.nbytes]) == data
    assert facts.content_hash == blake3.blake3(data).hexdigest()
    assert (facts.height, facts.width, facts.frames) == (320, 200, 1)
    assert (facts.stored_height, facts.stored_width, facts.format) == (200, 320, "JPEG")


@pytest.mark.parametrize("name", [name for name, record in GOLDEN.items() if record.get("hash") and "bad" not in name])
def test_content_hash_is_the_peer_s(workshop: MediaWorkshop, name: str) -> None:
    """SMG 1.11.0: BLAKE3 of the file; with a long-side cap of the tagged file."""
    record = GOLDEN[name]
    desk = Desk(1 << 20)
    hints = Hints(max_long_side=record.get("cap"))
    facts = workshop.run(look(desk.put(picture(record.get("file", name))), hints=hints), desk)
    assert isinstance(facts, Inspected)
    assert facts.content_hash == record["hash"]


class FullSize(type(FAMILY)):  # type: ignore[misc]
    """A family that applies the long-side cap itself."""

    name = "full_size"
    own_long_side = True


def test_a_family_with_its_own_long_side_gets_the_full_picture(
    workshop: MediaWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = picture("png_rgb_300x200.png")
    capped = Hints(max_long_side=112)
    monkeypatch.setattr("pipeline.jobs.models.by_name", {"full_size": FullSize()}.__getitem__)
    payload = ModelSettings("full_size", msgspec.Raw(msgspec.json.encode(SETTINGS)))
    workshop.configure(8, msgspec.json.encode(payload))
    desk = Desk(8 << 20)
    source = desk.put(data)
    facts = workshop.run(msgspec.structs.replace(look(source, hints=capped), full_size=True), desk)
    assert isinstance(facts, Inspected)
    assert (facts.height, facts.width) == (200, 300)
    assert facts.content_hash == content_hash(data, capped) != content_hash(data, PLAIN)
    measured = measure(facts)
    target = Span(1 << 20, math.prod(measured.primary_shape) * 4)
    job = Encode(0, 8, Modality.IMAGE, source, len(data), capped, measured, Form(), (SpanSink(target),))
    workshop.run(job, desk)
    assert bytes(desk.span(target)) == expected_tensor(data)


def test_encode_writes_the_first_sink_and_copies_to_the_rest(workshop: MediaWorkshop) -> None:
    data = picture("png_rgb_300x200.png")
    desk = Desk(8 << 20)
    source = desk.put(data)
    facts = workshop.run(look(source), desk)
    assert isinstance(facts, Inspected)
    measured = measure(facts)
    nbytes = math.prod(measured.primary_shape) * 4
    desk.files["segment"] = memoryview(bytearray(nbytes + 4096))
    sinks: tuple[Sink, ...] = (
        FileSink("segment", nbytes + 4096, 2048, nbytes),
        SpanSink(Span(1 << 20, nbytes)),
        SpanSink(Span(4 << 20, nbytes)),
    )
    done = workshop.run(Encode(0, MODEL, Modality.IMAGE, source, facts.nbytes, PLAIN, measured, Form(), sinks), desk)
    assert isinstance(done, Encoded)
    assert 0 < done.decode_s < 10
    assert 0 < done.preprocess_s < 10
    expected = expected_tensor(data)
    assert bytes(desk.files["segment"][2048 : 2048 + nbytes]) == expected
    assert bytes(desk.memory[1 << 20 : (1 << 20) + nbytes]) == expected
    assert bytes(desk.memory[4 << 20 : (4 << 20) + nbytes]) == expected
    assert not any(desk.files["segment"][:2048])
    assert not any(desk.files["segment"][2048 + nbytes :])


def test_base64_text_is_longer_than_the_picture_that_is_encoded(workshop: MediaWorkshop) -> None:
    """`nbytes` of Inspected bounds what Encode reads: the tail of the text stays behind the plain bytes."""
    data = picture("bmp_64.bmp")
    desk = Desk(1 << 21)
    source = desk.put(base64.b64encode(data))
    facts = workshop.run(look(source, base64=True), desk)
    assert isinstance(facts, Inspected)
    measured = measure(facts)
    nbytes = math.prod(measured.primary_shape) * 4
    sink = SpanSink(Span(1 << 17, nbytes))
    workshop.run(Encode(0, MODEL, Modality.IMAGE, source, facts.nbytes, PLAIN, measured, Form(), (sink,)), desk)
    assert bytes(desk.memory[1 << 17 : (1 << 17) + nbytes]) == expected_tensor(data)


def test_text_survives_a_look_that_fails(workshop: MediaWorkshop) -> None:
    """A job whose process died is run again on the same span: plain bytes are put there last of all."""
    text = base64.b64encode(picture("bad_header_only.jpg"))
    desk = Desk(1 << 16)
    source = desk.put(text)
    for _ in range(2):
        with pytest.raises(JobError, match="broken JPEG data"):
            workshop.run(look(source, base64=True), desk)
    assert bytes(desk.span(source)) == text


@pytest.mark.parametrize("text", [False, True])
def test_too_many_bytes_are_refused(workshop: MediaWorkshop, text: bool) -> None:
    data = picture("png_rgb_300x200.png")
    desk = Desk(1 << 20)
    source = desk.put(base64.b64encode(data) if text else data)
    with pytest.raises(JobError, match=f"exceeds the maximum.* {len(data) - 1} bytes"):
        workshop.run(look(source, base64=text, most=len(data) - 1), desk)
    assert isinstance(workshop.run(look(source, base64=text, most=len(data)), desk), Inspected)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bad_text.jpg", "the format is not known"),
        ("bad_bomb_40000.png", "above the limit of 178956970"),
        ("bad_header_only.jpg", "broken JPEG data"),
    ],
)
def test_refusals_of_a_look_are_the_client_s_fault(workshop: MediaWorkshop, name: str, reason: str) -> None:
    desk = Desk(1 << 16)
    with pytest.raises(JobError, match=reason):
        workshop.run(look(desk.put(picture(name))), desk)


@pytest.mark.parametrize("name", ["bad_truncated.jpg", "bad_truncated.png"])
def test_a_cut_file_fails_when_it_is_decoded(workshop: MediaWorkshop, name: str) -> None:
    desk = Desk(8 << 20)
    source = desk.put(picture(name))
    facts = workshop.run(look(source), desk)
    assert isinstance(facts, Inspected)
    measured = measure(facts)
    sink = SpanSink(Span(1 << 20, math.prod(measured.primary_shape) * 4))
    with pytest.raises(JobError, match="image file is truncated"):
        workshop.run(Encode(0, MODEL, Modality.IMAGE, source, facts.nbytes, PLAIN, measured, Form(), (sink,)), desk)


def test_mistakes_of_the_gateway_are_no_refusals(workshop: MediaWorkshop) -> None:
    data = picture("bmp_64.bmp")
    desk = Desk(1 << 21)
    source = desk.put(data)
    facts = workshop.run(look(source), desk)
    assert isinstance(facts, Inspected)
    measured = measure(facts)
    nbytes = math.prod(measured.primary_shape) * 4
    job = Encode(0, MODEL, Modality.IMAGE, source, len(data), PLAIN, measured, Form(), (SpanSink(Span(0, nbytes - 1)),))
    with pytest.raises(ValueError, match=f"a sink of {nbytes - 1} bytes for a tensor of {nbytes}"):
        workshop.run(job, desk)
    with pytest.raises(KeyError):
        workshop.run(msgspec.structs.replace(job, model=8), desk)


def test_jobs_and_results_survive_the_ring() -> None:
    workshop = MediaWorkshop()
    measured = FAMILY.measure(SETTINGS, Modality.IMAGE, Source(1080, 1920))
    sinks: tuple[Sink, ...] = (SpanSink(Span(0, 8)), FileSink("a", 8, 0, 8))
    jobs: list[Job] = [
        look(Span(4096, 77), base64=True, hints=Hints(max_long_side=280)),
        Encode(3, MODEL, Modality.IMAGE, Span(1, 2), 2, PLAIN, measured, Form("bfloat16"), sinks),
    ]
    for job in jobs:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=workshop.job_type) == job
    results: list[Result] = [Inspected(5, "ab", 1, 2, 1, 2, 1, "PNG"), Encoded(0.5, 0.25)]
    for result in results:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=workshop.result_type) == result


def test_a_new_configuration_replaces_the_old_one(workshop: MediaWorkshop) -> None:
    small = FAMILY.settings(BundleConfig({}, {"min_pixels": 1024, "max_pixels": 4096}))
    payload = ModelSettings(FAMILY.name, msgspec.Raw(msgspec.json.encode(small)))
    workshop.configure(MODEL, msgspec.json.encode(payload))
    family, settings = workshop._models[MODEL]
    assert (family.name, settings) == (FAMILY.name, small)
    with pytest.raises(KeyError):
        workshop.configure(8, msgspec.json.encode(ModelSettings("unheard_of", msgspec.Raw(b"{}"))))


FAULTS = """
import io, math, resource, sys
import numpy as np
from PIL import Image
from engines.base import Form, Modality
from pipeline import allocator
from pipeline.media.image import decode
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, Hints, Source

assert allocator.keep_pages()
family = by_name("qwen3_vl")
settings = family.settings(BundleConfig({}))
files = []
for height, width in ((1080, 1920), (480, 640), (720, 1280)):
    pixels = np.random.default_rng(height).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), 3).save(encoded, "JPEG", quality=85)
    files.append(encoded.getvalue())
out = np.zeros(1088 * 1920 * 24, np.uint8)
counts = []
for turn in range(12):
    data = files[turn % 3]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    picture = decode(memoryview(data), Hints())
    measured = family.measure(settings, Modality.IMAGE, Source(picture.height, picture.width))
    nbytes = math.prod(measured.primary_shape) * 4
    family.encode(settings, Modality.IMAGE, picture, measured, Form(), out[:nbytes])
    del picture
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(max(counts[6:]))
"""


def test_pages_are_touched_once() -> None:
    """After warm-up a process takes few page faults for a 1080p picture, whatever sizes come between."""
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) <= 1000


TRIM = """
import os
from pipeline import allocator

allocator.keep_pages()
before = allocator._private_bytes()
def use(count):
    blocks = [bytearray(20 << 20) for _ in range(count)]
    for block in blocks:
        block[::4096] = b"x" * len(block[::4096])
    return bytearray(21 << 20)  # lies above them
pins = [use(8)]
allocator.trim()
usual = allocator._private_bytes() - before
pins.append(use(30))
untrimmed = allocator._private_bytes() - before
allocator.trim()
print(usual, untrimmed, allocator._private_bytes() - before)
"""


def test_kept_pages_are_bounded_and_given_back_after_an_unusual_picture() -> None:
    """160 MiB in blocks of 20: kept when freed.  600 MiB with a block in use above them: given back."""
    run = subprocess.run([sys.executable, "-c", TRIM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    usual, untrimmed, trimmed = (int(number) for number in run.stdout.split())
    assert 100 << 20 < usual <= allocator.KEPT_BYTES < untrimmed
    assert trimmed < 60 << 20  # the two blocks in use


def test_a_refused_picture_is_not_kept_alive(workshop: MediaWorkshop) -> None:
    """The error that leaves `run` holds no frame with the picture in it, so its memory can be given back."""
    desk = Desk(8 << 20)
    source = desk.put(picture("bad_truncated.png"))
    measured = FAMILY.measure(SETTINGS, Modality.IMAGE, Source(256, 256))
    job = Encode(0, MODEL, Modality.IMAGE, source, source.nbytes, PLAIN, measured, Form(), ())
    with pytest.raises(JobError) as refused:
        workshop.run(job, desk)
    assert refused.value.__context__ is None
    assert refused.value.__cause__ is None


def test_a_copy_reaches_every_place(workshop: MediaWorkshop) -> None:
    desk = Desk(64)
    desk.files = {"master": memoryview(bytearray(range(40))), "other": memoryview(bytearray(40))}
    source = FileSink("master", 40, 10, 8)
    sinks: tuple[Sink, ...] = (FileSink("other", 40, 32, 8), SpanSink(Span(16, 8)), FileSink("other", 40, 0, 8))
    assert isinstance(workshop.run(Copy(Modality.IMAGE, source, sinks), desk), Copied)
    wanted = bytes(range(10, 18))
    assert bytes(desk.files["other"]) == wanted + bytes(24) + wanted and bytes(desk.memory[16:24]) == wanted
    workshop.run(Copy(Modality.IMAGE, SpanSink(Span(16, 8)), (SpanSink(Span(40, 8)),)), desk)
    assert bytes(desk.memory[40:48]) == wanted
    with pytest.raises(ValueError):
        workshop.run(Copy(Modality.IMAGE, source, (SpanSink(Span(0, 9)),)), desk)
