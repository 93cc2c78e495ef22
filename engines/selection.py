"""Which engine worker gets the next attempt: the policies of `--policy`.

Rule: a policy sees only candidates (already healthy, of the right model, modality and form) and chooses one; it never
waits and knows nothing of gRPC.  `engines.dispatch` keeps one policy per model, so that one model's traffic does not
disturb another's turn.  `engines.policies` names them all.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from engines.affinity import Affinity


class Candidate(Protocol):
    """What a policy looks at.  `url` is the identity that survives restarts; `load` counts requests in flight."""

    @property
    def url(self) -> str: ...

    @property
    def load(self) -> int: ...


WorkerT = TypeVar("WorkerT", bound=Candidate)


class Policy(Protocol):
    """Chooses one of at least one candidate, by turns, by load, or by what ties the request to a worker."""

    @property
    def name(self) -> str: ...

    def choose(self, candidates: Sequence[WorkerT], affinity: Affinity | None = None) -> WorkerT: ...

    def likely(self, candidates: Sequence[WorkerT], affinity: Affinity) -> WorkerT | None:
        """Whom it would choose now, of all forms, so that tensors are made in that one's form; None: anybody."""
        ...


class _Untied:
    """Of policies that tie no request to a worker."""

    def likely(self, candidates: Sequence[WorkerT], affinity: Affinity) -> WorkerT | None:
        return None


class RoundRobin(_Untied):
    """Whoever waited longest gets the next one: exact turns, also when candidates come and go between two calls."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def choose(self, candidates: Sequence[WorkerT], affinity: Affinity | None = None) -> WorkerT:
        chosen = min(candidates, key=lambda worker: self._last.get(worker.url, 0))
        if len(self._last) > 4 * len(candidates) + 64:  # workers that left long ago
            present = {worker.url for worker in candidates}
            self._last = {url: turn for url, turn in self._last.items() if url in present}
        self._turn += 1
        self._last[chosen.url] = self._turn
        return chosen


class Random(_Untied):
    name = "random"

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def choose(self, candidates: Sequence[WorkerT], affinity: Affinity | None = None) -> WorkerT:
        return self._source.choice(candidates)


class PowerOfTwo(_Untied):
    """Of two drawn at random, the one with fewer requests in flight."""

    name = "power_of_two"

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def choose(self, candidates: Sequence[WorkerT], affinity: Affinity | None = None) -> WorkerT:
        if len(candidates) == 1:
            return candidates[0]
        first, second = self._source.sample(candidates, 2)
        return second if second.load < first.load else first


class ConsistentHashing:
    """The same routing key, or the same media, go to the same worker while that one is there and not overloaded.

    Rendezvous hashing: each (key, worker) pair has a fixed score and the best one wins, so a worker that comes takes
    only its share of the keys and one that leaves gives only its own away.  Bounded: a worker that already holds more
    than `slack` times the mean load is passed over for the next best.  Requests without a key go to the less loaded of
    two.
    """

    name = "consistent_hashing"

    def __init__(self, source: random.Random | None = None, *, slack: float = 1.25) -> None:
        self._without_key = PowerOfTwo(source)
        self._slack = slack

    def choose(self, candidates: Sequence[WorkerT], affinity: Affinity | None = None) -> WorkerT:
        chosen = self.likely(candidates, affinity) if affinity is not None else None
        return chosen or self._without_key.choose(candidates)

    def likely(self, candidates: Sequence[WorkerT], affinity: Affinity) -> WorkerT | None:
        key = self._key(affinity)
        return by_key(self._free(candidates), key) if key is not None else None

    def _key(self, affinity: Affinity) -> str | None:
        return affinity.key or affinity.media_key

    def _free(self, candidates: Sequence[WorkerT]) -> Sequence[WorkerT]:
        total = sum(worker.load for worker in candidates) + 1
        bound = math.ceil(self._slack * total / len(candidates))
        return [worker for worker in candidates if worker.load < bound]


class PrefixHash(ConsistentHashing):
    """The same by the first `tokens` tokens of the prompt, pictures folded in, when the client names no key.

    A worker is passed over when its load is above `factor` times the mean and by more than `margin` above it.
    """

    name = "prefix_hash"

    def __init__(self, *, tokens: int = 256, factor: float = 1.25, margin: int = 10) -> None:
        super().__init__()
        self._tokens = tokens
        self._factor = factor
        self._margin = margin

    def _key(self, affinity: Affinity) -> str | None:
        return affinity.key or affinity.head(self._tokens)

    def _free(self, candidates: Sequence[WorkerT]) -> Sequence[WorkerT]:
        mean = sum(worker.load for worker in candidates) / len(candidates)
        bound = max(self._factor * mean, mean + self._margin)
        return [worker for worker in candidates if worker.load <= bound]


def by_key(candidates: Sequence[WorkerT], key: str) -> WorkerT:
    """The one a key hashes to."""
    return max(candidates, key=lambda worker: _score(key, worker.url))


def _score(key: str, url: str) -> bytes:
    return hashlib.blake2b(url.encode(), digest_size=8, key=hashlib.blake2b(key.encode()).digest()).digest()
