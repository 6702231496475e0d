"""When nodes can be maintained: windows in which nobody has anything on them, a few nodes at a time.

A window is booked like any other, so it goes only where the node's line is free. What is booked may be in the way of
the time that was asked for; the first gap after it that is long enough is then the best there is, because nobody's
booking is cut. A booking without an end leaves no gap behind it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Busy:
    """A booking on a node over `[start, end)`; `end` None is open. `holder` is whose it is, for people."""

    start: datetime
    end: datetime | None
    holder: str


def find_gap(busy: Iterable[Busy], earliest: datetime, length: timedelta) -> datetime | None:
    """The first instant, `earliest` or later, from which nothing is booked for `length`; None if there is none."""
    start = earliest
    for booked in sorted(busy, key=lambda booked: booked.start):
        if booked.start >= start + length:
            break
        if booked.end is None:
            return None
        start = max(start, booked.end)
    return start


def in_the_way(busy: Iterable[Busy], start: datetime, length: timedelta) -> list[Busy]:
    """What is booked at any instant of `[start, start + length)`."""
    return [b for b in busy if b.start < start + length and (b.end is None or start < b.end)]


def plan_rolling(
    busy: Sequence[Sequence[Busy]], earliest: datetime, length: timedelta, at_once: int | None
) -> list[datetime | None]:
    """A start for each node, in their order, so that never more than `at_once` are away; None where there is no gap.

    A node takes the turn that is free first. One whose own gap comes later keeps the turn until then.
    """
    turns = [earliest] * (at_once or len(busy))
    starts: list[datetime | None] = []
    for node in busy:
        start = find_gap(node, turns[0], length)
        starts.append(start)
        if start is not None:
            heapq.heapreplace(turns, start + length)
    return starts
