"""The line of units: spans, masks and windows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.units import (
    ALL_SLOTS,
    UNITS_PER_GPU,
    WHOLE_NODE,
    NotPartitionable,
    Span,
    Window,
    coalesce,
    mask_of,
    mig_span,
    slot_span,
    slots_of,
    spans_of,
    time_slot_span,
    touched_slots,
    units_per_slice,
)
from tests.support.fleets import at

LINE = 60

bounded_spans = st.builds(lambda start, length: Span(start, start + length), st.integers(0, 40), st.integers(1, 15))
spans = bounded_spans | st.builds(Span, st.integers(0, 40), st.none())


def units(span: Span) -> set[int]:
    return set(range(span.start, LINE if span.end is None else span.end))


@given(spans, spans)
def test_spans_are_sets_of_units(one: Span, other: Span) -> None:
    assert one.overlaps(other) == bool(units(one) & units(other))
    assert one.contains(other) == (units(other) <= units(one) and not (one.end is not None and other.end is None))
    left = one.subtract(other)
    assert set().union(*map(units, left)) == units(one) - units(other)
    assert all(not a.overlaps(b) for i, a in enumerate(left) for b in left[i + 1 :])


@given(st.lists(spans, max_size=6))
def test_coalesced_spans_are_the_same_units_and_do_not_touch(given_spans: list[Span]) -> None:
    runs = coalesce(given_spans)
    assert set().union(*map(units, runs)) == set().union(*map(units, given_spans))
    for left, right in pairwise(runs):
        assert left.end is not None
        assert left.end < right.start


@given(st.sets(st.integers(0, 20)))
def test_a_set_of_slots_and_its_spans_are_the_same(slots: set[int]) -> None:
    mask = mask_of(slots)
    assert slots_of(mask) == tuple(sorted(slots))
    assert spans_of(mask) == coalesce(map(slot_span, slots))
    assert touched_slots(spans_of(mask)) == mask


def test_neighbouring_slots_are_one_span() -> None:
    assert spans_of(0b1101_1110) == (Span(48, 240), Span(288, 384))


def test_the_whole_node_touches_every_slot() -> None:
    assert touched_slots([WHOLE_NODE]) == ALL_SLOTS
    assert touched_slots([Span(49, None)]) == ALL_SLOTS & ~1
    assert touched_slots([Span(47, 49)]) == 0b11
    assert touched_slots([]) == 0


def test_a_mig_instance_is_a_part_of_its_gpu_and_of_no_other() -> None:
    half = mig_span(2, 4, 4, 8)
    assert half == Span(2 * 48 + 24, 3 * 48)
    assert slot_span(2).contains(half)
    assert not slot_span(3).overlaps(half)
    assert mig_span(2, 0, 8, 8) == slot_span(2)
    assert units_per_slice(8) == 6
    assert units_per_slice(4) == 12


def test_a_gpu_that_does_not_divide_is_not_partitionable() -> None:
    for full_size in (0, 5, 7, 9):
        with pytest.raises(NotPartitionable):
            units_per_slice(full_size)
    with pytest.raises(NotPartitionable):
        time_slot_span(0, 0, 5)


def test_a_placement_outside_the_gpu_is_refused() -> None:
    for start, size in ((-1, 2), (7, 2), (0, 0), (0, 9)):
        with pytest.raises(ValueError, match="outside"):
            mig_span(0, start, size, 8)
    with pytest.raises(ValueError, match="time slot 4 of 4"):
        time_slot_span(0, 4, 4)


def test_time_slots_share_a_gpu_without_a_gap() -> None:
    parts = [time_slot_span(1, index, 3) for index in range(3)]
    assert coalesce(parts) == (slot_span(1),)
    assert all(part.end is not None and part.end - part.start == UNITS_PER_GPU // 3 for part in parts)


def test_windows_that_touch_do_not_overlap() -> None:
    first, second, rest = Window(at(0), at(1)), Window(at(1), at(2)), Window(at(1), None)
    assert not first.overlaps(second)
    assert not second.overlaps(first)
    assert not first.overlaps(rest)
    assert rest.overlaps(second)
    assert first.contains(at(0))
    assert not first.contains(at(1))
    assert rest.contains(at(1000))


def test_a_window_needs_a_length_and_a_zone() -> None:
    with pytest.raises(ValueError, match="not a window"):
        Window(at(1), at(1))
    with pytest.raises(ValueError, match="zone"):
        Window(at(1).replace(tzinfo=None), None)


def test_a_span_needs_a_length() -> None:
    for start, end in ((-1, 2), (3, 3), (3, 2)):
        with pytest.raises(ValueError, match="not a span"):
            Span(start, end)
