"""Instants as whole microseconds since 1970 UTC: what planning compares, thousands of times a placement.

PostgreSQL and `datetime` both count whole microseconds, so nothing is lost on the way. The end of an open window is
`FOREVER`, which is later than every instant; so a half-open range is always two ints and overlap is two comparisons.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

# Later than what PostgreSQL and datetime can write (the year 294276), and still an int8.
FOREVER: Final = 2**63 - 1


def to_instant(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def to_end(at: datetime | None) -> int:
    """The end of a window; None is open."""
    return FOREVER if at is None else (at - _EPOCH) // _MICROSECOND


def to_datetime(instant: int) -> datetime:
    return _EPOCH + instant * _MICROSECOND
