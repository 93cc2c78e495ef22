"""Media references as two versions of the real gateway sent them: answers, counts, and every field of the engine's
message.

`tests/data/golden/references.json` has the records of 1.11.0 and of 1.13.0, which differ in few places; the tables
below say whom we follow there, and `docs/compatibility.md` why.  One gateway for the setups that only differ by their
worker, each of which serves a model of its own name.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.golden import DATA, answer_shape, differences, engine_view, filled, keep_only, media_targets
from tests.e2e.origin import MediaHost, media_host
from tests.e2e.running import Answer, Engine, Running, running, until
from tests.e2e.test_golden import ANCHOR, SAID, TURN, engine_flags
from tests.e2e.test_golden_apis import with_media
from tests.e2e.test_other_engines import with_sounds
from tests.pipeline.bundles import unpack_bundle

Case = dict[str, Any]

RECORDS = json.loads((DATA / "golden" / "references.json").read_text())
SETUPS = {setup["setup"]: setup for setup in RECORDS["setups"]}
OLD, NEW = "1.11.0", "1.13.0"
# 1.13.0 preprocesses these itself although it was told that workers do; the requirement is 1.11.0's refusal
HINTS = {("vllm_refs_worker", "ref_image_hint"), ("vllm_refs_worker", "ref_video_fps")}
# parts as written; SMG puts a message's media in front of its text
AS_WRITTEN = {"ref_two": TURN.format("user", f"{ANCHOR}and{ANCHOR}") + "<|im_start|>assistant\n"}
WORKERS = ("vllm_refs_worker", "vllm_refs_file", "vllm_refs_nobody", "vllm_refs_unsupported_model")


@pytest.fixture(scope="module")
def host() -> Iterator[MediaHost]:
    with media_host() as found:
        found.serve(media_targets())
        yield found


def texts() -> list[str]:
    seen = [case[NEW]["engine"] for setup in SETUPS.values() for case in setup["cases"] if "engine" in case[NEW]]
    numbers = "".join(f"<{tenths / 10:.1f} seconds>" for tenths in range(40))
    prompts = [view["message"]["tokenized"].get("original_text", "hi") for view in seen]
    return [SAID, numbers, *AS_WRITTEN.values(), *prompts]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: unpack_bundle(name, tmp_path_factory.mktemp(name)) for name in ("qwen3_vl", "llava15")}
    keep_only(found["qwen3_vl"] / "tokenizer.json", texts())
    return found


def worker(setup: dict[str, Any], bundles: dict[str, Path]) -> tuple[str, ...]:
    return (*engine_flags(setup, bundles[setup["bundle"]]), "--model-name", setup["setup"])


@pytest.fixture(scope="module")
def worker_mode(bundles: dict[str, Path]) -> Iterator[Running]:
    """One gateway for all setups of `--mm-processing worker` without variables."""
    engines = [worker(SETUPS[name], bundles) for name in WORKERS]
    with running(*SETUPS[WORKERS[0]]["flags"], "--pool-processes=1", engines=engines) as gateway:
        until(lambda: all(one["status"] == "ready" for one in gateway.workers()), what="all workers")
        yield gateway


def recorded(name: str, case: Case) -> dict[str, Any]:
    """Which version's answer is ours."""
    return dict(case[OLD] if (name, case["case"]) in HINTS else case[NEW])


def wanted_view(name: str, case: Case, base: str) -> dict[str, Any]:
    """1.13.0's message: with the text 1.11.0 always sends, and 1.11.0's hashes of media."""
    view = copy.deepcopy(dict(case[NEW]["engine"]))
    old = case[OLD].get("engine")
    if isinstance(old, dict):
        view["message"]["tokenized"] = old["message"]["tokenized"]
        for batch, its in zip(view["media"], old["media"], strict=True):
            batch["hashes"] = its["hashes"]
    if case["case"] in AS_WRITTEN:
        view["message"]["tokenized"]["original_text"] = AS_WRITTEN[case["case"]]
        view["input_ids"].sort()
    for item in view["message"].get("media_refs", {}).get("items", []):
        head, _, file = item["url"].partition("@b64:")
        item["url"] = head + with_media(f"@b64:{file}", base) if file else filled(item["url"], base)
    return view


