"""Clips: what they hold, which frames come out, and what is refused; field cases, made clips, every saving undone."""

import io
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.media import video, video_frames
from pipeline.media.video_frames import Effort, plan_efforts
from pipeline.media.video_timeline import Note
from pipeline.models.base import Hints, MediaError
from tests.pipeline.clips import clip, gray_levels, moving_noise

DATA = Path(__file__).parent.parent / "data" / "clips"
CASES = json.loads((DATA / "cases.json").read_text())
GOOD = [case for case in CASES if case["verdict"] == "accept"]
PLAIN = Hints()


def always() -> None:
    """There is time."""


def look(data: bytes, hints: Hints = PLAIN) -> video.Clip:
    return video.inspect(memoryview(data), hints, always)


def taken(data: bytes, choose: Sequence[int] | Callable[[int, float], Sequence[int]], hints: Hints = PLAIN) -> Any:
    """The frames as arrays [n, height, width, 3]."""
    chosen = choose if callable(choose) else lambda frames, rate: choose
    return np.stack([np.asarray(one) for one in video.frames(memoryview(data), chosen, hints, always)])


def all_of(data: bytes) -> Any:
    """Every frame, by a loop that saves nothing."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize("case", GOOD, ids=lambda case: str(case["case"]))
def test_field_cases(case: Any) -> None:
    """Size, frames and rate; the reference's frames by their gray levels, the marker in its corner."""
    data = (DATA / "cases" / case["file"]).read_bytes()
    hints = Hints(max_long_side=case["hints"].get("max_long_side_pixel"))
    found = look(data, hints)
    assert ([found.width, found.height], found.frames) == (case["size"], case["total_frames"])
    assert abs(found.rate - case["fps"]) <= 0.04 * case["fps"]  # the last frame of a variable rate has no stated end
    wanted = case["reference"]
    frames = taken(data, wanted["indices"], hints)
    middle = frames[:, found.height // 2 :, found.width // 2 :].mean(axis=(1, 2, 3))
    assert np.abs(middle - wanted["levels"]).max() <= case["level_tolerance"]
    corner = frames[0, :3, :3].astype(int)
    assert (corner[..., 0] - corner[..., 1]).mean() > 40, "the red marker is not in the top left corner"


@pytest.mark.parametrize("case", [case for case in CASES if case["verdict"] == "reject"], ids=lambda case: case["case"])
def test_field_cases_that_are_refused(case: Any) -> None:
    with pytest.raises(MediaError, match="^video decode error: "):
        look((DATA / "cases" / case["file"]).read_bytes())


@pytest.mark.parametrize("name", ["tail_lost", "bits_flipped"])
def test_damage_is_refused_when_a_frame_is_touched_by_it(name: str) -> None:
    """Both open, and both fail where the damage is: never a frame that the file does not hold."""
    data = (DATA / "cases" / f"{name}.mp4").read_bytes()
    with pytest.raises(MediaError, match="^video decode error: "):
        taken(data, lambda frames, rate: range(frames))


def test_frames_without_times_are_counted() -> None:
    data = (DATA / "cases" / "raw_h264.h264").read_bytes()
    found = look(data)
    assert (found.frames, found.rate) == (40, 25.0)
    assert np.array_equal(taken(data, [0, 7, 39]), all_of(data)[[0, 7, 39]])


CODECS: dict[str, dict[str, Any]] = {
    "h264": {"options": {"g": "7", "bf": "3"}},
    "h264 open groups": {"options": {"x264-params": "keyint=8:min-keyint=8:open-gop=1:bframes=3:scenecut=0"}},
    "h264 pyramid": {"options": {"x264-params": "keyint=12:b-pyramid=normal:bframes=5:ref=4"}},
    "h264 intra refresh": {"options": {"x264-params": "intra-refresh=1:keyint=10:bframes=0"}},
    "h264 10 bit": {"options": {"g": "9"}, "pixels": "yuv420p10le"},
    "h264 fragmented": {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "options": {"g": "6"}},
    "h264 transport stream": {"container": "mpegts", "options": {"g": "7", "bf": "2"}},
    "h264 in avi": {"container": "avi", "options": {"bf": "2"}},
    "mpeg4 in avi": {"codec": "mpeg4", "container": "avi", "options": {"g": "6", "bf": "2"}},
    "h264 without times": {"container": "h264", "options": {"bf": "2"}},
    "hevc": {"codec": "libx265", "options": {"x265-params": "keyint=8:bframes=3:log-level=none"}},
    "hevc open groups": {
        "codec": "libx265",
        "options": {"x265-params": "keyint=9:open-gop=1:bframes=4:log-level=none"},
    },
    "vp8": {"codec": "libvpx", "container": "webm", "options": {"g": "9", "auto-alt-ref": "1", "lag-in-frames": "5"}},
    "vp9": {"codec": "libvpx-vp9", "container": "webm", "options": {"g": "9", "lag-in-frames": "5"}},
    "mpeg4": {"codec": "mpeg4", "container": "avi", "options": {"g": "6"}},
    "mpeg4 in mp4": {"codec": "mpeg4", "options": {"g": "6", "bf": "2"}},
    "mpeg2": {"codec": "mpeg2video", "container": "mpegts", "options": {"g": "6", "bf": "2"}, "rate": 25},
    "mjpeg": {"codec": "mjpeg", "container": "avi", "pixels": "yuvj420p"},
    "gif": {"codec": "gif", "container": "gif", "pixels": "rgb8"},
}


@pytest.mark.parametrize("name", CODECS)
def test_frames_are_those_of_full_decoding(name: str) -> None:
    """Whatever is left out on the way: bytes equal, for chosen frames near and far from key frames."""
    try:
        data = clip(moving_noise(40), **CODECS[name])
    except (av.error.FFmpegError, ValueError) as error:
        pytest.skip(f"this build of PyAV does not write it: {error}")
    whole = all_of(data)
    assert look(data).frames == len(whole) == 40
    for indices in ([0, 13, 26, 39], [1, 2, 3], [8, 9], [38], [0, 0, 5, 5, 39], list(range(40)), [7, 15, 16, 30, 31]):
        assert np.array_equal(taken(data, indices), whole[indices]), indices


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 59), min_size=1, max_size=12), st.integers(2, 30), st.integers(0, 4), st.booleans())
def test_any_choice_from_any_group_structure(chosen: list[int], keyint: int, between: int, is_open: bool) -> None:
    params = f"keyint={keyint}:min-keyint=2:bframes={between}:open-gop={int(is_open)}:scenecut=0"
    data = clip(moving_noise(60, 32, 48), options={"x264-params": params})
    indices = sorted(chosen)
    assert np.array_equal(taken(data, indices), all_of(data)[indices])


