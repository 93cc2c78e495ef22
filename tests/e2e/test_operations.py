"""What an operator relies on: keys, CORS, keep-alive comments, whole characters, logs without payloads or secrets."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.running import CHAT, QUICK, Running, data_url, image_part, picture, question, running, text_part, until

KEY = "sk-a-secret-of-the-operator"
SPEECH = "Grüße 👨‍👩‍👧‍👦, 日本語 ... und 🏳️‍🌈!"
ORIGIN = {"Origin": "https://app.example"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    flags = ["--log-json", "--sse-keepalive-secs=1", "--cors-allowed-origins", "https://app.example"]
    quick = tuple(flag for flag in QUICK if flag != "--server-timing")
    engine = ("--text", SPEECH, "--tokens-per-chunk=1")
    with running(*flags, quick=quick, engine=engine, environment={"MEDIAGATE_API_KEY": KEY}) as found:
        yield found


def key(value: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


WRONG = [{}, key("wrong"), key(KEY + "x"), key(""), {"Authorization": KEY}, {"x-api-key": KEY}]
GUARDED = [("POST", CHAT), ("GET", "/workers"), ("POST", "/workers"), ("DELETE", "/workers/x")]


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("method, path", GUARDED)
def test_without_the_key(gateway: Running, method: str, path: str, headers: dict[str, str]) -> None:
    answer = gateway.call(method, path, question("hi") if method == "POST" else None, headers)
    assert answer.error == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == 'Bearer realm="data-plane"'
    assert answer.headers["x-smg-error-code"] == "invalid_api_key"


def test_a_key_that_was_not_sent_is_not_called_wrong(gateway: Running) -> None:
    for headers in ({}, {"Authorization": KEY}, {"x-api-key": KEY}):
        answer = gateway.call("POST", CHAT, question("hi"), headers)
        assert answer.message == "No API key was sent: it goes into the header Authorization: Bearer KEY."
    assert gateway.call("POST", CHAT, question("hi"), key("wrong")).message == "Incorrect API key provided."
    answer = gateway.call("POST", "/v1/messages", question("hi"))
    assert answer.message == "No API key was sent: it goes into the header Authorization: Bearer KEY or x-api-key."


def test_with_the_key(gateway: Running) -> None:
    assert gateway.call("POST", CHAT, question("hi"), key()).status == 200
    assert gateway.call("POST", CHAT, question("hi"), {"Authorization": f"bearer  {KEY} "}).status == 200
    assert gateway.call("GET", "/workers", headers=key()).json["total"] == 1


@pytest.mark.parametrize("path", ["/health", "/liveness", "/readiness", "/v1/models"])
def test_open_routes_need_no_key(gateway: Running, path: str) -> None:
    assert gateway.call("GET", path).status == 200
    probed = gateway.call("HEAD", path)
    assert probed.status == 200 and not probed.body


def test_browsers_of_the_allowed_origin(gateway: Running) -> None:
    asked = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = gateway.call("OPTIONS", CHAT, headers=asked)
    assert preflight.status == 200 and not preflight.body
    assert preflight.headers["access-control-allow-origin"] == ORIGIN["Origin"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for answer in (
        gateway.call("POST", CHAT, question("hi"), {**key(), **ORIGIN}),
        gateway.call("POST", CHAT, question("hi", stream=True), {**key(), **ORIGIN}),
        gateway.call("POST", CHAT, question("hi"), ORIGIN),
        gateway.call("GET", "/nope", headers=ORIGIN),
    ):
        assert answer.headers["access-control-allow-origin"] == ORIGIN["Origin"], answer.status
        assert answer.headers["vary"] == "Origin" and "x-request-id" in answer.headers["access-control-expose-headers"]


def test_browsers_of_other_origins(gateway: Running) -> None:
    other = {"Origin": "https://evil.example"}
    for headers in (other, {**other, "Access-Control-Request-Method": "POST"}):
        answer = gateway.call("OPTIONS", CHAT, headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "access-control-allow-origin" not in gateway.call("GET", "/health", headers=other).headers


def test_a_quiet_stream_is_kept_alive(gateway: Running) -> None:
    body = json.dumps(question("[[fault silent after=3]]", stream=True)).encode()
    with gateway.connect() as client:
        client.sendall(gateway.head(len(body), f"quiet\r\nAuthorization: Bearer {KEY}") + body)
        client.settimeout(10)
        text = b""
        while text.count(b": ping\n\n") < 2:
            text += client.recv(65536)
    assert b"data: " in text and text.index(b"data: ") < text.index(b": ping\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_stay_whole(gateway: Running, stream: bool) -> None:
    answer = gateway.call("POST", CHAT, question("hi", stream=stream), key())
    assert (answer.streamed_text if stream else answer.text) == SPEECH
    assert "\\ufffd" not in answer.body.decode() and "\N{REPLACEMENT CHARACTER}" not in answer.body.decode()


def test_a_character_that_was_cut_by_the_limit(gateway: Running) -> None:
    """max_tokens may end inside a character: nothing is made up for what is missing, and both forms agree."""
    for limit in range(1, 24):
        whole = gateway.call("POST", CHAT, question("hi", max_tokens=limit), key()).text
        streamed = gateway.call("POST", CHAT, question("hi", max_tokens=limit, stream=True), key()).streamed_text
        assert whole == streamed
        assert SPEECH.startswith(whole.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_server_timing_only_on_request(gateway: Running) -> None:
    answer = gateway.call("POST", CHAT, question([image_part(picture())]), key())
    assert answer.status == 200 and "server-timing" not in answer.headers


MARKER = "PAYLOADMARKER"


def media(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_logs_are_objects_without_payloads_or_secrets(gateway: Running) -> None:
    url = data_url(picture())
    bodies = {
        "log-ok": question([text_part(MARKER), media(url)]),
        "log-bad-picture": question([media("data:image/png;base64," + "QUJD" * 200)]),
        "log-bad-url": question([media(f"https://u:{MARKER}@h.invalid/a?t={MARKER}")]),
        "log-fault": question(f"{MARKER} [[fault break=INTERNAL]]", stream=True),
        "log-bad-field": question(MARKER, temperature=99),
        "log-bad-json": b'{"model": "' + MARKER.encode(),
        "log-bad-key": question(MARKER),
    }
    for request_id, body in bodies.items():
        given = key(MARKER if request_id == "log-bad-key" else KEY)
        gateway.call("POST", CHAT, body, {**given, "x-request-id": request_id})
    gateway.call("GET", f"/nope?token={MARKER}", headers=key())
    raw(gateway, f"GET /{MARKER} HTTP/9.9\r\n\r\n")
    raw(gateway, f"GET / HTTP/1.1\r\nAuthorization\r\n: {MARKER}\r\n\r\n")
    head = gateway.head(0, f"log-bad-chunk\r\nAuthorization: Bearer {KEY}").decode()
    raw(gateway, head.replace("Content-Length: 0", "Transfer-Encoding: chunked") + f"5\r\n{MARKER}\r\n")

    until(lambda: all(f'"{one}"' in gateway.log() for one in bodies), what="access lines")
    text = gateway.log()
    lines = [json.loads(line) for line in text.splitlines() if line]
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    for secret in (KEY, MARKER, url[50:200], "QUJDQUJD", "Traceback"):
        assert secret not in text
    for one in bodies:
        own = [line for line in lines if line["event"] == "request" and line["id"] == one]
        assert len(own) == 1 and own[0]["route"] == CHAT and own[0]["total_ms"] >= 0, own


def raw(gateway: Running, request: str) -> None:
    """Send bytes that are no request."""
    with gateway.connect() as client:
        client.settimeout(5)
        client.sendall(request.encode())
        assert client.recv(65536).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
