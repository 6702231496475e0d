"""Rules on the clock of a place become windows in UTC: the known days, and what holds on every day of every zone."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from controlplane.model.recurrence import (
    END_DAYS_MAX,
    OCCURRENCES_MAX,
    Occurrence,
    Recurrence,
    expand,
    instant_of,
)
from controlplane.model.requests import InvalidRequest

BERLIN = ZoneInfo("Europe/Berlin")
NEW_YORK = ZoneInfo("America/New_York")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")
KOLKATA = ZoneInfo("Asia/Kolkata")
APIA = ZoneInfo("Pacific/Apia")
# Half an hour, two hours, a whole day left out, changes in both halves of the year, none, and offsets of odd minutes.
ZONES = [BERLIN, NEW_YORK, LORD_HOWE, KOLKATA, APIA, ZoneInfo("Antarctica/Troll"), ZoneInfo("America/St_Johns"),
         ZoneInfo("Africa/Casablanca"), ZoneInfo("UTC")]  # fmt: skip
LONG_AGO = datetime(2029, 6, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def rule(start: str = "09:00", end: str | None = "17:00", **changed: Any) -> Recurrence:
    fields: dict[str, Any] = {
        "every": "day",
        "interval": 1,
        "weekdays": frozenset(),
        "start_time": time.fromisoformat(start),
        "end_time": None if end is None else time.fromisoformat(end),
        "end_days": int(end is not None and end <= start),
        "duration": None,
        "first": date(2030, 3, 30),
        "until": None,
        "count": None,
    }
    fields.update(changed)
    if fields["until"] is None and fields["count"] is None:
        fields["count"] = 3
    return Recurrence(**fields)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text + "+00:00")


def hours(occurrences: list[Occurrence]) -> list[float]:
    return [(o.end - o.start) / HOUR for o in occurrences]


# --- known days --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "first", "days"),
    [
        (BERLIN, date(2030, 3, 30), [24, 23, 24]),
        (BERLIN, date(2030, 10, 26), [24, 25, 24]),
        (NEW_YORK, date(2030, 3, 9), [24, 23, 24]),
        (NEW_YORK, date(2030, 11, 2), [24, 25, 24]),
        (LORD_HOWE, date(2030, 4, 6), [24, 24.5, 24]),
        (LORD_HOWE, date(2030, 10, 5), [24, 23.5, 24]),
        (KOLKATA, date(2030, 3, 30), [24, 24, 24]),
    ],
)
def test_a_day_is_as_long_as_its_clocks_make_it(zone: ZoneInfo, first: date, days: list[float]) -> None:
    found = expand(rule("00:00", "00:00", first=first), zone, LONG_AGO)
    assert hours(found) == days
    assert all(a.end == b.start for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("zone", "first", "nights"),
    [
        (BERLIN, date(2030, 3, 29), [8, 7, 8]),
        (BERLIN, date(2030, 10, 25), [8, 9, 8]),
        (NEW_YORK, date(2030, 3, 8), [8, 7, 8]),
        (NEW_YORK, date(2030, 11, 1), [8, 9, 8]),
        (KOLKATA, date(2030, 3, 29), [8, 8, 8]),
    ],
)
def test_a_night_across_a_change_is_an_hour_shorter_or_longer(zone: ZoneInfo, first: date, nights: list[float]) -> None:
    assert hours(expand(rule("22:00", "06:00", first=first), zone, LONG_AGO)) == nights


def test_office_hours_stay_on_the_wall_while_utc_moves() -> None:
    found = expand(rule(first=date(2030, 3, 30)), BERLIN, LONG_AGO)
    assert [(o.start, o.end) for o in found] == [
        (utc("2030-03-30T08:00"), utc("2030-03-30T16:00")),
        (utc("2030-03-31T07:00"), utc("2030-03-31T15:00")),
        (utc("2030-04-01T07:00"), utc("2030-04-01T15:00")),
    ]
    assert [o.day for o in found] == [date(2030, 3, 30), date(2030, 3, 31), date(2030, 4, 1)]


@pytest.mark.parametrize(
    ("zone", "local", "instant"),
    [
        # that day 02:00 to 03:00 never comes: the clocks jump at 01:00 UTC
        (BERLIN, "2030-03-31T01:59", "2030-03-31T00:59"),
        (BERLIN, "2030-03-31T02:00", "2030-03-31T01:00"),
        (BERLIN, "2030-03-31T02:30", "2030-03-31T01:00"),
        (BERLIN, "2030-03-31T02:59", "2030-03-31T01:00"),
        (BERLIN, "2030-03-31T03:00", "2030-03-31T01:00"),
        # that day 02:00 to 03:00 comes twice: the first counts
        (BERLIN, "2030-10-27T02:30", "2030-10-27T00:30"),
        (BERLIN, "2030-10-27T03:00", "2030-10-27T02:00"),
        (NEW_YORK, "2030-03-10T02:30", "2030-03-10T07:00"),
        (NEW_YORK, "2030-11-03T01:30", "2030-11-03T05:30"),
        # half an hour: 02:00 to 02:30 never comes, 01:30 to 02:00 comes twice
        (LORD_HOWE, "2030-10-06T02:15", "2030-10-05T15:30"),
        (LORD_HOWE, "2030-04-07T01:45", "2030-04-06T14:45"),
        # Samoa left out the whole of 30 December 2011
        (APIA, "2011-12-30T12:00", "2011-12-30T10:00"),
    ],
)
def test_a_time_that_never_comes_or_comes_twice_is_one_instant(zone: ZoneInfo, local: str, instant: str) -> None:
    assert instant_of(datetime.fromisoformat(local), zone) == utc(instant)


def test_a_window_in_the_gap_does_not_exist_that_day_and_one_that_reaches_in_is_cut() -> None:
    inside = expand(rule("02:00", "03:00", first=date(2030, 3, 30)), BERLIN, LONG_AGO)
    assert [o.day for o in inside] == [date(2030, 3, 30), date(2030, 4, 1), date(2030, 4, 2)]
    across = expand(rule("01:30", "02:30", first=date(2030, 3, 31), count=1), BERLIN, LONG_AGO)
    assert hours(across) == [0.5]


def test_a_length_is_real_time_on_every_day() -> None:
    night = rule("22:00", None, duration=8 * HOUR, first=date(2030, 3, 29))
    found = expand(night, BERLIN, LONG_AGO)
    assert hours(found) == [8, 8, 8]
    assert [o.end for o in found][1] == utc("2030-03-31T05:00"), "07:00 on the wall"


def test_weeks_are_counted_from_monday_and_days_from_the_first() -> None:
    weekly = rule(every="week", interval=2, weekdays=frozenset({0, 2, 6}), first=date(2030, 5, 15), count=5)
    # the first is a Wednesday: its week has that and its Sunday left, then a week is left out
    assert [o.day.isoformat() for o in expand(weekly, BERLIN, LONG_AGO)] == [
        "2030-05-15",
        "2030-05-19",
        "2030-05-27",
        "2030-05-29",
        "2030-06-02",
    ]
    daily = rule(interval=3, first=date(2030, 5, 15), until=date(2030, 5, 21))
    assert [o.day.day for o in expand(daily, BERLIN, LONG_AGO)] == [15, 18, 21]


def test_a_weekend_is_one_window() -> None:
    weekend = rule(
        "18:00", "08:00", end_days=3, every="week", weekdays=frozenset({4}), first=date(2030, 3, 25), count=2
    )
    assert hours(expand(weekend, BERLIN, LONG_AGO)) == [61, 62], "the first has the short night in it"


def test_what_has_begun_is_left_out_and_is_not_counted() -> None:
    now = utc("2030-03-30T08:00")
    assert [o.day.day for o in expand(rule(first=date(2030, 3, 30), count=2), BERLIN, now)] == [31, 1]
    just_before = now - timedelta(seconds=1)
    assert [o.day.day for o in expand(rule(first=date(2030, 3, 30), count=2), BERLIN, just_before)] == [30, 31]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"interval": 0}, "interval: 0 is not possible; ask for 1 to 100"),
        ({"every": "week"}, "days: none are named; name at least one, such as mon"),
        ({"weekdays": frozenset({1})}, "days: every day is asked for; leave days out, or ask for every week"),
        ({"duration": HOUR}, "to_time: a window has either an end on the clock or a length; give one of the two"),
        ({"end": None}, "to_time: a window has either an end on the clock or a length; give one of the two"),
        ({"end": "09:00", "end_days": 0}, "to_time: 09:00 is not after 09:00; say to_days=1 for the next day"),
        ({"end_days": 8}, f"to_days: 8 is not possible; ask for 0 to {END_DAYS_MAX}"),
        ({"count": OCCURRENCES_MAX + 1}, "count: 201 windows are not possible; ask for 1 to 200"),
        ({"until": date(2030, 3, 29)}, "until: is before the first day, 2030-03-30; name a later day"),
        ({"until": date(2030, 10, 16)}, "until: these are too many windows; ask for at most 200"),
        ({"first": date(2015, 1, 1), "until": date(2015, 1, 3)}, "until: no window begins between now and then"),
        ({"first": date(2040, 1, 1)}, "until: 2040-01-01 is too far ahead; name an earlier day, or ask for fewer"),
        ({"first": date(9999, 12, 1), "until": date(9999, 12, 31)}, "until: 9999-12-01 is too far ahead"),
        (
            {"end": "10:00", "end_days": 1},
            "to_time: the window of 2030-03-30 is not over when that of 2030-03-31 begins; ask for at most 23h",
        ),
        (
            {"end": None, "duration": 24 * HOUR},
            "duration_s: the window of 2030-03-30 is not over when that of 2030-03-31 begins; ask for at most 23h",
        ),
    ],
)
def test_a_rule_that_is_none_is_refused_with_the_fix(changed: dict[str, Any], said: str) -> None:
    now = datetime(2029, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidRequest) as caught:
        expand(rule(**changed), BERLIN, now)
    assert str(caught.value).startswith(said)


def test_as_many_as_there_may_be() -> None:
    last = date(2030, 3, 30) + timedelta(days=OCCURRENCES_MAX - 1)
    assert len(expand(rule(until=last), BERLIN, LONG_AGO)) == OCCURRENCES_MAX


# --- every day of every zone -------------------------------------------------------------------

LOCALS = st.datetimes(datetime(2011, 6, 1), datetime(2037, 12, 31))  # noqa: DTZ001 - times on a wall
TIMES = st.times().map(lambda at: at.replace(second=0, microsecond=0))


@given(st.sampled_from(ZONES), LOCALS, st.timedeltas(timedelta(0), timedelta(days=2)))
def test_a_later_time_on_the_wall_is_never_an_earlier_instant(zone: ZoneInfo, local: datetime, more: timedelta) -> None:
    earlier, later = local.replace(microsecond=0), (local + more).replace(microsecond=0)
    assert instant_of(earlier, zone) <= instant_of(later, zone)


@given(st.sampled_from(ZONES), LOCALS)
def test_a_time_that_comes_is_what_the_wall_shows_then(zone: ZoneInfo, local: datetime) -> None:
    at = instant_of(local.replace(microsecond=0), zone)
    shown = at.astimezone(zone).replace(tzinfo=None)
    # or it never comes: then the clocks have jumped over it at this very instant
    assert shown == local.replace(microsecond=0) or (
        (at - timedelta(seconds=1)).astimezone(zone).replace(tzinfo=None) < local < shown
    )


@given(st.sampled_from(ZONES), st.dates(date(2012, 1, 1), date(2036, 1, 1)), TIMES, TIMES, st.integers(1, 40))
def test_no_window_of_a_series_overlaps_another(
    zone: ZoneInfo, first: date, start: time, end: time, count: int
) -> None:
    found = expand(
        rule("00:00", "23:59", first=first, count=count) if start == end
        else rule(start.isoformat(), end.isoformat(), first=first, count=count, end_days=int(end <= start)),
        zone,
        datetime(first.year, 1, 1, tzinfo=UTC) - timedelta(days=2),
    )  # fmt: skip
    assert len(found) == count
    assert all(o.start < o.end for o in found)
    assert all(a.end <= b.start and a.day < b.day for a, b in pairwise(found))


@given(st.sampled_from(ZONES), st.dates(date(2012, 1, 1), date(2036, 1, 1)), TIMES, st.integers(1, 60))
def test_a_day_and_the_rest_of_it_are_the_whole(zone: ZoneInfo, first: date, cut: time, count: int) -> None:
    """Two series that touch on the wall touch in UTC, and their lengths add up to those of the days."""
    assume(cut != time(0))
    now = datetime(first.year, 1, 1, tzinfo=UTC) - timedelta(days=2)
    until = first + timedelta(days=count - 1)
    days = expand(rule("00:00", "00:00", first=first, until=until), zone, now)
    mornings = expand(rule("00:00", cut.isoformat(), first=first, until=until, end_days=0), zone, now)
    rests = expand(rule(cut.isoformat(), "00:00", first=first, until=until, end_days=1), zone, now)
    total = sum((o.end - o.start for o in [*mornings, *rests]), timedelta())
    assert total == sum((o.end - o.start for o in days), timedelta()) == days[-1].end - days[0].start
    bounds = sorted((o.start, o.end) for o in [*mornings, *rests])
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
