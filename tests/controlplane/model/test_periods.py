"""Periods tile time, in UTC whatever the clocks on the wall do, and GPU time is cut without a rest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.periods import GPU_HOUR, Period, period_end, period_start, split_gpu_time

PERIODS = st.sampled_from(["day", "week", "month"])
INSTANTS = st.datetimes(datetime(2024, 1, 1), datetime(2033, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
US = timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("period", "at", "start", "end"),
    [
        ("day", "2030-03-31T00:30:00+00:00", "2030-03-31", "2030-04-01"),
        ("week", "2030-01-06T23:59:59.999999+00:00", "2029-12-31", "2030-01-07"),
        ("week", "2030-01-07T00:00:00+00:00", "2030-01-07", "2030-01-14"),
        ("month", "2030-12-31T23:59:59+00:00", "2030-12-01", "2031-01-01"),
        ("month", "2028-02-29T12:00:00+00:00", "2028-02-01", "2028-03-01"),
        # the last hour of January in Berlin is in January; the first of February is not in February yet
        ("month", "2030-02-01T00:30:00+01:00", "2030-01-01", "2030-02-01"),
    ],
)
def test_a_period_is_the_calendars_in_utc(period: Period, at: str, start: str, end: str) -> None:
    instant = datetime.fromisoformat(at)
    assert period_start(period, instant) == datetime.fromisoformat(start).replace(tzinfo=UTC)
    assert period_end(period, instant) == datetime.fromisoformat(end).replace(tzinfo=UTC)


def test_a_day_has_24_hours_where_clocks_are_put_forward() -> None:
    start = datetime(2030, 3, 31, 0, 0, tzinfo=ZoneInfo("Europe/Berlin"))
    end = datetime(2030, 4, 1, 0, 0, tzinfo=ZoneInfo("Europe/Berlin"))
    parts = split_gpu_time("day", 1, start.astimezone(UTC), end.astimezone(UTC))
    assert [gpu_us // GPU_HOUR for gpu_us in parts.values()] == [1, 22], "a 23 hour day in Berlin is on two days in UTC"


@given(period=PERIODS, at=INSTANTS)
def test_periods_tile_time(period: Period, at: datetime) -> None:
    start, end = period_start(period, at), period_end(period, at)
    assert start <= at < end
    assert period_start(period, start) == start
    assert period_start(period, end) == end
    assert period_start(period, end - US) == start


@given(period=PERIODS, gpus=st.integers(1, 1000), at=INSTANTS, length_us=st.integers(0, 40 * 86400 * 10**6))
def test_nothing_is_lost_between_periods(period: Period, gpus: int, at: datetime, length_us: int) -> None:
    end = at + length_us * US
    parts = split_gpu_time(period, gpus, at, end)
    assert sum(parts.values()) == gpus * length_us
    for start, gpu_us in parts.items():
        assert period_start(period, start) == start
        overlap = min(period_end(period, start), end) - max(start, at)
        assert gpu_us == gpus * (overlap // US)


@given(period=PERIODS, at=INSTANTS, lengths=st.tuples(*[st.integers(0, 10**13)] * 2))
def test_two_windows_that_touch_count_as_one(period: Period, at: datetime, lengths: tuple[int, int]) -> None:
    middle, end = at + lengths[0] * US, at + sum(lengths) * US
    first, second = split_gpu_time(period, 3, at, middle), split_gpu_time(period, 3, middle, end)
    both = {start: first.get(start, 0) + second.get(start, 0) for start in first.keys() | second.keys()}
    assert both == split_gpu_time(period, 3, at, end)
