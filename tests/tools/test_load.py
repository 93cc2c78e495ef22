"""The parts of the load test, against a server of the tests, against numpy, and against the kernel's counts."""

import asyncio
import contextlib
import io
import json
import mmap
import os
import resource
import subprocess
import sys
import time
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pybase64
import pytest
from aiohttp import web
from av.video.frame import PictureType
from PIL import Image
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tests.pipeline.clips import clip, moving_noise
from tools.launch import ROOT
from tools.load.bodies import Bodies, Kind, made_unique, media_files, parse_mix
from tools.load.client import Outcome, closed_loop, open_loop
from tools.load.figures import fails, figures, spread, table
from tools.load.photos import encode, photo
from tools.load.processes import Watch, memory, tree, usage
from tools.load.scrape import parse, quantile


class Server:
    """Counts what it gets; `delay_s` before an answer, `status` every third time when it is set."""

    def __init__(self, *, delay_s: float = 0.0, status: int = 200, broken: bool = False) -> None:
        self.delay_s, self.status, self.broken = delay_s, status, broken
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.out = self.most = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "some-model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        self.out += 1
        self.most = max(self.most, self.out)
        await asyncio.sleep(self.delay_s)
        self.out -= 1
        headers = {"Server-Timing": "decode;dur=4.0, total;dur=9.0"}
        if self.status != 200 and len(self.bodies) % 3 == 0:
            return web.json_response({"error": {"message": "full"}}, status=self.status, headers=headers)
        if not body["stream"]:
            return web.json_response({"choices": [{"message": {"content": "ok"}}]}, headers=headers)
        reply = web.StreamResponse(headers=headers | {"content-type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b'data: {"choices": [{"index": 0, "delta": {"content": "ok"}}]}\n\n')
        await asyncio.sleep(0.05)
        if not self.broken:
            await reply.write(b"data: [DONE]\n\n")
        return reply


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    application = web.Application(client_max_size=1 << 28)
    application.router.add_get("/v1/models", server.models)
    application.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def words(*, stream: bool = False) -> Bodies:
    return Bodies("some-model", [], stream=stream, max_tokens=4)


async def test_closed_loop_keeps_its_number_of_clients_and_counts_all() -> None:
    server, outcomes = Server(delay_s=0.01, status=429), []
    async with serving(server) as url:
        await closed_loop(url, words(), clients=4, requests=30, report=outcomes.append)
    assert (len(server.bodies), server.most) == (30, 4)
    assert sorted(o.status for o in outcomes) == [200] * 20 + [429] * 10
    assert all(o.stages == {"decode": 4.0, "total": 9.0} for o in outcomes)
    assert all("full" in o.problem for o in outcomes if o.status == 429)


async def test_first_token_comes_before_the_end_and_a_broken_stream_is_no_success() -> None:
    outcomes: list[Outcome] = []
    async with serving(Server()) as url:
        await closed_loop(url, words(stream=True), clients=2, requests=4, report=outcomes.append)
    assert all(o.status == 200 and o.first_s is not None and o.total_s - o.first_s > 0.03 for o in outcomes)
    broken: list[Outcome] = []
    async with serving(Server(broken=True)) as url:
        await closed_loop(url, words(stream=True), clients=1, requests=1, report=broken.append)
    assert [o.status for o in broken] == [0]


async def test_open_loop_counts_from_the_intended_moment() -> None:
    """While the loop is blocked nothing leaves, yet the wait belongs to the latency of what should have left."""
    outcomes: list[Outcome] = []

    async def stall() -> None:
        await asyncio.sleep(0.1)
        time.sleep(0.5)  # the whole client stands still, as a machine that swaps

    async with serving(Server()) as url, asyncio.TaskGroup() as tasks:
        tasks.create_task(stall())
        tasks.create_task(open_loop(url, words(), rate=100, requests=60, report=outcomes.append))
    assert len(outcomes) == 60
    late = [o for o in outcomes if 0.15 < o.begun_s < 0.35]
    assert late and all(o.total_s > 0.2 for o in late)


async def test_nobody_listening_is_counted_as_failed() -> None:
    outcomes: list[Outcome] = []
    await closed_loop("http://127.0.0.1:9", words(), clients=2, requests=3, report=outcomes.append)
    point = figures(outcomes, 1.0, None)
    assert (point["ok"], point["statuses"], point["total_ms"]) == (0, {"failed": 3}, {})
    assert fails(point, "p99>500") and fails(point, "errors>2") and not fails(point, "errors>3")


def test_percentiles_equal_numpys() -> None:
    values = np.random.default_rng(1).gamma(2, 30, 501)
    rows = spread(values.tolist())
    expected = [values.mean(), *np.percentile(values, [50, 90, 99]), values.max()]
    assert list(rows.values()) == pytest.approx(expected, abs=0.006)


def test_table_and_conditions() -> None:
    outcomes = [Outcome(200, 0.0, 0.1, 0.05, 1000, {"decode": 4.0}), Outcome(503, 0.0, 0.1, None, 1000, {}, "503 down")]
    point = figures(outcomes, 2.0, None)
    text = table(point)
    assert "requests 2  ok 1  503 1" in text and "stage_ms  decode 4.0" in text and "! 503 down" in text
    assert (
        fails(point, "p50>99")
        and not fails(point, "p50 > 101")
        and fails(point, "ttft.max>=50")
        and fails(point, "rps<1")
    )
    for condition in ("p98>1", "p99=1", "queue.p50>1", "nonsense"):
        with pytest.raises(ValueError, match=r"condition|unknown figure"):
            fails(point, condition)


def test_mixes() -> None:
    assert parse_mix("1x1080p") == [Kind(1, 1920, 1080, "jpeg")]
    assert parse_mix("2x640x480:png, 512") == [Kind(2, 640, 480, "png"), Kind(1, 512, 512, "jpeg")]
    (film,) = parse_mix("720p:mp4")
    assert (film, film.modality) == (Kind(1, 1280, 720, "mp4"), "video")
    assert parse_mix("2x30s:wav") == [Kind(2, 0, 0, "wav", 30)] and str(Kind(2, 0, 0, "wav", 30)) == "2x30s:wav"
    for text in ("", "1x", "x1080p", "1x1080p:gif", "30s"):
        with pytest.raises(ValueError, match="cannot read"):
            parse_mix(text)


def test_a_1080p_photo_weighs_what_a_cameras_does() -> None:
    for seed in range(2):
        assert 350_000 <= len(encode(photo(1920, 1080, seed), "jpeg")) <= 500_000


@pytest.mark.parametrize("format_", ["jpeg", "png"])
def test_a_unique_file_has_the_same_pixels(format_: str) -> None:
    file = encode(photo(200, 100, 7), format_)
    one, other = made_unique(file, 1), made_unique(file, 2)
    assert len({file, one, other}) == 3
    pixels = [Image.open(io.BytesIO(data)).convert("RGB").tobytes() for data in (file, one, other)]
    assert pixels[0] == pixels[1] == pixels[2]


def test_a_film_is_a_film() -> None:
    """Ten seconds with groups of pictures that refer to each other both ways, and as long with another hash."""
    one, other = media_files(Kind(1, 160, 96, "mp4"))
    assert one != other
    for file in (one, made_unique(one, 7)):
        with av.open(io.BytesIO(file)) as container:
            frames = [PictureType(frame.pict_type).name for frame in container.decode(video=0)]
        assert len(frames) == 300
        assert {"I", "P", "B"} == set(frames) and frames.count("B") > 150
    body = json.loads(next(Bodies("m", [Kind(1, 160, 96, "mp4")], stream=False, max_tokens=4)).data)
    part = body["messages"][0]["content"][0]
    assert part["type"] == "video_url" and part["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_a_unique_matroska_clip_has_the_same_frames() -> None:
    file = clip(moving_noise(12), container="webm", codec="libvpx-vp9")
    other = made_unique(file, 7)
    assert other != file
    decoded = []
    for data in (file, other):
        with av.open(io.BytesIO(data)) as container:
            decoded.append([frame.to_ndarray().tobytes() for frame in container.decode(video=0)])
    assert len(decoded[0]) == 12 and decoded[0] == decoded[1]


def test_a_sound_is_a_sound() -> None:
    file = media_files(Kind(1, 0, 0, "wav", 2))[0]
    assert made_unique(file, 7) != file
    for one in (file, made_unique(file, 7)):
        with wave.open(io.BytesIO(one)) as opened:
            assert (opened.getframerate(), opened.getnchannels(), opened.getnframes()) == (16_000, 1, 32_000)
            samples = np.frombuffer(opened.readframes(32_000), "<i2")
        assert 1_000 < np.abs(samples.astype(int)).mean() < 20_000
    body = json.loads(next(Bodies("m", [Kind(1, 0, 0, "wav", 2)], stream=False, max_tokens=4)).data)
    part = body["messages"][0]["content"][0]
    assert part["type"] == "audio_url" and part["audio_url"]["url"].startswith("data:audio/wav;base64,")


def test_bodies_repeat_only_as_much_as_asked() -> None:
    def urls(share: float) -> list[str]:
        bodies = Bodies("m", [Kind(2, 64, 48, "jpeg")], stream=True, max_tokens=4, repeat_share=share)
        found = []
        for _, body in zip(range(60), bodies, strict=False):
            read = json.loads(body.data)
            parts = read["messages"][0]["content"]
            assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
            links = [part["image_url"]["url"] for part in parts[:2]]
            files = [pybase64.b64decode(link.partition(",")[2], validate=True) for link in links]
            assert body.media_bytes == sum(map(len, files))
            found += links
        return found

    assert len(set(urls(0.0))) == 120
    assert len(set(urls(1.0))) == 10
    assert 40 < len(set(urls(0.5))) < 90


def test_usage_counts_children_that_have_ended() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE)
    try:
        for _ in range(100):
            if usage(child.pid).cpu_s >= 0.3 and tree(child.pid) == [child.pid]:
                break
            time.sleep(0.05)
        spent = usage(child.pid)
        assert spent.cpu_s >= 0.3 and spent.minor_faults > 500
        assert memory(child.pid).pss > 1 << 20
        assert child.pid in tree(os.getpid())
    finally:
        child.communicate(b"\n")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert spent.cpu_s <= after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime + 0.05
    assert usage(child.pid).cpu_s == 0 and memory(child.pid).held == 0


def test_watch_sees_the_peak() -> None:
    with Watch(os.getpid(), every_s=0.02) as watch:
        with mmap.mmap(-1, 64 << 20) as held:  # not of the heap, which may have had it for long
            for _ in range(64):
                held.write(b"x" * (1 << 20))
            time.sleep(0.1)
        time.sleep(0.1)
    assert watch.peak() - watch.samples[-1].held > 48 << 20
    assert watch.used.minor_faults > 1000


def test_a_segment_counts_once_mapped_or_not(tmp_path: Path) -> None:
    """Two names, one file; 8 MiB of it mapped and touched by this process."""
    before = memory(os.getpid(), str(tmp_path))
    path = tmp_path / f"segment-{os.getpid()}-1"
    path.write_bytes(b"x" * (16 << 20))
    os.link(path, tmp_path / f"published-{os.getpid()}-2")
    (tmp_path / "somebody-elses").write_bytes(b"x" * (16 << 20))
    written = memory(os.getpid(), str(tmp_path))
    assert written.segments - before.segments == 16 << 20
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8 << 20) as view:
        assert len(view[:]) == 8 << 20
        mapped = memory(os.getpid(), str(tmp_path))
    assert mapped.mapped_segments - written.mapped_segments == 8 << 20
    assert abs(mapped.held - written.held) < 12 << 20 and mapped.segments == written.segments
    rollup = Path(f"/proc/{os.getpid()}/smaps_rollup").read_text()
    (pss,) = [int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")]
    assert abs(memory(os.getpid()).pss - pss) < 4 << 20


def test_lag_quantile_by_prometheus_rule() -> None:
    registry = CollectorRegistry()
    lag = Histogram("lag_seconds", "Lag", buckets=(0.001, 0.01, 0.1), registry=registry)
    lag.observe(0.05)
    before = parse(generate_latest(registry).decode(), "lag_seconds")
    for value in [0.0005] * 50 + [0.005] * 49 + [0.5]:
        lag.observe(value)
    after = parse(generate_latest(registry).decode(), "lag_seconds")
    assert quantile(before, after, 0.5) == pytest.approx(0.001)
    assert quantile(before, after, 0.745) == pytest.approx(0.001 + 0.009 * 24.5 / 49)
    assert quantile(before, after, 0.999) == 0.1
    assert quantile(after, after, 0.5) is None


async def command(*arguments: str) -> tuple[int, str, str]:
    script = str(ROOT / "tools" / "loadtest.py")
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, script, *arguments, stdout=pipe, stderr=pipe)
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def test_the_command(tmp_path: Path) -> None:
    written = tmp_path / "load.json"
    server = Server(delay_s=0.01)
    async with serving(server) as url:
        asked = ["--url", url, "--images", "1x512", "--sweep", "1,3", "--requests", "6", "--warm-up", "2", "--stream"]
        code, out, err = await command(*asked, "--json", str(written), "--gateway-pid", str(os.getpid()))
        assert (code, err) == (0, "")
        assert out.count("requests 6  ok 6  no errors") == 2 and "gateway   cpu" in out
        code, _, err = await command("--url", url, "--text-only", "--requests", "3", "--fail-if", "p50>1")
        assert (code, err) == (1, "loadtest: p50>1\n")
        code, _, err = await command("--url", url, "--fail-if", "p77>1")
        assert code == 2 and "p77" in err
        assert server.keys == {None}
        code, out, _ = await command("--url", url, "--text-only", "--rate", "200", "--requests", "10", "--key", "k")
        assert code == 0 and "rate 200 a second" in out
        assert server.keys == {None, "Bearer k"}
    data = json.loads(written.read_text())
    assert [point["concurrency"] for point in data["points"]] == [1, 3]
    assert data["settings"]["model"] == "some-model" and data["about"]["cores"] >= 1
    code, _, err = await command("--url", "http://127.0.0.1:9", "--requests", "1")
    assert code == 2 and "refused" in err.lower()
