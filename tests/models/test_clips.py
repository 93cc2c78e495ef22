"""Clips of the families that take them, against the reference processors: which frames, which sizes, every byte of the
tensor; then the prompt, the layout and what a clip may not be.
"""

import functools
import hashlib
import json
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engines.base import ITEM_BYTES, Form, Layout, Modality
from pipeline.models import _sampling as sampling
from pipeline.models.base import BundleConfig, FamilyError, Hints, MediaError, Sampling, Source
from tests.models.served import FLOAT32, REFERENCE, Served
from tests.models.synthetic import draw

VIDEO = Modality.VIDEO
FAMILIES = ("qwen3_vl", "qwen3_omni", "minimax_m3", "glm53_flash")
VECTORS = json.loads((REFERENCE / "clips.json").read_text())
PLANS = json.loads((REFERENCE / "clip_plans.json").read_text())

served = functools.cache(Served)


def every_frame(name: str, frames: int) -> Served:
    """The family with all of the reference's frames chosen: the vectors were made of given frames."""
    found = served(name)
    found.family.sample = lambda settings, source: range(frames)  # type: ignore[method-assign]
    return found


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    for name in FAMILIES:
        vars(served(name).family).pop("sample", None)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in FAMILIES for case in VECTORS[name]], ids=lambda value: str(value)[:20]
)
def test_tensors_equal_the_reference(name: str, case: Any) -> None:
    given, wanted = case["input"], case["torchvision"]
    frames = [
        draw(given["width"], given["height"], "RGB", given["seed"] * 1000 + number) for number in range(given["frames"])
    ]
    assert hashlib.sha256(np.stack(frames).tobytes()).hexdigest() == given["pixels_sha256"]
    one = every_frame(name, given["frames"])
    source = Source(given["height"], given["width"], given["frames"], rate=2.0)
    measured = one.family.measure(one.settings, VIDEO, source)
    out = np.full(math.prod(measured.primary_shape) * 4, 0xA5, np.uint8)
    one.family.encode(one.settings, VIDEO, iter(frames), measured, FLOAT32, out)
    assert list(measured.side["video_grid_thw"].values) == wanted["grid"]
    assert (measured.feature_tokens, list(measured.primary_shape)) == (wanted["num_tokens"], wanted["shape"])
    assert out.view(np.float32)[:8].tolist() == wanted["first8"]
    assert hashlib.sha256(out).hexdigest() == wanted["sha256"]


@pytest.mark.parametrize("name", ["qwen3_vl", "glm53_flash"])
def test_frames_and_times_are_the_reference_s(name: str) -> None:
    """A clip so short that the reference of GLM takes no frame at all is left out: there is at least one here."""
    one = served(name)
    compared = 0
    for plan in PLANS["sampling"]:
        source = Source(64, 64, plan["frames"], Hints(fps=plan["fps"]), plan["rate"])
        indices = list(one.family.sample(one.settings, source))
        if not plan[name]:
            assert indices == [0, 0]
            continue
        assert indices == plan[name], plan
        seconds = one.family.measure(one.settings, VIDEO, source).seconds
        assert [f"{time:.1f}" for time in seconds] == plan[f"{name}_seconds"], plan
        compared += 1
    assert compared >= 30


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_the_reference_s(name: str) -> None:
    for plan in PLANS["sizes"]:
        source = Source(plan["height"], plan["width"], plan["frames"], rate=2.0)
        measure = functools.partial(every_frame(name, plan["frames"]).family.measure, served(name).settings, VIDEO)
        if plan[name] is None:
            with pytest.raises(MediaError, match="side ratio"):
                measure(source)
        else:
            assert list(measure(source).resized) == plan[name], plan


CASES = json.loads((REFERENCE.parent / "clips" / "cases.json").read_text())


@pytest.mark.parametrize("case", [case for case in CASES if "reference" in case], ids=lambda case: str(case["case"]))
def test_field_cases_of_qwen3_vl(case: Any) -> None:
    """Frames, times, grid and tokens of clips that users had trouble with, as the reference has them."""
    one, wanted = served("qwen3_vl"), case["reference"]
    width, height = case["size"]
    source = Source(height, width, case["total_frames"], rate=case["fps"])
    measured = one.family.measure(one.settings, VIDEO, source)
    assert list(one.family.sample(one.settings, source)) == wanted["indices"]
    assert [f"{time:.1f}" for time in measured.seconds] == wanted["timestamps"]
    assert list(measured.side["video_grid_thw"].values) == wanted["grid_thw"]
    assert measured.feature_tokens == wanted["tokens"]


