"""Windows that come back: a rule in the time of a place, expanded into windows in UTC.

A rule speaks of what the clock on the wall shows: weekdays from 09:00 to 17:00 in Berlin, every other Friday from
18:00 to Monday 08:00. Clocks are put forward and back, so one rule's windows are not all equally long in real time: a
day has 23, 24 or 25 hours, and a night may have one more or less.

Each time on the wall means one instant:
    - one that comes twice, when clocks go back, is the first of the two;
    - one that never comes, when clocks go forward, is the instant at which they jump.
A later time never means an earlier instant. So windows that touch on the wall touch in UTC, and windows that are apart
on the wall never overlap. A window that lies in the gap as a whole is left out.

A rule that gives a length in place of a time of the end means real time: 8 hours are 8 hours on every day.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Literal

from controlplane.model.requests import START_AHEAD_MAX, InvalidRequest, show_duration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

Every = Literal["day", "week"]

# Booked in one transaction, which locks the nodes of all of them: this bounds it. A working day for nine months.
OCCURRENCES_MAX = 200
# On the wall; longer than a week is no window that comes back.
END_DAYS_MAX = 7
INTERVAL_MAX = 100
_WEEK = timedelta(days=7)
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A rule, on the clock of a place.

    Attributes:
        every: what it counts in.
        interval: every how many days or weeks; weeks begin on Monday.
        weekdays: for weeks, the days on which windows begin, 0 for Monday.
        start_time: when a window begins.
        end_time: when it ends, `end_days` days after the day on which it begins; None if `duration` is given.
        end_days: 0 is the same day.
        duration: how long a window is in real time; None if `end_time` is given.
        first: the first day, from which days and weeks are counted.
        until: the last day on which a window may begin; None if `count` alone bounds it.
        count: how many windows; None if `until` alone bounds it.
    """

    every: Every
    interval: int
    weekdays: frozenset[int]
    start_time: time
    end_time: time | None
    end_days: int
    duration: timedelta | None
    first: date
    until: date | None
    count: int | None


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One window of a series, `[start, end)` in UTC; `day` is the one on the wall on which it begins."""

    day: date
    start: datetime
    end: datetime

    @property
    def seconds(self) -> int:
        return int((self.end - self.start).total_seconds())


def expand(rule: Recurrence, zone: tzinfo, now: datetime) -> list[Occurrence]:
    """The rule's windows that begin after `now`, in order; none overlaps another.

    Raises:
        InvalidRequest: the rule is not one, its windows overlap, there are too many of them or none.
    """
    _check(rule)
    found: list[Occurrence] = []
    for day in _days(rule):
        window = _window(rule, zone, day)
        if window is None or window.start <= now:
            continue
        if found and window.start < found[-1].end:
            field = "to_time" if rule.duration is None else "duration_s"
            raise InvalidRequest(
                field,
                f"the window of {found[-1].day} is not over when that of {window.day} begins",
                f"ask for at most {show_duration(window.start - found[-1].start)}",
            )
        if len(found) == OCCURRENCES_MAX:
            field = "count" if rule.until is None else "until"
            raise InvalidRequest(field, "these are too many windows", f"ask for at most {OCCURRENCES_MAX}")
        if window.start > now + START_AHEAD_MAX:
            raise InvalidRequest("until", f"{window.day} is too far ahead", "name an earlier day, or ask for fewer")
        found.append(window)
        if len(found) == rule.count:
            break
    if not found:
        raise InvalidRequest("until", "no window begins between now and then", "name a later day")
    return found


def instant_of(local: datetime, zone: tzinfo) -> datetime:
    """The one instant, in UTC, that a time on the clock of a place means; see the module."""
    first = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if first.astimezone(zone).replace(tzinfo=None) == local:
        return first
    # In a gap. By the offset from before the jump it is an instant behind it, and by the one from after, before it.
    before = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    old = before.astimezone(zone).utcoffset()
    low, high = 0, int((first - before).total_seconds())
    while high - low > 1:
        middle = (low + high) // 2
        if (before + timedelta(seconds=middle)).astimezone(zone).utcoffset() == old:
            low = middle
        else:
            high = middle
    return before + timedelta(seconds=high)


def _check(rule: Recurrence) -> None:
    if not 1 <= rule.interval <= INTERVAL_MAX:
        raise InvalidRequest("interval", f"{rule.interval} is not possible", f"ask for 1 to {INTERVAL_MAX}")
    if rule.every == "week" and not rule.weekdays:
        raise InvalidRequest("days", "none are named", "name at least one, such as mon")
    if rule.every == "day" and rule.weekdays:
        raise InvalidRequest("days", "every day is asked for", "leave days out, or ask for every week")
    if (rule.end_time is None) == (rule.duration is None):
        raise InvalidRequest("to_time", "a window has either an end on the clock or a length", "give one of the two")
    if rule.duration is not None and rule.duration <= timedelta():
        raise InvalidRequest("duration_s", "is not a time", "ask for at least 1 second")
    if rule.end_time is not None:
        _check_end(rule.start_time, rule.end_time, rule.end_days)
    if rule.until is None and rule.count is None:
        raise InvalidRequest("until", "the series has no end", "name the last day, or a count")
    if rule.count is not None and not 1 <= rule.count <= OCCURRENCES_MAX:
        raise InvalidRequest("count", f"{rule.count} windows are not possible", f"ask for 1 to {OCCURRENCES_MAX}")
    if rule.until is not None and rule.until < rule.first:
        raise InvalidRequest("until", f"is before the first day, {rule.first}", "name a later day")


def _check_end(start: time, end: time, days: int) -> None:
    if not 0 <= days <= END_DAYS_MAX:
        raise InvalidRequest("to_days", f"{days} is not possible", f"ask for 0 to {END_DAYS_MAX}")
    if days == 0 and end <= start:
        raise InvalidRequest("to_time", f"{end:%H:%M} is not after {start:%H:%M}", "say to_days=1 for the next day")


def _days(rule: Recurrence) -> Iterator[date]:
    """The days on which the rule lets a window begin, in order, until the last one or the end of the calendar."""
    if rule.every == "day":
        day, step, offsets = rule.first, rule.interval * _DAY, [0]
    else:
        day, step = rule.first - rule.first.weekday() * _DAY, rule.interval * _WEEK
        offsets = sorted(rule.weekdays)
    last = rule.until or date.max - 2 * END_DAYS_MAX * _DAY
    while True:
        for offset in offsets:
            if last - day < offset * _DAY:
                return
            if (this := day + offset * _DAY) >= rule.first:
                yield this
        if last - day < step:
            return
        day += step


def _window(rule: Recurrence, zone: tzinfo, day: date) -> Occurrence | None:
    start = instant_of(datetime.combine(day, rule.start_time), zone)
    if rule.end_time is None:
        assert rule.duration is not None, "checked"
        return Occurrence(day, start, start + rule.duration)
    end = instant_of(datetime.combine(day + rule.end_days * _DAY, rule.end_time), zone)
    return Occurrence(day, start, end) if start < end else None
