"""The policy that remembers where prompts and pictures were sent, and the prefixes it compares them by."""

import random
from array import array
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engines.affinity import Affinity, Mark, boundaries
from engines.cache_aware import CacheAware, CacheAwareSettings, Index


@dataclass
class Worker:
    url: str
    load: int = 0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def fleet(count, loads=()):
    workers = [Worker(f"grpc://10.0.0.{number}:50051") for number in range(count)]
    for worker, load in zip(workers, loads, strict=False):
        worker.load = load
    return workers


def picture(number, offset=5, length=100):
    return Mark(offset, length, f"{number:064x}")


# ---------------------------------------------------------------- prefixes


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.sampled_from([1, 16, 64]))
def test_a_longer_prompt_has_the_boundaries_of_a_shorter_one(one, other, block):
    short, long = sorted((one, other))
    places = list(boundaries(long, block))
    assert [place for place in places if place <= short] == list(boundaries(short, block))
    assert all(place % block == 0 for place in places)


def test_a_very_long_prompt_is_some_hundred_prefixes():
    assert len(list(boundaries(131072, 16))) < 700


MARKS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), max_size=3, unique_by=lambda pair: pair[0])


@given(
    st.lists(st.integers(0, 1), max_size=100),
    st.integers(0, 100),
    st.lists(st.integers(0, 1), max_size=100),
    MARKS,
    MARKS | st.none(),
)
def test_prefixes_are_equal_as_far_as_prompts_and_pictures_are(ids, shared, rest, marks, others):
    """Against the plain comparison of tokens and pictures before each boundary."""
    prompts = (ids, marks), (ids[:shared] + rest, marks if others is None else others)
    (ours, theirs) = (
        dict(Affinity(array("I", tokens), [picture(number, offset, 1) for offset, number in its]).prefixes(4))
        for tokens, its in prompts
    )
    for place in ours.keys() & theirs.keys():
        one, other = ((tokens[:place], {mark for mark in its if mark[0] < place}) for tokens, its in prompts)
        assert (ours[place] == theirs[place]) == (one == other)


# ---------------------------------------------------------------- the index


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 40), min_size=1, max_size=9)), max_size=60))
def test_the_index_never_grows_and_keeps_what_was_sent_last(sendings):
    index = Index(20, 10.0, Clock())
    sent = []  # (url, digest), the latest last
    for number, digests in sendings:
        index.record(str(number), digests)
        for digest in reversed(digests):
            pair = (str(number), digest)
            sent = [other for other in sent if other != pair] + [pair]
        assert len(index) <= 20
    for url, digest in {(str(number), digest) for number in range(3) for digest in range(41)}:
        assert index.knows(url, digest) == ((url, digest) in sent[-20:])


def test_what_was_sent_long_ago_is_forgotten():
    clock = Clock()
    index = Index(20, 10.0, clock)
    index.record("a", [1])
    clock.now = 9.0
    assert index.knows("a", 1)
    index.record("a", [1])
    clock.now = 18.0
    assert index.knows("a", 1), "it was sent again"
    clock.now = 19.0
    assert not index.knows("a", 1)


# ---------------------------------------------------------------- the policy


def test_a_conversation_stays_where_it_began():
    policy, workers = CacheAware(), fleet(4)
    source = random.Random(1)
    prompt = [source.randrange(1000) for _ in range(100)]
    home = policy.choose(workers, Affinity(prompt))
    for _ in range(10):
        policy.choose(workers, Affinity([source.randrange(1000) for _ in range(300)]))
        prompt += [source.randrange(1000) for _ in range(60)]
        assert policy.choose(workers, Affinity(prompt)) is home


def test_the_same_picture_goes_to_the_same_worker_whatever_is_said_around_it():
    policy, workers = CacheAware(), fleet(4)
    source = random.Random(1)
    homes = {}
    for _ in range(200):
        number, begin = source.randrange(30), source.randrange(5, 400)
        affinity = Affinity([source.randrange(1000) for _ in range(begin + 700)], [picture(number, begin, 20)])
        chosen = policy.choose(workers, affinity)
        assert homes.setdefault(number, chosen.url) == chosen.url
    assert len({*homes.values()}) == 4


