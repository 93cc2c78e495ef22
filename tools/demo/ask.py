"""One chat request through the public API, as any client would send it, with the standard library alone."""

import dataclasses
import http.client
import json
import re
from typing import Any

_TIMING = re.compile(r"([\w-]+);dur=([\d.]+)")


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a client sees.  `stages`: milliseconds by stage, of the Server-Timing header; empty when there is none."""

    status: int
    text: str
    stages: dict[str, float]


def stages_of(header: str | None) -> dict[str, float]:
    return {name: float(duration) for name, duration in _TIMING.findall(header or "")}


def ask(host: str, port: int, model: str, content: Any, *, stream: bool, timeout_s: float = 60) -> Reply:
    """Raises OSError when there is no answer; a refusal is a Reply with its status and body."""
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": content}]}
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        stages = stages_of(reply.getheader("server-timing"))
        raw = reply.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if reply.status != 200:
        return Reply(reply.status, raw, stages)
    text = streamed_text(raw) if stream else json.loads(raw)["choices"][0]["message"]["content"] or ""
    return Reply(200, text, stages)


def streamed_text(raw: str) -> str:
    """The text of choice 0 out of a stream of server-sent events, which must end with [DONE]."""
    events = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise OSError(f"the stream did not end with [DONE]: {raw[-200:]}")
    pieces = []
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            raise OSError(f"error in the stream: {event['error']}")
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"] if choice["index"] == 0]
    return "".join(pieces)
