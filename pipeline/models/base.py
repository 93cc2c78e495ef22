"""What a model family is: everything the gateway must know to serve its media stands in one class.

A family is one file in this folder with one subclass of `Family`.  The methods are pure: settings and numbers in,
numbers and arrays out; they run in the frontend (`settings`, `measure`, `replacement`) and in pool processes
(`encode`), on the same code. Sizes are always height, width.  Errors: `MediaError` for what a client sent,
`FamilyError` for what a checkpoint lacks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.base import Form, Layout, Modality


class MediaError(Exception):
    """A media item cannot be used: undecodable, too large, outside the family's rules.  The message is for the
    client.
    """


class FamilyError(Exception):
    """The checkpoint lacks what the family needs (an anchor token, a configuration value).  The message is for the
    client.
    """


class BundleConfig(msgspec.Struct, frozen=True):
    """The JSON files of a model bundle as read; `{}` for one that does not exist.

    `video`: video_preprocessor_config.json, else `video_processor` inside processor_config.json, else `preprocessor`.
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any] = {}
    video: Mapping[str, Any] = {}
    generation: Mapping[str, Any] = {}


class Vocabulary(msgspec.Struct, frozen=True):
    """The two look-ups a family may make in the tokenizer, and plain-text encoding for timestamps."""

    id_of: Callable[[str], int | None]
    token_of: Callable[[int], str | None]
    encode: Callable[[str], Sequence[int]]


class Hints(msgspec.Struct, frozen=True):
    """What a content part asks of one item.  `max_long_side`: pixels; `fps`: frames a second (clips)."""

    max_long_side: int | None = None
    fps: float | None = None


class Anchor(msgspec.Struct, frozen=True):
    """The token the chat template renders, exactly once per item."""

    token_id: int
    text: str


class Source(msgspec.Struct, frozen=True):
    """What decoding will give, known from the file's header: size after orientation and the long-side cap, frames of a
    clip.

    `hints`: what the part asked for.  With `Family.own_long_side` the cap is not in the size yet.  `rate`: frames a
    second of a clip, on average.  Of a sound `frames` are the samples of each channel, and there is no size.
    """

    height: int
    width: int
    frames: int = 1
    hints: Hints = Hints()
    rate: float = 1.0

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.frames / self.rate


class Sampling(msgspec.Struct, frozen=True):
    """Frames a second; `by_interval`: the first frame at or after each point in time, else spread evenly."""

    rate: float = 2.0
    by_interval: bool = False


class SideTensor(msgspec.Struct, frozen=True):
    """A small tensor that travels by value.  `values` are flat, in C order; dtype "int64", "uint32" or "float32".

    `repeats`: how often each value stands, one behind the other; empty: once.
    """

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int | float, ...]
    repeats: tuple[int, ...] = ()


class Measured(msgspec.Struct, frozen=True):
    """The shape of one item's tensors, known before any pixel is decoded.

    `primary_shape`: this item's rows of the primary tensor.  `feature_tokens`: embeddings the encoder will return for
    it. `resized`: height, width handed to the patch layout.  `side`: this item's rows of every side tensor, in wire
    order. `stated_size`: height, width before resizing, for families whose prompt names it (Kimi-K3).  `frames`: how
    many of a clip's are used, all samples of a sound; `seconds`: the times a clip's prompt states, by temporal step.
    """

    primary_shape: tuple[int, ...]
    feature_tokens: int
    resized: tuple[int, int]
    side: Mapping[str, SideTensor]
    stated_size: tuple[int, int] | None = None
    frames: int = 1
    seconds: tuple[float, ...] = ()


class Replacement(msgspec.Struct, frozen=True):
    """What stands in the prompt instead of one anchor.

    `features`: (offset, length) of each run that receives embeddings, relative to the replacement.  `prefix`: tokens
    before the anchor, rendered by the template, that belong to the structural range.
    """

    token_ids: Sequence[int]
    features: tuple[tuple[int, int], ...]
    prefix: int = 0