def ours_view(record: dict[str, Any], case: Case) -> dict[str, Any]:
    view = engine_view(record)
    if not isinstance(case[OLD].get("engine"), dict) and view["media"]:  # no 1.11.0 record of these hashes
        for batch, its in zip(view["media"], case[NEW]["engine"]["media"], strict=True):
            batch["hashes"] = its["hashes"]
    if case["case"] in AS_WRITTEN:
        view["input_ids"].sort()
    return view


def check_refused(answer: Answer, status: int, error: dict[str, Any], case: Case) -> list[str]:
    if answer.status == 200:
        return ["accepted"]
    found = list(differences(status, answer.status, "status"))
    ours = answer.json["error"]
    found += differences(error["code"], ours["code"], "code")
    found += differences(case[NEW].get("error", {}).get("type", "invalid_request_error"), ours["type"], "type")
    return found + list(differences(error["code"], answer.headers.get("x-smg-error-code"), "x-smg-error-code"))


def compare(name: str, gateway: Running, engine: Engine, base: str) -> None:
    found: dict[str, list[str]] = {}
    for case in SETUPS[name]["cases"]:
        body = with_media(with_sounds(case["body"]), base)
        before = len(engine.seen("generate"))
        answer = gateway.call("POST", case["path"], {**body, "model": name})
        if rows := check(name, case, answer, engine.seen("generate")[before:], base):
            found[case["case"]] = rows
    assert not found, json.dumps(found, indent=1)
    assert counted(gateway, name) == SETUPS[name]["counted"][OLD]


def check(name: str, case: Case, answer: Answer, sent: list[dict[str, Any]], base: str) -> list[str]:
    known = recorded(name, case)
    if known["status"] != 200:
        return check_refused(answer, known["status"], known["error"], case) + ["asked the engine"] * len(sent)
    if answer.status != 200:
        return [f"status {answer.status}: {answer.body[:300]!r}"]
    answer.body = answer.body.replace(f'"model":"{name}"'.encode(), b'"model":"qwen3-vl"')
    found = list(differences(RECORDS["answers"][known["answer"]], answer_shape(answer), "answer"))
    return found + list(differences(wanted_view(name, case, base), ours_view(sent[0], case)))


@pytest.mark.parametrize("name", WORKERS)
def test_worker_mode(worker_mode: Running, host: MediaHost, name: str) -> None:
    compare(name, worker_mode, worker_mode.engines[WORKERS.index(name)], host.base)


@pytest.mark.parametrize("name", sorted(set(SETUPS) - set(WORKERS)))
def test_other_gateways(bundles: dict[str, Path], host: MediaHost, name: str) -> None:
    setup = SETUPS[name]
    flags = [*setup["flags"], "--pool-processes=1"]
    with running(*flags, engine=worker(setup, bundles), environment=setup["env"]) as gateway:
        compare(name, gateway, gateway.engine, host.base)


def counted(gateway: Running, model: str) -> dict[str, int]:
    found = {}
    for line in gateway.metrics().splitlines():
        if line.startswith("smg_mm_processing_total{") and f'model="{model}"' in line:
            pairs = dict(pair.split("=") for pair in line.partition("{")[2].rpartition("}")[0].split(","))
            found[f"{pairs['mode']} {pairs['reason']}".replace('"', "")] = int(float(line.rsplit(" ", 1)[1]))
    return found


def test_the_records_are_whole() -> None:
    cases = {(name, case["case"]): case for name, setup in SETUPS.items() for case in setup["cases"]}
    assert len(SETUPS) == 7 and len(cases) == 51 and set(cases) >= HINTS
    forwarded = [case for case in cases.values() if "media_refs" in case[NEW].get("engine", {}).get("message", {})]
    assert len(forwarded) == 26 and all(case[OLD]["engine"] == "the same" for case in forwarded)
