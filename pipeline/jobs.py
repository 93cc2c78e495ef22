"""The work a pool process does for one picture, clip or sound: typed jobs in, typed results out.

Two jobs make one item.  `Inspect` turns what the client sent into plain bytes (base64 decoded in place), hashes them
and reads the header, of a clip every packet's: from its `Inspected` the frontend knows the tensor's size and reserves
the outputs of the whole request together.  `Encode` decodes, resizes and lays out patches straight into the sink.
Decoded frames never leave the process.
"""

import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import blake3
import msgspec
import numpy as np

from engines.base import ITEM_BYTES, Form, Modality
from pipeline import allocator, models
from pipeline.media import audio, image, video
from pipeline.media.base64text import decode_base64
from pipeline.models.base import Family, Hints, Measured, MediaError, Sampling, Source
from pool.process import JobError
from pool.spans import Span


class SpanSink(msgspec.Struct, frozen=True, tag="span"):
    """The tensor goes into a span of the shared mapping."""

    span: Span


class FileSink(msgspec.Struct, frozen=True, tag="file"):
    """The tensor goes into `/dev/shm/<name>` (`file_bytes` long) at `offset`, for `nbytes`."""

    name: str
    file_bytes: int
    offset: int
    nbytes: int


Sink = SpanSink | FileSink


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Look at one item: `source` holds its bytes, or base64 text when `base64`.

    The plain bytes are at the start of the same span afterwards.  `max_input_bytes` bounds the decoded length.
    `full_size`: tell the size without the long-side cap (the family applies it itself).  `sampling`: how frames of a
    clip will be chosen, for its hash.  `max_sound_bytes`: of one channel of a sound, decoded.
    """

    item: int
    modality: Modality
    source: Span
    base64: bool
    hints: Hints
    max_input_bytes: int
    full_size: bool = False
    sampling: Sampling = Sampling()
    max_sound_bytes: int = 512 << 20


class Inspected(msgspec.Struct, frozen=True, tag="inspected"):
    """`nbytes`: length of the plain bytes.  `height`, `width`: after orientation and the long-side cap (unless
    `full_size`); `frames` of a clip in all, samples of a sound, `rate` of them a second.
    """

    nbytes: int
    content_hash: str
    height: int
    width: int
    frames: int
    stored_height: int
    stored_width: int
    format: str
    rate: float = 1.0


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Make one item's primary tensor.  `model`: key of a configured model; `sinks`: the first is written, the rest
    copied from it.
    """

    item: int
    model: int
    modality: Modality
    source: Span
    nbytes: int
    hints: Hints
    measured: Measured
    form: Form
    sinks: tuple[Sink, ...]


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """Where the time went, in seconds."""

    decode_s: float
    preprocess_s: float


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Bring a tensor that is there to further places of the same length.  Nobody writes to `source` meanwhile."""

    modality: Modality
    source: Sink
    sinks: tuple[Sink, ...]


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    copy_s: float


class ModelSettings(msgspec.Struct, frozen=True):
    """Payload of a *configure* message: which family serves the model, and its settings as JSON of the family's own
    struct.
    """

    family: str
    settings: msgspec.Raw


Job = Inspect | Encode | Copy
Result = Inspected | Encoded | Copied


class Bench(Protocol):
    """What of the pool's bench the work uses."""

    def span(self, span: Span) -> memoryview: ...

    def file(self, name: str, nbytes: int) -> memoryview: ...

    def remaining(self) -> float: ...


