"""Families of tiles and native patches from outside: one gateway, an engine stand-in with each bundle, pictures to
each.

What the engine got is held against the family called directly: ids, ranges, key lists and the digest of every tensor,
with the shapes a request's pictures settle among themselves.
"""

import functools
import hashlib
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engines.base import Form, Modality
from pipeline.media.image import decode
from pipeline.models.base import Hints, Measured
from tests.e2e.running import Running, image_part, picture, running, text_part, until
from tests.models.served import Served
from tests.pipeline.bundles import unpack_bundle

LIMITS = {
    "kimi_k25": 10,
    "kimi_k3": 10,
    "deepseek_v41": 128,
    "llama4": 8,
    "llava15": 4,
    "llava_next": 4,
    "phi3_v": 4,
    "phi35_v": 4,
    "inkling": 10,
}
# the second asks for more tiles than the first
FILES = [picture(90, 70, seed=1), picture(500, 900, seed=2)]

served = functools.cache(Served)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("bundles")
    engines = [("--bundle", str(unpack_bundle(name, folder)), "--model-name", name) for name in LIMITS]
    with running(engines=engines) as found:
        until(lambda: all(cards(found).get(name) for name in LIMITS), seconds=60, what="every model is served")
        yield found


def cards(gateway: Running) -> dict[str, Any]:
    return {card["id"]: card.get("multimodal") for card in gateway.call("GET", "/v1/models").json["data"]}


def last_seen(gateway: Running, name: str) -> dict[str, Any]:
    """The last request the model's engine took."""
    return gateway.engines[list(LIMITS).index(name)].seen("generate")[-1]


def made(name: str, files: Sequence[bytes]) -> tuple[list[Measured], str]:
    """The pictures of one request without a gateway: their measures, and the digest of their tensors back to back."""
    family, settings = served(name).family, served(name).settings
    pictures = [decode(memoryview(file), Hints(), keep_alpha=family.keeps_alpha(settings)) for file in files]
    alone = [served(name).measure(one.height, one.width) for one in pictures]
    together = list(family.reconcile(settings, Modality.IMAGE, alone))
    whole = hashlib.sha256()
    for one, measured in zip(pictures, together, strict=True):
        out = np.empty(math.prod(measured.primary_shape), np.float32).view(np.uint8)
        family.encode(settings, Modality.IMAGE, one, measured, Form(), out)
        whole.update(out)
    return together, whole.hexdigest()


def check_media(gateway: Running, name: str, files: Sequence[bytes]) -> dict[str, Any]:
    """The last request's tensors and key lists; gives the whole message."""
    seen = last_seen(gateway, name)
    (media,) = seen["media"]
    measures, digest = made(name, files)
    pixels = media["tensors"].pop("pixel_values")
    first = measures[0].primary_shape
    assert pixels["shape"] == [sum(item.primary_shape[0] for item in measures), *first[1:]]
    assert pixels["sha256"] == digest
    assert set(media["tensors"]) == set(measures[0].side)
    for key, tensor in media["tensors"].items():
        values = np.array([value for item in measures for value in item.side[key].values], np.int64)
        assert tensor["dtype"] == "int64" and tensor["sha256"] == hashlib.sha256(values).hexdigest()
        assert tensor["shape"][0] == sum(item.side[key].shape[0] for item in measures)

    batch, layout = seen["message"]["mm_inputs"], served(name).family.layout(Modality.IMAGE)
    assert set(batch.get("batched_keys", ())) == set(layout.batched)
    assert batch.get("flat_keys", {}) == layout.flat
    assert set(batch.get("keep_on_cpu_keys", ())) == set(layout.keep_on_cpu)
    assert batch.get("encoder_input_key") == layout.encoder_input_key
    token_id = served(name).family.feature_token(served(name).config, served(name).vocabulary, Modality.IMAGE)
    assert batch["im_token_id"] == token_id
    return seen


def test_models_tell_family_and_limits(gateway: Running) -> None:
    assert {name: (card["family"], card["limits"]["image"]) for name, card in cards(gateway).items()} == {
        name: (served(name).family.name, limit) for name, limit in LIMITS.items()
    }


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LIMITS)
def test_pictures_reach_the_engine(gateway: Running, name: str, count: int) -> None:
    content: list[Any] = []
    prompt: list[str | tuple[int, int]] = []
    for index, (file, size) in enumerate(zip(FILES, [(90, 70), (500, 900)], strict=True)):
        if index < count:
            content += [text_part(f"Picture {index}: "), image_part(file)]
            prompt += [f"Picture {index}: ", size]
    answer = gateway.chat([*content, text_part(" What?")], model=name)
    assert answer.status == 200, answer.body
    _, _, expanded = served(name).prompt([*prompt, " What?"])
    assert answer.json["usage"]["prompt_tokens"] == len(expanded.ids)
    seen = check_media(gateway, name, FILES[:count])
    assert seen["input_ids"] == [[token, len(list(run))] for token, run in itertools.groupby(expanded.ids)]
    assert seen["media"][0]["ranges"] == [[run.offset, run.length] for run in expanded.structural]


@pytest.mark.parametrize("name", ["llava_next", "llama4", "kimi_k3"])
def test_one_picture_twice_beside_a_larger_one(gateway: Running, name: str) -> None:
    files = [FILES[0], FILES[1], FILES[0]]
    answer = gateway.chat([image_part(file) for file in files], model=name)
    assert answer.status == 200, answer.body
    check_media(gateway, name, files)


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k25"])
def test_transparent_pictures(gateway: Running, name: str) -> None:
    """Kimi-K3 sees the chessboard, the others white."""
    pixels = np.random.default_rng(3).integers(0, 256, (60, 50, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert gateway.chat([image_part(file.getvalue())], model=name).status == 200
    check_media(gateway, name, [file.getvalue()])


@pytest.mark.parametrize("name", LIMITS)
def test_one_picture_too_many(gateway: Running, name: str) -> None:
    limit = LIMITS[name]
    answer = gateway.chat([image_part(FILES[0])] * (limit + 1), model=name)
    assert answer.error == (400, "invalid_multimodal_request")
    wanted = f"model spec {served(name).family.name} supports at most {limit} image inputs; got {limit + 1}"
    assert wanted in answer.message


def test_a_request_of_inkling_has_bounded_patches(gateway: Running) -> None:
    """Each is within the limit of 32,768, and so are the number of pictures and their bytes; together they are not."""
    file = picture(2000, 2920, kind="JPEG")  # 50 rows of 74
    answer = gateway.chat([image_part(file)] * 9, model="inkling")
    assert answer.error == (400, "multimodal_processing_failed")
    assert "the pictures make 33300 patches, above the limit of 32768" in answer.message


@pytest.mark.parametrize("name", LIMITS)
def test_anchors_in_text_are_refused(gateway: Running, name: str) -> None:
    own = served(name).anchors[Modality.IMAGE].text
    for content in ([image_part(FILES[0]), text_part(own)], [text_part(own)]):
        answer = gateway.chat(content, model=name)
        assert answer.error == (400, "multimodal_prompt_contract_mismatch")


@pytest.mark.parametrize("name", LIMITS)
def test_clips_are_refused(gateway: Running, name: str) -> None:
    clip = {"type": "video_url", "video_url": {"url": "http://127.0.0.1/a.mp4"}}
    answer = gateway.chat([clip], model=name)
    assert answer.error == (400, "invalid_multimodal_request")
    assert f"modality video is not supported by model spec {served(name).family.name}" in answer.message


def test_nothing_is_held_afterwards(gateway: Running) -> None:
    gateway.given_back()
