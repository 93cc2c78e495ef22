"""What counts the checks against real engines: what did not run must not look as if it had passed."""

import pytest

from tests.engines_real.answers import Differs
from tests.engines_real.tally import Tally
from tools.launch import LaunchError


def _differs() -> None:
    raise Differs("other pixels")


def test_checks_are_counted_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally([])
    tally.run("vllm rust raw shm: clip", lambda: None)
    tally.run("vllm rust raw shm: text_only", _differs)
    tally.run("vllm pair auto: clip", lambda: None)
    assert (tally.passed, tally.failed) == (2, 1)
    assert tally.table() == "  1 of   2  vllm rust raw shm\n  1 of   1  vllm pair auto"
    assert "FAIL  vllm rust raw shm: text_only: other pixels" in capsys.readouterr().out


def test_an_engine_that_does_not_start_is_a_failure_and_the_next_groups_turn() -> None:
    tally = Tally([])
    for group in ("one", "other"):
        with tally.group(group):
            if group == "one":
                raise LaunchError("no engine")
            tally.run(f"{group}: text_only", lambda: None)
    assert tally.table() == "  0 of   1  one\n  1 of   1  other"


def test_only_names_with_every_word_are_run() -> None:
    tally = Tally(["rust", "shm"])
    checks = {"clip": _differs}
    assert tally.chosen("vllm rust raw inline", checks) == {}
    assert tally.chosen("vllm rust raw shm", checks) == {"vllm rust raw shm: clip": _differs}
    tally.run("vllm python raw shm: clip", _differs)
    assert (tally.passed, tally.failed) == (0, 0)
