"""Takes nodes away for a while without taking them from anybody.

A window is a booking of the whole node, so it can only be where nothing is booked: at the time that
was asked for, or at the first gap after it. Until then the node goes on serving whoever ends before
it; nobody can be placed over it, or extend into it. Who has something on the node before it when it is
planned is told, once by an event and for as long as it is to come by a condition. Who is placed there
later has a window that ends before it, and nothing to be told.

When the window begins the node is cordoned, unless somebody did that before, and when it ends what
was cordoned for it is not any more. A node whose holder overruns is cordoned all the same: what it
still holds can be seen on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.capacity.place import GUARDS, Contended, announce
from controlplane.capacity.windows import check_length
from controlplane.db import ledger, maintenance, nodes, reservations
from controlplane.db.maintenance import PLANNED
from controlplane.db.queue import enqueue, schedule
from controlplane.db.tx import CheckConflict, ExclusionConflict
from controlplane.errors import Conflict
from controlplane.fleet.lifecycle import tell
from controlplane.model.maintenance import find_gap, in_the_way, plan_rolling
from controlplane.model.requests import NO_LIMITS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from controlplane.db.maintenance import Maintenance
    from controlplane.db.nodes import LifecycleNode
    from controlplane.db.tx import Tx
    from controlplane.model.maintenance import Busy
    from shared.ids import IdSource

# Of the bookings in the way, and of the nodes, those that a message names.
_NAMED_MAX = 3
NOTHING_DUE = None


@dataclass(frozen=True, slots=True)
class Asked:
    """Windows that an operator wants: one for each node, in their order.

    Attributes:
        nodes: ids and names.
        start: the earliest start.
        length: of each window.
        at_once: how many nodes may be away at the same time; None is all.
        earliest: take the first gap if the time that was asked for is not free.
        reason: for people.
        created_by: who asks.
    """

    nodes: Sequence[tuple[int, str]]
    start: datetime
    length: timedelta
    at_once: int | None
    earliest: bool
    reason: str
    created_by: str


def plan(tx: Tx, ids: IdSource, asked: Asked) -> list[int]:
    """Book every window or none, and tell the holders; returns the maintenance_ids.

    Raises:
        Conflict: a node is booked then, or for ever.
        Contended: something was booked at the same time; nothing may be kept of this transaction.
    """
    node_ids = [node_id for node_id, _ in asked.nodes]
    # all reservations before any node: the lock order
    locked = maintenance.load_holders(tx, node_ids)
    for reservation_id in locked:
        reservations.lock_reservation(tx, reservation_id)
    ledger.lock_nodes(tx, node_ids)
    if not set(maintenance.load_holders(tx, node_ids)) <= set(locked):
        raise Contended("booking")
    starts = _choose(asked, maintenance.load_busy(tx, node_ids, asked.start))
    made: list[int] = []
    for (node_id, name), start in zip(asked.nodes, starts, strict=True):
        end = start + asked.length
        public_id = ids.new("mnt")
        try:
            maintenance_id = maintenance.insert_maintenance(
                tx,
                public_id=public_id,
                node_id=node_id,
                start=start,
                end=end,
                reason=asked.reason,
                created_by=asked.created_by,
            )
        except (ExclusionConflict, CheckConflict) as conflict:
            if conflict.constraint not in GUARDS:
                raise
            raise Contended(conflict.constraint) from conflict
        made.append(maintenance_id)
        _warn(tx, node_id, name, public_id, start=start, end=end, reason=asked.reason)
        schedule(tx, "maintenance", str(maintenance_id), start)
    return made


def _choose(asked: Asked, busy: dict[int, list[Busy]]) -> list[datetime]:
    """The start of each window. Raises Conflict."""
    calendars = [busy[node_id] for node_id, _ in asked.nodes]
    free: list[Sequence[Busy]] = [() for _ in calendars]
    # without `earliest` the starts are those of an empty fleet, and each must be free
    chosen = plan_rolling(calendars if asked.earliest else free, asked.start, asked.length, asked.at_once)
    starts: list[datetime] = []
    problems: list[str] = []
    for (_, name), calendar, start in zip(asked.nodes, calendars, chosen, strict=True):
        if start is not None and find_gap(calendar, start, asked.length) == start:
            starts.append(start)
        else:
            problems.append(_problem(name, calendar, start or asked.start, asked.length))
    if problems:
        more = f"; and {len(problems) - _NAMED_MAX} more nodes" if len(problems) > _NAMED_MAX else ""
        raise Conflict(f"start: {'; '.join(problems[:_NAMED_MAX])}{more}", field="start")
    return starts


def _problem(name: str, calendar: Sequence[Busy], start: datetime, length: timedelta) -> str:
    gap = find_gap(calendar, start, length)
    if gap is None:
        endless = [b.holder for b in calendar if b.end is None]
        return f"{name} is booked without an end by {', '.join(endless)}; shrink or evict that first"
    there = in_the_way(calendar, start, length)
    named = ", ".join(b.holder for b in there[:_NAMED_MAX]) + (", …" if len(there) > _NAMED_MAX else "")
    return f"{name} is booked by {named} then; it is free from {text_of(gap)} on, which `earliest` takes"


def _warn(tx: Tx, node_id: int, name: str, public_id: str, *, start: datetime, end: datetime, reason: str) -> None:
    """Tell everybody who has something on the node before the window."""
    for reservation_id in maintenance.load_holders_before(tx, node_id, end):
        reservation = reservations.load_reservation(tx, reservation_id)
        assert reservation is not None, "a booking has a reservation"
        reservations.set_condition(tx, reservation_id, PLANNED, present=True)
        announce(
            tx,
            reservation,
            PLANNED,
            node=name,
            maintenance=public_id,
            maintenance_start=start.isoformat(),
            maintenance_end=end.isoformat(),
            reason=reason,
        )


# --- the clock ---------------------------------------------------------------------------------


def step(tx: Tx, maintenance_id: int, now: datetime) -> timedelta | None:
    """Begin or end a window if it is time; how long until the next thing is due, None if nothing is."""
    found = maintenance.load_maintenance(tx, maintenance_id)
    if found is None or found.ended_at is not None:
        return NOTHING_DUE
    node = nodes.lock_lifecycle(tx, found.node_id)
    row = maintenance.load_maintenance(tx, maintenance_id)
    assert node is not None, "nodes are never removed"
    assert row is not None, "nor is this"
    if row.ended_at is not None:
        return NOTHING_DUE
    if row.node_gone or now >= row.end:
        _end(tx, row, node, "cancelled" if row.node_gone and row.state == "planned" else "done", now)
        return NOTHING_DUE
    if now < row.start:
        return row.start - now
    if row.state == "planned":
        _begin(tx, row, node)
    return row.end - now


def _begin(tx: Tx, row: Maintenance, node: LifecycleNode) -> None:
    cordon = not node.cordoned
    maintenance.mark_open(tx, row.maintenance_id, cordoned=cordon)
    if cordon:
        nodes.set_cordon(tx, node.node_id, cordoned=True, reason=f"maintenance: {row.reason}")
        tell(tx, node, "cordoned", reason=f"maintenance: {row.reason}")
    tell(tx, node, "maintenance_started", maintenance=row.public_id, reason=row.reason, until=row.end.isoformat())


def _end(tx: Tx, row: Maintenance, node: LifecycleNode, state: maintenance.MaintenanceState, now: datetime) -> None:
    maintenance.mark_ended(tx, row.maintenance_id, state, now=now)
    if row.state == "open":
        tell(tx, node, "maintenance_ended", maintenance=row.public_id)
    if (
        row.cordoned
        and node.cordoned
        and not maintenance.hand_over_cordon(tx, node.node_id, leaving=row.maintenance_id)
    ):
        nodes.set_cordon(tx, node.node_id, cordoned=False)
        tell(tx, node, "uncordoned")
    enqueue(tx, "pool", [str(node.pool_id)])


# --- by operators ------------------------------------------------------------------------------


def cancel(tx: Tx, row: Maintenance, now: datetime) -> None:
    """Take a window out of the plan, or end it now if it has begun; one that is over stays as it is."""
    # all reservations before the node: the lock order
    holders = maintenance.load_holders(tx, [row.node_id])
    for reservation_id in holders:
        reservations.lock_reservation(tx, reservation_id)
    node = nodes.lock_lifecycle(tx, row.node_id)
    found = maintenance.load_maintenance(tx, row.maintenance_id)
    assert node is not None, "nodes are never removed"
    assert found is not None, "nor is this"
    if found.ended_at is not None:
        return
    begun = found.state == "open"
    _end(tx, found, node, "done" if begun else "cancelled", now)
    for reservation_id in maintenance.load_told_in_vain(tx, row.node_id):
        # one that was booked a moment ago was told of nothing
        reservation = reservations.load_reservation(tx, reservation_id)
        if reservation is None or reservation_id not in holders:
            continue
        reservations.set_condition(tx, reservation_id, PLANNED, present=False)
        announce(tx, reservation, "condition", condition=PLANNED, present=False, maintenance=row.public_id)


def extend(tx: Tx, row: Maintenance, end: datetime, now: datetime) -> None:
    """Give a window that is planned or open a later end. Raises Conflict, Invalid."""
    nodes.lock_lifecycle(tx, row.node_id)
    found = maintenance.load_maintenance(tx, row.maintenance_id)
    assert found is not None, "never removed"
    if found.ended_at is not None or found.end <= now:
        raise Conflict(f"maintenance {row.public_id} is over; plan another")
    if end <= found.end:
        raise Conflict(f"end: is not later than the end there is, {text_of(found.end)}", field="end")
    check_length(NO_LIMITS, found.start, end)
    try:
        with tx.savepoint():
            maintenance.move_end(tx, found, end)
    except (ExclusionConflict, CheckConflict) as conflict:
        if conflict.constraint not in GUARDS:
            raise
        busy = maintenance.load_busy(tx, [row.node_id], found.end)[row.node_id]
        first = min((b for b in busy if b.start >= found.end), key=lambda b: b.start)
        raise Conflict(
            f"end: {row.node_name} is booked by {first.holder} from {text_of(first.start)} on; end it by then",
            field="end",
        ) from conflict
    schedule(tx, "maintenance", str(row.maintenance_id), end)


def text_of(at: datetime) -> str:
    """An instant in a sentence."""
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
