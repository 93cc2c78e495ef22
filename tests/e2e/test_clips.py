"""Clips through the whole gateway: the real gateway's records, and what it did not have to record.

The records are played and compared as in test_golden.py: every field of the engine's message, every digest.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_golden as golden
from tests.e2e.golden import DATA, answer_shape, differences, engine_view, keep_only, media_targets
from tests.e2e.origin import media_host
from tests.e2e.running import Answer, clip_part, image_part, picture, running
from tests.pipeline.bundles import unpack_bundle
from tests.pipeline.clips import clip, moving_noise
from tests.pipeline.ffmpeg import made_ffmpeg, real_ffmpeg
from tools.load.processes import tree

RECORDS = json.loads((DATA / "golden" / "clips.json").read_text())
SETUPS = {setup["setup"]: setup for setup in RECORDS["setups"]}
SEEN = {
    f"{setup['setup']}.{case['case']}": case["engine"]
    for setup in RECORDS["setups"]
    for case in setup["cases"]
    if "engine" in case
}
# parts as written; SMG puts a message's media in front of its text
AS_WRITTEN = {
    "video_then_image": golden.TURN.format(
        "user", "<|vision_start|><|video_pad|><|vision_end|>and<|vision_start|><|image_pad|><|vision_end|>"
    )
    + "<|im_start|>assistant\n",
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    texts = [seen["message"]["tokenized"]["original_text"] for seen in SEEN.values()]
    times = "".join(f"<{tenths / 10:.1f} seconds>" for tenths in range(100))
    keep_only(folder / "tokenizer.json", [*texts, *AS_WRITTEN.values(), golden.SAID, times])
    return folder


def check(setup: str, case: dict[str, Any], answer: Answer, record: dict[str, Any] | None) -> list[str]:
    if case["status"] != 200:
        return golden.check_refused(answer, case["status"], case["error"], case.get("retry_after"))
    if answer.status != 200:
        return [f"status {answer.status}: {answer.body[:300]!r}"]
    if record is None:
        return ["the engine was not asked"]
    wanted = json.loads(json.dumps(SEEN[case.get("same_message_as", f"{setup}.{case['case']}")]))
    ours = engine_view(record)
    if case["case"] in AS_WRITTEN:
        wanted["message"]["tokenized"]["original_text"] = AS_WRITTEN[case["case"]]
        for view in (wanted, ours):
            view["input_ids"] = sorted(view["input_ids"])
            for batch in view["media"]:
                batch["ranges"] = [length for _, length in batch["ranges"]]
    found = list(differences(RECORDS["answers"][case["answer"]], answer_shape(answer), "answer"))
    return found + list(differences(wanted, ours))


@pytest.mark.parametrize("name", SETUPS)
def test_records(bundle: Path, name: str) -> None:
    setup = SETUPS[name]
    flags = [*setup["flags"], "--disable-retries", "--pool-processes=2"]
    with (
        media_host() as host,
        running(*flags, engine=golden.engine_flags(setup, bundle), environment=setup["env"]) as gateway,
    ):
        host.serve(media_targets())
        answers = {case["case"]: golden.play(gateway, name, case, host.base) for case in setup["cases"]}
        records = golden.seen_by_case(gateway.engine, name)
    found = {
        case["case"]: rows
        for case in setup["cases"]
        if (rows := check(name, case, answers[case["case"]], records.get(case["case"])))
    }
    assert not found, json.dumps(found, indent=1)


def test_a_clip_that_takes_too_long_is_given_up() -> None:
    """The decoder looks at the clock: no process has to be killed, and the next clip is served."""
    long = clip(moving_noise(150, 480, 640), options={"preset": "ultrafast"})
    short = clip(moving_noise(2), options={"preset": "ultrafast"})
    environment = {"SMG_VIDEO_PROCESS_TIMEOUT_SECS": "0.06"}
    with running("--pool-processes=1", environment=environment) as gateway:
        answer = gateway.chat([clip_part(long)])
        assert answer.error == (400, "multimodal_processing_failed")
        assert "processing took longer than 0.06 s" in answer.message
        assert gateway.chat([clip_part(short)]).status == 200
        assert gateway.metric("mediagate_pool_restarts_total") == 0
        gateway.given_back()


def test_clips_are_not_kept_in_the_pixel_cache() -> None:
    data = clip(moving_noise(8))
    with running("--mm-pixel-cache-mb=64") as gateway:
        for _ in range(2):
            assert gateway.chat([clip_part(data)]).status == 200
        seen = [record["media"][0]["tensors"]["pixel_values"]["sha256"] for record in gateway.seen("generate")]
        assert len(set(seen)) == 1 and len(seen) == 2
        gateway.given_back()


def test_what_is_no_clip_is_named() -> None:
    """Sound alone, a picture, nothing: 400 with the item, and never the path of a file."""
    with running() as gateway:
        for name in ("audio_only_mp4.mp4", "noise.mp4", "no_index.mp4"):
            answer = gateway.chat([clip_part((DATA / "clips" / "cases" / name).read_bytes())])
            assert answer.error == (400, "multimodal_processing_failed")
            assert answer.message.startswith("media item 0: ") and "video decode error: " in answer.message


def test_other_decoders_send_the_same_tensors(tmp_path: Path) -> None:
    data = clip(moving_noise(24, 96, 128), options={"bf": "2", "g": "9"})
    path = str(real_ffmpeg(tmp_path / "bin"))
    seen = []
    for backend in ("pyav", "ffmpeg", "opencv"):
        with running("--pool-processes=1", environment={"SMG_VIDEO_DECODE_BACKEND": backend, "PATH": path}) as gateway:
            assert gateway.chat([clip_part(data)]).status == 200
            seen += [record["media"][0]["tensors"]["pixel_values"]["sha256"] for record in gateway.seen("generate")]
            gateway.given_back()
    assert len(seen) == 3 and len(set(seen)) == 1


def test_a_program_that_hangs_is_ended_with_its_job(tmp_path: Path) -> None:
    """The clip is 400, the program gone and reaped, and the process that started it serves the next."""
    path = str(made_ffmpeg(tmp_path / "bin", "exec sleep 100"))
    environment = {"SMG_VIDEO_DECODE_BACKEND": "ffmpeg", "SMG_VIDEO_PROCESS_TIMEOUT_SECS": "1", "PATH": path}
    with running("--pool-processes=1", environment=environment) as gateway:
        before = set(tree(gateway.gateway.pid))
        answer = gateway.chat([clip_part(clip(moving_noise(4)))])
        assert answer.error == (400, "multimodal_processing_failed")
        assert "processing took longer than 1 s" in answer.message
        assert set(tree(gateway.gateway.pid)) == before
        (tmp_path / "bin" / "ffmpeg").unlink()
        answer = gateway.chat([clip_part(clip(moving_noise(4)))])
        assert answer.status == 400 and "ffmpeg executable not found" in answer.message
        assert gateway.chat([image_part(picture(48, 64))]).status == 200
        assert gateway.metric("mediagate_pool_restarts_total") == 0
        gateway.given_back()
