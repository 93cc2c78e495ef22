"""Histograms for an event loop: an observation is one search among the bounds and two additions.

The library's own lock for every thread that might observe, which costs ten times as much; here one loop does.  What is
exposed is the same, by the library's own family of samples.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """One set of label values; `bounds` ascend, each takes what is equal to it."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._total += amount

    def told(self) -> tuple[list[int], float]:
        """How many were at most each bound, and at most infinity; their sum."""
        return list(accumulate(self._counts)), self._total


class Histogram(Collector):
    """All series of one name.  Not for threads."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.labels()  # exposed from the beginning
        registry.register(self)

    def labels(self, *values: str) -> Series:
        series = self._series.get(values)
        if series is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)}")
            series = self._series[values] = Series(self._bounds)
        return series

    def remove(self, *values: str) -> None:
        """KeyError for values that were never observed."""
        del self._series[values]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, series in self._series.items():
            counts, total = series.told()
            family.add_metric(values, list(zip(bounds, counts, strict=True)), total)
        return [family]
