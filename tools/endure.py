"""What docs/reliability.md promises, measured: each command prints its figures and ends with 1 when one is missed.

    python tools/endure.py start --times 10
    python tools/endure.py kills --requests 1000 --concurrency 32 --every 2
    python tools/endure.py leave --clients 10000
    python tools/endure.py soak --minutes 20

(Fuzzed inputs: `python tools/fuzz.py --cases 2800`.)  A gateway and an engine stand-in are started for each; give it a
machine that does little else.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from tools.fuzzing import kills, leavers, soak, starts  # noqa: E402
from tools.fuzzing.live import site  # noqa: E402
from tools.fuzzing.rig import Wrong  # noqa: E402
from tools.launch import fake_engine  # noqa: E402
from tools.usage import Usage, amount, count  # noqa: E402

MIB = 1 << 20
READY_S, ENDING_S, GIVEN_BACK_S = 1.5, 1.0, 2.0
LEAST_SHARE = 0.8  # of the undisturbed throughput
MOST_GROWTH = 0.05

BUDGET = 48 * MIB
# Small, so that the load goes beyond everything there is: tests/hostile/test_soak.py runs with the same.
TIGHT = (
    "--pool-processes=2",
    f"--pool-ring-bytes={96 * MIB}",
    f"--mm-shm-max-bytes={48 * MIB}",
    f"--pool-process-memory-bytes={384 * MIB}",
    "--max-payload-size=16777216",
    "--max-inflight-body-bytes=33554432",
    f"--multimodal-max-inflight-bytes={BUDGET}",
    "--max-concurrent-requests=16",
    "--queue-size=24",
    "--queue-timeout-secs=5",
    "--history-memory-max-bytes=16777216",
    "--request-timeout-secs=20",
)

ROOMY = (f"--pool-ring-bytes={1024 * MIB}", "--request-timeout-secs=120")


def start(given: argparse.Namespace) -> bool:
    with fake_engine("--light") as port:
        lives = [starts.live(port) for _ in range(given.times)]
    for name in ("listening", "ready", "ending"):
        times = [getattr(life, name) for life in lives]
        print(f"{name}: median {statistics.median(times):.2f} s, most {max(times):.2f} s of {len(times)}")
    medians = [statistics.median(getattr(life, name) for life in lives) for name in ("ready", "ending")]
    return medians[0] <= READY_S and medians[1] <= ENDING_S


def kill(given: argparse.Namespace) -> bool:
    """Half of the undisturbed requests before, half behind: what else the machine does then weighs on both."""
    bodies = kills.questions(2 * given.concurrency)
    with site(*ROOMY) as place:
        kills.ask_all(place, bodies, given.concurrency, given.concurrency)
        before = kills.ask_all(place, bodies, given.requests // 2, given.concurrency)
        struck = kills.ask_all(place, bodies, given.requests, given.concurrency, kill_every_s=given.every)
        behind = kills.ask_all(place, bodies, given.requests // 2, given.concurrency)
        place.aftermath()
    calm = 2 / (1 / before.rate + 1 / behind.rate)
    lost = before.lost + struck.lost + behind.lost
    print(f"{given.requests} requests at {given.concurrency}: {struck.kills} processes killed, {struck.lost} lost")
    print(f"answers: {dict(struck.answers)}")
    print(f"{struck.rate:.1f} a second, undisturbed {calm:.1f} ({before.rate:.1f} before, {behind.rate:.1f} behind)")
    print(f"share {struck.rate / calm:.2f}")
    return lost == 0 and struck.kills > 0 and struck.rate >= LEAST_SHARE * calm


def leave(given: argparse.Namespace) -> bool:
    with site() as place:
        left = leavers.leave(place, given.clients, at_once=given.concurrency, seed=given.seed, longest_s=given.longest)
        began = time.monotonic()
        place.aftermath()
        took = time.monotonic() - began
    print(f"{given.clients} clients: " + ", ".join(f"{count} left {how}" for how, count in left.most_common()))
    print(f"everything back {took:.2f} s after the last")
    return took <= GIVEN_BACK_S


def soak_for(given: argparse.Namespace) -> bool:
    flags = [*TIGHT, f"--multimodal-tensor-transport={given.transport}"]
    with site(*flags) as place:
        report = soak.soak(place, seconds=given.minutes * 60, clients=given.concurrency, seed=given.seed, pause_s=0.5)
    windows = report.windows(5)
    for number, window in enumerate(windows, 1):
        held, frontend = window.held / MIB, window.frontend / MIB
        print(f"part {number} of {len(windows)}: held {held:.1f} MiB, frontend {frontend:.1f} MiB")
    growth = soak.growth(windows[1:])  # the first is the warm-up
    print(f"memory after the warm-up: from its least to its most {growth:.1%}")
    asked = given.concurrency * report.request_bytes / BUDGET
    print(f"{given.concurrency} clients with {report.request_bytes / MIB:.1f} MiB each: {asked:.1f} times the budget")
    print(f"peaks: tree {report.peaks.held / MIB:.0f} MiB, frontend {report.peaks.frontend / MIB:.0f} MiB")
    print(f"answers: {dict(report.answers.most_common())}")
    for sentence in report.wrong[:10]:
        print(f"wrong: {sentence}")
    return not report.wrong and growth <= MOST_GROWTH


def main(argv: list[str]) -> int:
    parser = Usage(__doc__)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("start", help="start to ready, SIGINT to exit")
    made.add_argument("--times", type=count, default=10)
    made.set_defaults(run=start)
    made = commands.add_parser("kills", help="a pool process is killed again and again under load")
    made.add_argument("--requests", type=count, default=1000)
    made.add_argument("--concurrency", type=count, default=32)
    made.add_argument("--every", type=amount, default=2.0, help="seconds between two kills (2)")
    made.set_defaults(run=kill)
    made = commands.add_parser("leave", help="clients leave at a random moment")
    made.add_argument("--clients", type=count, default=10_000)
    made.add_argument("--concurrency", type=count, default=12)
    made.add_argument("--longest", type=amount, default=0.25, help="seconds a client waits at most (0.25)")
    made.add_argument("--seed", type=int, default=1)
    made.set_defaults(run=leave)
    made = commands.add_parser("soak", help="mixed load over the budget")
    made.add_argument("--minutes", type=amount, default=20)
    made.add_argument("--concurrency", type=count, default=64)
    made.add_argument("--transport", choices=("inline", "auto"), default="auto")
    made.add_argument("--seed", type=int, default=1)
    made.set_defaults(run=soak_for)
    given = parser.parse_args(argv)
    try:
        is_reached: bool = given.run(given)
    except Wrong as error:
        print(f"wrong: {error}")
        is_reached = False
    print("reached" if is_reached else "MISSED")
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
