"""Makes room for an owner: ends whole reservations that were placed on what its quota guarantees.

Runs after a pass over a pool's queue, for those that still wait there, in a transaction of its own: the
locks of all reservations that may have to go come before those of the quotas. Who goes is decided by
`model.preemption` on the quotas as they are under lock and on the nodes as they are read. Nothing is
taken for the owner here. It stays queued, with a reason that says whom it waits for, until their nodes
have signed that they have let go, and is placed by the queue like everybody else.

While it waits, the quotas that it counts against lend nothing (`claims`), so that what was freed for it
is not borrowed again.

Owner and borrowers are told of each other's reservations by name only within one tenant. Operators have an event with
all of them.
"""

from __future__ import annotations

from functools import cached_property, reduce
from typing import TYPE_CHECKING

from controlplane.capacity import end as ending
from controlplane.capacity.place import Contended, announce, placement_request
from controlplane.capacity.quota import ask_of, open_quotas, window_of
from controlplane.db import ledger, outbox, preemption, reservations, views, waiting
from controlplane.db.time import load_now
from controlplane.db.waiting import Pending
from controlplane.model.fit import fit_node, request_window
from controlplane.model.preemption import Borrower, choose_victims, with_footprint, without_holds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.capacity.indexes import PoolIndexes
    from controlplane.capacity.place import LedgerTools
    from controlplane.capacity.quota import QuotaBook
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from controlplane.model.preemption import Footprint

# Owners that are looked at after one pass; the next pass sees whoever still waits then.
OWNERS_PER_PASS = 16
# The youngest borrowers that may have to go. More than that are looked at when these have gone.
BORROWERS_MAX = 64
# What lets go at one time counts as gone; beyond this many, the rest counts as staying.
LEAVING_MAX = 1000
# Reservations that a reason names.
NAMED_MAX = 3


def preempt_for(tx: Tx, tools: LedgerTools, reservation_id: int) -> Sequence[int]:
    """End the borrowers that keep a queued reservation from what its tenant is guaranteed.

    Returns:
        Those that were ended: nobody if none has to go, none would help, or what already lets go is enough.

    Raises:
        Contended: more let go meanwhile; nothing may be kept of this transaction.
    """
    asked = reservations.load_reservation(tx, reservation_id)
    if asked is None or asked.state != "queued":
        return ()
    may_go = preemption.load_borrowers(tx, asked.tenant_id, limit=BORROWERS_MAX)
    locked = reservations.lock_those_free(tx, {reservation_id, *may_go})
    owner = locked.get(reservation_id)
    if owner is None or owner.state != "queued":
        return ()
    borrowers = [row for id_ in may_go if (row := locked.get(id_)) is not None and _still_borrows(row)]
    leaving = preemption.load_leaving(tx, owner.tenant_id, owner.pool_id, limit=LEAVING_MAX)
    book = open_quotas(tx, [owner, *borrowers, *leaving])
    left = preemption.load_leaving(tx, owner.tenant_id, owner.pool_id, limit=LEAVING_MAX)
    if {row.reservation_id for row in left} - {row.reservation_id for row in leaving}:
        raise Contended("leaving")
    now = load_now(tx)
    tally = book.tally.copy()
    for row in left:
        tally.give_back(ask_of(row))
    devices = _Devices(
        tx,
        tools.indexes,
        owner,
        others=[*borrowers, *left],
        leaving={row.reservation_id for row in left},
        now=now,
    )
    victims = choose_victims(
        tally,
        ask_of(owner),
        window_of(owner, now),
        [Borrower(row.reservation_id, ask_of(row)) for row in borrowers],
        devices.fit_without,
    )
    if victims is None or not (victims or left):
        _wait_no_longer(tx, book, owner)
        return ()
    going = [locked[id_] for id_ in victims]
    _wait_for(tx, book, owner, [*going, *left])
    _end_all(tx, tools, owner, going, now)
    return victims


def _still_borrows(row: Reservation) -> bool:
    return row.borrows > 0 and row.state in ("placed", "binding", "active")


def _wait_no_longer(tx: Tx, book: QuotaBook, owner: Reservation) -> None:
    """Nobody goes for it, so others may borrow again."""
    if not owner.preempting:
        return
    book.drop_claim(owner)
    book.write(tx)
    preemption.set_preempting(tx, owner.reservation_id, preempting=False)
    ending.wake_waiting(tx, owner.pool_id)


