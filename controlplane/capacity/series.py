"""Places a series: every window of it in one transaction, each as a reservation with bookings of its own.

The windows of a series do not overlap, so none is in another's way and each is planned on the ledger
as it is. A window is planned first on the nodes of the one before it: who comes back tomorrow finds
today's files. As everywhere, the plans are made without locks; then the nodes of all of them are
locked in the order of their ids, and each window is planned once more on its nodes as they are. Who
was faster costs a new transaction.

Only windows that are still to begin are placed, so nothing is held here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from controlplane.capacity.place import (
    Contended,
    announce,
    book_plan,
    placement_request,
)
from controlplane.capacity.quota import open_quotas
from controlplane.db import ledger, reservations, views
from controlplane.db.queue import schedule
from controlplane.model.planner import NoPlan, Plan, plan_placement
from controlplane.model.requests import InvalidRequest, check_limits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.reservations import NewReservation, Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from controlplane.model.recurrence import Occurrence
    from controlplane.model.requests import PlacementRequest, WindowLimits
    from shared.ids import IdSource


@dataclass(frozen=True, slots=True)
class Refused:
    """A window that cannot be placed, and the sentence that says why. `quota` if it is only for a quota."""

    why: str
    quota: bool = False


def plan_windows(
    request: PlacementRequest,
    occurrences: Sequence[Occurrence],
    nodes: Sequence[NodeView],
    limits: WindowLimits,
    now: datetime,
) -> list[Plan | Refused]:
    """A plan for each window, or why there is none; nothing is locked or written."""
    plans: list[Plan | Refused] = []
    near: Sequence[NodeView] = ()
    by_id = {node.node_id: node for node in nodes}
    for occurrence in occurrences:
        asked = replace(request, start=occurrence.start, duration=occurrence.end - occurrence.start)
        plan = _plan_one(asked, near, nodes, limits, now)
        plans.append(plan)
        if isinstance(plan, Plan):
            near = [by_id[part.node_id] for part in plan.parts]
    return plans


def _plan_one(
    asked: PlacementRequest,
    near: Sequence[NodeView],
    nodes: Sequence[NodeView],
    limits: WindowLimits,
    now: datetime,
) -> Plan | Refused:
    try:
        check_limits(limits, asked, now)
    except InvalidRequest as exc:
        return Refused(str(exc))
    plan = plan_placement(asked, near, now, None) if near else None
    if plan is None or isinstance(plan, NoPlan):
        plan = plan_placement(asked, nodes, now, None)
    return Refused(plan.detail) if isinstance(plan, NoPlan) else plan


@dataclass(frozen=True, slots=True)
class NewWindows:
    """What the windows of a new series have in common: `series` is its public id, `template` a draft without times."""

    series: str
    template: NewReservation


def place_windows(
    tx: Tx, ids: IdSource, new: NewWindows, planned: Sequence[tuple[Occurrence, Plan | Refused]], now: datetime
) -> list[Reservation | Refused]:
    """Book every window that has a plan and for which the quota has room.

    Raises:
        Contended: somebody was faster; nothing may be kept of this transaction.
    """
    outcomes: list[Reservation | Refused] = []
    drafted: list[tuple[Reservation, Plan]] = []
    quota = open_quotas(tx, [new.template])
    for occurrence, plan in planned:
        if isinstance(plan, Refused):
            outcomes.append(plan)
            continue
        draft = replace(
            new.template, public_id=ids.new("rsv"), starts_at=occurrence.start, duration_s=occurrence.seconds
        )
        short = quota.take(draft, plan.window)
        if short is not None:
            outcomes.append(Refused(short.detail, quota=True))
            continue
        reservation = reservations.insert_draft(tx, draft)
        outcomes.append(reservation)
        drafted.append((reservation, plan))
    nodes = sorted({part.node_id for _, plan in drafted for part in plan.parts})
    ledger.lock_nodes(tx, nodes)
    fresh = {view.node_id: view for view in views.load_node_views(tx, new.template.pool_id, nodes)}
    for reservation, plan in drafted:
        on = [fresh[part.node_id] for part in plan.parts if part.node_id in fresh]
        _book(tx, new, reservation, on, now)
    quota.write(tx)
    return outcomes


def _book(tx: Tx, new: NewWindows, reservation: Reservation, nodes: Sequence[NodeView], now: datetime) -> None:
    """Plan a draft once more on its locked nodes, and book it."""
    plan = plan_placement(placement_request(reservation), nodes, now, None)
    if isinstance(plan, NoPlan):
        raise Contended("nodes")
    start, end = plan.window.start, plan.window.end
    book_plan(tx, reservation, plan)
    placed = reservations.mark_placed(tx, reservation.reservation_id, "draft", start=start, end=end, now=now)
    assert placed, "drafted in this transaction"
    announce(tx, reservation, "placed", start=start.isoformat(), series=new.series)
    schedule(tx, "reservation", str(reservation.reservation_id), start)
