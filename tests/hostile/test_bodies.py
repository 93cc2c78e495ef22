"""What one request body may make of the frontend: JSON of any shape, memory, text beyond the window, slowness."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.admission import Bodies, Grant
from pipeline.errors import GatewayError
from pipeline.protocols import http
from pipeline.protocols.chat_route import ChatApi
from tests.e2e.running import CHAT, MODEL, Running, data_url, image_part, picture, running, until
from tools.fuzzing.bodies import BODY, judged, pairs, places, written
from tools.fuzzing.bodies import Bodies as BodySubject

MIB = 1 << 20
UNHURRIED = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def reader() -> BodySubject:
    made = BodySubject()
    made.prepare()
    return made


TEXTS = st.text(max_size=12) | st.sampled_from(["<|image_pad|>", "data:image/png;base64,", "auto", "image_url", "\0"])
NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**40, -1])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@UNHURRIED
@given(st.data())
def test_anything_in_any_place_is_taken_or_refused(reader: BodySubject, data: st.DataObject) -> None:
    """Every field of a whole body in turn holds anything: an engine message, or an answer below 500 of some length."""
    body = pairs(json.loads(json.dumps(BODY)))
    for _ in range(data.draw(st.integers(1, 3))):
        container, at = data.draw(st.sampled_from(places(body)))
        new = pairs(data.draw(ANYTHING))
        container[at] = (container[at][0], new) if isinstance(container[at], tuple) else new
    text = written(body).encode("utf-8", "surrogatepass")
    try:
        reader.through(bytearray(text))
    except GatewayError as error:
        judged(error)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 3000 + "]" * 3000}}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "process_messages_failed"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_value"),
        ({"messages": [{"role": "x" * 5000, "content": "a"}]}, "invalid_value"),
        ({"metadata": json.loads("[" * 900 + "]" * 900)}, None),
    ],
)
def test_found_by_fuzzing(reader: BodySubject, fields: dict[str, Any], code: str | None) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], **fields}
    try:
        assert reader.through(bytearray(json.dumps(body).encode())) == "accepted"
        assert code is None
    except GatewayError as error:
        assert error.code == code
        assert len(error.message) <= 1000


def test_what_is_read_does_not_hold_the_body(reader: BodySubject) -> None:
    """The parsed request was a view of the body to the end of the answer."""
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    body = bytearray(json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]}).encode())
    asked = ChatApi().read(body, lambda name: reader.model)
    begin_answer = asked.answer
    with pytest.raises(BufferError):
        body.append(0)
    del asked
    body.append(0)
    assert callable(begin_answer)


class Slow:
    """A request whose body comes in pieces, with pauses before them."""

    def __init__(self, *pieces: tuple[float, bytes], length: int | None = None) -> None:
        self.headers: dict[str, str] = {}
        self.content_length = length
        self.content = self
        self._pieces = list(pieces)
        self.chunk_sizes: list[int] = []

    def set_read_chunk_size(self, size: int) -> None:
        self.chunk_sizes.append(size)

    def read_nowait(self) -> bytes:
        return b""

    def at_eof(self) -> bool:
        return False

    async def readany(self) -> bytes:
        if not self._pieces:
            return b""
        pause_s, piece = self._pieces.pop(0)
        await asyncio.sleep(pause_s)
        return piece


def room(limit: int = 8 * MIB) -> Bodies:
    return Bodies(limit, 1.0, lambda reason: None)


async def test_a_body_that_stalls_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_STALL_S", 0.05)
    bodies = room()
    with pytest.raises(GatewayError, match="too slowly") as refused:
        await http.read_body(Slow((0, b"{"), (9, b"}"), length=MIB), bodies, 4 * MIB)  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.code) == (408, "request_timeout")
    assert bodies.gate.held == 0


async def test_a_body_that_trickles_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no progress; a large piece buys time."""
    monkeypatch.setattr(http, "BODY_GRACE_S", 0.1)
    bodies = room()
    with pytest.raises(GatewayError, match="too slowly"):
        await http.read_body(Slow(*[(0.03, b" ")] * 50), bodies, 4 * MIB)  # type: ignore[arg-type]
    steady = [(0.03, bytes(8192))] * 8
    body, grant = await http.read_body(Slow(*steady), bodies, 4 * MIB)  # type: ignore[arg-type]
    assert len(body) == 8 * 8192
    grant.release()
    assert bodies.gate.held == 0


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"",', b"1,", b'{"a":[]},', b"\\u005b"])
async def test_json_values_are_counted_as_they_arrive(unit: bytes) -> None:
    bodies = room(256 * MIB)
    piece = unit * (MIB // len(unit))
    with pytest.raises(GatewayError, match="too many JSON values") as refused:
        await http.read_body(Slow(*[(0, piece)] * 99), bodies, 256 * MIB)  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.code) == (413, "request_body_too_large")
    assert bodies.gate.held == 0


def test_a_picture_s_text_costs_nothing() -> None:
    assert http.parsed_bytes(b"data:image/png;base64" + b"iVBORw0KGgo/+=" * 70_000) == 0


