"""TokenSpeed, SGLang, TensorRT-LLM and MLX workers behind one gateway: recorded requests of the real one played, every
field and the digest of every tensor and file compared; then fleets of several engines, refusals and clean-up.
"""

import base64
import concurrent.futures
import contextlib
import copy
import json
import lzma
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.golden import differences, filled, keep_only, media_targets
from tests.e2e.origin import DATA, MediaHost, media_host
from tests.e2e.running import CHAT, Answer, Running, data_url, image_part, picture, running, until
from tests.e2e.test_golden import AS_WRITTEN
from tests.engines.other_records import RECORDS
from tests.pipeline.bundles import unpack_bundle
from tools.launch import ROOT

SAID = "Hello world!"
MODELS = ("sglang", "trtllm", "tokenspeed", "tokenspeed_f32", "tokenspeed_shm", "tokenspeed_omni", "mlx")
SENT: dict[str, dict[str, Any]] = {  # SMG drops it
    "sglang": {"sampling_params": {"min_new_tokens": 1}},
    "tokenspeed": {"sampling_params": {"min_new_tokens": 1}},
    "tokenspeed_omni": {"sampling_params": {"min_new_tokens": 1}},
    "trtllm": {"sampling_config": {"min_tokens": 1}, "stop_token_ids": [7]},
}
SAME = {"input_audio": "audio", "audio_http": "audio"}  # other ways to say it
TONE = "tone_16k_mono_1s.wav"
OTHER_RATE = {"audio_44k_stereo"}  # 5 of 12,800 values round to the other neighbour
WITH_JPEG = {"one_jpg", "two_images"}  # recorded without libturbojpeg, whose pixels ours are


class Worker:
    """A recording engine."""

    def __init__(self, folder: Path, runtime: str, model: str, bundle: Path, *flags: str) -> None:
        self._journal = folder / f"{model}-{runtime}-{len(list(folder.iterdir()))}.jsonl"
        self._journal.touch()
        command = [sys.executable, str(ROOT / "tests" / "e2e" / "other_engine.py"), "--runtime", runtime]
        command += ["--model", model, "--bundle", str(bundle), "--journal", str(self._journal), *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._url = ""

    @property
    def url(self) -> str:
        if not self._url:
            assert self._process.stdout is not None
            line = self._process.stdout.readline().decode()
            assert line.startswith("ready port="), line
            self._url = f"grpc://127.0.0.1:{line.strip().partition('=')[2]}"
        return self._url

    def stop(self) -> None:
        self._process.communicate(timeout=20)

    def kill(self) -> None:
        """As a crash."""
        self._process.kill()
        self._process.wait(20)

    def seen(self, event: str = "generate") -> list[dict[str, Any]]:
        whole, _, _ = self._journal.read_text().rpartition("\n")  # one that was killed may have begun another line
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["event"] == event]


@contextlib.contextmanager
def fleet(folder: Path, *workers: Worker, flags: tuple[str, ...] = (), **options: Any) -> Iterator[Running]:
    """A gateway in front of these workers, all ready."""
    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.stop)
        urls = [worker.url for worker in workers]
        gateway = stack.enter_context(running("--worker-urls", *urls, *flags, engines=(), wait=False, **options))
        gateway.gateway.wait_until()
        until(lambda: all(one["status"] == "ready" for one in gateway.workers()), what="all workers")
        yield gateway


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL's, with the part of the tokenizer that is needed."""
    folder = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    records = [record for record in RECORDS.values() if "message" in record and record["bundle"] == "qwen3_vl"]
    texts = [record["message"]["tokenized"].get("original_text", "") for record in records]
    times = "".join(f"<{tenths / 10:.1f} seconds>" for tenths in range(100))
    keep_only(folder / "tokenizer.json", [*texts, AS_WRITTEN["two_images"], SAID, "END", times])
    return folder


@pytest.fixture(scope="module")
def workers(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Worker]:
    folder = tmp_path_factory.mktemp("workers")
    f32 = ("--label", "multimodal_encoder_dtype=float32")
    omni = unpack_bundle("qwen3_omni", tmp_path_factory.mktemp("omni"))
    bundles = {"tokenspeed_omni": omni}
    return {
        name: Worker(
            folder, name.partition("_")[0], name, bundles.get(name, bundle), *(f32 if name == "tokenspeed_f32" else ())
        )
        for name in MODELS
    }


