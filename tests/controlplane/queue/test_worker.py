"""Keys run once at a time, again when they changed, later when they failed, elsewhere when their worker is gone."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.db import queue
from controlplane.db.tx import OPERATING_ERRORS
from controlplane.model.queues import QUEUES
from controlplane.queue.bells import POLL_S, Bell, Bells, run_lookout
from controlplane.queue.membership import SHARD_TIMING, open_membership
from controlplane.queue.outcome import Again, Done
from controlplane.queue.worker import CLAIM_MARGIN_S, KEY_BACKOFF, QueueRunner, QueueWork
from shared.backoff import Backoff
from shared.services import supervise
from tests.support.inline import InlineDatabase, open_inline_database, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from typing import Any

    from controlplane.queue.outcome import Outcome
    from tests.support.postgres import Dsn

DEADLINE_S = 10.0


class World:
    """Keys with a version each, and every run of any worker: the judge of what the workers do."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.running: set[str] = set()
        self.runs: list[str] = []
        self.twice: list[str] = []

    def change(self, database: InlineDatabase, *keys: str) -> None:
        for key in keys:
            self.versions[key] = self.versions.get(key, 0) + 1
        database.run(lambda tx: queue.enqueue(tx, "node", keys))

    def settled(self) -> bool:
        return self.seen == self.versions

    async def run(self, key: str, took_s: float) -> Outcome:
        if key in self.running:
            self.twice.append(key)
        self.running.add(key)
        self.runs.append(key)
        try:
            version = self.versions[key]
            await trio.sleep(took_s)  # sleeps: in virtual time
            self.seen[key] = version
        finally:
            self.running.discard(key)
        return Done()


@asynccontextmanager
async def open_worker(
    database: InlineDatabase,
    run: Callable[[str], Awaitable[Outcome]],
    *,
    worker_id: str = "w",
    concurrency: int = 4,
    bells: Bells | None = None,
) -> AsyncGenerator[QueueRunner]:
    bells = bells or Bells()
    work = QueueWork(name="tested", queue="node", run=run, concurrency=concurrency, deadline_s=DEADLINE_S)
    async with open_membership(
        database, worker_id=worker_id, roles=["controllers"], sharded_roles=["controllers"]
    ) as membership:
        runner = QueueRunner(
            database,
            work,
            worker_id=worker_id,
            shards=membership.shards("controllers"),
            bell=bells.of("node"),
            observe=lambda _took_s, _result: None,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runner.run)
            look = partial(run_lookout, database, bells, ["node"])
            nursery.start_soon(partial(supervise, look, name="lookout", restart_on=OPERATING_ERRORS, backoff=Backoff()))
            yield runner
            nursery.cancel_scope.cancel()


def rows(database: InlineDatabase) -> list[tuple[Any, ...]]:
    return database.run(
        lambda tx: tx.tuples("select key, attempts, claimed_by, last_error from work_queue order by key")
    )


async def test_every_key_runs_and_is_gone(dsn: Dsn, autojump_clock: object) -> None:
    world = World()
    async with open_inline_database(dsn) as database, open_worker(database, lambda key: world.run(key, 0.01)):
        world.change(database, *map(str, range(100)))
        await wait_until(world.settled)
        await wait_until(lambda: rows(database) == [])
    assert sorted(world.runs) == sorted(map(str, range(100)))


async def test_no_more_keys_run_at_once_than_allowed(dsn: Dsn, autojump_clock: object) -> None:
    world = World()
    most = 0

    async def run(key: str) -> Outcome:
        nonlocal most
        most = max(most, len(world.running) + 1)
        return await world.run(key, 0.25)

    async with open_inline_database(dsn) as database, open_worker(database, run, concurrency=3):
        world.change(database, *map(str, range(24)))
        start = trio.current_time()
        await wait_until(world.settled)
        assert most == 3
        assert trio.current_time() - start < 24 / 3 * 0.25 + POLL_S + 0.2, "the next key is there when one ends"


async def test_a_bell_saves_the_wait(dsn: Dsn, autojump_clock: object) -> None:
    world, bells = World(), Bells()
    async with (
        open_inline_database(dsn) as database,
        open_worker(database, lambda key: world.run(key, 0), bells=bells),
    ):
        await trio.sleep(10.5 * POLL_S)
        world.change(database, "1")
        bells.ring("node")
        before = trio.current_time()
        await wait_until(world.settled)
        assert trio.current_time() - before <= 0.1


