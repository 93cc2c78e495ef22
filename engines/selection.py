"""Which engine worker gets the next attempt: the policies of `--policy`.

Rule: a policy sees only candidates (already healthy, of the right model, modality and form) and chooses one; it never
waits and knows nothing of gRPC.  `engines.dispatch` keeps one policy per model, so that one model's traffic does not
disturb another's turn.
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy looks at.  `url` is the identity that survives restarts; `load` counts requests in flight."""

    @property
    def url(self) -> str: ...

    @property
    def load(self) -> int: ...


WorkerT = TypeVar("WorkerT", bound=Candidate)


class Policy(Protocol):
    """Chooses one of at least one candidate; `routing_key` is what the client wants kept together, if anything."""

    name: str

    def choose(self, candidates: Sequence[WorkerT], routing_key: str | None = None) -> WorkerT: ...


class RoundRobin:
    """Whoever waited longest gets the next one: exact turns, also when candidates come and go between two calls."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def choose(self, candidates: Sequence[WorkerT], routing_key: str | None = None) -> WorkerT:
        chosen = min(candidates, key=lambda worker: self._last.get(worker.url, 0))
        if len(self._last) > 4 * len(candidates) + 64:  # workers that left long ago
            present = {worker.url for worker in candidates}
            self._last = {url: turn for url, turn in self._last.items() if url in present}
        self._turn += 1
        self._last[chosen.url] = self._turn
        return chosen


class Random:
    name = "random"

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def choose(self, candidates: Sequence[WorkerT], routing_key: str | None = None) -> WorkerT:
        return self._source.choice(candidates)


class PowerOfTwo:
    """Of two drawn at random, the one with fewer requests in flight."""

    name = "power_of_two"

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source or random.Random()

    def choose(self, candidates: Sequence[WorkerT], routing_key: str | None = None) -> WorkerT:
        if len(candidates) == 1:
            return candidates[0]
        first, second = self._source.sample(candidates, 2)
        return second if second.load < first.load else first


class ConsistentHashing:
    """The same routing key goes to the same worker while that one is there and not overloaded.

    Rendezvous hashing: each (key, worker) pair has a fixed score and the best one wins, so a worker that comes takes
    only its share of the keys and one that leaves gives only its own away.  Bounded: a worker that already holds more
    than `slack` times the mean load is passed over for the next best.  Requests without a key go to the less loaded of
    two.
    """

    name = "consistent_hashing"

    def __init__(self, source: random.Random | None = None, *, slack: float = 1.25) -> None:
        self._without_key = PowerOfTwo(source)
        self._slack = slack

    def choose(self, candidates: Sequence[WorkerT], routing_key: str | None = None) -> WorkerT:
        if routing_key is None:
            return self._without_key.choose(candidates)
        total = sum(worker.load for worker in candidates) + 1
        bound = math.ceil(self._slack * total / len(candidates))
        free = [worker for worker in candidates if worker.load < bound]
        return max(free, key=lambda worker: _score(routing_key, worker.url))


def _score(key: str, url: str) -> bytes:
    return hashlib.blake2b(url.encode(), digest_size=8, key=hashlib.blake2b(key.encode()).digest()).digest()


POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (RoundRobin, Random, PowerOfTwo, ConsistentHashing)
}


def policy_named(name: str) -> Policy:
    """A fresh policy; KeyError for a name that is none of POLICIES."""
    return POLICIES[name]()
