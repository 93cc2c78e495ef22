"""Hostile input, by subject, until time is up: `python tools/fuzz.py --seconds 600` before a release.

    python tools/fuzz.py --subject pictures --seconds 60 --seed 1
    python tools/fuzz.py --subject pictures --seed 4733 --cases 1         (repeats one case)

Direct subjects call the gateway's own functions, live ones talk to a gateway that is started for them.  A finding is an
answer that blames the gateway (5xx but for the documented ones, a stack in the log), a hang, the death of a process,
memory that grows, something still held at the end.  Each is told with the number that repeats it; the exit status is
1 when there was one.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from tools.fuzzing import bodies, engines, pictures, replies, requests, urls  # noqa: E402
from tools.fuzzing.live import GROWTH_BYTES, Site, site  # noqa: E402
from tools.fuzzing.requests import LiveSubject  # noqa: E402
from tools.fuzzing.rig import Finding, Subject, Tally, Wrong, hunt  # noqa: E402
from tools.usage import Usage, amount, count_or_none  # noqa: E402

DIRECT: dict[str, Callable[[], Subject]] = {
    "pictures": pictures.Pictures,
    "scarce-pictures": pictures.ScarcePictures,
    "urls": urls.Urls,
    "bodies": bodies.Bodies,
    "replies": replies.Replies,
}
LIVE: dict[str, Callable[[Site], LiveSubject]] = {
    "live-pictures": requests.LivePictures,
    "live-bodies": requests.LiveBodies,
    "live-http": requests.LiveHttp,
    "live-workers": requests.LiveWorkers,
    "live-engine": engines.Generations,
    "live-introductions": engines.Introductions,
}
_OWN_ENGINE = ("live-engine", "live-introductions")


def run(name: str, *, seed: int, seconds: float, cases: int = 0) -> Tally:
    """One subject; a live one with a gateway of its own, which is looked at afterwards."""
    if name in DIRECT:
        return hunt(DIRECT[name](), seed=seed, seconds=seconds, cases=cases)
    with _site_for(name) as place:
        before = place.memory_bytes()
        tally = hunt(LIVE[name](place), seed=seed, seconds=seconds, cases=cases)
        try:
            place.aftermath()
            grown = place.memory_bytes() - before
            if grown > GROWTH_BYTES:
                raise Wrong(f"the frontend has {grown >> 20} MiB more than before")
        except Wrong as error:
            tally.note(Finding(name, seed, "aftermath", str(error)))
        return tally


@contextlib.contextmanager
def _site_for(name: str) -> Iterator[Site]:
    own_engine = name in _OWN_ENGINE
    flags = ["--request-timeout-secs=1"] if own_engine else []
    with site(*flags, engine=not own_engine) as place:
        yield place


def main(argv: list[str]) -> int:
    parser = Usage(__doc__)
    subjects = [*DIRECT, *LIVE]
    parser.add_argument("--subject", action="append", choices=subjects, help="all when not given; may be repeated")
    parser.add_argument("--seconds", type=amount, default=60, help="for all subjects together (60)")
    parser.add_argument("--seed", type=int, default=None, help="number of the first case (the clock's)")
    parser.add_argument("--cases", type=count_or_none, default=0, help="so many cases instead of so many seconds")
    given = parser.parse_args(argv)
    chosen = given.subject or subjects
    seed = given.seed if given.seed is not None else int(time.time()) * 1000
    found = 0
    for name in chosen:
        tally = run(name, seed=seed, seconds=given.seconds / len(chosen), cases=given.cases)
        found += len(tally.findings)
        endings = ", ".join(f"{count} {word}" for word, count in sorted(tally.endings.items(), key=lambda row: -row[1]))
        print(f"{name}: {tally.cases} cases from {seed}: {endings}", flush=True)
        for finding in tally.findings:
            print(finding.told(), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
