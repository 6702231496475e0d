"""Does one part of a request fit one node, how well, and if not, what is missing.

Everything that plans, ranks, estimates or explains asks here, so that they cannot disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from controlplane.model.instants import to_end, to_instant
from controlplane.model.labels import selects
from controlplane.model.nvlink import choose_slots, largest_set
from controlplane.model.shares import choose_parts
from controlplane.model.units import ALL_SLOTS

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.model.nodeview import NodeView
    from controlplane.model.requests import PlacementRequest
    from controlplane.model.shares import Part


class Fit(NamedTuple):
    """A node that takes a part of the request.

    `mask` is the whole GPUs to take, `parts` what of shared ones. `rank` orders the nodes for one request, smallest
    first, and ends in the node's id, so that no two are equal.
    """

    rank: tuple[int, ...]
    node: NodeView
    mask: int
    parts: tuple[Part, ...] = ()


class Asked(NamedTuple):
    """The window that a request names, as instants `[start, end)`, and whether it starts now."""

    start: int
    end: int
    starts_now: bool


def request_window(request: PlacementRequest, now: datetime) -> Asked:
    """The window the request names if it is placed at this instant."""
    starts_now = request.start is None or request.start <= now
    start = now if request.start is None or starts_now else request.start
    end = None if request.duration is None else start + request.duration
    return Asked(to_instant(start), to_end(end), starts_now)


def may_be_on(request: PlacementRequest, node: NodeView) -> bool:
    """Whether the node takes bookings at all, and is one of those that the request names."""
    return node.placeable and (not request.selector or selects(request.selector, node.labels))


def fit_node(request: PlacementRequest, node: NodeView, asked: Asked) -> Fit | None:
    """The slots to take of this node for one part of the request.

    For a later window bookings count alone: a hold is expected to be gone when the booking above it ends. A part that
    starts now needs its slots free of holds as well.
    """
    if not may_be_on(request, node):
        return None
    taken = node.booked_in(asked.start, asked.end)
    if asked.starts_now:
        taken |= node.held
    return fit_around(request, node, asked, taken)


def fit_around(
    request: PlacementRequest, node: NodeView, asked: Asked, taken: int, *, stuck_units: int = 0
) -> Fit | None:
    """Like `fit_node`, with the set of taken slots worked out by the caller.

    `stuck_units` are units of shared GPUs that are taken besides what is booked in the window, and held if it is now.
    """
    if taken == ALL_SLOTS:
        return None
    if request.whole_node:
        return _fit_whole(request, node, asked, taken)
    free = node.healthy & ~taken
    devices = _fit_devices(request, node, asked, free, stuck_units)
    if devices is None:
        return None
    mask, parts, rank = devices
    if not (request.vcpus_per_node or request.memory_mib_per_node):
        return Fit((*rank, node.node_id), node, mask, parts)
    left = node.scalars_free(asked.start, asked.end, now=asked.starts_now)
    vcpus, memory_mib = left.vcpus - request.vcpus_per_node, left.memory_mib - request.memory_mib_per_node
    if vcpus < 0 or memory_mib < 0:
        return None
    if not (request.gpus_per_node or parts):
        # Without GPUs, go where the fewest free GPUs could be left without vCPUs; then best fit.
        spread = request.strategy == "spread"
        rank = (-vcpus, -memory_mib) if spread else (free.bit_count(), vcpus, memory_mib)
    return Fit((*rank, node.node_id), node, mask, parts)


def spread_rank(free: int, rank: tuple[int, ...]) -> tuple[int, ...]:
    """The rank of a node whose best slots have this one, if parts are to be spread: most free GPUs first."""
    return (-free.bit_count(), *rank)


def _fit_devices(
    request: PlacementRequest, node: NodeView, asked: Asked, free: int, stuck_units: int
) -> tuple[int, tuple[Part, ...], tuple[int, ...]] | None:
    """Whole GPUs, parts of shared ones, and how good they are; all empty if none are asked for."""
    parts, rank = (), ()
    if request.parts:
        if node.shared is None:
            return None
        taken = node.shared.booked_in(asked.start, asked.end) | stuck_units
        if asked.starts_now:
            taken |= node.shared.held
        fitting = choose_parts(node.shared, request.parts, taken)
        if fitting is None:
            return None
        parts, (gpus, left, rest) = fitting
        rank = (-left, gpus, -rest) if request.strategy == "spread" else (gpus, left, rest)
    if not request.gpus_per_node:
        return 0, parts, rank
    choice = choose_slots(free, node.groups, request.gpus_per_node, one_set=request.topology == "nvlink-all")
    if choice is None:
        return None
    whole = spread_rank(free, choice.rank) if request.strategy == "spread" else choice.rank
    return choice.mask, parts, (*rank, *whole)


def _fit_whole(request: PlacementRequest, node: NodeView, asked: Asked, taken: int) -> Fit | None:
    """A node of exactly the size asked for, every GPU healthy and whole, and nothing of it booked or held by anybody.

    Any taken slot counts, one that is no longer in the inventory too: `[0,)` covers it.
    """
    if taken or node.shared is not None or node.gpus != request.gpus_per_node or node.healthy != node.present:
        return None
    if request.topology == "nvlink-all" and largest_set(node.present, node.groups) < node.gpus:
        return None
    if node.scalars_free(asked.start, asked.end, now=asked.starts_now) != (node.vcpus, node.memory_mib):
        return None
    return Fit((node.vcpus, node.memory_mib, node.node_id), node, node.present)
