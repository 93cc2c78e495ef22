"""The reported troubles of `test_field_cases` once more, by the Messages and the Responses API: to the same turns,
pictures and hosts they answer as chat does, and the engine sees the same.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.origin import media_host
from tests.e2e.running import running
from tests.e2e.test_field_cases import CHAT, ORDINARY, Case, Stage, check
from tests.pipeline.bundles import unpack_bundle

SETTINGS = {"max_tokens", "temperature", "messages", "stream"}


def is_translatable(case: Case) -> bool:
    """Turns of text and of pictures by URL, without what only chat has."""
    body = case["body"]
    if case["path"] != CHAT or not isinstance(body, dict) or body.keys() - SETTINGS or body.get("stream"):
        return False
    return all(
        turn.get("role") in ("system", "user", "assistant")
        and not turn.keys() - {"role", "content"}
        and (isinstance(turn["content"], str) or all(map(is_plain, turn["content"])))
        for turn in body["messages"]
    )


def is_plain(part: Any) -> bool:
    if part == {"type": "text", "text": part.get("text")}:
        return isinstance(part["text"], str)
    picture = part.get("image_url")
    return (
        part.keys() == {"type", "image_url"}
        and isinstance(picture, dict)
        and not picture.keys() - {"url", "detail"}
        and isinstance(picture.get("url"), str)
    )


def messages_body(body: dict[str, Any]) -> dict[str, Any]:
    turns = [{"role": turn["role"], "content": blocks(turn["content"])} for turn in body["messages"]]
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    turns = [turn for turn in turns if turn["role"] != "system"]
    found: dict[str, Any] = {"max_tokens": body.get("max_tokens", 16), "messages": turns}
    return {**found, "system": system[0]} if system else found


def blocks(content: Any) -> Any:
    """A data URL of a known kind is a base64 source, anything else a URL."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": "image", "source": source(part)} for part in content]


def source(part: dict[str, Any]) -> dict[str, str]:
    url = part["image_url"]["url"]
    if url.startswith("{{dataurl:") and url.endswith("|image/png}}"):
        payload = "{{b64:" + url.removeprefix("{{dataurl:").removesuffix("|image/png}}") + "}}"
        return {"type": "base64", "media_type": "image/png", "data": payload}
    return {"type": "url", "url": url}


def responses_body(body: dict[str, Any]) -> dict[str, Any]:
    items = [{"role": turn["role"], "content": parts(turn["role"], turn["content"])} for turn in body["messages"]]
    return {"max_output_tokens": body.get("max_tokens", 16), "input": items, "store": False}


def parts(role: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    text = "output_text" if role == "assistant" else "input_text"
    return [
        {"type": text, "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in content
    ]


TRANSLATED = {"/v1/messages": messages_body, "/v1/responses": responses_body}
CASES = [case for case in ORDINARY if is_translatable(case)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    engine = ("--bundle", str(bundle), "--model-name", "qwen3-vl")
    with media_host() as host, running(engine=engine) as gateway:
        yield Stage(gateway, host, "qwen3-vl")


@pytest.mark.parametrize("path", TRANSLATED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_field_case(stage: Stage, path: str, case: Case) -> None:
    name = path.rpartition("/")[2] + "-" + case["name"]
    translated = {**case, "name": name, "path": path, "body": TRANSLATED[path](case["body"])}
    check(stage, translated, stage.play(translated))


def test_most_cases_are_translated() -> None:
    assert len(CASES) > 80
