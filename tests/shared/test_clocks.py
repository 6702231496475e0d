"""The system clock is aware and in UTC; the manual one moves when it is told to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from shared.clocks import SystemClock
from tests.support.clock import START, ManualClock

if TYPE_CHECKING:
    from shared.clocks import Clock


def test_system_clock_is_now_in_utc() -> None:
    before = datetime.now(UTC)
    now = SystemClock().now()
    assert now.tzinfo is UTC
    assert before <= now <= before + timedelta(minutes=1)


def test_manual_clock_stands_still_and_moves_both_ways() -> None:
    manual = ManualClock()
    clock: Clock = manual
    assert clock.now() == clock.now() == START
    assert manual.advance(90) == START + timedelta(seconds=90)
    manual.advance(-100)
    assert clock.now() < START