class MediaWorkshop:
    """Runs the jobs in a pool process."""

    job_type: Any = Job
    result_type: Any = Result

    def __init__(
        self, *, memory_bytes: int | None = None, clip_backend: str = "auto", sound_backend: str = "auto"
    ) -> None:
        """`memory_bytes`: what a process may take beyond what it has at its start; None: no bound.  `clip_backend`: as
        SMG_VIDEO_DECODE_BACKEND; `sound_backend`: as SMG_AUDIO_DECODE_BACKEND.
        """
        self._memory_bytes = memory_bytes
        self._clip_backend = clip_backend
        self._sound_decoder = audio.OTHERS.get(sound_backend)
        self._models: dict[int, tuple[Family, msgspec.Struct]] = {}

    def preload(self) -> None:
        """In the supervisor, before the first fork: what every process needs is then shared memory of all."""
        models.discover()
        image.preload()
        video.preload(self._clip_backend)
        audio.preload()

    def prepare(self) -> None:
        allocator.keep_pages()
        if self._memory_bytes is not None:
            allocator.bound(self._memory_bytes)

    def configure(self, key: int, payload: bytes) -> None:
        """`payload`: ModelSettings as JSON."""
        described = msgspec.json.decode(payload, type=ModelSettings)
        family = models.by_name(described.family)
        self._models[key] = family, msgspec.json.decode(described.settings, type=family.settings_type)

    def run(self, job: Inspect | Encode | Copy, bench: Bench) -> Inspected | Encoded | Copied:
        """Raises JobError for what the client sent, TimeoutError when a clip or sound takes longer than it
        may.
        """
        if isinstance(job, Copy):
            return _copy(job, bench)
        try:
            if isinstance(job, Inspect):
                return _inspect(job, bench, self._sound_decoder)
            return self._encode(job, bench)
        except MediaError as error:
            refusal = str(error)
        except MemoryError:
            refusal = f"{job.modality.value} asks for more memory than one may take"
        finally:
            allocator.trim()
        raise JobError(refusal)  # out here: the frames that hold the picture are gone

    def _encode(self, job: Encode, bench: Bench) -> Encoded:
        family, settings = self._models[job.model]
        began = time.perf_counter()
        hints = Hints() if family.own_long_side else job.hints
        source = bench.span(job.source)[: job.nbytes]
        picture: Any
        if job.modality is Modality.VIDEO:

            def choose(frames: int, rate: float) -> Sequence[int]:
                return family.sample(settings, Source(0, 0, frames, job.hints, rate))

            decoder = video.OTHERS.get(self._clip_backend)
            picture = clock = _Clock(video.frames(source, choose, hints, _deadline(bench), decoder))
        elif job.modality is Modality.AUDIO:
            clock = None
            picture = audio.decode(source, job.measured.frames, _deadline(bench), self._sound_decoder)
        else:
            clock = None
            picture = image.decode(source, hints, keep_alpha=family.keeps_alpha(settings))
        decoded = time.perf_counter() - began
        nbytes = math.prod(job.measured.primary_shape) * ITEM_BYTES[job.form.dtype]
        first, *others = (_sink(sink, nbytes, bench) for sink in job.sinks)
        family.encode(settings, job.modality, picture, job.measured, job.form, np.frombuffer(first, np.uint8))
        for other in others:
            other[:] = first
        if clock is not None:
            decoded += clock.seconds
        return Encoded(decode_s=decoded, preprocess_s=time.perf_counter() - began - decoded)


def _inspect(job: Inspect, bench: Bench, sound_decoder: audio.Decode | None) -> Inspected:
    span = bench.span(job.source)
    data: memoryview | bytes = decode_base64(span, job.max_input_bytes, job.modality) if job.base64 else span
    nbytes = len(data)
    if nbytes > job.max_input_bytes:
        kind = job.modality.value
        raise MediaError(
            f"{kind} input payload of {nbytes} bytes exceeds the maximum size of {job.max_input_bytes} bytes"
        )
    hints = Hints() if job.full_size else job.hints
    if job.modality is Modality.VIDEO:
        found = _inspect_clip(job, memoryview(data), hints, bench)
    elif job.modality is Modality.AUDIO:
        found = _inspect_sound(job, memoryview(data), bench, sound_decoder)
    else:
        found = _inspect_picture(job, memoryview(data), hints)
    if job.base64:  # last of all: when the codec kills this process, the job is run again and needs its text
        span[:nbytes] = data
    return found


