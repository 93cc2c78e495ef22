"""Requests while pool processes are killed: none may be lost, and the rest of the machine should hardly notice."""

import base64
import io
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tools.fuzzing.live import Site, judged
from tools.fuzzing.served import MODEL
from tools.load.processes import tree

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Round:
    """`answers` by word ("200", or status and code), requests a second, processes killed."""

    answers: Counter[str]
    rate: float
    kills: int

    @property
    def lost(self) -> int:
        return self.answers.total() - self.answers["200"]


def questions(count: int, height: int = 720, width: int = 1280) -> list[bytes]:
    """Bodies with one JPEG each, all different, so that nobody is given what was made for another."""
    ramp = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 40, height)[:, None, None]
    made = []
    for number in range(count):
        pixels = np.broadcast_to(ramp, (height, width, 3)).astype(np.uint8)
        pixels[:64, :64] = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        held = io.BytesIO()
        Image.fromarray(pixels).save(held, "JPEG", quality=85)
        url = f"data:image/jpeg;base64,{base64.b64encode(held.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        asked = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        made.append(json.dumps(asked).encode())
    return made


def ask_all(
    site: Site,
    bodies: list[bytes],
    requests: int,
    concurrency: int,
    *,
    kill_every_s: float = 0.0,
    kill_after: int = 0,
) -> Round:
    """`requests` in all, `concurrency` at once.

    Meanwhile one pool process is killed every `kill_every_s` (0: none), when there were `kill_after` answers since.
    """
    answers: Counter[str] = Counter()
    over = threading.Event()
    kills: list[int] = []
    killer = threading.Thread(target=_kill, args=(site, kill_every_s, kill_after, answers, over, kills))
    with ThreadPoolExecutor(concurrency) as clients:
        began = time.monotonic()
        if kill_every_s:
            killer.start()
        for word in clients.map(lambda number: _one(site, bodies[number % len(bodies)]), range(requests)):
            answers[word] += 1
        took = time.monotonic() - began
    over.set()
    if kill_every_s:
        killer.join()
    return Round(answers, requests / took, len(kills))


def _one(site: Site, body: bytes) -> str:
    try:
        return judged(*site.ask("POST", CHAT, body, timeout_s=60))
    except OSError as error:
        return f"connection lost: {error!r}"


def _kill(
    site: Site, every_s: float, after: int, answers: Counter[str], over: threading.Event, kills: list[int]
) -> None:
    chance = random.Random(1)
    seen = 0
    while not over.wait(every_s):
        if answers.total() - seen < after:
            continue
        seen = answers.total()
        pool = [pid for pid in tree(site.gateway.pid) if pid not in (site.gateway.pid, site.front)]
        if pool:
            with suppress(ProcessLookupError):
                os.kill(victim := chance.choice(pool), signal.SIGKILL)
                kills.append(victim)
