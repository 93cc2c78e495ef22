"""The contract between the gateway and an engine: what a request carries, what comes back, what may go wrong.

The consumer defines the contract: `pipeline` fills these types, every file `engines/<engine>.py` turns them into its
engine's message.  Nothing here knows gRPC, protobuf, HTTP or how pixels are made, and nothing here waits; so the pure
part of the pipeline (`pipeline/models`, run in pool processes) may import it too.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from engines.leg import Handoff, Leg, Role


class Modality(enum.Enum):
    """What a media item is; the value is the word used in messages, metrics and flags."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class Form(msgspec.Struct, frozen=True):
    """In which shape an engine worker wants media.

    `dtype` is the wire name of the encoder's primary tensor ("float32", "bfloat16", "float16", "uint8"); `others`
    names it for modalities where it is another one.  `normalised` False means the worker rescales and normalises
    itself (label `mm_device_do_normalize=true`): it gets the resized pixels' own bytes, dtype "uint8".  `tensors`
    False: it takes no tensors at all; `encoded`: it takes the media as they came.
    """

    dtype: str = "float32"
    normalised: bool = True
    others: tuple[tuple[Modality, str], ...] = ()
    tensors: bool = True
    encoded: bool = False

    def of(self, modality: Modality) -> "Form":
        """The form of one modality's tensors."""
        return Form(dict(self.others).get(modality, self.dtype), self.normalised, tensors=self.tensors)

    def serves(self, wanted: "Form", modality: Modality) -> bool:
        """Whether media of that modality made in this form have everything a worker of form `wanted` takes."""
        if wanted.encoded and not self.encoded:
            return False
        return not wanted.tensors or self.of(modality) == wanted.of(modality)


ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8, "uint32": 4}


class Range(msgspec.Struct, frozen=True):
    """A run of tokens, relative to the expanded prompt."""

    offset: int
    length: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor as it goes on the wire: C order, little endian.

    `buffers` joined are the payload; they may be views of the shared mapping or of a segment, valid as long as the
    request's lease is held.  The sum of their lengths is product(shape) * ITEM_BYTES[dtype].
    """

    dtype: str
    shape: tuple[int, ...]
    buffers: tuple[memoryview | bytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)


class Layout(msgspec.Struct, frozen=True):
    """How an engine splits a family's tensors of one modality by item.

    Keys are tensor names; the primary tensor is always called "pixel_values" here, also for clips.  `batched`: one row
    per item. `flat`: first axis is split by the sizes in the named tensor.  `keep_on_cpu`: not moved to the GPU.  What
    is in neither `batched` nor `flat` is shared by all items.  `encoder_input_key` is the model's own name of the
    primary tensor when that is not "pixel_values" (DeepSeek-V4.1: "patches"); `batched` and `flat` then use that name.
    """

    batched: tuple[str, ...] = ()
    flat: Mapping[str, str] = {}
    keep_on_cpu: tuple[str, ...] = ()
    encoder_input_key: str | None = None


class MediaItem(msgspec.Struct, frozen=True):
    """One preprocessed picture, clip or sound, ready for the encoder.

    `content_hash`: 64 hex characters of BLAKE3 over the encoded bytes (with hints: over the tagged bytes, spec of 9.2).
    `structural`: the whole replacement in the prompt, markers included; `features`: the runs that receive embeddings.
    `primary`: this item's rows of the primary tensor (empty when the form is without tensors); `side`: its rows of
    every side tensor, in the family's order.  `encoded`: the media as they came, when the form asks for them; valid as
    long as the tensors are.  `segment`, when set, may be handed on and holds the primary tensor alone.
    """

    content_hash: str
    structural: Range
    features: tuple[Range, ...]
    primary: Tensor
    side: Mapping[str, Tensor]
    encoded: memoryview | bytes = b""
    segment: "SharedSegment | None" = None


class SharedSegment(Protocol):
    """A file in /dev/shm that already holds a tensor (`pool.segment.Segment` is one).

    `is_handed_on`: it is as long as the tensor, and is used again only when nobody has it open any more, so that a
    reader may hand its name on.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def is_handed_on(self) -> bool: ...

    def publish(self) -> str:
        """Give the bytes a fresh name for one reader and return it (bare file name); OSError when that is
        impossible.
        """
        ...

    @property
    def is_unread(self) -> bool:
        """Whether a published name is still there: its reader has not consumed it."""
        ...

    def share(self) -> "SharedSegment":
        """A further use of the same bytes, published, withdrawn and settled on its own."""
        ...

    def withdraw(self) -> None:
        """Remove every published name that a reader has not consumed; the bytes stay."""
        ...

    def settle(self, *, consumed: bool, reader: str | None = None) -> None:
        """Give the segment back, once, by its owner; published names that are left go.

        `consumed`: the first response of `reader` (the worker's URL) has arrived, so nobody reads any more.
        """
        ...


