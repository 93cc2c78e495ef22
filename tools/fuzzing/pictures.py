"""Spoiled pictures through the very job a pool process runs: looked at, then decoded into a tensor.

Right is a tensor or a refusal that a client can read.  Wrong is any other exception, more memory than a pool process
may have, and a refusal of no words.
"""

import math
import mmap
import random
from dataclasses import dataclass, field

import msgspec

from engines.base import Form, Modality
from pipeline.jobs import Encode, Inspect, Inspected, MediaWorkshop, ModelSettings, SpanSink
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, Hints, MediaError, Source
from pool.process import JobError
from pool.spans import Span
from tools.fuzzing.bombs import BOMBS
from tools.fuzzing.formats import reshape, seeds
from tools.fuzzing.mutate import spoil
from tools.fuzzing.rig import Wrong, forget_peak, peak_bytes, resident_bytes

FOREIGN = (
    b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0",  # ICO
    b"\0\0\2\0\1\0\x20\x20\0\0\1\0\x20\0",  # CUR
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    b"\xc5\xd0\xd3\xc6\x20\0\0\0\x40\0\0\0",  # EPS with a preview
    b"8BPS\0\1\0\0\0\0\0\0\0\3\0\0\0\x10\0\0\0\x10\0\x08\0\3",
    b"P6 16 16 255 ",
    b"icns\0\0\0\x10",
    b"\x0a\5\1\x08\0\0\0\0\x0f\0\x0f\0",  # PCX
    b"\xd7\xcd\xc6\x9a\0\0\0\0\0\0\x10\0\x10\0\xa0\5",  # WMF
    b"\1\xda\1\1\0\3\0\x10\0\x10\0\3",  # SGI
    b"qoif\0\0\0\x10\0\0\0\x10\3\0",
    b"DDS |\0\0\0",
    b"SIMPLE  =                    T",  # FITS
    b"\x8aMNG\r\n\x1a\n",
    b"BLP2\1\0\0\0",
    b"\0\0\0\x18ftypheic\0\0\0\0",
)
SLOW_PIXELS = 2_000_000  # pictures beyond are decoded now and then only
PEAK_BYTES = 4 << 30


@dataclass
class Desk:
    """The bench of a pool process; its memory is shared, as there, and does not count as the process's own."""

    memory: memoryview = field(default_factory=lambda: memoryview(mmap.mmap(-1, 64 << 20)))

    def span(self, span: Span) -> memoryview:
        if span.offset + span.nbytes > len(self.memory):
            self.memory = memoryview(mmap.mmap(-1, span.offset + span.nbytes))
        return self.memory[span.offset : span.offset + span.nbytes]

    def file(self, name: str, nbytes: int) -> memoryview:
        raise FileNotFoundError(name)


class Pictures:
    """`bombs`: whether files that cost seconds are among the cases.  `memory_bytes`: what the process may have."""

    name = "pictures"
    may_die = False

    def __init__(self, *, bombs: bool = True, memory_bytes: int = 3584 << 20) -> None:
        self._bombs = bombs
        self._memory_bytes = memory_bytes
        self._seeds = seeds()
        self._all = [data for some in self._seeds.values() for data in some]
        self._family = by_name("qwen3_vl")
        self._settings = self._family.settings(BundleConfig({}))

    def prepare(self) -> None:
        self._workshop = MediaWorkshop(memory_bytes=self._memory_bytes)
        self._workshop.preload()
        self._workshop.prepare()
        settings = ModelSettings(self._family.name, msgspec.Raw(msgspec.json.encode(self._settings)))
        self._workshop.configure(1, msgspec.json.encode(settings))
        self._desk = Desk()

    def make(self, chance: random.Random) -> tuple[str, bytes]:
        """A file and what it once was."""
        pick = chance.random()
        if pick < 0.02:
            return "foreign", chance.choice(FOREIGN) + chance.randbytes(64)
        if self._bombs and pick < 0.025:
            name = chance.choice(tuple(BOMBS))
            return name, BOMBS[name](chance.choice((1000, 100_000, 1_000_000)))
        name = chance.choice(tuple(self._seeds))
        data = chance.choice(self._seeds[name])
        if pick < 0.6:
            data = reshape(chance, name, data)
        if pick > 0.5:
            data = spoil(chance, data, self._all)
        return name, data

    def feed(self, chance: random.Random) -> str:
        name, data = self.make(chance)
        hints = Hints(max_long_side=chance.choice((28, 280)) if chance.random() < 0.1 else None)
        before = resident_bytes()
        forget_peak()
        try:
            word = self.run(data, hints, is_patient=chance.random() < 0.02)
        except JobError as refused:
            word = f"refused {name}"
            if not 20 < len(str(refused)) < 500:
                raise Wrong(f"a refusal of {len(str(refused))} characters: {str(refused)[:100]!r}") from None
        if peak_bytes() - before > PEAK_BYTES:
            raise Wrong(f"{(peak_bytes() - before) >> 20} MiB for a {name} of {len(data)} bytes")
        return word

    def run(self, data: bytes, hints: Hints, *, is_patient: bool) -> str:
        """Look at the file, decode it; the tensor is thrown away.  JobError.  Impatient: no picture that takes long."""
        source = Span(0, len(data))
        self._desk.span(source)[:] = data
        facts = self._workshop.run(Inspect(0, Modality.IMAGE, source, False, hints, 1 << 28), self._desk)
        assert isinstance(facts, Inspected)
        if facts.stored_height * facts.stored_width > SLOW_PIXELS and not is_patient:
            return "looked at"
        try:
            measured = self._family.measure(self._settings, Modality.IMAGE, Source(facts.height, facts.width))
        except MediaError:
            return "refused by shape"
        nbytes = math.prod(measured.primary_shape) * 4
        sink = SpanSink(Span(-(-len(data) // 4096) * 4096, nbytes))
        self._desk.span(sink.span)
        self._desk.span(source)[:] = data  # the desk may have grown
        job = Encode(0, 1, Modality.IMAGE, source, len(data), hints, measured, Form(), (sink,))
        self._workshop.run(job, self._desk)
        return f"decoded {facts.format}"


class ScarcePictures(Pictures):
    """The same in a process that has hardly any memory.  Some decoders end it then, which costs its job and no other:
    the pool runs it once more and then refuses it."""

    name = "scarce-pictures"
    may_die = True

    def __init__(self) -> None:
        super().__init__(memory_bytes=1 << 20)

    def make(self, chance: random.Random) -> tuple[str, bytes]:
        try:
            return super().make(chance)
        except MemoryError:  # ours, not the decoder's
            return "foreign", FOREIGN[0]
