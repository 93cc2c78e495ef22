"""How long the engine's first token takes to the client: the gateway's own part of a stream's time to first byte.

    .venv/bin/python tools/first_byte.py                          16 streams at a time
    .venv/bin/python tools/first_byte.py --peer --rounds 5        and smg 1.13.0, in alternation
    .venv/bin/python tools/first_byte.py --clients 1 --json first-byte.json

Each round asks without a gateway, too (`direct`): the clock begins in the stand-in and ends in the client, so every
figure holds the stand-in's sending and the client's reading, and direct says how much that is.  Streams last a while
and begin at random moments, as those of real clients do.  Rows are percentiles over all rounds.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop  # noqa: E402

from tools.environments import EnvironmentFailed, environment  # noqa: E402
from tools.launch import ROOT, Gateway, LaunchError, fake_engine, known_flags  # noqa: E402
from tools.load.figures import about, spread  # noqa: E402
from tools.load.passage import Broken, Pace, Passage, direct, through  # noqa: E402
from tools.load.scenarios import QUIET  # noqa: E402
from tools.usage import Usage, command, count, duration, file_to_write  # noqa: E402

PEER = "smg==1.13.0"
ENGINE = (
    *("--light", "--stamp", "--tokens-per-chunk", "64"),
    *("--latency-ms", "80", "--token-ms", "10"),
    *("--text", "and then it goes on for a while, as answers do, " * 16),
)
WARM_UP = 32  # streams that are not counted


@contextlib.contextmanager
def sides(commands: dict[str, list[str]], folder: Path) -> Iterator[tuple[int, dict[str, Gateway]]]:
    """The stand-in's port, and a gateway before it for each command."""
    with contextlib.ExitStack() as held:
        port = held.enter_context(fake_engine(*ENGINE))
        started = {}
        for name, command in commands.items():
            flags = ["--worker-urls", f"grpc://127.0.0.1:{port}", *known_flags(command, QUIET)]
            started[name] = Gateway(command, flags, log=folder / f"{name}.log")
            held.callback(started[name].stop)
        for one in started.values():
            one.wait_until()
        yield port, started


def measure(commands: dict[str, list[str]], folder: Path, pace: Pace, rounds: int) -> dict[str, list[Passage]]:
    """Passages by side, `direct` among them.  Raises Broken, LaunchError."""
    found: dict[str, list[Passage]] = {"direct": [], **{name: [] for name in commands}}
    warm = pace._replace(streams=max(WARM_UP, pace.clients))
    with sides(commands, folder) as (port, started):
        for one in started.values():
            _run(through(one.host, one.port, warm))
        for number in range(rounds):
            its = pace._replace(seed=number)
            order = list(found) if number % 2 == 0 else list(found)[::-1]
            for name in order:
                asking = direct(port, its) if name == "direct" else through(started[name].host, started[name].port, its)
                found[name] += _run(asking)
    return found


def _run(asking: Any) -> list[Passage]:
    found: list[Passage] = uvloop.run(asking)
    return found


def table(found: dict[str, list[Passage]]) -> str:
    names = ("mean", "p50", "p90", "p99", "max")
    lines = [f"{'ms':<20}" + "".join(f"{name:>9}" for name in names)]
    for side, passages in found.items():
        for row in Passage._fields:
            figures = spread([getattr(one, row) for one in passages])
            lines.append(f"{side + ' ' + row:<20}" + "".join(f"{figures[name]:>9.2f}" for name in names))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = Usage(__doc__)
    parser.add_argument("--clients", type=count, default=16, help="streams at a time")
    parser.add_argument("--streams", type=count, default=320, help="of one round")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--pause-ms", type=duration, default=80, help="before a client's next stream, on average")
    parser.add_argument(
        "--ours", type=command, default=f"{sys.executable} {ROOT / 'gateway.py'}", help="command of the gateway"
    )
    parser.add_argument("--peer", action="store_true", help=f"the same with {PEER}")
    parser.add_argument("--json", type=file_to_write, help="write every figure to this file")
    options = parser.parse_args(arguments)
    pace = Pace(options.clients, options.streams, options.pause_ms / 1000)
    commands = {"ours": options.ours}
    try:
        if options.peer:
            commands["peer"] = [str(environment("smg-1.13.0", [PEER]) / "smg"), "launch"]
        with tempfile.TemporaryDirectory(prefix="mediagate-first-byte-") as folder:
            found = measure(commands, Path(folder), pace, options.rounds)
    except (Broken, EnvironmentFailed, LaunchError, OSError) as error:
        print(f"first_byte: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if options.json:
        rows = {side: {row: spread([getattr(one, row) for one in passages]) for row in Passage._fields}
                for side, passages in found.items()}  # fmt: skip
        options.json.write_text(json.dumps({"about": about(), "pace": pace._asdict(), "sides": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
