"""One step of a reservation's life by the clock: window opens, bind times out, window closes, queue expires.

`step` is what the reservation reconciler runs for a key. It takes no input but the rows, does the
one thing that is due, and says when to look again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from controlplane.capacity import end as ending
from controlplane.capacity.place import (
    BIND_TIMEOUT,
    announce,
    bind,
    book_plan,
    placement_request,
    plan_and_lock,
)
from controlplane.db import ledger, reservations, views
from controlplane.db.maintenance import load_back_by
from controlplane.db.queue import enqueue
from controlplane.db.spans import decode_spans
from controlplane.db.time import load_now
from controlplane.model.planner import NoPlan
from controlplane.model.units import touched_slots

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.ledger import Booking
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.requests import PlacementRequest
    from controlplane.model.states import ReservationState

# A hold in the way is announced by its release; this is the safety net.
WAITING_RECHECK = timedelta(seconds=15)
# A draft whose request died before the decision: resumable for 10 minutes, then it ends. DESIGN 10.
DRAFT_LIFE = timedelta(minutes=10)
# Where no instant is due, the resync looks again.
NOTHING_DUE = None


def step(tx: Tx, tools: LedgerTools, reservation_id: int) -> timedelta | None:
    """Do what is due for one reservation.

    Returns:
        How long until something is due again, or None if only an event can change anything.

    Raises:
        Contended: a guard refused a repair; nothing may be kept of this transaction.
    """
    reservation = reservations.lock_reservation(tx, reservation_id)
    if reservation is None or reservation.ended_at is not None:
        return NOTHING_DUE
    now = load_now(tx)
    return _STEPS[reservation.state](tx, tools, reservation, now)


def _step_draft(tx: Tx, _: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    due = reservation.created_at + DRAFT_LIFE
    if now < due:
        return due - now
    ending.cancel(tx, reservation, now, state="expired", cause=None, detail="the request was never decided")
    return NOTHING_DUE


def _step_queued(tx: Tx, _: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    if reservation.queue_deadline is None:
        return NOTHING_DUE
    if now < reservation.queue_deadline:
        return reservation.queue_deadline - now
    detail = f"waited until its deadline: {reservation.pending_reason}"
    ending.cancel(tx, reservation, now, state="expired", cause=None, detail=detail)
    return NOTHING_DUE


def _step_placed(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    assert reservation.window_start is not None, "a CHECK keeps placed rows with a window"
    if reservation.window_end is not None and reservation.window_end <= now:
        ending.cancel(
            tx, reservation, now, state="expired", cause=None, detail="its window passed while its GPUs were held"
        )
        return NOTHING_DUE
    if repair(tx, tools, reservation, now):
        return timedelta(0)
    if now < reservation.window_start:
        return reservation.window_start - now
    outcome = bind(tx, tools, reservation, now)
    if outcome == "bound":
        return _next_look(now, now + BIND_TIMEOUT, reservation.window_end)
    condition = "spec_full" if outcome == "spec_full" else "waiting_for_release"
    if reservations.set_condition(tx, reservation.reservation_id, condition, present=True):
        _tell_both_holders(tx, reservation, condition)
    return WAITING_RECHECK


def _tell_both_holders(tx: Tx, reservation: Reservation, condition: str) -> None:
    """Tell the one that waits, and those in its way that should have let go.

    Theirs is only an event and a wake-up: their rows come before this one's nodes in the lock order.
    """
    announce(tx, reservation, "condition", condition=condition, present=True)
    in_the_way: set[int] = set()
    for booking in ledger.load_bookings(tx, reservation.reservation_id):
        in_the_way |= {
            hold.reservation_id
            for hold in ledger.load_open_on_node(tx, booking.node_id)
            if hold.state == "releasing" and hold.reservation_id != reservation.reservation_id
        }
    for reservation_id in sorted(in_the_way):
        holder = reservations.load_reservation(tx, reservation_id)
        assert holder is not None, "an allocation has a reservation"
        announce(tx, holder, "condition", condition="overrun", present=True, in_the_way_of=reservation.public_id)
    enqueue(tx, "reservation", [str(reservation_id) for reservation_id in sorted(in_the_way)])


def _step_binding(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    if reservation.window_end is not None and reservation.window_end <= now:
        ending.end(tx, tools, reservation, now, cause="window_ended")
        return NOTHING_DUE
    assert reservation.bind_deadline is not None, "set with the state"
    if now < reservation.bind_deadline:
        return _next_look(now, reservation.bind_deadline, reservation.window_end)
    ending.end(tx, tools, reservation, now, cause="bind_failed", detail="the node did not confirm in time")
    return NOTHING_DUE


def _next_look(now: datetime, deadline: datetime, window_end: datetime | None) -> timedelta:
    """A bound reservation is not looked at before, so a window that is shorter than the deadline counts too."""
    return (deadline if window_end is None else min(deadline, window_end)) - now


def _step_active(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    if reservation.window_end is None:
        return NOTHING_DUE
    if now < reservation.window_end:
        return reservation.window_end - now
    ending.end(tx, tools, reservation, now, cause="window_ended")
    return NOTHING_DUE


def _step_releasing(tx: Tx, _: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    """Only evidence moves it on. The condition says to people that it is taking long."""
    assert reservation.releasing_at is not None, "set with the state"
    if now < reservation.releasing_at + ending.RELEASE_PATIENCE:
        return reservation.releasing_at + ending.RELEASE_PATIENCE - now
    if reservations.set_condition(tx, reservation.reservation_id, "overrun", present=True):
        announce(tx, reservation, "condition", condition="overrun", present=True)
    return NOTHING_DUE


def _remaining_request(reservation: Reservation, now: datetime) -> PlacementRequest:
    """The reservation's window as booked, or what is left of it once it is open."""
    request = placement_request(reservation)
    assert reservation.window_start is not None, "placed"
    opened = reservation.window_start <= now
    start = now if opened else reservation.window_start
    return replace(
        request,
        start=None if opened else start,
        duration=None if reservation.window_end is None else reservation.window_end - start,
    )


