"""`fleetsim bench placements`: thousands of placements a second through the whole placer, and the limit of it.

Two worlds, a fleet that is empty and one that is filled and kept so. In each, indexes are loaded and plans timed first.
Then every repeat copies the database twice: in the first copy the placement reconciler works through a queue, in the
filled fleet round by round; in the second what it sent is sent again, without it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from controlplane.capacity.place import LedgerTools
from controlplane.db import leases
from controlplane.db.time import load_now
from controlplane.reconcilers.placement import BATCHES_AT_ONCE, LEASE_S, placement_reconciler
from fleetsim.bench.holds import draw_sizes
from fleetsim.bench.ledger import open_copy, open_ledger
from fleetsim.bench.placements_figures import PLACEMENTS
from fleetsim.bench.placing import NOTHING, Spent, Timed, WatchedDatabase, WatchedIndexes, read_spent, replay
from fleetsim.bench.planning import load_cold, measure_memory, time_plans
from fleetsim.bench.report import Measurements, Statement
from fleetsim.bench.running import NotMeasured, Runner, run_bench, tell
from fleetsim.bench.samples import percentile
from fleetsim.bench.synthetic import Shape, load_fleet
from fleetsim.bench.turnover import queue_reservations, release

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from controlplane.db.tx import Tx
    from fleetsim.bench.ledger import Ledger
    from fleetsim.bench.synthetic import SyntheticFleet

# Of a fleet that is kept full: a pass takes some 4 % of it, before as much ends.
ROUND_BATCHES: Final = 10
# Placements before the timed ones.
WARM_UP: Final = 1_000
WORKER: Final = "wrk_bench"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. `filled` is the part of the GPUs that is held in the filled fleet."""

    nodes: int
    small_nodes: int
    filled: float
    placements: int
    batch: int
    repeats: int
    postgres: int | None

    def list_not_comparable(self) -> set[str]:
        """Return the figures that the reference measured under other conditions."""
        if self.nodes == 10_000:
            return set()
        return {kind.name for kind in PLACEMENTS.kinds if kind.reference is not None}


@dataclass(frozen=True, slots=True)
class Stretch:
    """One run over a queue."""

    spent: Spent
    batches: list[Timed]

    @property
    def placed(self) -> int:
        return sum(batch.placed for batch in self.batches)

    @property
    def per_s(self) -> float:
        return self.placed / self.spent.clock_s


@dataclass(frozen=True, slots=True)
class Round:
    """One pass: what was queued for it, with its ids, how it went, and what ended after it."""

    sizes: list[int]
    queued: list[int]
    stretch: Stretch
    ended: list[int]


def _add_up(rounds: Sequence[Stretch]) -> Stretch:
    """What all rounds but the first took together.

    The first loads the index, and follows the checkpoint in which copying ends, after which every page's first change
    costs more.
    """
    timed = rounds[1:]
    batches = [batch for one in timed for batch in one.batches]
    if not batches:
        raise NotMeasured("no reservation was placed")
    return Stretch(sum((one.spent for one in timed), start=NOTHING), batches)


