"""A leg killed at each stage: what the client is told, what the other worker is told, and that nothing stays behind."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import CHAT, Answer, Running, image_part, picture, running, until
from tests.e2e.test_other_engines import Worker
from tests.e2e.test_pairs import HANDED_OVER, NIXL
from tests.pipeline.bundles import unpack_bundle

SEGMENTS = ("--multimodal-tensor-transport=shm", "--multimodal-shm-min-bytes=64", "--retry-max-retries=1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_bundle("llava15", tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running("--pd-disaggregation", *SEGMENTS, engines=()) as found:
        yield found


class Crew:
    """Workers of one model by role, each held as long as its file exists."""

    def __init__(
        self, gateway: Running, folder: Path, bundle: Path, runtime: str, *roles: str, slow: str = "0"
    ) -> None:
        self.model = folder.name
        self._gateway = gateway
        self.holds = {role: folder / f"hold-{role}" for role in roles}
        self.workers = {}
        for role, hold in self.holds.items():
            flags = ["--hold", str(hold), *(["--slow", slow] if role == "decode" else [])]
            flags += [*NIXL, "--hand-over", HANDED_OVER] if (runtime, role) == ("vllm", "prefill") else []
            self.workers[role] = Worker(folder, runtime, self.model, bundle, *flags)
        for role, worker in self.workers.items():
            assert gateway.call("POST", "/workers", {"url": worker.url, "worker_type": role}).status == 202
        until(lambda: sum(one["status"] == "ready" for one in self.mine()) == len(roles), what="the workers")

    def mine(self) -> list[dict[str, Any]]:
        return [one for one in self._gateway.workers() if one["model_id"] == self.model]

    def hold(self, *roles: str) -> None:
        for role in roles:
            self.holds[role].touch()

    def ask(self, *, stream: bool = False) -> "Asking":
        content = [image_part(picture(336, 336)), {"type": "text", "text": "B"}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "stream": stream}
        return Asking(self._gateway, body)

    def saw(self, role: str, event: str = "generate") -> None:
        until(lambda: self.workers[role].seen(event), what=f"{event} at the {role} worker")

    def stop(self) -> None:
        for worker in self.workers.values():
            with contextlib.suppress(ValueError):  # killed: its input is closed
                worker.stop()


class Asking(threading.Thread):
    """A request under way."""

    def __init__(self, gateway: Running, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._gateway, self._body = gateway, body
        self._answers: list[Answer] = []
        self.start()

    @property
    def answer(self) -> Answer:
        self.join(20)
        (found,) = self._answers
        return found

    def run(self) -> None:
        self._answers.append(self._gateway.call("POST", CHAT, self._body))


@pytest.fixture
def crew(gateway: Running, tmp_path: Path, bundle: Path, request: pytest.FixtureRequest) -> Iterator[Crew]:
    runtime, slow = getattr(request, "param", ("vllm", "0"))
    folder = tmp_path / request.node.name.partition("[")[0][-40:]
    folder.mkdir()
    made = Crew(gateway, folder, bundle, runtime, "prefill", "decode", slow=slow)
    yield made
    gateway.given_back()
    assert gateway.published() == []
    for one in made.mine():
        gateway.call("DELETE", f"/workers/{one['id']}")
    made.stop()


def test_a_prefill_worker_killed_while_it_prefills(crew: Crew) -> None:
    crew.hold("prefill")
    asking = crew.ask()
    crew.saw("prefill")
    crew.workers["prefill"].kill()
    assert asking.answer.error == (503, "prefill_worker_failed_to_start")
    assert crew.workers["decode"].seen() == []


def test_a_decode_worker_killed_before_it_answers(crew: Crew, gateway: Running) -> None:
    """Nothing of the media is held while it decodes: they were the prefill leg's."""
    crew.hold("decode")
    asking = crew.ask()
    crew.saw("decode")
    until(lambda: not {"inputs", "outputs", "published segments"} & gateway.held().keys(), what="the media's end")
    assert gateway.held()["slots"] == 1
    crew.workers["decode"].kill()
    assert asking.answer.error == (503, "decode_worker_failed_to_start")
    assert crew.workers["prefill"].seen("abort") == []


@pytest.mark.parametrize("crew", [("vllm", "0.3")], indirect=True)
def test_a_decode_worker_killed_while_it_answers(crew: Crew) -> None:
    asking = crew.ask(stream=True)
    crew.saw("decode")
    until(lambda: crew.mine()[1]["load"] == 1, what="the decode leg")
    crew.workers["decode"].kill()
    answer = asking.answer
    if answer.status != 200:  # killed before its first token
        assert answer.error == (503, "decode_worker_failed_to_start")
        return
    assert answer.events[-2]["error"]["code"] == "worker_stream_failed" and answer.events[-1] == "[DONE]"


@pytest.mark.parametrize("crew", [("sglang", "0")], indirect=True)
def test_a_prefill_worker_killed_while_both_wait(crew: Crew) -> None:
    crew.hold("prefill", "decode")
    asking = crew.ask()
    crew.saw("prefill")
    crew.saw("decode")
    crew.workers["prefill"].kill()
    assert asking.answer.error == (503, "prefill_worker_failed_to_start")
    crew.saw("decode", "abort")


@pytest.mark.parametrize("crew", [("tokenspeed", "0")], indirect=True)
def test_a_decode_worker_killed_while_both_wait(crew: Crew) -> None:
    crew.hold("prefill", "decode")
    asking = crew.ask()
    crew.saw("prefill")
    crew.saw("decode")
    crew.workers["decode"].kill()
    assert asking.answer.error == (503, "decode_worker_failed_to_start")
    crew.saw("prefill", "abort")


def test_an_encode_worker_killed_while_it_encodes(tmp_path: Path, bundle: Path) -> None:
    with running("--epd-disaggregation", *SEGMENTS, engines=()) as gateway:
        crew = Crew(gateway, tmp_path, bundle, "tokenspeed", "encode", "prefill", "decode")
        crew.hold("encode", "prefill", "decode")
        asking = crew.ask()
        for role, event in (("encode", "encode"), ("prefill", "generate"), ("decode", "generate")):
            crew.saw(role, event)
        crew.workers["encode"].kill()
        answer = asking.answer
        assert answer.error == (503, "start_generation_failed") and "Encode worker" in answer.message
        crew.saw("prefill", "abort")
        crew.saw("decode", "abort")
        gateway.given_back()
        crew.stop()
