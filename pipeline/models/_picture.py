"""What families share that take pictures and nothing else here: tokens from config or vocabulary, one run of features,
numbers of a checkpoint's JSON read with care.

Not a family itself.  A family names its anchor and feature tokens and may override any method; shapes and pixels are
its own.  The Qwen families have their base in `_qwen_vl.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from engines.base import Modality
from pipeline.models.base import (
    Anchor,
    BundleConfig,
    Family,
    FamilyError,
    Measured,
    MediaError,
    Replacement,
    Vocabulary,
)
from pipeline.transforms import Normalisation

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class PictureFamily(Family):
    """Pictures with one anchor each.  `feature_keys`: where config.json may state the token embeddings land on."""

    limits = {Modality.IMAGE: 10}
    anchor_text: ClassVar[str]
    feature_keys: ClassVar[tuple[str, ...]] = ()

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """The feature token as the vocabulary spells it: right where the template renders the very token that is
        repeated.
        """
        self._pictures_only(modality)
        token_id = self.feature_token(bundle, vocabulary, modality)
        text = vocabulary.token_of(token_id)
        if text is None:
            raise missing_token(self.anchor_text)
        return Anchor(token_id=token_id, text=text)

    def feature_token(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> int:
        """The configured id, else the id of the family's own placeholder."""
        self._pictures_only(modality)
        for key in self.feature_keys:
            configured = bundle.config.get(key)
            if isinstance(configured, int) and not isinstance(configured, bool):
                return configured
        return token(vocabulary, self.anchor_text)

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """The anchor becomes one feature token for each embedding."""
        count = measured.feature_tokens
        return Replacement((self.feature_token(bundle, vocabulary, modality),) * count, features=((0, count),))

    def _pictures_only(self, modality: Modality) -> None:
        """FamilyError: the checkpoint has no token for the modality."""
        if modality is not Modality.IMAGE:
            raise FamilyError(f"{self.name} has no token for {modality.value}")

    def _measures_pictures(self, modality: Modality, height: int, width: int) -> None:
        """MediaError for what is no picture with an area."""
        if modality is not Modality.IMAGE:
            raise MediaError(f"{self.name} takes no {modality.value} here")
        if min(height, width) < 1:
            raise MediaError(f"a picture of {width}x{height} pixels has no area")


def missing_token(text: str) -> FamilyError:
    return FamilyError(f"image placeholder token '{text}' is missing from the tokenizer vocabulary")


def token(vocabulary: Vocabulary, text: str) -> int:
    """The id of a token the family cannot do without."""
    token_id = vocabulary.id_of(text)
    if token_id is None:
        raise missing_token(text)
    return token_id


def first_of(values: Mapping[str, Any], names: tuple[str, ...], default: Any) -> Any:
    """The value of the first name that is present and not null."""
    for name in names:
        if values.get(name) is not None:
            return values[name]
    return default


def section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside a JSON object; empty when it is absent or something else."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def whole(values: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """A positive whole number; two equal sides (a list, `height` and `width`) or `shortest_edge` count as one."""
    value = first_of(values, names, default)
    if isinstance(value, Mapping):
        value = value.get("shortest_edge") or [value.get("height"), value.get("width")]
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FamilyError(f"{names[0]} must be a positive whole number, got {value!r}")
    return value


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A positive number, or None when it is absent or null."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, float | int) or not value > 0:
        raise FamilyError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def channels(
    values: Mapping[str, Any], names: tuple[str, ...], default: tuple[float, ...]
) -> tuple[float, float, float]:
    """Three numbers, or one for all channels."""
    value = first_of(values, names, default)
    if isinstance(value, float | int) and not isinstance(value, bool):
        value = [value] * 3
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(isinstance(item, float | int) and not isinstance(item, bool) for item in value)
    ):
        raise FamilyError(f"{names[0]} must be three numbers, got {value!r}")
    return float(value[0]), float(value[1]), float(value[2])


def mean_and_std(
    values: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """`image_mean` and `image_std` with their synonyms; a std of 0 is refused."""
    found = channels(values, ("image_mean", "norm_mean"), mean), channels(values, ("image_std", "norm_std"), std)
    if not all(found[1]):
        raise FamilyError(f"image_std must not hold 0, got {list(found[1])}")
    return found


def normalisation(values: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    """As transformers' torchvision backend reads preprocessor_config.json."""
    return Normalisation.of(
        *mean_and_std(values, mean, std),
        rescale_factor=number(values, "rescale_factor") or 1 / 255,
        do_rescale=values.get("do_rescale") is not False,
        do_normalize=values.get("do_normalize") is not False,
    )


def resample(values: Mapping[str, Any], default: int, allowed: Mapping[int, str]) -> int:
    """`resample` or its synonym, as Pillow numbers the filters."""
    value = first_of(values, ("resample", "resampling"), default)
    if value not in allowed:
        known = " or ".join(f"{code} ({name})" for code, name in allowed.items())
        raise FamilyError(f"resample must be {known}, got {value!r}")
    return int(value)
