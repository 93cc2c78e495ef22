"""Single requests whose answers were measured on SMG: ours has the status, code and parameter decided for it.

`tests/data/api_cases` holds the requests with the peer's answer and ours; `LATER` names what this version refuses, and
how, until its feature is there.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import MODEL, Running, running

CASES = json.loads((Path(__file__).parent.parent / "data" / "api_cases" / "cases.json").read_text())
PNG = (  # a plain 64x64 picture, 128 bytes
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAYElEQVR4nO3PQQ0AIBDAMA78e0YEj4ZkVbDN7LN+tnXAqwa0BrQGtAa0BrQGtAa0"
    "BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0C2J1AIYg73b4AAAAAElFTkSuQmCC"
)
WINDOW = 8192  # of the model in the measurements

LATER_ROUTES: tuple[str, ...] = ()
LATER: dict[str, tuple[int, str]] = {}
# The template of our bundle does not write tool calls; the one of the measurements did.
OTHER_PROMPT = {"image in tool"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(engine=("--label", f"max_context_length={WINDOW}")) as found:
        yield found


def filled(case: dict[str, Any]) -> Any:
    text = json.dumps(case["body"]).replace("{{png}}", PNG).replace("{{x*9000}}", "x" * 9000)
    body = json.loads(text)
    return body if case.get("without_model") else {"model": MODEL, **body}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_the_answer_is_the_decided_one(gateway: Running, case: dict[str, Any]) -> None:
    wanted = (case["status"], case["code"])
    if case["path"] in LATER_ROUTES:
        wanted = (404, "unknown_url")
    wanted = LATER.get(case["name"], wanted)
    before = len(gateway.seen())
    answer = gateway.call("POST", case["path"], filled(case))
    if wanted[0] == 200:
        assert answer.status == 200, answer.body
        assert gateway.seen()[before:] != []
        if case["name"] not in OTHER_PROMPT and not case.get("differs"):
            usage = answer.json["usage"]
            assert usage.get("prompt_tokens", usage.get("input_tokens")) == case["smg"]["prompt_tokens"]
        return
    status, code = answer.error
    assert (status, code if wanted[1] else None) == wanted  # some have a status of their own, and any code
    assert answer.headers["x-smg-error-code"] == code
    assert len(answer.body) < 2048 and PNG[:40] not in answer.body.decode()
    if "param" in case["smg"] and case["smg"]["code"] == wanted[1]:
        assert answer.json["error"]["param"] == case["smg"]["param"]
    assert len(gateway.seen()) == before


def image_part(**hints: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", **hints}}


BAD_PARTS: dict[str, Any] = {
    "no type": {"text": "x"},
    "unknown type": {"type": "hologram"},
    "a string": "hello",
    "null": None,
    "text that is none": {"type": "text", "text": 5},
    "no URL": {"type": "image_url", "image_url": {}},
    "a hint as text": image_part(max_long_side_pixel="56"),
    "a hint of a half": image_part(max_long_side_pixel=56.5),
    "a hint beyond 32 bits": image_part(max_long_side_pixel=28 * 10**12),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_an_unknown_model_is_told_before_a_bad_part(gateway: Running, name: str) -> None:
    content = [BAD_PARTS[name]]
    assert gateway.chat(content).error == (400, "unsupported_content_part")
    assert gateway.chat(content, model="nope").error == (404, "model_not_found")


def test_an_assistant_s_null_content_is_an_empty_one(gateway: Running) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]
    null = gateway.chat("", messages=turns)
    empty = gateway.chat("", messages=[turns[0], {"role": "assistant", "content": ""}, turns[2]])
    assert null.status == 200 and null.json["usage"] == empty.json["usage"]


@pytest.mark.parametrize("route", [*LATER_ROUTES, "/v1/embeddings"])
def test_routes_this_version_lacks(gateway: Running, route: str) -> None:
    assert gateway.call("POST", route, {"model": MODEL}).error == (404, "unknown_url")


def test_no_page_of_another_origin_may_read_an_answer(gateway: Running) -> None:
    answer = gateway.call("GET", "/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert answer.status == 200 and not [name for name in answer.headers if name.startswith("access-control")]


def test_every_exception_is_a_case() -> None:
    names = {case["name"] for case in CASES}
    assert set(LATER) <= names and names >= OTHER_PROMPT
    assert len(names) == len(CASES) == 96
