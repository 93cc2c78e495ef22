"""Sounds from outside: every way to send one to a TokenSpeed worker, what it gets, and what is refused."""

import base64
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest

from engines.base import Form
from pipeline.media.audio import Sound
from tests.e2e.hearing_engine import Hearing, hearing
from tests.e2e.origin import MediaHost, media_host
from tests.e2e.running import Running, data_url, image_part, picture, running, text_part, until
from tests.models.served import Served
from tests.models.sounds import DATA, SOUND, encode, measure, prompt
from tests.pipeline.bundles import unpack_bundle
from tests.pipeline.ffmpeg import made_ffmpeg, real_ffmpeg
from tests.pipeline.sounds import encoded, tone, wav, wav_of
from tools.load.processes import tree

NAMES = ["qwen3_omni", "qwen3_asr", "inkling"]
SECOND, SHORT = tone(16_000, 1.0), tone(16_000, 0.25, hertz=1000)
FILE, SHORT_FILE = wav_of(SECOND), wav_of(SHORT)

served = functools.cache(Served)


@pytest.fixture(scope="module")
def host() -> Iterator[MediaHost]:
    with media_host() as found:
        yield found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearing]:
    with hearing(NAMES, tmp_path_factory.mktemp("bundles")) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(engines: Hearing) -> Iterator[Running]:
    environment = {"SMG_AUDIO_MAX_INPUT_BYTES": "200000", "SMG_AUDIO_MAX_DECODED_BYTES": "400000"}
    with running("--worker-urls", *engines.urls, engines=[], environment=environment) as found:
        until(lambda: len(models(found)) == len(NAMES), what="every model is served")
        yield found


def models(gateway: Running) -> dict[str, Any]:
    """Those that are loaded."""
    cards = gateway.call("GET", "/v1/models").json.get("data", ())
    return {card["id"]: card["multimodal"] for card in cards if card.get("multimodal")}