class Level:
    """Keeps a fleet as full as it was: what is placed, that many GPUs end, the oldest first."""

    def __init__(self, held: Sequence[tuple[int, int]]) -> None:
        """`held`: (reservation id, GPUs) of what may end, in its order."""
        self._held = deque(held)
        self._surplus = 0

    def take(self, placed: Sequence[tuple[int, int]]) -> list[int]:
        """Return what has to end when these have been placed."""
        self._held.extend(placed)
        self._surplus += sum(gpus for _, gpus in placed)
        ended: list[int] = []
        while self._surplus > 0:
            reservation_id, gpus = self._held.popleft()
            ended.append(reservation_id)
            self._surplus -= gpus
        return ended


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
        filled = self.parameters.filled
        await self.runner.repeat(1, ("empty", self._empty), (f"{filled:.0%} filled", self._filled))

    async def _empty(self, directory: Path) -> None:
        await self._measure(directory, "empty", 0.0)

    async def _filled(self, directory: Path) -> None:
        await self._measure(directory, "filled", self.parameters.filled)

    async def _measure(self, directory: Path, fill: str, held: float) -> None:
        given = self.parameters
        async with open_ledger(directory, major=given.postgres) as ledger:
            tell("  writing the fleets")
            fleets = {
                name: await load_fleet(
                    ledger.admin, ledger.writer, Shape(nodes), tenant_id=ledger.tenant_id, pool=name, held=held
                )
                for name, nodes in (("large", given.nodes), ("small", given.small_nodes))
            }
            await ledger.settle()
            for repeat in range(1, given.repeats + 1):
                for size, fleet in fleets.items():
                    await self._plan(ledger, fleet, f"{size}_{fill}")
                tell(f"  repeat {repeat}: planned")
            for repeat in range(1, given.repeats + 1):
                placed, limit = await self._place(ledger, fleets["large"], keep=held > 0)
                tell(f"  repeat {repeat}: {placed.per_s:,.0f}/s; without the placer {limit.per_s:,.0f}/s")
                self._add(fill, placed, limit)

    async def _plan(self, ledger: Ledger, fleet: SyntheticFleet, what: str) -> None:
        load, views = await ledger.admin.run_tx(load_cold, fleet.pool_id)
        now = await ledger.admin.run_tx(load_now)
        timed = await trio.to_thread.run_sync(time_plans, views, fleet.shape.gpus, now)
        add = self.measured.add
        add(f"load_{what}_s", load.total_s)
        add(f"load_{what}_read_s", load.read_s)
        add(f"index_{what}_mib", await ledger.admin.run_tx(measure_memory, fleet.pool_id))
        for shape, us in timed.items():
            add(f"plan_{shape}_{what}_us", us)

    # --- placing -----------------------------------------------------------------------------

    async def _place(self, ledger: Ledger, fleet: SyntheticFleet, *, keep: bool) -> tuple[Stretch, Stretch]:
        """Place a queue in one copy of the ledger, and do the same commits in another."""
        async with open_copy(ledger, "placer") as copy:
            await copy.settle()
            rounds = await self._place_queue(copy, fleet, keep=keep)
        async with open_copy(ledger, "unplaced") as copy:
            await copy.settle()
            limit = await self._commit_again(copy, fleet, rounds)
        return _add_up([done.stretch for done in rounds]), _add_up(limit)

    def _draw_rounds(self, *, keep: bool) -> list[list[int]]:
        """Sizes of what is queued at once: everything, or so much that the fleet stays about as full as it is.

        The first round is a warm-up.
        """
        warm = min(WARM_UP, self.parameters.placements)
        sizes = draw_sizes(random.Random(2), warm + self.parameters.placements)  # noqa: S311 - a pattern
        size = ROUND_BATCHES * self.parameters.batch if keep else len(sizes)
        return [sizes[:warm], *(sizes[at : at + size] for at in range(warm, len(sizes), size))]

    async def _place_queue(self, ledger: Ledger, fleet: SyntheticFleet, *, keep: bool) -> list[Round]:
        """Let the reconciler place a queue, round by round; what does not fit waits on, and is looked at again."""
        level = Level(await ledger.admin.run_tx(_load_held, fleet.pool_id)) if keep else None
        tools = LedgerTools(ledger.writer.signer, ledger.writer.ids, WatchedIndexes())
        rounds: list[Round] = []
        waiting: dict[int, int] = {}
        async with ledger.open_as("bc_worker", pool_size=BATCHES_AT_ONCE) as database:
            for sizes in self._draw_rounds(keep=keep):
                queued = await ledger.admin.run_tx(queue_reservations, ledger.writer.ids, fleet, sizes)
                waiting |= zip(queued, sizes, strict=True)
                watched = WatchedDatabase(database)
                # a new one every time, which has nothing to rest from
                reconciler = placement_reconciler(watched, tools, worker_id=WORKER, max_batch=self.parameters.batch)
                before = read_spent(ledger.postgres.pid)
                await reconciler.reconcile(str(fleet.pool_id))
                spent = read_spent(ledger.postgres.pid) - before
                placed = await ledger.admin.run_tx(_load_placed, sorted(waiting))
                gpus = [(one, waiting.pop(one)) for one in placed]
                ended = level.take(gpus) if level else []
                rounds.append(Round(sizes, queued, Stretch(spent, watched.batches), ended))
                await ledger.admin.run_tx(release, rounds[-1].ended)
        return rounds

    async def _commit_again(self, ledger: Ledger, fleet: SyntheticFleet, rounds: Sequence[Round]) -> list[Stretch]:
        """Send what the placer has sent, as many batches at once, with the same reservations ending in between."""
        sent: list[Stretch] = []
        limiter = trio.CapacityLimiter(BATCHES_AT_ONCE)
        async with ledger.open_as("bc_worker", pool_size=BATCHES_AT_ONCE) as database:

            async def send(batch: Timed, batches: list[Timed]) -> None:
                async with limiter:
                    began = time.perf_counter()
                    await database.run_tx(replay, batch.statements)
                    took_s = time.perf_counter() - began
                batches.append(Timed(batch.placed, took_s, took_s))

            await database.run_tx(leases.acquire, f"placer:{fleet.pool_id}", WORKER, LEASE_S)
            for done in rounds:
                queued = await ledger.admin.run_tx(queue_reservations, ledger.writer.ids, fleet, done.sizes)
                assert queued == done.queued, "two copies count on from the same numbers"
                batches: list[Timed] = []
                before = read_spent(ledger.postgres.pid)
                async with trio.open_nursery() as nursery:
                    for batch in done.stretch.batches:
                        nursery.start_soon(send, batch, batches)
                sent.append(Stretch(read_spent(ledger.postgres.pid) - before, batches))
                await ledger.admin.run_tx(release, done.ended)
        return sent

    def _add(self, fill: str, placed: Stretch, limit: Stretch) -> None:
        def add(name: str, value: float) -> None:
            self.measured.add(f"{fill}_{name}", value)

        add("per_s", placed.per_s)
        add("limit_per_s", limit.per_s)
        add("of_limit", placed.per_s / limit.per_s)
        add("no_room", self.parameters.placements - placed.placed)
        for percent in (50, 90, 99):
            add(f"commit_p{percent}_ms", percentile([batch.locked_s for batch in placed.batches], percent) * 1000)
            add(f"batch_p{percent}_ms", percentile([batch.took_s for batch in placed.batches], percent) * 1000)
        for percent in (50, 90):
            add(f"limit_p{percent}_ms", percentile([batch.took_s for batch in limit.batches], percent) * 1000)
        for name, stretch in (("", placed), ("limit_", limit)):
            add(f"{name}python_cpu_us", stretch.spent.python_s / stretch.placed * 1e6)
            add(f"{name}postgres_cpu_us", stretch.spent.postgres_s / stretch.placed * 1e6)
        last = placed.batches[-1]
        add("statements", len(last.statements))
        self.measured.statements["booking_statements"] = [
            Statement(each=1 / last.placed, query=" ".join(sent.text.split())) for sent in last.statements
        ]


def _load_placed(tx: Tx, reservation_ids: Sequence[int]) -> list[int]:
    """Those of these reservations that are placed now, in the order of their ids."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select reservation_id from reservation where reservation_id = any(%(ids)s) and state = 'binding'
            order by reservation_id
            """,
            {"ids": list(reservation_ids)},
        )
    ]


def _load_held(tx: Tx, pool_id: int) -> list[tuple[int, int]]:
    """The reservations that hold something of a pool, with their GPUs, in the order in which they will end."""
    return [
        (reservation_id, gpus)
        for reservation_id, gpus in tx.tuples(
            """
            select reservation_id, gpus_per_node from reservation
            where pool_id = %(pool)s and state = 'active' order by md5(public_id)
            """,
            {"pool": pool_id},
        )
    ]


def run_placements(parameters: Parameters, *, keep: bool, output: Path | None) -> bool:
    """Measure, write and print the report; return whether nothing failed. Raises ClickException."""
    measured = Measurements(PLACEMENTS)
    measured.not_comparable = parameters.list_not_comparable()
    bench = Bench(parameters, Runner(measured, keep))
    return run_bench(measured, parameters, bench.run, output=output, major=parameters.postgres)
