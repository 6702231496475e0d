"""A worker among the workers: its heartbeat, its shards, and when it must let go of them.

Each pass is one transaction: beat the heart, see who else is alive in each role, work out by
rendezvous hashing which shards are ours, renew the leases that we hold and acquire those that we
lack.  Nobody hands anything to anybody: the lease of a shard is free when its holder has released it
or has run out, and its new owner takes it at its next pass.

Three ways to lose a shard, from soft to hard:

* *Leaving*: it falls to another worker now.  Nothing new is claimed from it, what runs is left to
  end, and only when nothing runs is the lease released.
* *Lost*: the renewal says that the lease is not ours any more.  What runs is cancelled at once.
* *Out of trust*: we could not ask.  Work on a shard is believed to be ours until `ttl - margin` after
  the moment before the last successful renewal was asked for, on our own monotonic clock, and its
  cancel scope has that very deadline.  So it has stopped before anybody else may start, without
  having been told.

The SQL that claims keys looks at the same leases once more, under their epochs.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
import trio

from controlplane.db import leases, workers
from controlplane.db.tx import OPERATING_ERRORS
from controlplane.model.queues import SHARDED_ROLES
from controlplane.model.shards import owned_shards
from shared.leases import LeaseTiming
from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Generator, Mapping

    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.model.queues import ShardedRole

_log = structlog.get_logger()

# Three renewals fit. The margin is for a transaction's last statement, which no cancellation reaches.
SHARD_TIMING = LeaseTiming(ttl_s=15, renew_every_s=5, margin_s=3, retry_every_s=1)
# A database that does not answer must not hold up the end of the process; the leases run out by themselves.
LEAVE_S = 3.0


def lease_name(role: ShardedRole, shard: int) -> str:
    """Return the name of the lease on a shard; each role divides its work by itself."""
    return f"shard:{shard}" if role == "controllers" else f"shard:{role}:{shard}"


@dataclass(slots=True, eq=False)
class _Held:
    name: str
    epoch: int
    trusted_until: float
    leaving: bool = False
    running: set[trio.CancelScope] = field(default_factory=set[trio.CancelScope])


class Shards:
    """The shards of one role that this worker holds; changes with every pass."""

    def __init__(self, role: ShardedRole) -> None:
        self.role: ShardedRole = role
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, shard: int) -> bool:
        """Whether new work on the shard may begin."""
        held = self._held.get(shard)
        return held is not None and not held.leaving and held.trusted_until > trio.current_time()

    def leases(self) -> dict[int, tuple[str, int]]:
        """Return the name and epoch of the lease on each shard on which new work may begin."""
        return {shard: (held.name, held.epoch) for shard, held in self._held.items() if shard in self}

    @contextmanager
    def working_on(self, shard: int) -> Generator[trio.CancelScope]:
        """Run the body while the shard is ours: it is cancelled when that ends, at once if it is not ours now."""
        scope = trio.CancelScope()
        held = self._held.get(shard)
        if held is None:
            scope.cancel("the shard is not held")
        else:
            scope.deadline = held.trusted_until
            held.running.add(scope)
        try:
            with scope:
                yield scope
        finally:
            if held is not None:
                held.running.discard(scope)

    def settle_pass(
        self, *, wanted: Collection[int], renewed: Collection[str], acquired: Mapping[str, int], trusted_until: float
    ) -> None:
        """Take over what a pass has found; `renewed` and `acquired` are names of leases."""
        for shard, held in list(self._held.items()):
            if held.name not in renewed:
                del self._held[shard]
                for scope in held.running:
                    scope.cancel("the shard's lease is lost")
                continue
            held.trusted_until = trusted_until
            held.leaving = shard not in wanted
            for scope in held.running:
                scope.deadline = trusted_until
        for shard in sorted(wanted):
            name = lease_name(self.role, shard)
            if name in acquired:
                self._held[shard] = _Held(name, acquired[name], trusted_until)

    def take_idle(self) -> dict[str, int]:
        """Give up the shards that are leaving and on which nothing runs; return their leases."""
        idle = [shard for shard, held in self._held.items() if held.leaving and not held.running]
        given = [self._held.pop(shard) for shard in idle]
        return {held.name: held.epoch for held in given}

    def epochs(self) -> dict[str, int]:
        """Return the epochs of all leases, those of leaving shards included."""
        return {held.name: held.epoch for held in self._held.values()}


@dataclass(frozen=True, slots=True)
class _Pass:
    wanted: Mapping[ShardedRole, Collection[int]]
    renewed: Collection[str]
    acquired: Mapping[str, int]


class Membership:
    """This worker's part of the work; made by `open_membership`."""

    def __init__(
        self,
        database: Database,
        worker_id: str,
        roles: Collection[str],
        sharded_roles: Collection[ShardedRole],
        timing: LeaseTiming,
    ) -> None:
        self._database = database
        self.worker_id = worker_id
        self._roles = frozenset(roles)
        self._timing = timing
        self._shards: dict[ShardedRole, Shards] = {
            role: Shards(role) for role in SHARDED_ROLES if role in sharded_roles
        }

    def shards(self, role: ShardedRole) -> Shards:
        """Return the shards of a role that has any."""
        return self._shards[role]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled, then leave.  Started with the first pass, which waits for the database."""
        started = False
        try:
            while True:
                try:
                    await self._pass()
                except OPERATING_ERRORS as exc:
                    _log.warning("membership.pass_failed", error=str(exc), shards_held=self.held())
                    await trio.sleep(self._timing.retry_every_s)
                    continue
                if not started:
                    task_status.started()
                    started = True
                await trio.sleep(self._timing.renew_every_s)
        finally:
            with trio.move_on_after(LEAVE_S, shield=True):
                await self._leave()

    def held(self) -> int:
        """Return how many shards this worker holds, of all roles."""
        return sum(len(shards) for shards in self._shards.values())

    async def _pass(self) -> None:
        asked = trio.current_time()
        held = self._epochs()
        found = await self._database.run_lease_tx(
            _renew_and_acquire,
            self.worker_id,
            roles=self._roles,
            sharded_roles=list(self._shards),
            held=held,
            ttl_s=self._timing.ttl_s,
        )
        lost = held.keys() - found.renewed
        if lost or found.acquired:
            _log.info("shards.changed", acquired=len(found.acquired), lost=len(lost))
        for role, shards in self._shards.items():
            shards.settle_pass(
                wanted=found.wanted[role],
                renewed=found.renewed,
                acquired=found.acquired,
                trusted_until=asked + self._timing.ttl_s - self._timing.margin_s,
            )
        idle = {name: epoch for shards in self._shards.values() for name, epoch in shards.take_idle().items()}
        if idle:
            await self._database.run_lease_tx(leases.release_all, idle, self.worker_id)
            _log.info("shards.handed_over", shards=len(idle))

    async def _leave(self) -> None:
        try:
            await self._database.run_lease_tx(_release_and_leave, self.worker_id, self._epochs())
        except OPERATING_ERRORS as exc:
            _log.warning("membership.leave_failed", error=str(exc))

    def _epochs(self) -> dict[str, int]:
        return {name: epoch for shards in self._shards.values() for name, epoch in shards.epochs().items()}


@asynccontextmanager
async def open_membership(
    database: Database,
    *,
    worker_id: str,
    roles: Collection[str],
    sharded_roles: Collection[ShardedRole],
    timing: LeaseTiming = SHARD_TIMING,
) -> AsyncGenerator[Membership]:
    """Be a member during the body, which begins after the first pass; the shards are released after the body.

    `roles` is what the process does; shards are held for `sharded_roles` alone, and none if there
    is no such role.
    """
    membership = Membership(database, worker_id, roles, sharded_roles, timing)
    async with service_nursery() as nursery:
        await nursery.start(membership.run)
        yield membership


def _renew_and_acquire(
    tx: Tx,
    worker_id: str,
    *,
    roles: Collection[str],
    sharded_roles: Collection[ShardedRole],
    held: Mapping[str, int],
    ttl_s: float,
) -> _Pass:
    workers.heartbeat(tx, worker_id, roles)
    wanted: dict[ShardedRole, frozenset[int]] = {}
    for role in sharded_roles:
        wanted[role] = owned_shards(worker_id, workers.live_workers(tx, role, ttl_s))
    renewed = leases.renew_all(tx, held, worker_id, ttl_s) if held else set[str]()
    missing = {lease_name(role, shard) for role, shards in wanted.items() for shard in shards} - renewed
    acquired = leases.acquire_all(tx, missing, worker_id, ttl_s) if missing else dict[str, int]()
    return _Pass(wanted, renewed, acquired)


def _release_and_leave(tx: Tx, worker_id: str, held: Mapping[str, int]) -> None:
    leases.release_all(tx, held, worker_id)
    workers.leave(tx, worker_id)
