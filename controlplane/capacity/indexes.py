"""The placement indexes of a process: one a pool, read from the ledger and kept up with it.

An index is loaded at the first placement of its pool. From then on a placement finds it at most
`CATCH_UP` behind: one statement names the nodes that changed since the last look (triggers note
them), and those alone are read again. Before anybody is told no, the index is brought up to this very
moment.

A plan counts as booked in the index from the moment it is made, before its transaction has written
anything, so that requests that are placed at once do not choose the same GPUs. If the transaction
does not commit, or nobody knows, the plan's nodes are read again (`Tx.on_rollback`).

Nothing here guards anything. An index that is old, wrong or lost costs a new plan in a new
transaction: the constraints decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final

from controlplane.db.placements import load_changes
from controlplane.db.views import load_node_views
from controlplane.model.index import PoolIndex
from controlplane.model.planner import NoPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from controlplane.model.planner import Plan
    from controlplane.model.refusals import Impossible
    from controlplane.model.requests import PlacementRequest

# Four looks a second at a busy pool, of a fraction of a millisecond each.
CATCH_UP: Final = timedelta(milliseconds=250)
# Half of what housekeeping keeps of the changes, so that no look can miss one.
FORGET_AFTER: Final = timedelta(minutes=5)
# Beyond this, reading all nodes costs no more than reading so many by their ids.
RELOAD_NODES: Final = 2_000

_NOBODY: Final[frozenset[int]] = frozenset()


@dataclass(slots=True)
class _Pool:
    lock: Lock = field(default_factory=Lock)
    index: PoolIndex | None = None
    looked_at: datetime | None = None
    position: int | None = None
    # (transaction, node) pairs that need no look: their change is in the index, or has been read
    known: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    stale: set[int] = field(default_factory=set[int])
    # nodes whose specs cannot take another allocation, until they change
    shut: set[int] = field(default_factory=set[int])


class PoolIndexes:
    """What a process knows of its pools. Made once; safe for threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pools: dict[int, _Pool] = {}

    def plan(
        self,
        tx: Tx,
        pool_id: int,
        request: PlacementRequest,
        now: datetime,
        *,
        horizon: datetime | None = None,
        without: Collection[int] = _NOBODY,
    ) -> Plan | NoPlan:
        """Plan a request and count it as booked, unless and until the transaction is rolled back.

        Args:
            horizon: the latest start that a refusal may name as the earliest; None leaves it out.
            without: nodes not to plan on.
        """
        pool = self._pool(pool_id)
        with pool.lock:
            fresh = self._catch_up(tx, pool_id, pool, now)
            made = _index(pool).plan(request, now, horizon, without={*pool.shut, *without})
            if isinstance(made, NoPlan) and not fresh and self._read_changes(tx, pool_id, pool, now):
                made = _index(pool).plan(request, now, horizon, without={*pool.shut, *without})
            if not isinstance(made, NoPlan):
                _index(pool).book(made)
                tx.on_rollback(partial(self.doubt, pool_id, [part.node_id for part in made.parts]))
            return made

    def plan_all(
        self, tx: Tx, pool_id: int, requests: Iterable[PlacementRequest], now: datetime, *, horizon: datetime | None
    ) -> list[Plan | NoPlan]:
        """Plan requests one after another on the pool as it is at this moment, each around those before it."""
        pool = self._pool(pool_id)
        with pool.lock:
            index = self._up_to_now(tx, pool_id, pool, now)
            made: list[Plan | NoPlan] = []
            touched: set[int] = set()
            tx.on_rollback(partial(self.doubt, pool_id, touched))
            for request in requests:
                plan = index.plan(request, now, horizon, without=pool.shut)
                made.append(plan)
                if not isinstance(plan, NoPlan):
                    index.book(plan)
                    touched |= {part.node_id for part in plan.parts}
            return made

    def nodes(self, tx: Tx, pool_id: int, now: datetime) -> Sequence[NodeView]:
        """Every node of a pool as it is at this moment, those that may not be placed on too."""
        pool = self._pool(pool_id)
        with pool.lock:
            return self._up_to_now(tx, pool_id, pool, now).nodes()

    def look(
        self, tx: Tx, pool_id: int, request: PlacementRequest, now: datetime, *, horizon: datetime | None
    ) -> Plan | NoPlan:
        """Plan a request that nobody is going to book."""
        pool = self._pool(pool_id)
        with pool.lock:
            return self._up_to_now(tx, pool_id, pool, now).plan(request, now, horizon)

    def doubt(self, pool_id: int, node_ids: Iterable[int]) -> None:
        """Have these nodes read again before the next plan: what the index has of them may be wrong."""
        pool = self._pool(pool_id)
        with pool.lock:
            pool.stale.update(node_ids)

    def shut(self, pool_id: int, node_id: int) -> None:
        """Plan nothing on this node until something of it changes: its spec is full."""
        pool = self._pool(pool_id)
        with pool.lock:
            pool.shut.add(node_id)

    def why_impossible(self, tx: Tx, pool_id: int, request: PlacementRequest, now: datetime) -> Impossible | None:
        """As `refusals.why_impossible`, of the whole pool."""
        pool = self._pool(pool_id)
        with pool.lock:
            return self._up_to_now(tx, pool_id, pool, now).why_impossible(request)

    def note_own(self, pool_id: int, xid: int, node_ids: Iterable[int]) -> None:
        """All that this transaction changes of these nodes are plans that are in the index already."""
        pool = self._pool(pool_id)
        with pool.lock:
            pool.known.update((xid, node_id) for node_id in node_ids)

    def _pool(self, pool_id: int) -> _Pool:
        with self._lock:
            return self._pools.setdefault(pool_id, _Pool())

    # --- keeping up: all with the pool's lock ------------------------------------------------------

    def _up_to_now(self, tx: Tx, pool_id: int, pool: _Pool, now: datetime) -> PoolIndex:
        if not self._catch_up(tx, pool_id, pool, now):
            self._read_changes(tx, pool_id, pool, now)
        return _index(pool)

    def _catch_up(self, tx: Tx, pool_id: int, pool: _Pool, now: datetime) -> bool:
        """Load the index, or bring it up to date if it is time to. Says whether it is of this moment."""
        if pool.index is None or pool.looked_at is None or now - pool.looked_at > FORGET_AFTER:
            self._load(tx, pool_id, pool, now)
            return True
        # a clock that was set back makes for one look too many
        if not timedelta() <= now - pool.looked_at < CATCH_UP:
            self._read_changes(tx, pool_id, pool, now)
            return True
        if pool.stale:
            self._read_nodes(tx, pool_id, pool)
        return False

    def _load(self, tx: Tx, pool_id: int, pool: _Pool, now: datetime) -> None:
        # the position first: what commits between the two is read twice, and nothing is missed
        pool.position = load_changes(tx, pool_id, None).position
        pool.index = PoolIndex(load_node_views(tx, pool_id))
        pool.known.clear()
        pool.stale.clear()
        pool.looked_at = now
        tx.on_rollback(partial(self._drop, pool))

    def _read_changes(self, tx: Tx, pool_id: int, pool: _Pool, now: datetime) -> bool:
        """Read what has changed since the last look; says whether anything has."""
        changes = load_changes(tx, pool_id, pool.position)
        news = {node_id for _, node_id in changes.nodes - pool.known}
        pool.stale |= news
        pool.shut -= news
        if pool.stale:
            self._read_nodes(tx, pool_id, pool)
        seen = {pair for pair in changes.nodes if pair[0] != changes.own}
        pool.known = {pair for pair in pool.known | seen if pair[0] >= changes.position}
        pool.position, pool.looked_at = changes.position, now
        return bool(news)

    def _read_nodes(self, tx: Tx, pool_id: int, pool: _Pool) -> None:
        if len(pool.stale) > RELOAD_NODES:
            pool.index = PoolIndex(load_node_views(tx, pool_id))
            tx.on_rollback(partial(self._drop, pool))
        else:
            views = load_node_views(tx, pool_id, sorted(pool.stale))
            for node_id in pool.stale - {view.node_id for view in views}:
                _index(pool).remove(node_id)
            for view in views:
                _index(pool).put(view)
            # a transaction sees what it wrote itself, and may take it back
            tx.on_rollback(partial(self.doubt, pool_id, frozenset(pool.stale)))
        pool.stale.clear()

    def _drop(self, pool: _Pool) -> None:
        with pool.lock:
            pool.index = None


def _index(pool: _Pool) -> PoolIndex:
    assert pool.index is not None, "loaded when it was caught up"
    return pool.index