def test_what_nobody_wants_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten groups only the beginnings of two are decoded."""
    data = clip(moving_noise(100), options={"x264-params": "keyint=10:min-keyint=10:bframes=0:scenecut=0"})
    efforts: list[list[Effort]] = []

    def noted(notes: Sequence[Note], aims: frozenset[int]) -> list[Effort]:
        efforts.append(plan_efforts(notes, aims))
        return efforts[-1]

    monkeypatch.setattr(video_frames, "plan_efforts", noted)
    assert np.array_equal(taken(data, [3, 51]), all_of(data)[[3, 51]])
    (plan,) = efforts
    assert [at for at, effort in enumerate(plan) if effort is not Effort.NONE] == [0, 1, 2, 3, 50, 51]
    assert [at for at, effort in enumerate(plan) if effort is Effort.FULL] == [3, 51]


def test_leading_pictures_need_the_group_before() -> None:
    """I0 P3 B1 B2 | I6 B4 B5 P9: to show 4, the group before is decoded to its end; to show 6 it is not."""
    notes = [Note(time, time in (0, 6)) for time in (0, 3, 1, 2, 6, 4, 5, 9)]
    none, out, referred, full = Effort.NONE, Effort.LEFT_OUT, Effort.IF_REFERRED_TO, Effort.FULL
    assert plan_efforts(notes, frozenset({4})) == [referred] * 4 + [referred, full, none, none]
    assert plan_efforts(notes, frozenset({6})) == [none] * 4 + [full, none, none, none]
    assert plan_efforts(notes, frozenset({0, 9})) == [full, none, none, none, referred, out, out, full]


@pytest.mark.parametrize("name", ["h264 open groups", "hevc open groups", "mpeg2", "h264 intra refresh"])
def test_open_groups_are_not_decoded_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may begin with one: what refers to the run before is left out, and the first attempt brings every frame."""
    data = clip(moving_noise(60), **CODECS[name])
    whole = all_of(data)
    once = video._frames

    def only_once(*given: Any, thrifty: bool = True) -> Any:
        assert thrifty
        return once(*given, thrifty=thrifty)

    monkeypatch.setattr(video, "_frames", only_once)
    for indices in ([0, 30, 59], [2, 41], [17, 18, 50]):
        assert np.array_equal(taken(data, indices), whole[indices])


