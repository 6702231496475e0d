"""Opens the periods of quotas with GPU-hours: charges windows without an end to each as it begins."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from controlplane.capacity.quota import open_due_periods
from controlplane.reconcilers.reconciler import PeriodicJob

if TYPE_CHECKING:
    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx

_log = structlog.get_logger()

# A booking opens the periods of its own quotas; for the others a minute late is soon enough.
PERIOD_S = 60.0
DEADLINE_S = 60.0


def quota_periods(database: Database) -> PeriodicJob:
    """Describe the job."""
    return PeriodicJob(
        name="quota_periods",
        role="controllers",
        period_s=PERIOD_S,
        deadline_s=DEADLINE_S,
        run=partial(run_quota_periods, database),
    )


async def run_quota_periods(database: Database, fence: Fence) -> None:
    """Run once.  Raises StaleEpoch when the lease is gone."""
    opened = 0
    while chunk := await database.run_tx(_open_due, fence):
        opened += chunk
    if opened:
        _log.info("quotas.opened", quotas=opened)


def _open_due(tx: Tx, fence: Fence) -> int:
    fence.check(tx)
    return open_due_periods(tx)
