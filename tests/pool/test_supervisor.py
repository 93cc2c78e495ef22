"""The supervisor with real processes: signals, exit codes, replacement under load, systemd, nothing left behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import multiprocess
import pytest

from pool.crew import Forked
from pool.notify import Notifier
from pool.supervisor import (
    ECHO_S,
    EXIT_CLEAN,
    EXIT_CONFIGURATION,
    EXIT_FRONTEND_DIED,
    EXIT_POOL_CANNOT_START,
    EXIT_PORT_TAKEN,
    EXIT_USAGE,
    Supervisor,
)
from tests.pool.shop import Echo, Shop, Think
from tests.pool.stage import ROOT, Scene, aside, play, stage

AGAIN_S = ECHO_S + 0.1


def test_exit_codes_are_the_documented_ones() -> None:
    codes = (EXIT_CLEAN, EXIT_CONFIGURATION, EXIT_USAGE, EXIT_PORT_TAKEN, EXIT_POOL_CANNOT_START)
    assert codes == (0, 1, 2, 3, 4) and EXIT_FRONTEND_DIED not in codes


# -- the end


async def drains(scene: Scene) -> None:
    await scene.up()
    scene.say("up")
    working = [asyncio.ensure_future(scene.pool.submit(Think(0.4), deadline_s=5)) for _ in range(4)]
    await scene.drained.wait()
    scene.say(f"settle={scene.settle}")
    # a pool process that dies now is still replaced
    os.kill(min(scene.pids()), signal.SIGKILL)
    await asyncio.gather(*working)
    scene.say("finished")


@pytest.mark.parametrize(("number", "settle"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_drains(tmp_path: Path, number: int, settle: bool) -> None:
    with stage(drains, tmp_path) as played:
        played.wait_for("up")
        played.signal(number)
        assert played.end() == EXIT_CLEAN
        assert played.said == ["up", f"settle={settle}", "finished"]


async def never_ends(scene: Scene) -> None:
    await scene.up()
    scene.say("up")
    await scene.drained.wait()
    scene.say("draining")
    await asyncio.sleep(60)


def test_a_frontend_that_does_not_end_is_killed(tmp_path: Path) -> None:
    with stage(never_ends, tmp_path, "--stop-timeout=0.3") as played:
        played.wait_for("up")
        played.signal(signal.SIGTERM)
        assert played.end(10) == EXIT_FRONTEND_DIED


async def quits(scene: Scene) -> None:
    await scene.up()
    scene.say("up")
    await scene.drained.wait()
    scene.say("draining")
    await scene.quitted.wait()
    scene.say("quitting")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path: Path, second: int) -> None:
    with stage(quits, tmp_path) as played:
        played.wait_for("up")
        played.signal(signal.SIGINT)
        played.wait_for("draining")
        time.sleep(AGAIN_S)
        played.signal(second)
        assert played.end(5) == EXIT_CLEAN
        assert played.said[-1] == "quitting"


@pytest.mark.parametrize("signals", [2, 3])
def test_a_second_signal_kills_a_frontend_that_does_not_listen(tmp_path: Path, signals: int) -> None:
    with stage(never_ends, tmp_path, "--stop-timeout=60") as played:
        played.wait_for("up")
        played.signal(signal.SIGTERM)
        played.wait_for("draining")
        for number in range(1, signals):
            time.sleep(AGAIN_S)
            played.signal(signal.SIGTERM)
            while played.log.count("second signal") < number:
                time.sleep(0.005)
        assert played.end(20) == EXIT_FRONTEND_DIED


@pytest.mark.parametrize("echo", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_twice_is_one(tmp_path: Path, echo: int) -> None:
    """`timeout` and shells signal a process and then its group; a service manager may do so beside them."""
    with stage(drains, tmp_path) as played:
        played.wait_for("up")
        played.signal(signal.SIGTERM)
        while "draining" not in played.log:
            time.sleep(0.001)
        played.signal(echo)
        os.killpg(played.pid, echo)
        assert played.end() == EXIT_CLEAN
        assert played.said[-1] == "finished"
        assert "the same signal once more" in played.log and "second signal" not in played.log


def test_ctrl_c_of_a_terminal_reaches_everybody_and_only_drains(tmp_path: Path) -> None:
    with stage(drains, tmp_path) as played:
        played.wait_for("up")
        os.killpg(played.pid, signal.SIGINT)
        assert played.end() == EXIT_CLEAN
        assert played.said[-1] == "finished"


async def ends_with_three(scene: Scene) -> None:
    scene.code = EXIT_PORT_TAKEN


async def dies(scene: Scene) -> None:
    await scene.up()
    os.kill(os.getpid(), signal.SIGKILL)


async def fails(scene: Scene) -> None:
    raise LookupError("a fault in the frontend")


@pytest.mark.parametrize(
    ("scenario", "code", "words"),
    [
        (ends_with_three, EXIT_PORT_TAKEN, ""),
        (dies, EXIT_FRONTEND_DIED, "the frontend died: signal=9"),
        (fails, EXIT_FRONTEND_DIED, "LookupError: a fault in the frontend"),
    ],
)
def test_the_frontends_end_ends_the_gateway(tmp_path: Path, scenario: object, code: int, words: str) -> None:
    with stage(scenario, tmp_path) as played:  # type: ignore[arg-type]
        assert played.end() == code
        assert words in played.log


async def hangs_up(scene: Scene) -> None:
    await scene.up()
    scene.link.close()
    scene.link._control.close()
    before = aside(cpu_ticks, os.getppid())
    os.kill(min(scene.pids()), signal.SIGKILL)  # its death cannot be told any more
    await asyncio.sleep(0.6)
    assert aside(cpu_ticks, os.getppid()) - before < 20, "the supervisor spins"


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_frontend_that_hung_up_is_waited_for(tmp_path: Path) -> None:
    played = play(hangs_up, tmp_path)
    assert "Traceback" not in played.log


def test_a_killed_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    with stage(never_ends, tmp_path) as played:
        played.wait_for("up")
        played.signal(signal.SIGKILL)
        assert played.end() == -signal.SIGKILL  # `end` sees to it that the whole session is empty


# -- the start


async def waits(scene: Scene) -> None:
    scene.link.ready("http://127.0.0.1:1")
    await scene.quitted.wait()


@pytest.mark.parametrize("how", ["raise", "kill", "hang"])
def test_a_pool_that_cannot_start(tmp_path: Path, how: str) -> None:
    with stage(waits, tmp_path, f"--fails={how}", "--prepare-timeout=0.2") as played:
        assert played.end(20) == EXIT_POOL_CANNOT_START
        assert "the pool cannot start" in played.log
        assert ("RuntimeError: no tools" in played.log) is (how == "raise")


async def recovers(scene: Scene) -> None:
    await scene.up()
    aside((scene.folder / "broken").touch)
    (pid,) = scene.pids()
    os.kill(pid, signal.SIGKILL)
    await scene.until(lambda: scene.pool.statistics.deaths >= 5)
    waiting = asyncio.ensure_future(scene.pool.submit(Echo("a"), deadline_s=5))
    aside((scene.folder / "broken").unlink)
    assert (await waiting).result.text == "a"
    assert scene.pool.statistics.deaths < 12, "no pauses between the attempts"


def test_later_failures_to_start_are_retried_with_pauses(tmp_path: Path) -> None:
    played = play(recovers, tmp_path, "--processes=1", "--fails=kill", f"--fails-while={tmp_path / 'broken'}")
    assert "pool process waits to start: slot=0 failures=2 pause_s=0.5" in played.log


def test_more_than_one_thread_is_refused() -> None:
    supervisor = Supervisor(processes=1, mapping_bytes=1 << 20, keep_bytes=0, stop_timeout_s=1)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"has \d+ threads .* OPENBLAS_NUM_THREADS=1"):
            supervisor.run(lambda link: 0, Shop())
    finally:
        over.set()
        thread.join()
        supervisor.close()


def test_a_child_that_somebody_else_reaped() -> None:
    child = Forked("test", sys.exit, 7, leads_group=False)
    while multiprocess.active_children():  # reaps, as every start of another process does
        time.sleep(0.01)
    assert child.reap() == 7


def test_numpy_with_one_thread_is_fine() -> None:
    code = "import os; os.environ.update(OPENBLAS_NUM_THREADS='1'); import numpy; import pool.supervisor as s; "
    done = subprocess.run([sys.executable, "-c", code + "s.assert_single_thread()"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


# -- replacement


async def renewed_under_load(scene: Scene) -> None:
    await scene.up()
    before = scene.pids()
    scene.link.ready("up")
    is_over = False
    answers: list[str] = []

    async def client(name: int) -> None:
        for number in range(10_000):
            if is_over:
                return
            text = f"{name} {number}"
            outcome = await scene.pool.submit(Echo(text, seconds=0.002), deadline_s=5)
            assert outcome.result.text == text
            answers.append(text)

    clients = [asyncio.ensure_future(client(name)) for name in range(6)]
    scene.say("up")
    await scene.until(lambda: scene.pool.statistics.deaths == 3 and not before & scene.pids())
    await scene.up()
    is_over = True
    await asyncio.gather(*clients)
    assert len(answers) == scene.pool.statistics.done and scene.pool.statistics.repeated == 0
    assert len(scene.pids()) == 3


def test_sighup_replaces_every_process_and_loses_no_job(tmp_path: Path) -> None:
    with stage(renewed_under_load, tmp_path, "--processes=3") as played:
        played.wait_for("up")
        end = time.monotonic() + 10
        while "ready: up" not in played.log and time.monotonic() < end:
            time.sleep(0.01)
        played.signal(signal.SIGHUP)
        assert played.end() == EXIT_CLEAN, played.log
        assert played.log.count("it is retired") == 3


async def retired(scene: Scene) -> None:
    await scene.up()
    before = scene.pids()
    jobs = [asyncio.ensure_future(scene.pool.submit(Echo("a", seconds=0.02), deadline_s=5)) for _ in range(20)]
    await scene.pool.retire(1)
    assert len(scene.pids() - before) == 1
    for job in jobs:
        await job
    assert scene.pool.statistics.repeated == 0


def test_retire_one(tmp_path: Path) -> None:
    play(retired, tmp_path)


# -- systemd


@contextlib.contextmanager
def service_manager(folder: Path) -> Iterator[socket.socket]:
    """The other side of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(folder / "notify"))
        listening.settimeout(15)
        yield listening


