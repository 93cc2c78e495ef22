"""The real gateway's recorded behaviour, setup by setup: what it answered, and every field its engine was sent.

One gateway for each setup, with its flags and variables (setups that only differ by their worker share one); all cases
play side by side and are found again in the engine's journal by their request id.  The tables below are all that may
differ, and `docs/compatibility.md` gives the reasons.
"""

import concurrent.futures
import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.golden import (
    DATA,
    MODEL,
    answer_shape,
    differences,
    engine_view,
    filled,
    keep_only,
    media_targets,
)
from tests.e2e.origin import MediaHost, media_host
from tests.e2e.running import Answer, Engine, Running, running, until
from tests.pipeline.bundles import unpack_bundle

Case = dict[str, Any]

RECORDS = json.loads((DATA / "golden" / "records.json").read_text())
SETUPS = {setup["setup"]: setup for setup in RECORDS["setups"]}
ENGINE_SEEN = {
    f"{setup['setup']}.{case['case']}": case["engine"]
    for setup in RECORDS["setups"]
    for case in setup["cases"]
    if "engine" in case
}
FAILED = "multimodal_processing_failed"
# answers decided otherwise
REFUSED = {
    "anchor_in_text_only": (400, "multimodal_prompt_contract_mismatch"),
    "assistant_image": (400, "unsupported_content_part"),
    "img_bad_truncated_jpg": (400, FAILED),
    "url_bad_truncated_jpg": (400, FAILED),
    "err_image_url_string": (400, FAILED),  # a string is a URL; this one is none
}
TURN, ANCHOR = "<|im_start|>{}\n{}<|im_end|>\n", "<|vision_start|><|image_pad|><|vision_end|>"
# parts as written; SMG puts a message's media in front of its text
AS_WRITTEN = {
    "two_images": TURN.format("user", f"First:{ANCHOR} second:{ANCHOR}") + "<|im_start|>assistant\n",
    "system_image": TURN.format("system", f"Be brief.{ANCHOR}")
    + TURN.format("user", f"{ANCHOR}What is shown?")
    + "<|im_start|>assistant\n",
}
PLACED = {  # where the part is; SMG says null
    "err_file_part": "messages[0].content[0]",
    "err_missing_url": "messages[0].content[0].image_url.url",
    "err_unknown_part": "messages[0].content[0]",
}
SENT = {"sampling": {"min_tokens": 1}}  # SMG drops it
LOGPROBS = {"sampling"}  # the records' stand-in sent no log-probabilities, ours does
OTHER_PIXELS = {"image_long_side_280"}  # 7 values by one level: SMG resizes twice in another way


SAID = "Hello world!"
SPECIAL = [  # by their worker, not by the gateway
    name
    for name, setup in SETUPS.items()
    if not setup["flags"] and not setup["env"] and (setup["worker_labels"] or "--fail-code" in setup["worker_options"])
]
ALONE = {"vllm_router", "vllm_budget_busy", "vllm_shm_auto_other"}
PLAIN = [name for name in SETUPS if name not in {*SPECIAL, *ALONE}]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL's, as recorded."""
    return unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the part of the tokenizer that the texts of the smaller setups need."""
    folder = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    texts = [seen["message"]["tokenized"]["original_text"] for seen in ENGINE_SEEN.values()]
    keep_only(folder / "tokenizer.json", [*texts, AS_WRITTEN["two_images"], SAID])
    return folder


@pytest.fixture(scope="module")
def plain_engine(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine of all setups whose worker is an ordinary one."""
    engine = Engine(tmp_path_factory.mktemp("engine"), *engine_flags({}, small_bundle))
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def host() -> Iterator[MediaHost]:
    with media_host() as found:
        found.serve(media_targets())
        yield found


