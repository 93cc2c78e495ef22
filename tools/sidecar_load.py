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
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from smg_grpc_servicer import mm_sidecar_protocol as published

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.bundle import load_bundle  # noqa: E402
from tests.engines_real.published_sidecar import published_sidecar  # noqa: E402
from tests.pipeline.bundles import unpack_bundle  # noqa: E402
from tests.sidecar.asked import Asked  # noqa: E402
from tests.sidecar.running import Sidecar, Worker  # noqa: E402
from tools.load.photos import encode, photo  # noqa: E402
from tools.load.processes import Watch  # noqa: E402
from tools.redis_server import RedisServer, redis_server  # noqa: E402

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


def jobs(model: Path, fingerprint: published.Fingerprint) -> list[published.Job]:
    """A job for each picture."""
    text, ids = Asked("", (("image", ""),)).prompt(load_bundle(model))
    made = []
    for seed in range(PICTURES):
        file = base64.b64encode(encode(photo(1920, 1080, seed), "jpeg")).decode()
        items = [published.JobItem("image", f"data:image/jpeg;base64,{file}")]
        made.append(published.Job(1, "0" * 32, "load", fingerprint, ids, text, items, 0, 0))
    return made


def run(worker: Worker, made: Sequence[published.Job], count: int, outstanding: int) -> None:
    """Raises AssertionError for a job that is not answered with tensors."""
    waiting: deque[str] = deque()
    for number in range(count):
        if len(waiting) == outstanding:
            take(worker, waiting.popleft())
        now_ms = int(time.time() * 1000)
        fresh = {"job_id": f"{time.time_ns():032x}", "enqueued_ms": now_ms, "deadline_ms": now_ms + 120_000}
        waiting.append(worker.put(msgspec.structs.replace(made[number % len(made)], **fresh)))
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
        made = jobs(model, fingerprint)
        run(worker, made, 2 * PICTURES, options.outstanding)  # warm
        begun = time.perf_counter()
        with Watch(pid) as watch:
            run(worker, made, options.jobs, options.outstanding)
        seconds = time.perf_counter() - begun
        worker.close()
        client.close()
    cpu_ms = watch.used.cpu_s / options.jobs * 1e3
    return f"{side:<10} {cpu_ms:8.1f} ms CPU a job {options.jobs / seconds:8.1f} jobs/s {watch.peak('pss') >> 20:6} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="*", choices=[*SIDES], metavar="SIDE", help="ours, published")
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--outstanding", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2, help="pool processes, or jobs at once of the published one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mediagate-load-") as made:
        unpack_bundle("qwen3_vl", Path(made))
        for side in options.sides or SIDES:
            print(measure(side, options, Path(made)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
