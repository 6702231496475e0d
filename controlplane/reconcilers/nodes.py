"""The node reconciler: connectivity, acceptance, adoption, drain, and what a node's health means to its holders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db.nodes import page_ids
from controlplane.fleet.lifecycle import step
from controlplane.queue.outcome import Done
from controlplane.reconcilers.reconciler import Reconciler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.pool import Database
    from controlplane.queue.outcome import Outcome


def node_reconciler(db: Database, tools: LedgerTools) -> Reconciler:
    """Does what is due for a node; every Hello, every changed section and every command's end enqueues it."""

    async def reconcile(key: str) -> Outcome:
        await db.run_tx(step, tools, int(key))
        return Done()

    async def list_keys(after: str, limit: int) -> Sequence[str]:
        return [str(node_id) for node_id in await db.run_tx(page_ids, int(after or 0), limit)]

    return Reconciler(
        name="nodes",
        queue="node",
        role="controllers",
        reconcile=reconcile,
        list_keys=list_keys,
        concurrency=8,
    )
