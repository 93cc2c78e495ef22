"""Plays a scenario in a real gateway's processes: supervisor, frontend, pool processes, in a fresh interpreter.

A scenario is an async function `(scene: Scene) -> None` at the top level of a test file; it runs in the frontend, its
failed assertion is the frontend's failure.  `play` starts it and waits; `Stage` starts it and lets the test send
signals.
"""

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from blockbuster import blockbuster_ctx

from pool.link import FrontendLink
from pool.notify import Notifier
from pool.pool import Pool
from pool.segments import SegmentStore
from pool.supervisor import Supervisor
from tests.pool.shop import Job, Said, Shop

ROOT = Path(__file__).parents[2]


class Scene:
    """What a scenario has: the pool, the link, the files it may lend, a folder of its own, and when it is asked to
    drain.
    """

    def __init__(self, link: FrontendLink, pool: Pool[Job, Said], segments: SegmentStore, folder: Path) -> None:
        self.link = link
        self.pool = pool
        self.segments = segments
        self.folder = folder
        self.drained = asyncio.Event()
        self.settle: bool | None = None
        self.quitted = asyncio.Event()
        self.code = 0
        link.on_drain(self._on_drain)
        link.on_quit(self.quitted.set)

    def _on_drain(self, settle: bool) -> None:
        self.settle = settle
        self.drained.set()

    async def until(self, condition: Callable[[], Any], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s: {self.pool!r} {self.pool.statistics}"
            await asyncio.sleep(0.005)

    async def up(self) -> None:
        await self.until(lambda: self.pool.processes_alive == self.pool.processes)

    def pids(self) -> set[int]:
        """The pool processes."""
        return aside(children_of, os.getppid()) - {os.getpid()}

    def say(self, text: str) -> None:
        """To the test, by standard output."""
        print(text, flush=True)


def children_of(parent: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.add(int(stat.parent.name))
    return found


def _in_session(session: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.add(int(stat.parent.name))
    return found


def aside(act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Something the scenario does itself and that may block (looking into /proc, files)."""
    return act(*arguments, **options)


Scenario = Callable[[Scene], Awaitable[None]]


class Stage:
    """A gateway playing `scenario`; the test's side of it."""

    def __init__(self, scenario: Scenario, folder: Path, *options: str, environ: dict[str, str] | None = None) -> None:
        name = f"{scenario.__module__}:{scenario.__name__}"
        self.out, self.err = folder / "stdout", folder / "stderr"
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.pool.stage", name, str(folder), *options],
                cwd=ROOT,
                env={**os.environ, **(environ or {})},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> list[str]:
        return self.out.read_text().splitlines()

    @property
    def log(self) -> str:
        return self.err.read_text()

    def wait_for(self, word: str, seconds: float = 15.0) -> None:
        """Until the scenario has said `word`."""
        end = time.monotonic() + seconds
        while word not in self.said:
            assert self.process.poll() is None, f"ended before saying {word!r}: {self.log}"
            assert time.monotonic() < end, f"did not say {word!r}: {self.said} {self.log}"
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, seconds: float = 30.0) -> int:
        """Wait for the exit code; nothing of the gateway may be left."""
        code = self.process.wait(seconds)
        end = time.monotonic() + 2.0  # a child killed with its parent takes a moment
        while left := _in_session(self.pid):
            assert time.monotonic() < end, f"processes left behind: {left} {self.log}"
            time.sleep(0.01)
        return code


@contextlib.contextmanager
def stage(scenario: Scenario, folder: Path, *options: str, environ: dict[str, str] | None = None) -> Iterator[Stage]:
    played = Stage(scenario, folder, *options, environ=environ)
    try:
        yield played
    finally:
        for pid in _in_session(played.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        played.process.wait()


def play(scenario: Scenario, folder: Path, *options: str, environ: dict[str, str] | None = None) -> Stage:
    """Play to the end; the scenario must succeed."""
    with stage(scenario, folder, *options, environ=environ) as played:
        code = played.end()
        assert code == 0, f"exit code {code}\n{played.log}"
        return played


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop-timeout", type=float, default=10.0)
    parser.add_argument("--prepare-timeout", type=float, default=30.0)
    parser.add_argument("--overrun-grace", type=float, default=0.2)
    parser.add_argument("--fails", default="")
    parser.add_argument("--fails-while", default="")
    parser.add_argument("--inherits-orphans", action="store_true")
    options = parser.parse_args()
    if options.inherits_orphans:  # as the first process of a container does
        ctypes.CDLL(None).prctl(36, ctypes.c_ulong(1), 0, 0, 0)
    logging.basicConfig(level=logging.INFO, format="%(process)d %(name)s %(levelname)s %(message)s")
    module, _, name = options.scenario.partition(":")
    scenario: Scenario = getattr(importlib.import_module(module), name)

    async def serve(link: FrontendLink) -> int:
        pool = link.pool(overrun_grace_s=options.overrun_grace)
        segments = SegmentStore(pid=os.getpid(), cap_bytes=64 << 20)
        pool.start(segments.lend)
        scene = Scene(link, pool, segments, options.folder)
        with blockbuster_ctx(scanned_modules=["pool"]) as blocker:
            for function in blocker.functions.values():
                function.can_block_in("tests/pool/stage.py", "aside")
            async with asyncio.timeout(60):
                await scenario(scene)
        await pool.close()
        segments.close()
        link.close()
        assert link.inputs.used == link.outputs.used == 0, (link.inputs, link.outputs)
        return scene.code

    def frontend(link: FrontendLink) -> int:
        return asyncio.run(serve(link))

    supervisor = Supervisor(
        processes=options.processes,
        mapping_bytes=64 << 20,
        keep_bytes=16 << 20,
        stop_timeout_s=options.stop_timeout,
        notifier=Notifier.of(os.environ),
        prepare_timeout_s=options.prepare_timeout,
    )
    return supervisor.run(frontend, Shop(options.fails, options.fails_while))


if __name__ == "__main__":
    sys.exit(_main())
