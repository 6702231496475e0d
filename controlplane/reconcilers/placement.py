"""The placement reconciler: one pass over a pool's queue, whenever something of the pool may be free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.capacity.waiting import QUEUED_PER_PASS, place_queued
from controlplane.db.reservations import load_queued, page_queued_pools
from controlplane.queue.outcome import Again, Done
from controlplane.reconcilers.reconciler import Reconciler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.pool import Database
    from controlplane.queue.outcome import Outcome

# Every change that frees something enqueues the pool; this is for what time alone frees.
RECHECK_S = 30.0


def placement_reconciler(db: Database, tools: LedgerTools) -> Reconciler:
    """Gives queued reservations what has become free, oldest first."""

    async def reconcile(key: str) -> Outcome:
        queued = await db.run_tx(load_queued, int(key), limit=QUEUED_PER_PASS)
        full: dict[tuple[object, ...], str] = {}
        waiting = 0
        for reservation_id in queued:
            left = await db.run_tx(place_queued, tools, reservation_id, full)
            if left is None:
                continue
            waiting += 1
            if left.shape is not None:
                full[left.shape] = left.reason
        return Again(RECHECK_S) if waiting else Done()

    async def list_keys(after: str, limit: int) -> Sequence[str]:
        pools = await db.run_tx(page_queued_pools, int(after or 0), limit)
        return [str(pool_id) for pool_id in pools]

    return Reconciler(
        name="placement",
        queue="pool",
        role="scheduler",
        reconcile=reconcile,
        list_keys=list_keys,
        concurrency=2,
        # a pass plans each shape once and books at most QUEUED_PER_PASS
        deadline_s=60.0,
    )