class SegmentStore(Protocol):
    """Where segments come from when a tensor lies in the mapping and the chosen worker reads shared memory."""

    def write(self, buffers: Sequence[memoryview | bytes], *, handed_on: bool = False) -> SharedSegment | None:
        """Copy `buffers` into a segment; None when there is no room (counted by the store).

        `handed_on`: its reader hands the name on, so that it is used again only when nobody has it open any more.
        """
        ...


class MediaBatch(msgspec.Struct, frozen=True):
    """All items of one modality, in prompt order.

    `token_id`: the token embeddings land on.  `segment`, when set, holds the primary tensors of all items back to back
    (each item's `primary.buffers` is then a view of it): it can be handed to a worker that shares /dev/shm without a
    copy.
    """

    modality: Modality
    items: tuple[MediaItem, ...]
    token_id: int
    layout: Layout
    form: Form = Form()
    segment: SharedSegment | None = None


class MediaReference(msgspec.Struct, frozen=True):
    """A media item that the engine worker fetches and processes itself.

    `url`: buffers which joined are the URL, UTF-8; like a tensor's they may be views of the shared mapping.  `scheme`:
    of that URL, lower-case, without colon; empty when it has none.
    """

    modality: Modality
    url: tuple[memoryview | bytes, ...]
    scheme: str

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self.url)


class Constraint(msgspec.Struct, frozen=True):
    """What the engine's decoding is held to; one kind, so there is never a second.

    `kind`: "json_schema" (`text` is the schema as JSON), "regex" or "grammar" (EBNF).
    """

    kind: Literal["json_schema", "regex", "grammar"]
    text: str


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters after the worker's defaults were applied; None means the client and the worker said
    nothing.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = {}
    constraint: Constraint | None = None


class EngineRequest(msgspec.Struct, frozen=True):
    """One generation, independent of the engine that will serve it.

    `input_ids`: the prompt with every placeholder expanded; with `references` one anchor for each of them, in their
    order.  Media come as tensors (`media`) or by reference, never both ways.  `original_text`: the rendered prompt
    before expansion.  `stop_ids`: the stop strings that are one token each, as ids, for engines that match no text.
    `request_id` is the id the client sees; dispatch appends a fresh part for every attempt.  Buffers of tensors and of
    references must stay valid and unchanged until dispatch says that nothing reads them any more
    (`engines.generation`).
    `leg` is set by dispatch, when a pair of workers serves the request and this is the half for one of them.
    """

    request_id: str
    model: str
    input_ids: Sequence[int]
    original_text: str
    sampling: Sampling
    stream: bool
    media: tuple[MediaBatch, ...] = ()
    references: tuple[MediaReference, ...] = ()
    stop_ids: tuple[int, ...] = ()
    leg: Leg | None = None

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Of its media, each once, whichever way they travel."""
        named = [batch.modality for batch in self.media] + [reference.modality for reference in self.references]
        return tuple(dict.fromkeys(named))

    @property
    def media_bytes(self) -> int:
        """Bytes of every tensor, side tensors included, and of encoded media: what the in-flight media budget
        counts.
        """
        return sum(
            item.primary.nbytes + sum(tensor.nbytes for tensor in item.side.values()) + len(item.encoded)
            for batch in self.media
            for item in batch.items
        )


class TopLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """The log-probability of one produced token and of its most likely rivals, most likely first."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class Chunk(msgspec.Struct, frozen=True):
    """New tokens of choice `index`; counts are as far as the engine tells them (prompt_tokens per prompt, not per
    choice).
    """

    index: int
    token_ids: Sequence[int]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Finished(msgspec.Struct, frozen=True):
    """The end of choice `index`.

    `token_ids` and `logprobs` are those no Chunk has carried (all of them for a request that does not stream).
    `completion_tokens` is the choice's total, the end token included.  `finish_reason` is the engine's word ("stop",
    "length", "abort", ...).  `matched_stop` is the end token's id or the stop string, when the engine says.
    `handoff`: of a prefill leg.
    """

    index: int
    finish_reason: str
    token_ids: Sequence[int] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    matched_stop: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    handoff: Handoff | None = None


