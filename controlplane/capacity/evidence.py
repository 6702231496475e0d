"""What a node signed, turned into ledger facts; the only way to `active` and to `released`.

The caller has verified the envelope's signature against keys of that node that are not revoked, and
holds the reservation's row lock. What is checked here is that the statement is about *this* hold: a
replayed envelope of an earlier allocation, of a spec before the assignment, or of other devices is
refused, and nothing changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.capacity import end as ending
from controlplane.capacity.place import announce
from controlplane.capacity.replace import drop_unbound
from controlplane.db import ledger, reservations
from controlplane.model.evidence import Applied, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.ledger import Allocation
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from shared.wire import AllocationBound, AllocationFailed, AllocationReleased


def apply_bound(
    tx: Tx,
    reservation: Reservation,
    hold: Allocation,
    bound: AllocationBound,
    *,
    envelope: bytes,
    now: datetime,
) -> Applied | Refused:
    """Take the node's word that it holds the devices; the last one makes the reservation `active`."""
    if (bound.incarnation, bound.generation) < (hold.incarnation, hold.generation):
        return Refused(f"signed for generation {bound.generation}, assigned in {hold.generation}")
    if sorted(bound.device_uuids) != sorted(hold.device_uuids):
        return Refused("bound other devices than were assigned")
    if not ledger.mark_bound(tx, hold.allocation_id, envelope=envelope, cdi_name=bound.cdi_name, now=now):
        # bound already, or ended meanwhile: the statement is true and too late to matter
        return Applied(news=False)
    if reservations.mark_active_if_bound(tx, reservation.reservation_id, now=now):
        announce(tx, reservation, "active", cdi_name=bound.cdi_name)
    return Applied(news=True)


def apply_failed(
    tx: Tx,
    tools: LedgerTools,
    reservation: Reservation,
    hold: Allocation,
    failed: AllocationFailed,
    *,
    now: datetime,
) -> Applied | Refused:
    """Take the node's word that it could not bind: the reservation ends by tombstone on all its nodes.

    One that was active loses that replacement alone.
    """
    if (failed.incarnation, failed.generation) < (hold.incarnation, hold.generation):
        return Refused(f"signed for generation {failed.generation}, assigned in {hold.generation}")
    if hold.state != "binding" or reservation.state != "binding":
        return Applied(news=False)
    detail = f"{failed.code}: {failed.detail}"
    if reservation.active_at is not None:
        drop_unbound(tx, tools, reservation, [hold.node_id], now, detail=detail)
        return Applied(news=True)
    return Applied(news=ending.end(tx, tools, reservation, now, cause="bind_failed", detail=detail))


def apply_released(
    tx: Tx,
    tools: LedgerTools,
    reservation: Reservation,
    hold: Allocation,
    released: AllocationReleased,
    *,
    envelope: bytes,
    now: datetime,
) -> Applied | Refused:
    """Take the node's word that it holds nothing any more, if it was asked to let go."""
    if hold.state == "released":
        return Applied(news=False)
    if hold.state != "releasing" or hold.end_generation is None:
        return Refused("nobody asked the node to release this allocation")
    if (released.incarnation, released.generation) < (hold.incarnation, hold.end_generation):
        return Refused(f"signed for generation {released.generation}, ended in {hold.end_generation}")
    if not ledger.mark_released_signed(
        tx, hold.allocation_id, envelope=envelope, processes_left=_bounded(released.processes_left), now=now
    ):
        return Applied(news=False)
    ending.finish_release(tx, tools, reservation, hold, now)
    return Applied(news=True)


# A row keeps the first pids that were still on the GPUs: evidence for a person, not a process table.
PROCESSES_KEPT = 64


def _bounded(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if 0 <= pid < 2**31][:PROCESSES_KEPT]
