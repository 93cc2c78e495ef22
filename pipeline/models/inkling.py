"""Inkling: pictures in patches of 40 pixels, at their own size, and sounds.

Always one column of patches more than the width fills, outside pixels have the raw value -1, every patch fills both
temporal slots, and channels come last.  Pictures only when the checkpoint has a vision decoder
(`vision_config.decoder_dmodel`), sounds (`_dmel.py`) only with an audio decoder.  Reference: transformers 5.24
`InklingImageProcessor`; its optional rescaling is stock Pillow's Lanczos, up to 2 levels from ours.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import Form, Layout, Modality
from pipeline.crops import narrowed
from pipeline.models._dmel import DmelSettings
from pipeline.models._picture import PictureFamily
from pipeline.models._values import CLIP_MEAN, normalisation, number, section, whole
from pipeline.models.base import (
    Anchor,
    BundleConfig,
    FamilyError,
    Measured,
    MediaError,
    Replacement,
    SideTensor,
    Source,
    Vocabulary,
)
from pipeline.transforms import Normalisation, resize

_STD = (0.26862954, 0.2613026, 0.2757771)
_LANCZOS = int(Image.Resampling.LANCZOS)


_DECODERS = {Modality.IMAGE: "vision_config", Modality.AUDIO: "audio_config"}
_SOUND_ANCHOR = "<|unused_200053|>"


class InklingSettings(msgspec.Struct, frozen=True):
    """`rescale`: factor of both sides, None for none; `rescale_limit`: a long side that is not enlarged beyond.

    `sound`: None for a checkpoint without sounds.
    """

    patch: int
    temporal: int
    patch_limit: int
    rescale: float | None
    rescale_limit: int | None
    normalisation: Normalisation
    sound: DmelSettings | None


class Inkling(PictureFamily):
    name = "inkling"
    model_types = frozenset({"inkling_mm_model"})
    name_patterns = (("inkling",),)
    limits = {Modality.IMAGE: 10, Modality.AUDIO: 10}

    anchor_text = "<|unused_200054|>"
    feature_keys = ("image_token_id",)
    settings_type = InklingSettings

    def modalities(self, bundle: BundleConfig) -> frozenset[Modality]:
        """Those for which the checkpoint has a decoder."""
        return frozenset(
            modality
            for modality, name in _DECODERS.items()
            if section(bundle.config, name).get("decoder_dmodel") is not None
        )

    def settings(self, bundle: BundleConfig) -> InklingSettings:
        values, vision = bundle.preprocessor, section(bundle.config, "vision_config")
        limited = values.get("rescale_image_max_upscaled_long_edge", 2048)
        found = InklingSettings(
            patch=whole(values, ("patch_size", "size"), whole(vision, ("patch_size",), 40)),
            temporal=whole(values, ("temporal_patch_size",), whole(vision, ("temporal_patch_size",), 2)),
            patch_limit=whole(values, ("in_patch_limit",), 32_768),
            rescale=number(values, "rescale_image_frac"),
            rescale_limit=None if limited is None else whole(values, ("rescale_image_max_upscaled_long_edge",), 2048),
            normalisation=normalisation(values, CLIP_MEAN, _STD),
            sound=DmelSettings.of(values, section(bundle.config, "audio_config"))
            if Modality.AUDIO in self.modalities(bundle)
            else None,
        )
        if values.get("do_resize") is False:
            raise FamilyError(f"do_resize false is not supported: {self.name} cuts patches in any case")
        return found

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        if modality is not Modality.AUDIO:
            return super().anchor(bundle, vocabulary, modality)
        token_id = self.feature_token(bundle, vocabulary, modality)
        text = vocabulary.token_of(token_id)
        if text is None:
            raise _missing_sound_token()
        return Anchor(token_id=token_id, text=text)

    def feature_token(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> int:
        if modality is not Modality.AUDIO:
            return super().feature_token(bundle, vocabulary, modality)
        configured = bundle.config.get("audio_token_id")
        if isinstance(configured, int) and not isinstance(configured, bool):
            return configured
        token_id = vocabulary.id_of(_SOUND_ANCHOR)
        if token_id is None:
            raise _missing_sound_token()
        return token_id

    def measure(self, settings: InklingSettings, modality: Modality, source: Source) -> Measured:
        if modality is Modality.AUDIO and settings.sound is not None:
            return settings.sound.measure(source)
        self._measures_pictures(modality, source.height, source.width)
        height, width = _rescaled(settings, source.height, source.width)
        rows, columns = -(-height // settings.patch), width // settings.patch + 1
        patches = rows * columns
        return Measured(
            primary_shape=(patches, settings.temporal, settings.patch, settings.patch, 3),
            feature_tokens=patches,
            resized=(height, width),
            side={"tokens_per_item": SideTensor("int64", (1,), (patches,))},
        )

    def reconcile(self, settings: InklingSettings, modality: Modality, items: Sequence[Measured]) -> Sequence[Measured]:
        """The patches of a request are bounded together; sounds have rows of their own each."""
        if modality is Modality.AUDIO:
            return items
        patches = sum(item.feature_tokens for item in items)
        if patches > settings.patch_limit:
            raise MediaError(f"the pictures make {patches} patches, above the limit of {settings.patch_limit}")
        return items

    def encode(
        self,
        settings: InklingSettings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        """A worker that normalises gets a picture's bytes, with 0 outside: there is no byte for -1."""
        if modality is Modality.AUDIO and settings.sound is not None:
            settings.sound.encode(frames, form, out)
            return
        picture = np.asarray(resize(frames, *measured.resized, _LANCZOS))
        height, width = measured.resized
        patch, temporal = settings.patch, settings.temporal
        columns = width // patch + 1
        row = _Row(settings, form, columns)
        target = out.view(np.dtype((np.void, row.run_bytes))).reshape(-1, columns, temporal, patch)
        for patches, top in zip(target, range(0, height, patch), strict=True):
            patches[...] = row.fill(picture[top : top + patch]).transpose(1, 0)[:, None]

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """The template's `<|content_image|>` or `<|content_audio_input|>` before the anchor belongs to the item."""
        found = super().replacement(bundle, vocabulary, modality, measured)
        return msgspec.structs.replace(found, prefix=1)

    def layout(self, modality: Modality) -> Layout:
        if modality is Modality.AUDIO:
            return Layout(
                batched=("tokens_per_item",),
                flat={"input_features": "tokens_per_item"},
                encoder_input_key="input_features",
            )
        self._pictures_only(modality)
        return Layout(batched=("tokens_per_item",), flat={"pixel_values": "tokens_per_item"})


