"""docs/compatibility.md names every difference that a test allows, and nothing that does not exist."""

import re
from pathlib import Path

from pipeline.errors import STATUS_OF_CODE
from tests.e2e import (
    test_api_cases,
    test_field_cases,
    test_golden,
    test_golden_apis,
    test_golden_references,
    test_golden_routes,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
KINDS = ("golden", "api", "field")


def rows() -> list[list[str]]:
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" | ")]
        if line.startswith("| ") and set(line) - set("|- ") and cells[-1] != "held by":
            found.append(cells)
    return found


def proofs(kind: str) -> set[str]:
    return set(re.findall(rf"`{kind}:([^`]+)`", PAGE))


def test_what_holds_a_row_exists() -> None:
    names = {
        "golden": {case["case"] for setup in test_golden.SETUPS.values() for case in setup["cases"]}
        | set(test_golden_apis.BY_NAME)
        | set(test_golden_routes.BY_NAME)
        | {case["case"] for setup in test_golden_references.SETUPS.values() for case in setup["cases"]},
        "api": {case["name"] for case in test_api_cases.CASES},
        "field": set(test_field_cases.BY_NAME),
    }
    for kind in KINDS:
        assert proofs(kind) and proofs(kind) <= names[kind], proofs(kind) - names[kind]
    paths = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert paths and all((ROOT / path).is_file() for path in paths), paths


def test_every_row_of_differences_is_held_by_something() -> None:
    families = PAGE.partition("### Model families")[2].partition("\n## ")[0]
    held = [row for row in rows() if re.search(r"`(?:golden|api|field):|`tests/", row[-1])]
    open_rows = [row for row in rows() if row not in held and f"| {' | '.join(row)} |" not in families]
    assert len(held) > 40 and open_rows == []


def test_every_allowed_difference_is_named() -> None:
    golden = test_golden
    allowed = {*golden.REFUSED, *golden.AS_WRITTEN, *golden.SENT, *golden.OTHER_PIXELS, *golden.PLACED}
    allowed |= {*test_golden_apis.REFUSED, *test_golden_apis.AS_WRITTEN, *test_golden_apis.ANNOTATED}
    references, routes = test_golden_references, test_golden_routes
    allowed |= {*references.AS_WRITTEN, *(name for _, name in references.HINTS)}
    allowed |= routes.SPELLED | routes.STRIPPED | routes.COUNTED | routes.REPEATED | routes.UNSAID | routes.CODED
    assert allowed <= proofs("golden"), allowed - proofs("golden")
    differs = {case["name"] for case in test_api_cases.CASES if case.get("differs")}
    assert differs | set(test_api_cases.LATER) <= proofs("api"), differs - proofs("api")
    routes = {case["path"] for case in test_api_cases.CASES} | {case["path"] for case in test_field_cases.CASES}
    assert all(f"`POST {route}`" in PAGE for route in routes - {test_field_cases.CHAT})


def test_codes_are_codes() -> None:
    """Every code of a refusal stands in the table of errors, with the status the page gives."""
    of_peer = {"tokenizer_not_found"}
    found = re.findall(r"(4\d\d|5\d\d) `([a-z_]+)`", PAGE)
    assert len(found) > 10
    for status, code in found:
        if code not in of_peer:
            assert STATUS_OF_CODE[code] == int(status), code


def test_figures_are_counted() -> None:
    golden = sum(len(setup["cases"]) for setup in test_golden.SETUPS.values())
    otherwise = {*test_golden.AS_WRITTEN, *test_golden.SENT, *test_golden.OTHER_PIXELS}
    count = sum(
        case["case"] in {*test_golden.REFUSED, *test_golden.PLACED}
        or (case["case"] in otherwise and case["status"] == 200)
        for setup in test_golden.SETUPS.values()
        for case in setup["cases"]
    )
    assert f"{golden} cases, {count} of them" in PAGE
    assert f"in {len(test_golden.SETUPS)} setups" in PAGE
    references = test_golden_references.SETUPS.values()
    count = sum(len(setup["cases"]) for setup in references)
    assert f"{count} requests recorded from both wheels in {len(references)} setups" in PAGE
    cases = test_api_cases.CASES
    here = [case for case in cases if case["path"] not in test_api_cases.LATER_ROUTES]
    assert f"{len(here)} of {len(cases)} are on this version's routes, {len(test_api_cases.LATER)} of them wait" in PAGE
    apis = test_golden_apis
    otherwise = {*apis.REFUSED, *apis.AS_WRITTEN, *apis.ANNOTATED}
    assert f"{len(apis.CASES)} cases, {len(otherwise)} of them differ" in PAGE
