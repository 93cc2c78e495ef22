"""Many clients at once, of every kind, for a while; meanwhile the memory of the whole process tree is looked at.

Clients send pictures small, large and broken, texts and bodies that are none, and they leave at any moment: before
their body is all there, before the answer, in the middle of a stream.  `soak` tells what was answered and the most that
was held, share by share, for `pipeline.ceiling` to be compared with.
"""

import base64
import collections
import contextlib
import io
import json
import random
import socket
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from tools.fuzzing import bodies
from tools.fuzzing.formats import seeds
from tools.fuzzing.live import Site, judged
from tools.fuzzing.mutate import spoil
from tools.fuzzing.rig import Wrong
from tools.fuzzing.served import MODEL
from tools.load.processes import memory, tree

CHAT = "/v1/chat/completions"
PATIENCE_S = 60  # longer than the gateway's own with a request


@dataclass(frozen=True)
class Sample:
    """Bytes at one moment.  `held`: the whole tree and its files in /dev/shm, each page once; `pools`: the private
    memory of the pool process that has most."""

    held: int
    frontend: int
    pools: int
    segments: int


def look(site: Site) -> Sample:
    now = memory(site.gateway.pid)
    others = [pid for pid in tree(site.gateway.pid) if pid not in (site.front, site.gateway.pid)]
    pools = max(map(_private, others), default=0)
    return Sample(now.held, _private(site.front), pools, now.segments)


@dataclass(frozen=True)
class Window:
    """Means over a part of the time, in bytes."""

    held: float
    frontend: float


def _private(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


@dataclass(frozen=True)
class Peaks:
    """The most that was seen of each."""

    held: int
    frontend: int
    pools: int
    segments: int


@dataclass
class Report:
    answers: collections.Counter[str] = field(default_factory=collections.Counter)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    request_bytes: float = 0.0  # of tensors, of a request that an engine was sent

    @property
    def peaks(self) -> Peaks:
        most = {name: max(getattr(one, name) for one in self.samples) for name in Peaks.__dataclass_fields__}
        return Peaks(**most)

    def windows(self, count: int) -> list[Window]:
        """The time in so many parts of one length."""
        size = max(1, len(self.samples) // count)
        parts = [self.samples[at : at + size] for at in range(0, size * count, size)]
        return [
            Window(statistics.fmean(one.held for one in part), statistics.fmean(one.frontend for one in part))
            for part in parts
            if part
        ]


def growth(windows: list[Window]) -> float:
    """How much the most of the windows is above the least, as a share."""
    held = [window.held for window in windows]
    return max(held) / min(held) - 1


def soak(site: Site, *, seconds: float, clients: int, seed: int, pause_s: float = 0.1) -> Report:
    """Let `clients` threads loose for `seconds`, wait until nothing is held (Wrong when that does not come)."""
    report = Report()
    files = _files()  # takes seconds on a busy machine
    deadline = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_client, args=(site, report, files, random.Random(seed + number), deadline))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    while time.monotonic() < deadline:
        report.samples.append(look(site))
        time.sleep(pause_s)
    for thread in threads:
        thread.join()
    site.aftermath(seconds=20)
    report.request_bytes = _sum(site, "smg_mm_tensor_bytes_total") / max(1, _sum(site, "smg_mm_processing_total"))
    return report


def _sum(site: Site, name: str) -> float:
    return sum(value for sample, value in site.gauges().items() if sample.startswith(name))


def _files() -> dict[str, list[bytes]]:
    """Pictures by kind."""
    small = [data for some in seeds().values() for data in some]
    large = []
    for height, width in ((1080, 1920), (3000, 2000), (400, 6000)):
        noise = np.random.default_rng(height).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        for kind in ("JPEG", "WEBP"):
            held = io.BytesIO()
            Image.fromarray(noise).resize((width, height)).save(held, kind)
            large.append(held.getvalue())
    plain = io.BytesIO()
    Image.new("RGB", (9000, 9000)).save(plain, "PNG", compress_level=1)
    return {"small": small, "large": large, "giant": [plain.getvalue()]}


def _client(site: Site, report: Report, files: dict[str, list[bytes]], chance: random.Random, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            word = _one(site, files, chance)
        except Wrong as error:
            report.wrong.append(str(error))
            word = "wrong"
        except OSError:
            word = "connection lost"
        report.answers[word] += 1


def _one(site: Site, files: dict[str, list[bytes]], chance: random.Random) -> str:
    pick = chance.random()
    if pick < 0.1:
        return judged(*site.ask("POST", CHAT, bodies.make(chance), timeout_s=PATIENCE_S))
    if pick < 0.13:
        return judged(*site.ask("POST", CHAT, b"[" * chance.choice((1000, 3_000_000)), timeout_s=PATIENCE_S))
    kinds = ["small"] * 6 + ["large"] * 3 + (["giant"] if chance.random() < 0.1 else [])
    chosen = [chance.choice(files[chance.choice(kinds)]) for _ in range(chance.choice((1, 1, 1, 2, 4)))]
    if chance.random() < 0.15:
        chosen[0] = spoil(chance, chosen[0])
    is_stream = chance.random() < 0.4
    body = _question(chosen, is_stream, chance.choice((1, 8, 60)), chance.choice((None, None, 280)))
    if chance.random() < 0.4:
        return _leave(site, body, chance)
    status, answer = site.ask("POST", CHAT, body, timeout_s=PATIENCE_S)
    return "200" if status == 200 else judged(status, answer)


def _question(chosen: list[bytes], is_stream: bool, tokens: int, cap: int | None) -> bytes:
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in chosen]
    content = [{"type": "image_url", "image_url": {"url": url, "max_long_side_pixel": cap}} for url in urls]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    return json.dumps({**asked, "stream": is_stream}).encode()


def _leave(site: Site, body: bytes, chance: random.Random) -> str:
    """Be gone after a part of the body, soon after all of it, or after the first bytes of the answer."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(site.address, timeout=30) as client:
        kind = chance.randrange(3)
        client.sendall(head.encode() + (body[: chance.randrange(len(body))] if kind == 0 else body))
        if kind == 2:
            client.recv(1)
        time.sleep(chance.choice((0.0, 0.005, 0.05)))
        if chance.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return ("left in the body", "left after it", "left in the answer")[kind]
