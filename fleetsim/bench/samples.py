"""Figures from samples: percentiles of one run, medians over repeats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least `percent` of them do not exceed.

    Always a sample that was taken (nearest rank): of fifty, the 99th percentile is the largest.
    Raises ValueError if there are none.
    """
    if not samples:
        raise ValueError("no samples")
    assert 0 < percent <= 100
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[rank - 1]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the repeats. An even number of repeats has the mean of the two in the middle as median."""

    median: float
    min: float
    max: float
    values: list[float]


def spread(values: Sequence[float]) -> Spread:
    """Sum up the repeats of one figure. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Spread(median=median, min=ordered[0], max=ordered[-1], values=list(values))
