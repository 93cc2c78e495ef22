"""Killing real pool processes in every state, and replacing them."""

import asyncio
import os
import signal
from pathlib import Path

from pool.pool import JobLost
from tests.pool.shop import Die, DieBeforeBell, Echo, Fill, Recall, Spawn, Think
from tests.pool.stage import Scene, aside, children_of, play
from tests.pool.test_pool import raised


async def idle(scene: Scene) -> None:
    await scene.up()
    for pid in scene.pids():
        os.kill(pid, signal.SIGKILL)
    await scene.until(lambda: scene.pool.statistics.deaths == 2)
    await scene.up()
    assert (await scene.pool.submit(Echo("a"), deadline_s=5)).result.text == "a"
    assert scene.pool.statistics.repeated == 0


def test_killed_while_idle(tmp_path: Path) -> None:
    play(idle, tmp_path)


async def running(scene: Scene) -> None:
    lease = await scene.link.outputs.reserve([4096])
    job = asyncio.ensure_future(scene.pool.submit(Fill(lease.spans[0], 7, 0.3), deadline_s=5, leases=[lease]))
    others = [asyncio.ensure_future(scene.pool.submit(Echo(str(i)), deadline_s=5)) for i in range(10)]
    await scene.until(lambda: scene.pool.seats[0].board.running == 1)
    (pid,) = scene.pids()
    os.kill(pid, signal.SIGKILL)
    outcome = await job
    assert outcome.result.text == "filled" and outcome.result.pid != pid
    assert lease.view()[0] == 7 and lease.pins == 0
    lease.release()
    assert [(await other).result.text for other in others] == [str(i) for i in range(10)]
    assert scene.pool.statistics.repeated == 1 and scene.pool.statistics.lost == 0


def test_killed_while_running(tmp_path: Path) -> None:
    play(running, tmp_path, "--processes=1")


async def twice(scene: Scene) -> None:
    jobs = [asyncio.ensure_future(scene.pool.submit(Echo(str(i), seconds=0.01), deadline_s=5)) for i in range(20)]
    error = await raised(scene.pool.submit(Die(), deadline_s=5))
    assert isinstance(error, JobLost)
    more = [asyncio.ensure_future(scene.pool.submit(Echo(str(i)), deadline_s=5)) for i in range(20)]
    crashed = await raised(scene.pool.submit(Die(number=signal.SIGSEGV), deadline_s=5))
    assert isinstance(crashed, JobLost)
    assert [(await job).result.text for job in jobs + more] == [str(i) for i in range(20)] * 2
    statistics = scene.pool.statistics
    assert (statistics.deaths, statistics.lost) == (4, 2), "a third process was tried"
    await scene.up()


def test_a_job_that_kills_two_processes_is_lost(tmp_path: Path) -> None:
    played = play(twice, tmp_path)
    assert "Segmentation fault" in played.log, "a codec's crash leaves a stack"


async def before_the_bell(scene: Scene) -> None:
    mark = scene.folder / "mark"
    outcome = await scene.pool.submit(DieBeforeBell(str(mark)), deadline_s=5)
    assert outcome.result.text == "alive" and aside(mark.exists)
    assert scene.pool.statistics.repeated == 1 and scene.pool.statistics.done == 1


def test_killed_between_answer_and_bell(tmp_path: Path) -> None:
    play(before_the_bell, tmp_path, "--processes=1")


async def learning(scene: Scene) -> None:
    await scene.up()
    mark = scene.folder / "mark"
    scene.pool.configure(1, b"first one")
    scene.pool.configure(2, b"die once " + str(mark).encode())
    scene.pool.configure(3, b"third one")
    for key, text in ((1, "9 irst one"), (3, "9 hird one")):
        assert (await scene.pool.submit(Recall(key), deadline_s=5)).result.text == text
    assert aside(mark.exists) and scene.pool.statistics.deaths == 1
    # replayed to the replacement of an idle one as well
    (pid,) = scene.pids()
    os.kill(pid, signal.SIGKILL)
    assert (await scene.pool.submit(Recall(1), deadline_s=5)).result.text == "9 irst one"


