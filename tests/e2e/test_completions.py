"""Text completions, tokenizing and what is told of models, from outside."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.running import MODEL, Answer, Running, running, until
from tests.pipeline.bundles import unpack_bundle

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running("--pool-processes=1", engine=("--text", "One. Two.", "--tokens-per-chunk", "2")) as found:
        yield found


def ask(gateway: Running, prompt: Any = "hello", **fields: Any) -> Answer:
    return gateway.call("POST", COMPLETIONS, {"model": MODEL, "prompt": prompt, **fields})


def put_together(answer: Answer, choices: int) -> list[tuple[str, Any]]:
    """Each choice's text and reason."""
    texts, reasons = [""] * choices, [None] * choices
    assert answer.events[-1] == "[DONE]" and answer.events[-2]["choices"] == []
    for event in answer.events[:-2]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    return list(zip(texts, reasons, strict=True))


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, "One. Two.", "stop"),
        ({"echo": True}, "helloOne. Two.", "stop"),
        ({"stop": "Two"}, "One. ", "stop"),
        ({"max_tokens": 3}, "One", "length"),
        ({"n": 2}, "One. Two.", "stop"),
    ],
)
def test_a_stream_says_the_same_as_a_whole_answer(
    gateway: Running, fields: dict[str, Any], text: str, reason: str
) -> None:
    whole = ask(gateway, **fields).json
    told = [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
    assert told == [(text, reason)] * fields.get("n", 1)
    stream = ask(gateway, stream=True, **fields)
    assert put_together(stream, len(told)) == told
    assert stream.events[-2]["usage"] == whole["usage"] and whole["usage"]["prompt_tokens"] == 5
    assert whole["id"].startswith("cmpl-") and whole["object"] == "text_completion"


def test_the_prompt_goes_to_the_engine_as_it_is(gateway: Running) -> None:
    assert ask(gateway, ["no template"]).status == 200
    assert gateway.seen("generate")[-1]["message"]["tokenized"]["original_text"] == "no template"


def test_logprobs_are_four_lists(gateway: Running) -> None:
    whole = ask(gateway, logprobs=2, echo=True).json["choices"][0]
    stream = ask(gateway, logprobs=2, echo=True, stream=True)
    joined: dict[str, list[Any]] = {}
    for event in stream.events[:-2]:
        for name, row in event["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(row)
    assert joined == whole["logprobs"]
    assert "".join(joined["tokens"]) == "One. Two." and joined["text_offset"][:2] == [5, 6]
    assert len({len(row) for row in joined.values()}) == 1 and len(joined["top_logprobs"][0]) == 2


REFUSED: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"prompt": [1, 2]}, 400, "invalid_type", "prompt[0]"),
    ({"prompt": []}, 400, "empty_array", "prompt"),
    ({"prompt": None}, 400, "invalid_type", "prompt"),
    ({"prompt": ["a"] * 129}, 400, "array_above_max_length", "prompt"),
    ({"prompt": ["a"] * 2, "n": 65}, 400, "integer_above_max_value", "n"),
    ({"suffix": "x"}, 400, "unsupported_parameter", "suffix"),
    ({"best_of": 3}, 400, "unsupported_parameter", "best_of"),
    ({"n": 129}, 400, "integer_above_max_value", "n"),
    ({"logprobs": 6}, 400, "integer_above_max_value", "logprobs"),
    ({"stop": ""}, 400, "invalid_value", "stop"),
    ({"prompt": "a <|image_pad|>"}, 400, "multimodal_prompt_contract_mismatch", None),
    ({"model": "nope"}, 404, "model_not_found", None),
]


@pytest.mark.parametrize(("fields", "status", "code", "param"), REFUSED)
def test_what_is_refused(gateway: Running, fields: dict[str, Any], status: int, code: str, param: str | None) -> None:
    answer = ask(gateway, **fields)
    assert answer.error == (status, code) and answer.json["error"]["param"] == param


def test_a_failure_amid_a_stream() -> None:
    with running("--disable-retries") as gateway:
        answer = ask(gateway, "[[fault break=INTERNAL after=2]]", stream=True)
        assert answer.events[-1] == "[DONE]" and answer.events[-2]["error"]["code"] == "worker_stream_failed"
        assert ask(gateway, "[[fault refuse=INTERNAL]]", stream=True).error == (500, "start_generation_failed")


# -- tokens


def tokens(gateway: Running, route: str, **fields: Any) -> Answer:
    return gateway.call("POST", f"/v1/{route}", {"model": MODEL, **fields})


def test_a_text_there_and_back(gateway: Running) -> None:
    text = "Zwölf Boxkämpfer <|image_pad|>"
    made = tokens(gateway, "tokenize", prompt=text).json
    assert made["count"] == len(made["tokens"]) > 12 and made["char_count"] == len(text)
    assert tokens(gateway, "detokenize", tokens=made["tokens"], skip_special_tokens=False).json == {"text": text}
    assert tokens(gateway, "detokenize", tokens=made["tokens"]).json == {"text": text.removesuffix("<|image_pad|>")}


