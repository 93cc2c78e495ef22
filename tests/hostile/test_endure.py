"""The tools behind docs/reliability.md, each for a moment: nothing is lost, everything comes back."""

import time

import pytest

from tools import endure
from tools.fuzzing import kills, leavers, starts
from tools.fuzzing.live import site
from tools.fuzzing.soak import Report, Sample, growth
from tools.launch import fake_engine


def test_no_request_is_lost_while_pool_processes_are_killed() -> None:
    bodies = kills.questions(12)
    with site(*endure.ROOMY) as place:
        # not by time alone: on a busy machine one job would meet two kills, and be refused as it should
        found = kills.ask_all(place, bodies, 60, 6, kill_every_s=0.3, kill_after=12)
        place.aftermath()
    assert (found.lost, found.answers["200"]) == (0, 60)
    assert found.kills > 0 and found.rate > 0


def test_clients_that_leave_at_any_moment_leave_nothing() -> None:
    with site() as place:
        left = leavers.leave(place, 200, at_once=16, seed=9)
        place.aftermath()
    assert left.total() == 200 and left["while it sent"] > 20
    assert left["before the answer"] + left["in the answer"] + left["after the answer"] > 50
    assert not [how for how in left if how.startswith("was refused")]


def test_a_start_and_an_end() -> None:
    with fake_engine("--light") as port:
        began = time.monotonic()
        life = starts.live(port)
        took = time.monotonic() - began
    assert 0 < life.listening <= life.ready < took
    assert 0 < life.ending < took


def test_growth_is_told_from_parts_of_the_time() -> None:
    report = Report(samples=[Sample(100 + 10 * (n // 4), n, 0, 0) for n in range(20)])
    windows = report.windows(5)
    assert [window.held for window in windows] == [100, 110, 120, 130, 140]
    assert growth(windows[1:]) == pytest.approx(140 / 110 - 1)
    assert (report.peaks.held, report.peaks.frontend) == (140, 19)
