"""`fleetsim bench queue`: what a queue costs while nothing fits, and how soon it moves when something does.

One world, copied for every repeat: a full pool for which many wait. First passes over the queue are timed, in this
process. Then a real server has the queue: single reservations are released, and it is timed until the first event says
that somebody was placed; at last so much is released that everybody finds room.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from controlplane.capacity.indexes import PoolIndexes
from controlplane.capacity.place import LedgerTools
from controlplane.db.queue import enqueue
from controlplane.reconcilers.placement import PAUSE_MAX_S, placement_reconciler
from fleetsim.bench.cost import Meter
from fleetsim.bench.holding import open_event_watch
from fleetsim.bench.holds import draw_sizes
from fleetsim.bench.ledger import open_copy, open_ledger
from fleetsim.bench.placing import read_spent
from fleetsim.bench.queue_figures import QUEUE
from fleetsim.bench.report import Measurements
from fleetsim.bench.running import NotMeasured, Runner, run_bench, tell
from fleetsim.bench.samples import percentile
from fleetsim.bench.server import open_server_on
from fleetsim.bench.synthetic import Shape, load_fleet
from fleetsim.bench.turnover import queue_reservations, release

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from fleetsim.bench.holding import EventWatch
    from fleetsim.bench.ledger import Ledger
    from fleetsim.bench.server import Server
    from fleetsim.bench.synthetic import SyntheticFleet

WORKER: Final = "wrk_bench"
# What a server does by itself finds the queue within its recheck of 30 s; whoever waits longer is stuck.
PLACED_WITHIN_S: Final = 60.0
DRAINED_WITHIN_S: Final = 120.0
POLL_S: Final = 0.01
PLACED_EVENT: Final = "reservation.binding"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. `samples`: how often one reservation is released alone."""

    nodes: int
    waiting: int
    samples: int
    batch: int
    repeats: int
    postgres: int | None


@dataclass(frozen=True, slots=True)
class Bench:
    """One run."""

    parameters: Parameters
    runner: Runner

    @property
    def measured(self) -> Measurements:
        return self.runner.measured

    async def run(self) -> None:
        """Measure everything; what fails is noted."""
        await self.runner.run(f"{self.parameters.waiting:,} wait for a full pool", self._measure)

    async def _measure(self, directory: Path) -> None:
        given = self.parameters
        sizes = draw_sizes(random.Random(3), given.waiting)  # noqa: S311 - a pattern
        async with open_ledger(directory, major=given.postgres) as ledger:
            tell("writing the fleet and its queue")
            fleet = await load_fleet(
                ledger.admin, ledger.writer, Shape(given.nodes), tenant_id=ledger.tenant_id, held=1
            )
            await ledger.admin.run_tx(queue_reservations, ledger.writer.ids, fleet, sizes)
            await ledger.settle()
            for repeat in range(1, given.repeats + 1):
                tell(f"repeat {repeat} of {given.repeats}")
                async with open_copy(ledger, f"repeat_{repeat}") as copy:
                    await self._pass(copy, fleet)
                    async with open_server_on(copy, directory) as server:
                        await self._release_singly(server, fleet)
                        await self._drain(server, fleet, sum(sizes))

    async def _pass(self, ledger: Ledger, fleet: SyntheticFleet) -> None:
        """Time the first pass over the queue, and one more."""
        tools = LedgerTools(ledger.writer.signer, ledger.writer.ids, PoolIndexes())
        async with ledger.open_as("bc_worker", pool_size=2) as database:
            for name in ("first_pass", "idle_pass"):
                # a new one every time, which has nothing to rest from
                reconciler = placement_reconciler(database, tools, worker_id=WORKER, max_batch=self.parameters.batch)
                counts, _ = await ledger.count_statements()
                before = read_spent(ledger.postgres.pid)
                await reconciler.reconcile(str(fleet.pool_id))
                spent = read_spent(ledger.postgres.pid) - before
                after, _ = await ledger.count_statements()
                self.measured.add(f"{name}_ms", spent.clock_s * 1000)
        self.measured.add("idle_pass_cpu_ms", (spent.python_s + spent.postgres_s) * 1000)
        self.measured.add("idle_pass_statements", (after - counts).statements)

    async def _release_singly(self, server: Server, fleet: SyntheticFleet) -> None:
        """Release a whole node's worth, so that whoever is first fits, and wait until somebody is placed."""
        took: list[float] = []
        largest = await server.ledger.admin.run_tx(_load_holders, fleet.pool_id, 8, self.parameters.samples + 1)
        async with open_event_watch(server.client, "reservation") as watch:
            # the first opens the stream, and has the server read the pool
            for number, reservation_id in enumerate(largest):
                waited = await self._time_release(server, watch, fleet, reservation_id)
                if number:
                    took.append(waited)
        if not took:
            raise NotMeasured("nobody holds 8 GPUs of one node; the fleet is too small")
        for percent in (50, 90, 99):
            self.measured.add(f"placed_p{percent}_ms", percentile(took, percent) * 1000)

    async def _time_release(
        self, server: Server, watch: EventWatch, fleet: SyntheticFleet, reservation_id: int
    ) -> float:
        placed = len(watch.subjects(PLACED_EVENT))
        await server.ledger.admin.run_tx(_release_and_wake, [reservation_id], fleet.pool_id)
        began = trio.current_time()
        with trio.move_on_after(PLACED_WITHIN_S):
            while len(watch.subjects(PLACED_EVENT)) == placed:
                await watch.wait_news()
            waited = trio.current_time() - began
            # until the queue has taken all of it and has rested, so that the next release meets one that is idle
            await _wait_until_none(server.ledger.admin, _count_busy, fleet.pool_id)
            await trio.sleep(PAUSE_MAX_S)
            return waited
        raise NotMeasured(f"8 GPUs were free for {PLACED_WITHIN_S:g} s, and nobody was placed")

    async def _drain(self, server: Server, fleet: SyntheticFleet, gpus: int) -> None:
        """Release as much as all that wait have asked for, and more, and wait until nobody waits."""
        admin = server.ledger.admin
        waiting = await admin.run_tx(_count_waiting, fleet.pool_id)
        if not waiting:
            raise NotMeasured("single releases have emptied the queue; have more wait, or take fewer samples")
        # a quarter more than that, since nodes are not filled without rests
        wanted = gpus // 8 * 5 // 4 + 2
        whole = await admin.run_tx(_load_holders, fleet.pool_id, 8, wanted)
        if len(whole) < wanted:
            raise NotMeasured(f"{len(whole)} hold 8 GPUs, and {wanted} should let go; have fewer wait, or more nodes")
        meter = Meter(server)
        before = await meter.read()
        began = time.perf_counter()
        await admin.run_tx(_release_and_wake, whole, fleet.pool_id)
        committed = time.perf_counter()
        with trio.move_on_after(DRAINED_WITHIN_S) as draining:
            await _wait_until_none(admin, _count_waiting, fleet.pool_id)
        seconds = time.perf_counter() - committed
        if draining.cancelled_caught:
            left = await admin.run_tx(_count_waiting, fleet.pool_id)
            raise NotMeasured(f"{left} of {waiting} still waited {seconds:.0f} s after there was room for all")
        cost = meter.cost(before, await meter.read(), waiting)
        tell(f"  {waiting} were placed in {seconds:.2f} s; the release had taken {committed - began:.2f} s")
        self.measured.add("drain_s", seconds)
        self.measured.add("drain_per_s", waiting / seconds)
        self.measured.add("drain_server_cpu_us", cost.cpu_s["server"] * 1e6)
        self.measured.add("drain_postgres_cpu_us", cost.cpu_s["postgres"] * 1e6)


