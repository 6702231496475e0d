"""Three workers on real connections: woken by notifications, never two on a key, and any of them may go."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio
from prometheus_client import CollectorRegistry

from controlplane.db import queue
from controlplane.db.notify import Doorbell, run_listener
from controlplane.db.pool import Database, DatabaseConfig, open_database
from controlplane.queue import bells as bells_module
from controlplane.queue.bells import Bells
from controlplane.queue.outcome import Done
from controlplane.reconcilers.driver import open_reconcilers
from controlplane.reconcilers.reconciler import Reconciler
from controlplane.reconcilers.registry import Registry
from shared.leases import LeaseTiming
from shared.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    import pytest

    from controlplane.db.tx import Tx
    from controlplane.queue.outcome import Outcome
    from tests.support.postgres import Dsn

TABLE = "create table wanted (key text primary key, touched int default 1, applied int default 0)"
QUICK = LeaseTiming(ttl_s=3.0, renew_every_s=0.3, margin_s=1.0, retry_every_s=0.1)


class Ledger:
    """What the workers do: each run reads and writes a row in two transactions, as reconcilers do."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.twice: set[str] = set()
        self.runs: Counter[str] = Counter()  # by worker

    def reconciler(self, database: Database, worker_id: str) -> Reconciler:
        async def reconcile(key: str) -> Outcome:
            self.running[key] += 1
            if self.running[key] > 1:
                self.twice.add(key)
            try:
                wanted = await database.run_tx(load_wanted, key)
                await database.run_tx(apply, key, wanted)
                self.runs[worker_id] += 1
            finally:
                self.running[key] -= 1
            return Done()

        return Reconciler(
            name="tested", queue="node", role="controllers", reconcile=reconcile, list_keys=list_nothing, concurrency=3
        )


async def list_nothing(_after: str, _limit: int) -> Sequence[str]:
    return []


def load_wanted(tx: Tx, key: str) -> int:
    wanted = tx.value("select touched from wanted where key = %s", (key,))
    assert isinstance(wanted, int)
    return wanted


def apply(tx: Tx, key: str, wanted: int) -> None:
    tx.execute("update wanted set applied = %s where key = %s", (wanted, key))


def touch(tx: Tx, keys: Sequence[str]) -> None:
    tx.execute(
        """
        insert into wanted (key) select unnest(%s::text[])
        on conflict (key) do update set touched = wanted.touched + 1
        """,
        (list(keys),),
    )
    queue.enqueue(tx, "node", keys)


def unapplied(tx: Tx) -> int:
    left = tx.value("select (select count(*) from wanted where applied < touched) + (select count(*) from work_queue)")
    assert isinstance(left, int)
    return left


@asynccontextmanager
async def open_worker(dsn: Dsn, worker_id: str, ledger: Ledger) -> AsyncGenerator[None]:
    bells = Bells()
    async with (
        open_database(DatabaseConfig(dsn.worker, pool_size=3)) as database,
        trio.open_nursery() as nursery,
    ):
        listen = partial(run_listener, dsn.worker, {"bc_work": bells.ring}, on_reconnect=bells.look.ring)
        await nursery.start(listen)
        async with open_reconcilers(
            database,
            Registry((ledger.reconciler(database, worker_id),)),
            worker_id=worker_id,
            roles=["controllers"],
            bells=bells,
            metrics=Metrics(CollectorRegistry()),
            rng=random.Random(worker_id),
            shard_timing=QUICK,
        ):
            yield
        nursery.cancel_scope.cancel()


def holders(tx: Tx) -> int:
    found = tx.value("select count(distinct holder) from lease where expires_at > compute_now()")
    assert isinstance(found, int)
    return found


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with trio.fail_after(20):
        while not await condition():  # noqa: ASYNC110 - what is waited for happens in other threads
            await trio.sleep(0.05)  # sleeps: polls a real server


async def test_workers_share_the_keys_and_take_over_from_each_other(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells_module, "POLL_S", 3600.0)  # what runs was woken by a notification
    ledger, doorbell, rng = Ledger(), Doorbell(dsn.worker), random.Random(1)
    async with open_database(DatabaseConfig(dsn.owner)) as owner, trio.open_nursery() as nursery:
        await owner.run_tx(lambda tx: tx.execute(TABLE))
        await owner.run_tx(lambda tx: tx.execute("grant select, update on wanted to bc_worker"))
        await nursery.start(doorbell.run)

        async def change_and_settle(rounds: int) -> None:
            for _ in range(rounds):
                await owner.run_tx(touch, [str(key) for key in rng.sample(range(60), 10)])
                doorbell.ring("bc_work", rng.choice(["", "node"]))
            await until(all_applied)

        async def all_applied() -> bool:
            # A shard between two owners has no bell: its keys are found when somebody looks again.
            doorbell.ring("bc_work")
            return await owner.run_tx(unapplied) == 0

        async def have_shards(workers: int) -> None:
            async def check() -> bool:
                return await owner.run_tx(holders) == workers

            await until(check)

        async with open_worker(dsn, "a", ledger):
            async with open_worker(dsn, "b", ledger):
                async with open_worker(dsn, "c", ledger):
                    await have_shards(3)
                    await change_and_settle(40)
                    assert min(ledger.runs[worker] for worker in "abc") > 0
                await change_and_settle(20)
            before = ledger.runs["a"]
            await change_and_settle(10)
            assert ledger.runs["a"] > before
        assert ledger.twice == set()
        nursery.cancel_scope.cancel()
