"""Chat completions from outside: pictures and text, whole and streamed, errors with status, code and header."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.running import MODEL, Running, data_url, image_part, picture, running, text_part, until


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as found:
        yield found


def test_a_picture_reaches_the_engine(gateway: Running) -> None:
    answer = gateway.chat([text_part("What is "), image_part(picture()), text_part(" this?")])
    assert answer.status == 200
    assert answer.text.startswith(
        "I received 1 image: pixel_values float32 (280, 1536), image_grid_thw [1, 14, 20], 70 "
    )
    body = answer.json
    assert body["object"] == "chat.completion" and body["model"] == MODEL
    assert body["id"] == answer.headers["x-request-id"] and body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["prompt_tokens"] > 70 and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "preprocess;dur=" in answer.headers["server-timing"]


def test_streamed_and_whole_say_the_same(gateway: Running) -> None:
    content = [image_part(picture(seed=3)), text_part("?")]
    whole = gateway.chat(content).text
    events = gateway.chat(content, stream=True, stream_options={"include_usage": True}).events
    assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"]["prompt_tokens"] > 70
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    pieces = [event["choices"][0] for event in events[1:-2]]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole
    assert pieces[-1]["delta"] == {} and pieces[-1]["finish_reason"] == "stop"
    assert all("role" not in piece["delta"] for piece in pieces)


def test_ten_pictures_keep_their_order(gateway: Running) -> None:
    sizes = [(256 + 32 * index, 640 - 32 * index) for index in range(10)]
    content = [image_part(picture(height, width, seed=index)) for index, (height, width) in enumerate(sizes)]
    answer = gateway.chat([*content, text_part("?")], max_tokens=4000)
    assert answer.status == 200
    expected = [f"[1, {round(h / 32) * 2}, {round(w / 32) * 2}]" for h, w in sizes]
    shown = [part.split("image_grid_thw ")[1].split("]")[0] + "]" for part in answer.text.split("; ")]
    assert shown == expected, answer.text


def test_the_same_picture_twice(gateway: Running) -> None:
    part = image_part(picture(seed=5))
    answer = gateway.chat([part, part, text_part("?")])
    assert answer.text.count("image_grid_thw [1, 14, 20]") == 2 and "(560, 1536)" in answer.text


def test_text_only(gateway: Running) -> None:
    answer = gateway.chat("How are you?")
    assert answer.status == 200 and "no media" in answer.text


def test_several_choices(gateway: Running) -> None:
    body = gateway.chat("hi", n=3).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 1
    events = gateway.chat("hi", n=2, stream=True).events
    finishes = [event["choices"][0]["index"] for event in events[:-1] if event["choices"][0]["finish_reason"]]
    assert finishes == [0, 1] and events[-1] == "[DONE]"


def test_a_stop_string_is_cut_out_and_never_leaks(gateway: Running) -> None:
    full = gateway.chat("hi").text
    stop = full[10:16]
    answer = gateway.chat("hi", stop=[stop])
    choice = answer.json["choices"][0]
    assert choice["message"]["content"] == full[: full.index(stop)]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    events = gateway.chat("hi", stop=[stop], stream=True).events
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == full[: full.index(stop)]


def test_max_tokens_end_with_length(gateway: Running) -> None:
    body = gateway.chat("hi", max_tokens=3).json
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 3
    assert "matched_stop" not in body["choices"][0]


def test_logprobs_cover_the_content(gateway: Running) -> None:
    choice = gateway.chat("hi", max_tokens=5, logprobs=True, top_logprobs=2).json["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["bytes"] for entry in entries)
    streamed = gateway.chat("hi", max_tokens=5, logprobs=True, top_logprobs=2, stream=True).events[:-1]
    found = [entry for event in streamed for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert found == entries


BAD_PICTURES = {
    "empty": (data_url(b""), "could not be determined|empty|no image"),
    "no picture": (data_url(b"hello world"), ""),
    "truncated": (data_url(picture()[:4000]), ""),
    "no comma": ("data:image/png;base64AAAA", "missing comma"),
    "no base64": ("data:image/png,%89PNG", "base64"),
    "garbage": ("data:image/png;base64,!!!!", ""),
    "file": ("file:///etc/passwd", "file"),
    "ftp": ("ftp://example.com/a.png", "ftp"),
    "nothing": ("", ""),
    "relative": ("/a.png", ""),
}


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_bad_pictures_name_their_item(gateway: Running, name: str) -> None:
    url, words = BAD_PICTURES[name]
    answer = gateway.chat([image_part(picture()), {"type": "image_url", "image_url": {"url": url}}])
    assert answer.error == (400, "multimodal_processing_failed")
    assert answer.headers["x-smg-error-code"] == "multimodal_processing_failed"
    message = answer.json["error"]["message"]
    assert message.startswith("media item 1: ") and "base64,A" not in message
    assert answer.json["error"]["type"] == "invalid_request_error"


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": ({"model": "nope"}, 404, "model_not_found"),
    "eleven pictures": (
        {"messages": [{"role": "user", "content": [image_part(picture(64, 64))] * 11}]},
        400,
        "invalid_multimodal_request",
    ),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "http://h/a.wav"}}]}]},
        400,
        "invalid_multimodal_request",
    ),
    "two clips": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://h/a.mp4"}}] * 2}
            ]
        },
        400,
        "invalid_multimodal_request",
    ),
    "anchor in text": (
        {"messages": [{"role": "user", "content": [image_part(picture(64, 64)), text_part("<|image_pad|>")]}]},
        400,
        "multimodal_prompt_contract_mismatch",
    ),
    "anchor without media": (
        {"messages": [{"role": "user", "content": "<|image_pad|>"}]},
        400,
        "multimodal_prompt_contract_mismatch",
    ),
    "clip anchor": (
        {"messages": [{"role": "user", "content": "<|video_pad|>"}]},
        400,
        "multimodal_prompt_contract_mismatch",
    ),
    "long side": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": data_url(picture(64, 64)), "max_long_side_pixel": 100},
                        }
                    ],
                }
            ]
        },
        400,
        "multimodal_processing_failed",
    ),
    "thin": (
        {"messages": [{"role": "user", "content": [image_part(picture(3, 700))]}]},
        400,
        "multimodal_processing_failed",
    ),
    "no messages": ({"messages": []}, 400, "empty_array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_the_engine(gateway: Running, name: str) -> None:
    fields, status, code = REFUSED[name]
    before = len(gateway.seen())
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = gateway.call("POST", "/v1/chat/completions", body)
    assert answer.error == (status, code)
    assert answer.headers["x-smg-error-code"] == code
    assert len(gateway.seen()) == before


def test_routes_that_do_not_exist(gateway: Running) -> None:
    assert gateway.call("POST", "/v1/nope", {}).error == (404, "unknown_url")
    assert gateway.call("POST", "/v1/nope", {}).message == "Invalid URL (POST /v1/nope)"
    for path in ("/chat/completions", "/v1/v1/chat/completions", "//v1/chat/completions", "/v1/chat/completions/"):
        assert gateway.call("POST", path, {}).message.endswith("; did you mean /v1/chat/completions?")
    assert gateway.call("GET", "/v1/health").message.endswith("; did you mean /health?")
    assert gateway.call("GET", "/metrics").message.endswith("; metrics have a port of their own, --prometheus-port")
    assert gateway.call("GET", "/v1/chat/completions/").error == (404, "unknown_url")
    wrong = gateway.call("GET", "/v1/chat/completions")
    assert wrong.error == (405, "method_not_allowed") and wrong.headers["allow"] == "POST"
    assert gateway.call("POST", "/v1/chat/completions", b"{nope").error == (400, "invalid_json")
    plain = gateway.call("POST", "/v1/chat/completions", b"{}", {"Content-Type": "text/plain"})
    assert plain.error == (400, "json_parse_error")


def test_request_ids_come_back(gateway: Running) -> None:
    answer = gateway.call("GET", "/health", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert gateway.call("GET", "/health", headers={"x-request-id": "a" * 129}).headers["x-request-id"] != "a" * 129
    assert gateway.call("GET", "/health", headers={"x-correlation-id": "c"}).headers["x-request-id"] == "c"


def test_models_workers_and_health(gateway: Running) -> None:
    card = gateway.call("GET", "/v1/models").json["data"][0]
    assert card["id"] == MODEL and card["multimodal"] == {"family": "qwen3_vl", "limits": {"image": 10, "video": 1}}
    assert gateway.call("GET", "/liveness").body == b"OK" and gateway.call("GET", "/health").body == b"OK"
    assert gateway.call("GET", "/readiness").json == {"status": "ready", "healthy_workers": 1, "total_workers": 1}
    workers = gateway.call("GET", "/workers").json
    (worker,) = workers["workers"]
    assert workers["total"] == 1 and worker["is_healthy"] and worker["labels"]["model_type"] == "qwen3_vl"
    assert gateway.call("GET", f"/workers/{worker['id']}").json["url"] == worker["url"]
    assert gateway.call("GET", "/workers/nope").json["code"] == "WORKER_NOT_FOUND"
    assert gateway.call("DELETE", "/workers/nope").status == 404
    again = gateway.call("POST", "/workers", {"url": worker["url"]})
    assert (again.status, again.json["code"]) == (409, "WORKER_ALREADY_EXISTS")
    for url in ("http://127.0.0.1:1", "ipc:///tmp/x", "nonsense"):
        assert gateway.call("POST", "/workers", {"url": url}).status == 400


def test_metrics_tell_what_happened(gateway: Running) -> None:
    before = gateway.metric('smg_mm_tensors_total{path="inline",runtime="vllm"}')
    gateway.chat([image_part(picture(seed=9)), text_part("?")])
    assert gateway.metric('smg_mm_tensors_total{path="inline",runtime="vllm"}') == before + 3
    text = gateway.metrics()
    assert 'smg_http_responses_total{error_code="multimodal_processing_failed",path="/v1/chat/completions"' in text
    for name in ("smg_worker_health", "mediagate_ring_size_bytes", "mediagate_stage_duration_seconds_bucket"):
        assert name in text
    until(lambda: gateway.metric("mediagate_ring_used_bytes{") == 0, what="spans given back")


def test_nothing_is_held_after_all_that(gateway: Running) -> None:
    until(lambda: gateway.metric("smg_admission_inflight") == 0)
    for arena in ("inputs", "outputs"):
        until(lambda arena=arena: gateway.metric(f'mediagate_ring_used_bytes{{ring="{arena}"}}') == 0, what=arena)
    workers = gateway.call("GET", "/workers").json["workers"]
    assert [worker["load"] for worker in workers] == [0]
    assert json.dumps(gateway.seen())  # the journal is whole
