"""Takes capacity for a reservation: quota, plan, bookings, and, for a window that is open, the holds.

Everything here runs inside one transaction that has locked the reservation. The plan is made from
rows read without locks; then its nodes are locked in id order and planned once more from what is
true under the lock, since a neighbour that booked a moment ago only moves the choice of GPUs. The
exclusion constraints decide in the end; whoever loses retries in a *new* transaction (`Contended`),
because a retry inside the old one would see its own failed attempt.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, cast

from controlplane.capacity.quota import open_quotas, window_of
from controlplane.capacity.specs import SpecFull, write_spec
from controlplane.db import ledger, reservation_events, reservations, specs, views
from controlplane.db.queue import schedule
from controlplane.db.tx import CheckConflict, Contention, ExclusionConflict
from controlplane.model.planner import NoPlan, plan_placement
from controlplane.model.requests import PlacementRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.ledger import Booking
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.planner import Plan
    from controlplane.model.quotas import QuotaShort
    from controlplane.model.requests import Topology
    from shared.ids import IdSource
    from shared.signing import IntentSigner

# How long a node may take to confirm a bind before it is ended by tombstone. DESIGN 5.
BIND_TIMEOUT = timedelta(minutes=5)
# How far ahead "could start at" looks.
EARLIEST_HORIZON = timedelta(days=30)
# Each further plan is one that somebody else's commit spoiled between our look and our lock.
PLANS_MAX = 8
GUARDS = frozenset({"booking_no_overlap", "booking_scalar_capacity", "allocation_one_hold"})


class Contended(Contention):
    """Somebody else was faster; the same step in a new transaction, which `run_tx` makes, sees what they did."""


@dataclass(frozen=True, slots=True)
class LedgerTools:
    """What writing the ledger needs besides a transaction."""

    signer: IntentSigner
    ids: IdSource


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
    )


def place(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> Placed | NoPlan | QuotaShort:
    """Book a locked `draft` or `queued` reservation, and hold it if its window is open.

    Raises:
        Contended: a guard refused; nothing may be kept of this transaction.
    """
    request = placement_request(reservation)
    if request.start is not None and request.start <= now:
        # the asked-for start has passed while it waited: it starts when it is placed
        request = replace(request, start=None)
    book = open_quotas(tx, [reservation])
    short = book.take(reservation, window_of(reservation, now))
    if short is not None:
        return short
    plan = plan_and_lock(tx, reservation.pool_id, request, now, horizon=now + EARLIEST_HORIZON)
    if isinstance(plan, NoPlan):
        return plan
    try:
        bound = _commit_plan(tx, tools, reservation, plan, now)
    except (ExclusionConflict, CheckConflict) as conflict:
        if conflict.constraint not in GUARDS:
            raise
        raise Contended(conflict.constraint) from conflict
    book.write(tx)
    return Placed(bound)


def _commit_plan(tx: Tx, tools: LedgerTools, reservation: Reservation, plan: Plan, now: datetime) -> bool:
    book_plan(tx, reservation, plan)
    if not reservations.mark_placed(
        tx,
        reservation.reservation_id,
        reservation.state,
        start=plan.window.start,
        end=plan.window.end,
        now=now,
    ):
        raise Contended("reservation")
    announce(tx, reservation, "placed", start=plan.window.start.isoformat())
    due = now + BIND_TIMEOUT if plan.starts_now else plan.window.start
    schedule(tx, "reservation", str(reservation.reservation_id), min(due, plan.window.end or due))
    if not plan.starts_now:
        return False
    outcome = bind(tx, tools, reservation, now)
    if outcome != "bound":
        raise Contended(outcome)
    return True


def book_plan(tx: Tx, reservation: Reservation, plan: Plan) -> None:
    """Insert the bookings of a plan whose nodes are locked. Raises ExclusionConflict or CheckConflict."""
    for part in plan.parts:
        ledger.insert_booking(
            tx,
            reservation_id=reservation.reservation_id,
            pool_id=reservation.pool_id,
            node_id=part.node_id,
            spans=part.spans,
            start=plan.window.start,
            end=plan.window.end,
            vcpus=part.vcpus,
            memory_mib=part.memory_mib,
        )


def plan_and_lock(
    tx: Tx, pool_id: int, request: PlacementRequest, now: datetime, *, horizon: datetime | None = None
) -> Plan | NoPlan:
    """Plan on the whole pool, lock the nodes of the plan, and plan again on those as they are now.

    Nodes that were taken meanwhile are let go of, and the pool is planned again: nothing is written
    yet, so this transaction sees what the faster one did as well as a new one would.

    Raises:
        Contended: others were faster each time.
    """
    for _ in range(PLANS_MAX):
        plan = plan_placement(request, views.load_node_views(tx, pool_id), now, horizon)
        if isinstance(plan, NoPlan):
            return plan
        # rolling back to the savepoint releases the locks
        with suppress(_Taken), tx.savepoint():
            return _lock_and_plan(tx, pool_id, request, [part.node_id for part in plan.parts], now)
    raise Contended("nodes")


class _Taken(Exception):
    """The nodes no longer take the request; others may."""


def _lock_and_plan(tx: Tx, pool_id: int, request: PlacementRequest, node_ids: Sequence[int], now: datetime) -> Plan:
    ledger.lock_nodes(tx, node_ids)
    plan = plan_placement(request, views.load_node_views(tx, pool_id, node_ids), now, None)
    if isinstance(plan, NoPlan):
        raise _Taken
    return plan


def bind(
    tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime
) -> Literal["bound", "waiting_for_release", "spec_full", "gone"]:
    """Hold what is booked: allocations, specs, `binding`. The reservation is locked and `placed`.

    Leaves no trace when it cannot: an overrun hold in the way gives `waiting_for_release`.
    """
    bookings = ledger.load_bookings(tx, reservation.reservation_id)
    if len(bookings) != reservation.nodes:
        return "gone"
    nodes = ledger.lock_nodes(tx, [booking.node_id for booking in bookings])
    try:
        with tx.savepoint():
            for booking in bookings:
                _hold(tx, tools, reservation, booking)
            if not reservations.mark_binding(tx, reservation.reservation_id, bind_deadline=now + BIND_TIMEOUT):
                return "gone"
            for node_id in sorted(nodes):
                write_spec(tx, node_id, nodes[node_id].public_id, signer=tools.signer, now=now)
    except (ExclusionConflict, _NoRoom):
        return "waiting_for_release"
    except SpecFull:
        return "spec_full"
    announce(tx, reservation, "binding")
    return "bound"


class _NoRoom(Exception):
    """The node's physical counters have no room: somebody overruns."""


def _hold(tx: Tx, tools: LedgerTools, reservation: Reservation, booking: Booking) -> None:
    version = specs.load_version(tx, booking.node_id)
    uuids = ledger.load_uuids_in(tx, booking.node_id, booking.spans)
    ledger.insert_allocation(
        tx,
        public_id=tools.ids.new("alloc"),
        reservation_id=reservation.reservation_id,
        booking=booking,
        device_uuids=uuids,
        incarnation=version.incarnation,
        generation=version.generation + 1,
    )
    if not ledger.take_scalars(
        tx, booking.node_id, gpus=len(uuids), vcpus=booking.vcpus, memory_mib=booking.memory_mib
    ):
        raise _NoRoom


def announce(tx: Tx, reservation: Reservation, what: str, **data: object) -> None:
    """Publish ``reservation.<what>`` to whoever may see the reservation, with where it is now."""
    reservation_events.publish(tx, what, reservation.reservation_id, data)
