"""Sounds of Inkling: levels equal to the reference's, prompt, what a checkpoint decides, and what is refused."""

import functools
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.base import Form, Layout, Modality, Range
from pipeline import models
from pipeline.media.audio import Sound
from pipeline.models._dmel import DmelSettings, raised
from pipeline.models.base import FamilyError, MediaError, SideTensor, Source
from tests.models.served import Served
from tests.models.sounds import CASES, drawn, encode, features, measure, prompt

FAMILY = models.by_name("inkling")
served = functools.cache(lambda: Served("inkling"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_levels_equal_the_reference_s(case: Any) -> None:
    sound, expected = drawn(case), features()[f"dmel_{case['name']}"]
    measured = measure(served(), sound)
    assert measured.primary_shape == expected.shape
    assert measured.feature_tokens == case["dmel"]["tokens"] == expected.shape[0]
    assert measured.side["tokens_per_item"] == SideTensor("int64", (1,), (expected.shape[0],))
    found = encode(served(), sound).view(np.float32).reshape(expected.shape)
    assert np.array_equal(found, expected)
    brain = encode(served(), sound, Form("bfloat16")).view(np.uint16).astype(np.uint32) << 16
    assert np.array_equal(brain.view(np.float32).reshape(expected.shape), expected)


def test_prompt_of_two_sounds() -> None:
    """The marker before the anchor belongs to the sound; the one behind it stays the template's."""
    short, second = (drawn(case) for case in CASES[:2])
    text, ids, expanded = prompt(served(), ["One ", short, " two ", second])
    assert text.count("<|content_audio_input|><|unused_200053|><|audio_end|>") == 2
    first, last = (place for place, token in enumerate(ids) if token == 200053)
    assert ids[first - 1] == ids[last - 1] == 200020
    assert expanded.structural == [Range(first - 1, 6), Range(last + 3, 22)]
    assert expanded.features == [(Range(first, 5),), (Range(last + 4, 21),)]


def test_sounds_need_an_audio_decoder() -> None:
    config = {**served().config.config, "audio_config": {"decoder_dmodel": None}}
    deaf = msgspec.structs.replace(served().config, config=config)
    assert FAMILY.modalities(deaf) == {Modality.IMAGE}
    assert FAMILY.settings(deaf).sound is None  # type: ignore[attr-defined]
    assert FAMILY.anchor(deaf, served().vocabulary, Modality.AUDIO).token_id == 200053


def test_sounds_of_one_request_are_left_as_they_are() -> None:
    items = [measure(served(), drawn(case)) for case in CASES[:2]]
    assert list(FAMILY.reconcile(served().settings, Modality.AUDIO, items)) == items
    assert FAMILY.layout(Modality.AUDIO) == Layout(
        batched=("tokens_per_item",), flat={"input_features": "tokens_per_item"}, encoder_input_key="input_features"
    )


def test_a_quiet_sound_is_raised_and_silence_is_not() -> None:
    tone = (0.001 * np.sin(np.arange(1600))).astype(np.float32)
    assert np.sqrt(np.mean(np.square(raised(tone, 0.01), dtype=np.float64))) == pytest.approx(0.01)
    assert raised(tone, 0.0) is tone
    loud, silence = tone * 100, np.zeros(1600, np.float32)
    assert raised(loud, 0.01) is loud
    assert raised(silence, 0.01) is silence
    assert np.isfinite(encode(served(), Sound(silence, 16_000)).view(np.float32)).all()


@pytest.mark.parametrize(
    ("values", "encoder", "words"),
    [
        ({"audio_token_duration_s": 0.00001}, {}, "audio_token_duration_s must make a whole number of samples"),
        ({"n_fft": 2048}, {}, "n_fft must be the window of 1600 samples"),
        ({"window_size_multiplier": 0.5}, {}, "no shorter than the hop of 800"),
        ({}, {"dmel_min_value": 3}, "dmel_min_value 3 is not below dmel_max_value 2"),
        ({}, {"mel_vocab_size": 1}, "mel_vocab_size must be from 2 to 256"),
        ({}, {"dmel_max_value": "2"}, "dmel_max_value must be a number"),
    ],
)
def test_sound_settings_that_cannot_be_used(values: Any, encoder: Any, words: str) -> None:
    with pytest.raises(FamilyError, match=words):
        DmelSettings.of(values, encoder)


def test_a_sound_without_samples_is_refused() -> None:
    with pytest.raises(MediaError, match="a sound without samples"):
        FAMILY.measure(served().settings, Modality.AUDIO, Source(0, 0, frames=0, rate=16_000.0))
