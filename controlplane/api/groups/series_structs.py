"""What the series group takes and gives."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from typing import Annotated, Any, Literal

import msgspec

from controlplane.api.calls import Idempotent, Input, ListInput
from controlplane.api.fields import Instant, Ref
from controlplane.api.groups.reservation_structs import DURATION_S_MAX, What
from controlplane.errors import Invalid
from controlplane.model.recurrence import END_DAYS_MAX, INTERVAL_MAX, OCCURRENCES_MAX, Every, Recurrence
from controlplane.model.states import ReservationState

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

Clock = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$",
        max_length=5,
        description="What the clock on the wall shows, as in 09:00.",
    ),
]
ZoneName = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=64, description="The place whose clock it is, by its IANA name: Europe/Berlin."
    ),
]
Day = Annotated[date, msgspec.Meta(description="A day in that place, as in 2030-01-31.")]


class Rule(What, frozen=True, kw_only=True):
    """What is asked for, and when it comes back, on the clock of a place."""

    time_zone: ZoneName
    from_time: Clock
    to_time: Annotated[Clock | None, msgspec.Meta(description="When a window ends; or give duration_s.")] = None
    to_days: (
        Annotated[
            int,
            msgspec.Meta(
                ge=0,
                le=END_DAYS_MAX,
                description="How many days after its first a window ends; left out is the next to_time.",
            ),
        ]
        | None
    ) = None
    duration_s: (
        Annotated[
            int, msgspec.Meta(ge=1, le=DURATION_S_MAX, description="How long a window is in real time, in seconds.")
        ]
        | None
    ) = None
    every: Every = "day"
    interval: Annotated[
        int, msgspec.Meta(ge=1, le=INTERVAL_MAX, description="Every how many days or weeks; weeks begin on Monday.")
    ] = 1
    days: (
        Annotated[
            list[Weekday],
            msgspec.Meta(
                max_length=7, description="Of a week, those on which windows begin; the first day's if left out."
            ),
        ]
        | None
    ) = None
    first_date: Annotated[Day | None, msgspec.Meta(description="From when on; today if left out.")] = None
    until: Annotated[Day | None, msgspec.Meta(description="The last day on which a window may begin.")] = None
    count: Annotated[int, msgspec.Meta(ge=1, le=OCCURRENCES_MAX, description="How many windows at most.")] | None = None


class CreateSeries(Rule, frozen=True, kw_only=True):
    """A new series."""

    tenant: Annotated[str, msgspec.Meta(max_length=64, description="Id or slug; left out is your own.")] | None = None
    project: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    name: Annotated[
        str, msgspec.Meta(max_length=200, description="A name for people; the reservations have it too.")
    ] = ""
    all_or_nothing: Annotated[
        bool, msgspec.Meta(description="Place every window or none; false places those for which there is room.")
    ] = True


class PreviewSeries(Rule, frozen=True, kw_only=True):
    """A series that is planned and not booked."""


class SeriesRef(Input, frozen=True, kw_only=True):
    id: Ref


class ListSeries(ListInput, frozen=True, kw_only=True):
    pool: Ref | None = None


class CancelSeries(Idempotent, frozen=True, kw_only=True):
    id: Ref


class SeriesWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One window: the reservation that it became, or the reason why it became none."""

    date: date
    start: Instant
    end: Instant
    reservation: str | None
    state: ReservationState | None
    refused: Annotated[str, msgspec.Meta(description="Why it was not placed; empty if it was.")]


class PlannedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One window: the nodes on which it would be, or the reason why it would be on none."""

    date: date
    start: Instant
    end: Instant
    nodes: list[str]
    refused: str


class PlannedSeries(msgspec.Struct, frozen=True, kw_only=True):
    """The windows that the series would have if it were made now."""

    fits: Annotated[bool, msgspec.Meta(description="Whether each window would be placed.")]
    windows: list[PlannedWindow]


class SeriesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A series of reservations, without its windows."""

    id: str
    name: str
    tenant: str
    project: str | None
    pool: str
    time_zone: str
    rule: Annotated[dict[str, Any], msgspec.Meta(description="As it was asked for.")]
    windows_total: int
    windows_open: Annotated[int, msgspec.Meta(description="Placed ones that have not ended.")]
    created_by: str
    created_at: Instant
    cancelled_at: Instant | None


class Series(SeriesSummary, frozen=True, kw_only=True):
    """A series of reservations and what became of each window."""

    windows: list[SeriesWindow]


def as_recurrence(given: Rule, today: date) -> Recurrence:
    """The rule for the model; `today` is the day in its place."""
    if given.first_date is not None and given.first_date < today:
        raise Invalid(f"first_date: {given.first_date} is in the past; leave it out to begin today", field="first_date")
    if given.to_days is not None and given.to_time is None:
        raise Invalid("to_days: says on which day to_time is; give that too, or leave it out", field="to_days")
    start, end = _time(given.from_time), None if given.to_time is None else _time(given.to_time)
    days = given.to_days
    if days is None:
        days = int(end is not None and end <= start)
    first = given.first_date or today
    weekdays = frozenset(WEEKDAYS.index(day) for day in given.days or ())
    if given.every == "week" and not weekdays:
        weekdays = frozenset({first.weekday()})
    return Recurrence(
        every=given.every,
        interval=given.interval,
        weekdays=weekdays,
        start_time=start,
        end_time=end,
        end_days=days,
        duration=None if given.duration_s is None else timedelta(seconds=given.duration_s),
        first=first,
        until=given.until,
        count=given.count,
    )


def rule_as_asked(given: Rule, first: date) -> dict[str, object]:
    """The rule as it is stored and shown: what was given, and the first day, which may have been left out."""
    fields = msgspec.to_builtins(given)
    asked = {name: fields[name] for name in _RULE_FIELDS if fields[name] is not None}
    return {**asked, "first_date": first.isoformat()}


# What has a place of its own in the answer, or is not of the rule.
_SHOWN_BESIDE = frozenset({"idempotency_key", "pool", "time_zone"})
_RULE_FIELDS = tuple(field for field in Rule.__struct_fields__ if field not in _SHOWN_BESIDE)


def _time(text: str) -> time:
    hours, _, minutes = text.partition(":")
    return time(int(hours), int(minutes))


def utc_day(at: datetime) -> str:
    """A window's start in a sentence."""
    return at.isoformat(timespec="minutes").replace("+00:00", "Z")
