"""The sounds of the reference vectors, and a family's sounds as the gateway serves them."""

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines.base import ITEM_BYTES, Form, Modality
from pipeline.media.audio import Sound
from pipeline.models.base import Measured, Source
from pipeline.prompt import Expanded, check_anchors, expand
from tests.models.served import FLOAT32, Served

DATA = Path(__file__).parent.parent / "data" / "sounds"
SOUND = Modality.AUDIO
CASES: list[Any] = json.loads((DATA / "cases.json").read_text())


@functools.cache
def features() -> Any:
    """What the reference made of each case: `whisper_NAME`, `dmel_NAME`; checked against its own digests."""
    found = dict(np.load(DATA / "features.npz"))
    for case in CASES:
        for kind in ("whisper", "dmel"):
            tensor = found[f"{kind}_{case['name']}"].astype(np.float32)
            assert hashlib.sha256(tensor.tobytes()).hexdigest() == case[kind]["sha256"]
    return found


def drawn(case: Any) -> Sound:
    """A sweep with noise, exact in 16-bit PCM; "quiet" is 54 dB down."""
    noise = np.random.default_rng(case["seed"]).standard_normal(case["samples"])
    time = np.arange(case["samples"], dtype=np.float64) / 16000.0
    wave = 0.4 * np.sin(2 * np.pi * (200 + 900 * time) * time) + 0.02 * noise
    if case["name"] == "quiet":
        wave *= 0.002
    samples = (np.round(np.clip(wave, -1, 1) * 32767) / 32768.0).astype(np.float32)
    assert hashlib.sha256(samples.tobytes()).hexdigest() == case["float32_sha256"]
    return Sound(samples, 16_000)


def measure(served: Served, sound: Sound) -> Measured:
    source = Source(0, 0, frames=len(sound.samples), rate=float(sound.rate))
    return served.family.measure(served.settings, SOUND, source)


def encode(served: Served, sound: Sound, form: Form = FLOAT32, measured: Measured | None = None) -> np.ndarray:
    """The flat bytes of the tensor; bytes nobody wrote would be 0xA5."""
    measured = measured or measure(served, sound)
    out = np.full(math.prod(measured.primary_shape) * ITEM_BYTES[form.dtype], 0xA5, np.uint8)
    served.family.encode(served.settings, SOUND, sound, measured, form, out)
    return out


def prompt(served: Served, content: Sequence[str | Sound]) -> tuple[str, list[int], Expanded]:
    """One user turn, texts and sounds as written: the rendered text, its ids, and the ids with every anchor
    replaced.
    """
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "audio"} for part in content]
    sounds = [part for part in content if not isinstance(part, str)]
    text = served.bundle.template.render([{"role": "user", "content": parts}], served.anchors)
    ids = list(served.vocabulary.encode(text))
    check_anchors(ids, {SOUND: (served.anchors[SOUND], len(sounds))})
    replacements = [
        served.family.replacement(served.config, served.vocabulary, SOUND, measure(served, sound)) for sound in sounds
    ]
    return text, ids, expand(ids, [served.anchors[SOUND].token_id] * len(sounds), replacements)


def apart(name: str, ours: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference, printed for the reader of the output."""
    found = float(np.abs(ours.astype(np.float64) - reference).max())
    print(f"{name}: at most {found:.2e} apart")
    return found