def hear(listening: socket.socket, word: str) -> list[str]:
    """Datagrams until one begins with `word`."""
    heard = []
    while True:
        heard.append(listening.recv(4096).decode())
        if heard[-1].startswith(word):
            return heard


async def under_systemd(scene: Scene) -> None:
    scene.link.ready("http://127.0.0.1:30000\nand more")
    scene.say("ready")
    await scene.until(lambda: scene.pool.statistics.deaths == 2, 20)
    await scene.up()
    scene.link.status("2 of 2 up")
    await scene.drained.wait()


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with service_manager(tmp_path) as manager, stage(under_systemd, tmp_path, environ=environ) as played:
        assert hear(manager, "READY=1") == ["READY=1\nSTATUS=http://127.0.0.1:30000 and more"]
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        played.signal(signal.SIGHUP)
        (reloading,) = hear(manager, "RELOADING=1")
        usec = int(reloading.removeprefix("RELOADING=1\nMONOTONIC_USEC="))
        assert before <= usec <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        heard = {manager.recv(4096).decode() for _ in range(2)}
        assert heard == {"READY=1\nSTATUS=http://127.0.0.1:30000 and more", "STATUS=2 of 2 up"}
        played.signal(signal.SIGTERM)
        assert hear(manager, "STOPPING=1") == ["STOPPING=1\nSTATUS=draining"]
        assert played.end() == EXIT_CLEAN


