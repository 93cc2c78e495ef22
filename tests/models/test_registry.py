"""Finding families: by type first, then by the longest pattern; claims are unique; nothing is swallowed."""

from pathlib import Path

import pytest

from pipeline import models
from pipeline.models import Families
from pipeline.models.base import Family


def family(name: str, *types: str, patterns: tuple[tuple[str, ...], ...] = ()) -> Family:
    claims = {"name": name, "model_types": frozenset(types), "name_patterns": patterns, "limits": {}}
    found: Family = type(name, (Family,), claims)()
    return found


def name_of(found: Family | None) -> str | None:
    return None if found is None else found.name


@pytest.mark.parametrize(
    ("model", "model_type"),
    [
        ("anything", "qwen3_vl"),
        ("anything", "qwen3_vl_moe"),
        ("anything", "qwen3_5"),
        ("anything", "qwen3_5_moe"),
        ("anything", "qwen4_exp"),
        ("Qwen/Qwen3-VL-8B-Instruct", None),
        ("qwen3.5-397b", "unheard_of"),
        ("Qwen3.6-27B", None),
    ],
)
def test_qwen3_vl_is_found(model: str, model_type: str | None) -> None:
    assert name_of(models.family_of(model, model_type)) == "qwen3_vl"


@pytest.mark.parametrize(("model", "model_type"), [("Qwen3-8B", "qwen3"), ("llama", None), ("", "")])
def test_text_models_have_no_family(model: str, model_type: str | None) -> None:
    assert models.family_of(model, model_type) is None


def test_type_beats_name() -> None:
    families = Families([family("a", "a_type"), family("b", patterns=(("bee",),))])
    assert name_of(families.family_of("bee", "a_type")) == "a"
    assert name_of(families.family_of("BEE", "other")) == "b"


@pytest.mark.parametrize("reverse", [False, True])
def test_longest_pattern_wins_whatever_the_order(reverse: bool) -> None:
    made = [family("short", patterns=(("llava",),)), family("long", patterns=(("llava", "next"), ("llava_next",)))]
    families = Families(reversed(made) if reverse else made)
    assert name_of(families.family_of("llava-next-7b", None)) == "long"
    assert name_of(families.family_of("llava-1.5", None)) == "short"


@pytest.mark.parametrize(
    "second",
    [family("b", "same"), family("b", patterns=(("x", "y"),)), family("a", "other")],
    ids=["type", "pattern", "name"],
)
def test_double_claims_stop_the_start(second: Family) -> None:
    with pytest.raises(ValueError, match="both claim"):
        Families([family("a", "same", patterns=(("x", "y"),)), second])


@pytest.mark.parametrize(
    ("source", "error"),
    [("import a_module_that_is_missing", ModuleNotFoundError), ("x = 1", ValueError)],
    ids=["import error", "no family"],
)
def test_a_broken_module_stops_the_start(
    source: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_family_of_a_test.py").write_text(source)
    (tmp_path / "_shared.py").write_text("import a_module_that_is_missing")
    monkeypatch.setattr(models, "__path__", [str(tmp_path)])
    models.discover.cache_clear()
    try:
        with pytest.raises(error):
            models.discover()
    finally:
        models.discover.cache_clear()


def test_by_name() -> None:
    assert models.by_name("qwen3_vl").name == "qwen3_vl"
    with pytest.raises(KeyError):
        models.by_name("nothing")
