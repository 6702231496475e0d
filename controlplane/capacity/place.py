"""Takes capacity for a reservation: quota, plan, bookings, and, for a window that is open, the holds.

Everything here runs inside one transaction that has locked the reservation. The plan is made from
the process's index of the pool; then its nodes are locked in id order, and must be as they were when
they were planned on. The exclusion constraints decide in the end; whoever loses retries in a *new*
transaction (`Contended`), because a retry inside the old one would see its own failed attempt. The
nodes of a plan that was not committed are read again before the next one is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from controlplane.capacity.quota import open_quotas, window_of
from controlplane.capacity.specs import SpecFull, write_spec
from controlplane.db import ledger, reservation_events, reservations
from controlplane.db.placements import Commitment, commit_parts, hold_booked, lock_planned_nodes, mark_all_placed
from controlplane.db.tx import CheckConflict, Contention
from controlplane.model.labels import parse_selector
from controlplane.model.planner import NoPlan
from controlplane.model.requests import PlacementRequest
from controlplane.model.shares import parse_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from datetime import datetime

    from controlplane.capacity.indexes import PoolIndexes
    from controlplane.config import PlacerKind
    from controlplane.db.placements import LockedPool
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.event_kinds import ReservationVerb
    from controlplane.model.labels import Selector
    from controlplane.model.planner import Plan
    from controlplane.model.quotas import QuotaShort
    from controlplane.model.requests import Strategy, Topology
    from shared.ids import IdSource
    from shared.signing import IntentSigner

# How long a node may take to confirm a bind before it is ended by tombstone. DESIGN 5.
BIND_TIMEOUT = timedelta(minutes=5)
# How far ahead "could start at" looks.
EARLIEST_HORIZON = timedelta(days=30)
GUARDS = frozenset({"booking_no_overlap", "booking_scalar_capacity", "allocation_one_hold"})


class Contended(Contention):
    """Somebody else was faster; the same step in a new transaction, which `run_tx` makes, sees what they did."""


def _untimed(_placer: PlacerKind, _seconds: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LedgerTools:
    """What writing the ledger needs besides a transaction.

    `locks_held` is called, in the transaction's thread, with for how many seconds a placer has kept nodes locked.
    """

    signer: IntentSigner
    ids: IdSource
    indexes: PoolIndexes
    locks_held: Callable[[PlacerKind, float], None] = _untimed

    def time_locks(self, tx: Tx, placer: PlacerKind) -> None:
        """Call after nodes were locked, which is when others begin to wait for them."""
        tx.time_locks(partial(self.locks_held, placer))


@dataclass(frozen=True, slots=True)
class Placed:
    """Capacity is booked. `bound` if the holds were written too."""

    bound: bool


def placement_request(reservation: Reservation) -> PlacementRequest:
    """The planner's view of a stored reservation."""
    return PlacementRequest(
        nodes=reservation.nodes,
        gpus_per_node=reservation.gpus_per_node,
        topology=cast("Topology", reservation.topology),
        whole_node=reservation.whole_node,
        vcpus_per_node=reservation.vcpus_per_node,
        memory_mib_per_node=reservation.memory_mib_per_node,
        start=reservation.starts_at,
        duration=None if reservation.duration_s is None else timedelta(seconds=reservation.duration_s),
        selector=parse_selector(reservation.selector),
        strategy=cast("Strategy", reservation.strategy),
        parts=parse_parts(reservation.parts),
    )


