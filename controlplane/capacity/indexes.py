"""The placement indexes of a process: one a pool, read from the ledger and kept up with it.

An index is loaded at the first placement of its pool. From then on a placement finds it at most
`CATCH_UP` behind: one statement names the nodes that changed since the last look (triggers note
them), and those alone are read again. Before anybody is told no, the index is brought up to this very
moment.

A plan counts as booked in the index from the moment it is made, before its transaction has written
anything, so that requests that are placed at once do not choose the same GPUs; nor the same node, if
another is as good, because the second would wait for the first one's commit. If the transaction does
not commit, or nobody knows, the plan's nodes are read again (`Tx.on_end`).

Nothing here guards anything. An index that is old, wrong or lost costs a new plan in a new
transaction: the constraints decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import islice
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Final

from controlplane.db.placements import load_changes
from controlplane.db.views import load_node_views
from controlplane.model.behind import keep_places
from controlplane.model.index import PoolIndex
from controlplane.model.planner import NoPlan
from controlplane.model.queueing import GANGS_LOOKED_FOR_MAX, Gangs
from controlplane.model.refusals import PendingReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from controlplane.model.planner import Plan
    from controlplane.model.queueing import Turn
    from controlplane.model.refusals import Impossible
    from controlplane.model.requests import PlacementRequest

# Four looks a second at a busy pool, of a fraction of a millisecond each.
CATCH_UP: Final = timedelta(milliseconds=250)
# Half of what housekeeping keeps of the changes, so that no look can miss one.
FORGET_AFTER: Final = timedelta(minutes=5)
# Nodes that a pass looks at for first starts of requests of one node, which is all of them for each shape: a second.
# Those behind whose shape is another are told no start, and keep no place.
NODES_LOOKED_AT_MAX: Final = 200_000
# Planning is part of a transaction, and of one that has 5 s in all. What is not planned by then has its turn later.
PLANNING_S: Final = 2.0
# Beyond this, reading all nodes costs no more than reading so many by their ids.
RELOAD_NODES: Final = 2_000

_NOBODY: Final[frozenset[int]] = frozenset()


@dataclass(slots=True)
class _Open:
    """The plans of a transaction that has not ended, and those of their nodes that were read since they were made.

    Nobody can say whether such a node was read with what the transaction has written or without.
    """

    plans: list[Plan] = field(default_factory=list["Plan"])
    reread: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Pool:
    lock: Lock = field(default_factory=Lock)
    index: PoolIndex | None = None
    looked_at: datetime | None = None
    position: int | None = None
    # (transaction, node) pairs that need no look: their change is in the index, or has been read
    known: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    # nodes to read again: those that have changed, and of these, those of which nothing may be taken from what is known
    stale: set[int] = field(default_factory=set[int])
    doubted: set[int] = field(default_factory=set[int])
    # nodes whose specs cannot take another allocation, until they change
    shut: set[int] = field(default_factory=set[int])
    # by the transaction
    open: dict[int, _Open] = field(default_factory=dict[int, _Open])
    # in a pass: plans of those ahead who cannot start yet, shapes of requests for which a start was looked for, and
    # those for which none is known
    kept: list[Plan] = field(default_factory=list["Plan"])
    looked_for: set[PlacementRequest] = field(default_factory=set["PlacementRequest"])
    endless: set[PlacementRequest] = field(default_factory=set["PlacementRequest"])
    gangs: Gangs = field(default_factory=Gangs)

    def is_cold(self, now: datetime) -> bool:
        """Whether the index has to be loaded: it was not, or it has not been looked at for so long."""
        return self.index is None or self.looked_at is None or now - self.looked_at > FORGET_AFTER

    def doubt(self, node_ids: Iterable[int]) -> None:
        """Have nodes read again, their devices too."""
        self.doubted.update(node_ids)
        self.stale |= self.doubted


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
            shut = {*pool.shut, *without}
            busy = {part.node_id for opened in pool.open.values() for plan in opened.plans for part in plan.parts}
            made = _index(pool).plan(request, now, horizon, without=shut, busy=busy)
            if isinstance(made, NoPlan) and not fresh and self._read_changes(tx, pool_id, pool, now):
                made = _index(pool).plan(request, now, horizon, without=shut, busy=busy)
            if not isinstance(made, NoPlan):
                _index(pool).book(made)
                self._open(tx, pool).append(made)
            return made

    def _open(self, tx: Tx, pool: _Pool) -> list[Plan]:
        """The plans of this transaction: they count as booked until it ends, whatever is read meanwhile."""
        opened = pool.open.get(id(tx))
        if opened is None:
            opened = pool.open[id(tx)] = _Open()
            tx.on_end(partial(self._close, pool, id(tx)))
        return opened.plans

    def _close(self, pool: _Pool, key: int, committed: bool) -> None:  # noqa: FBT001 - as `Tx.on_end` calls it
        with pool.lock:
            opened = pool.open.pop(key)
            if committed:
                pool.stale |= opened.reread
            else:
                pool.doubt(part.node_id for plan in opened.plans for part in plan.parts)

    def warm(self, tx: Tx, pool_id: int, now: datetime) -> None:
        """Load the index if it is not there, before anything is locked for which others would wait meanwhile."""
        pool = self._pool(pool_id)
        with pool.lock:
            if pool.is_cold(now):
                self._load(tx, pool_id, pool, now)

    def count(self, tx: Tx, pool_id: int, plans: Iterable[Plan]) -> None:
        """Count plans as booked that were only looked at, unless and until the transaction is rolled back."""
        pool = self._pool(pool_id)
        with pool.lock:
            opened = self._open(tx, pool)
            for plan in plans:
                opened.append(plan)
                if pool.index is not None:
                    pool.index.book(plan)

    def plan_all(
        self,
        tx: Tx,
        pool_id: int,
        turns: Iterable[Turn],
        now: datetime,
        *,
        horizon: datetime | None,
        gangs_of_one: int = GANGS_LOOKED_FOR_MAX,
    ) -> list[Plan | NoPlan]:
        """Plan requests in their order on the pool as it is at this moment, each around those before it.

        Args:
            horizon: one that cannot start now keeps the place where it could start first, if that is by then,
                and those behind it are planned around that place, too. It stays kept, for everybody in this
                process, until `end_pass`. None keeps no places.
            gangs_of_one: for how many gangs of one tenant such a start is looked for in a pass.

        Returns:
            What was planned for the first of them: for all, unless it takes longer than PLANNING_S.
        """
        pool = self._pool(pool_id)
        with pool.lock:
            index = self._up_to_now(tx, pool_id, pool, now)
            give_up = monotonic() + PLANNING_S
            made: list[Plan | NoPlan] = []
            ours = self._open(tx, pool)
            ahead, gangs = len(pool.kept), pool.gangs.copy()
            for turn in turns:
                if made and monotonic() > give_up:
                    break
                if (behind := pool.gangs.why_behind(turn)) is not None:
                    made.append(NoPlan(PendingReason.BEHIND, behind, None))
                    continue
                plan = index.plan(turn.request, now, None, without=pool.shut)
                if not isinstance(plan, NoPlan):
                    index.book(plan)
                    ours.append(plan)
                elif horizon is not None:
                    plan = _keep_place(pool, turn, plan, now, horizon, gangs_of_one=gangs_of_one)
                made.append(plan)
            if pool.gangs != gangs or len(pool.kept) > ahead:
                tx.on_end(partial(self._let_go_unless, pool, pool.kept[ahead:], pool.gangs.since(gangs)))
            return made

    def _let_go_unless(self, pool: _Pool, kept: Sequence[Plan], gangs: Gangs, committed: bool) -> None:  # noqa: FBT001
        """Those who wait are planned anew in the next attempt, and would be in their own way."""
        if committed:
            return
        with pool.lock:
            for plan in kept:
                # the pass may have ended
                if plan in pool.kept:
                    pool.kept.remove(plan)
                    if pool.index is not None:
                        pool.index.unbook(plan)
            pool.gangs.take_back(gangs)

    def end_pass(self, pool_id: int) -> None:
        """Let go of the places that `plan_all` kept."""
        pool = self._pool(pool_id)
        with pool.lock:
            if pool.index is not None:
                pool.index.forget_starts()
                for plan in pool.kept:
                    pool.index.unbook(plan)
            pool.kept.clear()
            pool.looked_for.clear()
            pool.endless.clear()
            pool.gangs = Gangs()

    def nodes(self, tx: Tx, pool_id: int, now: datetime) -> Sequence[NodeView]:
        """Every node of a pool as it is at this moment, those that may not be placed on too."""
        pool = self._pool(pool_id)
        with pool.lock:
            return self._up_to_now(tx, pool_id, pool, now).nodes()

    def look(
        self,
        tx: Tx,
        pool_id: int,
        request: PlacementRequest,
        now: datetime,
        *,
        horizon: datetime | None,
        near: Collection[int] = _NOBODY,
        around: Sequence[Plan] = (),
    ) -> Plan | NoPlan:
        """Plan a request without counting it as booked; on the nodes in `near` if they have room.

        Args:
            around: plans for later that count as booked meanwhile.
        """
        pool = self._pool(pool_id)
        with pool.lock:
            index = self._up_to_now(tx, pool_id, pool, now)
            for plan in around:
                index.book(plan)
            try:
                return index.find_on(near, request, now) or index.plan(request, now, horizon)
            finally:
                for plan in around:
                    index.unbook(plan)

    def look_for_places(
        self, tx: Tx, pool_id: int, requests: Iterable[PlacementRequest], now: datetime, *, horizon: datetime
    ) -> Sequence[Plan] | None:
        """Where requests could start first that cannot start now, each behind those before it; nothing is counted.

        Those of which no start by the horizon is known have no place. None if it would take too long to find them.
        """
        pool = self._pool(pool_id)
        with pool.lock:
            index = self._up_to_now(tx, pool_id, pool, now)
            # while a pass is made, those that it has looked at keep their places already
            with keep_places(index, () if pool.kept else requests, now, horizon) as (places, _):
                return places

    def look_behind(
        self,
        tx: Tx,
        pool_id: int,
        before: Iterable[PlacementRequest],
        request: PlacementRequest,
        now: datetime,
        *,
        horizon: datetime,
    ) -> Plan | None:
        """Plan a request for the first time at which it delays none of those before it; nothing is counted as booked.

        None if no start by the horizon is known, or it would take too long to find one.
        """
        pool = self._pool(pool_id)
        with pool.lock:
            index = self._up_to_now(tx, pool_id, pool, now)
            # while a pass is made, those that it has looked at keep their places already
            with keep_places(index, () if pool.kept else before, now, horizon) as (places, find_place):
                return None if places is None else find_place(request)

    def find(
        self, tx: Tx, pool_id: int, request: PlacementRequest, now: datetime, *, near: Collection[int]
    ) -> Plan | None:
        """As `look`, without a word on why there is no plan."""
        pool = self._pool(pool_id)
        with pool.lock:
            index = self._up_to_now(tx, pool_id, pool, now)
            return index.find_on(near, request, now) or index.find(request, now)

    def count_fits(
        self, tx: Tx, pool_id: int, request: PlacementRequest, now: datetime, *, without: Collection[int]
    ) -> int:
        """How many of the parts of a request fit on nodes that are not in `without`."""
        pool = self._pool(pool_id)
        with pool.lock:
            fits = self._up_to_now(tx, pool_id, pool, now).candidates(request, now, without=without)
            return sum(1 for _ in islice(fits, request.nodes))

    def doubt(self, pool_id: int, node_ids: Iterable[int]) -> None:
        """Have these nodes read again before the next plan: what the index has of them may be wrong."""
        pool = self._pool(pool_id)
        with pool.lock:
            pool.doubt(node_ids)

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

    def note_own(self, tx: Tx, pool_id: int, xid: int, node_ids: Iterable[int]) -> None:
        """All that this transaction changes of these nodes are plans that are in the index already."""
        pool = self._pool(pool_id)
        own = {(xid, node_id) for node_id in node_ids}
        with pool.lock:
            pool.known |= own
        tx.on_end(partial(self._disown_unless, pool, own))

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
        if pool.is_cold(now):
            self._load(tx, pool_id, pool, now)
            return True
        assert pool.looked_at is not None, "or it is cold"
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
        self._load_nodes(tx, pool_id, pool)
        pool.known.clear()
        pool.stale.clear()
        pool.doubted.clear()
        pool.looked_at = now

    def _load_nodes(self, tx: Tx, pool_id: int, pool: _Pool) -> None:
        pool.index = PoolIndex(load_node_views(tx, pool_id))
        self._book_again(pool, pool.index, None)
        tx.on_end(partial(self._drop_unless, pool))

    def _read_changes(self, tx: Tx, pool_id: int, pool: _Pool, now: datetime) -> bool:
        """Read what has changed since the last look; says whether anything has."""
        changes = load_changes(tx, pool_id, pool.position)
        news = {node_id for _, node_id in changes.nodes - pool.known}
        pool.stale |= news
        pool.shut -= news
        if pool.stale:
            self._read_nodes(tx, pool_id, pool)
        seen = {pair for pair in changes.nodes if pair[0] != changes.own}
        pool.known = {pair for pair in pool.known | seen if pair[0] > changes.position}
        pool.position, pool.looked_at = changes.position, now
        return bool(news)

    def _read_nodes(self, tx: Tx, pool_id: int, pool: _Pool) -> None:
        if len(pool.stale) > RELOAD_NODES:
            self._load_nodes(tx, pool_id, pool)
        else:
            known = {view.node_id: view for view in _index(pool).pick(pool.stale - pool.doubted)}
            views = load_node_views(tx, pool_id, sorted(pool.stale), known=known)
            for node_id in pool.stale - {view.node_id for view in views}:
                _index(pool).remove(node_id)
            for view in views:
                _index(pool).put(view)
            self._book_again(pool, _index(pool), pool.stale)
            # a transaction sees what it wrote itself, and may take it back
            tx.on_end(partial(self._doubt_unless, pool, frozenset(pool.stale)))
        pool.stale.clear()
        pool.doubted.clear()

    def _book_again(self, pool: _Pool, index: PoolIndex, only: Collection[int] | None) -> None:
        """Count what is planned and may not be in the rows yet, on nodes that were read just now; None is all."""
        for plan in pool.kept:
            index.book(plan, only=only)
        for opened in pool.open.values():
            for plan in opened.plans:
                index.book(plan, only=only)
                opened.reread.update(part.node_id for part in plan.parts if only is None or part.node_id in only)

    def _disown_unless(self, pool: _Pool, own: Collection[tuple[int, int]], committed: bool) -> None:  # noqa: FBT001 - as above
        """The number of a transaction of which nothing was left by a crash is another's by and by."""
        if not committed:
            with pool.lock:
                pool.known.difference_update(own)

    def _doubt_unless(self, pool: _Pool, node_ids: Collection[int], committed: bool) -> None:  # noqa: FBT001 - as above
        if not committed:
            with pool.lock:
                pool.doubt(node_ids)

    def _drop_unless(self, pool: _Pool, committed: bool) -> None:  # noqa: FBT001 - as above
        if not committed:
            with pool.lock:
                pool.index = None