def test_a_prompt_stays_counted_when_its_body_is_gone() -> None:
    """Grant.shrink: what is kept of a body, never more than it was."""
    bodies = room(1000)
    grant = Grant(bodies.gate, 0)
    assert grant.grow(900)
    grant.shrink(100)
    assert bodies.gate.held == 100
    grant.shrink(500)
    assert bodies.gate.held == 100
    grant.release()
    assert bodies.gate.held == 0


# ---------------------------------------------------------------- from outside


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running("--max-payload-size=67108864", "--max-concurrent-requests=2", "--queue-size=400") as found:
        yield found


def private_bytes(gateway: Running) -> int:
    (pid,) = gateway.pids("front")
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def body_of(**fields: str) -> bytes:
    """A chat body with raw JSON in some of its fields."""
    whole = {"model": f'"{MODEL}"', "messages": '[{"role":"user","content":"x"}]', **fields}
    return ("{" + ",".join(f'"{name}":{text}' for name, text in whole.items()) + "}").encode()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (body_of(chat_template_kwargs='{"x":[' + "[]," * 10_000_000 + "[]]}"), 413, "request_body_too_large"),
        (body_of(messages="[" + '{"role":"user","content":""},' * 1_000_000 + "0]"), 413, "request_body_too_large"),
        (body_of(stop_token_ids="[" + "1," * 20_000_000 + "1]"), 413, "request_body_too_large"),
        (body_of(messages='[{"role":"user","content":"' + "a" * 40_000_000 + '"}]'), 400, "context_length_exceeded"),
        (body_of(messages='[{"role":"user","content":"' + "a b " * 3_000_000 + '"}]'), 400, "context_length_exceeded"),
        (body_of(messages='[{"role":"' + "a" * 30_000_000 + '","content":"x"}]'), 400, "invalid_value"),
        (body_of(metadata="[" * 30_000_000), 413, "request_body_too_large"),
    ],
    ids=["empty lists", "messages", "numbers", "text", "tokens", "an enum's value", "depth"],
)
def test_a_large_body_costs_the_frontend_a_few_times_itself(
    gateway: Running, body: bytes, status: int, code: str
) -> None:
    """A list of empty lists took 25 times its bytes, a text of 500 MB some 100 GB."""
    before = private_bytes(gateway)
    answer = gateway.call("POST", CHAT, body)
    assert answer.error == (status, code)
    assert len(answer.body) < 2000
    assert private_bytes(gateway) - before < 5 * len(body) + 64 * MIB
    assert gateway.call("GET", "/liveness").status == 200


def test_bodies_that_wait_are_not_read(gateway: Running) -> None:
    """Two slots are taken, a hundred clients push eight megabytes each: what the frontend takes of them is little."""
    slow = [gateway.open_chat("[[fault silent]]") for _ in range(2)]
    until(lambda: gateway.held().get("slots") == 2)
    before = private_bytes(gateway)
    waiting = []
    for _ in range(100):
        client = socket.create_connection((gateway.gateway.host, gateway.gateway.port))
        client.setblocking(False)
        client.send(gateway.head(8 * MIB, "waits"))
        waiting.append(client)
    for _ in range(30):
        for client in waiting:
            try:
                client.send(bytes(65536))
            except BlockingIOError:
                continue
    until(lambda: gateway.held().get("queued") == 100)
    assert private_bytes(gateway) - before < 100 * 512 * 1024
    for client in [*waiting, *slow]:
        client.close()
    gateway.given_back()
    assert gateway.chat([image_part(picture())]).status == 200


def test_small_bodies_of_a_conversation_are_not_large_together(gateway: Running) -> None:
    """Each turn is small enough; the chain of them would become objects all at once, at every further turn."""
    message = {"role": "user", "content": [{"type": "input_text", "text": ""}]}
    previous, answer = None, None
    for _ in range(8):
        body = {"model": MODEL, "input": [message] * 30_000, "previous_response_id": previous, "max_output_tokens": 2}
        answer = gateway.call("POST", "/v1/responses", body)
        if answer.status != 200:
            break
        previous = answer.json["id"]
    assert answer is not None and answer.status in (400, 413)
    assert answer.json["error"]["code"] in ("context_length_exceeded", "request_body_too_large")


def test_pictures_of_a_conversation_do_not_pay_for_text(gateway: Running) -> None:
    """What earlier turns hold of pictures is not taken from what this turn holds of text."""
    content = [{"type": "input_image", "image_url": data_url(picture(900, 1400))}, {"type": "input_text", "text": "x"}]
    first = gateway.call("POST", "/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": content}]})
    assert first.status == 200, first.body
    text = "a" * (17 << 20)
    body = {"model": MODEL, "input": text, "previous_response_id": first.json["id"]}
    answer = gateway.call("POST", "/v1/responses", body)
    assert answer.error == (400, "context_length_exceeded")
    assert "bytes of text" in answer.message
