"""Extents against a set of bytes, leases and their pins."""

import gc
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.mapping import PAGE, Mapping
from pool.spans import Extents, Lease, LeaseError, Span

ranges = st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 12))


@given(st.lists(ranges, max_size=40), st.integers(1, 15))
def test_extents_are_a_set_of_bytes(steps: list[tuple[bool, int, int]], wanted: int) -> None:
    extents, model = Extents(), set()
    for is_added, start, length in steps:
        if is_added:
            extents.add(start, start + length)
            model |= set(range(start, start + length))
        else:
            extents.discard(start, start + length)
            model -= set(range(start, start + length))
        held = [byte for a, b in extents for byte in range(a, b)]
        assert held == sorted(model)
        assert extents.nbytes == len(model) and bool(extents) is bool(model)
        # coalesced: no two neighbours touch
        pairs = list(extents)
        assert all(left[1] < right[0] for left, right in zip(pairs, pairs[1:], strict=False))
    fits = [start for start in sorted(model) if set(range(start, start + wanted)) <= model]
    assert extents.lowest(wanted) == (min(fits) if fits else None)


def lease(freed: list[Span]) -> Lease:
    return Lease(Mapping(2 * PAGE), [Span(0, 5), Span(PAGE, 7)], 2 * PAGE, freed.extend)


def test_released_once() -> None:
    freed: list[Span] = []
    held = lease(freed)
    held.release()
    assert freed == [Span(0, 5), Span(PAGE, 7)]
    with pytest.raises(LeaseError):
        held.release()
    assert len(freed) == 2


def test_drains_first() -> None:
    freed: list[Span] = []
    held = lease(freed)
    unpin, unpin_other = held.pin(), held.pin()
    unpin()
    assert held.pins == 1 and not freed
    held.release()
    assert held.is_released and not freed
    unpin_other()
    assert len(freed) == 2


def test_pins_do_not_release() -> None:
    freed: list[Span] = []
    held = lease(freed)
    held.pin()()
    assert not freed
    held.release()
    assert freed


def test_a_pin_ends_once() -> None:
    held = lease([])
    unpin = held.pin()
    unpin()
    with pytest.raises(LeaseError):
        unpin()
    assert held.pins == 0
    held.release()


def test_nothing_new_after_release() -> None:
    held = lease([])
    unpin = held.pin()
    held.release()
    with pytest.raises(LeaseError):
        held.pin()
    with pytest.raises(LeaseError):
        held.view()
    unpin()


def test_a_split_lease_is_several() -> None:
    freed: list[Span] = []
    whole = lease(freed)
    first, second = whole.split()
    assert whole.is_released and not freed
    assert (first.spans, second.spans) == ((Span(0, 5),), (Span(PAGE, 7),)) and first.nbytes == second.nbytes == PAGE
    unpin = second.pin()
    second.release()
    assert not freed
    first.release()
    assert freed == [Span(0, 5)]
    unpin()
    assert freed == [Span(0, 5), Span(PAGE, 7)]


def test_only_a_lease_that_is_held_and_has_no_pins_is_split() -> None:
    held = lease([])
    unpin = held.pin()
    with pytest.raises(LeaseError):
        held.split()
    unpin()
    held.release()
    with pytest.raises(LeaseError):
        held.split()


def test_views_are_the_spans_bytes() -> None:
    mapping = Mapping(2 * PAGE)
    held = Lease(mapping, [Span(0, 5), Span(PAGE, 7)], 2 * PAGE, lambda spans: None)
    held.view(1)[:] = b"1234567"
    assert bytes(mapping.view(PAGE, 8)) == b"1234567\0" and len(held.view()) == 5
    held.release()


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_lost_lease_is_reported(is_pinned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = lease([])
        if is_pinned:
            held.pin()
            held.release()
        del held
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]
