"""Every family of the Qwen kind from outside: one gateway, an engine stand-in with each bundle, pictures to each.

What the engine got is held against the family called directly: ids, ranges, key lists and the digest of every tensor.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.base import Form, Modality
from pipeline.media import video
from pipeline.media.image import decode
from pipeline.models.base import Hints, Measured, Source
from tests.e2e.running import Running, data_url, image_part, picture, running, text_part, until
from tests.models.served import Served
from tests.pipeline.bundles import unpack_bundle
from tests.pipeline.clips import clip, moving_noise

LIMITS = {"qwen2_vl": 10, "qwen2_5_vl": 10, "qwen3_omni": 10, "minimax_m3": 200, "glm53_flash": 10}
CLIPS = {"qwen3_omni": {"video": 1}, "minimax_m3": {"video": 20}, "glm53_flash": {"video": 1}}
SOUNDS = {"qwen3_omni": {"audio": 10}}
SIZES = [(200, 300), (90, 70)]
CLIP = clip(moving_noise(20, 120, 200))
FILES = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]

served = functools.cache(Served)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("bundles")
    engines = [("--bundle", str(unpack_bundle(name, folder)), "--model-name", name) for name in LIMITS]
    with running(engines=engines) as found:
        until(lambda: all(cards(found).get(name) for name in LIMITS), what="every model is served")
        yield found


def cards(gateway: Running) -> dict[str, Any]:
    return {card["id"]: card.get("multimodal") for card in gateway.call("GET", "/v1/models").json["data"]}


def last_seen(gateway: Running, name: str) -> dict[str, Any]:
    """The last request the model's engine took."""
    return gateway.engines[list(LIMITS).index(name)].seen("generate")[-1]


def tensors(name: str, files: Sequence[bytes], hints: Hints = Hints()) -> tuple[str, list[int], list[int]]:  # noqa: B008
    """Digest of the primary tensors back to back, grids and patch counts, made without a gateway."""
    whole, grids, counts = hashlib.sha256(), [], []
    for file in files:
        measured, out = served(name).encode(decode(memoryview(file), Hints()), hints=hints)
        whole.update(out)
        grids += measured.side["image_grid_thw"].values
        counts += measured.side["patches_per_image"].values
    return whole.hexdigest(), grids, counts


def clip_part(data: bytes, **hints: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **hints}}


def clip_tensor(name: str, data: bytes, hints: Hints = Hints()) -> tuple[Measured, Any]:  # noqa: B008
    """A clip's measure and the bytes of its primary tensor, made without a gateway."""
    one = served(name)
    seen = Hints() if one.family.own_long_side else hints
    found = video.inspect(memoryview(data), seen, lambda: None)
    source = Source(found.height, found.width, found.frames, hints, found.rate)
    measured = one.family.measure(one.settings, Modality.VIDEO, source)
    frames = video.frames(memoryview(data), lambda *_: one.family.sample(one.settings, source), seen, lambda: None)
    out = np.empty(math.prod(measured.primary_shape) * 4, np.uint8)
    one.family.encode(one.settings, Modality.VIDEO, frames, measured, Form(), out)
    return measured, out


def test_models_tell_family_and_limits(gateway: Running) -> None:
    assert cards(gateway) == {
        name: {
            "family": served(name).family.name,
            "limits": {"image": limit} | CLIPS.get(name, {}) | SOUNDS.get(name, {}),
        }
        for name, limit in LIMITS.items()
    }


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LIMITS)
def test_pictures_reach_the_engine(gateway: Running, name: str, count: int) -> None:
    content: list[Any] = []
    prompt: list[str | tuple[int, int]] = []
    for index, file in enumerate(FILES[:count]):
        content += [text_part(f"Picture {index}: "), image_part(file)]
        prompt += [f"Picture {index}: ", SIZES[index]]
    answer = gateway.chat([*content, text_part(" What?")], model=name)
    assert answer.status == 200, answer.body
    _, _, expanded = served(name).prompt([*prompt, " What?"])
    assert answer.json["usage"]["prompt_tokens"] == len(expanded.ids)

    seen = last_seen(gateway, name)
    assert seen["input_ids"] == [[token, len(list(run))] for token, run in itertools.groupby(expanded.ids)]
    (media,) = seen["media"]
    assert media["ranges"] == [[run.offset, run.length] for run in expanded.structural]
    digest, grids, counts = tensors(name, FILES[:count])
    assert media["tensors"]["pixel_values"]["sha256"] == digest
    assert media["tensors"]["image_grid_thw"] | {"sha256": ""} == {
        "dtype": "int64",
        "shape": [count, 3],
        "transport": "inline",
        "sha256": "",
        "values": grids,
    }
    assert media["tensors"]["patches_per_image"]["values"] == counts
    assert set(media["tensors"]) == {"pixel_values", "image_grid_thw", "patches_per_image"}

    batch, layout = seen["message"]["mm_inputs"], served(name).family.layout(Modality.IMAGE)
    assert set(batch["batched_keys"]) == set(layout.batched)
    assert batch["flat_keys"] == layout.flat
    assert set(batch["keep_on_cpu_keys"]) == set(layout.keep_on_cpu)
    assert batch["im_token_id"] == served(name).anchors[Modality.IMAGE].token_id


def test_twelve_pictures_where_two_hundred_are_allowed(gateway: Running) -> None:
    answer = gateway.chat([image_part(FILES[1])] * 12, model="minimax_m3")
    assert answer.status == 200
    assert len(last_seen(gateway, "minimax_m3")["media"][0]["ranges"]) == 12