@pytest.fixture(scope="module")
def gateway(workers: dict[str, Worker], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for all; the worker of shared memory says so itself."""
    others = [worker for name, worker in workers.items() if name != "tokenspeed_shm"]
    with fleet(tmp_path_factory.mktemp("gateway"), *others) as found:
        special = workers["tokenspeed_shm"]
        found.call("POST", "/workers", {"url": special.url, "multimodal_tensor_transport": "shm"})
        until(lambda: len([one for one in found.workers() if one["status"] == "ready"]) == len(MODELS), what="shm")
        yield found
        special.stop()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaHost]:
    sound = tmp_path_factory.mktemp("sounds") / TONE
    sound.write_bytes(wav(TONE))
    with media_host() as found:
        found.serve({**media_targets(), f"/{TONE}": {"file": str(sound)}})
        yield found


def played(gateway: Running, host: MediaHost, setup: str, case: str) -> Answer:
    body = filled(with_sounds(RECORDS[f"1.13.0.{setup}.{case}"]["request"]["body"]), host.base)
    return gateway.call("POST", CHAT, {**body, "model": setup}, {"X-Request-Id": f"{setup}.{case}!"})


def with_sounds(value: Any) -> Any:
    """A recorded body with its sounds as base64."""
    if isinstance(value, dict):
        return {key: with_sounds(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_sounds(inner) for inner in value]
    if not isinstance(value, str) or not value.endswith(".wav"):
        return value
    kind, _, name = value.partition(":")
    if kind == "@http":
        return value
    return base64.b64encode(wav(name)).decode() if kind == "@b64" else data_url(wav(name), "audio/wav")


def wav(name: str) -> bytes:
    return lzma.decompress((DATA / "sounds" / f"{name}.xz").read_bytes())


def sent(worker: Worker, setup: str, case: str) -> dict[str, Any]:
    found = [one for one in worker.seen() if one["message"]["request_id"].startswith(f"{setup}.{case}!")]
    assert len(found) == 1, [one["message"]["request_id"] for one in worker.seen()]
    return found[0]


def recorded(setup: str, case: str) -> dict[str, Any]:
    """1.13.0's message with what is decided otherwise; the prompt's text as 1.11.0 always sends it."""
    same = setup if setup != "tokenspeed_shm" else "tokenspeed"  # the same tensors, on another way
    wanted: dict[str, Any] = copy.deepcopy(RECORDS[f"1.13.0.{same}.{SAME.get(case, case)}"]["message"])
    old = RECORDS.get(f"1.11.0.{same}.{case}", {}).get("message")
    if old:
        wanted["tokenized"]["original_text"] = old["tokenized"]["original_text"]
    if case == "sampling":
        for field, value in SENT[setup].items():
            wanted[field] = {**wanted.get(field, {}), **value} if isinstance(value, dict) else value
    return wanted


def loosened(message: dict[str, Any], case: str) -> dict[str, Any]:
    """Without what a comparison cannot hold: ids and offsets where parts stand as written, a JPEG's pixels, a
    resampled sound's features, a clip's hash (1.13.0 has a recipe of its own).
    """
    message.pop("request_id", None)
    tokenized, media = message["tokenized"], message.get("mm_inputs", {})
    if case in AS_WRITTEN:
        tokenized["original_text"] = AS_WRITTEN[case]
        for name in ("input_ids", "input_token_ids"):
            tokenized[name] = sorted(tokenized.get(name, ()))
        for ranges in [media.get("mm_placeholders", []), *(item["placeholders"] for item in media.get("items", ()))]:
            ranges[:] = [one["length"] for one in ranges]
    for item in media.get("items", ()):
        if item["modality"] == 3:
            item.pop("content_hash")
    if case in WITH_JPEG | OTHER_RATE and media:
        pixels = media["items"][-1]["encoder_input"]["inline"] if "items" in media else media["pixel_values"]["data"]
        pixels.pop("sha256")
    return message


CASES = [
    (record["setup"], record["case"])
    for name, record in RECORDS.items()
    if record["version"] == "1.13.0" and record["setup"] in MODELS and ("message" in record or record["case"] in SAME)
]


@pytest.mark.parametrize(("setup", "case"), CASES)
def test_the_engine_is_sent_what_was_recorded(
    gateway: Running, host: MediaHost, workers: dict[str, Worker], setup: str, case: str
) -> None:
    answer = played(gateway, host, setup, case)
    assert answer.status == 200, answer.body
    streams = RECORDS[f"1.13.0.{setup}.{case}"]["request"]["body"].get("stream")
    assert (answer.streamed_text if streams else answer.text) == SAID
    record = sent(workers[setup], setup, case)
    assert bool(record["by_segment"]) == (setup == "tokenspeed_shm")
    wanted, ours = loosened(recorded(setup, case), case), loosened(record["message"], case)
    assert list(differences(wanted, ours)) == []


REFUSED = [
    (record["setup"], record["case"])
    for record in RECORDS.values()
    if record["version"] == "1.13.0" and record["setup"] in MODELS and record["code"] == "multimodal_not_supported"
]


@pytest.mark.parametrize(("setup", "case"), REFUSED)
def test_media_an_engine_does_not_take_are_refused(gateway: Running, host: MediaHost, setup: str, case: str) -> None:
    answer = played(gateway, host, setup, case)
    assert answer.error == (400, "multimodal_not_supported")
    assert answer.message == RECORDS[f"1.13.0.{setup}.{case}"]["message_of_error"]


OTHERWISE_REFUSED = [
    (record["setup"], record["case"])
    for record in RECORDS.values()
    if record["version"] == "1.13.0" and record["status"] != 200 and record["code"] != "multimodal_not_supported"
]


@pytest.mark.parametrize(("setup", "case"), OTHERWISE_REFUSED)
def test_what_is_refused_for_another_reason(gateway: Running, host: MediaHost, setup: str, case: str) -> None:
    record = RECORDS[f"1.13.0.{setup}.{case}"]
    assert played(gateway, host, setup, case).error == (record["status"], record["code"])


def test_the_cases_are_whole() -> None:
    """Every record but those of a gateway with another environment, which have a test of their own."""
    played = {*CASES, *REFUSED, *OTHERWISE_REFUSED}
    assert len(played) == len(CASES) + len(REFUSED) + len(OTHERWISE_REFUSED)
    records = [record for record in RECORDS.values() if record["version"] == "1.13.0"]
    assert {(one["setup"], one["case"]) for one in records if one["setup"] != "tokenspeed_env"} == played


# ---------------------------------------------------------------- what an engine cannot be told


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 2}, "n"), ({"stop": "x"}, "stop"), ({"min_tokens": 2}, "min_tokens")]
)
def test_mlx_refuses_what_it_cannot_be_told(gateway: Running, fields: dict[str, Any], param: str) -> None:
    answer = gateway.chat("hi", model="mlx", **fields)
    assert answer.error == (400, "unsupported_parameter")
    assert answer.json["error"]["param"] == param
    assert answer.message == f"backend mlx does not support the parameter {param}"


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_of_several_tokens_is_the_gateways(
    gateway: Running, workers: dict[str, Worker], streams: bool
) -> None:
    before = len(workers["sglang"].seen("abort"))
    answer = gateway.chat("hi", model="sglang", stop=["lo wor"], stream=streams)
    assert (answer.streamed_text if streams else answer.text) == "Hel"
    params = workers["sglang"].seen()[-1]["message"]["sampling_params"]
    assert "stop" not in params and "stop_token_ids" not in params
    if streams:  # the engine would have gone on
        until(lambda: len(workers["sglang"].seen("abort")) > before, what="the abort")


@pytest.mark.parametrize("model", ["sglang", "trtllm", "tokenspeed", "tokenspeed_shm"])
def test_everything_is_given_back(gateway: Running, model: str) -> None:
    content = [image_part(picture(seed=3)), {"type": "text", "text": "hi"}]
    assert gateway.chat(content, model=model).status == 200
    gateway.given_back()


def test_metrics_count_tensors_of_tokenspeed_alone(gateway: Running) -> None:
    lines = [line for line in gateway.metrics().splitlines() if line.startswith("smg_mm_tensors_total{")]
    assert {line.partition('runtime="')[2].partition('"')[0] for line in lines} == {"tokenspeed"}


# ---------------------------------------------------------------- several engines of one model


def test_every_worker_of_a_mixed_fleet_gets_its_form(bundle: Path, tmp_path: Path) -> None:
    """Same picture, same model: tensors, tensors with files, files alone; and text for the one that takes no more."""
    folder = tmp_path / "workers"
    folder.mkdir()
    kinds = ("vllm", "sglang", "trtllm", "tokenspeed", "mlx")
    fellows = {kind: Worker(folder, kind, "mixed", bundle) for kind in kinds}
    file = picture(seed=4)
    content = [image_part(file), {"type": "text", "text": "hi"}]
    with fleet(tmp_path, *fellows.values(), flags=("--policy=round_robin",)) as gateway:

        def ask(_: int) -> Answer:
            return gateway.chat(content, model="mixed")

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for answer in threads.map(ask, range(32)):
                assert answer.status == 200 and answer.text == SAID
        asked = {kind: [one["message"] for one in worker.seen()] for kind, worker in fellows.items()}
        assert not asked["mlx"] and all(asked[kind] for kind in kinds if kind != "mlx")
        for message in asked["vllm"]:
            assert message["mm_inputs"]["pixel_values"]["dtype"] == "float32"
        for message in asked["sglang"]:
            assert message["mm_inputs"]["pixel_values"]["dtype"] == "float32"
            assert [one["nbytes"] for one in message["mm_inputs"]["image_data"]] == [len(file)]
        for message in asked["trtllm"]:
            assert [one["nbytes"] for one in message["multimodal_input"]["image_data"]] == [len(file)]
        for message in asked["tokenspeed"]:
            assert message["mm_inputs"]["items"][0]["encoder_input"]["dtype"] == "bfloat16"
        gateway.given_back()
        for _ in range(10):
            assert gateway.chat("hi", model="mixed", stop="x").status == 200
        assert not fellows["mlx"].seen()
        for _ in range(10):
            assert gateway.chat("hi", model="mixed").status == 200
        assert fellows["mlx"].seen()


def test_the_files_outlive_a_client_that_leaves(bundle: Path, tmp_path: Path) -> None:
    """They are read by a socket then: given back when the engine has been told to stop, not before, and once."""
    folder = tmp_path / "workers"
    folder.mkdir()
    slow = Worker(folder, "sglang", "slow", bundle, "--slow", "0.3")
    content = [image_part(picture(seed=5)), {"type": "text", "text": "hi"}]
    with fleet(tmp_path, slow) as gateway:
        leaving = gateway.open_chat(content, model="slow", stream=True)
        until(slow.seen, what="the request at the engine")
        time.sleep(0.1)
        leaving.close()
        until(lambda: slow.seen("abort"), what="the abort")
        gateway.given_back()
        assert gateway.chat(content, model="slow").status == 200
        gateway.given_back()


def test_widths_by_modality(bundle: Path, host: MediaHost, tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    folder.mkdir()
    worker = Worker(folder, "tokenspeed", "tokenspeed_env", bundle)
    with fleet(tmp_path, worker, environment={"SMG_TOKENSPEED_IMAGE_ENCODER_INPUT_DTYPE": "float16"}) as gateway:
        for case in ("one_png", "video"):
            assert played(gateway, host, "tokenspeed_env", case).status == 200
            ours = loosened(sent(worker, "tokenspeed_env", case)["message"], case)
            assert list(differences(loosened(recorded("tokenspeed_env", case), case), ours)) == []


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    folder.mkdir()
    worker = Worker(folder, "sglang", "small", bundle)
    with contextlib.ExitStack() as stack:
        stack.callback(worker.stop)
        gateway = stack.enter_context(running(engines=()))
        gateway.call("POST", "/workers", {"url": worker.url, "labels": {"max_message_bytes": "100000"}})
        until(lambda: gateway.workers()[0]["status"] == "ready", what="the worker")
        answer = gateway.chat([image_part(picture()), {"type": "text", "text": "hi"}], model="small")
        assert answer.error == (413, "multimodal_payload_too_large")
        assert answer.message.endswith("backend sglang takes at most 100000")
        assert worker.seen() == [] and gateway.chat("hi", model="small").status == 200
        gateway.given_back()