def place(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> Placed | NoPlan | QuotaShort:
    """Book a locked `draft` or `queued` reservation, and hold it if its window is open.

    Raises:
        Contended: a guard refused; nothing may be kept of this transaction.
    """
    tools.indexes.warm(tx, reservation.pool_id, now)
    book = open_quotas(tx, [reservation])
    short = book.take(reservation, window_of(reservation, now))
    if short is not None:
        return short
    request = request_at(reservation, now)
    plan = tools.indexes.plan(tx, reservation.pool_id, request, now, horizon=now + EARLIEST_HORIZON)
    if isinstance(plan, NoPlan):
        return plan
    _commit(tx, tools, reservation, plan, now)
    book.write(tx)
    return Placed(plan.starts_now)


def request_at(reservation: Reservation, now: datetime) -> PlacementRequest:
    """What a reservation asks for now: if the start that it named has passed, it starts when it is placed."""
    request = placement_request(reservation)
    return replace(request, start=None) if request.start is not None and request.start <= now else request


def plan_and_lock(
    tx: Tx,
    tools: LedgerTools,
    pool_id: int,
    request: PlacementRequest,
    now: datetime,
    *,
    horizon: datetime | None = None,
    without: Collection[int] = (),
    lock_too: Collection[int] = (),
) -> Plan | NoPlan:
    """Plan from the pool's index, and lock the nodes of the plan, with others that the caller is about to change.

    Raises:
        Contended: a node has changed since it was planned on; a new transaction reads it again.
    """
    plan = tools.indexes.plan(tx, pool_id, request, now, horizon=horizon, without=without)
    if not isinstance(plan, NoPlan):
        if lock_too:
            # all at once, for the order of the locks
            ledger.lock_nodes(tx, [*lock_too, *(part.node_id for part in plan.parts)])
            tools.time_locks(tx, "inline")
        _lock_nodes(tx, tools, pool_id, plan, request.selector)
    return plan


def _lock_nodes(tx: Tx, tools: LedgerTools, pool_id: int, plan: Plan, selector: Selector) -> LockedPool:
    seen = {part.node_id: part.placement_gen for part in plan.parts}
    pool = lock_planned_nodes(tx, pool_id, seen)
    tools.time_locks(tx, "inline")
    if not pool.has(plan, selector):
        raise Contended("nodes")
    return pool


def commitment(tools: LedgerTools, reservation: Reservation, plan: Plan) -> Commitment:
    """A plan with the names of the holds it will need."""
    return Commitment(reservation, plan, [tools.ids.new("alloc") for _ in plan.parts] if plan.starts_now else ())


def write_parts(tx: Tx, pool_id: int, commitments: Sequence[Commitment]) -> set[int]:
    """Write plans whose nodes are locked; the reservations that got all of their parts.

    Raises:
        Contended: vCPUs or memory of a node do not suffice; nothing may be kept of this transaction.
    """
    try:
        return commit_parts(tx, pool_id, commitments)
    except CheckConflict as conflict:
        if conflict.constraint not in GUARDS:
            raise
        raise Contended(conflict.constraint) from conflict


def write_placed(
    tx: Tx, tools: LedgerTools, pool: LockedPool, commitments: Sequence[Commitment], now: datetime
) -> None:
    """Make reservations `placed` or `binding` whose parts are all written. Raises Contended."""
    looks = [_next_look(one.plan, now) for one in commitments]
    xid = mark_all_placed(tx, pool, commitments, now=now, bind_deadline=now + BIND_TIMEOUT, looks=looks)
    if xid is None:
        raise Contended("reservation")
    # all that has changed of these nodes is what was planned, and the index has that
    tools.indexes.note_own(tx, pool.pool_id, xid, {part.node_id for one in commitments for part in one.plan.parts})


def _next_look(plan: Plan, now: datetime) -> datetime:
    """When the clock of a reservation that is placed by this plan has something to do."""
    due = now + BIND_TIMEOUT if plan.starts_now else plan.window.start
    return min(due, plan.window.end or due)


def _commit(tx: Tx, tools: LedgerTools, reservation: Reservation, plan: Plan, now: datetime) -> None:
    """Lock the plan's nodes and write it, and their specs if it starts now."""
    pool = _lock_nodes(tx, tools, reservation.pool_id, plan, parse_selector(reservation.selector))
    parts = [commitment(tools, reservation, plan)]
    if not write_parts(tx, reservation.pool_id, parts):
        raise Contended("booking_no_overlap or allocation_one_hold")
    write_placed(tx, tools, pool, parts, now)
    if plan.starts_now:
        for part in plan.parts:
            try:
                write_spec(tx, part.node_id, signer=tools.signer, now=now)
            except SpecFull as full:
                tools.indexes.shut(reservation.pool_id, part.node_id)
                raise Contended(str(full)) from full


def book_plan(tx: Tx, reservation: Reservation, plan: Plan) -> None:
    """Insert the bookings of a plan for later, whose nodes are locked.

    Raises:
        Contended: somebody has them already.
    """
    if not write_parts(tx, reservation.pool_id, [Commitment(reservation, plan, ())]):
        raise Contended("booking_no_overlap")


def bind(
    tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime
) -> Literal["bound", "waiting_for_release", "spec_full", "gone"]:
    """Hold what is booked: allocations, specs, `binding`. The reservation is locked and `placed`.

    Leaves no trace when it cannot: an overrun hold in the way gives `waiting_for_release`. So does a MIG layout that
    has changed since the parts were found well; the next look finds them broken.
    """
    bookings = ledger.load_bookings(tx, reservation.reservation_id)
    if len(bookings) != reservation.nodes:
        return "gone"
    nodes = ledger.lock_nodes(tx, [booking.node_id for booking in bookings])
    try:
        with tx.savepoint():
            if not hold_booked(tx, reservation.reservation_id, {node_id: tools.ids.new("alloc") for node_id in nodes}):
                raise _InTheWay
            if not reservations.mark_binding(tx, reservation.reservation_id, bind_deadline=now + BIND_TIMEOUT):
                return "gone"
            for node_id in sorted(nodes):
                write_spec(tx, node_id, signer=tools.signer, now=now)
    except _InTheWay:
        return "waiting_for_release"
    except SpecFull:
        return "spec_full"
    announce(tx, reservation, "binding")
    return "bound"


class _InTheWay(Exception):
    """Somebody overruns: a hold, or what the node's counters have of vCPUs and memory."""


def announce(tx: Tx, reservation: Reservation, what: ReservationVerb, **data: object) -> None:
    """Publish ``reservation.<what>`` to whoever may see the reservation, with where it is now."""
    reservation_events.publish(tx, what, reservation.reservation_id, data)
