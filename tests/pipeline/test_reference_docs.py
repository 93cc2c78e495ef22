"""The generated pages are what the code says, and the table of error codes is what the code raises."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import DECLARED
from pipeline.errors import STATUS_OF_CODE
from pipeline.metric_table import DECLARATIONS
from tools import reference_docs

PIPELINE = Path(__file__).parents[2] / "pipeline"
ENGINES = PIPELINE.parent / "engines"  # a refused pair brings its code along


@pytest.mark.parametrize("name", sorted(reference_docs.PAGES))
def test_pages_are_up_to_date(name: str) -> None:
    text = (reference_docs.ROOT / name).read_text()
    assert text == reference_docs.PAGES[name](), "run python tools/reference_docs.py"


def test_pages_name_everything() -> None:
    page = reference_docs.configuration()
    for one in DECLARED:
        for name in (*one.setting.flags, one.setting.variable, one.setting.legacy):
            assert not name or f"`{name}`" in page
        assert one.text in page.replace("\\|", "|")
    metrics = reference_docs.metrics()
    assert all(f"| `{one.name}` |" in metrics for one in DECLARATIONS)


def test_every_code_is_explained_once() -> None:
    assert set(reference_docs.MEANINGS) == set(STATUS_OF_CODE)
    page = reference_docs.errors()
    assert all(page.count(f"| `{code}` |") == 1 for code in STATUS_OF_CODE)


def _trees() -> Iterator[ast.AST]:
    for path in (*PIPELINE.rglob("*.py"), *ENGINES.rglob("*.py")):
        yield ast.parse(path.read_text())


def _raised() -> set[str]:
    """Codes that stand as literals in a GatewayError(...) or a PairRefused(...)."""
    return {
        node.args[0].value
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("GatewayError", "PairRefused")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def test_raised_codes_stand_in_the_table() -> None:
    raised = _raised()
    assert len(raised) > 10
    assert raised <= set(STATUS_OF_CODE)


# In the table, not raised yet.
AWAITED: set[str] = set()


def test_no_code_is_in_the_table_for_nothing() -> None:
    """Codes may be put together (`integer_` + `above_max_value`), so their pieces must stand in the code."""
    words = {
        word
        for path in (*PIPELINE.rglob("*.py"), *ENGINES.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in [node.value]
        if path.name != "errors.py" or word in _errors_own_words()
    }
    unused = {
        code
        for code in STATUS_OF_CODE
        if code not in words and not {*code.split("_", 1)} <= {*words, "integer", "decimal"}
    }
    assert unused <= AWAITED


def _errors_own_words() -> set[str]:
    """What pipeline/errors.py raises itself, its tables left out."""
    tree = ast.parse((PIPELINE / "errors.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {
        node.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
