"""Nodes kept ranked in memory, so that a placement looks at a few of them.

For requests that start now they are ordered by what is certain at every instant: their inventory and what is
physically held. No placement can take more than that, so nothing here grows old by itself. Nodes with the same free
slots and the same NVLink sets are one *kind*; a request ranks kinds, of which a fleet has few, once for its shape, and
takes nodes of the best kind that has any. Within a kind, nodes are ordered by the next booking of a free slot: those
whose next booking comes after the request's end take it for certain, and the one with the tightest gap is taken, so
that long requests still find the others. Requests without GPUs walk nodes by free vCPUs, those for parts
of shared GPUs walk the nodes that share some by how many are free.

For requests that start later every node is *idle* from the end of its last booking, and *busy* on the days that a
booking touches. A request looks at busy nodes that may have just enough left that day (a bounded shortlist, tightest
first) and at nodes that are idle by then (the one that became so last), and takes the best of both.

Both are shortcuts: when they do not find enough, every node is looked at, so a request that fits is always placed. What
was found not to fit is remembered until something becomes free.

Every node that is offered has been checked by `fit_node`, so a plan is right for the views that there are. That
they are old costs a new plan, never a double booking.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import replace
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, TypeVar

from controlplane.model.earliest import FirstStarts, find_earliest
from controlplane.model.filing import DAY, EVER_AFTER, file_ahead, file_node
from controlplane.model.fit import fit_node, request_window
from controlplane.model.instants import to_datetime, to_end, to_instant
from controlplane.model.kinds import Kind, RankedKind, Shape, kind_of, rank_kind
from controlplane.model.planner import Plan, plan_nothing, plan_parts
from controlplane.model.refusals import why_impossible
from controlplane.model.taken import with_part, without_part

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
    from datetime import datetime

    from controlplane.model.filing import Filed, FiledAhead
    from controlplane.model.fit import Asked, Fit
    from controlplane.model.nodeview import NodeView
    from controlplane.model.planner import NoPlan
    from controlplane.model.refusals import Impossible
    from controlplane.model.requests import PlacementRequest

# Nodes that are looked at for one that nobody is placing on at this moment, and equal nodes of which one may be broken
# up for that, although there is one that is broken up already.
BUSY_TRIES_MAX: Final = 64
PLENTY: Final = 64
# Nodes of one kind that are checked before the next kind's turn: only vCPUs, memory and excluded nodes make one fail.
TRIES_PER_KIND: Final = 32
# Busy nodes that a later request looks at, and of those that fit, how many are compared. Some 0.2 ms.
BUSY_LOOKS_MAX: Final = 256
BUSY_FITS_MAX: Final = 48
# Nodes that a request for parts of shared GPUs looks at before it looks at every node.
PARTS_LOOKS_MAX: Final = 256
# Shapes of requests whose ranking of kinds is kept, and requests that are known not to fit: users ask for a few.
SHAPES_MAX: Final = 256
# Kinds that are kept ranked though no node is of them now.
KINDS_MAX: Final = 4096

# For how many requests first starts are kept from one pass to the next.
STARTS_KEPT: Final = 8

# Nothing becomes free by time alone, except that a booking passes of which nothing was ever held.
REFUSAL_LIFE: Final = 5_000_000

# Parts of a rank that say how good the GPUs are, before best fit: sets touched, complete sets broken.
_QUALITY: Final = slice(0, 2)
_NOBODY: Final[frozenset[int]] = frozenset()

K = TypeVar("K")
V = TypeVar("V")
C = TypeVar("C", tuple[int, int], tuple[int, int, int])


class NodeRanking:
    """Plans requests whose selector, if they have one, matches every node that is in here; a `planner.Placer`."""

    def __init__(self, nodes: Iterable[NodeView] = ()) -> None:
        self._nodes: dict[int, NodeView] = {}
        self._filed: dict[int, Filed] = {}
        # (start of the next booking of a free slot, node id) of each kind, ascending.
        self._now: dict[Kind, list[tuple[int, int]]] = {}
        # Kinds by rank for each shape, kinds without nodes too: they come back.
        self._ranked: dict[Shape, list[RankedKind]] = {}
        # For each number of free GPUs: (free vCPUs, free memory, node id), ascending.
        self._scalars: dict[int, list[tuple[int, int, int]]] = {}
        # Nodes for requests that start later. More than half of what filing a node takes, so nobody does it for a pool
        # that nobody books ahead; None until somebody does.
        self._ahead: dict[int, FiledAhead] | None = None
        # Of healthy slots and sets: (minus the end of the last booking, node id), ascending.
        self._idle: dict[Kind, list[tuple[int, int]]] = {}
        # Of each day (`EVER_AFTER`: open-ended): (healthy slots not booked on it, node id), ascending.
        self._busy: dict[int, list[tuple[int, int]]] = {}
        # Of each class of parts: (how many are not held, node id), ascending.
        self._parts: dict[str, list[tuple[int, int]]] = {}
        self._refused: dict[Hashable, tuple[int, NoPlan]] = {}
        self._starts: dict[PlacementRequest, FirstStarts] = {}
        self._possible: dict[PlacementRequest, Impossible | None] = {}
        for node in nodes:
            self.put(node)

    def __len__(self) -> int:
        return len(self._nodes)

    # --- what is known ---------------------------------------------------------------------------

    def put(self, node: NodeView) -> None:
        """Add the node, or replace what was known of it."""
        known = self._nodes.get(node.node_id)
        if known is None or _inventory(known) != _inventory(node):
            self._possible.clear()
        self._put_freed(node)

    def remove(self, node_id: int) -> None:
        """Forget the node, if it is known."""
        if node_id in self._nodes:
            self._refused.clear()
            self._possible.clear()
            self._unfile(node_id)
            del self._nodes[node_id]

    def book(self, plan: Plan, only: Collection[int] | None = None) -> None:
        """Count a plan as booked (and held, if it starts now) on those of its nodes that are known here."""
        start, end = to_instant(plan.window.start), to_end(plan.window.end)
        for part in plan.parts:
            node = self._nodes.get(part.node_id)
            if node is not None and (only is None or part.node_id in only):
                self._put(with_part(node, part, start, end, held=plan.starts_now))

    def _put_freed(self, node: NodeView) -> None:
        """As `_put`, for a node of which something may be free that was not: what has been found out may be wrong."""
        self._refused.clear()
        self._put(node)
        for starts in self._starts.values():
            starts.put(node)

    def _put(self, node: NodeView) -> None:
        self._unfile(node.node_id)
        self._nodes[node.node_id] = node
        if node.placeable:
            self._file(node)

    def _file(self, node: NodeView) -> None:
        node_id, filed = node.node_id, file_node(node)
        self._filed[node_id] = filed
        if filed.kind not in self._now:
            self._rank_new(filed.kind)
        insort(self._now[filed.kind], (filed.next_booking, node_id))
        insort(self._scalars.setdefault(filed.kind.free.bit_count(), []), filed.scalars)
        if self._ahead is not None:
            self._ahead[node_id] = self._file_ahead(node)
        for device_class, count in filed.parts.items():
            insort(self._parts.setdefault(device_class, []), (count, node_id))

    def _unfile(self, node_id: int) -> None:
        filed = self._filed.pop(node_id, None)
        if filed is None:
            return
        kind = filed.kind
        _take_out(self._now[kind], (filed.next_booking, node_id))
        _take_out(self._scalars[kind.free.bit_count()], filed.scalars)
        if self._ahead is not None:
            ahead = self._ahead.pop(node_id)
            _take_out(self._idle[ahead.kind], ahead.idle)
            for day, left in ahead.days.items():
                nodes = self._busy[day]
                _take_out(nodes, (left, node_id))
                if not nodes:
                    del self._busy[day]
        for device_class, count in filed.parts.items():
            _take_out(self._parts[device_class], (count, node_id))

    def _file_ahead(self, node: NodeView) -> FiledAhead:
        ahead = file_ahead(node)
        insort(self._idle.setdefault(ahead.kind, []), ahead.idle)
        for day, left in ahead.days.items():
            insort(self._busy.setdefault(day, []), (left, node.node_id))
        return ahead

    # --- planning --------------------------------------------------------------------------------

    def plan(
        self,
        request: PlacementRequest,
        now: datetime,
        horizon: datetime | None,
        *,
        without: Collection[int] = _NOBODY,
        busy: Collection[int] = _NOBODY,
    ) -> Plan | NoPlan:
        """As `planner.plan_placement`, on none of the nodes in `without`, and rather not on those that are `busy`."""
        asked = request_window(request, now)
        if self._refused and not without and (refused := self._recall(request, asked, horizon)) is not None:
            return refused
        plan = self._find(request, asked, without, busy)
        if plan is not None:
            return plan
        if without:
            nodes = [node for node in self.nodes() if node.node_id not in without]
            return plan_nothing(request, nodes, now, horizon, nodes)
        refused = plan_nothing(request, self.nodes(), now, horizon, self._telling(request, asked))
        _remember(self._refused, _refusal_key(request, asked, horizon), (asked.start, refused))
        return refused

    def find(self, request: PlacementRequest, now: datetime) -> Plan | None:
        """As `plan`, without a word on why there is none."""
        return self._find(request, request_window(request, now), _NOBODY, _NOBODY)

    def _find(
        self, request: PlacementRequest, asked: Asked, without: Collection[int], busy: Collection[int]
    ) -> Plan | None:
        seen = set(without)
        likely = self._likely(request, asked, seen, spare=min(len(busy), BUSY_TRIES_MAX))
        best = list(islice(chain(likely, self._others(request, asked, seen)), request.nodes))
        if len(best) < request.nodes:
            return None
        if busy and request.nodes == 1 and best[0].node.node_id in busy:
            best = [self._away_from(busy, best[0], islice(likely, BUSY_TRIES_MAX))]
        return plan_parts(request, best, asked)

    def _away_from(self, busy: Collection[int], best: Fit, others: Iterable[Fit]) -> Fit:
        """A node that is not busy, and as good but for best fit, or one of so many that it is no loss."""
        for fit in others:
            if fit.rank[:1] != best.rank[:1]:
                break
            if fit.node.node_id not in busy and (
                fit.rank[_QUALITY] == best.rank[_QUALITY] or len(self._now[kind_of(fit.node)]) >= PLENTY
            ):
                return fit
        return best

    def _recall(self, request: PlacementRequest, asked: Asked, horizon: datetime | None) -> NoPlan | None:
        since, refused = self._refused.get(_refusal_key(request, asked, horizon), (0, None))
        return None if asked.starts_now and asked.start >= since + REFUSAL_LIFE else refused

    def plan_earliest(self, request: PlacementRequest, now: datetime, horizon: datetime) -> Plan | None:
        """The plan for the earliest known start of a request that `plan` refuses; None if there is none.

        What was found for one request is kept for those like it, also of the next passes; see `forget_starts`.
        """
        if request.nodes == 1:
            return self._plan_earliest_of_one(request, now, horizon)
        start = find_earliest(request, self._nodes.values(), now, horizon)
        if start is None:
            return None
        asked = request_window(replace(request, start=start), now)
        best = list(islice(self._candidates(request, asked, _NOBODY), request.nodes))
        return plan_parts(request, best, asked) if len(best) == request.nodes else None

    def _plan_earliest_of_one(self, request: PlacementRequest, now: datetime, horizon: datetime) -> Plan | None:
        starts = self._starts.get(request)
        if starts is None or starts.is_worn(now):
            starts = FirstStarts(request, self._nodes.values(), now, horizon)
            _remember(self._starts, request, starts)
        found = starts.find(self._nodes.get, now, horizon)
        if found is None:
            return None
        start, node_id = found
        asked = request_window(replace(request, start=to_datetime(start)), now)
        fit = fit_node(request, self._nodes[node_id], asked)
        return None if fit is None else plan_parts(request, [fit], asked)

    def forget_starts(self) -> None:
        """Keep first starts of a few requests alone: every node that changes is filed for each."""
        for request in list(self._starts)[:-STARTS_KEPT]:
            del self._starts[request]

    def unbook(self, plan: Plan) -> None:
        """Take back what `book` counted of a plan for later."""
        start, end = to_instant(plan.window.start), to_end(plan.window.end)
        for part in plan.parts:
            node = self._nodes.get(part.node_id)
            if node is not None:
                self._put_freed(without_part(node, part, start, end))

    def why_impossible(self, request: PlacementRequest) -> Impossible | None:
        """As `refusals.why_impossible`, on every node; remembered until the inventory changes."""
        shape = replace(request, start=None, duration=None)
        if shape not in self._possible:
            _remember(self._possible, shape, why_impossible(shape, self.nodes()))
        return self._possible[shape]

    def pick(self, node_ids: Iterable[int]) -> list[NodeView]:
        """Those of these nodes that are known."""
        return [node for node_id in node_ids if (node := self._nodes.get(node_id)) is not None]

    def nodes(self) -> Sequence[NodeView]:
        """Every node, placeable or not."""
        return list(self._nodes.values())

    def candidates(
        self, request: PlacementRequest, now: datetime, *, without: Collection[int] = _NOBODY
    ) -> Iterator[Fit]:
        """The nodes that take a part of the request, best first, each once."""
        return self._candidates(request, request_window(request, now), without)

    def _candidates(self, request: PlacementRequest, asked: Asked, without: Collection[int]) -> Iterator[Fit]:
        seen = set(without)
        yield from self._likely(request, asked, seen)
        yield from self._others(request, asked, seen)

    def _likely(self, request: PlacementRequest, asked: Asked, seen: set[int], *, spare: int = 0) -> Iterator[Fit]:
        """What a look at a few nodes finds that was not `seen`: at best `spare` more than are asked for."""
        if request.parts:
            fits = self._by_parts(request, asked)
        elif asked.starts_now:
            fits = self._likely_now(request, asked)
        else:
            fits = self._likely_later(request, asked, spare)
        for fit in fits:
            if fit.node.node_id not in seen:
                seen.add(fit.node.node_id)
                yield fit

    def _others(self, request: PlacementRequest, asked: Asked, seen: Collection[int]) -> Iterator[Fit]:
        """All that are left, best first."""
        fits = (fit_node(request, self._nodes[id_], asked) for id_ in self._able(request, asked) if id_ not in seen)
        yield from sorted((fit for fit in fits if fit is not None), key=_rank_of)

    def _able(self, request: PlacementRequest, asked: Asked) -> Collection[int]:
        """All nodes but those of which it is certain that they do not fit."""
        if request.gpus_per_node and asked.starts_now:
            return [node_id for ranked in self._rank(request) for _, node_id in self._now.get(ranked.kind, ())]
        return self._nodes

    def _telling(self, request: PlacementRequest, asked: Asked) -> Sequence[NodeView]:
        """Those of the nodes of which a refusal says the same as of all: often a few."""
        if not (asked.starts_now and request.gpus_per_node and self._filed):
            return self.nodes()
        if request.nodes > 1 or request.whole_node:
            # how many fit is counted; one that does not is still better than none
            return [self._nodes[node_id] for node_id in self._able(request, asked) or [next(iter(self._filed))]]
        return self._roomiest(request, asked) or self.nodes()

    def _roomiest(self, request: PlacementRequest, asked: Asked) -> Sequence[NodeView] | None:
        """Nodes among which is the one with most free GPUs; None if it has enough."""
        nodes: list[NodeView] = []
        most = -1
        # by how many are not held, of which some may be booked
        for unheld, filed in sorted(self._scalars.items(), reverse=True):
            if unheld <= most:
                break
            for *_, node_id in filed:
                node = self._nodes[node_id]
                nodes.append(node)
                most = max(most, (node.healthy & ~node.held & ~node.booked_in(asked.start, asked.end)).bit_count())
                if most >= request.gpus_per_node:
                    return None
                if most == unheld:
                    break
        return nodes

    def _likely_now(self, request: PlacementRequest, asked: Asked) -> Iterator[Fit]:
        if not request.gpus_per_node:
            yield from self._by_scalars(request, asked)
            return
        for ranked in self._rank(request):
            nodes = self._now.get(ranked.kind)
            if not nodes:
                continue
            first = bisect_left(nodes, (asked.end, -1))
            # a copy: the caller may book between two looks
            for _, node_id in nodes[first : first + TRIES_PER_KIND + request.nodes]:
                fit = fit_node(request, self._nodes[node_id], asked)
                if fit is not None:
                    yield fit

    def _by_parts(self, request: PlacementRequest, asked: Asked) -> Iterator[Fit]:
        """Of the nodes with the class that fewest have, those with just enough of it, or with most."""
        rarest = min(request.parts, key=lambda ask: len(self._parts.get(ask.device_class, ())))
        nodes = self._parts.get(rarest.device_class, [])
        # what is held now may be free in a later window
        enough = nodes[bisect_left(nodes, (rarest.count, -1)) :] if asked.starts_now else nodes[:]
        if request.strategy == "spread":
            enough.reverse()
        fits: list[Fit] = []
        for _, node_id in enough[:PARTS_LOOKS_MAX]:
            fit = fit_node(request, self._nodes[node_id], asked)
            if fit is not None:
                fits.append(fit)
            if len(fits) == BUSY_FITS_MAX + request.nodes:
                break
        yield from sorted(fits, key=_rank_of)

    def _by_scalars(self, request: PlacementRequest, asked: Asked) -> Iterator[Fit]:
        if request.strategy == "spread":
            yield from self._by_most_scalars(request, asked)
            return
        for _, nodes in sorted(self._scalars.items()):
            for i in range(bisect_left(nodes, (request.vcpus_per_node, 0, 0)), len(nodes)):
                fit = fit_node(request, self._nodes[nodes[i][2]], asked)
                if fit is not None:
                    yield fit

    def _by_most_scalars(self, request: PlacementRequest, asked: Asked) -> Iterator[Fit]:
        for vcpus, _, node_id in merge(*map(reversed, self._scalars.values()), reverse=True):
            if vcpus < request.vcpus_per_node:
                return
            fit = fit_node(request, self._nodes[node_id], asked)
            if fit is not None:
                yield fit

    def _likely_later(self, request: PlacementRequest, asked: Asked, spare: int) -> Iterator[Fit]:
        if not request.gpus_per_node:
            yield from sorted(islice(self._by_scalars(request, asked), BUSY_FITS_MAX + request.nodes), key=_rank_of)
            return
        if self._ahead is None:
            self._ahead = {node_id: self._file_ahead(self._nodes[node_id]) for node_id in self._filed}
        fits = [] if request.whole_node else self._busy_fits(request, asked)
        enough = request.nodes + spare
        for ranked in self._rank(request, idle=True):
            nodes = self._idle.get(ranked.kind)
            if not nodes:
                continue
            first = bisect_left(nodes, (-asked.start, -1))
            found = 0
            for _, node_id in nodes[first : first + TRIES_PER_KIND + enough]:
                fit = fit_node(request, self._nodes[node_id], asked)
                if fit is not None:
                    fits.append(fit)
                    found += 1
                if found == enough:
                    break
            if found == enough:
                break
        yield from sorted(fits, key=_rank_of)

    def _busy_fits(self, request: PlacementRequest, asked: Asked) -> list[Fit]:
        fits: dict[int, Fit] = {}
        looks = 0
        for day in (asked.start // DAY, EVER_AFTER):
            nodes = self._busy.get(day, [])
            enough = nodes[bisect_left(nodes, (request.gpus_per_node, -1)) :]
            if request.strategy == "spread":
                enough.reverse()
            for _, node_id in enough[:BUSY_LOOKS_MAX]:
                if looks == BUSY_LOOKS_MAX or len(fits) == BUSY_FITS_MAX + request.nodes:
                    break
                looks += 1
                fit = None if node_id in fits else fit_node(request, self._nodes[node_id], asked)
                if fit is not None:
                    fits[node_id] = fit
        return list(fits.values())

    # --- ranking ---------------------------------------------------------------------------------

    def _rank(self, request: PlacementRequest, *, idle: bool = False) -> list[RankedKind]:
        shape = Shape(
            request.gpus_per_node, request.topology == "nvlink-all", request.whole_node, request.strategy == "spread"
        )
        if idle:
            # healthy slots and sets: a handful
            return sorted(ranked for kind in self._idle if (ranked := rank_kind(shape, kind)))
        ranked = self._ranked.get(shape)
        if ranked is None:
            ranked = sorted(found for kind in self._now if (found := rank_kind(shape, kind)))
            _remember(self._ranked, shape, ranked)
        return ranked

    def _rank_new(self, kind: Kind) -> None:
        if len(self._now) >= KINDS_MAX:
            self._now = {known: nodes for known, nodes in self._now.items() if nodes}
            self._ranked.clear()
        self._now[kind] = []
        for shape, ranked in self._ranked.items():
            found = rank_kind(shape, kind)
            if found is not None:
                insort(ranked, found)


def _inventory(node: NodeView) -> tuple[object, ...]:
    shared = None if node.shared is None else frozenset((*node.shared.parts, *node.shared.sick))
    return node.present, node.groups, node.vcpus, node.memory_mib, shared


def _refusal_key(request: PlacementRequest, asked: Asked, horizon: datetime | None) -> Hashable:
    """Two requests with the same key are answered alike as long as nothing becomes free."""
    start = None if asked.starts_now else asked.start
    return replace(request, start=None), start, horizon is None


def _remember(memory: dict[K, V], key: K, value: V) -> None:
    """Keep an answer, and forget the oldest one if there are too many."""
    if len(memory) >= SHAPES_MAX:
        del memory[next(iter(memory))]
    memory[key] = value


def _rank_of(fit: Fit) -> tuple[int, ...]:
    return fit.rank


def _take_out(values: list[C], value: C) -> None:
    del values[bisect_left(values, value)]
