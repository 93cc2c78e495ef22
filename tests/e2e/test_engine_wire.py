"""Generate messages of SMG 1.11.0 to every engine, and of 1.13.0 with clips, from outside: a request that gives the
same prompt and parameters is sent through a gateway, and what the engine got is compared field by field.

1.11.0 normalises pixels in another order (`docs/compatibility.md`), so of its tensors size, shape and dtype count, and
everything of 1.13.0's.
"""

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.golden import keep_only
from tests.e2e.origin import DATA
from tests.e2e.running import Answer, Running, data_url, image_part, running, text_part, until
from tests.e2e.test_other_engines import Worker
from tests.pipeline.bundles import unpack_bundle

FOLDER = DATA / "engine_wire"
RECORDS: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "records.json").read_text())
CHAT, AUTO, CLIPS = RECORDS
ONE, TWO = (image_part((FOLDER / name).read_bytes()) for name in ("image_1.png", "image_2.png"))
CLIP = {"type": "video_url", "video_url": {"url": data_url((FOLDER / "clip.mp4").read_bytes(), "video/mp4")}}
SLOW_CLIP = {"type": "video_url", "video_url": {**CLIP["video_url"], "fps": 1}}  # type: ignore[dict-item]
PARAMETERS: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.1, "presence_penalty": 0.2,
    "repetition_penalty": 1.1, "max_tokens": 33, "stop_token_ids": [5], "ignore_eos": True, "logprobs": True,
    "top_logprobs": 3, "seed": 7, "stream": True,
}  # fmt: skip
CONSTRAINED = {**PARAMETERS, "n": 2, "response_format": {"type": "json_object"}}


def said(*content: Any, system: str = "", **fields: Any) -> dict[str, Any]:
    turns = [{"role": "system", "content": system}] if system else []
    only_text = len(content) == 1 and isinstance(content[0], str)
    parts = content[0] if only_text else [text_part(one) if isinstance(one, str) else one for one in content]
    return {"messages": [*turns, {"role": "user", "content": parts}], **fields}


BRIEF = said(ONE, TWO, "AB", system="be brief", max_tokens=20)
PAIR = said(ONE, TWO, "B", max_tokens=20)
STOPPED = said("hi", **CONSTRAINED, stop=["END", "zq xv ww"])
BODIES: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        *(
            body
            for _ in ("vllm", "sglang", "tokenspeed")
            for body in (BRIEF, said("hi", **CONSTRAINED, stop=["END", "STOP"]), said("hi"))
        ),
        said("hi", **PARAMETERS, logit_bias={"10": 1.5}),
        said("hi"),
        PAIR,
        STOPPED,
        said("hi"),
        said(ONE, "x", max_tokens=9),  # by the Messages API
    ],
    AUTO: [body for _ in ("vllm", "tokenspeed", "sglang") for body in (PAIR, STOPPED)],
    CLIPS: [
        said(*content, "B", max_tokens=4)
        for _ in ("vllm", "tokenspeed")
        for content in ((CLIP,), (SLOW_CLIP,), (ONE, CLIP))
    ],
}  # fmt: skip
MESSAGES_API = {(CHAT, 14)}
CASES = [(file, number) for file, records in RECORDS.items() for number in range(len(records))]


def model_of(file: str, runtime: str) -> str:
    """Every engine serves a model of its own; two of them twice, where another transport or width is asked for."""
    return f"{runtime}_auto" if file == AUTO and runtime != "sglang" else runtime


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, Worker]]]:
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    texts = [r["request"]["tokenized"]["original_text"] for records in RECORDS.values() for r in records]
    times = "".join(f"<{tenths / 10:.1f} seconds>" for tenths in range(100))
    keep_only(bundle / "tokenizer.json", [*texts, times, "END", "STOP", "zq xv ww", "Hello world!"])
    folder = tmp_path_factory.mktemp("workers")
    names = ("vllm", "vllm_auto", "sglang", "tokenspeed", "tokenspeed_auto", "trtllm", "mlx")
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in names:
            workers[name] = Worker(folder, name.partition("_")[0], name, bundle)
            stack.callback(workers[name].stop)
        gateway = stack.enter_context(running(engines=()))
        for name, worker in workers.items():
            transport = "auto" if name.endswith("_auto") else "inline"
            spec = {"url": worker.url, "multimodal_tensor_transport": transport, "labels": {}}
            if name == "vllm_auto":
                spec["labels"] = {"multimodal_encoder_dtype": "bfloat16"}
            assert gateway.call("POST", "/workers", spec).status == 202
        until(lambda: all(one["status"] == "ready" for one in gateway.workers()), what="all workers")
        yield gateway, workers


