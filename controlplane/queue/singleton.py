"""Work that one process of all does: under the lease `singleton:<name>`, for as long as it is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from controlplane.db import leases
from controlplane.db.leases import Fence
from controlplane.db.tx import OPERATING_ERRORS
from shared.leases import LeaseTiming, run_while_held

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from controlplane.db.pool import Database

_log = structlog.get_logger()

SINGLETON_TIMING = LeaseTiming(ttl_s=15, renew_every_s=5, margin_s=3, retry_every_s=1)
# As for shards: a stop waits no longer for the database; the lease runs out by itself.
RELEASE_S = 3.0


class _Lease:
    """One tenure: the first call acquires the lease, the following ones renew it."""

    def __init__(self, database: Database, name: str, holder: str, ttl_s: float) -> None:
        self._database = database
        self._name = name
        self._holder = holder
        self._ttl_s = ttl_s
        self._fence: Fence | None = None

    @property
    def fence(self) -> Fence:
        assert self._fence is not None, "work begins after the lease was acquired"
        return self._fence

    async def acquire(self) -> bool:
        if self._fence is not None:
            fence = self._fence
            return await self._database.run_lease_tx(leases.renew, fence.name, fence.holder, fence.epoch, self._ttl_s)
        epoch = await self._database.run_lease_tx(leases.acquire, self._name, self._holder, self._ttl_s)
        if epoch is None:
            return False
        self._fence = Fence(self._name, self._holder, epoch)
        _log.info("singleton.acquired", lease=self._name, epoch=epoch)
        return True

    async def release(self) -> None:
        fence = self._fence
        if fence is None:
            return
        try:
            await self._database.run_lease_tx(leases.release, fence.name, fence.holder, fence.epoch)
        except OPERATING_ERRORS as exc:
            _log.warning("singleton.release_failed", lease=self._name, error=str(exc))


async def run_singleton(
    database: Database,
    name: str,
    holder: str,
    work: Callable[[Fence], Awaitable[None]],
    *,
    rng: Random,
    timing: LeaseTiming = SINGLETON_TIMING,
) -> None:
    """Compete for the lease, and run `work` whenever it is ours; return when `work` has returned.

    `work` is cancelled when the lease is lost, and before it can be lost unnoticed.  Raises, in an
    exception group, what `work` raises; and operating errors of the database when the lease is asked for
    the first time.  The caller supervises.
    """
    while True:
        lease = _Lease(database, f"singleton:{name}", holder, timing.ttl_s)

        async def under_lease(lease: _Lease = lease) -> None:
            await work(lease.fence)

        try:
            finished = await run_while_held(lease.acquire, under_lease, timing=timing, retry_on=OPERATING_ERRORS)
        finally:
            with trio.move_on_after(RELEASE_S, shield=True):
                await lease.release()
        if finished:
            return
        # Those that compete for a lease do not all ask in the same moment.
        await trio.sleep(timing.renew_every_s * rng.uniform(0.5, 1.0))
