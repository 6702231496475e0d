"""Places a series: every window of it in one transaction, each as a reservation with bookings of its own.

The windows of a series do not overlap, so none is in another's way and each is planned on the ledger
as it is. A window is planned first on the nodes of the one before it: who comes back tomorrow finds
today's files. The plans are made without locks and committed together, as the batch placer does it;
who was faster costs a new transaction. A window that would delay somebody who waits for the pool is
planned around the places that those who wait could start at, or refused.

Only windows that are still to begin are placed, so nothing is held here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from controlplane.capacity.batch import commit_all
from controlplane.capacity.outlook import load_ahead, who_waits
from controlplane.capacity.place import Contended, commitment
from controlplane.capacity.quota import open_quotas
from controlplane.db import reservations
from controlplane.model.planner import Plan
from controlplane.model.requests import InvalidRequest, check_limits

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from controlplane.capacity.indexes import PoolIndexes
    from controlplane.capacity.outlook import Ahead
    from controlplane.capacity.place import LedgerTools
    from controlplane.db.placements import Commitment
    from controlplane.db.reservations import NewReservation, Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.recurrence import Occurrence
    from controlplane.model.requests import PlacementRequest, WindowLimits


# Windows without room for which it is said what is short: each is one more look at every node.
EXPLAINED_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Refused:
    """A window that cannot be placed, and the sentence that says why. `quota` if it is only for a quota."""

    why: str
    quota: bool = False


def plan_windows(
    tx: Tx,
    indexes: PoolIndexes,
    pool_id: int,
    request: PlacementRequest,
    occurrences: Sequence[Occurrence],
    *,
    limits: WindowLimits,
    tenant_id: int,
    now: datetime,
) -> list[Plan | Refused]:
    """A plan for each window, or why there is none; nothing is locked or written."""
    ahead = load_ahead(tx, indexes, pool_id, request, now, tenant_id=tenant_id)
    plans: list[Plan | Refused] = []
    near: Collection[int] = ()
    full = 0
    for occurrence in occurrences:
        asked = replace(request, start=occurrence.start, duration=occurrence.end - occurrence.start)
        try:
            check_limits(limits, asked, now)
        except InvalidRequest as exc:
            plans.append(Refused(str(exc)))
            continue
        if full < EXPLAINED_MAX:
            plan = indexes.look(tx, pool_id, asked, now, horizon=None, near=near)
        else:
            plan = indexes.find(tx, pool_id, asked, now, near=near)
        if isinstance(plan, Plan) and ahead.is_delayed_by(plan):
            plan = _plan_around(tx, indexes, pool_id, asked, ahead=ahead, now=now)
        if isinstance(plan, Refused):
            plans.append(plan)
        elif isinstance(plan, Plan):
            near = [part.node_id for part in plan.parts]
            plans.append(plan)
        else:
            full += 1
            plans.append(Refused("no room" if plan is None else plan.detail))
    return plans


def _plan_around(
    tx: Tx, indexes: PoolIndexes, pool_id: int, asked: PlacementRequest, *, ahead: Ahead, now: datetime
) -> Plan | Refused:
    """A plan for a window that delays nobody who waits, though it would be in somebody's way where it fits best."""
    if ahead.places is not None:
        plan = indexes.look(tx, pool_id, asked, now, horizon=None, around=ahead.places)
        if isinstance(plan, Plan):
            return plan
    return Refused(who_waits(ahead.queue.waiting))


def place_windows(
    tx: Tx,
    tools: LedgerTools,
    template: NewReservation,
    planned: Sequence[tuple[Occurrence, Plan | Refused]],
    now: datetime,
) -> list[Reservation | Refused]:
    """Book every window that has a plan and for which the quota has room; `template` is a draft without times.

    Raises:
        Contended: somebody was faster; nothing may be kept of this transaction.
    """
    outcomes: list[Reservation | Refused] = []
    drafted: list[Commitment] = []
    quota = open_quotas(tx, [template])
    for occurrence, plan in planned:
        if isinstance(plan, Refused):
            outcomes.append(plan)
            continue
        draft = replace(
            template, public_id=tools.ids.new("rsv"), starts_at=occurrence.start, duration_s=occurrence.seconds
        )
        short = quota.take(draft, plan.window)
        if short is not None:
            outcomes.append(Refused(short.detail, quota=True))
            continue
        reservation = reservations.insert_draft(tx, draft)
        outcomes.append(reservation)
        drafted.append(commitment(tools, reservation, plan))
    tools.indexes.count(tx, template.pool_id, [one.plan for one in drafted])
    if len(commit_all(tx, tools, template.pool_id, drafted, now, placer="inline")) < len(drafted):
        raise Contended("windows")
    quota.write(tx)
    return outcomes
