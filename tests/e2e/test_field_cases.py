"""Trouble that users of such gateways have reported in public, against one gateway and an engine stand-in.

`tests/data/field_cases` has a request for each and what a right gateway does with it: status and code, or what the
engine must see: prompt, grids, placeholder runs, hashes, and the pixels that the model's reference processor gives for
the picture as upstream Pillow loads it.  Media come from `tests/e2e/origin.py`.
"""

import base64
import concurrent.futures
import contextlib
import hashlib
import io
import json
import re
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from PIL import Image, ImageOps

from tests.e2e.origin import DATA, MediaHost, media_host
from tests.e2e.running import MODEL, Answer, Running, data_url, running
from tests.pipeline.bundles import unpack_bundle
from tools.demo.reference import pixel_values

Case = dict[str, Any]

CASES: list[Case] = json.loads((DATA / "field_cases" / "cases.json").read_text())
BY_NAME = {case["name"]: case for case in CASES}
CHAT = "/v1/chat/completions"
CAPPED = [case for case in CASES if case.get("env")]
SLOW = ["never_answers", "slow_loris", "slow_but_in_time"]
# what this version refuses in another way than decided, until the feature is there
LATER: dict[str, tuple[int, str]] = {}
ORDINARY = [case for case in CASES if not case.get("env") and case["name"] not in SLOW]

# Behaviours of media hosts that no report was about, and that a fetcher meets every day.
PNG = "field_cases/media/chunked_cut.png"
HOSTS: dict[str, tuple[dict[str, Any], int]] = {
    "chunked": ({"/a.png": {"file": PNG, "mode": "chunked"}}, 200),
    "until_close": ({"/a.png": {"file": PNG, "mode": "until_close"}}, 200),
    "no_type": ({"/a.png": {"file": PNG, "headers": {}}}, 200),
    "html_type": ({"/a.png": {"file": PNG, "headers": {"Content-Type": "text/html"}}}, 200),
    "redirects": (
        {
            "/a.png": {"status": 302, "headers": {"Location": "{{origin}}/b.png"}},
            "/b.png": {"status": 307, "headers": {"Location": "c.png"}},
            "/c.png": {"file": PNG},
        },
        200,
    ),
    "redirect_round": ({"/a.png": {"status": 302, "headers": {"Location": "{{origin}}/a.png"}}}, 400),
    "redirect_to_file": ({"/a.png": {"status": 302, "headers": {"Location": "file:///etc/passwd"}}}, 400),
    "redirect_to_metadata": (
        {"/a.png": {"status": 302, "headers": {"Location": "http://169.254.169.254/latest/meta-data"}}},
        400,
    ),
    "redirect_nowhere": ({"/a.png": {"status": 302}}, 400),
    "no_content": ({"/a.png": {"status": 204}}, 400),
    "empty": ({"/a.png": {"body": ""}}, 400),
    "server_error": ({"/a.png": {"status": 503, "file": PNG}}, 400),
    "gzip": ({"/a.png": {"file": PNG, "mode": "gzip"}}, 400),
    "gzip_bomb": ({"/a.png": {"mode": "gzip_bomb", "bytes": 200_000_000}}, 400),
}


class Stage:
    """One gateway, its engine and the media host; `play` sends a case and gives answer and what the engine saw."""

    def __init__(self, gateway: Running, host: MediaHost, model: str) -> None:
        self.gateway = gateway
        self.host = host
        self.model = model

    def play(self, case: Case) -> Answer:
        base = self.host.serve(case.get("origin", {}), "/" + case["name"])
        body = {"model": self.model, **filled(case["body"], base)}
        return self.gateway.call("POST", case["path"], body, {"X-Request-Id": case["name"]})

    def seen(self, case: Case) -> list[dict[str, Any]]:
        prefix = case["name"] + "-"
        own = re.compile(re.escape(prefix) + r"[0-9a-f]{8}-[0-9a-f-]{27}$")  # the gateway appends a UUID per attempt
        return [record for record in self.gateway.seen() if own.match(record.get("request_id", ""))]

    def hits(self, case: Case) -> dict[str, int]:
        prefix = "/" + case["name"]
        return {target[len(prefix) :]: n for target, n in self.host.hits.items() if target.startswith(prefix + "/")}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    engine = ("--bundle", str(bundle), "--model-name", "qwen3-vl")
    with media_host() as host, running(engine=engine) as gateway:
        yield Stage(gateway, host, "qwen3-vl")


