"""Prefill and decode workers behind one gateway: recorded requests of the real one played, both legs compared field by
field; then roles, failures and what a killed leg leaves behind.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.e2e.golden import keep_only
from tests.e2e.running import CHAT, Running, data_url, image_part, picture, running, until
from tests.e2e.test_other_engines import SAID, Worker
from tests.pipeline.bundles import unpack_bundle

DATA = Path(__file__).parents[1] / "data" / "disaggregation"
HANDED_OVER = json.loads((DATA / "v1.11_pd_vllm_nixl.json").read_text())[1]["request"]["kv_transfer_params_json"]
NIXL = ("--label", "kv_connector=NixlConnector")
PROCESSOR = ("--label", "mm_processor=inprocess", "--label", "mm_media_ref_schemes=http,https,data")


def _identity() -> bytes:
    """What the recorded prefill worker made of the references: what the recorded decode leg has of them."""
    told = json.loads((DATA / "v1.11_pd_vllm_media_refs.json").read_text())[1]["request"]
    media = dict(told["mm_inputs"])
    tensors = media.pop("model_specific_tensors")
    identity = pb.MediaIdentity(prompt_token_ids=told["tokenized"]["input_ids"], mm_inputs=pb.MultimodalInputs(**media))
    for name, tensor in tensors.items():
        kept = {"shape": tensor["shape"], "dtype": tensor["dtype"], "inline": bytes.fromhex(tensor["inline"]["hex"])}
        identity.mm_inputs.model_specific_tensors[name].CopyFrom(pb.TensorData(**kept))
    data: bytes = identity.SerializeToString()
    return data


# model -> bundle, runtime, flags of the prefill worker and of the decode worker
PAIRS: Mapping[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "vllm_nixl": ("qwen3_vl", "vllm", (*NIXL, "--hand-over", HANDED_OVER), ()),
    "vllm_mooncake": (
        "llava15",
        "vllm",
        ("--label", "kv_connector=MooncakeConnector", "--label", "kv_engine_id=eng-1"),
        (),
    ),
    "vllm_language_model_only": (
        "llava15",
        "vllm",
        (*NIXL, "--hand-over", HANDED_OVER),
        ("--label", "supports_vision=false"),
    ),
    "vllm_media_refs": (
        "qwen3_vl",
        "vllm",
        (*NIXL, *PROCESSOR, "--hand-over", HANDED_OVER, "--identity", _identity().hex()),
        PROCESSOR,
    ),
    "sglang": ("qwen3_vl", "sglang", (), ()),
}


def legs(model: str) -> list[tuple[str, Any]]:
    return [(one["to"], one["request"]) for one in json.loads((DATA / f"v1.11_pd_{model}.json").read_text())]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Qwen3-VL's with the part of the tokenizer that is needed, and LLaVA's."""
    folder = tmp_path_factory.mktemp("bundles")
    found = {name: unpack_bundle(name, folder) for name in ("qwen3_vl", "llava15")}
    texts = [request["tokenized"]["original_text"] for model in ("vllm_nixl", "sglang") for _, request in legs(model)]
    keep_only(found["qwen3_vl"] / "tokenizer.json", [*texts, SAID])
    return found


