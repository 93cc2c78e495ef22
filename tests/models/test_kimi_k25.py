"""Kimi-K2.5 pictures against transformers' fingerprints; plan, prompt, layout and limits."""

import hashlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Layout, Modality, Range
from pipeline import models
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.direct import decoded
from tests.models.served import Served, picture_cases, through_png, vocabulary

PICTURE = Modality.IMAGE
PAD = 163605


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("kimi_k25")


@pytest.mark.parametrize("case", picture_cases("kimi_k25"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(served: Served, case: Any) -> None:
    expected = case["backends"]["torchvision"]
    measured, out = served.encode(through_png(case))
    tensor = expected["tensors"]["pixel_values"]
    assert measured.side["grid_thws"].values == tuple(expected["tensors"]["grid_thws"]["values"][0])
    assert measured.side["patches_per_image"].values == (tensor["shape"][0],)
    assert measured.feature_tokens == expected["num_tokens"][0]
    assert list(measured.primary_shape) == tensor["shape"]
    assert out.view(np.float32)[:8].tolist() == tensor["first8"]
    assert hashlib.sha256(out).hexdigest() == tensor["sha256"]


def test_raw_and_narrow_forms(served: Served) -> None:
    picture = through_png(picture_cases("kimi_k25")[2])
    measured, wide = served.encode(picture)
    raw = served.encode(picture, Form("uint8", normalised=False))[1]
    assert np.array_equal(np.rint(wide.view(np.float32) * 127.5 + 127.5), raw)
    assert np.array_equal(raw.reshape(measured.primary_shape)[0, 0], np.asarray(picture)[:14, :14, 0])
    half = served.encode(picture, Form("float16"))[1].view(np.float16)
    assert np.array_equal(half, wide.view(np.float32).astype(np.float16))


@pytest.mark.parametrize(
    ("height", "width", "resized"),
    [
        (1080, 1920, (1092, 1932)),  # fits: only the border is added
        (1, 1, (28, 28)),
        (28, 56, (28, 56)),
        (4000, 6000, (1484, 2212)),  # 122,000 patches shrink to at most 16,384
        (20, 20000, (28, 7168)),  # one side of at most 512 patches
    ],
)
def test_plan(served: Served, height: int, width: int, resized: tuple[int, int]) -> None:
    measured = served.measure(height, width)
    assert measured.resized == resized
    assert measured.feature_tokens == resized[0] * resized[1] // 784


def test_prompt_of_two_pictures(served: Served) -> None:
    text, ids, expanded = served.prompt(["What is ", (56, 84), (28, 28), "?"])
    assert text.count("<|media_begin|>image<|media_content|><|media_pad|><|media_end|>") == 2
    assert text.index("What is") < text.index("<|media_begin|>")
    first, second = ids.index(PAD), ids.index(PAD, ids.index(PAD) + 1) + 5
    assert expanded.structural == [Range(first, 6), Range(second, 1)]
    assert expanded.features == [(Range(first, 6),), (Range(second, 1),)]
    assert expanded.ids.count(PAD) == 7 and len(expanded.ids) == len(ids) + 5


def test_layout_limits_and_matching(served: Served) -> None:
    assert served.family.layout(PICTURE) == Layout(
        batched=("grid_thws", "patches_per_image"),
        flat={"pixel_values": "patches_per_image"},
        keep_on_cpu=("grid_thws",),
    )
    assert served.family.limits == {PICTURE: 10} and served.family.worker_side == frozenset()
    assert served.family.feature_token(served.config, served.vocabulary, PICTURE) == PAD
    for name, kind in (("moonshotai/Kimi-K2.5", None), ("x", "kimi_k25"), ("Kimi-K2.5", "kimi_k2")):
        found = models.family_of(name, kind)
        assert found is not None and found.name == "kimi_k25"


def test_the_text_model_of_that_name_takes_no_pictures(served: Served) -> None:
    assert served.family.modalities(BundleConfig({"model_type": "kimi_k2"})) == frozenset()
    assert served.family.modalities(served.config) == {PICTURE}


def test_values_as_transformers_writes_them(served: Served) -> None:
    bundle = BundleConfig({}, {"max_patches": 64, "merge_size": 2, "patch_size": 14, "size": {"max_height": 16}})
    settings = served.family.settings(bundle)
    assert (settings.patch_limit, settings.side_limit) == (64, 16)  # type: ignore[attr-defined]
    measured = served.family.measure(settings, PICTURE, Source(400, 400))
    assert measured.resized == (140, 140)  # 114 pixels before the border, which is not counted


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"patch_size": 15}, "patch_size 15 is odd"),
        ({"patch_size": 0}, "patch_size must be a positive whole number, got 0"),
        ({"in_patch_limit": "many"}, "in_patch_limit must be a positive whole number, got 'many'"),
        ({"merge_kernel_size": [2, 3]}, "merge_kernel_size must be a positive whole number"),
        ({"fixed_output_tokens": 64}, "fixed_output_tokens is not supported"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std must not hold 0"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
    ],
)
def test_settings_that_cannot_be_used(served: Served, values: Any, reason: str) -> None:
    with pytest.raises(FamilyError, match=reason):
        served.family.settings(BundleConfig({}, {"media_proc_cfg": values}))


def test_what_is_refused(served: Served) -> None:
    with pytest.raises(MediaError, match="kimi_k25 takes no video"):
        served.family.measure(served.settings, Modality.VIDEO, Source(64, 64, 4))
    with pytest.raises(MediaError, match="0x7 pixels has no area"):
        served.measure(7, 0)
    with pytest.raises(FamilyError, match=r"token '<\|media_pad\|>' is missing"):
        served.family.anchor(BundleConfig({}), vocabulary(), PICTURE)
    with pytest.raises(FamilyError, match=r"token '<\|media_pad\|>' is missing"):
        served.family.anchor(BundleConfig({"media_placeholder_token_id": 7}), vocabulary(), PICTURE)
    with pytest.raises(FamilyError, match="no token for audio"):
        served.family.anchor(served.config, served.vocabulary, Modality.AUDIO)


def test_transparency_shows_white(served: Served) -> None:
    assert not served.family.keeps_alpha(served.settings)
    clear = Image.new("RGBA", (28, 28), (9, 9, 9, 0))
    assert (served.encode(decoded(clear))[1].view(np.float32) == 1).all()
