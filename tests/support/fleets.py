"""Nodes and requests as the planner sees them, said briefly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from controlplane.model.instants import to_end, to_instant
from controlplane.model.labels import parse_selector
from controlplane.model.nodeview import Booked, NodeView, ScalarBooked, sort_groups
from controlplane.model.requests import NO_PARTS, PlacementRequest, Strategy, Topology
from controlplane.model.shares import Part, UnitsBooked, ask_for, mig_class, mig_part, share, time_slot_parts
from controlplane.model.units import Span, mask_of, mig_span, touched_slots, units_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HORIZON = NOW + timedelta(days=90)

PAIRS = (0, 0, 1, 1, 2, 2, 3, 3)
SWITCH = (0,) * 8
UNLINKED = (None,) * 8
# Of an H100 80GB.
MIG_UNITS = {"mig.1g.10gb": 6, "mig.1g.20gb": 12, "mig.2g.20gb": 12, "mig.3g.40gb": 24, "mig.7g.80gb": 48}


def group_masks(group_of: Mapping[int, int | None]) -> tuple[int, ...]:
    """The NVLink sets of a node, lowest slot first, from the set that each slot is in; a set of one is none."""
    masks: dict[int, int] = {}
    for slot, group in group_of.items():
        if group is not None:
            masks[group] = masks.get(group, 0) | 1 << slot
    return sort_groups(masks.values())


def at(hours: float) -> datetime:
    return NOW + timedelta(hours=hours)


def make_request(
    gpus: int = 0,
    *,
    nodes: int = 1,
    topology: Topology = "any",
    whole_node: bool = False,
    vcpus: int = 0,
    memory_mib: int = 0,
    start: float | None = None,
    hours: float | None = 1,
    selector: Sequence[str] = (),
    strategy: Strategy = "pack",
    parts: Mapping[str, int] = NO_PARTS,
) -> PlacementRequest:
    """Amounts are each node's; `start` is in hours from now."""
    return PlacementRequest(
        nodes=nodes,
        gpus_per_node=gpus,
        topology=topology,
        whole_node=whole_node,
        vcpus_per_node=vcpus,
        memory_mib_per_node=memory_mib,
        start=None if start is None else at(start),
        duration=None if hours is None else timedelta(hours=hours),
        selector=parse_selector(selector),
        strategy=strategy,
        parts=tuple(ask_for(name, count, MIG_UNITS) for name, count in sorted(parts.items())),
    )


def make_node(
    node_id: int = 1,
    groups: tuple[int | None, ...] = SWITCH,
    *,
    sick: Collection[int] = (),
    vcpus: int = 0,
    memory_mib: int = 0,
    **labels: str,
) -> NodeView:
    """A placeable, empty node with one GPU for each entry of `groups`, which name the NVLink sets."""
    return NodeView(
        node_id,
        1,
        placeable=True,
        present=mask_of(range(len(groups))),
        healthy=mask_of(slot for slot in range(len(groups)) if slot not in sick),
        groups=group_masks(dict(enumerate(groups))),
        vcpus=vcpus,
        memory_mib=memory_mib,
        labels=tuple(sorted(labels.items())),
    )


def hours(start: float, end: float | None) -> tuple[int, int]:
    """Instants, from hours after now; no end is for ever."""
    return to_instant(at(start)), to_end(None if end is None else at(end))


def booked(slots: Iterable[int], start: float, end: float | None) -> Booked:
    return Booked(mask_of(slots), *hours(start, end))


def scalars(vcpus: int, memory_mib: int, start: float, end: float | None) -> ScalarBooked:
    return ScalarBooked(vcpus, memory_mib, *hours(start, end))


def book(node: NodeView, *slots: int, start: float, end: float | None) -> NodeView:
    """The node with these slots booked, not held."""
    return replace(node, booked=(*node.booked, booked(slots, start, end)))


def use(node: NodeView, *slots: int, until: float | None = 1) -> NodeView:
    """The node with these slots booked since an hour ago, and held."""
    node = book(node, *slots, start=-1, end=until)
    return replace(node, held=node.held | mask_of(slots))


def shut(node: NodeView, why_not: str) -> NodeView:
    return replace(node, placeable=False, why_not=why_not)


# (profile, first memory slice, memory slices) of each instance of a GPU in MIG mode, which has eight slices
Layout = Sequence[tuple[str, int, int]]


def parts_of(slot: int, how: int | Layout) -> tuple[Part, ...]:
    """The parts of a GPU that is shared in so many time slots, or has these MIG instances."""
    if isinstance(how, int):
        return time_slot_parts(slot, how)
    return tuple(mig_part(mig_class(profile), mig_span(slot, start, size, 8)) for profile, start, size in how)


def shared_node(
    node_id: int,
    groups: tuple[int | None, ...],
    shared: Mapping[int, int | Layout],
    *,
    sick: Collection[int] = (),
    taken: Iterable[tuple[Span, float, float | None]] = (),
    held: Iterable[Span] = (),
    vcpus: int = 0,
) -> NodeView:
    """A node of which the GPUs in some slots are given out in parts, with spans booked and held."""
    node = make_node(node_id, groups, sick=sick, vcpus=vcpus)
    whole = ~mask_of(shared)
    spans, holds = list(taken), list(held)
    bookings = [Booked(touched_slots([span]), *hours(start, end)) for span, start, end in spans]
    units = [UnitsBooked(units_of([span]), *hours(start, end)) for span, start, end in spans]
    healthy = [part for slot, how in sorted(shared.items()) if slot not in sick for part in parts_of(slot, how)]
    out = [part for slot, how in sorted(shared.items()) if slot in sick for part in parts_of(slot, how)]
    return replace(
        node,
        present=node.present & whole,
        healthy=node.healthy & whole,
        groups=group_masks({slot: group for slot, group in enumerate(groups) if slot not in shared}),
        booked=tuple(bookings),
        held=touched_slots(holds),
        shared=share(healthy, out, units, units_of(holds)),
    )