async def test_a_change_during_a_run_makes_it_run_again_at_once_and_not_beside_itself(
    dsn: Dsn, autojump_clock: object
) -> None:
    world, bells = World(), Bells()
    async with (
        open_inline_database(dsn) as database,
        open_worker(database, lambda key: world.run(key, 2.0), bells=bells),
    ):
        world.change(database, "1")
        bells.ring("node")
        await wait_until(lambda: "1" in world.running)
        before = trio.current_time()
        world.change(database, "1")
        bells.ring("node")
        await wait_until(world.settled)
        assert world.runs == ["1", "1"]
        assert world.twice == []
        assert trio.current_time() - before <= 4.1


async def test_again_runs_the_key_when_it_said(dsn: Dsn, autojump_clock: object) -> None:
    at: list[float] = []

    async def run(_: str) -> Outcome:
        at.append(trio.current_time())
        return Again(60.0) if len(at) == 1 else Done()

    async with open_inline_database(dsn) as database, open_worker(database, run):
        database.run(lambda tx: queue.enqueue(tx, "node", ["1"]))
        await wait_until(lambda: len(at) == 2, within_s=100)
        assert 60 <= at[1] - at[0] <= 60 + POLL_S


async def test_a_poison_key_backs_off_and_stands_in_nobodys_way(
    dsn: Dsn, autojump_clock: object, expect_error_logs: list[dict[str, Any]]
) -> None:
    world = World()
    at: list[float] = []

    async def run(key: str) -> Outcome:
        if key == "poison":
            at.append(trio.current_time())
            raise ValueError("bad row")
        return await world.run(key, 0.1)

    async with open_inline_database(dsn) as database, open_worker(database, run, concurrency=1) as runner:
        database.run(lambda tx: queue.enqueue(tx, "node", ["poison"]))
        for number in range(25):
            world.change(database, str(number % 7))
            await trio.sleep(5)
        await wait_until(world.settled)
        pauses = [round(b - a) for a, b in pairwise(at)]
        assert pauses[:6] == pytest.approx([1, 2, 4, 8, 16, 32], abs=2)
        assert KEY_BACKOFF.pause_s(100) == 300
        assert rows(database) == [("poison", len(at), None, "ValueError: bad row")]
        assert runner.counts.errors == len(at)
        assert (runner.counts.last_error, runner.counts.last_error_key) == ("ValueError: bad row", "poison")
        assert all("exc_info" in event for event in expect_error_logs if event["event"] == "reconciler.failed")


async def test_a_run_that_takes_too_long_is_cut_off(
    dsn: Dsn, autojump_clock: object, expect_error_logs: list[dict[str, Any]]
) -> None:
    world = World()
    async with open_inline_database(dsn) as database, open_worker(database, lambda key: world.run(key, 3600)):
        world.change(database, "1")
        await wait_until(lambda: [row[1] for row in rows(database)] == [1])
        assert rows(database)[0][3] == "took longer than 10 s"
        assert trio.current_time() < DEADLINE_S + 2 * POLL_S


async def test_a_database_that_goes_away_and_comes_back_costs_no_key(dsn: Dsn, autojump_clock: object) -> None:
    world = World()
    async with open_inline_database(dsn) as database, open_worker(database, lambda key: world.run(key, 1.0)):
        world.change(database, *map(str, range(20)))
        await trio.sleep(2.5)
        database.cut_off = True
        await trio.sleep(30)
        database.cut_off = False
        await wait_until(world.settled)
        await wait_until(lambda: rows(database) == [])
        assert world.twice == []


async def test_a_worker_that_stops_gives_its_keys_back_at_once(dsn: Dsn, autojump_clock: object) -> None:
    world = World()
    async with open_inline_database(dsn) as database:
        async with open_worker(database, lambda key: world.run(key, DEADLINE_S - 1)):
            world.change(database, *map(str, range(6)))
            await wait_until(lambda: len(world.running) == 4)
        assert [row[2] for row in rows(database)] == [None] * 6
        before = trio.current_time()
        async with open_worker(database, lambda key: world.run(key, 0.1), worker_id="next"):
            await wait_until(world.settled)
            assert trio.current_time() - before < 2


