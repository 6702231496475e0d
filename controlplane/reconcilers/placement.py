"""The placement reconciler: passes over a pool's queue, in batches, under the pool's lease.

It runs when something of the pool may be free, and when somebody was queued. With the placer
`pool-lease` that is how every request is placed; with `inline` only those that had to wait, and those
that came while others waited and could be in their way.

A pass looks at everybody once, by priority, tenants' turns and age (`model.queueing`). Who cannot
start now keeps the place where it could start first, so those behind start only if they delay nobody
ahead: conservative backfill. The places are memory, and are found anew in the next pass.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from controlplane.capacity.batch import place_batch
from controlplane.capacity.preempt import OWNERS_PER_PASS, preempt_for
from controlplane.db import leases
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.db.preemption import load_waiting_owners
from controlplane.db.tx import OPERATING_ERRORS, DatabaseError
from controlplane.db.waiting import load_holding, load_waiting, page_queued_pools
from controlplane.model.queueing import order_queue, share_gangs
from controlplane.queue.outcome import Again, Done
from controlplane.reconcilers.reconciler import Reconciler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controlplane.capacity.batch import Batch
    from controlplane.capacity.place import LedgerTools
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
from controlplane.queue.outcome import Outcome

# Every change that frees something enqueues the pool; this is for what time alone frees.
RECHECK_S: Final = 30.0
# How soon a pool is tried again whose lease somebody else holds: a worker that was paused, or has just died.
HELD_S: Final = 1.0
# While a pool is busy, passes follow each other in milliseconds, and each finds other numbers and estimates.
SAY_EVERY_S: Final = 10.0
PAUSE_MAX_S: Final = 1.0
# Those behind are looked at when these are fewer.
LOOKED_AT_MAX: Final = 5_000
# One that is being planned while the other is being written. More would wait for each other's nodes.
BATCHES_AT_ONCE: Final = 2
# After this a pass begins no other batch: who comes meanwhile has a turn in the next one, perhaps the first.
PASS_S: Final = 5.0
# A pass plans each shape once and books batch by batch.
DEADLINE_S: Final = 30.0
# Outlives a pass, so that nobody has to renew it; after a crash the next worker waits so long for the pool.
LEASE_S: Final = DEADLINE_S + 10.0
RELEASE_S: Final = 3.0


def placement_reconciler(db: Database, tools: LedgerTools, *, worker_id: str, max_batch: int) -> Reconciler:
    """Gives queued reservations what there is, up to `max_batch` in a transaction, then makes room for owners."""

    # when everybody in a pool's queue was last told why it waits
    said: dict[int, float] = {}
    # until when a pool rests after a pass
    resting: dict[int, float] = {}

    async def run_pass(pool_id: int, fence: Fence) -> Outcome:
        say_all = trio.current_time() >= said.get(pool_id, -SAY_EVERY_S) + SAY_EVERY_S
        if say_all:
            said[pool_id] = trio.current_time()
        began = trio.current_time()
        batches, all_seen = await _place_all(db, tools, pool_id, fence, max_batch=max_batch, say_all=say_all)
        waiting, lost = sum(batch.waiting for batch in batches), sum(batch.lost for batch in batches)
        if waiting:
            # an owner's own place would be in its way
            tools.indexes.end_pass(pool_id)
            for owner in await db.run_tx(load_waiting_owners, pool_id, limit=OWNERS_PER_PASS):
                await db.run_tx(preempt_for, tools, owner)
        looked_at = sum(batch.claimed for batch in batches)
        in_vain_s = (trio.current_time() - began) * waiting / max(looked_at, 1)
        resting[pool_id] = trio.current_time() + min(in_vain_s, PAUSE_MAX_S)
        # what those that lost have lost to is in the index by now, and who was placed is not in the queue any more
        if lost or (not all_seen and waiting < looked_at):
            return Again(0.0)
        return Done() if all_seen and not waiting else Again(RECHECK_S)

    async def reconcile(key: str) -> Outcome:
        # a busy pool asks for pass after pass: no more than half of the time is spent on those who wait on
        await trio.sleep_until(resting.pop(int(key), -math.inf))
        name = f"placer:{key}"
        epoch = await db.run_lease_tx(leases.acquire, name, worker_id, LEASE_S)
        if epoch is None:
            return Again(HELD_S)
        try:
            return await run_pass(int(key), Fence(name, worker_id, epoch))
        except StaleEpoch:
            # paused for longer than the lease; whoever has it now goes on
            return Again(HELD_S)
        finally:
            tools.indexes.end_pass(int(key))
            # otherwise it runs out by itself
            with trio.move_on_after(RELEASE_S, shield=True), suppress(*OPERATING_ERRORS):
                await db.run_lease_tx(leases.release, name, worker_id, epoch)

    async def list_keys(after: str, limit: int) -> Sequence[str]:
        pools = await db.run_tx(page_queued_pools, int(after or 0), limit)
        return [str(pool_id) for pool_id in pools]

    return Reconciler(
        name="placement",
        queue="pool",
        role="scheduler",
        reconcile=reconcile,
        list_keys=list_keys,
        concurrency=2,
        deadline_s=DEADLINE_S,
    )


async def _place_all(
    db: Database, tools: LedgerTools, pool_id: int, fence: Fence, *, max_batch: int, say_all: bool
) -> tuple[list[Batch], bool]:
    """Look at everybody once, batch by batch; says too whether the whole queue had a turn.

    Raises:
        DatabaseError, StaleEpoch: the first that a batch has met; the others of that moment are rolled back.
    """
    batches: list[Batch] = []
    failed: list[Exception] = []
    limiter = trio.CapacityLimiter(BATCHES_AT_ONCE)
    tell_loop = trio.lowlevel.current_trio_token().run_sync_soon
    cut_off = trio.Event()

    def note(planned: trio.Event, left: int) -> None:
        if left:
            cut_off.set()
        planned.set()

    async def place(ids: Sequence[int], planned: trio.Event) -> None:
        def tell(left: int) -> None:
            tell_loop(note, planned, left)

        try:
            async with limiter:
                batch = await db.run_tx(
                    place_batch,
                    tools,
                    pool_id,
                    ids=ids,
                    gangs_of_one=gangs_of_one,
                    fence=fence,
                    say_all=say_all,
                    on_planned=tell,
                )
            batches.append(batch)
        except (DatabaseError, StaleEpoch) as exc:
            # a batch that is on its way is rolled back: the next pass finds all of it
            failed.append(exc)
            nursery.cancel_scope.cancel("a batch before it has failed")
        finally:
            planned.set()

    give_up = trio.current_time() + PASS_S
    begun = 0
    order, gangs_of_one = await db.run_tx(_load_order, pool_id)
    async with trio.open_nursery() as nursery:
        for ids in _chunks(order, max_batch):
            begun += len(ids)
            planned = trio.Event()
            nursery.start_soon(place, ids, planned)
            await planned.wait()
            # whoever had no turn may be delayed by those behind
            if cut_off.is_set() or trio.current_time() > give_up:
                break
    if failed:
        raise failed[0]
    return batches, begun == len(order) < LOOKED_AT_MAX and not cut_off.is_set()


def _load_order(tx: Tx, pool_id: int) -> tuple[list[int], int]:
    """The order of turns, and for how many gangs of one tenant the pass may look for a start."""
    waiting = load_waiting(tx, pool_id, limit=LOOKED_AT_MAX)
    # alone, nobody has to take turns
    several = len({request.tenant_id for request in waiting}) > 1
    return order_queue(waiting, load_holding(tx, pool_id) if several else {}), share_gangs(waiting)


def _chunks(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
