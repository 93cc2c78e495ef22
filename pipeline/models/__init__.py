"""Which families there are: every module of this folder whose name has no leading underscore, each with its `Family`
subclasses.

Adding a family is adding a file.  A module that cannot be imported stops the start, and so do two families that claim
the same `model_type` or name pattern: no order among them decides anything.  `base.py` states what a family is.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from pipeline.models.base import Family

Key = TypeVar("Key")


class Families:
    """A set of families and the two ways to find one.  Raises ValueError when two of them claim the same thing."""

    def __init__(self, families: Iterable[Family]) -> None:
        self.all: Sequence[Family] = tuple(families)
        self._by_name = _unique((family.name, family) for family in self.all)
        self._by_type = _unique((kind, family) for family in self.all for kind in family.model_types)
        by_pattern = _unique((pattern, family) for family in self.all for pattern in family.name_patterns)
        # longest first; among equals the more words, then the alphabet, so that the answer never depends on discovery
        self._by_pattern = sorted(
            by_pattern.items(), key=lambda entry: (-sum(map(len, entry[0])), -len(entry[0]), entry[0])
        )

    def family_of(self, model_name: str, model_type: str | None) -> Family | None:
        """The family that claims config.json's top-level `model_type`, else the one whose longest pattern the name
        holds.

        A pattern matches when the lower-cased name holds all its words.
        """
        if model_type is not None and (family := self._by_type.get(model_type)):
            return family
        lowered = model_name.lower()
        for pattern, family in self._by_pattern:
            if all(word in lowered for word in pattern):
                return family
        return None

    def by_name(self, name: str) -> Family:
        """The family called `name`; KeyError when there is none."""
        return self._by_name[name]


def _unique(claims: Iterable[tuple[Key, Family]]) -> Mapping[Key, Family]:
    found: dict[Key, Family] = {}
    for key, family in claims:
        if key in found:
            raise ValueError(f"families {found[key].name} and {family.name} both claim {key!r}")
        found[key] = family
    return found


@cache
def discover() -> Families:
    """Import every family module, once.  Errors of the modules are not caught."""
    families = []
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_") or module.name == "base":
            continue
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        found = [
            value()
            for value in vars(loaded).values()
            if isinstance(value, type) and issubclass(value, Family) and value.__module__ == loaded.__name__
        ]
        if not found:
            raise ValueError(f"{loaded.__name__} defines no family; shared bases have a leading underscore")
        families.extend(found)
    return Families(families)


def family_of(model_name: str, model_type: str | None) -> Family | None:
    """`Families.family_of` over all families of this folder."""
    return discover().family_of(model_name, model_type)


def by_name(name: str) -> Family:
    """`Families.by_name` over all families of this folder."""
    return discover().by_name(name)


def names() -> list[str]:
    """Of all families, in the alphabet's order."""
    return sorted(family.name for family in discover().all)


def taken_by_reference() -> list[str]:
    """The names of the families of which is known what vLLM makes of references."""
    return sorted(family.name for family in discover().all if family.vllm_items is not None)