def sound_url(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def sound_part(file: bytes) -> dict[str, Any]:
    return sound_url(data_url(file, "audio/wav"))


def input_audio(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


def assert_features(received: bytes, name: str, samples: np.ndarray, *, columns: int | None = None) -> None:
    """As TokenSpeed gets them unless told otherwise: bfloat16.

    A pool process multiplies on one thread, this one perhaps on several: the last bit may differ, and so a rounding.
    """
    measured = measure(served(name), Sound(samples, 16_000))
    expected = encode(served(name), Sound(samples, 16_000), Form("bfloat16"), measured).view(np.uint16)
    expected = expected.reshape(measured.primary_shape).astype(np.int32)
    found = np.frombuffer(received, np.uint16).astype(np.int32)
    if columns is not None:
        found = found.reshape(*measured.primary_shape[:-1], columns)
        assert not found[..., measured.primary_shape[-1] :].any()
        found = found[..., : measured.primary_shape[-1]]
    apart = np.abs(found.reshape(expected.shape) - expected)
    assert apart.max() <= 1 and np.count_nonzero(apart) <= expected.size / 1000


def test_models_tell_how_many_sounds(gateway: Running) -> None:
    assert {name: (card["family"], card["limits"]["audio"]) for name, card in models(gateway).items()} == {
        name: (name, 10) for name in NAMES
    }
    assert models(gateway)["qwen3_asr"]["limits"] == {"audio": 10}


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_reaches_the_engine(gateway: Running, engines: Hearing, name: str) -> None:
    answer = gateway.chat([sound_part(FILE), text_part("What is shown?")], model=name)
    assert answer.status == 200, answer.body
    text, _, expanded = prompt(served(name), [Sound(SECOND, 16_000), "What is shown?"])
    [request] = engines.heard(name)
    assert list(request.tokenized.input_ids) == expanded.ids
    assert request.tokenized.original_text == text
    [item] = request.mm_inputs.items
    assert item.modality == 2  # AUDIO
    assert [(run.offset, run.length) for run in item.placeholders] == [
        (run.offset, run.length) for run in expanded.features[0]
    ]
    assert item.placeholder_token_id == served(name).anchors[SOUND].token_id
    assert item.content_hash == blake3.blake3(blake3.blake3(FILE).hexdigest().encode()).digest()
    measured = measure(served(name), Sound(SECOND, 16_000))
    assert (item.encoder_input.dtype, tuple(item.encoder_input.shape)) == ("bfloat16", measured.primary_shape)
    assert_features(item.encoder_input.inline, name, SECOND)
    assert set(item.model_specific_tensors) == set(measured.side)
    assert answer.json["usage"]["prompt_tokens"] > 0


def test_every_way_to_send_it_is_the_same_message(gateway: Running, engines: Hearing) -> None:
    messages = []
    for way in (
        sound_part(FILE),
        input_audio(FILE),
        {"type": "audio_url", "audio_url": data_url(FILE, "application/octet-stream")},
        {"type": "input_audio", "input_audio": {"data": data_url(FILE, "audio/mpeg")}},
    ):
        assert gateway.chat([way, text_part("?")], model="qwen3_omni").status == 200
        [request] = engines.heard("qwen3_omni")
        request.request_id = ""
        messages.append(request)
    assert all(message == messages[0] for message in messages)


@pytest.mark.parametrize(
    ("file", "frames"), [("opus.ogg", 60), ("opus.webm", 60), ("vorbis.ogg", 60), ("film.mp4", 100)]
)
def test_sounds_are_fetched(gateway: Running, engines: Hearing, host: MediaHost, file: str, frames: int) -> None:
    base = host.serve({f"/{file}": {"file": f"sounds/{file}"}}, "/fetched")
    answer = gateway.chat([sound_url(f"{base}/{file}"), text_part("?")], model="qwen3_asr")
    assert answer.status == 200, answer.body
    [request] = engines.heard("qwen3_asr")
    [item] = request.mm_inputs.items
    assert item.encoder_input.shape[2] == pytest.approx(frames, abs=2)
    assert item.content_hash == blake3.blake3(blake3.blake3((DATA / file).read_bytes()).hexdigest().encode()).digest()


def test_pictures_and_sounds_stand_as_they_were_written(gateway: Running, engines: Hearing) -> None:
    content = [text_part("a"), sound_part(FILE), image_part(picture(64, 96)), input_audio(SHORT_FILE), text_part("b")]
    assert gateway.chat(content, model="qwen3_omni").status == 200
    [request] = engines.heard("qwen3_omni")
    items = request.mm_inputs.items
    assert [item.modality for item in items] == [2, 1, 2]
    assert [[run.length for run in item.placeholders] for item in items] == [[13], [6], [4]]
    first, _, last = (item.placeholders[0] for item in items)
    ids = list(request.tokenized.input_ids)
    assert ids[first.offset : first.offset + 13] == [151675] * 13
    assert ids[last.offset : last.offset + 4] == [151675] * 4


def test_sounds_of_one_request_are_as_long_as_the_longest(gateway: Running, engines: Hearing) -> None:
    """The same sound twice is two items of the same bytes."""
    content = [sound_part(SHORT_FILE), sound_part(FILE), sound_part(SHORT_FILE)]
    assert gateway.chat(content, model="qwen3_asr").status == 200
    [request] = engines.heard("qwen3_asr")
    items = request.mm_inputs.items
    assert [tuple(item.encoder_input.shape) for item in items] == [(1, 128, 100)] * 3
    assert_features(items[1].encoder_input.inline, "qwen3_asr", SECOND)
    assert items[0].encoder_input == items[2].encoder_input
    assert_features(items[0].encoder_input.inline, "qwen3_asr", SHORT, columns=100)
    masks = [np.frombuffer(item.model_specific_tensors["feature_attention_mask"].inline, np.int64) for item in items]
    assert [mask.sum() for mask in masks] == [25, 100, 25]
    lengths = [np.frombuffer(item.model_specific_tensors["audio_feature_lengths"].inline, np.int64) for item in items]
    assert [length.tolist() for length in lengths] == [[25], [100], [25]]
    assert [item.placeholders[0].length for item in items] == [4, 13, 4]


def test_eleven_sounds_are_one_too_many(gateway: Running) -> None:
    answer = gateway.chat([sound_part(SHORT_FILE)] * 11, model="inkling")
    assert answer.error == (400, "invalid_multimodal_request")
    assert "model spec inkling supports at most 10 audio inputs; got 11 (the model spec)" in answer.message


@pytest.mark.parametrize("anchor", ["<|audio_pad|>", "a <|audio_pad|> b"])
def test_an_anchor_in_text_is_refused(gateway: Running, anchor: str) -> None:
    for content in (anchor, [sound_part(SHORT_FILE), text_part(anchor)]):
        answer = gateway.chat(content, model="qwen3_omni")
        assert answer.error == (400, "multimodal_prompt_contract_mismatch")


REFUSED = {
    "no sound": (b"hello", "audio decode error: no known format"),
    "a picture": (picture(8, 8), "audio decode error: no known format"),
    "nothing in it": (wav(b""), "audio decode error: the file holds no sound that can be decoded"),
    "one sample": (wav(b"\0\0"), "a sound of 1 samples at 16000 Hz is shorter than one frame of 160"),
    "too many bytes": (wav(bytes(200_000)), "exceeds the maximum size of 200000 bytes"),
    "too long when decoded": (
        encoded(np.zeros(110_000, np.float32), 48_000, container="flac", codec="flac"),
        "the decoded samples are more than SMG_AUDIO_MAX_DECODED_BYTES=400000 bytes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sound_is_refused_by_its_place(gateway: Running, engines: Hearing, name: str) -> None:
    file, words = REFUSED[name]
    answer = gateway.chat([sound_part(SHORT_FILE), input_audio(file)], model="qwen3_asr")
    assert answer.error == (400, "multimodal_processing_failed")
    assert answer.message.startswith("media item 1: ") and words in answer.message
    assert engines.heard("qwen3_asr") == []


def test_a_failed_fetch_of_a_sound_is_told(gateway: Running, host: MediaHost) -> None:
    base = host.serve({"/a.wav": {"status": 404}}, "/gone")
    answer = gateway.chat([sound_url(base + "/a.wav")], model="qwen3_asr")
    assert answer.error == (400, "multimodal_processing_failed")


def test_metrics_and_memory_afterwards(gateway: Running) -> None:
    assert gateway.chat([sound_part(FILE)], model="qwen3_asr").status == 200
    assert gateway.metric('mediagate_stage_duration_seconds_count{modality="audio",stage="decode"}') >= 1
    gateway.given_back()


def test_settings_of_the_operator(engines: Hearing, host: MediaHost) -> None:
    """A limit of its own, and a deadline that two and a half hours cannot keep."""
    environment = {"SMG_AUDIO_MAX_COUNT": "1", "SMG_AUDIO_PROCESS_TIMEOUT_SECS": "0.5"}
    with running("--worker-urls", *engines.urls, engines=[], environment=environment) as gateway:
        until(lambda: len(models(gateway)) == len(NAMES), what="every model is served")
        answer = gateway.chat([sound_part(SHORT_FILE)] * 2, model="qwen3_asr")
        assert answer.error == (400, "invalid_multimodal_request")
        assert "supports at most 1 audio inputs; got 2 (SMG_AUDIO_MAX_COUNT)" in answer.message
        voice = encoded(tone(8000, 10.0), 8000, container="amr", codec="libopencore_amrnb")
        endless = voice[:6] + voice[6:] * 900  # behind its first line a file is nothing but frames
        answer = gateway.chat([sound_part(endless)], model="qwen3_asr")
        assert answer.error == (400, "multimodal_processing_failed")
        assert "processing took longer than 0.5 s" in answer.message
        assert gateway.chat([sound_part(FILE)], model="qwen3_asr").status == 200


def test_the_ffmpeg_program_hears_the_same(engines: Hearing, tmp_path: Path) -> None:
    """A program that hangs is ended with its job, and while there is none, sounds are refused and pictures served."""
    put = tmp_path / "bin" / "ffmpeg"
    path = str(made_ffmpeg(put.parent, "exec sleep 100"))
    environment = {"SMG_AUDIO_DECODE_BACKEND": "ffmpeg", "SMG_AUDIO_PROCESS_TIMEOUT_SECS": "1", "PATH": path}
    with running("--worker-urls", *engines.urls, "--pool-processes=1", engines=[], environment=environment) as gateway:
        until(lambda: len(models(gateway)) == len(NAMES), what="every model is served")
        before = set(tree(gateway.gateway.pid))
        answer = gateway.chat([sound_part(FILE)], model="qwen3_asr")
        assert answer.error == (400, "multimodal_processing_failed")
        assert "processing took longer than 1 s" in answer.message
        assert set(tree(gateway.gateway.pid)) == before
        put.unlink()
        answer = gateway.chat([sound_part(FILE)], model="qwen3_asr")
        assert answer.status == 400 and "ffmpeg executable not found" in answer.message
        assert gateway.chat([image_part(picture(64, 64))], model="qwen3_omni").status == 200
        assert len(engines.heard("qwen3_omni")) == 1
        real_ffmpeg(put.parent)
        assert gateway.chat([sound_part(FILE)], model="qwen3_asr").status == 200
        request = engines.heard("qwen3_asr")[-1]
        assert_features(request.mm_inputs.items[0].encoder_input.inline, "qwen3_asr", SECOND)
        gateway.given_back()


def test_sounds_have_a_width_of_their_own(engines: Hearing) -> None:
    with running(
        "--worker-urls",
        *engines.urls,
        engines=[],
        environment={"SMG_TOKENSPEED_AUDIO_ENCODER_INPUT_DTYPE": "float32"},
    ) as gateway:
        until(lambda: len(models(gateway)) == len(NAMES), what="every model is served")
        assert gateway.chat([sound_part(FILE), image_part(picture(64, 64))], model="qwen3_omni").status == 200
        [request] = engines.heard("qwen3_omni")
        assert [item.encoder_input.dtype for item in request.mm_inputs.items] == ["float32", "bfloat16"]
        exact = encode(served("qwen3_omni"), Sound(SECOND, 16_000)).view(np.float32)
        assert np.frombuffer(request.mm_inputs.items[0].encoder_input.inline, np.float32) == pytest.approx(
            exact, abs=1e-5
        )


def test_who_cannot_hear_says_so_before_anything_is_fetched(host: MediaHost, tmp_path: Path) -> None:
    base = host.serve({"/a.wav": {"file": "sounds/opus.ogg"}}, "/deaf")
    bundle = str(unpack_bundle("qwen3_omni", tmp_path))
    with running(engines=[("--bundle", bundle, "--model-name", "qwen3_omni"), ()]) as gateway:
        until(lambda: len(models(gateway)) == 2, what="both models are served")
        for part in (sound_url(base + "/a.wav"), input_audio(FILE)):
            answer = gateway.chat([part], model="qwen3_omni")
            assert answer.error == (400, "multimodal_not_supported")
            assert "backend vllm does not support audio inputs" in answer.message
            answer = gateway.chat([part])
            assert answer.error == (400, "invalid_multimodal_request")
            assert "modality audio is not supported by model spec qwen3_vl" in answer.message
    assert host.hits["/deaf/a.wav"] == 0