@pytest.fixture(scope="module")
def waiting(stage: Stage) -> Iterator[dict[str, "concurrent.futures.Future[Answer]"]]:
    """The cases whose host is slow, all at once and beside the others."""
    with concurrent.futures.ThreadPoolExecutor(len(SLOW)) as threads:
        yield {name: threads.submit(stage.play, BY_NAME[name]) for name in SLOW}


# -- marks in requests

SPOILERS: dict[str, Callable[[bytes], str]] = {
    "b64": lambda raw: text_of(raw),
    "b64url": lambda raw: base64.urlsafe_b64encode(raw).decode(),
    "b64nopad": lambda raw: text_of(raw).rstrip("="),
    "b64mime": lambda raw: "\r\n".join(text_of(raw)[at : at + 76] for at in range(0, len(text_of(raw)), 76)),
    "b64cut": lambda raw: one_short(text_of(raw)),
    "b64space": lambda raw: text_of(raw).replace("+", " "),
    "b64pct": lambda raw: urllib.parse.quote(text_of(raw), safe=""),
    "b64garbage": lambda raw: text_of(raw)[:40] + "*!é" + text_of(raw)[40:],
}


def text_of(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def one_short(text: str) -> str:
    """Of a length that no base64 text has."""
    text = text.rstrip("=")[:-1]
    return text[: len(text) - (len(text) - 1) % 4]


def filled(value: Any, base: str) -> Any:
    if isinstance(value, dict):
        return {key: filled(inner, base) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, base) for inner in value]
    if not isinstance(value, str):
        return value

    def mark(found: "re.Match[str]") -> str:
        kind, _, rest = found[1].partition(":")
        if kind == "origin":
            return base
        name, _, mime = rest.partition("|")
        raw = (DATA / name).read_bytes()
        return data_url(raw, mime) if kind == "dataurl" else SPOILERS[kind](raw)

    return re.sub(r"\{\{([^}]*)\}\}", mark, value)


# -- what is right


