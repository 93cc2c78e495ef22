"""The checks of `tools/test --engines`: each a function that raises `Differs` when something is not as it has to be."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.engines_real.answers import (
    CASES,
    Answer,
    Differs,
    ask,
    body,
    compare_answer,
    compare_logprobs,
    compare_record,
    picture_part,
    prompt_ids,
)
from tests.engines_real.tally import Tally
from tools.launch import Gateway, request
from tools.load.bodies import made_unique

StartEngine = Callable[..., contextlib.AbstractContextManager[int]]
UNIQUE = itertools.count(1)
_LEAST_PIXELS = 1 << 20  # bytes; the cases of a run send some megabytes


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the checks run on.  `journal`: where the engine says what arrived; None for one that does not say (vLLM)."""

    command: list[str]
    quiet: list[str]
    start_engine: StartEngine  # keyword arguments of the engine -> port
    journal: Path | None
    folder: Path

    @contextlib.contextmanager
    def gateway(
        self, engine_port: int, transport: str, model: str = "tiny-qwen3vl", *, processing: str = "auto"
    ) -> Iterator[Gateway]:
        flags = ["--worker-urls", f"grpc://127.0.0.1:{engine_port}", "--multimodal-tensor-transport", transport]
        flags += [] if processing == "auto" else ["--mm-processing", processing]
        started = Gateway(self.command, [*flags, *self.quiet], log=self.folder / "gateway.log")
        try:
            ready = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
            started.wait_until("/v1/chat/completions", ready, wait_s=120)
            yield started
        finally:
            started.stop()

    def records(self) -> list[dict[str, Any]]:
        if self.journal is None or not self.journal.exists():
            return []
        return [json.loads(line) for line in self.journal.read_text().splitlines()]


def _case(case: str, bench: Bench, gateway: Gateway, transport: str) -> None:
    before = len(bench.records())
    compare_answer(case, ask(gateway, body(case, next(UNIQUE))))
    if bench.journal is not None:
        (record,) = bench.records()[before:]
        compare_record(case, record, transport)


def streamed_as_whole(bench: Bench, gateway: Gateway, transport: str) -> None:
    whole = ask(gateway, body("image_shapes", next(UNIQUE)))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = ask(gateway, body("image_shapes", next(UNIQUE)) | options)
    compare_answer("image_shapes", streamed)
    if streamed.text != whole.text:
        raise Differs(f"streamed {streamed.text!r}, whole {whole.text!r}")


def order_matters(bench: Bench, gateway: Gateway, transport: str) -> None:
    """Shows that the comparison can fail: with its pictures swapped the case does not meet its answer."""
    asked = body("two_images", next(UNIQUE))
    content = asked["messages"][1]["content"]
    content[0], content[1] = content[1], content[0]
    swapped = ask(gateway, asked)
    if swapped.prompt_tokens != len(prompt_ids("two_images")):
        raise Differs("swapped pictures give another number of tokens")
    try:
        compare_answer("two_images", swapped)
    except Differs:
        return
    raise Differs("swapped pictures give the same log-probabilities")


def _question(seed: int, unique: int) -> dict[str, Any]:
    """A request with a picture of its own; `unique` gives the same picture another hash."""
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels, "RGB").resize((480, 384), Image.Resampling.NEAREST).save(held, "PNG")
    content = [picture_part(made_unique(held.getvalue(), unique)), {"type": "text", "text": "What is in this picture?"}]
    common = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    return {"model": "tiny-qwen3vl", "messages": [{"role": "user", "content": content}], **common}


def _at_once(bench: Bench, gateway: Gateway, transport: str, count: int = 24, clients: int = 8) -> None:
    """Many pictures through few segments: each answer is the one its picture gets alone, inline, under another hash."""
    seeds = range(1000 * next(UNIQUE), 1000 * next(UNIQUE))[:count]
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        together: list[Answer] = list(pool.map(lambda seed: ask(gateway, _question(seed, 1)), seeds))
    with bench.gateway(gateway_worker_port(gateway), "inline") as other:
        alone = [ask(other, _question(seed, 2)) for seed in seeds]
    if len({tuple(answer.logprobs) for answer in alone}) < count:
        raise Differs("two different pictures get the same answer: the check would not see a mix-up")
    for number, (one, other_one) in enumerate(zip(together, alone, strict=True)):
        try:
            compare_logprobs(one.logprobs, other_one.logprobs)
        except Differs as error:
            raise Differs(f"picture {number} of {count}: {error}") from None


def gateway_worker_port(gateway: Gateway) -> int:
    arguments = list(gateway.process.args)  # type: ignore[arg-type]
    return int(str(arguments[arguments.index("--worker-urls") + 1]).rpartition(":")[2])


def _by_transport(bench: Bench, gateway: Gateway, transport: str) -> None:
    """Pixels went the way that was asked for: a segment that cannot be written would be replaced in silence."""
    _, text = request(gateway.host, gateway.metrics_port, "/metrics")
    found = re.findall(r'^smg_mm_tensor_bytes_total\{path="(\w+)",.*\} (\S+)$', text.decode(), re.MULTILINE)
    by_path = {path: int(float(count)) for path, count in found}
    pixels = by_path.pop(transport, 0)
    if pixels < _LEAST_PIXELS or sum(by_path.values()) > pixels // 100:  # side tensors are always inline
        raise Differs(f"{pixels} bytes of tensors by {transport}, else {by_path}")


def _nothing_left(bench: Bench, gateway: Gateway, transport: str) -> None:
    """Published names are consumed; the gateway's own masters go with the gateway."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith(f"smg-tokenspeed-{gateway.pid}-")]
    if names:
        raise Differs(f"{len(names)} segments left, such as {names[0]}")


Check = Callable[[Bench, Gateway, str], None]
CHECKS: dict[str, Check] = {case: functools.partial(_case, case) for case in CASES} | {
    "image_shapes streamed": streamed_as_whole,
    "order of two pictures": order_matters,
    "distinct pictures at once": _at_once,
    "tensors by that transport": _by_transport,
    "no segment left": _nothing_left,
}


def on_engine(
    tally: Tally, bench: Bench, group: str, checks: Mapping[str, Check], transport: str, **how: object
) -> None:
    """The wanted ones of these checks, on an engine of their own that is started with `how`."""
    wanted = tally.chosen(group, checks)
    if not wanted:
        return
    with tally.group(group), bench.start_engine(**how) as port, bench.gateway(port, transport) as started:
        for name, check in wanted.items():
            tally.run(name, functools.partial(check, bench, started, transport))


def by_tensors(tally: Tally, bench: Bench, label: str, **how: object) -> None:
    """Every case by raw and float pixels, inline and by segments."""
    for pixels, transport in itertools.product(("raw", "float"), ("inline", "shm")):
        floats = pixels == "float"
        on_engine(tally, bench, f"{label} {pixels} {transport}", CHECKS, transport, float_pixels=floats, **how)