def test_even_placement_of_the_page() -> None:
    assert sampling.spread_down(40, 8) == (0, 5, 11, 16, 22, 27, 33, 39)
    assert sampling.spread_down(3, 4) == (0, 0, 1, 2)
    assert sampling.spread_down(1, 4) == (0, 0, 0, 0)
    one = served("qwen3_omni")
    assert one.family.sample(one.settings, Source(1, 1, 150, rate=15.0)) == sampling.spread_down(150, 20)
    assert one.family.sample(one.settings, Source(1, 1, 9, rate=4.0)) == (0, 2, 4, 6, 8)  # 4.5 frames are 5


def test_one_frame_for_each_interval() -> None:
    one = served("minimax_m3")
    assert one.family.sample(one.settings, Source(1, 1, 30, rate=10.0)) == (0, 10, 20, 29)
    assert one.family.sample(one.settings, Source(1, 1, 20, rate=10.0)) == sampling.spread_down(20, 4)
    assert one.family.sample(one.settings, Source(1, 1, 30, Hints(fps=5.0), 10.0)) == (*range(0, 30, 2), 29)
    assert len(one.family.sample(one.settings, Source(1, 1, 100_000, rate=25.0))) == 768


@given(st.integers(1, 3000), st.floats(0.5, 120), st.floats(0.2, 5))
def test_intervals_are_what_looking_at_every_frame_gives(total: int, rate: float, wanted: float) -> None:
    chosen = [0]
    for index in range(1, total):
        if index / rate >= chosen[-1] / rate + 1 / wanted - 0.0001:
            chosen.append(index)
    assert sampling.by_interval(total, rate, 1 / wanted) == tuple(dict.fromkeys([*chosen, total - 1]))


@given(st.sampled_from(FAMILIES), st.integers(1, 5000), st.floats(0.1, 240), st.none() | st.floats(0.2, 5))
def test_whatever_is_sampled_exists(name: str, total: int, rate: float, fps: float | None) -> None:
    one = served(name)
    indices = list(one.family.sample(one.settings, Source(1, 1, total, Hints(fps=fps), rate)))
    assert 1 <= len(indices) <= 2048
    assert indices == sorted(indices) and indices[0] >= 0 and indices[-1] < total


def prompt(name: str, frames: int, rate: float) -> tuple[str, list[tuple[int, int]], int]:
    """The replacement as text, its feature runs, and the feature token."""
    one = served(name)
    measured = one.family.measure(one.settings, VIDEO, Source(64, 96, frames, rate=rate))
    found = one.family.replacement(one.config, one.vocabulary, VIDEO, measured)
    token = one.family.feature_token(one.config, one.vocabulary, VIDEO)
    text = one.bundle.tokenizer.decode(found.token_ids, skip_special_tokens=False)
    assert sum(length for _, length in found.features) == measured.feature_tokens
    for offset, length in found.features:
        assert list(found.token_ids[offset : offset + length]) == [token] * length
    assert list(found.token_ids).count(token) == measured.feature_tokens
    return text, list(found.features), token


def test_prompt_of_qwen3_vl() -> None:
    text, features, token = prompt("qwen3_vl", 20, 10.0)
    step = "<{} seconds><|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>"
    assert text == step.format("0.3") + step.format("1.6")
    assert token == 151656 and features == [(7, 6), (21, 6)]


def test_prompt_of_minimax_m3() -> None:
    text, features, token = prompt("minimax_m3", 30, 10.0)
    step = "]<]{} seconds[>[]<]start of image[>[" + "]<]video[>[" * 6 + "]<]end of image[>["
    assert text == step.format("0.0") + step.format("2.0")
    assert token == 200026 and [length for _, length in features] == [6, 6]


def test_prompt_of_glm() -> None:
    text, features, token = prompt("glm53_flash", 20, 10.0)
    step = "<|begin_of_image|>" + "<|image|>" * 12 + "<|end_of_image|>{} seconds"
    assert text == step.format("0.0") + step.format("1.0")
    assert token == 154854 and [length for _, length in features] == [12, 12]


def test_prompt_of_qwen3_omni() -> None:
    text, features, token = prompt("qwen3_omni", 20, 10.0)
    assert text == "<|video_pad|>" * len(text.split("><"))
    assert token == 151656 and len(features) == 1 and features[0][0] == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_side_tensors_and_layout(name: str) -> None:
    one = served(name)
    measured = one.family.measure(one.settings, VIDEO, Source(64, 96, 20, rate=10.0))
    count = "patches_per_video"
    assert set(measured.side) == {"video_grid_thw", count, "video_second_per_grid"}
    assert measured.side[count].values == (measured.primary_shape[0],)
    assert measured.side["video_second_per_grid"].values == (2 * 2.0 / measured.frames,)
    assert one.family.layout(VIDEO) == Layout(
        batched=("video_grid_thw", "video_second_per_grid", count),
        flat={"pixel_values": count},
        keep_on_cpu=("image_grid_thw", "video_grid_thw"),
    )