def loaded(file: bytes) -> Image.Image:
    """The picture as vLLM 0.32 loads it with Pillow: upright, on white, RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged metadata is the case
        picture: Image.Image = Image.open(io.BytesIO(file))
        with contextlib.suppress(Exception):
            picture = ImageOps.exif_transpose(picture)
        if picture.mode != "RGB" and ("A" in picture.getbands() or "transparency" in picture.info):
            layered = picture.convert("RGBA")
            picture = Image.new("RGB", layered.size, (255, 255, 255))
            picture.paste(layered, mask=layered.getchannel("A"))
        return picture.convert("RGB")


def check_images(case: Case, batch: dict[str, Any]) -> None:
    wanted = case["images"]
    rows = batch["tensors"]["image_grid_thw"]["values"]
    assert [rows[at : at + 3] for at in range(0, len(rows), 3)] == [image["grid_thw"] for image in wanted]
    runs = [length for _, length in batch["ranges"]]
    assert runs == [image["tokens"] for image in wanted] == case.get("image_runs", runs)
    if case.get("equal_hashes"):
        assert len(set(batch["hashes"])) == 1
    if case.get("distinct_hashes"):
        assert len(set(batch["hashes"])) == len(wanted)
    if not all("file" in image for image in wanted):
        return  # a long-side cap: tests/models has the record for its pixels
    tensors = []
    for image, content_hash in zip(wanted, batch["hashes"], strict=True):
        file = (DATA / image["file"]).read_bytes()
        picture = loaded(file)
        assert list(picture.size) == image["size"]
        assert hashlib.sha256(picture.tobytes()).hexdigest() == image["rgb_sha256"]
        tensors.append(pixel_values(picture)[0])
        if "max_long_side_pixel" not in json.dumps(case["body"]):
            assert content_hash == blake3(file).hexdigest()
    pixels = batch["tensors"]["pixel_values"]
    assert (pixels["dtype"], pixels["shape"]) == ("float32", [sum(map(len, tensors)), 1536])
    assert pixels["sha256"] == hashlib.sha256(np.concatenate(tensors).tobytes()).hexdigest()


def check_accepted(stage: Stage, case: Case, answer: Answer) -> None:
    assert answer.status == 200, answer.body
    (record,) = stage.seen(case)
    if case.get("images"):
        (batch,) = record["media"]
        check_images(case, batch)
    else:
        assert record["media"] == []
    if "prompt" in case:
        assert record["message"]["tokenized"]["original_text"] == case["prompt"]
    usage = answer.json["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == sum(times for _, times in record["input_ids"])


def check_refused(stage: Stage, case: Case, answer: Answer, wanted: tuple[int, str]) -> None:
    assert answer.error == wanted
    assert answer.headers["x-smg-error-code"] == wanted[1]
    text = answer.body.decode()
    assert len(text) < 2048 and "Traceback" not in text and "base64," not in text
    assert stage.seen(case) == []


def check(stage: Stage, case: Case, answer: Answer, wanted: tuple[int, str] | None = None) -> None:
    wanted = wanted or LATER.get(case["name"], (case["status"], case.get("code", "")))
    if wanted[0] == 200:
        check_accepted(stage, case, answer)
    else:
        check_refused(stage, case, answer, wanted)
    if wanted == (case["status"], case.get("code", "")):
        hits = stage.hits(case)
        for target, count in case.get("hits", {}).items():
            assert (sum(hits.values()) if target == "*" else hits.get(target, 0)) == count, hits


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: str(case["name"]))
def test_field_case(stage: Stage, waiting: Any, case: Case) -> None:
    check(stage, case, stage.play(case))


@pytest.mark.parametrize("name", HOSTS)
def test_media_host(stage: Stage, waiting: Any, name: str) -> None:
    replies, status = HOSTS[name]
    case = {**BY_NAME["same_bytes_two_urls"], "name": f"host_{name}", "origin": replies, "image_runs": [70], "hits": {}}
    part = {"type": "image_url", "image_url": {"url": "{{origin}}/a.png"}}
    case["body"] = {"max_tokens": 4, "messages": [{"role": "user", "content": [part]}]}
    case["images"] = case["images"][:1]
    answer = stage.play(case)
    check(stage, case, answer, (status, "multimodal_processing_failed"))
    if status != 200:
        assert answer.json["error"]["message"].startswith("media item 0: ")
    if name == "redirect_round":
        assert stage.hits(case) == {"/a.png": 11}  # the request and ten hops
    assert all(count < 1 << 20 for target, count in stage.host.sent.items() if "bomb" in target)


def test_what_a_media_host_is_told(stage: Stage) -> None:
    case = {**BY_NAME["needs_user_agent"], "name": "headers"}
    check(stage, case, stage.play(case))
    head = stage.host.heads["/headers/a.png"]
    assert head["user-agent"].startswith("mediagate/") and head["accept-encoding"] == "identity"
    assert not {"cookie", "authorization", "referer"} & set(head)


@pytest.mark.parametrize("name", SLOW)
def test_slow_host(stage: Stage, waiting: "dict[str, concurrent.futures.Future[Answer]]", name: str) -> None:
    """Last, as their ten seconds pass beside the other cases."""
    answer = waiting[name].result(60)
    check(stage, BY_NAME[name], answer)
    if answer.status != 200:
        assert "timed out after 10" in answer.json["error"]["message"]


def test_a_body_above_the_limit_is_not_read_on() -> None:
    """Whether it says its length, lies in chunks or never ends."""
    (environment,) = {json.dumps(case["env"]) for case in CAPPED}
    with media_host() as host, running(environment=json.loads(environment)) as gateway:
        capped = Stage(gateway, host, MODEL)
        assert len(CAPPED) == 3
        for case in CAPPED:
            answer = capped.play(case)
            check(capped, case, answer)
            assert "exceeds the maximum size of 1000000 bytes" in answer.json["error"]["message"]
        sent = {target.split("/")[1]: count for target, count in capped.host.sent.items()}
        assert sent["endless_body"] < 16 << 20, sent  # the limit, and what two kernels buffer