def test_several_texts(gateway: Running) -> None:
    made = tokens(gateway, "tokenize", prompt=["ab", "", "c"]).json
    assert made["count"] == [2, 0, 1] == [len(row) for row in made["tokens"]] and made["char_count"] == [2, 0, 1]
    assert tokens(gateway, "detokenize", tokens=made["tokens"]).json == {"text": ["ab", "", "c"]}
    assert tokens(gateway, "tokenize", prompt=[]).json == {"tokens": [], "count": [], "char_count": []}
    assert tokens(gateway, "detokenize", tokens=[]).json == {"text": ""}


def test_a_long_text_there_and_back(gateway: Running) -> None:
    text = "word " * 5000
    made = tokens(gateway, "tokenize", prompt=text).json
    assert tokens(gateway, "detokenize", tokens=made["tokens"]).json == {"text": text}


@pytest.mark.parametrize(
    ("route", "fields", "code"),
    [
        ("tokenize", {"prompt": "x", "model": "nope"}, "tokenizer_not_found"),
        ("detokenize", {"tokens": [1], "model": "nope"}, "tokenizer_not_found"),
        ("tokenize", {}, "missing_required_parameter"),
        ("tokenize", {"prompt": 5}, "invalid_type"),
        ("detokenize", {"tokens": [-1]}, "integer_below_min_value"),
        ("detokenize", {"tokens": [4_000_000_000]}, "invalid_value"),
        ("detokenize", {"tokens": [1, [2]]}, "invalid_type"),
        ("detokenize", {"tokens": "x"}, "invalid_type"),
    ],
)
def test_what_tokenizing_refuses(gateway: Running, route: str, fields: dict[str, Any], code: str) -> None:
    assert tokens(gateway, route, **fields).error == (400, code)


# -- models


def test_one_model(gateway: Running) -> None:
    (card,) = gateway.call("GET", "/v1/models").json["data"]
    assert gateway.call("GET", f"/v1/models/{MODEL}").json == card
    assert gateway.call("GET", "/v1/models/some/other").error == (404, "model_not_found")


def test_what_workers_say(gateway: Running) -> None:
    told = gateway.call("GET", "/get_model_info").json
    assert told["id"] == MODEL and told["max_context_length"] and told["multimodal"]["family"]
    assert gateway.call("GET", "/get_model_info?model=nope").error == (404, "model_not_found")
    server = gateway.call("GET", "/get_server_info").json
    assert (server["models"], server["healthy_workers"], server["runtimes"]) == ([MODEL], 1, ["vllm"])


def test_without_workers() -> None:
    with running(engines=()) as gateway:
        for path in ("/get_model_info", "/get_server_info"):
            assert gateway.call("GET", path).error == (503, "no_workers")
        assert gateway.call("GET", "/v1/models/x").error == (404, "model_not_found")


SAYING = [f"[[say {text}]]" for text in ("one", "two words", "three whole words")]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    with running("--pool-processes=1", engine=("--bundle", str(bundle), "--tokens-per-chunk", "1")) as found:
        yield found


def test_several_prompts_in_one_request(speaking: Running) -> None:
    """Choices of the first prompt come first, as in OpenAI's and SMG's answers."""
    answer = ask(speaking, SAYING, n=2, echo=True)
    texts = [(choice["index"], choice["text"]) for choice in answer.json["choices"]]
    said = [text for text in ("one", "two words", "three whole words") for _ in range(2)]
    asked = [text for text in SAYING for _ in range(2)]
    assert texts == [(at, echo + text) for at, (echo, text) in enumerate(zip(asked, said, strict=True))]
    assert len(speaking.seen("generate")) == 3
    single = [ask(speaking, text).json["usage"] for text in SAYING]
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] == sum(one["prompt_tokens"] for one in single)
    assert usage["completion_tokens"] == 2 * sum(one["completion_tokens"] for one in single)
    streamed = ask(speaking, SAYING, n=2, echo=True, stream=True)
    assert put_together(streamed, 6) == [(text, "stop") for _, text in texts]
    assert streamed.events[-2]["usage"] == usage


def test_one_of_several_prompts_that_fails(speaking: Running) -> None:
    refused = ask(speaking, ["[[say a]]", "[[fault refuse=INTERNAL]]"])
    assert refused.error == (500, "start_generation_failed")
    broken = ask(speaking, ["[[say a b c]]", "[[fault break=INTERNAL after=2]] x"], stream=True)
    assert broken.status == 200 and broken.events[-2]["error"]["code"] == "worker_stream_failed"
    assert ask(speaking, ["a", "<|image_pad|>"]).error == (400, "multimodal_prompt_contract_mismatch")
    speaking.given_back()


def test_a_client_of_several_prompts_that_leaves(speaking: Running) -> None:
    body = json.dumps({"model": MODEL, "prompt": ["[[fault slow=20000]] a", "[[fault slow=20000]] b"]}).encode()
    before, asked = len(speaking.seen("cancelled")), len(speaking.seen("generate"))
    with speaking.connect() as connection:
        connection.sendall(speaking.head(len(body), "left").replace(b"/v1/chat/completions", b"/v1/completions") + body)
        until(lambda: len(speaking.seen("generate")) == asked + 2, what="both are asked")
    speaking.given_back()
    until(lambda: len(speaking.seen("cancelled")) == before + 2, what="both are cancelled")
