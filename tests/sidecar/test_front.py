"""Which models a sidecar takes, and what it makes of the worker's engine for them."""

import pytest

from engines.base import Form, Modality
from pipeline import models
from pipeline.config import ConfigError
from pipeline.models.base import Source
from pipeline.sidecar.front import served
from pipeline.sidecar.settings import SidecarConfig, parse
from tests.pipeline.bundles import NAMES, bundle

RAW = Form("uint8", normalised=False)


def config(*flags: str, **variables: str) -> SidecarConfig:
    found = parse(["--model", "some/model", *flags], variables).config
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_taken_when_vllm_takes_references_of_it(name: str) -> None:
    found = bundle(name)
    family = models.family_of(name, str(found.config.config.get("model_type")))
    assert family is not None
    flags = config("--dtype", "bfloat16")
    if family.vllm_items is None:
        with pytest.raises(ConfigError, match="cannot be served by this sidecar"):
            served(flags, found)
        return
    model, form = served(flags, found)
    assert set(model.anchors) <= family.worker_side
    assert form == (RAW if family.vllm_items.normalises else Form("bfloat16"))


def test_families_of_references_say_what_vllm_makes_of_them() -> None:
    for family in models.discover().all:
        assert bool(family.worker_side) == (family.vllm_items is not None)


def test_the_worker_s_word_on_normalising_wins() -> None:
    found = bundle("qwen3_vl")
    assert served(config("--dtype", "float16", "--no-mm-device-do-normalize"), found)[1] == Form("float16")
    assert served(config("--dtype", "bfloat16", "--mm-device-do-normalize"), bundle("llama4"))[1] == RAW


def test_anchors_of_what_is_not_served_are_guarded() -> None:
    """GLM takes clips from a router, and no references of them."""
    model, _ = served(config("--dtype", "bfloat16"), bundle("glm53_flash"))
    assert set(model.anchors) == {Modality.IMAGE}
    assert Modality.VIDEO in model.guards


@pytest.mark.parametrize(("most", "frames"), [("0", 40), ("6", 6), ("2", 2), ("1000", 40)])
def test_frames_are_capped_and_never_raised(most: str, frames: int) -> None:
    model, _ = served(config("--dtype", "bfloat16", SMG_VLLM_MM_MAX_VIDEO_FRAMES=most), bundle("qwen3_vl"))
    assert model.family is not None
    clip = Source(64, 96, frames=200, rate=10.0)
    assert model.family.measure(model.settings, Modality.VIDEO, clip).frames == frames
