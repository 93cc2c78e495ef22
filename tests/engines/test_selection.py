"""The policies: fair shares, load, and keys that stay where they are."""

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.selection import POLICIES, ConsistentHashing, PowerOfTwo, Random, RoundRobin, policy_named


@dataclass
class Worker:
    url: str
    load: int = 0


def fleet(count, loads=()):
    workers = [Worker(f"grpc://10.0.0.{number}:50051") for number in range(count)]
    for worker, load in zip(workers, loads, strict=False):
        worker.load = load
    return workers


@pytest.mark.parametrize("name", ["round_robin", "random", "power_of_two", "consistent_hashing"])
def test_every_policy_of_the_flag_exists_and_takes_a_single_worker(name):
    policy = policy_named(name)
    only = fleet(1)
    assert policy.name == name
    assert policy.choose(only) is only[0] and policy.choose(only, "key") is only[0]


def test_unknown_policy():
    assert set(POLICIES) == {"round_robin", "random", "power_of_two", "consistent_hashing"}
    with pytest.raises(KeyError):
        policy_named("cache_aware")


@given(st.integers(1, 9), st.integers(1, 60))
def test_round_robin_gives_equal_turns(count, calls):
    policy, workers = RoundRobin(), fleet(count)
    turns = Counter(policy.choose(workers).url for _ in range(calls))
    assert max(turns.values()) - min(turns.get(worker.url, 0) for worker in workers) <= 1


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=80))
def test_round_robin_never_repeats_while_another_waits_longer(subsets):
    """Candidates come and go (failed, other form): the one chosen is always one that waited longest."""
    policy, workers = RoundRobin(), fleet(6)
    last = {worker.url: 0 for worker in workers}
    for turn, subset in enumerate(subsets, 1):
        candidates = [workers[number] for number in sorted(subset)]
        chosen = policy.choose(candidates)
        assert last[chosen.url] == min(last[worker.url] for worker in candidates)
        last[chosen.url] = turn


def test_round_robin_forgets_workers_that_left():
    policy = RoundRobin()
    for number in range(1000):
        policy.choose([Worker(f"grpc://host:{number}"), Worker("grpc://stays:1")])
    assert len(policy._last) < 100


def test_random_reaches_everybody_evenly():
    policy, workers = Random(random.Random(1)), fleet(4)
    turns = Counter(policy.choose(workers).url for _ in range(4000))
    assert all(800 < turns[worker.url] < 1200 for worker in workers)


def test_power_of_two_never_takes_the_busiest():
    policy, workers = PowerOfTwo(random.Random(1)), fleet(5, [3, 1, 9, 0, 4])
    turns = Counter(policy.choose(workers).load for _ in range(2000))
    assert 9 not in turns
    assert turns[0] == max(turns.values())


def test_power_of_two_evens_out_the_load():
    policy, workers = PowerOfTwo(random.Random(1)), fleet(8)
    for _ in range(800):
        policy.choose(workers).load += 1
    assert max(worker.load for worker in workers) - min(worker.load for worker in workers) <= 6


KEYS = [f"user-{number}" for number in range(400)]


@given(st.integers(2, 8), st.integers(0, 7))
def test_consistent_hashing_moves_only_the_keys_of_the_worker_that_left(count, gone):
    policy, workers = ConsistentHashing(), fleet(count)
    before = {key: policy.choose(workers, key).url for key in KEYS}
    left = workers.pop(gone % count)
    for key, url in before.items():
        if url != left.url:
            assert policy.choose(workers, key).url == url


@given(st.integers(1, 7))
def test_consistent_hashing_moves_keys_only_to_the_worker_that_came(count):
    policy, workers = ConsistentHashing(), fleet(count + 1)
    before = {key: policy.choose(workers[:-1], key).url for key in KEYS}
    moved = [key for key in KEYS if policy.choose(workers, key).url != before[key]]
    assert all(policy.choose(workers, key) is workers[-1] for key in moved)
    fair = len(KEYS) / (count + 1)
    assert fair / 2 < len(moved) < fair * 2


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.text(min_size=1))
def test_consistent_hashing_is_bounded(loads, key):
    workers = fleet(len(loads), loads)
    chosen = ConsistentHashing(slack=1.25).choose(workers, key)
    assert chosen.load < math.ceil(1.25 * (sum(loads) + 1) / len(loads))


def test_consistent_hashing_ignores_the_order_of_candidates():
    policy, workers = ConsistentHashing(), fleet(6)
    for key in KEYS[:50]:
        assert policy.choose(workers, key) is policy.choose(workers[::-1], key)


def test_consistent_hashing_without_a_key_spreads():
    policy, workers = ConsistentHashing(random.Random(1)), fleet(4)
    assert len({policy.choose(workers).url for _ in range(50)}) == 4
