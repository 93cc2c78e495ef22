"""The event loop's lag during a load test, from the gateway's own histogram: it shows whether anything blocks."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # what is measured is no proxy
LAG = "mediagate_event_loop_lag_seconds"


def histogram(url: str, name: str = LAG) -> dict[float, float]:
    """Cumulative counts by upper bound, of a histogram without labels.  Raises OSError; empty when there is none."""
    return parse(get(url).decode(), name)


def get(url: str) -> bytes:
    """What is there.  Raises OSError, urllib's HTTPError among them."""
    with _DIRECT.open(url, timeout=10) as reply:
        body: bytes = reply.read()
        return body


def parse(text: str, name: str) -> dict[float, float]:
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == name
        for sample in family.samples
        if sample.name == f"{name}_bucket"
    }


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    """The value below which `share` of the observations between two scrapes lie, by Prometheus's linear rule.

    In the last, endless bucket it is that bucket's lower bound.  None without observations.
    """
    counts = {bound: value - before.get(bound, 0.0) for bound, value in sorted(after.items())}
    total = max(counts.values(), default=0.0)
    if not total:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
