"""Clips decoded by the ffmpeg program and by OpenCV: the frames PyAV chooses and shows, and nothing left behind."""

import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.media import video, video_opencv
from pipeline.models.base import Hints, MediaError
from tests.pipeline.clips import clip, gray_levels, moving_noise
from tests.pipeline.ffmpeg import made_ffmpeg, real_ffmpeg
from tests.pipeline.test_video import CASES, CODECS, DATA

BACKENDS = ["ffmpeg", "opencv"]
# Their pixel formats are computed by other rules in OpenCV.
OTHER_COLOURS = {"h264 10 bit", "odd_53x37"}


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(real_ffmpeg(tmp_path_factory.mktemp("program"))))
        video_opencv.preload()
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    yield
    with pytest.raises(ChildProcessError):  # no child, dead or alive
        os.waitpid(-1, os.WNOHANG)
    assert not [name for name in _open_files() if "mediagate-clip" in name]


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the listing itself
            continue
    return found


def put_in_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def taken(data: bytes, indices: Sequence[int], backend: str = "pyav", hints: Hints = Hints()) -> Any:  # noqa: B008
    decode = video.OTHERS.get(backend)
    found = video.frames(memoryview(data), lambda frames, rate: indices, hints, lambda: None, decode)
    return np.stack([np.asarray(one) for one in found])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CODECS)
def test_frames_are_those_of_pyav(name: str, backend: str) -> None:
    """Whatever is left out on the way, repeated or near the end; also of streams without times."""
    data = clip(moving_noise(40), **CODECS[name])
    for indices in ([0, 0, 13, 26, 39], [8, 9], [7, 15, 16, 30, 38]):
        mine, others = taken(data, indices), taken(data, indices, backend)
        if backend == "opencv" and name in OTHER_COLOURS:
            assert np.abs(mine.astype(int) - others).mean() < 6
        else:
            assert np.array_equal(mine, others), indices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in CASES if case["verdict"] == "accept"], ids=lambda case: case["case"])
def test_field_cases(case: Any, backend: str) -> None:
    """AV1, which this OpenCV has no decoder for, is decoded by PyAV."""
    data = (DATA / "cases" / case["file"]).read_bytes()
    indices = case["reference"]["indices"]
    mine, others = taken(data, indices), taken(data, indices, backend)
    if backend == "opencv" and case["case"] in OTHER_COLOURS:
        assert np.abs(mine.astype(int) - others).mean() < 6
    else:
        assert np.array_equal(mine, others)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 59), min_size=1, max_size=12),
    st.integers(2, 30),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from(BACKENDS),
)
def test_any_choice_from_any_group_structure(
    chosen: list[int], keyint: int, between: int, is_open: bool, backend: str
) -> None:
    params = f"keyint={keyint}:min-keyint=2:bframes={between}:open-gop={int(is_open)}:scenecut=0"
    data = clip(moving_noise(60, 32, 48), options={"x264-params": params})
    assert np.array_equal(taken(data, sorted(chosen)), taken(data, sorted(chosen), backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotation_cap_and_codecs_that_cannot_be_fed(backend: str) -> None:
    turned = clip(gray_levels(6), rotation=90)
    assert taken(turned, [0, 5], backend).shape == (2, 64, 48, 3)
    assert np.array_equal(taken(turned, [0, 5]), taken(turned, [0, 5], backend))
    large, cap = clip(moving_noise(4, 120, 160)), Hints(max_long_side=84)
    assert np.array_equal(taken(large, [0, 3], hints=cap), taken(large, [0, 3], backend, cap))
    plain = clip(moving_noise(4), codec="prores_ks", container="mov", pixels="yuv422p10le")
    assert np.array_equal(taken(plain, [0, 3]), taken(plain, [0, 3], backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_an_edit_list_cuts_off_is_not_shown(backend: str) -> None:
    whole = clip(moving_noise(30), options={"g": "30", "bf": "2"})
    written = io.BytesIO()
    with av.open(io.BytesIO(whole)) as source, av.open(written, "w", format="mp4") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        shift = round(1 / source.streams.video[0].time_base)  # type: ignore[operator]
        for packet in source.demux(video=0):
            if packet.dts is None or packet.pts is None:
                continue
            packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
            out.mux(packet)
    data = written.getvalue()
    assert np.array_equal(taken(data, [0, 10, 19]), taken(data, [0, 10, 19], backend))


@pytest.mark.parametrize("name", ["tail_lost", "bits_flipped"])
def test_the_program_refuses_damage_as_pyav_does(name: str) -> None:
    data = (DATA / "cases" / f"{name}.mp4").read_bytes()
    with pytest.raises(MediaError, match="^video decode error: "):
        taken(data, range(video.inspect(memoryview(data), Hints(), lambda: None).frames), "ffmpeg")


def test_no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MediaError, match="^ffmpeg executable not found$"):
        taken(clip(gray_levels(3)), [0], "ffmpeg")


def test_what_the_program_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No protocol but its two pipes, no format but the one that is fed, no frame but the wanted, nothing of our
    environment, and it is not asked for a file.
    """
    told = tmp_path / "told"
    put_in_path(monkeypatch, made_ffmpeg(tmp_path / "bin", f'(echo "$@"; env) >{told}; exit 3'))
    monkeypatch.setenv("MEDIAGATE_API_KEY", "secret")
    with pytest.raises(MediaError, match=r"could not decode the clip \(exit code 3\)"):
        taken(clip(gray_levels(9)), [1, 4, 4], "ffmpeg")
    words = told.read_text()
    assert words.count("-protocol_whitelist pipe") == 2 and "-format_whitelist nut" in words
    assert " -i pipe:0 " in words and " -frames:v 2 " in words and words.splitlines()[0].endswith(" pipe:1")
    assert "secret" not in words


def test_a_program_that_hangs_is_ended_by_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It neither reads nor writes; the fixture sees that it is gone and reaped."""
    put_in_path(monkeypatch, made_ffmpeg(tmp_path / "bin", "exec sleep 60"))
    data = clip(moving_noise(60, 96, 128), options={"crf": "1"})
    assert len(data) > 1 << 17  # more than a pipe holds
    deadline = time.monotonic() + 1

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        list(video.frames(memoryview(data), lambda *_: [0, 59], Hints(), check, video.OTHERS["ffmpeg"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_stops_in_the_middle_leaves_nothing(backend: str) -> None:
    data = clip(moving_noise(30))
    found = video.frames(memoryview(data), lambda *_: range(30), Hints(), lambda: None, video.OTHERS[backend])
    next(found)
    found.close()  # type: ignore[attr-defined]


def test_size_that_changes() -> None:
    """OpenCV tells of it; the program fits the frames to the first one's size."""
    data = b"".join(
        clip(moving_noise(6, *size), container="h264", options={"bf": "0"}) for size in ((48, 64), (64, 96))
    )
    with pytest.raises(MediaError, match="the size changes from 64x48"):
        taken(data, range(12), "opencv")
    assert taken(data, [0, 5], "ffmpeg").shape == (2, 48, 64, 3)