class _Row:
    """One row of patches, computed in a scratch that stays in L2: [patch, columns * patch, 3], then cut into runs, the
    lines of a patch.
    """

    def __init__(self, settings: InklingSettings, form: Form, columns: int) -> None:
        self._patch, self._columns = settings.patch, columns
        self._dtype = form.dtype if form.normalised else "uint8"
        line = columns * settings.patch * 3
        self._values = np.empty((settings.patch, line), np.float32 if form.normalised else np.uint8)
        self._steps = []
        self._outside: NDArray[Any] = np.zeros(line, np.uint8)
        if form.normalised:
            # operands as long as a line: numpy's loops then run over whole lines
            for ufunc, operand in settings.normalisation.steps():
                spread = np.broadcast_to(operand.reshape(-1), (3,)) if operand.ndim else np.repeat(operand, 3)
                self._steps.append((ufunc, np.tile(spread, columns * settings.patch)))
            self._outside = np.full(line, -1, np.float32)
            for ufunc, spread in self._steps:
                ufunc(self._outside, spread, out=self._outside)

    @property
    def run_bytes(self) -> int:
        return self._patch * 3 * {"float32": 4, "uint8": 1}.get(self._dtype, 2)

    def fill(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """`pixels`: uint8 [up to patch, width, 3].  The row's runs, [patch, columns], valid until the next call."""
        height, width = len(pixels), pixels.shape[1] * 3
        inside = self._values[:height, :width]
        inside[...] = pixels.reshape(height, width)
        for ufunc, operand in self._steps:
            ufunc(inside, operand[:width], out=inside)
        self._values[:height, width:] = self._outside[width:]
        self._values[height:] = self._outside
        values = self._values if self._dtype == "uint8" else narrowed(self._values, self._dtype)
        return (
            np.ascontiguousarray(values).view(np.dtype((np.void, self.run_bytes))).reshape(self._patch, self._columns)
        )


def _rescaled(settings: InklingSettings, height: int, width: int) -> tuple[int, int]:
    """Both sides by the factor, rounded half up; the long side is not enlarged beyond the limit."""
    if settings.rescale is None:
        return height, width
    long = max(height, width)
    wanted = long * settings.rescale
    if settings.rescale_limit is not None:
        wanted = min(wanted, max(settings.rescale_limit, long))
    ratio = wanted / long
    return max(1, math.floor(height * ratio + 0.5)), max(1, math.floor(width * ratio + 0.5))


def _missing_sound_token() -> FamilyError:
    return FamilyError(f"audio placeholder token '{_SOUND_ANCHOR}' is missing from the tokenizer vocabulary")
