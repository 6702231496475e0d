"""A pool's nodes in memory, kept ranked for all requests and for each selector that is in use.

A request with a selector is planned on a ranking of the nodes that match it alone. That ranking is made when the
selector is first used, from the nodes that have its labels, and kept current with the others; those that nobody has
used for longest are forgotten. So a selector costs no more than none, however few of the nodes match it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controlplane.model.labels import LabelIndex, selects
from controlplane.model.planner import Plan, plan_placement
from controlplane.model.ranking import NodeRanking

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from datetime import datetime

    from controlplane.model.fit import Fit
    from controlplane.model.labels import Selector
    from controlplane.model.nodeview import NodeView
    from controlplane.model.planner import NoPlan
    from controlplane.model.refusals import Impossible
    from controlplane.model.requests import PlacementRequest

# Selectors whose nodes are kept ranked, and how many nodes they may have between them for each that the pool has: each
# is one more place in which a node that changes is filed.
SELECTORS_MAX: Final = 64
SELECTED_PER_NODE_MAX: Final = 4

_NOBODY: Final[frozenset[int]] = frozenset()


class PoolIndex:
    """Plans requests of one pool; a `planner.Placer`. Nodes are put in, replaced and taken out as the ledger changes.

    Not safe for threads: whoever shares one brings a lock.
    """

    def __init__(self, nodes: Iterable[NodeView] = ()) -> None:
        self._all = NodeRanking()
        self._labels = LabelIndex()
        # The one used last is last; `_all` for a selector that matches every node.
        self._selected: dict[Selector, NodeRanking] = {}
        for node in nodes:
            self.put(node)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def selectors(self) -> dict[Selector, int]:
        """The selectors whose nodes are kept ranked, and how many nodes each has."""
        return {selector: len(ranking) for selector, ranking in self._selected.items()}

    def nodes(self) -> Sequence[NodeView]:
        """Every node, placeable or not."""
        return self._all.nodes()

    def pick(self, node_ids: Iterable[int]) -> Sequence[NodeView]:
        """Those of these nodes that are known."""
        return self._all.pick(node_ids)

    # --- what is known ---------------------------------------------------------------------------

    def put(self, node: NodeView) -> None:
        """Add the node, or replace what was known of it."""
        self._all.put(node)
        self._labels.put(node.node_id, node.labels)
        for selector, ranking in list(self._selected.items()):
            matches = selects(selector, node.labels)
            if ranking is self._all:
                if not matches:
                    del self._selected[selector]
            elif matches:
                ranking.put(node)
            else:
                ranking.remove(node.node_id)

    def remove(self, node_id: int) -> None:
        """Forget the node, if it is known."""
        self._labels.remove(node_id)
        for ranking in (self._all, *self._selected.values()):
            ranking.remove(node_id)

    def book(self, plan: Plan, *, only: Collection[int] | None = None) -> None:
        """Count a plan as booked (and held, if it starts now), so that the next one is made around it.

        Args:
            only: the nodes to count it on, which were put in anew since it was booked.
        """
        for ranking in self._rankings():
            ranking.book(plan, only)

    def unbook(self, plan: Plan) -> None:
        """Take back what `book` counted of a plan for later."""
        for ranking in self._rankings():
            ranking.unbook(plan)

    def forget_starts(self) -> None:
        """Keep what `plan_earliest` has found out for a few requests alone: every change is noted for each."""
        for ranking in self._rankings():
            ranking.forget_starts()

    def _rankings(self) -> list[NodeRanking]:
        return [self._all, *(ranking for ranking in self._selected.values() if ranking is not self._all)]

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
        """As `planner.plan_placement`, on none of the nodes in `without`.

        Args:
            busy: nodes that somebody is placing on at this moment: whoever comes second waits for the first one's
                commit, so another node that is as good is taken.
        """
        return self._ranking(request.selector).plan(request, now, horizon, without=without, busy=busy)

    def find(self, request: PlacementRequest, now: datetime) -> Plan | None:
        """As `plan`, without a word on why there is none."""
        return self._ranking(request.selector).find(request, now)

    def find_on(self, node_ids: Iterable[int], request: PlacementRequest, now: datetime) -> Plan | None:
        """As `find`, on these nodes alone."""
        plan = plan_placement(request, self._all.pick(node_ids), now, None)
        return plan if isinstance(plan, Plan) else None

    def plan_earliest(self, request: PlacementRequest, now: datetime, horizon: datetime) -> Plan | None:
        """The plan for the earliest known start of a request that `plan` refuses; None if there is none."""
        return self._ranking(request.selector).plan_earliest(request, now, horizon)

    def why_impossible(self, request: PlacementRequest) -> Impossible | None:
        """As `refusals.why_impossible`; remembered until the inventory changes."""
        return self._ranking(request.selector).why_impossible(request)

    def candidates(
        self, request: PlacementRequest, now: datetime, *, without: Collection[int] = _NOBODY
    ) -> Iterator[Fit]:
        """The nodes that take a part of the request, best first, each once."""
        return self._ranking(request.selector).candidates(request, now, without=without)

    def _ranking(self, selector: Selector) -> NodeRanking:
        """The nodes that match."""
        if not selector:
            return self._all
        ranking = self._selected.pop(selector, None)
        if ranking is None:
            ranking = self._rank(selector)
        self._selected[selector] = ranking
        return ranking

    def _rank(self, selector: Selector) -> NodeRanking:
        node_ids = self._labels.find(selector)
        everybody = len(node_ids) == len(self._all)
        nodes = 0 if everybody else len(node_ids)
        nodes += sum(len(ranking) for ranking in self._selected.values() if ranking is not self._all)
        while self._selected and (
            len(self._selected) >= SELECTORS_MAX or nodes > SELECTED_PER_NODE_MAX * len(self._all)
        ):
            gone = self._selected.pop(next(iter(self._selected)))
            nodes -= 0 if gone is self._all else len(gone)
        return self._all if everybody else NodeRanking(self._all.pick(node_ids))
