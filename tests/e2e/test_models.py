"""Several models behind one gateway, each with the bundle of its own worker."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.running import Running, image_part, picture, running, until

LOCAL, REMOTE = "model-here", "model-elsewhere"
DEFAULTS = {"temperature": 0.25, "top_p": 0.5, "top_k": 20.0, "stop_token_ids": [7]}  # as a generation config has them


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    """One worker names a folder of this host, the other an id of the hub, which nobody may need to ask."""
    defaults = json.dumps(json.dumps(DEFAULTS))  # text that holds JSON
    labels = ("--label", f"default_sampling_params_json={defaults}")
    engines = [("--model-name", LOCAL, *labels), ("--model-name", REMOTE, "--tokenizer-path", "nobody/has-this-model")]
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    with running(engines=engines, environment=environment) as found:
        until(lambda: all(worker["status"] == "ready" for worker in found.workers()), what="both workers")
        yield found


def test_both_are_listed(gateway: Running) -> None:
    cards = {card["id"]: card for card in gateway.call("GET", "/v1/models").json["data"]}
    assert cards.keys() == {LOCAL, REMOTE}
    assert cards[LOCAL]["multimodal"] == cards[REMOTE]["multimodal"] is not None


@pytest.mark.parametrize("index", [0, 1])
def test_a_request_reaches_the_worker_of_its_model(gateway: Running, index: int) -> None:
    before = [len(engine.seen("generate")) for engine in gateway.engines]
    answer = gateway.chat([image_part(picture())], model=[LOCAL, REMOTE][index])
    assert answer.status == 200 and answer.json["model"] == [LOCAL, REMOTE][index]
    after = [len(engine.seen("generate")) for engine in gateway.engines]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1 - index, index]


def test_a_bundle_comes_from_the_folder_or_from_the_worker(gateway: Running) -> None:
    loaded = {line.split("model=")[1].split()[0]: line for line in gateway.log().splitlines() if "model loaded" in line}
    assert "bundle=worker grpc://" in loaded[REMOTE] and "bundle=/" in loaded[LOCAL]


def test_a_worker_s_sampling_defaults_fill_what_a_request_leaves_out(gateway: Running) -> None:
    """20.0 is a top_k; what the gateway does not know is left alone; the request's own value wins."""

    def sent(**fields: object) -> dict[str, object]:
        assert gateway.chat("hi", model=LOCAL, **fields).status == 200
        found: dict[str, object] = gateway.engines[0].seen("generate")[-1]["message"]["sampling_params"]
        return found

    plain = sent()
    assert {name: plain[name] for name in ("temperature", "top_p", "top_k")} == {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 20,
    }
    assert "stop_token_ids" not in plain
    assert sent(temperature=1, top_k=5)["temperature"] == 1.0 and sent(top_k=5)["top_k"] == 5
