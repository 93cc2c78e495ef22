"""An engine stand-in: a gRPC server that speaks vLLM's protocol, checks what it gets and answers in words what it saw.

    python tools/fake_engine.py --bundle tools/demo/bundle --port 50051
    python tools/fake_engine.py --bundle BUNDLE --light --latency-ms 20        (behind a load test)

It prints `ready port=N pid=N` when it listens.  Anything that breaks the protocol is refused with INVALID_ARGUMENT
and the rule that was broken.  `--journal FILE` writes one JSON line for every request with the digests of its
tensors; `--fault` and `[[fault ...]]` in a prompt make it fail (`tools/fake/faults.py`).  It runs in its own process:
grpcio and a gateway do not mix.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc  # noqa: E402
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc  # noqa: E402

from tools.fake.servicer import Engine, Settings  # noqa: E402
from tools.usage import Usage, count, duration, file_to_write, folder_to_read, port  # noqa: E402

BUNDLE = Path(__file__).resolve().parent / "demo" / "bundle"


def _parser() -> argparse.ArgumentParser:
    parser = Usage(__doc__)
    parser.add_argument(
        "--bundle", type=folder_to_read, default=BUNDLE, help="directory of tokenizer and configs (the demo's)"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=0, help="0: any free port")
    parser.add_argument("--model-name", default="qwen3-vl-demo", help="served model name")
    parser.add_argument("--tokenizer-path", default="", help="what to report instead of the bundle's directory")
    parser.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="field of GetServerInfo or GetModelInfo"
    )
    parser.add_argument("--latency-ms", type=duration, default=0.0, help="before the first token")
    parser.add_argument("--token-ms", type=duration, default=0.0, help="before every chunk of tokens")
    parser.add_argument("--tokens-per-chunk", type=count, default=8)
    parser.add_argument("--text", default="", help="answer this instead of what was seen")
    parser.add_argument("--light", action="store_true", help="read everything, digest nothing, answer shortly")
    parser.add_argument("--stamp", action="store_true", help="begin an answer with the moment it began, in ns")
    parser.add_argument("--journal", type=file_to_write, help="write one JSON line for every request to this file")
    parser.add_argument("--fault", default="", metavar="WORDS", help="meets every request without a marker of its own")
    parser.add_argument("--unhealthy-file", type=Path, help="unhealthy as long as this file exists")
    parser.add_argument("--keep-names", action="store_true", help="do not unlink shared-memory segments")
    parser.add_argument("--with-stdin", action="store_true", help="end when standard input ends (with the parent)")
    return parser


def _labels(texts: list[str]) -> dict[str, Any]:
    """`k=v` pairs; a value that is JSON is taken as such."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


async def _serve(options: argparse.Namespace) -> None:
    settings = Settings(
        bundle=options.bundle.resolve(),
        model=options.model_name,
        labels=_labels(options.label),
        tokenizer_path=options.tokenizer_path,
        latency_s=options.latency_ms / 1000,
        token_delay_s=options.token_ms / 1000,
        tokens_per_chunk=options.tokens_per_chunk,
        text=options.text,
        light=options.light,
        stamps=options.stamp,
        fault=options.fault,
        unhealthy_file=options.unhealthy_file,
        keeps_names=options.keep_names,
    )
    journal = options.journal.open("a") if options.journal else None
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
    limits.append(("grpc.http2.min_ping_interval_without_data_ms", 10_000))  # as the published servicers
    server = grpc.aio.server(options=limits)
    rpc.add_VllmEngineServicer_to_server(Engine(settings, journal), server)
    port = server.add_insecure_port(f"{options.host}:{options.port}")
    await server.start()
    print(f"ready port={port} pid={os.getpid()}", flush=True)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if options.with_stdin:
        threading.Thread(target=_until_stdin_ends, args=(loop, stop), daemon=True).start()
    await stop.wait()
    await server.stop(0.2)


def _until_stdin_ends(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop.set)


def main() -> int:
    options = _parser().parse_args()
    try:
        asyncio.run(_serve(options))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"fake engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
