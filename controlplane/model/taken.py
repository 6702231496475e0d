"""A node as it is once a part of a plan is taken of it, or given back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from controlplane.model.nodeview import Booked, NodeView, ScalarBooked
from controlplane.model.shares import UnitsBooked, units_in
from controlplane.model.units import touched_slots

if TYPE_CHECKING:
    from controlplane.model.planner import PlanPart
    from controlplane.model.shares import SharedGpus

T = TypeVar("T")


def with_part(node: NodeView, part: PlanPart, start: int, end: int, *, held: bool) -> NodeView:
    """The node once the part of a plan is booked on it over instants `[start, end)`, and held as well or not."""
    slots = touched_slots(part.spans)
    booked, scalars = node.booked, node.scalars_booked
    if slots:
        booked = (*booked, Booked(slots, start, end))
    if part.vcpus or part.memory_mib:
        scalars = (*scalars, ScalarBooked(part.vcpus, part.memory_mib, start, end))
    # not `replace`, which takes three times as long: this runs once for each part that is placed
    return NodeView(
        node.node_id,
        node.placement_gen,
        node.placeable,
        node.why_not,
        node.present,
        node.healthy,
        node.groups,
        booked,
        node.held | slots if held else node.held,
        node.vcpus,
        node.memory_mib,
        scalars,
        node.vcpus_held + part.vcpus if held else node.vcpus_held,
        node.memory_mib_held + part.memory_mib if held else node.memory_mib_held,
        node.labels,
        None if node.shared is None else _with_units(node.shared, part, start, end, held=held),
    )


def _with_units(shared: SharedGpus, part: PlanPart, start: int, end: int, *, held: bool) -> SharedGpus:
    units = units_in(part.spans, shared)
    if not units:
        return shared
    booked = (*shared.booked, UnitsBooked(units, start, end))
    return replace(shared, booked=booked, held=shared.held | units if held else shared.held)


def without_part(node: NodeView, part: PlanPart, start: int, end: int) -> NodeView:
    """The node as it was before the part of a plan was booked on it, but not held."""
    shared = node.shared
    if shared is not None and (units := units_in(part.spans, shared)):
        shared = replace(shared, booked=_less(shared.booked, UnitsBooked(units, start, end)))
    booked, scalars = node.booked, node.scalars_booked
    if slots := touched_slots(part.spans):
        booked = _less(booked, Booked(slots, start, end))
    if part.vcpus or part.memory_mib:
        scalars = _less(scalars, ScalarBooked(part.vcpus, part.memory_mib, start, end))
    return replace(node, booked=booked, scalars_booked=scalars, shared=shared)


def _less(booked: tuple[T, ...], one: T) -> tuple[T, ...]:
    """Without one of those that are equal, if there is one."""
    if one not in booked:
        return booked
    at = booked.index(one)
    return booked[:at] + booked[at + 1 :]