async def test_the_keys_of_a_worker_that_died_run_elsewhere_when_its_claims_have_run_out(
    dsn: Dsn, autojump_clock: object
) -> None:
    world = World()
    async with open_inline_database(dsn) as database, open_inline_database(dsn) as dying:
        async with open_worker(dying, lambda key: world.run(key, DEADLINE_S - 1), worker_id="dying"):
            world.change(database, *map(str, range(6)))
            await wait_until(lambda: len(world.running) == 4)
            dying.cut_off = True
        died = trio.current_time()
        async with open_worker(database, lambda key: world.run(key, 0.1), worker_id="next") as runner:
            await wait_until(world.settled)
            assert SHARD_TIMING.ttl_s < trio.current_time() - died < 2 * DEADLINE_S + CLAIM_MARGIN_S + 2 * POLL_S
            assert runner.counts.runs == 6
    assert world.twice == []


async def is_rung(bell: Bell) -> bool:
    with trio.move_on_after(0.1) as waited:
        await bell.wait()
    return not waited.cancelled_caught


async def test_a_queues_bell_is_rung_by_its_name_and_anything_else_makes_us_look(autojump_clock: object) -> None:
    bells = Bells()
    bells.ring("node")
    bells.ring("node")
    assert await is_rung(bells.of("node"))
    assert not await is_rung(bells.of("node")), "many rings are one"
    assert not await is_rung(bells.look)
    bells.ring("a queue of a newer version")
    assert await is_rung(bells.look)
    bells.look.ring()
    assert await is_rung(bells.look)


async def test_the_lookout_rings_for_what_is_due(dsn: Dsn, autojump_clock: object) -> None:
    async with open_inline_database(dsn) as database, trio.open_nursery() as nursery:
        bells = Bells()
        nursery.start_soon(run_lookout, database, bells, QUEUES)
        await trio.sleep(10.5 * POLL_S)
        database.run(lambda tx: queue.enqueue(tx, "pool", ["1"]))
        assert not await is_rung(bells.of("pool"))
        bells.ring("")
        assert await is_rung(bells.of("pool")), "at once, when asked to look"
        await trio.sleep(POLL_S)
        assert await is_rung(bells.of("pool")), "still due"
        assert not await is_rung(bells.of("node"))
        nursery.cancel_scope.cancel()


class Troubled:
    """Three workers that are cut off, killed and started again while keys change, by one seed."""

    def __init__(self, dsn: Dsn, seed: int) -> None:
        self.dsn = dsn
        self.rng = random.Random(seed)
        self.world = World()

    async def run_worker(self, slot: int, until_s: float) -> None:
        life = 0
        while trio.current_time() < until_s:
            life += 1
            async with open_inline_database(self.dsn) as database:
                run = self.run_key
                with trio.move_on_at(until_s):
                    async with open_worker(database, run, worker_id=f"w{slot}.{life}", concurrency=2):
                        await self.trouble(database)
                        database.cut_off = self.rng.random() < 0.5  # killed, or stopped in good order

    async def run_key(self, key: str) -> Outcome:
        return await self.world.run(key, self.rng.choice([0.0, 0.3, 4.0, 20.0]))

    async def trouble(self, database: InlineDatabase) -> None:
        for _ in range(self.rng.randint(1, 4)):
            await trio.sleep(self.rng.uniform(5, 40))  # sleeps: in virtual time
            database.cut_off = True
            await trio.sleep(self.rng.uniform(1, 30))  # sleeps: in virtual time
            database.cut_off = False
        await trio.sleep(self.rng.uniform(5, 40))  # sleeps: in virtual time

    async def change_keys(self, database: InlineDatabase, until_s: float) -> None:
        while trio.current_time() < until_s:
            self.world.change(database, *(str(self.rng.randrange(30)) for _ in range(self.rng.randint(1, 5))))
            await trio.sleep(self.rng.uniform(0.1, 5))  # sleeps: in virtual time


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_to_workers_no_key_runs_twice_at_once_and_every_change_is_seen(
    dsn: Dsn, autojump_clock: object, expect_error_logs: list[dict[str, Any]], seed: int
) -> None:
    troubled = Troubled(dsn, seed)
    async with open_inline_database(dsn) as database:
        async with trio.open_nursery() as nursery:
            for slot in range(3):
                nursery.start_soon(troubled.run_worker, slot, 400.0)
            nursery.start_soon(troubled.change_keys, database, 300.0)
        async with open_worker(database, lambda key: troubled.world.run(key, 0.0), worker_id="healed"):
            await wait_until(troubled.world.settled, within_s=400)
    assert troubled.world.twice == []
    # Between 94 and 193 in what was seen: trio shuffles its tasks, so that a seed gives the troubles and not the order.
    assert len(troubled.world.runs) > 60, "workers did run, for all the trouble"
    assert {event["event"] for event in expect_error_logs if event["level"] == "error"} == {"reconciler.timed_out"}
