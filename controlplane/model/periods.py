"""Days, weeks and months in UTC, and how much GPU time of a window falls into each.

GPU time is counted in whole microseconds times GPUs, as times are kept, so that what is charged and
what is given back later cancel to nothing, and a recount from the rows gives the same number. A
month of a hundred thousand GPUs is 2.7e17 of them: far within an int8.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

Period = Literal["day", "week", "month"]

_MICROSECOND = timedelta(microseconds=1)
GPU_HOUR = timedelta(hours=1) // _MICROSECOND


def period_start(period: Period, at: datetime) -> datetime:
    """The start of the period that the instant is in. A week starts on Monday."""
    day = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if period == "month" else day


def period_end(period: Period, at: datetime) -> datetime:
    """The end of the period that the instant is in, which is the start of the next."""
    start = period_start(period, at)
    if period == "month":
        return start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
    return start + timedelta(days=7 if period == "week" else 1)


def split_gpu_time(period: Period, gpus: int, start: datetime, end: datetime) -> dict[datetime, int]:
    """GPU time of `[start, end)` by the start of the period that it falls into; nothing if it is empty."""
    parts: dict[datetime, int] = {}
    at = start
    while gpus and at < end:
        until = min(period_end(period, at), end)
        parts[period_start(period, at)] = gpus * ((until - at) // _MICROSECOND)
        at = until
    return parts
