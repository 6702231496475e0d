"""Moves the end of a window: the same devices for longer or shorter, or a refusal; never a move.

An extension is refused exactly when something is in its way: somebody else's booking of the same
units or of the last vCPUs (a maintenance window is a booking too), the pool's longest duration, or a
node that is being drained. What is in the way is named with the time until which there is room.
"""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING

from controlplane.capacity.end import wake_waiting
from controlplane.capacity.place import GUARDS, announce
from controlplane.capacity.quota import charge_end
from controlplane.capacity.specs import write_spec
from controlplane.db import ledger, reservations
from controlplane.db.places import load_window_limits
from controlplane.db.queue import schedule
from controlplane.db.tx import CheckConflict, ExclusionConflict
from controlplane.errors import Conflict, Invalid
from controlplane.model.requests import NO_LIMITS, InvalidRequest, check_total

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.requests import WindowLimits


def extend(tx: Tx, tools: LedgerTools, reservation: Reservation, end: datetime, now: datetime) -> None:
    """Give a locked reservation a later end.

    Raises:
        Conflict: it is in a state without a window, its devices are others' before that, or a node is drained.
        Invalid: the pool does not allow so long a window, or none may be so long.
        QuotaExceeded: GPU-hours are short.
    """
    start, old_end = _check_window(reservation, now)
    if old_end is None:
        raise Conflict("end: the reservation is open-ended; shrink it to give it an end", field="end")
    if end <= old_end:
        raise Invalid(f"end: {_text(end)} is not later than the end there is, {_text(old_end)}", field="end")
    # from the first start, so that no number of steps makes it longer
    check_length(load_window_limits(tx, reservation.pool_id), start, end)
    _move_end(tx, tools, reservation, end, now)


def shrink(tx: Tx, tools: LedgerTools, reservation: Reservation, end: datetime, now: datetime) -> None:
    """Give a locked reservation an earlier end, or one that is open-ended an end. Raises Conflict, Invalid."""
    start, old_end = _check_window(reservation, now)
    if old_end is not None and end >= old_end:
        raise Invalid(f"end: {_text(end)} is not earlier than the end there is, {_text(old_end)}", field="end")
    if end <= now:
        raise Invalid("end: is in the past; to end it now, release it", field="end")
    if end <= start:
        raise Invalid("end: is not later than the start; to end it before it starts, release it", field="end")
    # one that is open-ended gets any end that there may be, whatever the pool has allowed since
    check_length(NO_LIMITS, start, end)
    _move_end(tx, tools, reservation, end, now)


def check_length(limits: WindowLimits, start: datetime, end: datetime) -> None:
    """Raises Invalid for an end that makes a window too long."""
    try:
        check_total(limits, start, end)
    except InvalidRequest as exc:
        raise Invalid(str(exc), field="end") from exc


def _check_window(reservation: Reservation, now: datetime) -> tuple[datetime, datetime | None]:
    """The window as it is. Raises Conflict for a reservation that has none, or none any more."""
    name, state = reservation.public_id, reservation.state
    if state in ("draft", "queued"):
        raise Conflict(f"reservation {name} is {state} and has no window yet; release it and ask anew")
    if state not in ("placed", "binding", "active"):
        raise Conflict(f"reservation {name} is {state}; its window cannot be moved")
    start, end = reservation.window_start, reservation.window_end
    assert start is not None, "a CHECK keeps these with a window"
    if end is not None and end <= now:
        raise Conflict(f"reservation {name} has reached its end; make a new one")
    return start, end


def _move_end(tx: Tx, tools: LedgerTools, reservation: Reservation, end: datetime, now: datetime) -> None:
    charge_end(tx, reservation, end)
    bookings = ledger.load_bookings(tx, reservation.reservation_id)
    nodes = ledger.lock_nodes(tx, [booking.node_id for booking in bookings])
    later = reservation.window_end is not None and end > reservation.window_end
    if later and any(node.draining for node in nodes.values()):
        raise Conflict("end: a node of it is being drained, and takes nothing for longer", field="end")
    try:
        with tx.savepoint():
            ledger.move_booking_end(tx, reservation.reservation_id, end)
    except (ExclusionConflict, CheckConflict) as conflict:
        if conflict.constraint not in GUARDS:
            raise
        raise _in_the_way(tx, reservation, end) from conflict
    if not reservations.move_end(tx, reservation.reservation_id, old_end=reservation.window_end, end=end):
        raise Conflict(f"reservation {reservation.public_id} was changed at the same time; read it again")
    if reservation.state != "placed":
        for node_id in sorted(nodes):
            write_spec(tx, node_id, signer=tools.signer, now=now)
    announce(tx, reservation, "extended" if later else "shrunk", end=end.isoformat())
    schedule(tx, "reservation", str(reservation.reservation_id), end)
    if not later:
        wake_waiting(tx, reservation.pool_id)


def _in_the_way(tx: Tx, reservation: Reservation, end: datetime) -> Conflict:
    until = ledger.find_next_use(tx, reservation.reservation_id, before=end)
    if until is None:
        return Conflict("end: a booking came in at the same time; try again", field="end")
    if until == reservation.window_end:
        return Conflict("end: its devices are others' from the very end there is; it cannot be extended", field="end")
    return Conflict(f"end: its devices are others' from {_text(until)} on; it can be extended until then", field="end")


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
