"""Places queued reservations when something may have become free.

They are tried in the order in which they came. One that does not fit is passed by, so a small one
may start before a large one that waits; requests of the same shape are planned once a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.capacity.place import Placed, announce, place, placement_request
from controlplane.db import reservations
from controlplane.db.places import load_window_limits
from controlplane.db.time import load_now
from controlplane.model.quotas import QuotaShort
from controlplane.model.requests import InvalidRequest, check_limits

if TYPE_CHECKING:
    from controlplane.capacity.place import LedgerTools
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx

# One pass over a pool's queue; the next pass goes on where nothing was found before.
QUEUED_PER_PASS = 500


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """It does not fit. `shape` names every request that would be answered alike, None if only this one is."""

    shape: tuple[object, ...] | None
    reason: str


def shape_of(reservation: Reservation) -> tuple[object, ...]:
    """What a plan depends on, so that equal shapes get equal answers from an unchanged ledger."""
    return (
        reservation.nodes,
        reservation.gpus_per_node,
        reservation.vcpus_per_node,
        reservation.memory_mib_per_node,
        reservation.topology,
        reservation.whole_node,
        reservation.starts_at,
        reservation.duration_s,
    )


def place_queued(
    tx: Tx, tools: LedgerTools, reservation_id: int, full: dict[tuple[object, ...], str]
) -> StillWaiting | None:
    """Try one queued reservation; None if it is placed or no longer queued.

    `full` holds the shapes that were found not to fit in this pass, with the reason.
    """
    reservation = reservations.lock_reservation(tx, reservation_id)
    if reservation is None or reservation.state != "queued":
        return None
    shape = shape_of(reservation)
    waiting = StillWaiting(shape, full[shape]) if shape in full else _try(tx, tools, reservation, shape)
    if waiting is not None and reservations.set_pending_reason(tx, reservation_id, waiting.reason):
        announce(tx, reservation, "queued", reason=waiting.reason)
    return waiting


def _try(tx: Tx, tools: LedgerTools, reservation: Reservation, shape: tuple[object, ...]) -> StillWaiting | None:
    now = load_now(tx)
    try:
        check_limits(load_window_limits(tx, reservation.pool_id), placement_request(reservation), now)
    except InvalidRequest as exc:
        # set while it waited; they may be lifted again
        return StillWaiting(shape, str(exc))
    placed = place(tx, tools, reservation, now)
    if isinstance(placed, Placed):
        return None
    # a quota is the tenant's own matter: it says nothing about others of the same shape
    return StillWaiting(None if isinstance(placed, QuotaShort) else shape, placed.detail)
