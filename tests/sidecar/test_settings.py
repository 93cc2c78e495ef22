"""The sidecar's command line: defaults, precedence, the worker's own words, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import ConfigError
from pipeline.sidecar import ceiling
from pipeline.sidecar.settings import DECLARED, GROUPS, SidecarConfig, fingerprint_of, parse, resolve
from tests.sidecar.records import record

MODEL = ["--model", "Qwen/Qwen3-VL-8B-Instruct"]


def config(*flags: str, **variables: str) -> SidecarConfig:
    found = parse([*flags], variables).config
    assert found is not None
    return found


@pytest.fixture
def described(tmp_path: Path) -> Path:
    said = {name: record("qwen3_vl").hello[name] for name in fingerprint_fields()}
    path = tmp_path / "worker.json"
    path.write_text(json.dumps(said | {"model": "Qwen/Qwen3-VL-8B-Instruct", "mm_device_do_normalize": False}))
    return path


def fingerprint_fields() -> tuple[str, ...]:
    return ("vllm_version", "dtype", "video_backend", "media_io_kwargs", "mm_processor_kwargs", "limit_per_prompt")


def test_the_published_variables_are_read_and_flags_beat_them() -> None:
    variables = {
        "SMG_VLLM_MM_REDIS_URL": "redis://elsewhere:1/2",
        "SMG_VLLM_MM_SIDECAR_NAMESPACE": " fleet ",
        "SMG_VLLM_MM_MAX_RESULT_BYTES": "1000",
        "SMG_VLLM_MM_MAX_VIDEO_FRAMES": "8",
        "VLLM_VIDEO_LOADER_BACKEND": "pyav",
    }
    found = config(*MODEL, **variables)
    assert (found.jobs.redis_url, found.jobs.namespace, found.jobs.max_result_bytes) == (
        "redis://elsewhere:1/2",
        "fleet",
        1000,
    )
    assert (found.engine.max_video_frames, found.engine.video_backend) == (8, "pyav")
    beaten = config(*MODEL, "--redis-url", "redis://here/0", "--namespace", "mine", **variables)
    assert (beaten.jobs.redis_url, beaten.jobs.namespace) == ("redis://here/0", "mine")


def test_the_fingerprint_of_flags_is_the_recorded_one() -> None:
    said = record("qwen3_vl").hello
    flags = ["--dtype", "float32", "--limit-mm-per-prompt", '{"image": 4, "video": 1}']
    made = fingerprint_of(config("--model", "Qwen/m", *flags).engine, {})
    assert {**made.fields(), "model": said["model"]} == {name: said[name] for name in made.fields()}


def test_the_worker_s_own_words_take_the_place_of_flags(described: Path) -> None:
    found = config("--fingerprint-file", str(described))
    assert (found.engine.model, found.engine.dtype) == ("Qwen/Qwen3-VL-8B-Instruct", "float32")
    assert found.engine.device_do_normalize is False
    assert config("--fingerprint-file", str(described), "--mm-device-do-normalize").engine.device_do_normalize is True


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [({"dtype": "bfloat16"}, "torch.bfloat16"), ({"text_config": {"torch_dtype": "float16"}}, "torch.float16")],
)
def test_dtype_auto_is_the_checkpoint_s(stated: dict[str, Any], dtype: str) -> None:
    assert fingerprint_of(config(*MODEL).engine, stated).dtype == dtype


@pytest.mark.parametrize("stated", [{}, {"dtype": "float32"}])
def test_dtype_auto_is_not_guessed(stated: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="name the worker's dtype"):
        fingerprint_of(config(*MODEL).engine, stated)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mm-processor-kwargs", '{"min_pixels": 1}'], "needs vLLM's own processors"),
        (["--media-io-kwargs", '{"video": {"num_frames": 8}}'], "needs vLLM's own processors"),
        (["--media-io-kwargs", "[]"], "Must be a JSON object"),
        (["--allowed-local-media-path", "/"], "no file:// references"),
        (["--limit-mm-per-prompt", '{"image": "many"}'], "the limit of image"),
        (["--redis-url", "memcached://h"], "Must begin with redis://"),
        (["--prometheus-host", "h"], "Must be an IPv4 or IPv6 address"),
        (["--concurrency", "0"], "Must be between 1 and 1024"),
        (["--max-job-bytes", "1"], "max_job_bytes"),
        (["--tokenizer-path", "/nowhere"], "does not exist"),
        (["--fingerprint-file", "/nowhere"], "Comes from --fingerprint-file"),
        (["--mm-allowed-media-domains", ","], "at least one host"),
    ],
)
def test_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(*MODEL, *flags)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1}', '{"model": "m"}', "\x00"])
def test_a_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="fingerprint_file"):
        config("--fingerprint-file", str(path))


def test_a_worker_with_other_options_is_refused(described: Path) -> None:
    said = json.loads(described.read_text())
    for change in ({"mm_processor_kwargs": '{"min_pixels": 1}'}, {"dtype": "torch.float8_e4m3fn"}):
        described.write_text(json.dumps(said | change))
        with pytest.raises(ConfigError):
            config("--fingerprint-file", str(described))


def test_what_is_misspelt_is_told() -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: --modle m; did you mean --model") as refused:
        config("--modle", "m")
    assert refused.value.exit_code == 2
    (told, _) = config(*MODEL, SMG_VLLM_MM_REDIS_URI="redis://h", SMG_MM_PROCESSING="router").warnings
    assert told.endswith("it has no effect. Did you mean SMG_VLLM_MM_REDIS_URL?")


def test_listings_and_help_name_everything_and_no_password() -> None:
    checked = parse([*MODEL, "--redis-url", "redis://:secret@h/0", "--check-config"], {})
    assert "secret" not in checked.text
    assert "--redis-url = set (flag)" in checked.text and "jobs." not in checked.text
    assert len([line for line in checked.text.splitlines() if not line.startswith("warning")]) == len(DECLARED)
    shown = parse(["--help"], {}).text
    assert all(flag in shown for one in DECLARED for flag in one.setting.flags)
    assert all(one.setting.variable in shown for one in DECLARED if one.setting.variable)
    assert {one.setting.group for one in DECLARED} == set(GROUPS)


def test_the_sum_of_memory_follows_the_settings() -> None:
    def total(*flags: str) -> int:
        return sum(share.nbytes for share in ceiling.shares(config(*MODEL, "--concurrency", "2", *flags)))

    more = total("--max-job-bytes", str(256 << 20)) - total("--max-job-bytes", str(128 << 20))
    assert more == 2 * (128 << 20)
    assert "memory under any load: at most" in ceiling.told(resolve({"engine.model": "m"}, {}))