def test_a_clip_whose_frames_do_not_appear_is_decoded_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if skipping had cost a wanted frame: what was handed out stays, the rest comes from the full run."""
    data = clip(moving_noise(30), options={"g": "5", "bf": "0"})

    def too_little(notes: Sequence[Note], aims: frozenset[int]) -> list[Effort]:
        return [Effort.FULL if at < 12 else Effort.NONE for at in range(len(notes))]

    monkeypatch.setattr(video_frames, "plan_efforts", too_little)
    assert np.array_equal(taken(data, [2, 8, 8, 20, 29]), all_of(data)[[2, 8, 8, 20, 29]])


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_rotation_is_applied(rotation: int) -> None:
    data = clip(gray_levels(6), rotation=rotation)
    found = look(data)
    assert (found.height, found.width) == ((48, 64) if rotation == 180 else (64, 48))
    assert (found.stored_height, found.stored_width) == (48, 64)
    turned = np.rot90(all_of(data), rotation // 90, axes=(1, 2))
    assert np.array_equal(taken(data, range(6)), turned)
    assert look(data, Hints(max_long_side=32)).height == (24 if rotation == 180 else 32)


def test_variable_rate_is_the_average_over_the_clip() -> None:
    times = [*range(0, 100, 4), *range(100, 500, 25)]
    data = clip(gray_levels(len(times)), times=times, rate=25)
    found = look(data)
    assert found.frames == len(times) == 41
    assert found.rate == pytest.approx(41 / 5.0, rel=0.06)


def test_a_header_that_contradicts_the_times_is_not_believed() -> None:
    """The pauses grow and frames are stored out of order: the writer's sum of them ends before the last frame."""
    times = [number * number for number in range(40)]
    data = clip(moving_noise(len(times)), times=times)
    with av.open(io.BytesIO(data)) as container:
        stated = container.streams.video[0].average_rate
    assert stated is not None and float(stated) == pytest.approx(40 / 13.83)
    assert 40 / 16 <= look(data).rate <= 40 / 15.21  # the last frame comes after 15.21 seconds


def test_one_frame_is_a_clip() -> None:
    data = clip(gray_levels(1), rate=25)
    assert (look(data).frames, look(data).rate) == (1, 25.0)
    assert len(taken(data, [0, 0, 0, 0])) == 4


def test_what_an_edit_list_cuts_off_is_not_there() -> None:
    """The first second is decoded for what refers to it, and not shown."""
    whole = clip(moving_noise(30), options={"g": "30", "bf": "0"})
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
    found = look(data)
    assert found.frames == 20 == len(all_of(data))
    assert np.array_equal(taken(data, [0, 10, 19]), all_of(whole)[[10, 20, 29]])


def test_long_side_cap() -> None:
    data = clip(moving_noise(4, 120, 160))
    found = look(data, Hints(max_long_side=84))
    assert (found.height, found.width, found.stored_height) == (63, 84, 120)
    assert taken(data, [0, 3], Hints(max_long_side=84)).shape == (2, 63, 84, 3)
    assert look(data, Hints(max_long_side=168)).width == 160


def test_a_picture_with_a_sound_is_no_clip() -> None:
    """Cover art is a picture track too."""
    cover = io.BytesIO()
    Image.new("RGB", (32, 32)).save(cover, "JPEG")
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as out:
        sound: Any = out.add_stream("aac", rate=16000)
        art: Any = out.add_stream("mjpeg")
        art.width, art.height, art.pix_fmt = 32, 32, "yuvj420p"
        art.disposition = av.stream.Disposition.attached_pic
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        samples.sample_rate = 16000
        packet = av.Packet(cover.getvalue())
        packet.stream, packet.pts, packet.dts = art, 0, 0
        packet.time_base = Fraction(1, 25)
        out.mux(packet)
        out.mux(sound.encode(samples))
        out.mux(sound.encode(None))
    with pytest.raises(MediaError, match="the file has no picture track"):
        look(written.getvalue())


