"""Keeps reservations on hardware that is there: whose part is broken is told, and who has not begun is moved.

What is broken is `model.backing`'s to say, from the rows as they are; the condition `impaired` and its reason follow
that, and each change is an event. Nothing here ends a reservation or releases anything.

A reservation that has not begun holds nothing, so its broken parts move to other nodes in the same window, the other
parts staying where they are; if there is no room it waits, broken, and is tried again. One that is held stays where it
is until its holder asks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from controlplane.capacity.end import late_from
from controlplane.capacity.place import announce, book_plan, placement_request, plan_and_lock
from controlplane.db import backing, ledger
from controlplane.db.maintenance import load_back_by
from controlplane.model.backing import judge_part
from controlplane.model.planner import NoPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.backing import Fault, Part
    from controlplane.model.planner import Plan
    from controlplane.model.requests import PlacementRequest

# How soon room for a broken part that nobody announces is found: a release on some other node of the pool.
RECHECK = timedelta(seconds=60)
# Of a gang whose site lost power, the first few say it all; events and rows stay small.
FAULTS_TOLD = 16


@dataclass(frozen=True, slots=True)
class Inspection:
    """The parts of a reservation, what is broken of them, and when more will be if nothing changes.

    `back_soon`: what is broken of one that has not begun is in maintenance, and expected back before it begins.
    """

    parts: Sequence[Part]
    faults: Sequence[Fault]
    worse_at: datetime | None
    back_soon: bool

    @property
    def broken(self) -> frozenset[int]:
        """The nodes of the broken parts."""
        return frozenset(fault.node_id for fault in self.faults)

    @property
    def draining(self) -> frozenset[int]:
        """The nodes that wait for it to be gone: no fault of what runs there, and its holder may want to move."""
        return frozenset(part.node.node_id for part in self.parts if part.node.draining)


def inspect(tx: Tx, reservation: Reservation, now: datetime) -> Inspection:
    """Look at what a booked reservation has of its nodes."""
    parts = backing.load_backed_parts(tx, reservation.reservation_id)
    verdicts = [judge_part(part, now) for part in parts]
    faults = [fault for verdict in verdicts for fault in verdict.faults]
    worse_at = min((verdict.worse_at for verdict in verdicts if verdict.worse_at is not None), default=None)
    if not faults or reservation.state != "placed" or late_from(reservation) <= now:
        return Inspection(parts, faults, worse_at, back_soon=False)
    assert reservation.window_start is not None, "placed"
    back = load_back_by(tx, [fault.node_id for fault in faults], reservation.window_start)
    left = [fault for fault in faults if fault.node_id not in back]
    return Inspection(parts, left, worse_at, back_soon=len(left) < len(faults))


def tell(tx: Tx, reservation: Reservation, faults: Sequence[Fault]) -> None:
    """Make the condition `impaired` of a locked reservation say what is broken, and publish what has changed."""
    told = faults[:FAULTS_TOLD]
    reason = "; ".join(map(str, told))
    if len(faults) > len(told):
        reason += f"; and {len(faults) - len(told)} more"
    if not backing.set_impaired(tx, reservation.reservation_id, reason):
        return
    announce(
        tx,
        reservation,
        "condition",
        condition="impaired",
        present=bool(faults),
        reason=reason,
        faults=[{"node": fault.node, "reason": fault.text, "gpu_uuids": fault.gpu_uuids} for fault in told],
    )


def tell_moved(
    tx: Tx, reservation: Reservation, before: Inspection, going: Sequence[int], plan: Plan, *, now: datetime
) -> None:
    """Publish that the parts on `going` are where the plan says now, and what is still broken."""
    after = inspect(tx, reservation, now)
    name_of = {part.node.node_id: part.node.name for part in (*before.parts, *after.parts)}
    reasons = [str(fault) for fault in before.faults if fault.node_id in going]
    reasons = reasons or [f"{name_of[node]}: the node is draining" for node in going if node in before.draining]
    announce(
        tx,
        reservation,
        "moved",
        moved_from=[name_of[node] for node in going],
        moved_to=[name_of[part.node_id] for part in plan.parts],
        reason="; ".join(reasons[:FAULTS_TOLD]) or "a hold that should have ended was in the way",
    )
    tell(tx, reservation, after.faults)


def tend_held(tx: Tx, reservation: Reservation, now: datetime) -> datetime | None:
    """Say of a locked `binding` or `active` reservation whether it is broken; when to look again, if time alone may."""
    found = inspect(tx, reservation, now)
    tell(tx, reservation, found.faults)
    return found.worse_at


@dataclass(frozen=True, slots=True)
class Tended:
    """What became of a reservation that has not begun; one that is `broken` must not be bound."""

    moved: bool
    broken: bool
    look_at: datetime | None


def tend_placed(tx: Tx, tools: LedgerTools, reservation: Reservation, now: datetime) -> Tended:
    """Move the broken parts of a locked `placed` reservation, and those in whose way an overrun hold is.

    Raises:
        Contended: a guard refused the move; nothing may be kept of this transaction.
    """
    found = inspect(tx, reservation, now)
    leaving = set(found.broken)
    if "waiting_for_release" in reservation.conditions and late_from(reservation) <= now:
        leaving.update(backing.load_blocked(tx, reservation.reservation_id))
    if leaving and _move(tx, tools, reservation, found, sorted(leaving), now=now):
        return Tended(moved=True, broken=False, look_at=None)
    tell(tx, reservation, found.faults)
    if found.faults:
        return Tended(moved=False, broken=True, look_at=now + RECHECK)
    begun = reservation.window_start is not None and reservation.window_start <= now
    if found.back_soon and begun:
        return Tended(moved=False, broken=True, look_at=late_from(reservation))
    return Tended(moved=False, broken=False, look_at=found.worse_at)


class _NoRoom(Exception):
    """No nodes take the parts; what was taken apart for the attempt is put together again."""


def _move(
    tx: Tx,
    tools: LedgerTools,
    reservation: Reservation,
    found: Inspection,
    leaving: Sequence[int],
    *,
    now: datetime,
) -> bool:
    """Move all parts that must leave their nodes, or if that cannot be, one; says whether any moved.

    One that moved is the gang's from then on, and the next step goes on with the others.
    """
    for going in [leaving] if len(leaving) == 1 else [leaving, *([node] for node in leaving)]:
        try:
            with tx.savepoint():
                plan = _rebook(tx, tools, reservation, found.parts, going, now=now)
        except _NoRoom:
            # it may have looked at them as they were inside
            tools.indexes.doubt(reservation.pool_id, going)
            continue
        tell_moved(tx, reservation, found, going, plan, now=now)
        return True
    return False


def _rebook(
    tx: Tx, tools: LedgerTools, reservation: Reservation, parts: Sequence[Part], going: Sequence[int], *, now: datetime
) -> Plan:
    """Book the parts on `going` anew, on nodes where the reservation has nothing else, in what is left of its window.

    Raises:
        _NoRoom: inside a savepoint, which must be rolled back.
        Contended: somebody was faster.
    """
    ledger.close_bookings(tx, reservation.reservation_id, on_nodes=going)
    request = replace(remaining_request(reservation, now), nodes=len(going))
    staying = {part.node.node_id for part in parts} - set(going)
    plan = plan_and_lock(tx, tools, reservation.pool_id, request, now, without=staying)
    if isinstance(plan, NoPlan):
        raise _NoRoom
    book_plan(tx, reservation, plan)
    return plan


def remaining_request(reservation: Reservation, now: datetime) -> PlacementRequest:
    """The reservation's window as booked, or what is left of it once it is open."""
    assert reservation.window_start is not None, "booked"
    opened = reservation.window_start <= now
    start = now if opened else reservation.window_start
    return replace(
        placement_request(reservation),
        start=None if opened else start,
        duration=None if reservation.window_end is None else reservation.window_end - start,
    )
