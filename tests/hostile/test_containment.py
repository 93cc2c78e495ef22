"""What a pool process is kept within: no program started, no file opened, its limits, its time, its memory after."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.running import Running, data_url, image_part, picture, running, until
from tests.hostile.bench import ROOT
from tools.fuzzing.bombs import bmp_runs

MIB = 1 << 20
SLOW = Path(__file__).parent.parent / "data" / "hostile" / "uniform_12500.jp2"

WATCHED = """
import json, sys
from tools.fuzzing.formats import seeds
from tools.fuzzing.pictures import FOREIGN, Pictures
from pipeline.models.base import Hints
from pool.process import JobError

pictures = Pictures(bombs=False)
pictures.prepare()
seen = []
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect",
          "socket.getaddrinfo", "ctypes.dlopen", "webbrowser.open")

def watch(event, arguments):
    if event in STARTS:
        seen.append(event)
    elif event == "open" and not str(arguments[0]).startswith("/proc/self/") and ".py" not in str(arguments[0]):
        seen.append(f"open {arguments[0]}")

files = [*FOREIGN, *(data for some in seeds().values() for data in some)]
files += [b"%!PS-Adobe-3.0 EPSF-3.0\\n%%BoundingBox: 0 0 90 90\\n/Times findfont\\nshowpage\\n" * 9]
for file in files[:3] + files:  # a first round of imports is none of the pictures' doing
    if file is files[3]:
        sys.addaudithook(watch)
    try:
        pictures.run(file + bytes(64), Hints(), is_patient=False)
    except JobError:
        pass
print(json.dumps([len(files), seen]))
"""


def test_no_decoder_starts_a_program_or_opens_a_file() -> None:
    """EPS would run Ghostscript, others read a font: every format but the listed ones ends at its first bytes."""
    run = subprocess.run([sys.executable, "-c", WATCHED], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    files, seen = json.loads(run.stdout)
    assert files > 150
    assert seen == []


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running("--pool-job-timeout-secs=1", "--pool-process-memory-bytes=3758096384") as found:
        yield found


def limits(pid: int) -> dict[str, list[str]]:
    rows = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {row[:26].strip(): row[26:].split()[:2] for row in rows}


def test_the_limits_of_a_pool_process(gateway: Running) -> None:
    for name in ("pool0", "pool1"):
        (pid,) = gateway.pids(name)
        found = limits(pid)
        assert found["Max core file size"] == ["0", "0"]
        assert found["Max open files"] == ["256", "256"]
        soft, hard = map(int, found["Max data size"])
        assert soft == hard
        assert 3584 * MIB < soft < 3800 * MIB  # what it has at its start, and the setting
    (front,) = gateway.pids("front")
    soft_files, hard_files = limits(front)["Max open files"]
    assert soft_files == hard_files


@pytest.mark.parametrize("file", [SLOW.read_bytes(), bmp_runs(24 * MIB)], ids=["C", "Python"])
def test_a_decoder_that_does_not_come_back_is_killed(gateway: Running, file: bytes) -> None:
    """Seconds within one call: nobody looks at the clock there.  A deadline of one second, two of grace, and the client
    is told; the process is another one afterwards."""
    before = {name: gateway.pids(name) for name in ("pool0", "pool1")}
    began = time.monotonic()
    answer = gateway.chat([small_part(file)])
    took = time.monotonic() - began
    assert answer.error == (400, "multimodal_processing_failed")
    assert answer.message == "media item 0: Multimodal processing failed: processing took longer than 1 s"
    assert 2.5 < took < 15
    until(lambda: all(len(gateway.pids(name)) == 1 for name in before))
    after = {name: gateway.pids(name) for name in before}
    assert sum(before[name] != after[name] for name in before) == 1
    assert gateway.chat([image_part(picture())]).status == 200
    gateway.given_back()


def test_a_picture_that_takes_more_memory_than_there_is() -> None:
    """Refused in a sentence, by the process that lives on."""
    with running("--pool-process-memory-bytes=134217728") as gateway:
        before = gateway.pids("pool0") + gateway.pids("pool1")
        answer = gateway.chat([giant(8000)])
        assert answer.error == (400, "multimodal_processing_failed")
        assert answer.message.endswith("PNG data asks for more memory than there is")
        assert gateway.chat([image_part(picture())]).status == 200
        assert gateway.pids("pool0") + gateway.pids("pool1") == before


def small_part(file: bytes) -> dict[str, object]:
    """A part whose picture is shrunk before it becomes a tensor."""
    return {"type": "image_url", "image_url": {"url": data_url(file), "max_long_side_pixel": 280}}


def giant(side: int) -> dict[str, object]:
    """A picture of one colour and `side` by `side` pixels."""
    held = io.BytesIO()
    Image.new("RGB", (side, side)).save(held, "PNG", compress_level=1)
    return small_part(held.getvalue())


def private_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def test_a_giant_s_memory_is_given_back() -> None:
    """A hundred megapixels take a gigabyte while they are decoded; the process keeps no more of it than it may."""
    with running("--pool-processes=1", quick=("--pool-ring-bytes=67108864", "--drain-settle-secs=0")) as gateway:
        (pid,) = gateway.pids("pool0")
        gateway.chat([image_part(picture())])
        before = private_bytes(pid)
        assert gateway.chat([giant(10_500)]).status == 200
        assert gateway.pids("pool0") == [pid]
        assert private_bytes(pid) - before < 200 * MIB  # pipeline.allocator.KEPT_BYTES
        peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
        assert int(peak.split()[1]) << 10 > 400 * MIB
