"""The work a pool process does for one picture, clip or sound: typed jobs in, typed results out.

Two jobs make one picture.  `Inspect` turns what the client sent into plain bytes (base64 decoded in place), hashes them and reads
the header: from its `Inspected` the frontend knows the tensor's size and reserves the outputs of the whole request together.
`Encode` decodes, resizes and lays out patches straight into the sink.  Decoded frames never leave the process.
"""

import msgspec

from engines.base import Form, Modality
from pipeline.models.base import Hints, Measured
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
    """

    item: int
    modality: Modality
    source: Span
    base64: bool
    hints: Hints
    max_input_bytes: int


class Inspected(msgspec.Struct, frozen=True, tag="inspected"):
    """`nbytes`: length of the plain bytes.  `height`, `width`: after orientation and the long-side cap; `frames`: of a clip."""

    nbytes: int
    content_hash: str
    height: int
    width: int
    frames: int
    stored_height: int
    stored_width: int
    format: str


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Make one item's primary tensor.  `model`: key of a configured model; `sinks`: the first is written, the rest copied from it."""

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


class ModelSettings(msgspec.Struct, frozen=True):
    """Payload of a *configure* message: which family serves the model, and its settings as JSON of the family's own struct."""

    family: str
    settings: msgspec.Raw


Job = Inspect | Encode
Result = Inspected | Encoded