def _inspect_picture(job: Inspect, data: memoryview, hints: Hints) -> Inspected:
    header = image.inspect(data, hints)
    return Inspected(
        nbytes=len(data),
        content_hash=content_hash(data, job.hints),
        height=header.height,
        width=header.width,
        frames=1,
        stored_height=header.stored_height,
        stored_width=header.stored_width,
        format=header.format,
    )


def _inspect_clip(job: Inspect, data: memoryview, hints: Hints, bench: Bench) -> Inspected:
    clip = video.inspect(data, hints, _deadline(bench))
    return Inspected(
        nbytes=len(data),
        content_hash=clip_hash(data, job.hints, job.sampling),
        height=clip.height,
        width=clip.width,
        frames=clip.frames,
        stored_height=clip.stored_height,
        stored_width=clip.stored_width,
        format=clip.format,
        rate=clip.rate,
    )


def _inspect_sound(job: Inspect, data: memoryview, bench: Bench, decoder: audio.Decode | None) -> Inspected:
    sound = audio.inspect(data, job.max_sound_bytes, _deadline(bench), decoder)
    return Inspected(
        nbytes=len(data),
        content_hash=blake3.blake3(data).hexdigest(),
        height=0,
        width=0,
        frames=sound.samples,
        stored_height=0,
        stored_width=0,
        format=sound.format,
        rate=float(sound.rate),
    )


def _deadline(bench: Bench) -> Callable[[], None]:
    """What decoders call between packets."""

    def check() -> None:
        if not bench.remaining():
            raise TimeoutError

    return check


class _Clock:
    """An iterator's items, and how long the iterator took to make them."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> "_Clock":
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - began


def _copy(job: Copy, bench: Bench) -> Copied:
    began = time.perf_counter()
    source = job.source.span if isinstance(job.source, SpanSink) else job.source
    have = _sink(job.source, source.nbytes, bench)
    for sink in job.sinks:
        _sink(sink, source.nbytes, bench)[:] = have
    return Copied(time.perf_counter() - began)


def content_hash(data: memoryview | bytes, hints: Hints) -> str:
    """64 hex characters of BLAKE3: of the bytes, or with a long-side cap of the tagged bytes (SMG 1.11's recipe).

    Tagged: the tag, the length as 8 little-endian bytes, the bytes, the cap as 4 little-endian bytes.
    """
    if hints.max_long_side is None:
        return blake3.blake3(data).hexdigest()
    tagged = blake3.blake3(b"smg.media.params.v1" + len(data).to_bytes(8, "little"))
    return tagged.update(data).update(hints.max_long_side.to_bytes(4, "little")).hexdigest()


def clip_hash(data: memoryview | bytes, hints: Hints, sampling: Sampling) -> str:
    """As `content_hash`, for a clip: of the bytes when its frames are sampled as by default and in full size.

    Tagged: the tag, the length as 8 bytes, the bytes, frames a second as float32, the cap as 4 bytes (0 for none), one
    byte for sampling by intervals; little endian.
    """
    if hints.max_long_side is None and sampling == Sampling():
        return blake3.blake3(data).hexdigest()
    tagged = blake3.blake3(b"smg.media.params.v1" + len(data).to_bytes(8, "little"))
    tagged.update(data)
    tagged.update(struct.pack("<fIB", sampling.rate, hints.max_long_side or 0, sampling.by_interval))
    return tagged.hexdigest()


def _sink(sink: Sink, nbytes: int, bench: Bench) -> memoryview:
    """The `nbytes` bytes of a sink, writable.  ValueError when it has another length: a mistake of the gateway."""
    if isinstance(sink, SpanSink):
        view = bench.span(sink.span)
    else:
        view = bench.file(sink.name, sink.file_bytes)[sink.offset : sink.offset + sink.nbytes]
    if len(view) != nbytes:
        raise ValueError(f"a sink of {len(view)} bytes for a tensor of {nbytes}")
    return view