def _keep_place(
    pool: _Pool, turn: Turn, refused: NoPlan, now: datetime, horizon: datetime, *, gangs_of_one: int
) -> NoPlan:
    """Note the place at which a request that does not fit now could start first; the refusal, with that start."""
    ahead = len(pool.kept)
    request = turn.request
    place = None
    if request not in pool.endless:
        if request.nodes > 1 and (behind := pool.gangs.count(turn, gangs_of_one)) is not None:
            return NoPlan(PendingReason.BEHIND, behind, None)
        if _may_look_for(pool, request):
            place = _index(pool).plan_earliest(request, now, horizon)
    if place is None:
        # no start is known that those behind could delay: what is in the way has no end
        pool.endless.add(request)
        return refused
    pool.kept.append(place)
    _index(pool).book(place)
    detail = f"{refused.detail}; {ahead} ahead in the queue" if ahead else refused.detail
    return NoPlan(refused.reason, detail, place.window.start)


def _may_look_for(pool: _Pool, request: PlacementRequest) -> bool:
    """Whether the pass can afford to look for the first start of a request; of gangs it counts each."""
    if request.nodes > 1 or request in pool.looked_for:
        return True
    if pool.looked_for and (len(pool.looked_for) + 1) * len(_index(pool)) > NODES_LOOKED_AT_MAX:
        return False
    pool.looked_for.add(request)
    return True


def _index(pool: _Pool) -> PoolIndex:
    assert pool.index is not None, "loaded when it was caught up"
    return pool.index
