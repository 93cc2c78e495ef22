"""The requests of tests/data/engines_real, sent through a gateway and held against a real engine's answers."""

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.launch import Gateway, request
from tools.load.bodies import made_unique

DATA = Path(__file__).resolve().parent.parent / "data" / "engines_real"
TOLERANCE = 1e-4  # of a log-probability; one swapped pair of patches moves it by 0.001 to 0.02
_SPEC = json.loads((DATA / "requests.json").read_text())
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())["cases"]
CASES: tuple[str, ...] = tuple(EXPECTED)
ASKED: tuple[str, ...] = tuple(_SPEC["cases"])


class Differs(Exception):
    """What came is not what was expected; the text says how."""


@dataclasses.dataclass(frozen=True)
class Answer:
    text: str
    logprobs: list[float]
    prompt_tokens: int


def body(case: str, unique: int | None = None) -> dict[str, Any]:
    """The chat request of a case.  `unique` changes the files' hashes and not their pixels: vLLM caches by hash."""
    messages = []
    for message in _SPEC["cases"][case]:
        content = message["content"]
        parts = content if isinstance(content, str) else [_part(part, unique) for part in content]
        messages.append({"role": message["role"], "content": parts})
    return {"model": _SPEC["model"], "messages": messages, **_SPEC["common"]}


def _part(part: dict[str, str], unique: int | None) -> dict[str, Any]:
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    kind = "video" if "video" in part else "image"
    file = (DATA / "media" / part[kind]).read_bytes()
    if unique is not None:
        file = made_unique(file, unique)
    return clip_part(file) if kind == "video" else picture_part(file)


def clip_part(file: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(file).decode()}"}}


def picture_part(file: bytes) -> dict[str, Any]:
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(file).decode()}"}}


def ask(gateway: Gateway, asked: dict[str, Any]) -> Answer:
    """Raises Differs for anything but a whole answer."""
    status, raw = request(gateway.host, gateway.port, "/v1/chat/completions", asked, timeout_s=300)
    if status != 200:
        raise Differs(f"status {status}: {raw[:300].decode(errors='replace')}")
    if not asked.get("stream"):
        answer = json.loads(raw)
        choice = answer["choices"][0]
        rows = (choice.get("logprobs") or {}).get("content") or []
        return Answer(choice["message"]["content"], [row["logprob"] for row in rows], answer["usage"]["prompt_tokens"])
    return _streamed(raw.decode())


def _streamed(raw: str) -> Answer:
    text, logprobs, prompt_tokens = "", [], 0
    for event in _events(raw):
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            logprobs += [row["logprob"] for row in (choice.get("logprobs") or {}).get("content") or []]
    return Answer(text, logprobs, prompt_tokens)


def _events(raw: str) -> Iterator[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise Differs(f"the stream did not end with [DONE]: {raw[-200:]}")
    yield from map(json.loads, lines[:-1])


def prompt_ids(case: str) -> list[int]:
    runs = EXPECTED[case]["prompt_token_ids"]
    return [token for run in runs for token in ([run[0]] * run[1] if isinstance(run, list) else [run])]


def compare_answer(case: str, answer: Answer) -> None:
    """Raises Differs."""
    expected = EXPECTED[case]
    compare_logprobs(answer.logprobs, expected["logprobs"])
    if answer.prompt_tokens != len(prompt_ids(case)):
        raise Differs(f"{answer.prompt_tokens} prompt tokens, expected {len(prompt_ids(case))}")


def compare_logprobs(got: list[float], expected: list[float]) -> None:
    if len(got) != len(expected):
        raise Differs(f"{len(got)} log-probabilities, expected {len(expected)}")
    worst = max(abs(a - b) for a, b in zip(got, expected, strict=True))
    if worst > TOLERANCE:
        raise Differs(f"largest difference of a log-probability {worst:.6f}, allowed {TOLERANCE}")


def compare_record(case: str, record: dict[str, Any], transport: str) -> None:
    """What the worker's journal says of the request: prompt ids, grids, the levels of every pixel.  Raises Differs."""
    if record["input_ids"] != prompt_ids(case):
        raise Differs("other prompt ids")
    pixels = EXPECTED[case]["pixels"]
    if pixels is None:
        if record["media"]:
            raise Differs("media in a text request")
        return
    batches = sorted(record["media"], key=lambda batch: str(batch["modality"]))
    came = [(batch["grid"], batch["shape"], batch["levels_sha256"], batch["transport"]) for batch in batches]
    wanted = [
        (row[f"{kind}_grid_thw"], row["pixel_shape"], row["pixel_sha256"], transport)
        for row in (pixels if isinstance(pixels, list) else [pixels])
        for kind in ("image", "video")
        if f"{kind}_grid_thw" in row
    ]
    if wanted != came:
        raise Differs(f"grid, shape, pixel levels and transport {came}, expected {wanted}")


def as_expected(answer: Answer, record: dict[str, Any]) -> dict[str, Any]:
    """An answer and the worker's record of its request in the form of expected.json, pictures before clips."""
    runs: list[Any] = []
    for token, same in itertools.groupby(record["input_ids"]):
        count = len(list(same))
        runs += [[token, count]] if count > 2 else [token] * count
    pixels = [
        {
            f"{batch['modality']}_grid_thw": batch["grid"],
            "pixel_shape": batch["shape"],
            "pixel_sha256": batch["levels_sha256"],
        }
        for batch in sorted(record["media"], key=lambda batch: str(batch["modality"]))
    ]
    return {"prompt_token_ids": runs, "logprobs": [round(one, 5) for one in answer.logprobs], "pixels": pixels}