def _wait_for(tx: Tx, book: QuotaBook, owner: Reservation, gone: Sequence[Reservation]) -> None:
    if not owner.preempting:
        book.claim(owner)
        book.write(tx)
        preemption.set_preempting(tx, owner.reservation_id, preempting=True)
    reason = _whom_it_waits_for(owner, gone)
    if waiting.set_pending_reasons(tx, {owner.reservation_id: Pending(reason, None)}):
        announce(tx, owner, "queued", reason=reason, preempting=True)


def _whom_it_waits_for(owner: Reservation, gone: Sequence[Reservation]) -> str:
    """The reason that its holder reads, who may know of its own tenant's reservations alone."""
    own = [row.public_id for row in gone if row.tenant_id == owner.tenant_id]
    others = len(gone) - len(own)
    text = f"waits for {len(gone)} reservation{'s' if len(gone) > 1 else ''}"
    if not own:
        return f"{text} of other tenants to let go"
    named = own[:NAMED_MAX] + ["..."] * (len(own) > NAMED_MAX)
    return f"{text} to let go: {', '.join(named)}" + (f", and {others} of other tenants" if others else "")


def _end_all(tx: Tx, tools: LedgerTools, owner: Reservation, going: Sequence[Reservation], now: datetime) -> None:
    """End locked reservations, all their nodes locked in one order first."""
    if not going:
        return
    preemption.set_preempted_for(tx, [row.reservation_id for row in going], owner.reservation_id)
    holds = [hold for row in going for hold in ledger.load_allocations(tx, row.reservation_id, open_only=True)]
    ledger.lock_nodes(tx, sorted({hold.node_id for hold in holds}))
    for row in sorted(going, key=lambda row: row.reservation_id):
        named = f", for {owner.public_id}" if row.tenant_id == owner.tenant_id else ""
        detail = f"borrowed GPUs were asked back by their owner{named}"
        if row.state == "placed":
            ending.cancel(tx, row, now, cause="preempted", detail=detail)
        else:
            ended = ending.end(tx, tools, row, now, cause="preempted", detail=detail)
            assert ended, "locked in a state that can end"
    names = [row.public_id for row in going]
    outbox.publish(tx, "reservation.preempting", owner.public_id, {"preempted": names}, tenant_id=None)


class _Devices:
    """Whether the pool has the devices for an owner once some reservations are gone; read when first asked."""

    def __init__(
        self,
        tx: Tx,
        indexes: PoolIndexes,
        owner: Reservation,
        *,
        others: Sequence[Reservation],
        leaving: set[int],
        now: datetime,
    ) -> None:
        self._tx = tx
        self._indexes = indexes
        self._now = now
        self._owner = owner
        self._others = {row.reservation_id for row in others}
        self._leaving = leaving
        self._request = placement_request(owner)
        self._asked = request_window(self._request, now)

    def fit_without(self, gone: frozenset[int]) -> bool:
        """Whether the owner fits when these, and those that let go already, are gone."""
        found = self._unaffected
        for node_id, bare in self._bare.items():
            if found >= self._request.nodes:
                break
            staying = (
                footprint
                for footprint in self._footprints[node_id]
                if footprint.reservation_id not in gone and footprint.reservation_id not in self._leaving
            )
            found += self._fits(reduce(with_footprint, staying, bare))
        return found >= self._request.nodes

    def _fits(self, view: NodeView) -> bool:
        return fit_node(self._request, view, self._asked) is not None

    @cached_property
    def _footprints(self) -> Mapping[int, Sequence[Footprint]]:
        """What the others have of each node of the pool."""
        found: dict[int, list[Footprint]] = {}
        for footprint in preemption.load_footprints(self._tx, self._owner.pool_id, self._others):
            found.setdefault(footprint.node_id, []).append(footprint)
        return found

    @cached_property
    def _bare(self) -> Mapping[int, NodeView]:
        """Those nodes, without the others."""
        nodes = views.load_node_views(
            self._tx, self._owner.pool_id, sorted(self._footprints), without=sorted(self._others)
        )
        return {view.node_id: without_holds(view, self._footprints[view.node_id]) for view in nodes}

    @cached_property
    def _unaffected(self) -> int:
        """How many of the owner's parts fit on nodes that none of the others is on."""
        return self._indexes.count_fits(
            self._tx, self._owner.pool_id, self._request, self._now, without=self._footprints.keys()
        )