def engine_flags(setup: dict[str, Any], bundle: Path) -> tuple[str, ...]:
    options = setup.get("worker_options", [])
    found = ["--bundle", str(bundle), "--model-name", MODEL, "--text", SAID, "--tokens-per-chunk", "1"]
    for label in setup.get("worker_labels", []):
        found += ["--label", label]
    for name, value in zip(options, options[1:], strict=False):
        if name == "--fail-code":
            found += ["--fault", f"refuse={value}"]
        elif name == "--delay-ms":
            found += ["--latency-ms", value]
    return tuple(found)


def play(gateway: Running, setup: str, case: Case, base: str, model: str | None = None) -> Answer:
    body = case["body"] if isinstance(case["body"], str) else filled(case["body"], base)
    if model is not None:
        body["model"] = model
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return gateway.call("POST", "/v1/chat/completions", raw, {"X-Request-Id": f"{setup}.{case['case']}!"})


def seen_by_case(engine: Engine, setup: str) -> dict[str, dict[str, Any]]:
    ids = {record["request_id"].partition("!")[0]: record for record in engine.seen("generate")}
    return {name.partition(".")[2]: record for name, record in ids.items() if name.startswith(f"{setup}.")}


def recorded_view(setup: str, case: Case) -> dict[str, Any]:
    found = copy.deepcopy(ENGINE_SEEN[case.get("same_message_as", f"{setup}.{case['case']}")])
    found["message"]["sampling_params"] |= SENT.get(case["case"], {})
    return dict(found)


def check_engine(setup: str, case: Case, record: dict[str, Any] | None) -> list[str]:
    if record is None:
        return ["the engine was not asked"]
    wanted, ours = recorded_view(setup, case), engine_view(record)
    if case["case"] in OTHER_PIXELS:
        for view in (wanted, ours):
            view["media"][0]["tensors"]["pixel_values"].pop("sha256")
    if case["case"] in AS_WRITTEN:
        wanted["message"]["tokenized"]["original_text"] = AS_WRITTEN[case["case"]]
        for view in (wanted, ours):
            view["input_ids"] = sorted(view["input_ids"])
            for batch in view["media"]:
                batch["ranges"] = [length for _, length in batch["ranges"]]
    return list(differences(wanted, ours))


def check_refused(answer: Answer, status: int, error: dict[str, Any], retry_after: str | None) -> list[str]:
    if answer.status == 200:
        return ["accepted"]
    ours = {name: answer.json["error"][name] for name in error}
    found = list(differences(error, ours, "error"))
    found += differences(status, answer.status, "status")
    found += differences(error["code"], answer.headers.get("x-smg-error-code"), "x-smg-error-code")
    if retry_after is not None:
        found += differences(retry_after, answer.headers.get("retry-after"), "retry-after")
    return found


def check(setup: str, case: Case, answer: Answer, record: dict[str, Any] | None) -> list[str]:
    if case["case"] in REFUSED:
        status, code = REFUSED[case["case"]]
        asked = [] if record is None else ["the engine was asked"]
        return asked + check_refused(answer, status, {"type": "invalid_request_error", "code": code}, None)
    if case["status"] != 200:
        wanted = case["error"] | ({"param": PLACED[case["case"]]} if case["case"] in PLACED else {})
        return check_refused(answer, case["status"], wanted, case.get("retry_after"))
    if answer.status != 200:
        return [f"status {answer.status}: {answer.body[:300]!r}"]
    shape = answer_shape(answer)
    if case["case"] in LOGPROBS:
        shape["body"]["choices"][0]["logprobs"] = None
    found = list(differences(RECORDS["answers"][case["answer"]], shape, "answer"))
    return found + check_engine(setup, case, record)


def compare(setup: str, answers: dict[str, Answer], engine: Engine) -> None:
    records = seen_by_case(engine, setup)
    found = {
        case["case"]: rows
        for case in SETUPS[setup]["cases"]
        if (rows := check(setup, case, answers[case["case"]], records.get(case["case"])))
    }
    assert not found, json.dumps(found, indent=1)


