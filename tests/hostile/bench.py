"""Files through the job of a pool process, each in a fresh process with a pool process's own limits.

`python -m tests.hostile.bench LIMIT_BYTES` reads one JSON line per file from standard input, `{"path": ...}` or
`{"bomb": name, "size": bytes}`, and answers each with what it cost: CPU seconds, peak of memory, and the outcome.
"""

import json
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.jobs import JobError
from pipeline.models.base import Hints
from tools.fuzzing.bombs import BOMBS
from tools.fuzzing.pictures import Pictures
from tools.fuzzing.rig import forget_peak, peak_bytes, resident_bytes

ROOT = Path(__file__).parent.parent.parent


class Cost(NamedTuple):
    """`answer` begins with "decoded", "looked at", "refused", or the name of an exception that is none of ours."""

    cpu_s: float
    peak_bytes: int
    left_bytes: int
    answer: str


def costs(files: Sequence[dict[str, Any]], *, limit_bytes: int = 3584 << 20) -> list[Cost]:
    """What each file costs in a process of its own."""
    command = [sys.executable, "-m", "tests.hostile.bench", str(limit_bytes)]
    lines = "\n".join(json.dumps(file) for file in files)
    run = subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, text=True, check=True, timeout=110)
    assert not run.stderr, run.stderr
    return [Cost(*json.loads(line)) for line in run.stdout.splitlines()]


def _measure(file: dict[str, Any], pictures: Pictures) -> Cost:
    data = Path(file["path"]).read_bytes() if "path" in file else BOMBS[file["bomb"]](file["size"])
    pictures.prepare()
    forget_peak()
    before = peak_bytes()
    began = resource.getrusage(resource.RUSAGE_SELF)
    try:
        answer = pictures.run(data, Hints(max_long_side=file.get("cap")), is_patient=True)
    except JobError as error:
        answer = f"refused: {error}"
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    ended = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    return Cost(cpu_s, peak_bytes() - before, resident_bytes() - before, answer)


def main(limit_bytes: int) -> None:
    pictures = Pictures(bombs=False, memory_bytes=limit_bytes)
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(writing, json.dumps(_measure(json.loads(line), pictures)).encode())
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(reading) as said:
            print(said.read() or json.dumps(Cost(0.0, 0, 0, f"died of {status}")), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