def test_not_ready_without_a_pool(tmp_path: Path) -> None:
    with service_manager(tmp_path) as manager:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with stage(waits, tmp_path, "--fails=raise", environ=environ) as played:
            assert played.end(20) == EXIT_POOL_CANNOT_START
        manager.settimeout(0.01)
        with pytest.raises(TimeoutError):
            manager.recv(4096)


async def stuck(scene: Scene) -> None:
    scene.link.ready("up")
    await scene.up()
    await asyncio.sleep(0.5)
    scene.say("stuck")
    aside(time.sleep, 1.5)
    scene.say("free")
    await scene.drained.wait()


def test_the_watchdog_hears_only_from_a_living_loop(tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with service_manager(tmp_path) as manager, stage(stuck, tmp_path, environ=environ) as played:
        hear(manager, "READY=1")
        for _ in range(3):
            hear(manager, "WATCHDOG=1")
        played.wait_for("stuck")
        time.sleep(0.2)
        manager.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                manager.recv(4096)
        time.sleep(0.8)
        with pytest.raises(BlockingIOError):
            manager.recv(4096)
        played.wait_for("free")
        manager.settimeout(15)
        hear(manager, "WATCHDOG=1")
        played.signal(signal.SIGTERM)
        assert played.end() == EXIT_CLEAN


def test_another_process_watchdog_is_not_ours(tmp_path: Path) -> None:
    assert Notifier.of({"WATCHDOG_USEC": "30000000"}).watchdog_s == 30.0
    assert Notifier.of({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 30.0
    assert Notifier.of({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog_s == 0.0
    assert Notifier.of({}).watchdog_s == 0.0
    Notifier.of({}).ready("nobody listens")
    gone = Notifier(str(tmp_path / "gone"))
    gone.ready("nobody listens")
    gone.close()


def test_abstract_addresses() -> None:
    name = f"mediagate-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        listening.settimeout(5)
        notifier = Notifier("@" + name)
        notifier.status("here")
        assert listening.recv(100) == b"STATUS=here"
        notifier.close()
