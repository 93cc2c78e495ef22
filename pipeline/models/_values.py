"""Numbers of a checkpoint's JSON files, read with care: what cannot be used is a FamilyError that names it.

A key that is absent or null has the family's default.  Synonyms and shapes are those found in published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.models.base import FamilyError
from pipeline.transforms import Normalisation

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


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
