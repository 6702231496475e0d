"""Replaces the broken parts of a reservation that runs, because its holder asked for it.

Where nothing is broken, those on nodes that are being drained are replaced: an operator waits for them to go, and only
the holder can say that they may. Both at once are not: what is broken must not wait for room for what is well.

Its broken holds are ended by tombstone and stay held until their nodes sign or an operator forces them; new parts are
booked and bound on other nodes in what is left of the window; the parts that are well stay where they are. All of it is
one transaction, so that without room for every broken part nothing changes.

`active` means that every node has signed, so the reservation is `binding` until the new parts have, and is not billed
meanwhile. A replacement that does not bind is dropped alone, never the reservation with what runs of it: it stays
`binding` and impaired, and its holder may ask again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from controlplane.capacity.end import wake_waiting
from controlplane.capacity.place import BIND_TIMEOUT, Contended, announce, commitment, plan_and_lock, write_parts
from controlplane.capacity.repair import inspect, remaining_request, tell, tell_moved
from controlplane.capacity.specs import SpecFull, write_spec
from controlplane.db import backing, ledger, reservations
from controlplane.db.queue import schedule
from controlplane.errors import Conflict, SoldOut
from controlplane.model.planner import NoPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.capacity.repair import Inspection
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.planner import Plan


def replace_broken(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> Conflict | SoldOut | None:
    """Replace the broken parts of a locked `binding` or `active` reservation, or if there are none the draining ones.

    Returns:
        The refusal if that cannot be; then, too, nothing may be kept of this transaction.

    Raises:
        Contended: somebody was faster; nothing may be kept of this transaction.
    """
    if reservation.state == "placed":
        return Conflict(f"reservation {reservation.public_id} has not begun; it is moved by itself when there is room")
    if reservation.state not in ("binding", "active"):
        return Conflict(f"reservation {reservation.public_id} is {reservation.state}; there is nothing to repair")
    if reservation.window_end is not None and reservation.window_end <= now:
        return Conflict(f"reservation {reservation.public_id} has reached its end; make a new one")
    found = inspect(tx, reservation, now)
    going = sorted(found.broken or found.draining)
    if not going:
        return Conflict(f"reservation {reservation.public_id}: nothing of it is broken, and no node of it is draining")
    # its own bookings are in nobody's way, least of all its own; a refusal takes this back with the transaction
    ledger.close_bookings(tx, reservation.reservation_id, on_nodes=going, used_until=now)
    plan = _plan(tx, tools, reservation, found, going, now=now)
    if isinstance(plan, NoPlan):
        return SoldOut(f"for {len(going)} of {reservation.nodes} parts: {plan.detail}")
    try:
        _rebind(tx, tools, reservation, going, plan, now=now)
    except SpecFull as refused:
        raise Contended(str(refused)) from refused
    announce(tx, reservation, "binding")
    tell_moved(tx, reservation, found, going, plan, now=now)
    # what was well of the parts that went is free in the plan
    wake_waiting(tx, reservation.pool_id)
    return None


def _plan(
    tx: Tx, tools: LedgerTools, reservation: Reservation, found: Inspection, going: Sequence[int], *, now: datetime
) -> Plan | NoPlan:
    """Plan the new parts on nodes where nothing else of it is, at best where it has not failed to bind before."""
    request = replace(remaining_request(reservation, now), nodes=len(going))
    staying = {part.node.node_id for part in found.parts} - set(going)
    failed = set(ledger.load_unbound(tx, reservation.reservation_id))
    pool_id = reservation.pool_id
    plan = plan_and_lock(tx, tools, pool_id, request, now, without=staying | failed, lock_too=going)
    if isinstance(plan, NoPlan) and failed - staying:
        plan = plan_and_lock(tx, tools, pool_id, request, now, without=staying, lock_too=going)
    return plan


def _rebind(
    tx: Tx, tools: LedgerTools, reservation: Reservation, going: Sequence[int], plan: Plan, *, now: datetime
) -> None:
    reservation_id = reservation.reservation_id
    if reservation.billed_from is not None:
        reservations.record_usage(tx, reservation_id, end=now)
    ledger.mark_allocations_releasing(tx, reservation_id, now=now, on_nodes=going)
    if not write_parts(tx, reservation.pool_id, [commitment(tools, reservation, plan)]):
        raise Contended("booking_no_overlap or allocation_one_hold")
    if not backing.mark_rebinding(tx, reservation_id, bind_deadline=now + BIND_TIMEOUT):
        raise Contended("reservation")
    _write_specs(tx, tools, {*going, *(part.node_id for part in plan.parts)}, now)
    schedule(tx, "reservation", str(reservation_id), now + BIND_TIMEOUT)


def _write_specs(tx: Tx, tools: LedgerTools, node_ids: Collection[int], now: datetime) -> None:
    for node_id in sorted(node_ids):
        write_spec(tx, node_id, signer=tools.signer, now=now)


def drop_unbound(
    tx: Tx, tools: LedgerTools, reservation: Reservation, node_ids: Sequence[int], now: datetime, *, detail: str
) -> None:
    """End, by tombstone, new parts of a locked `binding` reservation that their nodes did not bind, and those alone."""
    reservation_id = reservation.reservation_id
    ledger.lock_nodes(tx, node_ids)
    ledger.mark_allocations_releasing(tx, reservation_id, now=now, on_nodes=node_ids)
    _write_specs(tx, tools, node_ids, now)
    if all(left.state != "binding" for left in ledger.load_allocations(tx, reservation_id, open_only=True)):
        backing.drop_bind_deadline(tx, reservation_id)
    found = inspect(tx, reservation, now)
    announce(
        tx,
        reservation,
        "replacement_failed",
        failed_on=[part.node.name for part in found.parts if part.node.node_id in node_ids],
        detail=detail,
    )
    tell(tx, reservation, found.faults)
