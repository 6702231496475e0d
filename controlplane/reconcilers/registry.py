"""The one list of everything that workers run.

A new reconciler is a module beside this one with a function that describes it, and one line here.
Nothing else registers anything: what a worker of a role does can be read off this page, and
`build_registry` refuses a queue that somebody can enqueue to and nobody serves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.model.queues import QUEUES
from controlplane.reconcilers.commands import command_sweeper
from controlplane.reconcilers.housekeeping import housekeeping
from controlplane.reconcilers.iam_upkeep import iam_upkeep
from controlplane.reconcilers.inbox import inbox_reconciler
from controlplane.reconcilers.liveness import liveness_job
from controlplane.reconcilers.maintenance import maintenance_reconciler
from controlplane.reconcilers.nodes import node_reconciler
from controlplane.reconcilers.placement import placement_reconciler
from controlplane.reconcilers.quota_periods import quota_periods
from controlplane.reconcilers.reservations import reservation_reconciler
from controlplane.reconcilers.specs import spec_reconciler

if TYPE_CHECKING:
    from collections.abc import Collection

    from controlplane.capacity.place import LedgerTools
    from controlplane.config import Role
    from controlplane.db.pool import Database
    from controlplane.model.queues import Queue, ShardedRole
    from controlplane.reconcilers.reconciler import PeriodicJob, Reconciler


@dataclass(frozen=True, slots=True)
class Registry:
    """What there is to run, for all roles."""

    reconcilers: tuple[Reconciler, ...] = ()
    jobs: tuple[PeriodicJob, ...] = ()

    def __post_init__(self) -> None:
        names = Counter(part.name for part in (*self.reconcilers, *self.jobs))
        assert not (twice := [name for name, count in names.items() if count > 1]), f"named twice: {twice}"
        queues = Counter(reconciler.queue for reconciler in self.reconcilers)
        assert not (twice := [queue for queue, count in queues.items() if count > 1]), f"served twice: {twice}"

    def of(self, roles: Collection[Role]) -> Registry:
        """Return what a worker with these roles runs."""
        return Registry(
            tuple(reconciler for reconciler in self.reconcilers if reconciler.role in roles),
            tuple(job for job in self.jobs if job.role in roles),
        )

    def sharded_roles(self) -> frozenset[ShardedRole]:
        """Return the roles that need shards: those that a reconciler is registered for, and no others."""
        return frozenset(reconciler.role for reconciler in self.reconcilers)

    def unserved(self) -> frozenset[Queue]:
        """Return the queues that no reconciler serves."""
        return frozenset(QUEUES) - {reconciler.queue for reconciler in self.reconcilers}


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What reconcilers are made of."""

    database: Database
    tools: LedgerTools
    worker_id: str
    max_batch: int


def build_registry(parts: WorkerParts) -> Registry:
    """Describe every reconciler and job of the control plane, with what they need to work."""
    ledger = (parts.database, parts.tools)
    registry = Registry(
        reconcilers=(
            inbox_reconciler(*ledger),
            reservation_reconciler(*ledger),
            placement_reconciler(*ledger, worker_id=parts.worker_id, max_batch=parts.max_batch),
            node_reconciler(*ledger),
            spec_reconciler(*ledger),
            maintenance_reconciler(parts.database),
        ),
        jobs=(
            liveness_job(parts.database),
            command_sweeper(parts.database),
            housekeeping(parts.database),
            quota_periods(parts.database),
            iam_upkeep(parts.database),
        ),
    )
    assert not (unserved := registry.unserved()), f"keys of {sorted(unserved)} would never be run"
    return registry