def play_all(gateway: Running, setup: str, base: str, model: str | None = None) -> dict[str, Answer]:
    cases = SETUPS[setup]["cases"]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda case: play(gateway, setup, case, base, model), cases))
    return {case["case"]: answer for case, answer in zip(cases, answers, strict=True)}


def test_router(bundle: Path, host: MediaHost) -> None:
    """The setup with most cases, and the whole tokenizer."""
    setup = SETUPS["vllm_router"]
    with running(*setup["flags"], engine=engine_flags(setup, bundle)) as gateway:
        compare("vllm_router", play_all(gateway, "vllm_router", host.base), gateway.engine)


@pytest.fixture(scope="module")
def special_workers(small_bundle: Path) -> Iterator[Running]:
    """One gateway for all workers that are special: each serves a model of its own name, that of its setup."""
    engines = [(*engine_flags(SETUPS[name], small_bundle), "--model-name", name) for name in SPECIAL]
    with running("--disable-retries", "--pool-processes=1", engines=engines) as gateway:
        until(lambda: all(worker["status"] == "ready" for worker in gateway.workers()), what="all workers")
        yield gateway


@pytest.mark.parametrize("name", SPECIAL)
def test_special_worker(special_workers: Running, host: MediaHost, name: str) -> None:
    answers = play_all(special_workers, name, host.base, model=name)
    for answer in answers.values():
        answer.body = answer.body.replace(f'"model":"{name}"'.encode(), f'"model":"{MODEL}"'.encode())
    compare(name, answers, special_workers.engines[SPECIAL.index(name)])


@pytest.mark.parametrize("name", PLAIN)
def test_special_gateway(plain_engine: Engine, host: MediaHost, name: str) -> None:
    setup = SETUPS[name]
    flags = [*setup["flags"], "--pool-processes=1", "--worker-urls", plain_engine.url]
    with running(*flags, engines=(), environment=setup["env"], wait=False) as gateway:
        gateway.gateway.wait_until()
        compare(name, play_all(gateway, name, host.base), plain_engine)


def test_shared_memory_of_another_host(small_bundle: Path, host: MediaHost) -> None:
    setup = SETUPS["vllm_shm_auto_other"]
    with running(*setup["flags"], "--pool-processes=1", engine=engine_flags(setup, small_bundle)) as gateway:
        compare("vllm_shm_auto_other", play_all(gateway, "vllm_shm_auto_other", host.base), gateway.engine)


def test_a_busy_budget(small_bundle: Path, host: MediaHost) -> None:
    """The second request waits two seconds, then gives up; the third does not wait: the second fills the budget."""
    setup = SETUPS["vllm_budget_busy"]
    cases = {case["case"]: case for case in setup["cases"]}
    with (
        running(*setup["flags"], engine=engine_flags(setup, small_bundle)) as gateway,
        concurrent.futures.ThreadPoolExecutor(3) as threads,
    ):

        def send(name: str) -> "concurrent.futures.Future[Answer]":
            return threads.submit(play, gateway, "vllm_budget_busy", cases[name], host.base)

        futures = {"holder": send("holder")}
        until(lambda: gateway.seen("generate"), what="the first request at the engine")
        futures["waiter"] = send("waiter")
        until(lambda: gateway.metric("mediagate_inflight_waiting_bytes"), what="the second in the queue")
        futures["second_waiter"] = send("second_waiter")
        answers = {name: future.result(30) for name, future in futures.items()}
        compare("vllm_budget_busy", answers, gateway.engine)


def test_the_records_are_whole() -> None:
    counts = Counter(setup["setup"] for setup in RECORDS["setups"] for _ in setup["cases"])
    assert counts["vllm_router"] == 123 and sum(counts.values()) == 172
    assert {*SPECIAL, *PLAIN, *ALONE} == set(SETUPS) and len(SPECIAL) == 7
    names = {case["case"] for case in SETUPS["vllm_router"]["cases"]}
    assert {*REFUSED, *AS_WRITTEN, *SENT, *OTHER_PIXELS} <= names