def _gpus_in(reservation: Reservation, booking: Booking) -> int:
    """GPUs that a part of a reservation has any of."""
    return (
        reservation.gpus_per_node if reservation.whole_node else touched_slots(decode_spans(booking.spans)).bit_count()
    )


def repair(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> bool:
    """Move a locked `placed` reservation whose nodes cannot take it, to nodes that can, in the same window.

    The nodes cannot take it when they are not schedulable, when GPUs are not healthy, or when an
    overrun hold has been in the way of a window that is open for longer than letting go takes. A node
    in maintenance that ends before the window begins is expected back.

    Nothing is held yet, so nothing is lost; if no other nodes are free it stays where it is. True if it moved.

    Raises:
        Contended: a guard refused the move.
    """
    booked = {booking.node_id: booking for booking in ledger.load_bookings(tx, reservation.reservation_id)}
    nodes = views.load_node_views(tx, reservation.pool_id, list(booked))
    healthy = {id_: len(ledger.load_uuids_in(tx, id_, b.spans, healthy=True)) for id_, b in booked.items()}
    assert reservation.window_start is not None, "placed"
    back = load_back_by(tx, list(booked), reservation.window_start)
    broken = len(nodes) != reservation.nodes or any(
        view.node_id not in back
        and (not view.placeable or healthy[view.node_id] < _gpus_in(reservation, booked[view.node_id]))
        for view in nodes
    )
    if not broken:
        if reservations.set_condition(tx, reservation.reservation_id, "impaired", present=False):
            announce(tx, reservation, "condition", condition="impaired", present=False)
        if "waiting_for_release" not in reservation.conditions or now < ending.late_from(reservation):
            return False
    plan = plan_and_lock(tx, tools, reservation.pool_id, _remaining_request(reservation, now), now)
    if isinstance(plan, NoPlan):
        if broken and reservations.set_condition(tx, reservation.reservation_id, "impaired", present=True):
            announce(tx, reservation, "condition", condition="impaired", present=True)
        return False
    ledger.close_bookings(tx, reservation.reservation_id)
    book_plan(tx, reservation, plan)
    reservations.move_window(tx, reservation.reservation_id, start=plan.window.start, end=plan.window.end)
    reservations.set_condition(tx, reservation.reservation_id, "impaired", present=False)
    announce(tx, reservation, "condition", condition="impaired", present=False, moved=True)
    return True


_STEPS: dict[ReservationState, Callable[[Tx, LedgerTools, Reservation, datetime], timedelta | None]] = {
    "draft": _step_draft,
    "queued": _step_queued,
    "placed": _step_placed,
    "binding": _step_binding,
    "active": _step_active,
    "releasing": _step_releasing,
}
