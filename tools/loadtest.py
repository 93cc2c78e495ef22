"""A load test for this gateway, or for any server with the same chat API.

    python tools/loadtest.py --url http://127.0.0.1:30000 --model qwen3-vl --images 1x1080p --sweep 1,2,4,8,16
    python tools/loadtest.py --text-only --rate 200 --requests 2000 --json text.json
    python tools/loadtest.py --images 2x480p --concurrency 16 --gateway-pid 4711 --fail-if 'p99>500'

Closed loop by default, open loop with `--rate` (tools/load/client.py).  Media are made on the fly, nothing is
downloaded.  Exit code 0; 1 when a condition of `--fail-if` holds or nothing was answered; 2 for usage.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm  # noqa: E402

from tools.load.bodies import Bodies, Kind, parse_mix  # noqa: E402
from tools.load.client import Outcome, Report, closed_loop, open_loop  # noqa: E402
from tools.load.figures import about, fails, figures, table  # noqa: E402
from tools.load.processes import Watch  # noqa: E402
from tools.load.scrape import get, histogram, quantile  # noqa: E402
from tools.usage import Usage, amount, count, count_or_none, file_to_write, share  # noqa: E402


def _amounts(text: str) -> list[float]:
    return [amount(part) for part in text.split(",")]


def _mix(text: str) -> list[Kind]:
    try:
        return parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _url(text: str) -> str:
    try:
        found = urlsplit(text)
        whole = found.scheme in ("http", "https") and found.hostname and found.port != 0 and not found.path.strip("/")
    except ValueError:
        whole = False
    if not whole:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got {text!r}")
    return text.rstrip("/")


def _process(text: str) -> int:
    pid = count(text)
    if not Path(f"/proc/{pid}").exists():
        raise argparse.ArgumentTypeError(f"there is no process {pid}")
    return pid


def parser() -> Usage:
    made = Usage(__doc__)
    made.add_argument("--url", type=_url, default="http://127.0.0.1:30000")
    made.add_argument(
        "--key",
        default=os.environ.get("MEDIAGATE_API_KEY", ""),
        help="of a gateway that asks for one; default: the variable MEDIAGATE_API_KEY",
    )
    made.add_argument("--model", default="", help="default: the first of /v1/models")
    what = made.add_argument_group("what is sent")
    what.add_argument(
        "--images", type=_mix, default="1x1080p", metavar="MIX", help="1x1080p, 2x640x480:png, 1x1080p,1x512 ..."
    )
    what.add_argument("--text-only", action="store_true")
    what.add_argument("--stream", action="store_true", help="stream the answers; gives time to first token")
    what.add_argument("--max-tokens", type=count, default=8)
    what.add_argument("--repeat-share", type=share, default=0.0, help="how many send a known picture, 0..1")
    how = made.add_argument_group("how it is sent")
    how.add_argument("--concurrency", type=count, default=1, help="closed loop: clients")
    how.add_argument("--rate", type=amount, help="open loop: requests a second, latency from the intended moment")
    how.add_argument("--sweep", type=_amounts, help="several values of --concurrency, or of the rate: 1,2,4")
    how.add_argument("--requests", type=count, default=100, help="of each point")
    how.add_argument("--warm-up", type=count_or_none, default=5, help="requests before each point that are not counted")
    out = made.add_argument_group("what comes out")
    out.add_argument("--gateway-pid", type=_process, help="watch CPU and memory of this process and its descendants")
    out.add_argument("--metrics-url", default="", help="the gateway's /metrics: tells its event loop's lag")
    out.add_argument("--json", type=file_to_write, help="write every figure to this file (for tools/plots.py)")
    out.add_argument("--fail-if", action="append", default=[], metavar="CONDITION", help="exit 1: 'p99>500'")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def check_server(url: str) -> None:
    """Raises ValueError when nobody is there."""
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname, port), timeout=10).close()
    except OSError as error:
        raise ValueError(f"--url {url}: {error.strerror or error}: does a gateway listen there?") from None


def first_model(url: str) -> str:
    """Raises OSError or ValueError when the server does not say."""
    try:
        rows = json.loads(get(f"{url}/v1/models")).get("data", [])
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}/v1/models: status {error.code}; name a model with --model") from None
    if not rows:
        raise ValueError(f"{url}/v1/models lists no model: has the gateway a worker that is ready?")
    return str(rows[0]["id"])


def _check_metrics(url: str) -> None:
    try:
        histogram(url)
    except (OSError, ValueError) as error:
        raise ValueError(f"--metrics-url {url}: {getattr(error, 'reason', error)}") from None


def measure(options: argparse.Namespace, bodies: Bodies, value: float) -> dict[str, Any]:
    """One point: warm-up, then the counted requests.  `value`: clients, or requests a second."""
    if options.warm_up:
        clients = 1 if options.rate else min(int(value), options.warm_up)
        quiet: dict[str, Any] = {"requests": options.warm_up, "report": lambda _: None, "key": options.key}
        asyncio.run(closed_loop(options.url, bodies, clients=clients, **quiet))
    outcomes: list[Outcome] = []
    lag = histogram(options.metrics_url) if options.metrics_url else {}
    watch = Watch(options.gateway_pid) if options.gateway_pid else None
    with progress(options, outcomes) as report, watch or contextlib.nullcontext():
        counted: dict[str, Any] = {"requests": options.requests, "report": report, "key": options.key}
        begun = time.perf_counter()
        if options.rate:
            sending = open_loop(options.url, bodies, rate=value, **counted)
        else:
            sending = closed_loop(options.url, bodies, clients=int(value), **counted)
        asyncio.run(sending)
        elapsed_s = time.perf_counter() - begun
    name = "rate" if options.rate else "concurrency"
    point = {name: value if options.rate else int(value), **figures(outcomes, elapsed_s, watch)}
    if options.metrics_url:
        late = quantile(lag, histogram(options.metrics_url), 0.99)
        point["loop_lag_p99_ms"] = None if late is None else round(late * 1000, 2)
    return point


@contextlib.contextmanager
def progress(options: argparse.Namespace, outcomes: list[Outcome]) -> Iterator[Report]:
    """Collects outcomes; on a terminal a bar shows requests a second and errors."""
    with tqdm(total=options.requests, disable=options.quiet or not sys.stderr.isatty(), unit="req", leave=False) as bar:

        def report(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if outcome.status != 200:
                bar.set_postfix(errors=sum(o.status != 200 for o in outcomes), refresh=False)
            bar.update()

        yield report


def main(arguments: list[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    mix = [] if options.text_only else options.images
    try:
        for condition in options.fail_if:
            fails({"requests": 0, "ok": 0, "rps": 0, "media_mb_s": 0, "total_ms": {}, "ttft_ms": {}}, condition)
        check_server(options.url)
        model = options.model or first_model(options.url)
        if options.metrics_url:
            _check_metrics(options.metrics_url)
    except (OSError, ValueError) as error:
        made.error(str(error))
    bodies = Bodies(model, mix, stream=options.stream, max_tokens=options.max_tokens, repeat_share=options.repeat_share)
    points = []
    for value in options.sweep or [options.rate or options.concurrency]:
        point = measure(options, bodies, value)
        points.append(point)
        name, shown = ("rate", f"{value:g} a second") if options.rate else ("concurrency", f"{int(value)}")
        print(f"{name} {shown}\n{table(point)}\n", flush=True)
    settings = {"mix": [str(kind) for kind in mix], "stream": options.stream, "max_tokens": options.max_tokens}
    settings |= {"model": model, "repeat_share": options.repeat_share, "warm_up": options.warm_up}
    if options.json:
        options.json.write_text(json.dumps({"about": about(), "settings": settings, "points": points}, indent=1) + "\n")
    failed = [condition for condition in options.fail_if if any(fails(point, condition) for point in points)]
    for condition in failed:
        print(f"loadtest: {condition}", file=sys.stderr)
    return 1 if failed or not all(point["ok"] for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
