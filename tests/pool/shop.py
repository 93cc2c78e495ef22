"""The workshop of the pool's tests: jobs that answer, wait, misbehave and die on demand."""

import os
import signal
import subprocess
import time

import msgspec

from pool.process import Bench, JobError
from pool.ring import Doorbell
from pool.spans import Span


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    """Answer with `text` `times` times, after `seconds`."""

    text: str
    times: int = 1
    seconds: float = 0.0


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Write `value` into every byte of a span, after `seconds`."""

    span: Span
    value: int
    seconds: float = 0.0


class FillFile(msgspec.Struct, frozen=True, tag="fill_file"):
    name: str
    nbytes: int
    value: int


class Raise(msgspec.Struct, frozen=True, tag="raise"):
    """Raise `kind`: job, value, memory, time, exit."""

    kind: str
    text: str = "no"


class Die(msgspec.Struct, frozen=True, tag="die"):
    """Kill the own process: always (`mark` empty), or only while the file `mark` does not exist (it is made)."""

    mark: str = ""
    number: int = signal.SIGKILL


class Think(msgspec.Struct, frozen=True, tag="think"):
    """Sleep in steps and look at the clock, at most `seconds`; without `looks`: sleep through."""

    seconds: float
    looks: bool = True


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Answer with the configuration under `key` (its length and its end)."""

    key: int


class DieBeforeBell(msgspec.Struct, frozen=True, tag="die_before_bell"):
    """Let the process die after it has written the answer and before it rings; once, by the file `mark`."""

    mark: str


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Start a program that would run for ever and answer with its pid."""


Job = Spawn | Echo | Fill | FillFile | Raise | Die | Think | Recall | DieBeforeBell


class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str
    pid: int


Result = Said


def _mark(path: str) -> bool:
    """True the first time."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


class Shop:
    """`fails`: how preparing goes wrong: raise, kill, hang; `fails_while`: only as long as this file exists."""

    job_type = Job
    result_type = Result

    def __init__(self, fails: str = "", fails_while: str = "") -> None:
        self.fails = fails
        self.fails_while = fails_while
        self.kept: dict[int, bytes] = {}

    def prepare(self) -> None:
        if self.fails_while and not os.path.exists(self.fails_while):
            return
        if self.fails == "raise":
            raise RuntimeError("no tools")
        if self.fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails == "hang":
            time.sleep(1000)

    def configure(self, key: int, payload: bytes) -> None:
        if payload.startswith(b"bad"):
            raise ValueError("a bad configuration")
        if payload.startswith(b"die once ") and _mark(payload[9:].decode()):
            os.kill(os.getpid(), signal.SIGKILL)
        self.kept[key] = payload

    def run(self, job: Job, bench: Bench) -> Result:
        return Said(self._run(job, bench), os.getpid())

    def _run(self, job: Job, bench: Bench) -> str:
        if isinstance(job, Echo):
            if job.seconds:
                time.sleep(job.seconds)
            return job.text * job.times
        if isinstance(job, Fill):
            time.sleep(job.seconds)
            bench.span(job.span)[:] = bytes([job.value]) * job.span.nbytes
            return "filled"
        if isinstance(job, FillFile):
            bench.file(job.name, job.nbytes)[:] = bytes([job.value]) * job.nbytes
            return "filled"
        if isinstance(job, Raise):
            self._raise(job)
        if isinstance(job, Die) and (not job.mark or _mark(job.mark)):
            os.kill(os.getpid(), job.number)
        if isinstance(job, DieBeforeBell) and _mark(job.mark):
            Doorbell.ring = lambda bell: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        if isinstance(job, Spawn):
            return str(subprocess.Popen(["sleep", "1000"]).pid)
        if isinstance(job, Think):
            return self._think(job, bench)
        if isinstance(job, Recall):
            kept = self.kept.get(job.key)
            return "nothing" if kept is None else f"{len(kept)} {kept[-8:].decode()}"
        return "alive"

    def _think(self, job: Think, bench: Bench) -> str:
        end = time.monotonic() + job.seconds
        while time.monotonic() < end:
            if job.looks and not bench.remaining():
                raise TimeoutError
            time.sleep(0.005)
        return "thought"

    def _raise(self, job: Raise) -> None:
        if job.kind == "job":
            raise JobError(job.text)
        if job.kind == "memory":
            raise MemoryError
        if job.kind == "time":
            raise TimeoutError
        if job.kind == "exit":
            raise SystemExit(3)
        raise ValueError(job.text)
