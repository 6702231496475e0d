"""One step of a reservation's life by the clock: window opens, bind times out, window closes, queue expires.

`step` is what the reservation reconciler runs for a key. It takes no input but the rows, does the
one thing that is due, and says when to look again; `find_unsettled` says whom its resync runs it for. How a
reservation fares on its nodes is `capacity.repair`'s.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from controlplane.capacity import end as ending
from controlplane.capacity.place import BIND_TIMEOUT, Contended, announce, bind
from controlplane.capacity.repair import tend_held, tend_placed
from controlplane.capacity.replace import drop_unbound
from controlplane.db import ledger, reservations
from controlplane.db.backing import load_all_backed_parts
from controlplane.db.queue import enqueue, find_keys
from controlplane.db.time import load_now
from controlplane.model.backing import judge_part

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.backing import Part
    from controlplane.model.states import ReservationCondition, ReservationState

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
        Contended: a guard refused a repair, or somebody in its way is being changed; nothing may be kept of this
            transaction.
    """
    reservation = reservations.lock_reservation(tx, reservation_id)
    if reservation is None or reservation.ended_at is not None:
        return NOTHING_DUE
    now = load_now(tx)
    return _STEPS[reservation.state](tx, tools, reservation, now)


def _step_draft(tx: Tx, _: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    due = _next_instant(reservation)
    if due is None or now < due:
        return _next_look(now, due)
    ending.cancel(tx, reservation, now, state="expired", cause=None, detail="the request was never decided")
    return NOTHING_DUE


def _step_queued(tx: Tx, _: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    due = _next_instant(reservation)
    if due is None or now < due:
        return _next_look(now, due)
    detail = f"waited until its deadline: {reservation.pending_reason}"
    ending.cancel(tx, reservation, now, state="expired", cause=None, detail=detail)
    return NOTHING_DUE


def _step_placed(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    assert reservation.window_start is not None, "a CHECK keeps placed rows with a window"
    if reservation.window_end is not None and reservation.window_end <= now:
        broken = reservation.impaired_reason
        why = f"its nodes were broken: {broken}" if broken else "its GPUs were held"
        ending.cancel(tx, reservation, now, state="expired", cause=None, detail=f"its window passed while {why}")
        return NOTHING_DUE
    tended = tend_placed(tx, tools, reservation, now)
    if tended.moved:
        return timedelta(0)
    if tended.broken:
        # not even when its window opens: what would be bound is not there
        return _next_look(now, tended.look_at, reservation.window_end)
    if now < reservation.window_start:
        return _next_look(now, reservation.window_start, tended.look_at)
    outcome = bind(tx, tools, reservation, now)
    if outcome == "bound":
        return _next_look(now, now + BIND_TIMEOUT, reservation.window_end)
    condition: ReservationCondition = "spec_full" if outcome == "spec_full" else "waiting_for_release"
    if reservations.set_condition(tx, reservation.reservation_id, condition, present=True):
        _tell_both_holders(tx, reservation, condition)
    return WAITING_RECHECK


def _tell_both_holders(tx: Tx, reservation: Reservation, condition: ReservationCondition) -> None:
    """Tell the one that waits, and those in its way that should have let go, and wake these.

    Theirs is an event alone, and nothing that they do meanwhile comes before it: their rows are locked. These come
    before this one's nodes, which are locked, in the lock order, so nobody is waited for. Raises Contended.
    """
    announce(tx, reservation, "condition", condition=condition, present=True)
    in_the_way = {
        hold.reservation_id
        for booking in ledger.load_bookings(tx, reservation.reservation_id)
        for hold in ledger.load_open_on_node(tx, booking.node_id)
        if hold.state == "releasing" and hold.reservation_id != reservation.reservation_id
    }
    holders = reservations.lock_those_free(tx, in_the_way)
    if len(holders) < len(in_the_way):
        raise Contended("reservation")
    for holder in holders.values():
        # whose it is is nobody's business but their own
        in_the_way_of = reservation.public_id if holder.tenant_id == reservation.tenant_id else None
        announce(tx, holder, "condition", condition="overrun", present=True, in_the_way_of=in_the_way_of)
    enqueue(tx, "reservation", map(str, holders))


def _step_binding(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    if reservation.window_end is not None and reservation.window_end <= now:
        ending.end(tx, tools, reservation, now, cause="window_ended")
        return NOTHING_DUE
    deadline = reservation.bind_deadline
    # without a deadline nothing is binding: a replacement failed, and the holder may ask for another
    if deadline is None or now < deadline:
        return _next_look(now, deadline, reservation.window_end, tend_held(tx, reservation, now))
    if reservation.active_at is not None:
        late = [
            hold.node_id for hold in ledger.load_allocations(tx, reservation.reservation_id) if hold.state == "binding"
        ]
        drop_unbound(tx, tools, reservation, late, now, detail="the node did not confirm in time")
        return _next_look(now, reservation.window_end)
    ending.end(tx, tools, reservation, now, cause="bind_failed", detail="the node did not confirm in time")
    return NOTHING_DUE


def _next_look(now: datetime, *instants: datetime | None) -> timedelta | None:
    """How long until the first of these: nobody looks before, so each that may be due counts."""
    first = min((instant for instant in instants if instant is not None), default=None)
    return NOTHING_DUE if first is None else first - now


def _step_active(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    if reservation.window_end is not None and reservation.window_end <= now:
        ending.end(tx, tools, reservation, now, cause="window_ended")
        return NOTHING_DUE
    return _next_look(now, reservation.window_end, tend_held(tx, reservation, now))


def _step_releasing(tx: Tx, _: LedgerTools, reservation: Reservation, now: datetime) -> timedelta | None:
    """Only evidence moves it on. The condition says to people that it is taking long."""
    due = _next_instant(reservation)
    if due is None or now < due:
        return _next_look(now, due)
    if reservations.set_condition(tx, reservation.reservation_id, "overrun", present=True):
        announce(tx, reservation, "condition", condition="overrun", present=True)
    return NOTHING_DUE


_STEPS: dict[ReservationState, Callable[[Tx, LedgerTools, Reservation, datetime], timedelta | None]] = {
    "draft": _step_draft,
    "queued": _step_queued,
    "placed": _step_placed,
    "binding": _step_binding,
    "active": _step_active,
    "releasing": _step_releasing,
}


# --- who is looked at again ----------------------------------------------------------------------


def find_unsettled(tx: Tx, after: int, limit: int) -> tuple[list[int], int | None]:
    """Look through the next `limit` open reservations for those for which `step` may have something to do.

    What is left out has nothing due, is in the queue for when something is, and has parts that the very judge of the
    step finds well. A step is a transaction of its own: ten thousand of them that do nothing take twelve seconds of
    CPU, and to look who needs one takes half a second.

    Returns:
        Them, in id order, and the id after which to go on, None if there are no more.
    """
    rows = reservations.page_open(tx, after, limit)
    now = load_now(tx)
    queued = find_keys(tx, "reservation", [str(row.reservation_id) for row in rows])
    unsettled = {row.reservation_id for row in rows if _is_due(row, now, queued=str(row.reservation_id) in queued)}
    held = [row.reservation_id for row in rows if row.state in ("placed", "binding", "active")]
    parts = load_all_backed_parts(tx, [id_ for id_ in held if id_ not in unsettled])
    unsettled.update(id_ for id_, of_it in parts.items() if any(map(partial(_is_unwell, now=now), of_it)))
    more = rows[-1].reservation_id if len(rows) == limit else None
    return sorted(unsettled), more


def _is_due(row: Reservation, now: datetime, *, queued: bool) -> bool:
    """Whether time alone may change it, or nobody would look when it may; a condition may have to be cleared."""
    instant = _next_instant(row)
    return bool(row.conditions) or (instant is not None and (instant <= now or not queued))


def _is_unwell(part: Part, *, now: datetime) -> bool:
    verdict = judge_part(part, now)
    return bool(verdict.faults) or verdict.worse_at is not None


def _next_instant(row: Reservation) -> datetime | None:
    """When the step of its state first does something for the time's sake; None if that is never."""
    match row.state:
        case "draft":
            instant = row.created_at + DRAFT_LIFE
        case "queued":
            instant = row.queue_deadline
        case "placed":
            instant = row.window_start
        case "binding":
            instant = min((at for at in (row.bind_deadline, row.window_end) if at is not None), default=None)
        case "active":
            instant = row.window_end
        case _:
            assert row.releasing_at is not None, "the one state that is left of those that have not ended"
            instant = row.releasing_at + ending.RELEASE_PATIENCE
    return instant
