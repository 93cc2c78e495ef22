"""The real gateway's recorded answers on the Messages, Responses and completions routes, and what its engine was sent.

`tests/data/golden/apis.json` beside the records of chat: the same stand-in, the same pictures.  The tables below are
all that may differ, and `docs/compatibility.md` gives the reasons.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.golden import DATA, differences, engine_view, filled, keep_only, likeness, media_targets
from tests.e2e.origin import MediaHost, media_host
from tests.e2e.running import Answer, Running, running, until
from tests.e2e.test_golden import ENGINE_SEEN, SAID, SETUPS, TURN, engine_flags
from tests.pipeline.bundles import unpack_bundle

Case = dict[str, Any]

CASES: list[Case] = json.loads((DATA / "golden" / "apis.json").read_text())
BY_NAME = {case["case"]: case for case in CASES}
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
# answers decided otherwise: what SMG drops, or reads as text
REFUSED = {
    "messages_document": "unsupported_content_part",
    "responses_file": "unsupported_content_part",
    "responses_file_id": "unsupported_content_part",
}
# SMG moves the picture of a tool's result into a user's turn in front of it
AS_WRITTEN = {
    "messages_tool_result_image": TURN.format("user", "go")
    + TURN.format("assistant", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    + TURN.format("user", f"<tool_response>\n{PICTURE}\n</tool_response>")
    + "<|im_start|>assistant\n",
}
ANNOTATED = {"responses_stream"}  # SMG leaves out the (empty) annotations of a text, which its whole answers have


@pytest.fixture(scope="module")
def host() -> Iterator[MediaHost]:
    with media_host() as found:
        found.serve(media_targets())
        yield found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    texts = [SAID, *(text for case in CASES if (text := original_text(case))), *AS_WRITTEN.values()]
    keep_only(Path(folder) / "tokenizer.json", texts)
    with running("--pool-processes=1", engine=engine_flags({}, folder)) as found:
        yield found


def recorded_view(case: Case) -> dict[str, Any] | None:
    """What the engine was sent: a record of its own, or that of the chat request with the same message."""
    if "engine" in case:
        return copy.deepcopy(dict(case["engine"]))
    if "same_message_as" not in case:
        return None
    setup, _, name = case["same_message_as"].partition(".")
    (chat,) = (one for one in SETUPS[setup]["cases"] if one["case"] == name)
    found = copy.deepcopy(dict(ENGINE_SEEN[chat.get("same_message_as", case["same_message_as"])]))
    found["message"]["sampling_params"] = case["sampling_params"]
    return found


def original_text(case: Case) -> str:
    view = recorded_view(case)
    return str(view["message"]["tokenized"]["original_text"]) if view else ""


def with_media(value: Any, base: str) -> Any:
    """`@b64:FILE` is the payload of `@data:FILE`."""
    if isinstance(value, dict):
        return {key: with_media(inner, base) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_media(inner, base) for inner in value]
    if isinstance(value, str) and value.startswith("@b64:"):
        return filled("@data:" + value.removeprefix("@b64:"), base).partition(",")[2]
    return filled(value, base)


def answer_shape(answer: Answer) -> dict[str, Any]:
    """A stream is the list of its events' names and shapes, repeated ones once."""
    content_type = answer.headers["content-type"]
    if not content_type.startswith("text/event-stream"):
        return {"content_type": content_type, "body": likeness(answer.json)}
    shapes: list[Any] = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        shape = [name.removeprefix("event: "), likeness(json.loads(data.removeprefix("data: ")))]
        if shapes[-1:] != [shape]:
            shapes.append(shape)
    return {"content_type": content_type, "body": shapes}


def without_annotations(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_annotations(inner) for key, inner in value.items() if key != "annotations"}
    return [without_annotations(inner) for inner in value] if isinstance(value, list) else value


def check_engine(case: Case, record: dict[str, Any]) -> list[str]:
    wanted, ours = recorded_view(case), engine_view(record)
    assert wanted is not None
    if case["case"] in AS_WRITTEN:
        wanted["message"]["tokenized"]["original_text"] = AS_WRITTEN[case["case"]]
        wanted["input_ids"] = ours["input_ids"]
        for view in (wanted, ours):
            for batch in view["media"]:
                batch["ranges"] = [length for _, length in batch["ranges"]]
    return list(differences(wanted, ours))


def check_refused(answer: Answer, status: int, code: str) -> None:
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert answer.headers["x-smg-error-code"] == code


@pytest.mark.parametrize("name", list(BY_NAME))
def test_as_recorded(gateway: Running, host: MediaHost, name: str) -> None:
    case = BY_NAME[name]
    before = len(gateway.seen("generate"))
    answer = gateway.call("POST", case["path"], with_media(case["body"], host.base))
    if name in REFUSED:
        check_refused(answer, 400, REFUSED[name])
    elif case["status"] != 200:
        check_refused(answer, case["status"], case["error"]["code"])
    else:
        assert answer.status == 200, answer.body
        shape = answer_shape(answer)
        if name in ANNOTATED:
            shape = without_annotations(shape)
        assert list(differences(case["answer"], shape, "answer")) == []
        until(lambda: len(gateway.seen("generate")) > before)
        (record,) = gateway.seen("generate")[before:]
        assert check_engine(case, record) == []
        return
    assert len(gateway.seen("generate")) == before


def test_the_records_are_whole() -> None:
    assert len(BY_NAME) == len(CASES) == 15
    assert {*REFUSED, *AS_WRITTEN, *ANNOTATED} <= set(BY_NAME)
