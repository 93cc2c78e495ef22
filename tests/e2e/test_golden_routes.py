"""The real gateway's recorded answers on `/generate` and `/parse/*`, and what its engine was sent.

`tests/data/golden/routes.json`: asked of the 1.13.0 wheel in front of this project's stand-in.  So the parsers of calls
and of reasoning are held against another program's, format by format.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.golden import DATA
from tests.e2e.running import Answer, Running, running
from tests.pipeline.bundles import unpack_bundle

Case = dict[str, Any]

CASES: list[Case] = json.loads((DATA / "golden" / "routes.json").read_text())
BY_NAME = {case["name"]: case for case in CASES}
# SMG passes on how the model spelled its arguments in some formats, and writes them anew in others
SPELLED = {"calls_kimik2", "calls_deepseek_v41"}
# SMG strips the text in front of the calls in some formats, and leaves it in others
STRIPPED = {"calls_deepseek32", "calls_deepseek_v4"}
# tokens between tags that stay in the text are counted here
COUNTED = {"generate_thought"}
# whether an output begins inside reasoning is the prompt's to say, and here is none
UNSAID = {"reasoning_kimi_k3_inside"}
# SMG has no code in these
CODED = {"calls_unknown_parser", "reasoning_nope_whole"}
# SMG repeats the last token's id in the chunk that says why it ended
REPEATED = {"generate_stream", "generate_stream_limit"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    with running("--pool-processes=1", engine=("--bundle", str(bundle), "--tokens-per-chunk", "2")) as found:
        yield found


def ask(gateway: Running, case: Case) -> Answer:
    return gateway.call("POST", case["path"], case["body"])


def plain(value: Any) -> Any:
    """Without what changes with every run, and without the wording of errors."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    changing = {"id": "id", "e2e_latency": 0.0}
    found = {name: changing.get(name, plain(one)) for name, one in value.items()}
    if "code" in found:
        found |= {"message": "", "param": None}
    return found


def allowed(case: Case, recorded: Any) -> Any:
    """The recorded answer with the differences of this case."""
    name = case["name"]
    if name in SPELLED:
        for call in recorded["tool_calls"]:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    if name in STRIPPED:
        recorded["remaining_text"] += "\n"
    if name in CODED:
        recorded["code"] = "invalid_value"
    if name in UNSAID:
        return {"normal_text": case["body"]["text"], "reasoning_text": "", "success": True}
    if name in COUNTED:
        recorded[0]["meta_info"]["reasoning_tokens"] = 1
    return recorded


@pytest.mark.parametrize("name", [name for name, case in BY_NAME.items() if not case["body"].get("stream")])
def test_an_answer_is_the_recorded_one(gateway: Running, name: str) -> None:
    case = BY_NAME[name]
    answer = ask(gateway, case)
    assert answer.status == case["status"]
    assert plain(answer.json) == plain(allowed(case, case["answer"]))
    if "sampling" in case:
        sent = gateway.seen("generate")[-1]
        assert sent["message"]["sampling_params"] == case["sampling"] and sent["input_ids"] == case["input_ids"]


@pytest.mark.parametrize("name", [name for name, case in BY_NAME.items() if case["body"].get("stream")])
def test_a_stream_is_the_recorded_one(gateway: Running, name: str) -> None:
    case = BY_NAME[name]
    ours = ask(gateway, case).events
    theirs = [json.loads(data) if data != "[DONE]" else data for data in re.findall(r"data: (.*)\n\n", case["answer"])]
    if name in REPEATED:
        theirs[-2]["output_ids"] = []
    if "error" in theirs[-2]:  # ours tells the code as well, as in every stream
        assert ours[-2]["error"].pop("code") == "worker_stream_failed"
        ours[-2]["error"]["message"] = theirs[-2]["error"]["message"]
    assert [plain(event) for event in ours] == [plain(event) for event in theirs]


def generate(gateway: Running, text: str, /, **fields: Any) -> Answer:
    return gateway.call("POST", "/generate", {"model": "qwen3-vl-demo", "text": text} | fields)


def test_a_model_that_is_not_there_is_told_where_to_look(gateway: Running) -> None:
    """SMG's status and code also where none is named, as recorded, and though there is only one."""
    nameless = gateway.call("POST", "/generate", {"text": "a"})
    wrong = generate(gateway, "a", model="gpt-4")
    assert nameless.error == wrong.error == (404, "model_not_found")
    assert nameless.message == "the request names no model: give `model`; GET /v1/models lists the models there are"
    assert wrong.message == "No worker available for model 'gpt-4'; GET /v1/models lists the models there are"


def test_log_probabilities_as_sglang_tells_them(gateway: Running) -> None:
    """One for each id; SMG takes the field and tells none."""
    (whole,) = generate(gateway, "[[say one two]]", return_logprob=True, top_logprobs_num=2).json
    meta = whole["meta_info"]
    assert [row[1] for row in meta["output_token_logprobs"]] == whole["output_ids"]
    assert [len(rivals) for rivals in meta["output_top_logprobs"]] == [2] * len(whole["output_ids"])
    (bare,) = generate(gateway, "[[say one two]]", return_logprob=True).json
    assert bare["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
    assert "output_top_logprobs" not in bare["meta_info"]


def test_a_stop_string_never_leaks_into_a_stream(gateway: Running) -> None:
    """SMG tells it there, and leaves it out of a whole answer."""
    params = {"stop": "two", "n": 2}
    events = generate(gateway, "[[say one two three]]", stream=True, sampling_params=params).events
    texts = [event["text"] for event in events[:-1]]
    assert all("one ".startswith(text) or text == "one " for text in texts) and events[-1] == "[DONE]"
    ends = [event for event in events[:-1] if event["meta_info"]["finish_reason"]]
    assert [(end["index"], end["text"], end["meta_info"]["matched_stop"]) for end in ends] == [
        (0, "one ", "two"),
        (1, "one ", "two"),
    ]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"image_data": "http://a/b.png"}, "unsupported_parameter", "image_data"),
        ({"return_logprob": True, "logprob_start_len": 0}, "unsupported_parameter", "logprob_start_len"),
        ({"sampling_params": {"temperature": -1}}, "decimal_below_min_value", "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": 0}}, "integer_below_min_value", "sampling_params.max_new_tokens"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "invalid_value", "ebnf"),
        ({"sampling_params": {"json_schema": "{"}}, "invalid_value", "sampling_params"),
        ({"text": ["a", "b"]}, "invalid_type", "text"),
        ({"text": "<|image_pad|>"}, "multimodal_prompt_contract_mismatch", None),
        ({"text": None, "input_ids": [151655]}, "multimodal_prompt_contract_mismatch", None),
    ],
)
def test_what_is_refused(gateway: Running, fields: dict[str, Any], code: str, param: str | None) -> None:
    answer = generate(gateway, "hi", **fields)
    assert answer.error == (400, code) and answer.json["error"]["param"] == param


def test_a_schema_as_text(gateway: Running) -> None:
    schema = '{"type":"object"}'
    assert generate(gateway, "[[say {}]]", sampling_params={"json_schema": schema}).status == 200
    assert gateway.seen("generate")[-1]["message"]["sampling_params"]["json_schema"] == schema


@pytest.mark.parametrize("path", ["/parse/function_call", "/parse/reasoning"])
def test_a_body_that_is_not_right(gateway: Running, path: str) -> None:
    assert gateway.call("POST", path, {"text": "a"}).error == (400, "missing_required_parameter")
    assert gateway.call("POST", path, b"{").error == (400, "invalid_json")
