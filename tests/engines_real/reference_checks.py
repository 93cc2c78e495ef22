"""Pictures by reference: a vLLM worker fetches and processes them itself, and answers as for our tensors.

The gateway decides by itself (`--mm-processing auto`), so its counter is held against what was asked as well.
"""

import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.engines_real.answers import CASES, DATA, Differs, ask, body, compare_answer
from tests.engines_real.checks import UNIQUE, Bench, Check, order_matters, streamed_as_whole
from tests.engines_real.clip_checks import CLIP_CHECKS
from tools.launch import Gateway, free_port, request

PICTURES = tuple(case for case in CASES if case != "text_only")
CHAT = "/v1/chat/completions"


class _MediaFiles(BaseHTTPRequestHandler):
    """The pictures by their names; 503 below /busy/, 404 for everything else."""

    def do_GET(self) -> None:
        file = DATA / "media" / self.path.rpartition("/")[2]
        status = 503 if self.path.startswith("/busy/") else 200 if file.is_file() else 404
        data = file.read_bytes() if status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def media_files() -> Iterator[str]:
    """A media host on loopback; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _MediaFiles)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def forwarded(gateway: Gateway) -> int:
    """Requests whose media the gateway left to the worker; Differs when it processed any itself."""
    _, text = request(gateway.host, gateway.metrics_port, "/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith("smg_mm_processing_total{")]
    if others := [line for line in lines if 'mode="worker"' not in line or 'reason="auto_uniform"' not in line]:
        raise Differs(f"not forwarded: {others}")
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def _inline(case: str, bench: Bench, gateway: Gateway, transport: str) -> None:
    """By a data URL; the worker says how long the prompt became."""
    before = forwarded(gateway)
    compare_answer(case, ask(gateway, body(case, next(UNIQUE))))
    if forwarded(gateway) != before + 1:
        raise Differs("the request was not counted as forwarded")


def _text(bench: Bench, gateway: Gateway, transport: str) -> None:
    compare_answer("text_only", ask(gateway, body("text_only")))


def _fetched(case: str, bench: Bench, gateway: Gateway, transport: str) -> None:
    """By addresses the worker fetches."""
    with media_files() as base:
        compare_answer(case, ask(gateway, with_urls(case, base)))


def with_urls(case: str, base: str) -> dict[str, Any]:
    """The request of a case, its pictures by their address below `base`."""
    spec = json.loads((DATA / "requests.json").read_text())
    named = iter(part["image"] for message in spec["cases"][case] for part in message["content"] if "image" in part)
    asked = body(case)
    for message in asked["messages"]:
        for part in message["content"]:
            if "image_url" in part:
                part["image_url"]["url"] = f"{base}/{next(named)}"
    return asked


def _causes(refused: int, bench: Bench, gateway: Gateway, transport: str) -> None:
    """The caller's mistakes are 400, what may pass is 503, and no payload comes back."""
    payload = "QUJD" * 30
    with media_files() as base:
        for url, status, code in (
            (f"{base}/absent.png", 400, "start_generation_failed"),
            (f"data:image/png;base64,{payload}", 400, "start_generation_failed"),
            (f"data:image/png,{payload}", 400, "start_generation_failed"),
            (f"{base}/busy/a.png", 503, "start_generation_failed"),
            (f"http://127.0.0.1:{free_port()}/a.png?key=secret", refused, "start_generation_failed"),
            ("file:///etc/hostname", 400, "media_ref_scheme_not_accepted"),
        ):
            asked = body("image_gradient")
            for part in asked["messages"][0]["content"]:
                if "image_url" in part:
                    part["image_url"]["url"] = url
            came, text = request(gateway.host, gateway.port, CHAT, asked, timeout_s=120)
            if came != status or f'"code":"{code}"' not in text.decode():
                raise Differs(f"{url}: status {came}: {text[:300]!r}, expected {status} {code}")
            if payload.encode() in text or b"secret" in text:
                raise Differs(f"{url}: comes back in {text!r}")


def checks(processor: str) -> dict[str, Check]:
    """`processor`: the worker's media processor, "inprocess" or "smg"."""
    return {
        **{f"{case} by data URL": functools.partial(_inline, case) for case in PICTURES},
        "text_only": _text,
        "image_blocks by address": functools.partial(_fetched, "image_blocks"),
        "two_images by address": functools.partial(_fetched, "two_images"),
        "image_shapes streamed": streamed_as_whole,
        "order of two pictures": order_matters,
        **CLIP_CHECKS,
        # smg calls a host that takes no connection the client's fault
        "causes": functools.partial(_causes, 400 if processor == "smg" else 503),
    }