def test_frames_are_of_the_track_that_was_looked_at() -> None:
    """Of several picture tracks the one marked as default is taken, for size, times and frames alike."""
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as out:
        tracks: list[Any] = []
        for height, width in ((48, 64), (96, 128)):
            track: Any = out.add_stream("libx264", rate=10)
            track.height, track.width, track.pix_fmt = height, width, "yuv420p"
            tracks.append(track)
        tracks[0].disposition, tracks[1].disposition = av.stream.Disposition(0), av.stream.Disposition.default
        for small, large in zip(gray_levels(12), moving_noise(12, 96, 128), strict=True):
            for track, pixels in zip(tracks, (small, large), strict=True):
                out.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for track in tracks:
            out.mux(track.encode(None))
    data = written.getvalue()
    found = look(data)
    assert (found.height, found.width, found.frames) == (96, 128, 12)
    assert taken(data, [0, 5, 11]).shape == (3, 96, 128, 3)


FOREIGN = {
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n",
    "concat script": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(64),
    "manifest": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period/></MPD>',
    "session": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nm=video 9 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n",
    "text": b"no clip at all, " * 200,
    "nothing": b"",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_refers_to_other_files_is_not_opened(name: str) -> None:
    with pytest.raises(MediaError, match="^video decode error: "):
        look(FOREIGN[name])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "JPEG2000"])
def test_a_picture_is_told_that_it_is_no_clip(kind: str) -> None:
    written = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(written, kind)
    with pytest.raises(MediaError) as refused:
        look(written.getvalue())
    assert str(refused.value) == f"video decode error: this is a {kind} picture, not a clip"


def test_a_page_of_the_host_is_told_so() -> None:
    """What comes for a link that has expired."""
    with pytest.raises(MediaError, match="^video decode error: this is an HTML page$"):
        look(b"\n<!DOCTYPE html><html><title>Sign in</title></html>")


def test_a_format_that_is_not_read_is_told_so() -> None:
    sound = b"RIFF\x24\x08\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\0\x08\0\0" + bytes(
        2048
    )
    with pytest.raises(MediaError, match="this is no clip, or one of a format that is not read"):
        look(sound)


def test_every_cut_and_flip_is_an_answer() -> None:
    """Whatever is missing or wrong: frames of the right size, or a refusal."""
    data = clip(moving_noise(12), options={"g": "4"})
    noise = np.random.default_rng(5)
    outcomes = set()
    for at in noise.integers(0, len(data), 60):
        for broken in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
            try:
                outcomes.add(taken(broken, lambda frames, rate: sorted({0, frames // 2, frames - 1})).shape[-1])
            except MediaError as error:
                assert len(str(error)) < 400
                outcomes.add("refused")
    assert "refused" in outcomes


def test_size_that_changes_is_refused() -> None:
    """Two streams one behind the other, as a broadcast may switch."""
    data = b"".join(
        clip(moving_noise(6, *size), container="h264", options={"bf": "0"}) for size in ((48, 64), (64, 96))
    )
    with pytest.raises(MediaError, match="the size changes from 64x48 to 96x64"):
        taken(data, lambda frames, rate: range(frames))


def test_more_pixels_than_the_limit_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_PIXELS", 48 * 64 - 1)
    with pytest.raises(MediaError, match="64x48 are 3072 pixels, above the limit of 3071"):
        look(clip(gray_levels(3)))


def test_the_clock_is_asked_between_packets() -> None:
    data = clip(gray_levels(20))
    asked = 0

    def until_then() -> None:
        nonlocal asked
        asked += 1
        if asked > 30:
            raise TimeoutError

    video.inspect(memoryview(data), PLAIN, until_then)
    with pytest.raises(TimeoutError):
        list(video.frames(memoryview(data), lambda frames, rate: range(frames), PLAIN, until_then))


def test_only_one_thread_decodes() -> None:
    with video._opened(memoryview(clip(gray_levels(3)))) as (_, stream):
        assert stream.codec_context.thread_count == 1
