"""A node as the planner sees it: what it has, what is booked when, what is held now.

Read from the ledger in one go and never changed; `placement_gen` says which state of the node it is. GPUs are sets of
slots (ints, see `units`) and times are instants (ints, see `instants`), so that planning a pool is arithmetic on ints:
what a GPU is called does not matter until it is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from controlplane.model.instants import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controlplane.model.labels import Labels
    from controlplane.model.shares import SharedGpus


class Booked(NamedTuple):
    """The slots of which a live booking (or maintenance) takes any part, over instants `[start, end)`."""

    slots: int
    start: int
    end: int


class ScalarBooked(NamedTuple):
    """vCPUs and memory (MiB) of a live booking over instants `[start, end)`."""

    vcpus: int
    memory_mib: int
    start: int
    end: int


class Scalars(NamedTuple):
    vcpus: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node.

    Attributes:
        node_id: the database's number of it; names it in plans and breaks ties.
        placement_gen: as read; a placement loses if the node has moved on since.
        placeable: may take new bookings.
        why_not: one or two words for people if it may not ("unreachable", "cordoned").
        present: slots that have a GPU which is not shared, healthy or not.
        healthy: those that may be given out.
        groups: the NVLink sets of the node, lowest slot first; see `nvlink.plan_nvlink_groups`.
        booked: live bookings.
        held: slots of which an unreleased allocation has any part; it outlives its booking when a holder overruns.
        vcpus, memory_mib: what there is to sell.
        scalars_booked, vcpus_held, memory_mib_held: the same two guards for vCPUs and memory.
        labels: what operators say of it; nodes with equal ones share a value.
        shared: the GPUs that are given out in parts, None if the node has none.
    """

    node_id: int
    placement_gen: int
    placeable: bool
    why_not: str = ""
    present: int = 0
    healthy: int = 0
    groups: tuple[int, ...] = ()
    booked: tuple[Booked, ...] = ()
    held: int = 0
    vcpus: int = 0
    memory_mib: int = 0
    scalars_booked: tuple[ScalarBooked, ...] = ()
    vcpus_held: int = 0
    memory_mib_held: int = 0
    labels: Labels = ()
    shared: SharedGpus | None = None

    @property
    def gpus(self) -> int:
        return self.present.bit_count()

    def booked_in(self, start: int, end: int) -> int:
        """The set of slots booked, in part or whole, at any instant of `[start, end)`."""
        mask = 0
        for slots, booked_from, booked_to in self.booked:
            if booked_from < end and start < booked_to:
                mask |= slots
        return mask

    def booked_at(self, instant: int) -> int:
        """The set of slots booked, in part or whole, at this instant."""
        return self.booked_in(instant, instant + 1)

    def next_booking(self, slots: int) -> int:
        """The earliest start of a booking that has any of these slots, FOREVER if none has."""
        earliest = FOREVER
        for booked, start, _ in self.booked:
            if booked & slots and start < earliest:
                earliest = start
        return earliest

    def scalars_free(self, start: int, end: int, *, now: bool) -> Scalars:
        """vCPUs and memory free at every instant of `[start, end)`; `now` counts what is physically held too.

        Negative where inventory has shrunk below what is booked.
        """
        vcpus, memory_mib = _peak(self.scalars_booked, start, end) if self.scalars_booked else (0, 0)
        if now:
            vcpus, memory_mib = max(vcpus, self.vcpus_held), max(memory_mib, self.memory_mib_held)
        return Scalars(self.vcpus - vcpus, self.memory_mib - memory_mib)


def _peak(booked: Iterable[ScalarBooked], start: int, end: int) -> Scalars:
    """The most of each that is booked at one instant of the window. Use rises only where a booking starts."""
    steps: list[tuple[int, int, int]] = []
    for b in booked:
        if b.start < end and start < b.end:
            steps += ((max(b.start, start), b.vcpus, b.memory_mib), (b.end, -b.vcpus, -b.memory_mib))
    # At one instant, ends sort before starts: [a, b) and [b, c) never meet.
    steps.sort()
    vcpus = memory_mib = most_vcpus = most_memory_mib = 0
    for _, more_vcpus, more_memory_mib in steps:
        vcpus += more_vcpus
        memory_mib += more_memory_mib
        most_vcpus = max(most_vcpus, vcpus)
        most_memory_mib = max(most_memory_mib, memory_mib)
    return Scalars(most_vcpus, most_memory_mib)


def sort_groups(masks: Iterable[int]) -> tuple[int, ...]:
    """NVLink sets in the order in which `NodeView.groups` has them."""
    return tuple(sorted((mask for mask in masks if mask.bit_count() > 1), key=lambda mask: mask & -mask))