def test_killed_while_learning(tmp_path: Path) -> None:
    play(learning, tmp_path, "--processes=1")


async def one_death_each(scene: Scene) -> None:
    """Every twentieth job kills its process once."""
    marks = [str(scene.folder / f"mark{i}") for i in range(6)]
    jobs = [scene.pool.submit(Die(marks[i // 20]) if i % 20 == 7 else Echo(str(i)), deadline_s=5) for i in range(120)]
    outcomes = await asyncio.gather(*jobs)
    for index, outcome in enumerate(outcomes):
        assert outcome.result.text == ("alive" if index % 20 == 7 else str(index))
    assert scene.pool.statistics.deaths == 6


def test_every_job_is_answered_while_processes_die(tmp_path: Path) -> None:
    play(one_death_each, tmp_path)


async def descriptors(scene: Scene) -> None:
    await scene.up()
    supervisor = f"/proc/{os.getppid()}/fd"

    def counts() -> tuple[int, int]:
        return len(aside(os.listdir, supervisor)), len(aside(os.listdir, "/proc/self/fd"))

    async def kill_all(times: int) -> None:
        for _ in range(times):
            deaths = scene.pool.statistics.deaths
            for pid in scene.pids():
                os.kill(pid, signal.SIGTERM)
            await scene.until(lambda deaths=deaths: scene.pool.statistics.deaths == deaths + 2)  # type: ignore[misc]
            await scene.up()

    await kill_all(2)
    await asyncio.sleep(0.2)
    before = counts()
    inside = max(len(aside(os.listdir, f"/proc/{pid}/fd")) for pid in scene.pids())
    await kill_all(10)
    # the supervisor may be a moment behind: a child can be up before its parent has come back from the fork
    await scene.until(lambda: counts() == before)
    # one more or less: each holds the other's sentinel pipe when that one was there first
    assert all(len(aside(os.listdir, f"/proc/{pid}/fd")) <= inside + 1 for pid in scene.pids())
    assert len(scene.pids()) == 2
    # a pool process has its own two bells, its end of what files are lent over, and nothing of the other slot
    for pid in scene.pids():
        targets = [aside(os.readlink, f"/proc/{pid}/fd/{fd}") for fd in aside(os.listdir, f"/proc/{pid}/fd")]
        assert sum("eventfd" in target for target in targets) == 2, targets
        assert sum(target.startswith("socket") for target in targets) == 1, targets


def test_no_descriptor_is_lost(tmp_path: Path) -> None:
    play(descriptors, tmp_path)


async def groups(scene: Scene) -> None:
    await scene.up()
    thinking = asyncio.ensure_future(scene.pool.submit(Think(30), deadline_s=60))
    await scene.until(lambda: scene.pool.busy)
    for pid in scene.pids():
        assert os.getpgid(pid) == pid, "it could not be killed with what it started"
        assert int(aside(Path(f"/proc/{pid}/oom_score_adj").read_text)) > int(
            aside(Path("/proc/self/oom_score_adj").read_text)
        ), "the kernel would rather kill the frontend"
        assert aside(Path(f"/proc/{pid}/comm").read_text).startswith("mediagate:pool")
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGHUP)
    await asyncio.sleep(0.1)
    assert scene.pool.statistics.deaths == 0, "signals of the terminal are the supervisor's"
    thinking.cancel()


def test_pool_processes_stand_alone(tmp_path: Path) -> None:
    play(groups, tmp_path)


async def grandchildren(scene: Scene) -> None:
    await scene.up()
    program = int((await scene.pool.submit(Spawn(), deadline_s=5)).result.text)
    parent = os.getppid()
    (pid,) = scene.pids()
    assert program in aside(children_of, pid)
    os.kill(pid, signal.SIGKILL)
    await scene.until(lambda: scene.pool.statistics.deaths)
    await scene.up()
    await scene.until(lambda: not aside(os.path.exists, f"/proc/{program}"))
    assert os.getppid() == parent


def test_what_a_dead_process_had_started_is_killed_and_reaped(tmp_path: Path) -> None:
    play(grandchildren, tmp_path, "--processes=1", "--inherits-orphans")
