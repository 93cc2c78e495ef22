"""LLaVA 1.5: one picture, one square.

The short side becomes 336 pixels, the middle square is kept, the rest is lost.  A checkpoint that says so
(`do_pad` of its preprocessor, `image_aspect_ratio` "pad" of the original releases) pads to a square of the mean colour
first.  Reference: transformers 5.24 `CLIPImageProcessor` and `LlavaImageProcessor`; the long side is cut off to whole
pixels where SMG rounds.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.base import Form, Layout, Modality
from pipeline.crops import Colour, centre_crop, place
from pipeline.models._picture import PictureFamily
from pipeline.models._values import CLIP_MEAN, CLIP_STD, mean_and_std, normalisation, resample, section, whole
from pipeline.models.base import BundleConfig, FamilyError, Measured, MediaError, Source
from pipeline.transforms import BICUBIC, BILINEAR, MAX_SIDE_RATIO, Normalisation, patchify, resize

# Other types called LLaVA have other processors: refused rather than served with wrong pixels.
_KNOWN_TYPES = frozenset({"llava", "llava_llama", "llava_mistral"})


class LlavaSettings(msgspec.Struct, frozen=True):
    """`short`: what the short side is resized to; `crop`: side of the square; `pad`: colour to pad with, None for no
    padding.
    """

    short: int
    crop: int
    tokens: int
    resample: int
    normalisation: Normalisation
    pad: Colour | None = None


class Llava(PictureFamily):
    name = "llava"
    model_types = frozenset({"llava"})
    name_patterns = (("llava",),)
    limits = {Modality.IMAGE: 4}

    anchor_text = "<image>"
    feature_keys = ("image_token_index", "image_token_id")
    settings_type = LlavaSettings

    def settings(self, bundle: BundleConfig) -> LlavaSettings:
        stated = bundle.config.get("model_type")
        if isinstance(stated, str) and stated and stated not in _KNOWN_TYPES:
            raise FamilyError(f"model_type {stated} is not a LLaVA 1.5 model")
        values = bundle.preprocessor
        short = whole(values, ("size",), 336)
        crop = whole(values, ("crop_size",), short)
        if crop > short or crop % 2:
            raise FamilyError(f"a square of {crop} pixels cannot be cut from pictures with a short side of {short}")
        if values.get("do_resize") is False or values.get("do_center_crop") is False:
            raise FamilyError(f"{self.name} needs do_resize and do_center_crop")
        return LlavaSettings(
            short=short,
            crop=crop,
            tokens=tower_tokens(bundle.config, crop),
            resample=resample(values, BICUBIC, {BICUBIC: "bicubic", BILINEAR: "bilinear"}),
            normalisation=normalisation(values, CLIP_MEAN, CLIP_STD),
            pad=_padding(bundle),
        )

    def measure(self, settings: LlavaSettings, modality: Modality, source: Source) -> Measured:
        """MediaError above a side ratio of 200: the long side would be enlarged without bound only to be cut off."""
        self._measures_pictures(modality, source.height, source.width)
        ratio = max(source.height, source.width) / min(source.height, source.width)
        if ratio > MAX_SIDE_RATIO and settings.pad is None:
            raise MediaError(
                f"a picture of {source.width}x{source.height} pixels has a side ratio of {ratio:.1f}, "
                f"above the limit of {MAX_SIDE_RATIO}"
            )
        return Measured(
            primary_shape=(1, 3, settings.crop, settings.crop),
            feature_tokens=settings.tokens,
            resized=(settings.crop, settings.crop),
            side={},
        )

    def encode(
        self,
        settings: LlavaSettings,
        modality: Modality,
        frames: Any,
        measured: Measured,
        form: Form,
        out: NDArray[np.uint8],
    ) -> None:
        picture = frames if settings.pad is None else _squared(frames, settings.pad)
        short, long = sorted(picture.size)
        long = int(settings.short * long / short)
        size = (settings.short, long) if picture.height <= picture.width else (long, settings.short)
        patchify(
            [centre_crop(resize(picture, *size, settings.resample), settings.crop, settings.crop)],
            out,
            patch=settings.crop,
            merge=1,
            temporal=1,
            normalisation=settings.normalisation if form.normalised else None,
            dtype=form.dtype,
        )

    def layout(self, modality: Modality) -> Layout:
        self._pictures_only(modality)
        return Layout(batched=("pixel_values",))


def tower_tokens(config: Mapping[str, Any], side: int) -> int:
    """Embeddings of one square: its patches, and the class token where the checkpoint keeps it ("full")."""
    patch = whole(section(config, "vision_config"), ("patch_size",), 14)
    return (side // patch) ** 2 + (config.get("vision_feature_select_strategy") == "full")


def _padding(bundle: BundleConfig) -> Colour | None:
    """transformers' `do_pad` of LLaVA's own processor, or the original releases' `image_aspect_ratio`."""
    asked = bundle.preprocessor.get("do_pad") is True or bundle.config.get("image_aspect_ratio") == "pad"
    if not asked:
        return None
    red, green, blue = mean_and_std(bundle.preprocessor, CLIP_MEAN, CLIP_STD)[0]
    return int(red * 255), int(green * 255), int(blue * 255)


def _squared(picture: Image.Image, colour: Colour) -> Image.Image:
    """The picture in the middle of the square of its long side; an odd gap is larger below or on the right."""
    side = max(picture.size)
    return place(picture, side, side, top=(side - picture.height) // 2, left=(side - picture.width) // 2, colour=colour)
