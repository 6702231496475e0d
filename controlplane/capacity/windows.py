"""Moves the end of a window: the same devices for longer or shorter, or a refusal; never a move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.capacity.end import wake_waiting
from controlplane.capacity.place import GUARDS, announce
from controlplane.capacity.specs import write_spec
from controlplane.db import ledger, reservations
from controlplane.db.queue import schedule
from controlplane.db.tx import CheckConflict, ExclusionConflict
from controlplane.errors import Conflict

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx


def move_end(tx: Tx, tools: LedgerTools, reservation: Reservation, end: datetime, now: datetime) -> Conflict | None:
    """Give a locked reservation another end; the refusal if its devices are booked by others then.

    The bookings are checked by both guards again, so an extension is refused exactly when somebody
    else's plan is in the way.
    """
    if reservation.state not in ("placed", "binding", "active"):
        return Conflict(f"reservation {reservation.public_id} is {reservation.state}; its window cannot be moved")
    if reservation.window_end is not None and reservation.window_end <= now:
        return Conflict(f"reservation {reservation.public_id} has reached its end; make a new one")
    bookings = ledger.load_bookings(tx, reservation.reservation_id)
    nodes = ledger.lock_nodes(tx, [booking.node_id for booking in bookings])
    try:
        with tx.savepoint():
            ledger.move_booking_end(tx, reservation.reservation_id, end)
    except (ExclusionConflict, CheckConflict) as conflict:
        if conflict.constraint not in GUARDS:
            raise
        return Conflict("end: the devices are booked by others before that time", field="end")
    assert reservation.window_start is not None, "placed"
    reservations.move_window(tx, reservation.reservation_id, start=reservation.window_start, end=end)
    if reservation.state != "placed":
        for node_id in sorted(nodes):
            write_spec(tx, node_id, nodes[node_id].public_id, signer=tools.signer, now=now)
    announce(tx, reservation, "extended", end=end.isoformat())
    schedule(tx, "reservation", str(reservation.reservation_id), end)
    wake_waiting(tx, reservation.pool_id)
    return None
