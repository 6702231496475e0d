"""A wall clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

START = datetime(2030, 1, 1, tzinfo=UTC)


class ManualClock:
    """Implements `shared.clocks.Clock`."""

    def __init__(self, start: datetime = START) -> None:
        assert start.tzinfo is not None
        self._now = start

    def now(self) -> datetime:
        return self._now

    def advance(self, seconds: float) -> datetime:
        """Move the clock (backwards too, as an administrator would) and return the new time."""
        self._now += timedelta(seconds=seconds)
        return self._now
