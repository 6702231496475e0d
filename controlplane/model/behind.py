"""Where requests would start that wait for a pool, each behind those before it, and what would delay none of them.

A request keeps the place where it could start first, as it does in a pass over the queue, while those behind it look
for theirs; in the end all let go. So whoever asks is told the truth, and nothing is counted as booked.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from controlplane.model.planner import NoPlan
from controlplane.model.requests import PlacementRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from datetime import datetime

    from controlplane.model.index import PoolIndex
    from controlplane.model.planner import Plan

# First starts that are looked for, with the pool's placements waiting.
SEARCHES_MAX: Final = 4


@contextmanager
def keep_places(
    index: PoolIndex, requests: Iterable[PlacementRequest], now: datetime, horizon: datetime
) -> Generator[tuple[Sequence[Plan] | None, Callable[[PlacementRequest], Plan | None]]]:
    """Have requests keep their places in the body.

    Yields the places, None if there are too many to look for, and a function that finds a place behind them.
    """
    places: list[Plan] = []
    searched = set[PlacementRequest | int]()

    def find_place(one: PlacementRequest) -> Plan | None:
        plan = index.plan(one, now, None)
        if not isinstance(plan, NoPlan):
            return replace(plan, starts_now=False)
        # what is found for one is known for its equals, but for gangs
        searched.add(one if one.nodes == 1 else len(searched))
        return index.plan_earliest(one, now, horizon) if len(searched) <= SEARCHES_MAX else None

    try:
        for one in requests:
            if (place := find_place(one)) is not None:
                index.book(place)
                places.append(place)
        yield (places if len(searched) <= SEARCHES_MAX else None), find_place
    finally:
        for place in places:
            index.unbook(place)
        index.forget_starts()
