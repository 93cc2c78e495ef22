"""docs/models.md names every family, and what it says of one is what the class says."""

import re
from pathlib import Path

import pytest

from engines.base import Modality
from pipeline import models
from pipeline.models.base import Family

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
FAMILIES = models.discover().all


def rows(family: Family) -> list[list[str]]:
    """Cells of the rows that begin with the family's name."""
    found = [line for line in PAGE.splitlines() if line.startswith(f"| `{family.name}` |")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_a_row_in_both_tables(family: Family) -> None:
    found = rows(family)
    assert len(found) == 2, f"docs/models.md: {family.name} needs a row in each of the two tables"
    first, second = found
    _, _, types, patterns, limit, worker_side = first
    assert set(re.findall(r"`([^`]+)`", types)) == family.model_types
    stated = {tuple(re.findall(r"`([^`]+)`", pattern)) for pattern in patterns.split(",")}
    assert stated == set(family.name_patterns)
    assert int(re.split(r"\D", limit)[0]) == family.limits[Modality.IMAGE]
    assert worker_side == ("yes" if Modality.IMAGE in family.worker_side else "no")
    assert len(second) == 6 and all(second)


def test_no_family_is_named_that_is_not_there() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) - {"encode"}
    methods = {name for name in vars(Family) if not name.startswith("_")}
    assert named - methods == {family.name for family in FAMILIES}
