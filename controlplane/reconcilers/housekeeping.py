"""Keeps the tables that only grow at a size: makes next months' partitions, forgets what is old.

How long each kind of row is kept is a constant here.  Rows go in chunks of a transaction each,
so that no lock is held for long and a worker that lost the lease stops at the next chunk.  What
failed is done by the next run; dropping months comes last because it alone waits for locks on whole
tables, and may be refused when the database is busy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from controlplane.db import leases, outbox, placements, retention, sinks, workers
from controlplane.reconcilers.reconciler import PeriodicJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.retention import History
    from controlplane.db.tx import Tx

_log = structlog.get_logger()

T = TypeVar("T")

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S

PERIOD_S = _HOUR_S
# An hour's rows of a large fleet are deleted in seconds; this is for the first run after a long rest.
DEADLINE_S = 600.0
# About 50 ms of deleting: far from the role's statement timeout.
CHUNK = 5_000

# What a client may repeat and get the first outcome of: the retries of a batch job over a night.
IDEMPOTENCY_KEPT_S = _DAY_S
# A consumer that was away over a long weekend finds all events.
OUTBOX_KEPT_S = 7 * _DAY_S
# A sink that nobody has repaired for a month must not make the outbox grow for ever.
SINK_LAG_MAX_S = 30 * _DAY_S
COMMANDS_KEPT_S = 30 * _DAY_S
# A worker that died without a word shows in `bcctl doctor` for an hour.
WORKERS_KEPT_S = _HOUR_S
# Twice what an index that has not looked may be behind; then it is loaded anew (`capacity.indexes.FORGET_AFTER`).
CHANGES_KEPT_S = 600.0
# Far beyond any pause of a process that could still hold an epoch of it.
LEASES_KEPT_S = 30 * _DAY_S

# Whole months before this one. Snapshots answer "what changed last week"; the others are asked for by auditors.
MONTHS_KEPT: dict[History, int] = {
    "inventory_snapshot": 2,
    "booking_history": 12,
    "audit_event": 24,
    "usage_window": 24,
}

# In this order. Each deletes at most `limit` rows and returns how many.
_CHUNKED: dict[str, Callable[[Tx], int]] = {
    "idempotency": partial(retention.prune_idempotency, older_than_s=IDEMPOTENCY_KEPT_S, limit=CHUNK),
    "join_replay": partial(retention.prune_join_replays, limit=CHUNK),
    "sink": partial(sinks.disable_lagging, behind_s=SINK_LAG_MAX_S, limit=CHUNK),
    "outbox": partial(outbox.trim, older_than_s=OUTBOX_KEPT_S, limit=CHUNK),
    "command": partial(retention.prune_commands, older_than_s=COMMANDS_KEPT_S, limit=CHUNK),
    "worker": partial(workers.prune, silent_s=WORKERS_KEPT_S, limit=CHUNK),
    "placement_change": partial(placements.prune_changes, older_than_s=CHANGES_KEPT_S, limit=CHUNK),
    "lease": partial(leases.prune, ended_before_s=LEASES_KEPT_S, limit=CHUNK),
}


def housekeeping(database: Database) -> PeriodicJob:
    """Describe the job."""
    return PeriodicJob(
        name="housekeeping",
        role="controllers",
        period_s=PERIOD_S,
        deadline_s=DEADLINE_S,
        run=partial(run_housekeeping, database),
    )


async def run_housekeeping(database: Database, fence: Fence) -> None:
    """Run once.  Raises StaleEpoch when the lease is gone."""
    await database.run_tx(_fenced, fence, retention.make_partitions)
    for name, prune in _CHUNKED.items():
        pruned = 0
        while chunk := await database.run_tx(_fenced, fence, prune):
            pruned += chunk
        if pruned:
            _log.info("rows.pruned", table=name, rows=pruned)
    for history, months in MONTHS_KEPT.items():
        drop = partial(retention.drop_months, history=history, keep_months=months)
        if dropped := await database.run_tx(_fenced, fence, drop):
            _log.info("months.dropped", table=history, months=dropped)


def _fenced(tx: Tx, fence: Fence, write: Callable[[Tx], T]) -> T:
    fence.check(tx)
    return write(tx)
