"""The circuit breaker: its states against a model written apart, and what counts."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.breaker import COUNTED, Breaker, BreakerSettings, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def breaker(**settings):
    clock, told = Clock(), []
    settings = {"failure_threshold": 3, "success_threshold": 2, "timeout_duration_s": 10.0, **settings}
    made = Breaker(BreakerSettings(**settings), lambda before, after: told.append((before, after)), clock)
    return made, clock, told


def fail(made, status="UNAVAILABLE"):
    trial = made.begin()
    trial.failed(status)
    trial.end()


def succeed(made):
    trial = made.begin()
    trial.answered()
    trial.finished()
    trial.end()


def test_the_round_of_states():
    made, clock, told = breaker()
    for _ in range(3):
        assert made.admits
        fail(made)
    assert made.state is OPEN and not made.admits
    clock.now = 9.9
    assert not made.admits
    clock.now = 10.0
    assert made.state is HALF_OPEN and made.admits
    fail(made)
    assert made.state is OPEN, "one failure is enough while half-open"
    clock.now = 20.0
    succeed(made)
    assert made.state is HALF_OPEN
    succeed(made)
    assert made.state is CLOSED and made.failures == 0
    assert told == [
        (CLOSED, OPEN), (OPEN, HALF_OPEN), (HALF_OPEN, OPEN), (OPEN, HALF_OPEN), (HALF_OPEN, CLOSED),
    ]  # fmt: skip


def test_a_success_in_between_begins_the_count_again():
    made, _, _ = breaker()
    for _ in range(5):
        fail(made)
        fail(made)
        succeed(made)
    assert made.state is CLOSED and made.failures == 0


def test_failures_outside_the_window_are_forgotten():
    made, clock, _ = breaker(window_duration_s=5.0)
    for clock.now in (0.0, 3.0, 6.0):
        fail(made)
    assert made.state is CLOSED and made.failures == 2
    clock.now = 7.0
    fail(made)
    assert made.state is OPEN


def test_an_answer_that_dies_half_way_is_no_success():
    made, _, _ = breaker()
    for _ in range(3):
        trial = made.begin()
        trial.answered()
        trial.failed("UNAVAILABLE")
        trial.end()
    assert made.state is OPEN


@pytest.mark.parametrize("status", ["RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "ABORTED"])
def test_what_the_request_is_to_blame_for_does_not_count(status):
    made, _, _ = breaker()
    for _ in range(50):
        fail(made, status)
    assert made.state is CLOSED and made.failures == 0 and status not in COUNTED


def test_half_open_lets_in_as_many_as_answers_are_missing():
    made, clock, _ = breaker(success_threshold=3)
    for _ in range(3):
        fail(made)
    clock.now = 10.0
    trials = []
    while made.admits:
        trials.append(made.begin())
    assert len(trials) == 3
    trials[0].end()  # the client left: nothing is known
    assert made.admits
    for trial in trials[1:]:
        trial.answered()
    assert made.state is HALF_OPEN
    succeed(made)
    assert made.state is CLOSED


def test_a_straggler_of_before_says_nothing_of_now():
    made, clock, _ = breaker(success_threshold=1)
    straggler = made.begin()
    for _ in range(3):
        fail(made)
    clock.now = 10.0
    assert made.state is HALF_OPEN
    straggler.answered()
    assert made.state is HALF_OPEN, "it was sent before"


def test_an_introduced_worker_is_tried_at_once():
    made, _, _ = breaker()
    made.try_again()
    assert made.state is CLOSED
    for _ in range(3):
        fail(made)
    made.try_again()
    assert made.state is HALF_OPEN and made.admits


def test_disabled_never_opens():
    made, _, told = breaker(disabled=True)
    for _ in range(100):
        fail(made)
    assert made.state is CLOSED and told == []


STEPS = st.lists(st.sampled_from(["begin", "answer", "finish", "fail", "leave", "wait", "introduced"]), max_size=60)


@example(["begin", "fail", "introduced", "begin", "fail"], 1, 1)
@given(STEPS, st.integers(1, 3), st.integers(1, 3))
def test_no_order_of_events_breaks_it(steps, failures, successes):
    """Trials never exceed what is missing, and a breaker that is left alone always lets somebody in again."""
    made, clock, _ = breaker(failure_threshold=failures, success_threshold=successes)
    trials = []
    for step in steps:
        if step == "begin" and made.admits:
            trials.append(made.begin())
        elif step == "wait":
            clock.now += 4.0
        elif step == "introduced":
            made.try_again()
        elif trials and step == "answer":
            trials[0].answered()
        elif trials and step in ("finish", "fail", "leave"):
            trial = trials.pop(0)
            if step == "finish":
                trial.answered()
                trial.finished()
            elif step == "fail":
                trial.failed("UNKNOWN")
            trial.end()
        assert 0 <= made._trials <= successes
    for trial in trials:
        trial.end()
    assert made._trials == 0
    clock.now += 10.0
    assert made.admits