@pytest.mark.parametrize("cap", [112, 336])
def test_the_long_side_of_minimax_is_the_family_s_own(gateway: Running, cap: int) -> None:
    """Above the cap it is shrunk in one step; below it a short side of 90 grows to 112."""
    url = {"url": data_url(FILES[0 if cap == 112 else 1]), "max_long_side_pixel": cap}
    answer = gateway.chat([{"type": "image_url", "image_url": url}], model="minimax_m3")
    assert answer.status == 200
    found = last_seen(gateway, "minimax_m3")["media"][0]["tensors"]
    digest, grids, _ = tensors("minimax_m3", [FILES[0 if cap == 112 else 1]], Hints(max_long_side=cap))
    assert found["image_grid_thw"]["values"] == grids == ([1, 6, 8] if cap == 112 else [1, 10, 8])
    assert found["pixel_values"]["sha256"] == digest


@pytest.mark.parametrize("name", [name for name, limit in LIMITS.items() if limit == 10])
def test_eleven_pictures_are_one_too_many(gateway: Running, name: str) -> None:
    answer = gateway.chat([image_part(FILES[1])] * 11, model=name)
    assert answer.error == (400, "invalid_multimodal_request")
    family = served(name).family.name
    assert f"model spec {family} supports at most 10 image inputs; got 11 (the model spec)" in answer.message


@pytest.mark.parametrize("name", LIMITS)
def test_anchors_in_text_are_refused(gateway: Running, name: str) -> None:
    """Its own anchor beside a picture, and those of clips and sounds, which it knows but does not take."""
    own = served(name).anchors[Modality.IMAGE].text
    answer = gateway.chat([image_part(FILES[1]), text_part(own)], model=name)
    assert answer.error == (400, "multimodal_prompt_contract_mismatch")
    for token_id in served(name).guarded().values():
        answer = gateway.chat(f"a {served(name).vocabulary.token_of(token_id)}", model=name)
        assert answer.error == (400, "multimodal_prompt_contract_mismatch")


@pytest.mark.parametrize("name", LIMITS)
def test_clips_beyond_the_limit_and_thin_pictures_are_refused(gateway: Running, name: str) -> None:
    clips = CLIPS.get(name, {}).get("video", 0)
    answer = gateway.chat([clip_part(b"no clip")] * (clips + 1), model=name)
    assert answer.error == (400, "invalid_multimodal_request")
    family = served(name).family.name
    if clips:
        assert f"model spec {family} supports at most {clips} video inputs; got {clips + 1}" in answer.message
    else:
        assert f"modality video is not supported by model spec {family}" in answer.message
    answer = gateway.chat([image_part(picture(3, 603))], model=name)
    assert answer.error == (400, "multimodal_processing_failed")
    assert "side ratio of 201.0" in answer.message


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_and_a_picture(gateway: Running, name: str) -> None:
    """Both batches as the family makes them; pictures come first in the message, parts stay as written."""
    answer = gateway.chat([clip_part(CLIP), text_part("and"), image_part(FILES[1])], model=name)
    assert answer.status == 200, answer.message
    pictures, clips = last_seen(gateway, name)["media"]
    assert (pictures["modality"], clips["modality"]) == ("image", "video")
    assert pictures["tensors"]["pixel_values"]["sha256"] == tensors(name, FILES[1:])[0]
    measured, out = clip_tensor(name, CLIP)
    assert clips["tensors"]["pixel_values"]["sha256"] == hashlib.sha256(out).hexdigest()
    assert clips["tensors"]["video_grid_thw"]["values"] == list(measured.side["video_grid_thw"].values)
    assert set(clips["tensors"]) == {"pixel_values", *measured.side}
    one = served(name)
    replacement = one.family.replacement(one.config, one.vocabulary, Modality.VIDEO, measured)
    assert [length for _, length in clips["ranges"]] == [len(replacement.token_ids)]
    assert clips["ranges"][0][0] < pictures["ranges"][0][0]


def test_several_clips_are_one_batch(gateway: Running) -> None:
    other = clip(moving_noise(30, 80, 60))
    answer = gateway.chat([clip_part(CLIP), clip_part(other), clip_part(CLIP)], model="minimax_m3")
    assert answer.status == 200, answer.message
    (batch,) = last_seen(gateway, "minimax_m3")["media"]
    made = [clip_tensor("minimax_m3", data) for data in (CLIP, other, CLIP)]
    whole = hashlib.sha256(b"".join(out.tobytes() for _, out in made)).hexdigest()
    assert batch["tensors"]["pixel_values"]["sha256"] == whole
    counts = [measured.primary_shape[0] for measured, _ in made]
    assert batch["tensors"]["patches_per_video"]["values"] == counts
    assert len(batch["ranges"]) == 3 and batch["hashes"][0] == batch["hashes"][2] != batch["hashes"][1]


@pytest.mark.parametrize("name", CLIPS)
def test_hints_of_a_clip(gateway: Running, name: str) -> None:
    answer = gateway.chat([clip_part(CLIP, fps=5, max_long_side_pixel=168)], model=name)
    assert answer.status == 200, answer.message
    (batch,) = last_seen(gateway, name)["media"]
    measured, out = clip_tensor(name, CLIP, Hints(max_long_side=168, fps=5.0))
    assert batch["tensors"]["pixel_values"]["sha256"] == hashlib.sha256(out).hexdigest()
    assert batch["tensors"]["video_grid_thw"]["values"] == list(measured.side["video_grid_thw"].values)
    for wrong in ({"fps": 0.1}, {"fps": 5.5}, {"max_long_side_pixel": 140}, {"max_long_side_pixel": 151}):
        answer = gateway.chat([clip_part(CLIP, **wrong)], model=name)
        assert answer.error == (400, "multimodal_processing_failed")


def test_nothing_is_held_afterwards(gateway: Running) -> None:
    gateway.given_back()