class VllmItems(msgspec.Struct, frozen=True):
    """What vLLM 0.32's own processor makes of one item, for who makes it in its place (`pipeline.sidecar`).

    `side`: its tensors beside the primary one, a row each.  `times`: items of clips carry the times the prompt states.
    `normalises`: vLLM normalises the pixels later, unless it is told not to (`mm_device_do_normalize`).
    """

    side: tuple[str, ...]
    times: bool = False
    normalises: bool = False


class Family:
    """One model family.  Subclasses set the class attributes and implement the methods that raise here."""

    name: ClassVar[str]  # appears in errors, metrics and /v1/models
    # exact values of config.json's top-level model_type; unique over all families
    model_types: ClassVar[frozenset[str]]
    # a pattern matches when the lower-cased model name holds all its words
    name_patterns: ClassVar[tuple[tuple[str, ...], ...]] = ()
    limits: ClassVar[Mapping[Modality, int]]  # most items of one request
    worker_side: ClassVar[frozenset[Modality]] = frozenset()  # what vLLM may expand itself
    vllm_items: ClassVar[VllmItems | None] = None  # with `worker_side`
    settings_type: ClassVar[type[msgspec.Struct]]  # what `settings` returns: pool processes decode it from JSON
    # True: `measure` applies `hints.max_long_side` itself, and pictures reach `encode` in their full size
    own_long_side: ClassVar[bool] = False

    def modalities(self, bundle: BundleConfig) -> frozenset[Modality]:
        """What this checkpoint takes: `limits` less what its configuration lacks."""
        return frozenset(self.limits)

    def settings(self, bundle: BundleConfig) -> msgspec.Struct:
        """The family's own frozen settings from the bundle: they are sent to pool processes and fingerprint the pixel
        cache.

        Raises FamilyError for a value that cannot be used.
        """
        raise NotImplementedError

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """Raises FamilyError when the vocabulary lacks the token."""
        raise NotImplementedError

    def feature_token(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> int:
        """The id the embeddings land on (from config.json where the family states it there)."""
        raise NotImplementedError

    def sample(self, settings: Any, source: Source) -> Sequence[int]:
        """Which of a clip's frames are used: indices in ascending order, at least one; one may occur repeatedly."""
        raise NotImplementedError

    def sampling(self, settings: Any, hints: Hints) -> Sampling:
        """What the sampling of clips depends on beside the clip; part of their content hash."""
        raise NotImplementedError

    def with_most_frames(self, settings: Any, most: int) -> Any:
        """The settings with at most so many frames of a clip used; a family without clips has nothing to change."""
        return settings

    def measure(self, settings: Any, modality: Modality, source: Source) -> Measured:
        """The tensors one item will have.  Raises MediaError when the family refuses the size."""
        raise NotImplementedError

    def reconcile(self, settings: Any, modality: Modality, items: Sequence[Measured]) -> Sequence[Measured]:
        """All items of one request and modality, in prompt order (one that occurs twice stands twice), after each was
        measured alone.

        Returns them with the shapes that depend on one another settled; equal items stay equal.  Raises MediaError for
        what the request as a whole must not have.
        """
        return items

    def keeps_alpha(self, settings: Any) -> bool:
        """Whether `encode` is given pictures with transparency in mode RGBA; else they are composited over white."""
        return False

    def encode(
        self, settings: Any, modality: Modality, frames: Any, measured: Measured, form: Form, out: NDArray[np.uint8]
    ) -> None:
        """Write one item's primary tensor into `out` (uint8, flat, exactly its bytes; C order, little endian,
        `form.dtype`).

        `frames`: for a picture the PIL image in mode RGB (RGBA: see `keeps_alpha`), oriented, in the size `measure` was
        told.  For a clip an iterator over `measured.frames` such images: what `sample` chose, one in memory at a time.
        For a sound its `pipeline.media.audio.Sound`, at its own rate.  Every byte of `out` is written exactly once;
        nothing of that size is allocated, except for a sound, whose loudest part may be its last.
        """
        raise NotImplementedError

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        raise NotImplementedError

    def layout(self, modality: Modality) -> Layout:
        raise NotImplementedError