Event = Chunk | Finished


class EngineError(Exception):
    """An engine refused, failed or went away.

    `status` is the gRPC status name ("UNAVAILABLE", ...); a lost connection is UNAVAILABLE.  `started` tells whether
    the engine had already answered something: nothing is retried after that.  `worker` is the worker's URL.  `role` is
    "prefill" or "decode" when that leg of a pair failed.  `is_undelivered`: the engine has not seen the request.
    """

    def __init__(self, status: str, message: str, *, started: bool = False, worker: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.started = started
        self.worker = worker
        self.role: Role | None = None
        self.is_undelivered = False


class ModalityRefused(EngineError):
    """The engine takes no such modality: never sent, never retried."""

    def __init__(self, runtime: str, modality: Modality) -> None:
        super().__init__("INVALID_ARGUMENT", f"backend {runtime} does not support {modality.value} inputs")
        self.runtime = runtime
        self.modality = modality


class ParameterRefused(EngineError):
    """The engine's message cannot say this sampling parameter: never sent, never retried."""

    def __init__(self, runtime: str, parameter: str) -> None:
        super().__init__("INVALID_ARGUMENT", f"backend {runtime} does not support the parameter {parameter}")
        self.runtime = runtime
        self.parameter = parameter


class MessageTooLarge(EngineError):
    """The engine's server would not read a message of that size: never sent, never retried."""

    def __init__(self, runtime: str, nbytes: int, limit: int) -> None:
        super().__init__(
            "INVALID_ARGUMENT", f"the request is a message of {nbytes} bytes; backend {runtime} takes at most {limit}"
        )


class SchemeRefused(EngineError):
    """The worker fetches no URL of this scheme: never sent, never retried.  `item`: the reference's index."""

    def __init__(self, item: int, scheme: str, accepted: Iterable[str]) -> None:
        super().__init__(
            "INVALID_ARGUMENT",
            f"the selected worker does not fetch '{scheme}' URLs (accepts: {','.join(sorted(accepted))}); "
            "file:// needs --allowed-local-media-path on the worker",
        )
        self.item = item


class PairRefused(EngineError):
    """No pair of workers can serve the request as it is: `code` says why, in the words of the error table.  Never
    retried.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__("FAILED_PRECONDITION", message)
        self.code = code


class NoWorker(EngineError):
    """No healthy worker of the model can be asked at the moment."""

    def __init__(self, model: str) -> None:
        super().__init__("UNAVAILABLE", f"No available workers for model '{model}'")


class Observer(Protocol):
    """Where engines report figures; `pipeline.metrics` implements it, tests pass a recorder."""

    def tensor_sent(self, runtime: str, path: str, nbytes: int) -> None:
        """One tensor left by `path` ("inline", "shm", "remote"), side tensors included."""

    def segment_failed(self, runtime: str) -> None:
        """A segment could not be written or published; the tensor went inline."""

    def worker_health(self, worker: str, healthy: bool) -> None: ...

    def worker_removed(self, worker: str) -> None: ...

    def worker_load(self, worker: str, requests: int) -> None: ...

    def worker_selected(self, worker: str, policy: str, worker_type: str) -> None: ...

    def breaker_changed(self, worker: str, before: str, after: str) -> None:
        """Words of `engines.breaker.BreakerState`."""

    def breaker_outcome(self, worker: str, failed: bool) -> None:
        """One that counts for the worker's circuit breaker."""

    def retried(self, worker_type: str) -> None: ...

    def handover_failed(self, worker: str) -> None:
        """A prefill worker was asked for a hand-over and named none."""

    def prefilled(self, model: str, runtime: str, seconds: float) -> None:
        """A prefill leg that goes first is done."""

    def handed_over(self, model: str, runtime: str, connector: str, seconds: float) -> None:
        """Its decode leg has begun to answer; `seconds` from the prefill leg's end to the decode leg's message sent."""

    def pair_answered(self, model: str, runtime: str, seconds: float) -> None:
        """Legs that go together have given their first output."""
