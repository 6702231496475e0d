"""How a reservation ends: the cause first, the release when the nodes say so.

Ending is two steps that may be days apart. `end` records an allowed cause and turns each hold into
a tombstone: from then on the plan is free for others and the hardware is not. `finish_release` runs
for each hold that is given up with evidence; the last one closes the reservation. Nothing here looks
at connectivity: a node that is away only makes the second step later.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from controlplane.capacity.place import announce
from controlplane.capacity.quota import drop_claim, give_back_quota, settle_quota
from controlplane.capacity.specs import write_spec
from controlplane.db import ledger, reservations, waiting
from controlplane.db.queue import enqueue, schedule

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.ledger import Allocation
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.states import EndCause, ReservationState

# A bind that fails is placed once more elsewhere, if it had started at once. DESIGN 5.
BIND_ATTEMPTS_MAX = 2
# How long a node may take to let go before it is said to overrun.
RELEASE_PATIENCE = timedelta(seconds=15)


def late_from(reservation: Reservation) -> datetime:
    """From when on who is in the way of a placed reservation is late; until then it is handed on in the usual time."""
    assert reservation.window_start is not None, "placed"
    return reservation.window_start + RELEASE_PATIENCE


def end(
    tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime, *, cause: EndCause, detail: str = ""
) -> bool:
    """End a locked `binding` or `active` reservation; False if it is in neither state."""
    if reservation.state not in ("binding", "active"):
        return False
    settle_quota(tx, reservation, now)
    open_holds = ledger.load_allocations(tx, reservation.reservation_id, open_only=True)
    if not open_holds:
        # quota comes before node in the lock order
        give_back_quota(tx, reservation)
    nodes = ledger.lock_nodes(tx, [hold.node_id for hold in open_holds])
    if not reservations.mark_releasing(tx, reservation.reservation_id, cause=cause, detail=detail, now=now):
        return False
    ledger.mark_allocations_releasing(tx, reservation.reservation_id, now=now)
    ledger.cut_bookings(tx, reservation.reservation_id, now)
    for node_id in sorted(nodes):
        write_spec(tx, node_id, signer=tools.signer, now=now)
    if reservation.billed_from is not None:
        reservations.record_usage(tx, reservation.reservation_id, end=now)
    announce(tx, reservation, "releasing", cause=cause, detail=detail)
    schedule(tx, "reservation", str(reservation.reservation_id), now + RELEASE_PATIENCE)
    # what is left of the window is free in the plan, so a later one may fit
    wake_waiting(tx, reservation.pool_id)
    if not open_holds:
        # its only parts were dropped, and their nodes have let go already
        _close(tx, reservation, cause, now)
    return True


def _close(tx: Tx, reservation: Reservation, cause: EndCause | None, now: datetime) -> None:
    """The last hold of a `releasing` reservation is gone, and its quota is given back."""
    ledger.close_bookings(tx, reservation.reservation_id)
    reservations.mark_ended(tx, reservation.reservation_id, "releasing", "released", now=now)
    announce(tx, reservation, "released", cause=cause)


def cancel(
    tx: Tx,
    reservation: Reservation,
    now: datetime,
    *,
    state: ReservationState = "cancelled",
    cause: EndCause | None = "cancelled",
    detail: str = "",
) -> bool:
    """End a locked reservation that holds nothing on any node: draft, queued or placed."""
    if reservation.state not in ("draft", "queued", "placed"):
        return False
    if reservation.state == "placed":
        ledger.close_bookings(tx, reservation.reservation_id)
        give_back_quota(tx, reservation)
        wake_waiting(tx, reservation.pool_id)
    if reservation.preempting:
        drop_claim(tx, reservation)
        wake_waiting(tx, reservation.pool_id)
    reservations.mark_ended(
        tx, reservation.reservation_id, reservation.state, state, now=now, cause=cause, detail=detail
    )
    announce(tx, reservation, state, cause=cause, detail=detail)
    return True


def wake_waiting(tx: Tx, pool_id: int) -> None:
    """Something of the pool may be free: have its queue looked at, if anybody is in it.

    Whoever is being queued at this very moment is not seen here. That request enqueues the pool
    itself, and if its pass comes before our commit, the next look (`placement.RECHECK_S`) finds it.
    """
    if waiting.is_waited_for(tx, pool_id):
        enqueue(tx, "pool", [str(pool_id)])


def finish_release(tx: Tx, tools: LedgerTools, reservation: Reservation, hold: Allocation, now: datetime) -> bool:
    """One hold has been given up (its row says `released`); True if that was the last one.

    Drops the tombstone, returns the node's counters, lets those bind who waited for it, and ends or
    requeues the reservation, unless it is only a part of it that was replaced. The reservation is locked.
    """
    # quota comes before node in the lock order, so it is asked first whether this is the last hold
    ending = reservation.state == "releasing"
    last = ending and not ledger.load_allocations(tx, reservation.reservation_id, open_only=True)
    if last:
        give_back_quota(tx, reservation)
    node = ledger.lock_nodes(tx, [hold.node_id])[hold.node_id]
    ledger.give_back_scalars(tx, hold.node_id, gpus=hold.gpus, vcpus=hold.vcpus, memory_mib=hold.memory_mib)
    write_spec(tx, hold.node_id, signer=tools.signer, now=now)
    waiting = ledger.load_waiting_for(tx, hold.node_id, now)
    enqueue(tx, "reservation", [str(reservation_id) for reservation_id in waiting])
    if node.draining:
        enqueue(tx, "node", [str(hold.node_id)])
    if not last:
        wake_waiting(tx, reservation.pool_id)
        return False
    if (
        reservation.end_cause == "bind_failed"
        and reservation.starts_at is None
        and reservation.bind_attempts < BIND_ATTEMPTS_MAX
    ):
        ledger.close_bookings(tx, reservation.reservation_id)
        reservations.mark_queued(
            tx, reservation.reservation_id, "releasing", reason=f"bind failed: {reservation.end_detail}"
        )
        announce(tx, reservation, "queued", reason=f"bind failed: {reservation.end_detail}")
        wake_waiting(tx, reservation.pool_id)
        return True
    _close(tx, reservation, reservation.end_cause, now)
    wake_waiting(tx, reservation.pool_id)
    return True
