"""Wall-clock time as an argument.

Code that needs the date takes a `Clock`; only this module reads the machine's.  Durations and
deadlines do not come from here: they are measured on trio's monotonic clock
(`trio.current_time()`), which no administrator can set back.  What the database decides by time,
it reads from its own `compute_now()`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where the current date comes from."""

    def now(self) -> datetime:
        """Return the current time, aware and in UTC."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)
