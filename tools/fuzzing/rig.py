"""Runs a subject's cases in a child process and watches it from outside: death, hang and growth are findings too.

Case number N of a subject depends on N alone.  The child writes the number it is at into shared memory, so that the
parent knows it when the child dies or does not come back; the next child goes on behind it.
"""

import contextlib
import gc
import json
import mmap
import os
import random
import select
import signal
import struct
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Protocol

HANG_S = 10.0
WARM_CASES = 1000  # caches are filled by then
GROWTH_BYTES = 256 << 20  # a pool process keeps up to 192 MiB
_BOARD = struct.Struct("<qdq")  # number of the case, when it began, how many are done
_NOT_PREPARED = -1


class Wrong(Exception):
    """What a subject saw is not what it may see; the message says it in a sentence."""


class Subject(Protocol):
    """`prepare` runs once in every child.  `feed` makes case `chance` and judges it: Wrong, or any other exception,
    is a finding; what it returns is counted by word ("refused", "decoded", ...).  `may_die`: a death is none."""

    name: str
    may_die: bool

    def prepare(self) -> None: ...

    def feed(self, chance: random.Random) -> str: ...


@dataclass(frozen=True)
class Finding:
    """`number`: `--seed` that repeats it."""

    subject: str
    number: int
    kind: str
    text: str

    @property
    def trait(self) -> tuple[str, str]:
        """What findings of one cause have in common: the last line of a traceback, or of a sentence its first words."""
        lines = self.text.strip().splitlines() or [""]
        return self.kind, lines[-1][:60]

    def told(self) -> str:
        repeat = f"tools/fuzz.py --subject {self.subject} --seed {self.number} --cases 1"
        return f"{self.kind} in {self.subject}: {self.text}\n  again: {repeat}"


@dataclass
class Tally:
    """What a hunt did: cases run, how they ended by word, findings, of those that are alike the first."""

    cases: int
    endings: dict[str, int]
    findings: list[Finding]

    def note(self, finding: Finding) -> None:
        if all(known.trait != finding.trait for known in self.findings):
            self.findings.append(finding)


def hunt(subject: Subject, *, seed: int, seconds: float, cases: int = 0, most: int = 20) -> Tally:
    """Run cases `seed`, `seed + 1`, ... for `seconds`, or exactly `cases` of them; at most `most` findings."""
    tally = Tally(0, {}, [])
    deadline = time.monotonic() + seconds
    number, left = seed, cases
    while (left > 0 if cases else time.monotonic() < deadline) and len(tally.findings) < most:
        number = _Child(subject, number, left, 0.0 if cases else deadline).watch(tally)
        left = seed + cases - number
    return tally


class _Child:
    def __init__(self, subject: Subject, number: int, cases: int, deadline: float) -> None:
        self._subject = subject
        self._board = mmap.mmap(-1, mmap.PAGESIZE)
        self._board[: _BOARD.size] = _BOARD.pack(number, time.monotonic(), _NOT_PREPARED)
        self._reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(writing)
            return
        try:
            os.close(self._reading)
            with os.fdopen(writing, "w") as out:
                _work(subject, number, cases, deadline, self._board, out)
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def watch(self, tally: Tally) -> int:
        """Until the child has ended; the number to go on with."""
        text, is_hung = b"", False
        while True:
            if select.select([self._reading], [], [], 0.2)[0]:
                piece = os.read(self._reading, 1 << 16)
                text += piece
                if not piece:
                    break
            _, since, _ = _BOARD.unpack(self._board[: _BOARD.size])
            if time.monotonic() - since > HANG_S and not is_hung:
                is_hung = True
                os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._reading)
        number, _, done = _BOARD.unpack(self._board[: _BOARD.size])
        self._board.close()
        if done == _NOT_PREPARED and not is_hung:
            raise RuntimeError(f"{self._subject.name} cannot be prepared")
        tally.cases += max(0, done)
        self._read(text.decode(errors="replace"), tally)
        if is_hung:
            tally.note(Finding(self._subject.name, number, "hang", f"no answer in {HANG_S:g} s"))
        elif os.WIFSIGNALED(status):
            how = signal.Signals(os.WTERMSIG(status)).name
            tally.endings["died"] = tally.endings.get("died", 0) + 1
            if self._subject.may_die:
                return number + 1
            tally.note(Finding(self._subject.name, number, "death", f"the process ended by {how}"))
        return number + 1

    @staticmethod
    def _read(text: str, tally: Tally) -> None:
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # cut off by a death
                said = json.loads(line)
                for word, count in said.pop("endings", {}).items():
                    tally.endings[word] = tally.endings.get(word, 0) + count
                if "kind" in said:
                    tally.note(Finding(**said))


def _work(subject: Subject, number: int, cases: int, deadline: float, board: mmap.mmap, out: object) -> None:
    """In the child: cases until time is up, at least one; one line of JSON for every finding, one with the endings."""
    subject.prepare()
    endings: dict[str, int] = {}
    done, warm = 0, 0

    told: dict[tuple[str, str], int] = {}

    def tell(kind: str, text: str) -> None:
        finding = Finding(subject.name, number, kind, text)
        told[finding.trait] = told.get(finding.trait, 0) + 1
        if told[finding.trait] > 1:
            return
        print(json.dumps(asdict(finding)), file=out, flush=True)  # type: ignore[call-overload]

    while (done < cases) if cases else (not done or time.monotonic() < deadline):
        board[: _BOARD.size] = _BOARD.pack(number, time.monotonic(), done)
        try:
            word = subject.feed(random.Random(number))
            endings[word] = endings.get(word, 0) + 1
        except Wrong as error:
            tell("wrong", str(error))
        except Exception:
            tell("crash", traceback.format_exc(limit=-6)[-1500:])
        done += 1
        if done % WARM_CASES == 0:
            print(json.dumps({"endings": endings}), file=out, flush=True)  # type: ignore[call-overload]
            endings.clear()
            gc.collect()
            private = private_bytes()
            warm = warm or private
            if private > warm + GROWTH_BYTES:
                tell("growth", f"{(private - warm) >> 20} MiB more than after {WARM_CASES} cases")
                warm = private
        number += 1
    board[: _BOARD.size] = _BOARD.pack(number - 1, time.monotonic(), done)
    print(json.dumps({"endings": endings}), file=out, flush=True)  # type: ignore[call-overload]


def private_bytes(pid: int | str = "self") -> int:
    """Memory in RAM that is shared with nobody."""
    with open(f"/proc/{pid}/statm", "rb") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def resident_bytes(pid: int | str = "self") -> int:
    """Memory a process has in RAM, shared pages included."""
    with open(f"/proc/{pid}/statm", "rb") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def peak_bytes() -> int:
    """The most this process had in RAM since `forget_peak`."""
    with open("/proc/self/status", "rb") as status:
        line = next(line for line in status if line.startswith(b"VmHWM:"))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
