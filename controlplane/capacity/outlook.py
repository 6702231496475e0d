"""When and where a request would be placed, told without booking anything: `bcctl reserve --plan`.

Who asks for nothing yet stands at the end of the queue in this tenant's turn, so those with an earlier turn are planned
first, as a pass over the queue would, and their places are let go of again. `count_ahead` is admission's rule too:
what this module says of a request is what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controlplane.capacity.place import EARLIEST_HORIZON, request_at
from controlplane.db import waiting
from controlplane.model.planner import NoPlan
from controlplane.model.queueing import Waiting, order_queue
from controlplane.model.shares import charged_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.capacity.indexes import PoolIndexes
    from controlplane.db.tx import Tx
    from controlplane.model.planner import Plan
    from controlplane.model.requests import PlacementRequest

# Of a longer queue those with the first turns are put in an order.
QUEUE_LOOKED_AT_MAX: Final = 1_000
# Whoever has more than these before it is told no start. The pool's placements wait while so many are planned.
AHEAD_MAX: Final = 200
# Above every id there is.
_LAST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would become of a request.

    Attributes:
        fits: whether it would be placed at once.
        plan: at once or when it could start first; None if no start is known.
        reason: why not at once; empty if it fits.
        waiting: how many wait for the pool, whoever has which turn.
    """

    fits: bool
    plan: Plan | None
    reason: str
    waiting: int


def count_ahead(end: datetime | None, queue: waiting.Queue) -> int:
    """How many of a queue a new request with this end must not delay: nobody if it is over before any could start."""
    if queue.first_start is None:
        return 0
    return 0 if end is not None and end <= queue.first_start else queue.waiting


def who_waits(ahead: int) -> str:
    """Why a request that would fit is not placed at once."""
    others = "another waits" if ahead == 1 else f"{ahead} others wait"
    return f"{others} for this pool, and this one could delay {'it' if ahead == 1 else 'them'}"


def look_ahead(
    tx: Tx, indexes: PoolIndexes, pool_id: int, request: PlacementRequest, now: datetime, *, tenant_id: int
) -> Outlook:
    """What would become of a possible request of this tenant, as far as the pool decides. Quotas are not asked."""
    queue = waiting.load_queue(tx, pool_id)
    end = None if request.duration is None else (request.start or now) + request.duration
    ahead = count_ahead(end, queue)
    plan = indexes.look(tx, pool_id, request, now, horizon=None)
    if isinstance(plan, NoPlan):
        reason = plan.detail
    elif ahead:
        reason = who_waits(ahead)
    else:
        return Outlook(fits=True, plan=plan, reason="", waiting=queue.waiting)
    before = _load_before(tx, pool_id, request, now, tenant_id=tenant_id) if queue.waiting else ()
    later = None
    if before is not None:
        later = indexes.look_behind(tx, pool_id, before, request, now, horizon=now + EARLIEST_HORIZON)
    return Outlook(fits=False, plan=later, reason=reason, waiting=queue.waiting)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A queue that windows for later must not delay.

    Attributes:
        places: where those could start first who have their turn before a new request; None if nobody knows.
    """

    queue: waiting.Queue
    places: Sequence[Plan] | None

    def is_delayed_by(self, plan: Plan) -> bool:
        """Whether a plan may be in somebody's way."""
        if self.places is None:
            return count_ahead(plan.window.end, self.queue) > 0
        nodes = {part.node_id for part in plan.parts}
        return any(
            nodes & {part.node_id for part in place.parts} and plan.window.overlaps(place.window)
            for place in self.places
        )


def load_ahead(
    tx: Tx, indexes: PoolIndexes, pool_id: int, request: PlacementRequest, now: datetime, *, tenant_id: int
) -> Ahead:
    """Who waits for a pool and has a turn before a new request of this tenant."""
    queue = waiting.load_queue(tx, pool_id)
    if queue.first_start is None:
        return Ahead(queue, ())
    before = _load_before(tx, pool_id, request, now, tenant_id=tenant_id)
    horizon = now + EARLIEST_HORIZON
    places = None if before is None else indexes.look_for_places(tx, pool_id, before, now, horizon=horizon)
    return Ahead(queue, places)


def _load_before(
    tx: Tx, pool_id: int, request: PlacementRequest, now: datetime, *, tenant_id: int
) -> Sequence[PlacementRequest] | None:
    """Those of the queue that keep a place and have their turn before a new request; None if they are too many."""
    size = charged_gpus(request.nodes, request.gpus_per_node, request.parts) or request.nodes * request.vcpus_per_node
    queued = [*waiting.load_waiting(tx, pool_id, limit=QUEUE_LOOKED_AT_MAX), Waiting(_LAST, tenant_id, 0, size)]
    order = order_queue(queued, waiting.load_holding(tx, pool_id))
    ids = order[: order.index(_LAST)]
    if len(ids) > AHEAD_MAX:
        return None
    rows = {row.reservation_id: row for row in waiting.load_queued(tx, pool_id, ids)}
    return [request_at(row, now) for id_ in ids if (row := rows.get(id_)) is not None and row.estimated_start]
