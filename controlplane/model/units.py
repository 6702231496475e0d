"""A node is a line of units, and time is a line of instants: the half-open ranges everything is booked in.

Each GPU slot of a node is 48 units long, slot `i` being `[48i, 48i + 48)`. A whole GPU, a MIG instance (the sub-range
of its placement) and a time slot (48/k units) are therefore all ranges of one line, and a range constraint refuses a
whole GPU beside one of its own parts without knowing what either is. Neighbouring GPUs of one reservation are one
range. A range without an end, `[0,)`, is the whole node, with whatever is added to it later.

A set of slots is an `int` with one bit for each slot, because planning compares thousands of sets a second; ranges
appear where a plan is written or read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

# Divisible by 2, 3, 4, 6, 8, 12, 16 and 24: MIG cuts a GPU into 4 or 8 memory slices, time slots into whatever k.
UNITS_PER_GPU = 48

# The set of every slot a node has or will have: what `[0,)` covers. All bits of a Python int.
ALL_SLOTS = -1


class NotPartitionable(Exception):
    """The GPU cannot be cut on the line: its parts would not be whole numbers of units."""


@dataclass(frozen=True, slots=True)
class Span:
    """Units `[start, end)` of one node's line; `end` None reaches past every slot."""

    start: int
    end: int | None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ValueError(f"not a span: [{self.start}, {self.end})")

    def overlaps(self, other: Span) -> bool:
        return (other.end is None or self.start < other.end) and (self.end is None or other.start < self.end)

    def contains(self, other: Span) -> bool:
        if other.start < self.start:
            return False
        return self.end is None or (other.end is not None and other.end <= self.end)

    def subtract(self, other: Span) -> tuple[Span, ...]:
        """What is left of this span without `other`: none, one or two spans, in order."""
        if not self.overlaps(other):
            return (self,)
        left: list[Span] = []
        if self.start < other.start:
            left.append(Span(self.start, other.start))
        if other.end is not None and (self.end is None or other.end < self.end):
            left.append(Span(other.end, self.end))
        return tuple(left)


WHOLE_NODE = Span(0, None)


@dataclass(frozen=True, slots=True)
class Window:
    """Instants `[start, end)`, time-zone aware; `end` None is open. Two windows that touch do not overlap."""

    start: datetime
    end: datetime | None

    def __post_init__(self) -> None:
        if self.start.tzinfo is None or (self.end is not None and self.end.tzinfo is None):
            raise ValueError("a window needs times with a zone")
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"not a window: [{self.start}, {self.end})")

    def overlaps(self, other: Window) -> bool:
        return (other.end is None or self.start < other.end) and (self.end is None or other.start < self.end)

    def contains(self, instant: datetime) -> bool:
        return self.start <= instant and (self.end is None or instant < self.end)


def slot_span(slot: int) -> Span:
    """The whole GPU in `slot`."""
    return Span(slot * UNITS_PER_GPU, (slot + 1) * UNITS_PER_GPU)


def mig_span(slot: int, start: int, size: int, full_size: int) -> Span:
    """The MIG instance placed at slices `[start, start + size)` of the GPU in `slot`.

    All three are in the memory slices NVML counts placements in; `full_size` is the placement of the profile that is
    the whole GPU (8 on an H100, 4 on an A30).

    Raises:
        NotPartitionable: a slice of this GPU is not a whole number of units.
        ValueError: the placement lies outside the GPU.
    """
    units = units_per_slice(full_size)
    if start < 0 or size < 1 or start + size > full_size:
        raise ValueError(f"placement [{start}, {start + size}) is outside a GPU of {full_size} slices")
    base = slot * UNITS_PER_GPU + start * units
    return Span(base, base + size * units)


def units_per_slice(full_size: int) -> int:
    """Units of one MIG slice.

    Raises:
        NotPartitionable: 48 is not a multiple of `full_size`.
    """
    if full_size < 1 or UNITS_PER_GPU % full_size:
        raise NotPartitionable(f"{full_size} slices do not divide {UNITS_PER_GPU} units")
    return UNITS_PER_GPU // full_size


def time_slot_span(slot: int, index: int, parts: int) -> Span:
    """Time slot `index` of the `parts` equal ones that the GPU in `slot` is shared in.

    Raises:
        NotPartitionable: 48 is not a multiple of `parts`.
        ValueError: there is no such index.
    """
    if parts < 1 or UNITS_PER_GPU % parts:
        raise NotPartitionable(f"{parts} time slots do not divide {UNITS_PER_GPU} units")
    if not 0 <= index < parts:
        raise ValueError(f"time slot {index} of {parts}")
    units = UNITS_PER_GPU // parts
    base = slot * UNITS_PER_GPU + index * units
    return Span(base, base + units)


def coalesce(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same units in as few spans as possible, ordered: overlapping and neighbouring spans become one."""
    runs: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        last = runs[-1] if runs else None
        if last is None or (last.end is not None and last.end < span.start):
            runs.append(span)
        elif last.end is not None and (span.end is None or span.end > last.end):
            runs[-1] = Span(last.start, span.end)
    return tuple(runs)


def mask_of(slots: Iterable[int]) -> int:
    """The set of these slots."""
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask


def slots_of(mask: int) -> tuple[int, ...]:
    """The slots of a (finite) set, ascending."""
    slots: list[int] = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return tuple(slots)


def spans_of(mask: int) -> tuple[Span, ...]:
    """A (finite) set of slots as whole GPUs, neighbours as one span."""
    runs: list[Span] = []
    while mask:
        first = (mask & -mask).bit_length() - 1
        run = ~(mask >> first)
        length = (run & -run).bit_length() - 1
        runs.append(Span(first * UNITS_PER_GPU, (first + length) * UNITS_PER_GPU))
        mask &= ~(((1 << length) - 1) << first)
    return tuple(runs)


def units_of(spans: Iterable[Span]) -> int:
    """The set of units of these spans, one bit for each."""
    units = 0
    for span in spans:
        below = (1 << span.start) - 1
        units |= ~below if span.end is None else ((1 << span.end) - 1) & ~below
    return units


def span_of_units(units: int) -> Span:
    """A (finite) set of neighbouring units as a span."""
    return Span((units & -units).bit_length() - 1, units.bit_length())


def touched_slots(spans: Iterable[Span]) -> int:
    """The set of slots of which these spans hold any part; `ALL_SLOTS` for `[0,)`."""
    mask = 0
    for span in spans:
        below = (1 << (span.start // UNITS_PER_GPU)) - 1
        if span.end is None:
            mask |= ~below
        else:
            mask |= ((1 << -(-span.end // UNITS_PER_GPU)) - 1) & ~below
    return mask
