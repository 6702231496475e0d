"""Forgets what the front door leaves behind: requests that nobody finished, and keys that ended long ago.

A draft whose request died is expired by the reservation reconciler; here goes the idempotency key
that would have let a repeat take it over.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from controlplane.db import iam, idempotency
from controlplane.reconcilers.reconciler import PeriodicJob

if TYPE_CHECKING:
    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx

_log = structlog.get_logger()

PERIOD_S = 60.0
DEADLINE_S = 60.0
CHUNK = 1_000
# `bcctl keys list` shows what was in force lately; who used it when is in the audit log.
DEAD_KEYS_KEPT_S = 90 * 24 * 3600.0


def iam_upkeep(database: Database) -> PeriodicJob:
    """Describe the job."""
    return PeriodicJob(
        name="iam-upkeep",
        role="iam",
        period_s=PERIOD_S,
        deadline_s=DEADLINE_S,
        run=partial(run_iam_upkeep, database),
    )


async def run_iam_upkeep(database: Database, fence: Fence) -> None:
    """Run once.  Raises StaleEpoch when the lease is gone."""
    for sweep in (_reap_requests, _delete_keys):
        while deleted := await database.run_tx(sweep, fence):
            _log.info("rows.pruned", table=sweep.__name__.rpartition("_")[2], rows=deleted)


def _reap_requests(tx: Tx, fence: Fence) -> int:
    fence.check(tx)
    return idempotency.reap(tx, limit=CHUNK)


def _delete_keys(tx: Tx, fence: Fence) -> int:
    fence.check(tx)
    return iam.delete_dead_keys(tx, dead_for_s=DEAD_KEYS_KEPT_S, limit=CHUNK)
