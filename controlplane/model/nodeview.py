"""A node as the planner sees it: what it has, what is booked when, what is held now.

Read from the ledger in one go and never changed; `placement_gen` says which state of the node it is. The sets
of slots a plan is made of are worked out once, here, so that planning a pool is arithmetic on ints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from controlplane.model.units import mask_of, touched_slots

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from controlplane.model.units import Span


class SlotView(NamedTuple):
    """A GPU. `nvlink_group` names its NVLink set within the node (None: in none); see `nvlink.plan_nvlink_groups`."""

    slot: int
    uuid: str
    healthy: bool
    nvlink_group: int | None


class Booked(NamedTuple):
    """A live booking's (or maintenance's) spans over `[start, end)`; `end` None is open."""

    spans: tuple[Span, ...]
    start: datetime
    end: datetime | None


class ScalarBooked(NamedTuple):
    """vCPUs and memory (MiB) of a live booking over `[start, end)`; `end` None is open."""

    vcpus: int
    memory_mib: int
    start: datetime
    end: datetime | None


class Scalars(NamedTuple):
    vcpus: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node.

    Attributes:
        node_id: the database's number of it; names it in plans and breaks ties.
        placement_gen: as read; moves with everything that may change a plan, so an index knows what to read again.
        placeable: may take new bookings.
        why_not: one or two words for people if it may not ("unreachable", "cordoned").
        slots: the GPUs, healthy or not.
        booked: live bookings.
        held: spans of allocations that are not released, which outlive their booking when a holder overruns.
        vcpus, memory_mib: what there is to sell.
        scalars_booked, vcpus_held, memory_mib_held: the same two guards for vCPUs and memory.
    """

    node_id: int
    name: str
    placement_gen: int
    placeable: bool
    why_not: str = ""
    slots: tuple[SlotView, ...] = ()
    booked: tuple[Booked, ...] = ()
    held: tuple[Span, ...] = ()
    vcpus: int = 0
    memory_mib: int = 0
    scalars_booked: tuple[ScalarBooked, ...] = ()
    vcpus_held: int = 0
    memory_mib_held: int = 0

    present: int = field(init=False, repr=False, compare=False)
    healthy: int = field(init=False, repr=False, compare=False)
    groups: tuple[int, ...] = field(init=False, repr=False, compare=False)
    held_mask: int = field(init=False, repr=False, compare=False)
    booked_masks: tuple[tuple[int, datetime, datetime | None], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        derive = object.__setattr__
        derive(self, "present", mask_of(slot.slot for slot in self.slots))
        derive(self, "healthy", mask_of(slot.slot for slot in self.slots if slot.healthy))
        derive(self, "groups", _group_masks(tuple((slot.slot, slot.nvlink_group) for slot in self.slots)))
        derive(self, "held_mask", touched_slots(self.held))
        derive(self, "booked_masks", tuple((touched_slots(b.spans), b.start, b.end) for b in self.booked))

    def booked_in(self, start: datetime, end: datetime | None) -> int:
        """The set of slots booked, in part or whole, at any instant of `[start, end)`."""
        mask = 0
        for slots, booked_from, booked_to in self.booked_masks:
            if (end is None or booked_from < end) and (booked_to is None or start < booked_to):
                mask |= slots
        return mask

    def booked_at(self, instant: datetime) -> int:
        """The set of slots booked, in part or whole, at this instant."""
        mask = 0
        for slots, booked_from, booked_to in self.booked_masks:
            if booked_from <= instant and (booked_to is None or instant < booked_to):
                mask |= slots
        return mask

    def scalars_free(self, start: datetime, end: datetime | None, *, now: bool) -> Scalars:
        """vCPUs and memory free at every instant of `[start, end)`; `now` counts what is physically held too.

        Negative where inventory has shrunk below what is booked.
        """
        peak = _peak(self.scalars_booked, start, end)
        vcpus, memory_mib = peak
        if now:
            vcpus, memory_mib = max(vcpus, self.vcpus_held), max(memory_mib, self.memory_mib_held)
        return Scalars(self.vcpus - vcpus, self.memory_mib - memory_mib)


def _peak(booked: Iterable[ScalarBooked], start: datetime, end: datetime | None) -> Scalars:
    """The most of each that is booked at one instant of the window. Use rises only where a booking starts."""
    inside = [b for b in booked if (end is None or b.start < end) and (b.end is None or start < b.end)]
    steps: list[tuple[datetime, int, int]] = []
    for b in inside:
        steps.append((max(b.start, start), b.vcpus, b.memory_mib))
        if b.end is not None:
            steps.append((b.end, -b.vcpus, -b.memory_mib))
    # At one instant, ends sort before starts: [a, b) and [b, c) never meet.
    steps.sort()
    vcpus = memory_mib = most_vcpus = most_memory_mib = 0
    for _, more_vcpus, more_memory_mib in steps:
        vcpus += more_vcpus
        memory_mib += more_memory_mib
        most_vcpus = max(most_vcpus, vcpus)
        most_memory_mib = max(most_memory_mib, memory_mib)
    return Scalars(most_vcpus, most_memory_mib)


@lru_cache(maxsize=4096)  # the layouts of a fleet's nodes; a few for each kind of server
def _group_masks(groups: tuple[tuple[int, int | None], ...]) -> tuple[int, ...]:
    """The NVLink sets of a node, lowest slot first. Shared between nodes: a fleet has few layouts."""
    masks: dict[int, int] = {}
    for slot, group in groups:
        if group is not None:
            masks[group] = masks.get(group, 0) | 1 << slot
    return tuple(sorted((mask for mask in masks.values() if mask.bit_count() > 1), key=lambda mask: mask & -mask))