class Pair:
    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill = prefill
        self.decode = decode

    def sent(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """The messages of one request by leg."""
        return {
            role: [one["message"] for one in worker.seen() if one["message"]["request_id"].startswith(request_id)]
            for role, worker in (("prefill", self.prefill), ("decode", self.decode))
        }


@pytest.fixture(scope="module")
def fleet(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    folder = tmp_path_factory.mktemp("workers")
    found = {
        model: Pair(*(Worker(folder, runtime, model, bundles[bundle], *flags) for flags in (prefill, decode)))
        for model, (bundle, runtime, prefill, decode) in PAIRS.items()
    }
    yield found
    for pair in found.values():
        pair.prefill.stop()
        pair.decode.stop()


@pytest.fixture(scope="module")
def gateway(fleet: dict[str, Pair]) -> Iterator[Running]:
    flags = ["--pd-disaggregation"]
    for pair in fleet.values():
        flags += ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
    with running(*flags, engines=(), wait=False) as found:
        found.gateway.wait_until()
        until(lambda: all(one["status"] == "ready" for one in found.workers()), what="all workers")
        yield found


def ask(gateway: Running, model: str, pictures: int, request_id: str, **fields: Any) -> Any:
    files = [(DATA / f"image_{number}.png").read_bytes() for number in range(1, pictures + 1)]
    content = [*map(image_part, files), {"type": "text", "text": "B"}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
    return gateway.call("POST", CHAT, body, {"X-Request-Id": request_id})


def differences(recorded: Any, sent: Any, path: str = "") -> list[str]:
    """Where a described message is not what the record says."""
    if isinstance(recorded, dict) and "nbytes" in recorded:
        return [] if same_bytes(recorded, sent, path) else [f"{path}: {sent} is not {recorded}"]
    if isinstance(recorded, str) and recorded.endswith("...(cut)"):
        return [] if str(sent).startswith(recorded.removesuffix("...(cut)")) else [f"{path}: {str(sent)[:80]}"]
    if isinstance(recorded, dict) and "head" in recorded:
        same = len(sent) == recorded["len"] and sent[: len(recorded["head"])] == recorded["head"]
        same = same and sent[-len(recorded["tail"]) :] == recorded["tail"]
        return [] if same else [f"{path}: {len(sent)} ids differ"]
    if isinstance(recorded, dict) and isinstance(sent, dict):
        found = [f"{path}.{key}: only in one" for key in sorted(recorded.keys() ^ sent.keys())]
        both = recorded.keys() & sent.keys()
        return found + [line for key in both for line in differences(recorded[key], sent[key], f"{path}.{key}")]
    if isinstance(recorded, list) and isinstance(sent, list) and len(recorded) == len(sent):
        return [line for at, one in enumerate(recorded) for line in differences(one, sent[at], f"{path}[{at}]")]
    return [] if recorded == sent else [f"{path}: {str(sent)[:80]} is not {str(recorded)[:80]}"]


def same_bytes(recorded: dict[str, Any], sent: Any, path: str) -> bool:
    """Pixels differ by a rounding of 1.11.0's; everything else is equal to the last bit."""
    if "base64" in sent:
        data = base64.b64decode(sent["base64"])
        sent = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    is_equal: bool = sent["sha256"].startswith(recorded["sha256"])
    is_pixels = ".pixel_values." in path or ".encoder_input." in path
    return sent["nbytes"] == recorded["nbytes"] and (is_equal or is_pixels)


VARYING = ("request_id", "transfer_id", "bootstrap_room", "remote_bootstrap_addr", "remote_port")


def settled(message: Any) -> Any:
    """Without what varies, key lists in order and cut to what is there."""
    if isinstance(message, list):
        return [settled(one) for one in message]
    if not isinstance(message, dict):
        return message
    found = {name: settled(value) for name, value in message.items() if name not in VARYING}
    if "batched_keys" in found or "keep_on_cpu_keys" in found:
        there = {*found.get("model_specific_tensors", {}), *(["pixel_values"] if "pixel_values" in found else [])}
        for keys in ("batched_keys", "keep_on_cpu_keys"):
            if keys in found:
                found[keys] = sorted(there & set(found[keys]))
    if "kv_transfer_params_json" in found:
        found["kv_transfer_params_json"] = settled(json.loads(found["kv_transfer_params_json"]))
    return found


@pytest.mark.parametrize("model", sorted(PAIRS))
def test_both_legs_are_the_recorded_ones(gateway: Running, fleet: dict[str, Pair], model: str) -> None:
    recorded: dict[str, list[Any]] = {"prefill": [], "decode": []}
    for role, request in legs(model):
        recorded[role].append(request)
    for number in range(len(recorded["prefill"])):
        answer = ask(
            gateway, model, 2 if model in ("vllm_nixl", "vllm_media_refs") else 1, f"{model}.{number}!", n=number + 1
        )
        assert answer.status == 200, answer.body
        assert len(answer.json["choices"]) == number + 1
        assert PAIRS[model][0] == "llava15" or answer.text == SAID  # LLaVA's tokenizer has no such words
        pair = fleet[model]
        until(lambda: all(pair.sent(f"{model}.{number}!").values()), what="both legs")  # noqa: B023
        sent = pair.sent(f"{model}.{number}!")
        assert {role: len(messages) for role, messages in sent.items()} == {"prefill": 1, "decode": 1}
        assert sent["prefill"][0]["request_id"] == sent["decode"][0]["request_id"]
        for role in ("prefill", "decode"):
            assert differences(settled(recorded[role][number]), settled(sent[role][0])) == [], role
    gateway.given_back()
    assert gateway.metric('mediagate_stage_duration_seconds_count{modality="image",stage="decode"}') >= 1


def test_a_comparison_that_sees_a_difference() -> None:
    recorded = settled(legs("vllm_nixl")[1][1]["mm_inputs"])
    other = json.loads(json.dumps(recorded))
    other["mm_placeholders"][0]["length"] = 71
    assert differences(recorded, other) == [".mm_placeholders[0].length: 71 is not 70"]


def test_the_same_picture_is_fetched_and_decoded_once(gateway: Running, fleet: dict[str, Pair]) -> None:
    """One picture, two legs: one decode."""
    name = 'mediagate_stage_duration_seconds_count{modality="image",stage="preprocess"}'
    before = gateway.metric(name)
    content = [image_part(picture(96, 64, seed=77))]
    body = {"model": "sglang", "messages": [{"role": "user", "content": content}], "stream": True}
    answer = gateway.call("POST", CHAT, body)
    assert answer.streamed_text == SAID
    assert gateway.metric(name) == before + 1


def test_workers_show_their_roles(gateway: Running) -> None:
    listed = gateway.call("GET", "/workers").json
    assert listed["stats"] == {"prefill_count": 5, "decode_count": 5, "regular_count": 0}
    prefills = [one for one in listed["workers"] if one["worker_type"] == "prefill"]
    connectors = {one["model_id"]: one.get("kv_connector") for one in prefills}
    assert all(one["pd_pairing"] for one in listed["workers"])
    assert connectors["vllm_nixl"] == "NixlConnector" and connectors["sglang"] is None
    refused = gateway.call("POST", "/workers", {"url": "grpc://127.0.0.1:1"})
    assert refused.status == 400 and "serves with prefill and decode workers" in refused.json["error"]
    refused = gateway.call("POST", "/workers", {"url": "ipc:///tmp/x", "worker_type": "prefill"})
    assert refused.status == 400 and "direct ZMQ workers are not supported" in refused.json["error"]
    assert ask(gateway, "sglang", 0, "roles").status == 200
    for role in ("prefill", "decode"):
        assert re.search(rf'smg_worker_selection_total{{.*worker_type="{role}"}}', gateway.metrics())


def test_a_blind_decode_worker_refuses_choices(gateway: Running) -> None:
    """Before any pixel is decoded."""
    decoded = 'mediagate_stage_duration_seconds_count{modality="image",stage="decode"}'
    before = gateway.metric(decoded)
    answer = ask(gateway, "vllm_language_model_only", 1, "blind", n=2)
    assert answer.error == (400, "pd_decode_language_model_only_n_samples")
    assert gateway.metric(decoded) == before
    gateway.given_back()


def test_the_smaller_window_of_both_legs_counts(gateway: Running, fleet: dict[str, Pair]) -> None:
    decode = next(one for one in gateway.workers() if one["url"] == fleet["sglang"].decode.url)
    changed = {"url": decode["url"], "worker_type": "decode", "models": [{"id": "sglang", "context_length": 8}]}
    assert gateway.call("PUT", f"/workers/{decode['id']}", changed).status == 202
    until(lambda: ask(gateway, "sglang", 0, "window").status == 400, what="the smaller window")
    assert ask(gateway, "sglang", 0, "window").error == (400, "context_length_exceeded")


def test_the_access_line_names_both_workers(gateway: Running, fleet: dict[str, Pair]) -> None:
    assert ask(gateway, "vllm_nixl", 1, "both-workers").status == 200
    until(lambda: gateway.access("both-workers"), what="the access line")
    (line,) = gateway.access("both-workers")
    pair = fleet["vllm_nixl"]
    assert f"worker={pair.decode.url} prefill={pair.prefill.url} " in line


# ---------------------------------------------------------------- encode workers


def test_encode_workers_are_sent_what_is_recorded(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    recorded: dict[str, list[Any]] = {"encode": [], "prefill": [], "decode": []}
    for one in json.loads((DATA / "v1.11_epd_tokenspeed.json").read_text()):
        recorded[one["to"]].append(one["request"])
    folder = tmp_path_factory.mktemp("encoders")
    fleet = {role: Worker(folder, "tokenspeed", "epd", bundles["qwen3_vl"]) for role in recorded}
    flags = ["--epd-disaggregation", "--encode", fleet["encode"].url, "9100"]
    flags += ["--prefill", fleet["prefill"].url, "9000", "--decode", fleet["decode"].url]
    try:
        with running(*flags, engines=(), wait=False) as gateway:
            gateway.gateway.wait_until()
            until(lambda: all(one["status"] == "ready" for one in gateway.workers()), what="all workers")
            assert gateway.ready()
            for number in range(2):
                answer = ask(gateway, "epd", 1, f"epd.{number}!", n=number + 1)
                assert answer.status == 200 and answer.text == SAID
                until(lambda: all(legs_seen(fleet, number).values()), what="every leg")  # noqa: B023
                sent = legs_seen(fleet, number)
                for role, message in sent.items():
                    assert differences(settled(recorded[role][number]), settled(message)) == [], role
                assert same_rooms(sent)
            content = [{"type": "input_image", "image_url": data_url(picture(96, 64, seed=5))}]
            body = {"model": "epd", "input": [{"role": "user", "content": content}]}
            assert gateway.call("POST", "/v1/responses", body).status == 200
            until(lambda: len(fleet["encode"].seen("encode")) == 3, what="the third item")
            refused = gateway.call("POST", "/workers", {"url": "grpc://127.0.0.1:1"})
            assert refused.status == 400 and "encode and prefill and decode workers" in refused.json["error"]
            gateway.given_back()
    finally:
        for worker in fleet.values():
            worker.stop()


def legs_seen(fleet: Mapping[str, Worker], number: int) -> dict[str, Any]:
    """The messages of one request; encode legs have ids of their own and come in turn."""
    found = {"encode": [one["message"] for one in fleet["encode"].seen("encode")][number : number + 1]}
    for role in ("prefill", "decode"):
        seen = [one["message"] for one in fleet[role].seen()]
        found[role] = [one for one in seen if one["request_id"].startswith(f"epd.{number}!")]
    return {role: messages[0] if messages else None for role, messages in found.items()}


def same_rooms(sent: Mapping[str, Any]) -> bool:
    encode, prefill, decode = (sent[role] for role in ("encode", "prefill", "decode"))
    (embeddings,) = prefill["encode_bootstrap_info"]["items"]
    is_met: bool = encode["items"][0]["bootstrap_room"] == embeddings["bootstrap_room"]
    return is_met and prefill["kv_bootstrap_info"] == decode["kv_bootstrap_info"]
