"""Qwen3-Omni pictures against the reference processor's own fingerprints; where its token ids stand; prompt, layout."""

import functools
from typing import Any

import pytest

from engines.base import Layout, Modality, Range
from pipeline.models import by_name
from pipeline.models.base import BundleConfig, FamilyError, MediaError
from tests.models.served import Served, equals_reference, picture_cases, vocabulary

FAMILY = by_name("qwen3_omni")
PICTURE = Modality.IMAGE
PAD = 151655

served = functools.cache(lambda: Served("qwen3_omni"))


@pytest.mark.parametrize("case", picture_cases("qwen3_omni"), ids=lambda case: case["name"])
def test_pixels_equal_the_reference(case: Any) -> None:
    equals_reference(served(), case)


@pytest.mark.parametrize(
    ("height", "width", "tokens"), [(56, 56, 4), (64, 96, 6), (1080, 1920, 2040), (200, 300, 54), (9000, 6000, 12_467)]
)
def test_token_counts(height: int, width: int, tokens: int) -> None:
    """34 by 60 cells of 32 for 1080p; 3,136 pixels at least, 12,845,056 at most."""
    measured = served().measure(height, width)
    assert measured.feature_tokens == tokens
    assert measured.primary_shape == (4 * tokens, 1536)


def test_prompt_of_two_pictures() -> None:
    text, ids, expanded = served().prompt([(64, 96), "and", (32, 128)])
    markers = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\n{markers}and{markers}<|im_end|>\n<|im_start|>assistant\n"
    first, second = (position for position, token in enumerate(ids) if token == PAD)
    assert expanded.ids == [*ids[:first], *[PAD] * 6, *ids[first + 1 : second], *[PAD] * 4, *ids[second + 1 :]]
    assert expanded.structural == [Range(first, 6), Range(second + 5, 4)]
    assert expanded.features == [(Range(first, 6),), (Range(second + 5, 4),)]


def test_prompt_of_one_picture_as_the_peer_sent_it() -> None:
    """A 300x200 picture: 54 pads from place 4 on, in 68 ids (SMG 1.13.0's own message)."""
    _, ids, expanded = served().prompt([(200, 300), "What is shown?"])
    assert (len(ids), len(expanded.ids)) == (15, 68)
    assert expanded.features == [(Range(4, 54),)]


def test_settings_without_preprocessor_config_are_the_checkpoint_s() -> None:
    stated, found = FAMILY.settings(served().config), FAMILY.settings(BundleConfig({"video_token_id": 1}))
    assert stated == found
    assert (found.patch, found.min_pixels, found.max_pixels) == (16, 3136, 12_845_056)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "config",
    [
        {"thinker_config": {"image_token_id": 7}},
        {"image_token_id": 7},
        {"image_token_id": 8, "thinker_config": {"image_token_id": 7}},
        {"image_token_id": 7, "thinker_config": None},
    ],
    ids=["thinker", "top", "both", "null"],
)
def test_token_ids_of_the_thinker(config: Any) -> None:
    anchor = FAMILY.anchor(BundleConfig(config), vocabulary(**{"<|picture|>": 7, "<|other|>": 8}), PICTURE)
    assert (anchor.token_id, anchor.text) == (7, "<|picture|>")


def test_token_ids_of_the_vocabulary() -> None:
    words = vocabulary(**{"<|image_pad|>": 1, "<|video_pad|>": 2, "<|audio_pad|>": 3})
    assert [FAMILY.feature_token(BundleConfig({}), words, modality) for modality in Modality] == [1, 2, 3]
    with pytest.raises(FamilyError, match=r"audio placeholder token '<\|audio_pad\|>' is missing"):
        FAMILY.anchor(BundleConfig({}), vocabulary(), Modality.AUDIO)


def test_what_it_takes() -> None:
    assert served().family is FAMILY
    assert served().anchors.keys() == {PICTURE, Modality.VIDEO, Modality.AUDIO}
    assert served().guarded() == {}
    assert FAMILY.limits == {PICTURE: 10, Modality.VIDEO: 1, Modality.AUDIO: 10}
    assert FAMILY.worker_side == frozenset()
    with pytest.raises(MediaError, match="side ratio of 201.0"):
        served().measure(603, 3)


def test_layout() -> None:
    assert FAMILY.layout(PICTURE) == Layout(
        batched=("image_grid_thw", "patches_per_image"),
        flat={"pixel_values": "patches_per_image"},
        keep_on_cpu=("image_grid_thw", "video_grid_thw"),
    )
