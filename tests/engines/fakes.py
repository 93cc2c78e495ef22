"""Small stand-ins that several engine tests share: a recorder of figures and a segment store in a directory of its
own.
"""

import copy
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Figures:
    """An engines.base.Observer that remembers."""

    tensors: list = field(default_factory=list)  # (runtime, path, nbytes)
    failures: list = field(default_factory=list)
    health: list = field(default_factory=list)  # (worker, healthy)
    removed: list = field(default_factory=list)
    loads: dict = field(default_factory=dict)
    selected: list = field(default_factory=list)  # (worker, policy)
    retries: list = field(default_factory=list)
    roles: list = field(default_factory=list)  # of those selected
    pairs: list = field(default_factory=list)  # (what, runtime)
    missed_handovers: list = field(default_factory=list)
    breakers: list = field(default_factory=list)  # (worker, before, after)
    outcomes: list = field(default_factory=list)  # (worker, failed)

    def tensor_sent(self, runtime, path, nbytes):
        self.tensors.append((runtime, path, nbytes))

    def segment_failed(self, runtime):
        self.failures.append(runtime)

    def breaker_changed(self, worker, before, after):
        self.breakers.append((worker, before, after))

    def breaker_outcome(self, worker, failed):
        self.outcomes.append((worker, failed))

    def worker_health(self, worker, healthy):
        self.health.append((worker, healthy))

    def worker_removed(self, worker):
        self.removed.append(worker)

    def worker_load(self, worker, requests):
        self.loads[worker] = requests

    def worker_selected(self, worker, policy, worker_type="regular"):
        self.roles.append(worker_type)
        self.selected.append((worker, policy))

    def retried(self, worker_type):
        self.retries.append(worker_type)

    def prefilled(self, model, runtime, seconds):
        self.pairs.append(("prefilled", runtime))

    def handed_over(self, model, runtime, connector, seconds):
        self.pairs.append((connector, runtime))

    def pair_answered(self, model, runtime, seconds):
        self.pairs.append(("answered", runtime))

    def handover_failed(self, worker):
        self.missed_handovers.append(worker)


class DirectorySegment:
    """A master file with published links beside it, as `pool.segment.Segment` keeps them; `uses`: settled and not."""

    def __init__(self, store, buffers, *, is_handed_on=False):
        self.is_handed_on = is_handed_on
        self.master = store.directory / f"master-{next(store.numbers)}"
        self.master.write_bytes(b"".join(buffers))
        self._fd = os.open(self.master, os.O_RDONLY)
        self.uses = []
        self._begin(store)

    def _begin(self, store):
        self._store = store
        self.names = []
        self.settled = None
        self.uses.append(self)

    def share(self):
        use = copy.copy(self)
        use._begin(self._store)
        return use

    @property
    def nbytes(self):
        return self.master.stat().st_size

    def publish(self):
        if self._store.publish_error is not None:
            raise self._store.publish_error
        name = f"published-{next(self._store.numbers)}"
        os.link(self.master, self._store.directory / name)
        self.names.append(name)
        return name

    @property
    def is_unread(self):
        return self.settled is None and os.fstat(self._fd).st_nlink > 1

    def withdraw(self):
        for name in self.names:
            (self._store.directory / name).unlink(missing_ok=True)

    def settle(self, *, consumed, reader=None):
        assert self.settled is None, "settled twice"
        self.settled, self.reader = consumed, reader
        self.withdraw()
        if all(use.settled is not None for use in self.uses):
            self.master.unlink()
            os.close(self._fd)


class DirectoryStore:
    """An engines.base.SegmentStore; `room` False refuses, errors are raised as set."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.numbers = itertools.count()
        self.segments = []
        self.room = True
        self.write_error = self.publish_error = None

    def write(self, buffers, *, handed_on=False):
        if self.write_error is not None:
            raise self.write_error
        if not self.room:
            return None
        segment = DirectorySegment(self, buffers, is_handed_on=handed_on)
        self.segments.append(segment)
        return segment

    @property
    def files(self):
        return sorted(path.name for path in self.directory.iterdir())