def test_two_pictures_of_one_size_are_two_prompts():
    policy, workers = CacheAware(), fleet(2)
    ids = [1] * 300
    first = policy.choose(workers, Affinity(ids, [picture(1)]))
    first.load = 1
    assert policy.choose(workers, Affinity(ids, [picture(2)])) is not first
    assert policy.choose(workers, Affinity(ids, [picture(1)])) is first


def test_the_larger_match_wins():
    policy, workers = CacheAware(), fleet(2)
    ids = list(range(1000))
    small, large = picture(1, 10, 50), picture(2, 100, 800)
    one, two = workers
    assert policy.choose([one, Worker("away", 9)], Affinity(ids[:70], [small])) is one
    assert policy.choose([two, Worker("away", 9)], Affinity(ids[90:950], [Mark(5, 800, large.content_hash)])) is two
    assert policy.choose(workers, Affinity([7] * 10 + ids, [small, large])) is two


def test_a_short_common_beginning_ties_nobody():
    """The system prompt of every request: below the threshold the least loaded one gets it."""
    system = list(range(50))
    workers = fleet(3)
    policy = CacheAware(CacheAwareSettings(match_threshold=0.3))
    seen = set()
    for number in range(9):
        chosen = policy.choose(workers, Affinity([*system, *([number + 100] * 400)]))
        chosen.load += 1
        seen.add(chosen.url)
    assert len(seen) == 3 and {worker.load for worker in workers} == {3}
    tied = CacheAware(CacheAwareSettings(match_threshold=0.05))
    assert len({tied.choose(workers, Affinity([*system, *([number + 100] * 400)])).url for number in range(9)}) == 1


def test_an_overloaded_worker_is_passed_over_and_gets_its_picture_back():
    policy, workers = CacheAware(CacheAwareSettings(balance_abs=8, balance_rel=1.5)), fleet(3)
    affinity = Affinity([1] * 300, [picture(1)])
    home = policy.choose(workers, affinity)
    home.load = 30
    other = policy.choose(workers, affinity)
    assert other is not home
    home.load = 0
    other.load = 1
    assert policy.choose(workers, affinity) is home, "of two equal matches the less loaded one"


@given(st.lists(st.integers(0, 99), min_size=2, max_size=6), st.integers(0, 64), st.floats(1.0, 3.0))
def test_nobody_is_chosen_who_holds_far_more_than_the_mean(loads, most, factor):
    workers = fleet(len(loads), loads)
    policy = CacheAware(CacheAwareSettings(balance_abs=most, balance_rel=factor))
    mean = sum(loads) / len(loads)
    affinity = Affinity([1] * 300, [picture(1)])
    for worker in workers:
        policy._index.record(worker.url, [digest for _, digest in affinity.prefixes(16)])
    chosen = policy.choose(workers, affinity)
    margin = min(most, max(4, 2 * mean**0.5))
    assert chosen.load <= mean + margin or chosen.load <= factor * mean or chosen.load == min(loads)


def test_several_gateways_agree_about_a_new_picture():
    workers = fleet(5)
    for number in range(20):
        affinity = Affinity([1] * 300, [picture(number)])
        assert CacheAware().choose(workers, affinity) is CacheAware().choose(workers[::-1], affinity)


def test_without_anything_to_go_by_everybody_gets_turns():
    policy, workers = CacheAware(), fleet(3)
    assert len({policy.choose(workers).url for _ in range(3)}) == 3
    assert len({policy.choose(workers, Affinity([1, 2, 3])).url for _ in range(3)}) == 3


def test_looking_remembers_nothing():
    policy, workers = CacheAware(), fleet(3)
    affinity = Affinity([1] * 300)
    assert policy.likely(workers, affinity) is None and len(policy._index) == 0
    home = policy.choose(workers, affinity)
    assert policy.likely(workers, affinity) is home


def test_memory_is_bounded():
    policy, workers = CacheAware(CacheAwareSettings(max_tokens=1600, block_size=16)), fleet(2)
    for number in range(50):
        policy.choose(workers, Affinity([number] * 500, [picture(number)]))
        assert len(policy._index) <= 100
