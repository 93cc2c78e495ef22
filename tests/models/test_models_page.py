"""docs/models.md names every family, and what it says of one is what the class says."""

import re
from pathlib import Path

import pytest

from engines.base import Modality
from pipeline import models
from pipeline.models.base import Family

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
FAMILIES = models.discover().all
COLUMNS = {"pictures": Modality.IMAGE, "sounds": Modality.AUDIO}


def tables() -> list[list[dict[str, str]]]:
    """The page's tables, their rows by the words of the header."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        found.append([dict(zip(cells[0], row, strict=True)) for row in cells[2:]])
    return found


def rows(family: Family) -> list[dict[str, str]]:
    """The rows that begin with the family's name."""
    return [row for table in tables() for row in table if row.get("family") == f"`{family.name}`"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_a_row_in_both_tables(family: Family) -> None:
    found = rows(family)
    assert len(found) == 2, f"docs/models.md: {family.name} needs a row in each of the two tables"
    first, second = found
    assert set(re.findall(r"`([^`]+)`", first["`model_type`"])) == family.model_types
    stated = {tuple(re.findall(r"`([^`]+)`", pattern)) for pattern in first["or the name holds"].split(",")}
    assert stated == set(family.name_patterns)
    for column, modality in COLUMNS.items():
        limit = family.limits.get(modality)
        assert re.split(r"[ ,]", first[column])[0] == ("no" if limit is None else str(limit))
    assert first["vLLM may expand itself"] == ("yes" if Modality.IMAGE in family.worker_side else "no")
    assert len(second) == 6 and all(second.values())


def test_the_table_of_clips_has_every_family_that_takes_them() -> None:
    rows_of_clips = re.findall(r"^\| ([^|`]+) \| (\d+) \|", PAGE, re.MULTILINE)
    taking = [family for family in FAMILIES if Modality.VIDEO in family.limits]
    assert sorted(int(limit) for _, limit in rows_of_clips) == sorted(
        family.limits[Modality.VIDEO] for family in taking
    )
    for family in taking:
        checkpoints = rows(family)[0]["checkpoints"]
        assert any(checkpoints.startswith(named.split(" to ")[0]) for named, _ in rows_of_clips), family.name


def test_no_family_is_named_that_is_not_there() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) - {"encode"}
    methods = {name for name in vars(Family) if not name.startswith("_")}
    assert named - methods == {family.name for family in FAMILIES}
