"""Runs the reconcilers and jobs of this process's roles; knows none of them by name.

For each reconciler two tasks: the queue's runner, and a resync that enqueues every key of the shards
we hold every five minutes, so that nothing depends on anybody having remembered to enqueue it.  Its
keys come due evenly, not all at once: what is looked at to be sure must not be felt by those who book
meanwhile.  For each job one task that competes for the job's lease.  Two more look for due keys, to
ring the runners' bells, and sample the depth of the queues.

Faults stay where they are: one key's with the key, one job's run with that run, one resync's with
that resync; each is logged with its traceback and counted, and shows in `status()`.  Operating errors
of the database restart the part that met them, with backoff.  Whatever else comes out of here is a
bug of this module and ends the process.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import structlog
import trio

from controlplane.db import queue as queue_table
from controlplane.db.leases import StaleEpoch
from controlplane.db.tx import OPERATING_ERRORS
from controlplane.model.shards import shard_of
from controlplane.queue.bells import run_lookout
from controlplane.queue.membership import SHARD_TIMING, open_membership
from controlplane.queue.singleton import SINGLETON_TIMING, run_singleton
from controlplane.queue.worker import RESTART, QueueRunner, QueueWork, RunCounts
from shared.services import service_nursery, supervise

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
    from random import Random

    from controlplane.config import Role
    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.queue import Depth
    from controlplane.model.queues import Queue
    from controlplane.queue.bells import Bells
    from controlplane.queue.membership import Membership, Shards
    from controlplane.reconcilers.reconciler import PeriodicJob, Reconciler
    from controlplane.reconcilers.registry import Registry
    from shared.leases import LeaseTiming
    from shared.metrics import Metrics

_log = structlog.get_logger()

# How late a change may be noticed whose wake-up nobody sent, up to 15,000 keys; with more of them a resync takes
# as long as they need.
RESYNC_EVERY_S = 300.0
# A run that finds nothing to do takes some 2 ms of CPU, database included: a tenth of a core.
RESYNC_KEYS_PER_S = 50.0
# Workers that started together do not list together: each waits this share of the period more or less.
RESYNC_JITTER = 0.2
# Of a list of keys in one transaction: a millisecond, and a bounded answer.
RESYNC_PAGE = 500
DEPTHS_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class ReconcilerStatus:
    """What a reconciler or job has done in this process since it started.

    `runs` and `errors` count keys for a reconciler and whole runs for a job; `last_error` stays until
    there is another one. `depth` is the whole queue's, of all workers, seconds ago; a job has none.
    """

    name: str
    kind: Literal["reconciler", "job"]
    role: Role
    runs: int
    errors: int
    last_error: str
    last_error_key: str
    depth: Depth | None


class Driver:
    """What runs in this process; made by `open_reconcilers`."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        *,
        membership: Membership,
        bells: Bells,
        metrics: Metrics,
        rng: Random,
    ) -> None:
        self._database = database
        self._registry = registry
        self._membership = membership
        self._bells = bells
        self._metrics = metrics
        self._rng = rng
        self._runners = {reconciler.name: self._runner(reconciler) for reconciler in registry.reconcilers}
        self._job_counts = {job.name: RunCounts() for job in registry.jobs}
        self._depths: dict[str, Depth] = {}

    def status(self) -> list[ReconcilerStatus]:
        """Return one entry for each reconciler and job of this process's roles."""
        return [
            self._status(part, "reconciler", self._runners[part.name].counts, self._depths.get(part.queue))
            for part in self._registry.reconcilers
        ] + [self._status(part, "job", self._job_counts[part.name], None) for part in self._registry.jobs]

    async def run(self, singleton_timing: LeaseTiming) -> None:
        """Run everything until cancelled."""
        async with trio.open_nursery() as nursery:
            for reconciler in self._registry.reconcilers:
                nursery.start_soon(self._runners[reconciler.name].run)
                nursery.start_soon(self._supervised, f"resync {reconciler.name}", partial(self._resync, reconciler))
            for job in self._registry.jobs:
                compete = partial(
                    run_singleton,
                    self._database,
                    job.name,
                    self._membership.worker_id,
                    partial(self._run_job, job),
                    rng=self._rng,
                    timing=singleton_timing,
                )
                nursery.start_soon(self._supervised, f"job {job.name}", compete)
            queues: list[Queue] = [reconciler.queue for reconciler in self._registry.reconcilers]
            if queues:
                look = partial(run_lookout, self._database, self._bells, queues)
                nursery.start_soon(self._supervised, "lookout", look)
            nursery.start_soon(self._supervised, "depths", self._sample_depths)

    def _runner(self, reconciler: Reconciler) -> QueueRunner:
        work = QueueWork(
            name=reconciler.name,
            queue=reconciler.queue,
            run=reconciler.reconcile,
            concurrency=reconciler.concurrency,
            deadline_s=reconciler.deadline_s,
        )

        def observe(took_s: float, result: str) -> None:
            self._metrics.reconcilers.duration.of(reconciler.name).observe(took_s)
            self._metrics.queue.items.of(reconciler.queue, result).inc()
            if result == "failed":
                self._metrics.reconcilers.errors.of(reconciler.name).inc()

        return QueueRunner(
            self._database,
            work,
            worker_id=self._membership.worker_id,
            shards=self._membership.shards(reconciler.role),
            bell=self._bells.of(reconciler.queue),
            observe=observe,
        )

    async def _supervised(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        await supervise(run, name=name, restart_on=OPERATING_ERRORS, backoff=RESTART)

    async def _resync(self, reconciler: Reconciler) -> None:
        shards = self._membership.shards(reconciler.role)
        pause_s = self._rng.uniform(0.0, RESYNC_EVERY_S)
        while True:
            await trio.sleep(pause_s)
            pause_s = RESYNC_EVERY_S * self._rng.uniform(1 - RESYNC_JITTER, 1 + RESYNC_JITTER)
            try:
                listed, enqueued = await self._enqueue_all(reconciler, shards)
            except OPERATING_ERRORS:
                raise
            except Exception as exc:  # noqa: BLE001 - the edge: what one reconciler cannot list stops no other
                self._count_error(reconciler.name, self._runners[reconciler.name].counts, exc, key="")
                continue
            _log.debug("reconciler.resynced", reconciler=reconciler.name, listed=listed, enqueued=enqueued)
            pause_s = max(pause_s, listed / RESYNC_KEYS_PER_S)

    async def _enqueue_all(self, reconciler: Reconciler, shards: Shards) -> tuple[int, int]:
        """Enqueue all keys of our shards; returns how many there are, and for how many it was news."""
        listed, enqueued, after = 0, 0, ""
        while page := await reconciler.list_keys(after, RESYNC_PAGE):
            ours = [key for key in page if shard_of(key) in shards]
            if ours:
                enqueued += await self._database.run_tx(
                    queue_table.enqueue_missing,
                    reconciler.queue,
                    ours,
                    after_s=listed / RESYNC_KEYS_PER_S,
                    per_s=RESYNC_KEYS_PER_S,
                )
                listed += len(ours)
                self._bells.of(reconciler.queue).ring()
            after = page[-1]
        return listed, enqueued

    async def _run_job(self, job: PeriodicJob, fence: Fence) -> None:
        counts = self._job_counts[job.name]
        while True:
            started = trio.current_time()
            try:
                with trio.fail_after(job.deadline_s):
                    await job.run(fence)
            except Exception as exc:  # noqa: BLE001 - the edge: the next period is the retry
                self._count_error(job.name, counts, exc, key="")
            counts.runs += 1
            self._metrics.reconcilers.duration.of(job.name).observe(trio.current_time() - started)
            await trio.sleep(job.period_s)

    def _count_error(self, name: str, counts: RunCounts, exc: Exception, *, key: str) -> None:
        counts.errors += 1
        counts.last_error, counts.last_error_key = f"{type(exc).__name__}: {exc}", key
        self._metrics.reconcilers.errors.of(name).inc()
        if isinstance(exc, (*OPERATING_ERRORS, StaleEpoch)):
            _log.warning("reconciler.postponed", reconciler=name, error=counts.last_error)
        else:
            _log.error("reconciler.failed", reconciler=name, exc_info=exc)

    async def _sample_depths(self) -> None:
        while True:
            depths = await self._database.run_tx(queue_table.depths)
            self._depths = {depth.queue: depth for depth in depths}
            for reconciler in self._registry.reconcilers:
                depth = self._depths.get(reconciler.queue)
                self._metrics.queue.depth.of(reconciler.queue).set(depth.due if depth else 0)
                self._metrics.queue.oldest.of(reconciler.queue).set(depth.oldest_due_s if depth else 0)
            self._metrics.queue.shards_held.set(self._membership.held())
            await trio.sleep(DEPTHS_EVERY_S)

    def _status(
        self,
        part: Reconciler | PeriodicJob,
        kind: Literal["reconciler", "job"],
        counts: RunCounts,
        depth: Depth | None,
    ) -> ReconcilerStatus:
        return ReconcilerStatus(
            name=part.name,
            kind=kind,
            role=part.role,
            runs=counts.runs,
            errors=counts.errors,
            last_error=counts.last_error,
            last_error_key=counts.last_error_key,
            depth=depth,
        )


@asynccontextmanager
async def open_reconcilers(
    database: Database,
    registry: Registry,
    *,
    worker_id: str,
    roles: Collection[Role],
    bells: Bells,
    metrics: Metrics,
    rng: Random,
    shard_timing: LeaseTiming = SHARD_TIMING,
    singleton_timing: LeaseTiming = SINGLETON_TIMING,
) -> AsyncGenerator[Driver]:
    """Run what the registry has for these roles during the body.

    `worker_id` must be new with every process: leases and claims of an earlier one are not ours.
    The body begins when the worker is a member and holds what shards it can.  After it everything is
    cancelled, claims and leases are given back, and the worker is gone from the table.
    """
    ours = registry.of(roles)
    async with (
        open_membership(
            database,
            worker_id=worker_id,
            roles=roles,
            sharded_roles=ours.sharded_roles(),
            timing=shard_timing,
        ) as membership,
        service_nursery() as nursery,
    ):
        driver = Driver(database, ours, membership=membership, bells=bells, metrics=metrics, rng=rng)
        nursery.start_soon(driver.run, singleton_timing)
        yield driver
