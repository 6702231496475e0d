"""Shards have one owner: they follow the workers, and work on one stops before another may start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.model.shards import SHARD_COUNT
from controlplane.queue.membership import SHARD_TIMING, lease_name, open_membership
from tests.support.inline import InlineDatabase, open_inline_database, wait_until

if TYPE_CHECKING:
    from collections.abc import Collection

    from controlplane.config import Role
    from controlplane.model.queues import ShardedRole
    from controlplane.queue.membership import Shards
    from tests.support.logs import LogRecorder
    from tests.support.postgres import Dsn

PASS_S = SHARD_TIMING.renew_every_s
# A pass of everybody, and a moment more, so that a test does not look in the very moment of one.
SETTLED_S = PASS_S + 0.1
TRUST_S = SHARD_TIMING.ttl_s - SHARD_TIMING.margin_s
CONTROLLERS: tuple[Role, ...] = ("controllers",)


def member(
    database: InlineDatabase,
    worker_id: str,
    roles: Collection[Role] = CONTROLLERS,
    sharded: Collection[ShardedRole] = ("controllers",),
):
    return open_membership(database, worker_id=worker_id, roles=roles, sharded_roles=sharded)


def owned(shards: Shards) -> set[int]:
    return set(shards.leases())


def held_names(database: InlineDatabase) -> set[str]:
    found = database.run(lambda tx: tx.tuples("select name from lease where expires_at > compute_now()"))
    return {name for (name,) in found}


async def work_on(shards: Shards, shard: int, stopped: list[float]) -> None:
    with shards.working_on(shard) as scope:
        await trio.sleep_forever()
    if scope.cancelled_caught:
        stopped.append(trio.current_time())


async def test_one_worker_has_all_shards_at_once_and_gives_them_back_at_the_end(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database:
        async with member(database, "a") as a:
            assert owned(a.shards("controllers")) == set(range(SHARD_COUNT))
            assert held_names(database) == {f"shard:{shard}" for shard in range(SHARD_COUNT)}
            await trio.sleep(1000)
            assert a.shards("controllers").leases()[7] == ("shard:7", 1), "renewed, not acquired anew"
        assert held_names(database) == set()
        async with member(database, "b") as b:
            assert len(owned(b.shards("controllers"))) == SHARD_COUNT


async def test_a_worker_that_comes_gets_its_share_and_gives_it_back_when_it_goes(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database, member(database, "a") as a:
        async with member(database, "b") as b:
            assert owned(b.shards("controllers")) == set()
            await trio.sleep(2 * SETTLED_S)
            first, second = owned(a.shards("controllers")), owned(b.shards("controllers"))
            assert first | second == set(range(SHARD_COUNT))
            assert not first & second
            assert SHARD_COUNT / 4 < len(second) < SHARD_COUNT * 3 / 4
        await trio.sleep(SETTLED_S)
        assert len(owned(a.shards("controllers"))) == SHARD_COUNT


async def test_a_worker_that_dies_loses_its_shards_when_its_leases_have_run_out(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database, open_inline_database(dsn) as dying:
        async with member(database, "a") as a:
            async with member(dying, "b"):
                await trio.sleep(2 * SETTLED_S)
                assert len(owned(a.shards("controllers"))) < SHARD_COUNT
                dying.cut_off = True  # it is not even able to say good-bye
            before = trio.current_time()
            await wait_until(lambda: len(owned(a.shards("controllers"))) == SHARD_COUNT)
            assert SHARD_TIMING.ttl_s - PASS_S <= trio.current_time() - before <= SHARD_TIMING.ttl_s + SETTLED_S


async def test_work_stops_before_another_may_start_when_the_database_is_out_of_reach(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database, open_inline_database(dsn) as cut:
        async with member(cut, "a") as a, trio.open_nursery() as nursery:
            start = trio.current_time()
            stopped: list[float] = []
            shards = a.shards("controllers")
            nursery.start_soon(work_on, shards, 7, stopped)
            await trio.sleep(2.5 * PASS_S)
            asked = start + 2 * PASS_S
            cut.cut_off = True
            nursery.start_soon(work_on, shards, 8, stopped)  # begun on trust alone
            async with member(database, "b") as b:
                await wait_until(lambda: len(owned(b.shards("controllers"))) == SHARD_COUNT)
                taken = trio.current_time()
            assert stopped == [asked + TRUST_S] * 2
            assert shards.leases() == {}
            assert taken >= asked + SHARD_TIMING.ttl_s


async def test_work_on_a_shard_that_another_took_is_cancelled_at_the_next_pass(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database, member(database, "a") as a, trio.open_nursery() as nursery:
        stopped: list[float] = []
        shards = a.shards("controllers")
        nursery.start_soon(work_on, shards, 7, stopped)
        nursery.start_soon(work_on, shards, 8, stopped)
        await trio.sleep(1)
        start = trio.current_time() - 1
        database.run(lambda tx: tx.execute("update lease set holder = 'thief', epoch = 9 where name = 'shard:7'"))
        await trio.sleep(PASS_S)
        assert stopped == [start + PASS_S]
        assert 7 not in shards
        assert 8 in shards
        nursery.cancel_scope.cancel()


async def test_a_lease_that_ran_out_comes_back_under_a_new_epoch_and_what_ran_is_cancelled(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database, member(database, "a") as a, trio.open_nursery() as nursery:
        stopped: list[float] = []
        shards = a.shards("controllers")
        nursery.start_soon(work_on, shards, 7, stopped)
        await trio.sleep(1)
        database.run(lambda tx: tx.execute("update lease set expires_at = compute_now() where name = 'shard:7'"))
        await trio.sleep(PASS_S)
        assert len(stopped) == 1
        assert shards.leases()[7] == ("shard:7", 2)
        assert shards.leases()[8] == ("shard:8", 1)


async def test_a_shard_is_handed_over_only_when_nothing_runs_on_it(dsn: Dsn, autojump_clock: object) -> None:
    async with open_inline_database(dsn) as database, member(database, "a") as a:
        shards = a.shards("controllers")
        async with member(database, "b") as b, trio.open_nursery() as nursery:
            for shard in range(SHARD_COUNT):
                nursery.start_soon(work_on, shards, shard, [])
            await trio.sleep(4 * PASS_S)
            assert owned(b.shards("controllers")) == set()
            leaving = set(range(SHARD_COUNT)) - owned(shards)
            assert len(leaving) > SHARD_COUNT / 4, "nothing new begins on these"
            nursery.cancel_scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
        async with member(database, "c") as c:
            await trio.sleep(3 * PASS_S)
            assert owned(c.shards("controllers")) == set(range(SHARD_COUNT)) - owned(shards)


async def test_work_on_a_shard_that_is_not_ours_does_not_begin(dsn: Dsn, autojump_clock: object) -> None:
    async with open_inline_database(dsn) as database, member(database, "a") as a:
        shards = a.shards("controllers")
        shards.settle_pass(wanted=[], renewed=[], acquired={}, trusted_until=0)
        with shards.working_on(7) as scope:
            await trio.lowlevel.checkpoint()
            pytest.fail("began")
        assert scope.cancelled_caught


async def test_a_scheduler_takes_no_node_shards_and_without_reconcilers_none_at_all(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database:
        async with member(database, "s", roles=("scheduler",), sharded=()) as idle:
            assert idle.held() == 0
            assert held_names(database) == set()
        async with member(database, "s", roles=("scheduler",), sharded=("scheduler",)) as scheduler:
            assert held_names(database) == {f"shard:scheduler:{shard}" for shard in range(SHARD_COUNT)}
            async with member(database, "c") as controller:
                await trio.sleep(2 * PASS_S)
                assert len(owned(controller.shards("controllers"))) == SHARD_COUNT
                assert len(owned(scheduler.shards("scheduler"))) == SHARD_COUNT


async def test_a_pass_that_cannot_be_made_is_tried_again_within_the_trust(
    dsn: Dsn, autojump_clock: object, log: LogRecorder
) -> None:
    async with open_inline_database(dsn) as database, member(database, "a") as a, trio.open_nursery() as nursery:
        stopped: list[float] = []
        nursery.start_soon(work_on, a.shards("controllers"), 7, stopped)
        await trio.sleep(PASS_S - 1)
        database.cut_off = True
        await trio.sleep(PASS_S)
        database.cut_off = False
        await trio.sleep(60)
        assert stopped == []
        assert a.shards("controllers").leases()[7] == (lease_name("controllers", 7), 1)
        assert 3 <= len(log.named("membership.pass_failed")) <= 6
        nursery.cancel_scope.cancel()