async def _wait_until_none(admin: Database, count: Callable[[Tx, int], int], pool_id: int) -> None:
    while True:
        if not await admin.run_tx(count, pool_id):
            return
        await trio.sleep(POLL_S)


def _count_busy(tx: Tx, pool_id: int) -> int:
    """1 if the pool's queue is being looked at, or is to be now."""
    count = tx.value(
        """
        select count(*) from work_queue
        where queue = 'pool' and key = %(pool)s::text and (due_at <= compute_now() or claimed_until > compute_now())
        """,
        {"pool": pool_id},
    )
    assert isinstance(count, int)
    return count


def _release_and_wake(tx: Tx, reservation_ids: list[int], pool_id: int) -> None:
    """Release, and have the pool's queue looked at when this is committed."""
    release(tx, reservation_ids)
    enqueue(tx, "pool", [str(pool_id)])
    # the product rings a doorbell after the commit, which does this; a benchmark has none
    tx.execute("select pg_notify('bc_work', 'pool')")


def _count_waiting(tx: Tx, pool_id: int) -> int:
    count = tx.value("select count(*) from reservation where pool_id = %s and state = 'queued'", (pool_id,))
    assert isinstance(count, int)
    return count


def _load_holders(tx: Tx, pool_id: int, gpus: int, limit: int) -> list[int]:
    """Active reservations of so many GPUs, in an order that has nothing to do with their nodes'."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select reservation_id from reservation
            where pool_id = %(pool)s and state = 'active' and gpus_per_node = %(gpus)s
            order by md5(public_id) limit %(limit)s
            """,
            {"pool": pool_id, "gpus": gpus, "limit": limit},
        )
    ]


def run_queue(parameters: Parameters, *, keep: bool, output: Path | None) -> bool:
    """Measure, write and print the report; return whether nothing failed. Raises ClickException."""
    measured = Measurements(QUEUE)
    bench = Bench(parameters, Runner(measured, keep))
    return run_bench(measured, parameters, bench.run, output=output, major=parameters.postgres)
