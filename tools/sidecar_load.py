"""What one job costs a media sidecar: this one, and the published one with vLLM's processors.

    python tools/sidecar_load.py                       both, sixty jobs of a 1080p JPEG each
    python tools/sidecar_load.py ours --jobs 200

A Redis of its own, jobs as the published worker writes them, some outstanding; the model is Qwen3-VL with raw
pixels, vLLM's default.  Told are the CPU of the sidecar's whole process tree for a job, jobs a second, and its memory
at most; Redis and the asking side are not counted.  The published one needs vLLM's environment (`tools/e2e_vllm`).
"""

import argparse
import base64
import contextlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from smg_grpc_servicer import mm_sidecar_protocol as published

    from pipeline.bundle import load_bundle
    from tests.engines_real.published_sidecar import published_sidecar
    from tests.pipeline.bundles import unpack_bundle
    from tests.sidecar.asked import Asked
    from tests.sidecar.running import Sidecar, Worker
    from tools.load.bodies import made_unique
    from tools.load.photos import encode, photo
    from tools.load.processes import Watch
    from tools.redis_server import RedisServer, redis_server
    from tools.usage import Usage, count
except ModuleNotFoundError as _error:
    sys.exit(f"sidecar_load.py: {_error}: tools/setup tests installs what this needs")


FLAGS = ("--dtype", "float32", "--limit-mm-per-prompt", '{"image": 4}')
PICTURES = 8


@contextlib.contextmanager
def ours(model: Path, server: RedisServer, folder: Path, processes: int) -> Iterator[int]:
    flags = ["--redis-url", server.url, "--model", str(model), *FLAGS, "--pool-ring-bytes", str(1 << 30)]
    running = Sidecar([*flags, "--pool-processes", str(processes)], folder / "ours.log")
    try:
        yield running.process.pid
    finally:
        running.stop()


@contextlib.contextmanager
def theirs(model: Path, server: RedisServer, folder: Path, processes: int) -> Iterator[int]:
    """It is one process; `processes` is how many jobs it works on at once."""
    flags = [*FLAGS, "--concurrency", str(processes)]
    with published_sidecar(model, server.url, folder / "published.log", flags) as pid:
        yield pid


SIDES = {"ours": ours, "published": theirs}


class Jobs:
    """Jobs of pictures nobody has seen: both sides keep tensors, so no file is sent twice."""

    def __init__(self, model: Path, fingerprint: published.Fingerprint) -> None:
        self._text, self._ids = Asked("", (("image", ""),)).prompt(load_bundle(model))
        self._fingerprint = fingerprint
        self._files = [encode(photo(1920, 1080, seed), "jpeg") for seed in range(PICTURES)]
        self._sent = 0

    def next(self) -> published.Job:
        self._sent += 1
        file = made_unique(self._files[self._sent % PICTURES], self._sent)
        url = f"data:image/jpeg;base64,{base64.b64encode(file).decode()}"
        now_ms = int(time.time() * 1000)
        return published.Job(
            v=published.SCHEMA_VERSION,
            job_id=f"{self._sent:032x}",
            request_id="load",
            fingerprint=self._fingerprint,
            prompt_token_ids=self._ids,
            prompt=self._text,
            items=[published.JobItem("image", url)],
            enqueued_ms=now_ms,
            deadline_ms=now_ms + 120_000,
        )


def run(worker: Worker, jobs: Jobs, count: int, outstanding: int) -> None:
    """Raises AssertionError for a job that is not answered with tensors."""
    waiting: deque[str] = deque()
    for _ in range(count):
        if len(waiting) == outstanding:
            take(worker, waiting.popleft())
        waiting.append(worker.put(jobs.next()))
    for job_id in waiting:
        take(worker, job_id)


def take(worker: Worker, job_id: str) -> None:
    answer = worker.get(job_id, wait_s=120)
    assert answer is not None and answer.ok, answer


def measure(side: str, options: argparse.Namespace, folder: Path) -> str:
    model = folder / "qwen3_vl"
    with redis_server() as server, SIDES[side](model, server, folder, options.processes) as pid:
        client = Worker(server, published.Fingerprint(*[""] * 7)).redis
        while not (hellos := client.keys("smg:mm:v1:*:hello")):
            time.sleep(0.05)
        fingerprint = published.Fingerprint.from_hello(client.hgetall(hellos[0]))
        assert fingerprint is not None
        worker = Worker(server, fingerprint)
        jobs = Jobs(model, fingerprint)
        run(worker, jobs, 2 * PICTURES, options.outstanding)  # warm
        begun = time.perf_counter()
        with Watch(pid) as watch:
            run(worker, jobs, options.jobs, options.outstanding)
        seconds = time.perf_counter() - begun
        worker.close()
        client.close()
    cpu_ms = watch.used.cpu_s / options.jobs * 1e3
    return f"{side:<10} {cpu_ms:8.1f} ms CPU a job {options.jobs / seconds:8.1f} jobs/s {watch.peak('pss') >> 20:6} MiB"


def main() -> int:
    parser = Usage(__doc__)
    parser.add_argument("sides", nargs="*", choices=[*SIDES], metavar="SIDE", help="ours, published")
    parser.add_argument("--jobs", type=count, default=60)
    parser.add_argument("--outstanding", type=count, default=4)
    parser.add_argument(
        "--processes", type=count, default=2, help="pool processes, or jobs at once of the published one"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mediagate-load-") as made:
        unpack_bundle("qwen3_vl", Path(made))
        for side in options.sides or SIDES:
            print(measure(side, options, Path(made)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
