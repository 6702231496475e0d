"""Placement: which GPUs of which nodes a request gets, and if none, why not and when.

Pure and synchronous. A plan is a proposal: the transaction that books it locks its nodes, plans again on them as they
are under the locks, and inserts under the two range constraints. A stale view therefore costs a new plan, never a
double booking.

The rules, exact on the views given:
    - A part's GPUs are on one node, and the parts of a gang on different nodes: all are placed, in the same window, or
      none is.
    - Within a node: the choice of `nvlink.choose_slots`, which keeps NVLink sets whole.
    - Between nodes: fewest NVLink sets touched, then no complete set broken, then best fit (fewest free GPUs left, or
      vCPUs and memory for a request without GPUs), then the lower node id. The same views give the same plan.
    - A request that is to be spread takes the nodes with the most free GPUs (or vCPUs, without GPUs) before all that.
    - Never fewer than asked for.

The work is one look at each node, and identical GPUs are never permuted. `Placer` is what a placer offers its callers,
whether it looks at every node (`ScanPlacer`) or at few (`index.PoolIndex`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from controlplane.model.earliest import find_earliest
from controlplane.model.fit import fit_node, request_window
from controlplane.model.instants import FOREVER, to_datetime
from controlplane.model.refusals import explain_pending
from controlplane.model.units import WHOLE_NODE, Window, coalesce, mask_of, slots_of, spans_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from controlplane.model.fit import Asked, Fit
    from controlplane.model.nodeview import NodeView
    from controlplane.model.refusals import PendingReason
    from controlplane.model.requests import PlacementRequest
    from controlplane.model.units import Span


@dataclass(frozen=True, slots=True)
class PlanPart:
    """What is taken of one node.

    `slots` are the GPUs, the shared ones of which it gets a part among them. `spans` are what is booked: neighbouring
    slots as one, `[0,)` for a whole node.
    """

    node_id: int
    placement_gen: int
    slots: tuple[int, ...]
    spans: tuple[Span, ...]
    vcpus: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One part for each node of the gang, ordered by node id (the order in which rows are locked), in one window.

    `starts_now` asks for the allocations in the same transaction.
    """

    parts: tuple[PlanPart, ...]
    window: Window
    starts_now: bool


@dataclass(frozen=True, slots=True)
class NoPlan:
    """The request does not fit as things are.

    Attributes:
        reason: for programs.
        detail: for people, with the numbers.
        earliest: when it could start if nothing else came; None if no such time is known.
    """

    reason: PendingReason
    detail: str
    earliest: datetime | None


class Placer(Protocol):
    """Plans requests of one pool from what it knows of its nodes."""

    def candidates(self, request: PlacementRequest, now: datetime) -> Iterator[Fit]:
        """The nodes that take a part of the request, best first, each once."""
        ...

    def plan(self, request: PlacementRequest, now: datetime, horizon: datetime | None) -> Plan | NoPlan:
        """As `plan_placement`."""
        ...


class ScanPlacer:
    """Looks at every node for every request."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = nodes

    def candidates(self, request: PlacementRequest, now: datetime) -> Iterator[Fit]:
        return iter(sorted(_find_fits(request, self._nodes, now), key=_rank))

    def plan(self, request: PlacementRequest, now: datetime, horizon: datetime | None) -> Plan | NoPlan:
        return plan_placement(request, self._nodes, now, horizon)


def plan_placement(
    request: PlacementRequest, nodes: Sequence[NodeView], now: datetime, horizon: datetime | None
) -> Plan | NoPlan:
    """Place a request on the pool's nodes.

    Args:
        request: what is asked for.
        nodes: every node of the pool, each once, also those that are not placeable: they are counted in the reason.
        now: the instant of the views.
        horizon: the latest start that `NoPlan.earliest` may name; None leaves the estimate out.
    """
    best = heapq.nsmallest(request.nodes, _find_fits(request, nodes, now), key=_rank)
    if len(best) < request.nodes:
        return plan_nothing(request, nodes, now, horizon, nodes)
    return plan_parts(request, best, request_window(request, now))


def plan_parts(request: PlacementRequest, fits: Sequence[Fit], asked: Asked) -> Plan:
    """The plan that takes these nodes in this window."""
    parts = sorted((_part(request, fit) for fit in fits), key=_node_id)
    end = None if asked.end == FOREVER else to_datetime(asked.end)
    return Plan(tuple(parts), Window(to_datetime(asked.start), end), asked.starts_now)


def plan_nothing(
    request: PlacementRequest,
    nodes: Sequence[NodeView],
    now: datetime,
    horizon: datetime | None,
    telling: Sequence[NodeView],
) -> NoPlan:
    """The answer for a request that does not fit.

    Args:
        telling: the nodes, or those of them of which `explain_pending` says the same.
    """
    reason, detail = explain_pending(request, telling, now)
    earliest = None if horizon is None else find_earliest(request, nodes, now, horizon)
    return NoPlan(reason, detail, earliest)


def _find_fits(request: PlacementRequest, nodes: Sequence[NodeView], now: datetime) -> list[Fit]:
    asked = request_window(request, now)
    fits = (fit_node(request, node, asked) for node in nodes)
    return [fit for fit in fits if fit is not None]


def _rank(fit: Fit) -> tuple[int, ...]:
    return fit.rank


def _node_id(part: PlanPart) -> int:
    return part.node_id


def _part(request: PlacementRequest, fit: Fit) -> PlanPart:
    node, spans = fit.node, spans_of(fit.mask)
    if fit.parts:
        spans = coalesce([*spans, *(part.span for part in fit.parts)])
    return PlanPart(
        node_id=node.node_id,
        placement_gen=node.placement_gen,
        slots=slots_of(fit.mask | mask_of(part.slot for part in fit.parts)),
        spans=(WHOLE_NODE,) if request.whole_node else spans,
        vcpus=node.vcpus if request.whole_node else request.vcpus_per_node,
        memory_mib=node.memory_mib if request.whole_node else request.memory_mib_per_node,
    )
