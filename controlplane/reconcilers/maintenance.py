"""The maintenance reconciler: cordons a node when its window begins, and takes that back when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db.maintenance import page_open
from controlplane.db.time import load_now
from controlplane.fleet.maintenance import step
from controlplane.queue.outcome import Again, Done
from controlplane.reconcilers.reconciler import Reconciler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.queue.outcome import Outcome


def maintenance_reconciler(db: Database) -> Reconciler:
    """Does what the clock makes due for one window."""

    async def reconcile(key: str) -> Outcome:
        due = await db.run_tx(_step, int(key))
        return Done() if due is None else Again(due.total_seconds())

    async def list_keys(after: str, limit: int) -> Sequence[str]:
        return [str(maintenance_id) for maintenance_id in await db.run_tx(page_open, int(after or 0), limit)]

    return Reconciler(
        name="maintenance",
        queue="maintenance",
        role="controllers",
        reconcile=reconcile,
        list_keys=list_keys,
        concurrency=2,
    )


def _step(tx: Tx, maintenance_id: int) -> timedelta | None:
    return step(tx, maintenance_id, load_now(tx))
