"""Gaps for maintenance: the first there is, and never more nodes away than asked for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.maintenance import Busy, find_gap, in_the_way, plan_rolling

T0 = datetime(2030, 1, 1, tzinfo=UTC)
HOURS_MAX = 40


def at(hours: int) -> datetime:
    return T0 + timedelta(hours=hours)


def busy(*windows: tuple[int, int | None]) -> list[Busy]:
    return [Busy(at(start), None if end is None else at(end), f"rsv_{start}") for start, end in windows]


WINDOWS = st.lists(
    st.tuples(st.integers(0, HOURS_MAX), st.integers(1, 12)).map(lambda w: (w[0], w[0] + w[1])), max_size=8
)


def test_known_gaps() -> None:
    two = timedelta(hours=2)
    assert find_gap([], at(3), two) == at(3)
    assert find_gap(busy((0, 4), (6, 8)), at(0), two) == at(4), "it ends at the instant at which the next begins"
    assert find_gap(busy((0, 4), (5, 8)), at(0), two) == at(8)
    assert find_gap(busy((6, 8), (0, 4)), at(1), timedelta(hours=3)) == at(8)
    assert find_gap(busy((0, 4), (6, None)), at(0), two) == at(4)
    assert find_gap(busy((0, 4), (5, None)), at(0), two) is None


@given(WINDOWS, st.integers(0, HOURS_MAX), st.integers(1, 10))
def test_the_gap_is_the_first(windows: list[tuple[int, int]], earliest: int, hours: int) -> None:
    calendar, length = busy(*windows), timedelta(hours=hours)
    first = next(h for h in range(earliest, 1000) if not in_the_way(calendar, at(h), length))
    assert find_gap(calendar, at(earliest), length) == at(first)


@given(st.lists(WINDOWS, min_size=1, max_size=8), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 9)))
def test_never_more_are_away_than_asked_for(
    calendars: list[list[tuple[int, int]]], hours: int, at_once: int | None
) -> None:
    length = timedelta(hours=hours)
    nodes = [busy(*windows) for windows in calendars]
    starts = plan_rolling(nodes, T0, length, at_once)
    assert len(starts) == len(nodes)
    for calendar, start in zip(nodes, starts, strict=True):
        assert start is not None
        assert in_the_way(calendar, start, length) == []
        if at_once is None:
            assert start == find_gap(calendar, T0, length)
    for instant in {start for start in starts if start is not None}:
        away = sum(start is not None and start <= instant < start + length for start in starts)
        assert away <= (at_once or len(nodes))


def test_turns_follow_each_other_without_a_pause() -> None:
    hour = timedelta(hours=1)
    assert plan_rolling([[]] * 5, T0, hour, 2) == [at(0), at(0), at(1), at(1), at(2)]
    # the second has to wait for its holder, and the third takes the turn that is free meanwhile
    assert plan_rolling([[], busy((0, 5)), [], []], T0, hour, 2) == [at(0), at(5), at(1), at(2)]
