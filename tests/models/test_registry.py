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


# Every type a family of the requirement claims.
TYPES = {
    "deepseek_v41": "deepseek_v41",
    "glm53_flash": "glm53_flash",
    "glm5_next": "glm53_flash",
    "inkling_mm_model": "inkling",
    "kimi_k3": "kimi_k3",
    "kimi_k25": "kimi_k25",
    "llama4": "llama4",
    "minimax_m3_vl": "minimax_m3",
    "llava_next": "llava_next",
    "llava": "llava",
    "qwen3_asr": "qwen3_asr",
    "qwen3_omni_moe": "qwen3_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen4_exp": "qwen3_vl",
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "phi3_v": "phi3_v",
}
# Names people serve, most of them in reach of two families' patterns.
NAMES = {
    "deepseek-ai/DeepSeek-V4.1": "deepseek_v41",
    "deepseek_v41": "deepseek_v41",
    "zai-org/GLM-5.3-Flash": "glm53_flash",
    "glm5.3-flash-fp8": "glm53_flash",
    "GLM-5-Next": "glm53_flash",
    "glm5-next-vl": "glm53_flash",
    "Inkling-7B": "inkling",
    "moonshotai/Kimi-K3": "kimi_k3",
    "moonshotai/Kimi-K2.5": "kimi_k25",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4",
    "llama4-maverick": "llama4",
    "MiniMaxAI/MiniMax-M3": "minimax_m3",
    "minimax-m3-vl": "minimax_m3",
    "llava-hf/llava-next-72b-hf": "llava_next",
    "llava-hf/llava-1.5-7b-hf": "llava",
    "Qwen/Qwen3-ASR-1.7B": "qwen3_asr",
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": "qwen3_omni",
    "qwen3_omni": "qwen3_omni",
    "qwen3-omni-vl": "qwen3_omni",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3_vl",
    "qwen3-vl-demo": "qwen3_vl",
    "qwen3.5-397b": "qwen3_vl",
    "qwen3.5-vl": "qwen3_vl",
    "Qwen3.6-27B": "qwen3_vl",
    "Qwen/Qwen2-VL-7B-Instruct": "qwen_vl",
    "Qwen/Qwen2.5-VL-72B-Instruct": "qwen_vl",
    "qwen-vl-max": "qwen_vl",
    "microsoft/Phi-3-vision-128k-instruct": "phi3_v",
    "microsoft/Phi-3.5-vision-instruct": "phi3_v",
}
SERVED = {family.name for family in models.discover().all}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_finds_its_family_whatever_the_name(model_type: str) -> None:
    expected = TYPES[model_type] if TYPES[model_type] in SERVED else None
    assert name_of(models.family_of("anything", model_type)) == expected
    if expected is not None:
        for name in NAMES:
            assert name_of(models.family_of(name, model_type)) == expected


@pytest.mark.parametrize("name", [name for name in NAMES if NAMES[name] in SERVED])
@pytest.mark.parametrize("model_type", [None, "", "unheard_of"])
def test_a_name_finds_its_family(name: str, model_type: str | None) -> None:
    assert name_of(models.family_of(name, model_type)) == NAMES[name]


def test_types_and_patterns_are_those_of_the_requirement() -> None:
    for family in models.discover().all:
        if family.name in TYPES.values():
            assert family.model_types >= {kind for kind, name in TYPES.items() if name == family.name}
        for pattern in family.name_patterns:
            assert all(word == word.lower() for word in pattern), f"{family.name}: patterns are lower case"


@pytest.mark.parametrize(
    ("model", "model_type"),
    [
        ("Qwen3-8B", "qwen3"),
        ("Qwen2.5-Omni-7B", None),
        ("GLM-4.6V", None),
        ("MiniMax-M2", None),
        ("llama", None),
        ("", ""),
    ],
)
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
