"""A short hunt by tools/fuzz.py over every subject; a longer one is run by hand (`tools/fuzz.py --seconds 600`)."""

import os
import random
import signal

import pytest

from tools import fuzz
from tools.fuzzing import rig
from tools.fuzzing.rig import Wrong, hunt

CASES, LIVE_CASES = 100, 15


@pytest.mark.parametrize("name", fuzz.DIRECT)
def test_a_short_hunt(name: str) -> None:
    tally = fuzz.run(name, seed=1_000_000, seconds=0, cases=CASES)
    assert not tally.findings, "\n".join(finding.told() for finding in tally.findings)
    assert tally.cases == CASES
    assert len(tally.endings) > 2


@pytest.mark.parametrize("name", fuzz.LIVE)
def test_a_short_hunt_against_a_gateway(name: str) -> None:
    tally = fuzz.run(name, seed=2_000_000, seconds=0, cases=LIVE_CASES)
    assert not tally.findings, "\n".join(finding.told() for finding in tally.findings)
    assert tally.cases == LIVE_CASES


class Puppet:
    """A subject whose cases do what their number says."""

    name = "puppet"
    may_die = False

    def __init__(self, ends: dict[int, str]) -> None:
        self._ends = ends

    def prepare(self) -> None:
        self._numbers = iter(range(100, 200))

    def feed(self, chance: random.Random) -> str:
        match self._ends.get(chance.randrange(1 << 30)):
            case "death":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.pause()
            case "crash":
                raise ValueError("no")
            case "wrong":
                raise Wrong("that is wrong")
        return "fine"


def test_every_kind_of_finding_is_found_and_told_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hunt goes on behind a death and behind a hang."""
    monkeypatch.setattr(rig, "HANG_S", 0.5)
    kinds = {103: "death", 105: "crash", 106: "wrong", 108: "hang"}
    puppet = Puppet({random.Random(number).randrange(1 << 30): kind for number, kind in kinds.items()})
    tally = hunt(puppet, seed=100, seconds=0, cases=12)
    assert {finding.number: finding.kind for finding in tally.findings} == kinds
    assert "--subject puppet --seed 105 --cases 1" in tally.findings[1].told()


def test_findings_of_one_cause_are_told_once() -> None:
    puppet = Puppet({random.Random(number).randrange(1 << 30): "crash" for number in range(100, 120)})
    (finding,) = hunt(puppet, seed=100, seconds=0, cases=20).findings
    assert (finding.number, finding.kind) == (100, "crash")
