"""What is counted while checks against real engines run, and the lines that say how they went."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from tests.engines_real.answers import Differs
from tools.environments import EnvironmentFailed
from tools.launch import LaunchError

Checked = TypeVar("Checked", bound=Callable[..., None])


class Tally:
    """Passed and failed checks by group.  A check's name is `<group>: <check>`, a group what shares one engine.

    `only`: words a check's name must hold to be run.
    """

    def __init__(self, only: list[str]) -> None:
        self._only = only
        self._groups: dict[str, list[bool]] = {}

    @property
    def passed(self) -> int:
        return sum(map(sum, self._groups.values()))

    @property
    def failed(self) -> int:
        return sum(map(len, self._groups.values())) - self.passed

    def wants(self, name: str) -> bool:
        return all(word in name for word in self._only)

    def chosen(self, group: str, checks: Mapping[str, Checked]) -> dict[str, Checked]:
        """Those of a group's checks that are wanted, by their full names."""
        named = {f"{group}: {name}": check for name, check in checks.items()}
        return {name: check for name, check in named.items() if self.wants(name)}

    def run(self, name: str, check: Callable[[], None]) -> None:
        """Run one check when it is wanted, and print its line."""
        if not self.wants(name):
            return
        try:
            check()
        except (Differs, LaunchError, OSError) as error:
            self.fail(name, error)
        else:
            self._count(name, True)
            print(f"ok    {name}", flush=True)

    def fail(self, name: str, error: Exception) -> None:
        self._count(name, False)
        print(f"FAIL  {name}: {error}", flush=True)

    @contextlib.contextmanager
    def group(self, title: str) -> Iterator[None]:
        """An engine that cannot be had is one failure, and the next group's turn."""
        try:
            yield
        except (EnvironmentFailed, LaunchError, OSError, ValueError) as error:
            self.fail(f"{title}: start", error)

    def table(self) -> str:
        """A line for each group: how many of its checks passed."""
        return "\n".join(f"{sum(went):3} of {len(went):3}  {group}" for group, went in self._groups.items())

    def _count(self, name: str, passed: bool) -> None:
        self._groups.setdefault(name.partition(":")[0], []).append(passed)
