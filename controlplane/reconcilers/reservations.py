"""The reservation reconciler: does what the clock or a release makes due, for one reservation at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.capacity.lifecycle import find_unsettled, step
from controlplane.queue.outcome import Again, Done
from controlplane.reconcilers.reconciler import Reconciler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.pool import Database
    from controlplane.queue.outcome import Outcome


def reservation_reconciler(db: Database, tools: LedgerTools) -> Reconciler:
    """Window opens, bind times out, window closes, queue deadline passes, draft is forgotten."""

    async def reconcile(key: str) -> Outcome:
        due = await db.run_tx(step, tools, int(key))
        return Done() if due is None else Again(due.total_seconds())

    async def list_keys(after: str, limit: int) -> Sequence[str]:
        behind: int | None = int(after or 0)
        while behind is not None:
            unsettled, behind = await db.run_read(find_unsettled, behind, limit)
            if unsettled:
                return [str(reservation_id) for reservation_id in unsettled]
        return []

    return Reconciler(
        name="reservations",
        queue="reservation",
        role="controllers",
        reconcile=reconcile,
        list_keys=list_keys,
        concurrency=4,
    )
