"""A pool's nodes, kept ranked in memory, so that a placement looks at a few of them.

The index orders nodes by what is certain at every instant: their inventory and what is physically held. A placement
that starts now can take no more than that, so it is an upper bound whatever the time is, and nothing here grows old by
itself. Bookings, which the time moves in and out of the way, are looked at exactly, on the nodes that come up.

Nodes with the same free slots and the same NVLink sets are one *kind*: a request ranks kinds, of which a fleet has
few, and then walks nodes of the best kind. Requests without GPUs walk nodes by free vCPUs. Requests for later, and for
whole nodes, look at every node.

The order is that of `plan_placement`, except that a node with a coming booking in the request's window is ranked where
it would be without it, or last if that booking costs it a linked or an unbroken set. A request that fits is always
placed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from controlplane.model.fit import fit_node, request_window
from controlplane.model.nodeview import Booked, ScalarBooked
from controlplane.model.nvlink import choose_slots
from controlplane.model.planner import plan_nothing, plan_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from controlplane.model.fit import Fit
    from controlplane.model.nodeview import NodeView
    from controlplane.model.planner import NoPlan, Plan
    from controlplane.model.requests import PlacementRequest

# Parts of a rank that say how good the GPUs are, before best fit: sets touched, complete sets broken.
_QUALITY = slice(0, 2)


K = TypeVar("K")
V = TypeVar("V", int, tuple[int, int, int])


class _Kind(NamedTuple):
    free: int
    groups: tuple[int, ...]


class PoolIndex:
    """A `Placer` over node views that are put in, replaced and taken out as the ledger changes."""

    def __init__(self, nodes: Iterable[NodeView] = ()) -> None:
        self._nodes: dict[int, NodeView] = {}
        # Node ids of each kind, ascending.
        self._by_kind: dict[_Kind, list[int]] = {}
        # For each number of free GPUs: (free vCPUs, free memory, node id), ascending.
        self._by_scalars: dict[int, list[tuple[int, int, int]]] = {}
        for node in nodes:
            self.put(node)

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: NodeView) -> None:
        """Add the node, or replace what was known of it."""
        self.remove(node.node_id)
        self._nodes[node.node_id] = node
        if node.placeable:
            kind = _kind_of(node)
            insort(self._by_kind.setdefault(kind, []), node.node_id)
            insort(self._by_scalars.setdefault(kind.free.bit_count(), []), _scalars_of(node))

    def remove(self, node_id: int) -> None:
        """Forget the node, if it is known."""
        node = self._nodes.pop(node_id, None)
        if node is None or not node.placeable:
            return
        kind = _kind_of(node)
        _take_out(self._by_kind, kind, node_id)
        _take_out(self._by_scalars, kind.free.bit_count(), _scalars_of(node))

    def book(self, plan: Plan) -> None:
        """Count a plan as booked (and held, if it starts now), so that the next one is made around it."""
        start, end = plan.window.start, plan.window.end
        for part in plan.parts:
            node = self._nodes[part.node_id]
            booked, scalars = node.booked, node.scalars_booked
            if part.spans:
                booked = (*booked, Booked(part.spans, start, end))
            if part.vcpus or part.memory_mib:
                scalars = (*scalars, ScalarBooked(part.vcpus, part.memory_mib, start, end))
            node = replace(node, booked=booked, scalars_booked=scalars)
            if plan.starts_now:
                node = replace(
                    node,
                    held=(*node.held, *part.spans),
                    vcpus_held=node.vcpus_held + part.vcpus,
                    memory_mib_held=node.memory_mib_held + part.memory_mib,
                )
            self.put(node)

    def candidates(self, request: PlacementRequest, now: datetime) -> Iterator[Fit]:
        """The nodes that take a part of the request, best first, each once."""
        _, starts_now = request_window(request, now)
        if not starts_now or request.whole_node:
            return self._scan(request, now)
        if request.gpus_per_node:
            return self._walk_kinds(request, now)
        return self._walk_scalars(request, now)

    def plan(self, request: PlacementRequest, now: datetime, horizon: datetime | None) -> Plan | NoPlan:
        """As `planner.plan_placement`."""
        best = list(islice(self.candidates(request, now), request.nodes))
        if len(best) < request.nodes:
            return plan_nothing(request, list(self._nodes.values()), now, horizon)
        return plan_parts(request, best, now)

    def _scan(self, request: PlacementRequest, now: datetime) -> Iterator[Fit]:
        window, starts_now = request_window(request, now)
        fits = (fit_node(request, node, window, starts_now=starts_now) for node in self._nodes.values())
        heap = [(fit.rank, fit) for fit in fits if fit is not None]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[1]

    def _walk_kinds(self, request: PlacementRequest, now: datetime) -> Iterator[Fit]:
        window, starts_now = request_window(request, now)
        one_set = request.topology == "nvlink-all"
        ranked: list[tuple[tuple[int, ...], list[int]]] = []
        for kind, node_ids in self._by_kind.items():
            choice = choose_slots(kind.free, kind.groups, request.gpus_per_node, one_set=one_set)
            if choice is not None:
                ranked.append((choice.rank, node_ids))
        worse: list[Fit] = []
        ranked.sort(key=_kind_rank)
        for rank, same in groupby(ranked, key=_kind_rank):
            # Kinds of one rank are walked together, so that the node id alone breaks the tie.
            for node_id in heapq.merge(*(node_ids for _, node_ids in same)):
                fit = fit_node(request, self._nodes[node_id], window, starts_now=starts_now)
                if fit is None:
                    continue
                if fit.rank[_QUALITY] > rank[_QUALITY]:
                    worse.append(fit)
                else:
                    yield fit
        yield from sorted(worse, key=lambda fit: fit.rank)

    def _walk_scalars(self, request: PlacementRequest, now: datetime) -> Iterator[Fit]:
        window, starts_now = request_window(request, now)
        for _, nodes in sorted(self._by_scalars.items()):
            for i in range(bisect_left(nodes, (request.vcpus_per_node, 0, 0)), len(nodes)):
                fit = fit_node(request, self._nodes[nodes[i][2]], window, starts_now=starts_now)
                if fit is not None:
                    yield fit


def _kind_rank(ranked: tuple[tuple[int, ...], list[int]]) -> tuple[int, ...]:
    return ranked[0]


def _kind_of(node: NodeView) -> _Kind:
    return _Kind(node.healthy & ~node.held_mask, node.groups)


def _scalars_of(node: NodeView) -> tuple[int, int, int]:
    return node.vcpus - node.vcpus_held, node.memory_mib - node.memory_mib_held, node.node_id


def _take_out(lists: dict[K, list[V]], key: K, value: V) -> None:
    """Remove a value from one of the sorted lists; an empty list goes."""
    values = lists[key]
    del values[bisect_left(values, value)]
    if not values:
        del lists[key]
