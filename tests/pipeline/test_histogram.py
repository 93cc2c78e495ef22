"""Histograms against the library's own: the same exposition for the same observations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from pipeline.histogram import Histogram

BOUNDS = (0.0005, 0.001, 0.1, 1.0, 2.5, 300.0, 1048576.0)
AMOUNTS = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 2e6), st.integers(0, 4))


@given(st.lists(st.tuples(st.sampled_from(["", 'a"b\\', "c\nd"]), st.sampled_from(["e", "f"]), AMOUNTS), max_size=30))
def test_labelled(observed: list[tuple[str, str, float]]) -> None:
    ours, library = CollectorRegistry(), CollectorRegistry()
    made = Histogram("x_seconds", "Its help.", ("one", "two"), BOUNDS, ours)
    wanted = LibraryHistogram("x_seconds", "Its help.", ("one", "two"), buckets=BOUNDS, registry=library)
    for one, two, amount in observed:
        made.labels(one, two).observe(amount)
        wanted.labels(one, two).observe(amount)
    assert exposed(ours) == exposed(library)


@given(st.lists(AMOUNTS, max_size=30))
def test_without_labels(observed: list[float]) -> None:
    ours, library = CollectorRegistry(), CollectorRegistry()
    made = Histogram("x_seconds", "Its help.", (), BOUNDS, ours)
    wanted = LibraryHistogram("x_seconds", "Its help.", buckets=BOUNDS, registry=library)
    for amount in observed:
        made.labels().observe(amount)
        wanted.observe(amount)
    assert exposed(ours) == exposed(library)


def exposed(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_series_end() -> None:
    registry = CollectorRegistry()
    made = Histogram("x_seconds", "Its help.", ("one",), BOUNDS, registry)
    for name in ("a", "b"):
        made.labels(name).observe(1)
    made.remove("a")
    assert 'one="b"' in "".join(exposed(registry)) and 'one="a"' not in "".join(exposed(registry))
    with pytest.raises(KeyError):
        made.remove("a")
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("x_seconds", "Again.", ("one",), BOUNDS, registry)