def test_how_a_clip_is_sampled_is_part_of_its_hash() -> None:
    assert served("qwen3_vl").family.sampling(served("qwen3_vl").settings, Hints()) == Sampling()
    assert served("qwen3_vl").family.sampling(served("qwen3_vl").settings, Hints(fps=1.0)) == Sampling(1.0)
    assert served("minimax_m3").family.sampling(served("minimax_m3").settings, Hints()) == Sampling(1.0, True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("form", [Form("bfloat16"), Form("uint8", normalised=False)], ids=lambda form: form.dtype)
def test_a_clip_holds_no_more_frames_than_a_step(name: str, form: Form) -> None:
    """Every other frame is gone when the next is asked for, however long the clip; an odd end is filled up."""
    one = every_frame(name, 9)
    measured = one.family.measure(one.settings, VIDEO, Source(60, 90, 9, rate=2.0))
    alive: list[weakref.ref[Image.Image]] = []

    def frames() -> Iterator[Image.Image]:
        for number in range(9):
            assert sum(ref() is not None for ref in alive) <= 3
            frame = draw(90, 60, "RGB", number)
            alive.append(weakref.ref(frame))
            yield frame

    out = np.full(math.prod(measured.primary_shape) * ITEM_BYTES[form.dtype], 0xA5, np.uint8)
    one.family.encode(one.settings, VIDEO, frames(), measured, form, out)
    twice = one.family.measure(every_frame(name, 10).settings, VIDEO, Source(60, 90, 10, rate=2.0))
    if twice.resized == measured.resized:
        doubled = [draw(90, 60, "RGB", min(number, 8)) for number in range(10)]
        again = np.empty_like(out)
        one.family.encode(one.settings, VIDEO, iter(doubled), measured, form, again)
        assert np.array_equal(out, again)


def test_a_clip_of_one_frame_is_one_step() -> None:
    """The reference of Qwen3-VL refuses it; the page's rule does not."""
    for name, frames in (("qwen3_vl", 1), ("qwen3_omni", 4), ("minimax_m3", 4), ("glm53_flash", 2)):
        one = served(name)
        measured = one.family.measure(one.settings, VIDEO, Source(64, 96, 1, rate=25.0))
        assert measured.frames == frames
        assert measured.side["video_grid_thw"].values[0] == -(-frames // 2)


def test_minimax_long_side_mode_bounds_the_volume() -> None:
    one = served("minimax_m3")
    source = Source(64, 40, 30, Hints(max_long_side=280), 10.0)
    assert one.family.measure(one.settings, VIDEO, source).resized == (168, 112)
    source = Source(2000, 2000, 768, Hints(max_long_side=1008), 1.0)
    with pytest.raises(
        MediaError, match="768 frames of 2000x2000 pixels become 780337152 pixels .* limit of 301056000"
    ):
        one.family.measure(one.settings, VIDEO, source)


def test_bounds_of_an_image_processor_are_not_those_of_clips() -> None:
    assert served("qwen3_omni").settings.clip.max_pixels == 786_432
    values = {"max_pixels": 400_000, "video_processor_type": "Qwen2VLVideoProcessor"}
    config = BundleConfig({"video_token_id": 1}, {}, values)
    assert served("qwen3_omni").family.settings(config).clip.max_pixels == 400_000  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"patch_size": 15}, "patch_size 15 is odd"),
        ({"min_pixels": 10_000_000, "max_pixels": 5}, "of clips is above max_pixels 5"),
        ({"fps": 0}, "fps must be a positive number"),
        ({"max_frames": "many"}, "max_frames must be a positive whole number"),
    ],
)
def test_settings_that_cannot_be_used(values: Any, reason: str) -> None:
    config = BundleConfig({"video_token_id": 1}, {}, values)
    with pytest.raises(FamilyError, match=reason):
        served("qwen3_vl").family.settings(config)


@pytest.mark.parametrize("name", ["qwen3_vl", "minimax_m3", "glm53_flash"])
def test_missing_markers_are_named(name: str) -> None:
    one = served(name)
    measured = one.family.measure(one.settings, VIDEO, Source(64, 96, 20, rate=10.0))
    bare = BundleConfig({key: value for key, value in one.config.config.items() if "vision" not in key})
    nothing = type(one.vocabulary)(lambda text: None, lambda token: None, lambda text: [])
    with pytest.raises(FamilyError, match="placeholder token '.*' is missing"):
        one.family.replacement(bare, nothing, VIDEO, measured)