def play(gateway: Running, file: str, number: int, model: str) -> Answer:
    body = {"model": model, **BODIES[file][number]}
    path = "/v1/chat/completions"
    if (file, number) in MESSAGES_API:
        path = "/v1/messages"
        body["messages"][0]["content"][0] = _block(FOLDER / "image_1.png")
    return gateway.call("POST", path, body, {"x-request-id": f"{file}.{number}!"})


def _block(file: Path) -> dict[str, Any]:
    data = base64.b64encode(file.read_bytes()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


@pytest.mark.parametrize(("file", "number"), CASES)
def test_the_engine_gets_what_the_real_gateway_sent(
    bench: tuple[Running, dict[str, Worker]], file: str, number: int
) -> None:
    gateway, workers = bench
    record = RECORDS[file][number]
    model = model_of(file, record["to"])
    answer = play(gateway, file, number, model)
    assert answer.status == 200, answer.body
    (got,) = [
        line["message"]
        for line in workers[model].seen()
        if line["message"]["request_id"].startswith(f"{file}.{number}!")
    ]
    found = list(differences(record["request"], got, old=file != CLIPS))
    if record["to"] == "trtllm" and number == 12:  # SMG drops it
        assert found == ["stop_token_ids: not recorded, sent [5]"]
    else:
        assert found == []


UNLIKE = {"request_id", "name", "owner_id"}
PIXELS = ("pixel_values", "encoder_input")
KEY_LISTS = {"batched_keys", "keep_on_cpu_keys", "flat_keys"}


def differences(wanted: Any, got: Any, *, old: bool, path: str = "") -> Iterator[str]:
    """`old`: of 1.11.0: its pixels are a rounding away from ours, its key lists name keys of other modalities too."""
    name = path.rpartition(".")[2]
    if name in UNLIKE:
        return
    if isinstance(wanted, dict) and "nbytes" in wanted:
        yield from _bytes_differ(wanted, got, path, by_size=_by_size(path, old))
    elif isinstance(wanted, dict) and {"len", "head", "tail"} <= wanted.keys():
        if (len(got), got[: len(wanted["head"])], got[-len(wanted["tail"]) :]) != tuple(wanted.values()):
            yield f"{path}: other ids"
    elif name in KEY_LISTS:
        if not {*got} <= {*wanted} or (not old and {*got} != {*wanted}):
            yield f"{path}: {got}, recorded {wanted}"
    elif isinstance(wanted, dict) and "shm" in wanted and "inline" in got:  # the stand-in has read the segment
        if wanted["shm"]["nbytes"] != got["inline"]["nbytes"]:
            yield f"{path}: another size"
    elif isinstance(wanted, dict):
        for key in wanted.keys() | got.keys():
            at = f"{path}.{key}".lstrip(".")
            if key not in got or key not in wanted:
                yield f"{at}: not sent" if key not in got else f"{at}: not recorded, sent {got[key]}"
            else:
                yield from differences(wanted[key], got[key], old=old, path=at)
    elif isinstance(wanted, list) and wanted and isinstance(wanted[0], dict) and isinstance(got, list):
        if len(wanted) != len(got):
            yield f"{path}: {len(got)} instead of {len(wanted)}"
        for one, other in zip(wanted, got, strict=False):
            yield from differences(one, other, old=old, path=path)
    elif wanted != got and not (name == "mm_hashes" and not old):  # 1.13.0's hashes have a recipe of their own
        yield f"{path}: {got}, recorded {wanted}"


def _by_size(path: str, old: bool) -> bool:
    """Pixels of 1.11.0, and the hash of a clip of 1.13.0."""
    return (old and any(word in path for word in PIXELS)) or (not old and path.endswith("content_hash"))


def _bytes_differ(wanted: dict[str, Any], got: Any, path: str, *, by_size: bool) -> Iterator[str]:
    if "name" in wanted:  # a handle
        if got.get("nbytes") != wanted["nbytes"]:
            yield f"{path}: {got}, recorded {wanted}"
        return
    if "base64" in got:
        data = base64.b64decode(got["base64"])
        got = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if got["nbytes"] != wanted["nbytes"] or (not by_size and got["sha256"][:16] != wanted["sha256"]):
        yield f"{path}: {got}, recorded {wanted}"
