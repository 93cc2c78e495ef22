"""The policies: fair shares, load, and keys that stay where they are."""

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.affinity import Affinity, Mark
from engines.policies import POLICIES, policy_named
from engines.selection import ConsistentHashing, PowerOfTwo, PrefixHash, Random, RoundRobin


@dataclass
class Worker:
    url: str
    load: int = 0


def fleet(count, loads=()):
    workers = [Worker(f"grpc://10.0.0.{number}:50051") for number in range(count)]
    for worker, load in zip(workers, loads, strict=False):
        worker.load = load
    return workers


def keyed(key):
    return Affinity(key=key)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_of_the_flag_exists_and_takes_a_single_worker(name):
    policy = policy_named(name)
    only = fleet(1)
    assert policy.name == name
    assert policy.choose(only) is only[0] and policy.choose(only, keyed("key")) is only[0]


def test_unknown_policy():
    with pytest.raises(KeyError):
        policy_named("psychic")


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
    before = {key: policy.choose(workers, keyed(key)).url for key in KEYS}
    left = workers.pop(gone % count)
    for key, url in before.items():
        if url != left.url:
            assert policy.choose(workers, keyed(key)).url == url


@given(st.integers(1, 7))
def test_consistent_hashing_moves_keys_only_to_the_worker_that_came(count):
    policy, workers = ConsistentHashing(), fleet(count + 1)
    before = {key: policy.choose(workers[:-1], keyed(key)).url for key in KEYS}
    moved = [key for key in KEYS if policy.choose(workers, keyed(key)).url != before[key]]
    assert all(policy.choose(workers, keyed(key)) is workers[-1] for key in moved)
    fair = len(KEYS) / (count + 1)
    assert fair / 2 < len(moved) < fair * 2


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.text(min_size=1))
def test_consistent_hashing_is_bounded(loads, key):
    workers = fleet(len(loads), loads)
    chosen = ConsistentHashing(slack=1.25).choose(workers, keyed(key))
    assert chosen.load < math.ceil(1.25 * (sum(loads) + 1) / len(loads))


def test_consistent_hashing_ignores_the_order_of_candidates():
    policy, workers = ConsistentHashing(), fleet(6)
    for key in KEYS[:50]:
        assert policy.choose(workers, keyed(key)) is policy.choose(workers[::-1], keyed(key))


def test_consistent_hashing_without_a_key_spreads():
    policy, workers = ConsistentHashing(random.Random(1)), fleet(4)
    assert len({policy.choose(workers).url for _ in range(50)}) == 4


def picture(number):
    return Mark(5, 100, f"{number:064x}")


def test_without_a_key_the_media_are_it():
    policy, workers = ConsistentHashing(), fleet(5)
    ids = range(200)
    homes = {number: policy.choose(workers, Affinity(ids, [picture(number)])).url for number in range(50)}
    assert len({*homes.values()}) > 1
    for number, url in homes.items():
        other_text = Affinity(range(7, 300), [picture(number)])
        assert policy.choose(workers, other_text).url == url == policy.likely(workers, other_text).url


def test_prefix_hash_keeps_prompts_that_begin_alike_together():
    policy, workers = PrefixHash(tokens=32), fleet(5)
    homes = {
        (start, number): policy.choose(workers, Affinity([start] * 40 + [number])).url
        for start in range(20)
        for number in range(5)
    }
    assert all(homes[start, number] == homes[start, 0] for start, number in homes)
    assert len({*homes.values()}) > 1
    with_pictures = {policy.choose(workers, Affinity([1] * 200, [picture(number)])).url for number in range(20)}
    assert len(with_pictures) > 1, "the placeholder runs are alike, the pictures are not"
    mine = policy.choose(workers, Affinity([1] * 40, key="mine"))
    assert mine is policy.choose(workers, Affinity([2] * 9, key="mine"))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, 30))
def test_prefix_hash_passes_over_who_has_too_many(loads, start):
    workers = fleet(len(loads), loads)
    mean = sum(loads) / len(loads)
    chosen = PrefixHash(factor=1.25, margin=10).choose(workers, Affinity([start] * 300))
    assert chosen.load <= 1.25 * mean or chosen.load <= mean + 10
