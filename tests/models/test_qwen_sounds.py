"""Sounds of Qwen3-Omni and Qwen3-ASR: features against the reference's, tokens, prompts, batches, refusals."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import Form, Layout, Modality, Range
from pipeline.encode import side_tensor
from pipeline.media.audio import Sound
from pipeline.models import family_of
from pipeline.models._audio import sound_tokens
from pipeline.models.base import BundleConfig, FamilyError, MediaError, Source
from tests.models.served import Served, vocabulary
from tests.models.sounds import CASES, SOUND, apart, drawn, encode, features, measure, prompt

served = functools.cache(Served)
FAMILIES = pytest.mark.parametrize("name", ["qwen3_omni", "qwen3_asr"])
SHORT, SECOND = (drawn(case) for case in CASES[:2])


def of_length(samples: int, rate: int = 16_000) -> Sound:
    return Sound(np.random.default_rng(samples).uniform(-0.5, 0.5, samples).astype(np.float32), rate)


@FAMILIES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_features_are_the_reference_s(name: str, case: Any) -> None:
    """Within 5e-5: sums of a Fourier transform in another order, seen through a logarithm."""
    sound, expected = drawn(case), features()[f"whisper_{case['name']}"]
    measured = measure(served(name), sound)
    assert measured.primary_shape == (1, *expected.shape) == (1, 128, case["whisper"]["frames"])
    assert measured.feature_tokens == case["whisper"]["tokens"]
    assert apart(case["name"], encode(served(name), sound).view(np.float32).reshape(expected.shape), expected) <= 5e-5


def test_features_in_other_types_are_rounded() -> None:
    exact = encode(served("qwen3_asr"), SECOND).view(np.float32)
    half = encode(served("qwen3_asr"), SECOND, Form("float16")).view(np.float16)
    assert np.array_equal(half, exact.astype(np.float16))
    brain = encode(served("qwen3_asr"), SECOND, Form("bfloat16")).view(np.uint16).astype(np.uint32) << 16
    assert np.abs(brain.view(np.float32) - exact).max() <= 2**-8


@FAMILIES
def test_side_tensors_tell_the_frames(name: str) -> None:
    side = {key: side_tensor(value) for key, value in measure(served(name), SECOND).side.items()}
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in side.items()} == {
        "audio_feature_lengths": ("int64", (1,)),
        "feature_attention_mask": ("int64", (1, 100)),
    }
    assert np.frombuffer(side["audio_feature_lengths"].buffers[0], np.int64).tolist() == [100]
    assert np.frombuffer(side["feature_attention_mask"].buffers[0], np.int64).tolist() == [1] * 100


def test_sounds_of_one_request_are_filled_up_to_the_longest() -> None:
    omni = served("qwen3_omni")
    alone = [measure(omni, SHORT), measure(omni, SECOND), measure(omni, SHORT)]
    together = omni.family.reconcile(omni.settings, SOUND, alone)
    assert [item.primary_shape for item in together] == [(1, 128, 100)] * 3
    assert [item.feature_tokens for item in together] == [4, 13, 4]
    assert together[0] == together[2] and together[1] == alone[1]
    mask = np.frombuffer(side_tensor(together[0].side["feature_attention_mask"]).buffers[0], np.int64)
    assert mask.tolist() == [1] * 25 + [0] * 75
    assert together[0].side["audio_feature_lengths"].values == (25,)
    for form in (Form(), Form("bfloat16")):
        filled = encode(omni, SHORT, form, together[0]).reshape(128, 100, -1)
        assert np.array_equal(filled[:, :25], encode(omni, SHORT, form).reshape(128, 25, -1))
        assert not filled[:, 25:].any()


@pytest.mark.parametrize(("frames", "tokens"), [(1, 1), (8, 1), (9, 2), (99, 13), (100, 13), (101, 14), (200, 26)])
def test_tokens_of_frames(frames: int, tokens: int) -> None:
    assert sound_tokens(frames, 50) == tokens


@given(st.integers(1, 100_000))
def test_tokens_are_those_of_transformers(frames: int) -> None:
    """`_get_feat_extract_output_lengths` of modeling_qwen3_omni_moe, for windows of 100 frames."""
    rest = frames % 100
    halved = (rest - 1) // 2 + 1
    expected = ((halved - 1) // 2 + 1 - 1) // 2 + 1 + frames // 100 * 13 if rest else frames // 100 * 13
    assert sound_tokens(frames, 50) == expected


@pytest.mark.parametrize(("rate", "samples"), [(8000, 8000), (44_100, 44_100), (48_000, 48_000), (11_025, 11_025)])
def test_another_rate_is_the_same_second(rate: int, samples: int) -> None:
    found = measure(served("qwen3_asr"), of_length(samples, rate))
    assert (found.primary_shape, found.feature_tokens) == ((1, 128, 100), 13)
    assert len(encode(served("qwen3_asr"), of_length(samples, rate))) == 128 * 100 * 4


@FAMILIES
@pytest.mark.parametrize("samples", [160, 161, 200, 319])
def test_a_single_frame_is_enough(name: str, samples: int) -> None:
    assert measure(served(name), of_length(samples)).primary_shape == (1, 128, 1)
    assert np.isfinite(encode(served(name), of_length(samples)).view(np.float32)).all()


@FAMILIES
@pytest.mark.parametrize("samples", [1, 159])
def test_less_than_a_frame_is_refused(name: str, samples: int) -> None:
    with pytest.raises(MediaError, match=f"a sound of {samples} samples at 16000 Hz is shorter than one frame of 160"):
        measure(served(name), of_length(samples))


@pytest.mark.parametrize(
    ("stated", "frames"),
    [({"truncation": True, "n_samples": 8000}, 50), ({"max_samples": 4800}, 30), ({"n_samples": 8000}, 100)],
)
def test_long_sounds_are_cut_only_where_the_checkpoint_says_so(stated: dict[str, Any], frames: int) -> None:
    cut = Served("qwen3_asr", stated)
    assert measure(cut, SECOND).primary_shape == (1, 128, frames)
    assert len(encode(cut, SECOND)) == 128 * frames * 4


def test_prompt_as_the_peer_sent_it() -> None:
    """SMG 1.13.0's own ids for one second: 13 pads from place 4 on, in 27 ids."""
    text, ids, expanded = prompt(served("qwen3_omni"), [SECOND, "What is shown?"])
    assert text == (
        "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>What is shown?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert expanded.ids == [*ids[:4], *[151675] * 13, *ids[5:]]
    assert (len(expanded.ids), ids[3], ids[5]) == (27, 151669, 151670)
    assert expanded.structural == [Range(4, 13)]
    assert expanded.features == [(Range(4, 13),)]


def test_prompt_of_two_sounds_for_asr() -> None:
    _, ids, expanded = prompt(served("qwen3_asr"), [SHORT, "and", SECOND])
    first, second = (place for place, token in enumerate(ids) if token == 151676)
    assert expanded.features == [(Range(first, 4),), (Range(second + 3, 13),)]
    assert len(expanded.ids) == len(ids) + 3 + 12


@FAMILIES
def test_what_it_takes(name: str) -> None:
    family = served(name).family
    assert family.limits[SOUND] == 10
    assert SOUND in family.modalities(served(name).config)
    assert family.layout(SOUND) == Layout(
        batched=("input_features", "audio_feature_lengths", "feature_attention_mask"),
        encoder_input_key="input_features",
    )
    assert SOUND not in family.worker_side


def test_asr_takes_sounds_alone() -> None:
    asr = served("qwen3_asr")
    assert asr.anchors.keys() == {SOUND}
    assert asr.guarded() == {}
    assert family_of("Qwen/Qwen3-ASR-1.7B", None) is asr.family
    with pytest.raises(FamilyError, match="qwen3_asr has no token for image"):
        asr.family.anchor(asr.config, asr.vocabulary, Modality.IMAGE)


def test_a_vocabulary_without_the_token_is_told() -> None:
    family = served("qwen3_asr").family
    words = vocabulary(**{"<|audio_pad|>": 7})
    assert family.anchor(BundleConfig({}), words, SOUND).token_id == 7
    assert family.anchor(BundleConfig({"thinker_config": {"audio_token_id": 7}}), words, SOUND).text == "<|audio_pad|>"
    for config in ({}, {"audio_token_id": 8}):
        with pytest.raises(FamilyError, match=r"audio placeholder token '<\|audio_pad\|>' is missing"):
            family.anchor(BundleConfig(config), vocabulary(), SOUND)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"hop_length": 0}, "hop_length must be a positive whole number"),
        ({"hop_length": 500}, "hop_length 500 is above n_fft 400"),
        ({"dither": 0.1}, "dither is not supported"),
        ({"sampling_rate": "16k"}, "sampling_rate must be"),
        ({"max_samples": -1}, "max_samples must be"),
    ],
)
def test_settings_that_cannot_be_used(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(FamilyError, match=words):
        Served("qwen3_asr", stated)


def test_a_checkpoint_that_says_nothing_has_the_defaults() -> None:
    family = served("qwen3_asr").family
    assert family.settings(BundleConfig({})) == served("qwen3_asr").settings


def test_pictures_of_omni_are_measured_as_ever() -> None:
    omni = served("qwen3_omni")
    source = Source(64, 96)
    assert omni.family.measure(omni.settings, Modality.IMAGE, source).feature_tokens == 6
