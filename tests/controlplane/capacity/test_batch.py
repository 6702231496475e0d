"""Batches: many queued reservations in one transaction, the losers left for the next one."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.capacity import batch
from controlplane.capacity.batch import Batch, place_batch
from controlplane.capacity.indexes import PoolIndexes
from controlplane.capacity.place import LedgerTools
from controlplane.db import leases, reservations
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.db.tx import LockTimeout
from controlplane.model.planner import NoPlan
from controlplane.queue.outcome import Again
from controlplane.reconcilers.placement import HELD_S, placement_reconciler
from controlplane.reconcilers.specs import rewrite_if_stale
from tests.support.ledgers import LedgerFleet, open_fleet
from tests.support.quotas import set_quota, used

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from controlplane.db.placements import Commitment
    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn


async def queue(fleet: LedgerFleet, gpus: int, **request: Any) -> int:
    reservation_id = await fleet.draft(gpus, **request)
    assert await fleet.run(reservations.mark_queued, reservation_id, "draft", reason="")
    return reservation_id


async def place(fleet: LedgerFleet, *ids: int) -> Batch:
    """A pass in one batch, over all that waits unless ids are given."""
    turns = list(ids) or [row[0] for row in fleet.execute("select reservation_id from reservation order by 1")]
    made = await fleet.run(place_batch, fleet.tools, fleet.pool_id, ids=turns)
    fleet.tools.indexes.end_pass(fleet.pool_id)
    return made


async def states(fleet: LedgerFleet, ids: list[int]) -> list[str]:
    return [(await fleet.load(reservation_id)).state for reservation_id in ids]


def elsewhere(fleet: LedgerFleet) -> LedgerTools:
    """What another process has: the same keys, and an index of its own."""
    return LedgerTools(fleet.tools.signer, fleet.tools.ids, PoolIndexes())


async def test_a_batch_places_what_fits_in_order_and_says_why_the_rest_waits(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        ids = [await queue(fleet, gpus) for gpus in (8, 4, 2, 8, 1, 2)]
        later = await queue(fleet, 8, start_s=7200)
        made = await place(fleet)
        assert (made.claimed, made.placed, made.lost, made.waiting) == (7, 5, 0, 2)
        assert await states(fleet, ids) == ["binding", "binding", "binding", "queued", "binding", "queued"]
        assert await states(fleet, [later]) == ["placed"]
        assert (
            await fleet.load(ids[5])
        ).pending_reason == "needs 2 GPUs on one node; most free on one node: 1; 1 ahead in the queue"
        fleet.assert_sound()
        queued = fleet.execute("select subject, data->>'reason' from outbox where kind = 'reservation.queued'")
        assert len(queued) == 2
        assert fleet.execute("select count(*) from outbox where kind = 'reservation.placed'") == [(5,)]
        assert fleet.execute("select count(*) from outbox where kind = 'reservation.binding'") == [(4,)]
        # once everybody has been looked at, nothing is news any more
        for _ in range(2):
            assert (await place(fleet)).placed == 0
            assert fleet.execute("select count(*) from outbox where kind = 'reservation.queued'") == [(3,)]


async def test_holds_of_a_batch_are_bound_by_the_spec_that_is_written_after_it(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        ids = [await queue(fleet, 4), await queue(fleet, 4)]
        await place(fleet)
        keys = fleet.execute("select queue, key from work_queue where queue = 'spec'")
        assert keys == [("spec", str(fleet.nodes[0].node_id))]
        assert await fleet.run(rewrite_if_stale, fleet.tools, fleet.nodes[0].node_id)
        assert len((await fleet.spec(fleet.nodes[0])).assignments) == 2
        for reservation_id in ids:
            await fleet.bound(await fleet.load(reservation_id))
        assert await states(fleet, ids) == ["active", "active"]
        fleet.assert_sound()


async def test_a_gang_is_placed_whole_or_not_at_all(dsn: Dsn) -> None:
    """Two gangs of three nodes on four: one has them, the other holds nothing."""
    async with open_fleet(dsn, nodes=4) as fleet:
        ids = [await queue(fleet, 8, nodes=3), await queue(fleet, 8, nodes=3), await queue(fleet, 8)]
        assert (await place(fleet)).placed == 2
        assert await states(fleet, ids) == ["binding", "queued", "binding"]
        assert fleet.execute("select count(*) from booking") == [(4,)]
        fleet.assert_sound()


async def test_a_stale_index_costs_a_plan_and_never_a_double_booking(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        other = elsewhere(fleet)
        first = await queue(fleet, 1)
        await fleet.run(place_batch, other, fleet.pool_id, ids=[first])
        # here the index is loaded; what the other process books next is not in it
        ids = [await queue(fleet, 8), await queue(fleet, 7), await queue(fleet, 8, nodes=2)]
        await fleet.run(fleet.tools.indexes.nodes, fleet.pool_id, (await fleet.load(first)).created_at)
        await fleet.run(place_batch, other, fleet.pool_id, ids=ids[:1])
        await place(fleet)
        assert await states(fleet, ids) == ["binding", "binding", "queued"]
        fleet.assert_sound()


async def test_a_part_that_was_taken_meanwhile_costs_its_reservation_alone(dsn: Dsn, monkeypatch: Any) -> None:
    """The index is made to miss a booking; the constraint does not."""
    async with open_fleet(dsn, nodes=2) as fleet:
        blind = PoolIndexes()
        tools = LedgerTools(fleet.tools.signer, fleet.tools.ids, blind)
        await fleet.run(blind.nodes, fleet.pool_id, (await fleet.load(await fleet.draft(1))).created_at)
        monkeypatch.setattr(blind, "_read_changes", lambda *_: False)
        set_quota(fleet, 1, 64)
        assert (await fleet.reserve(1)).state == "binding"
        gang, single = await queue(fleet, 8, nodes=2), await queue(fleet, 4)
        lost = await fleet.run(place_batch, tools, fleet.pool_id, ids=[gang, single])
        assert (lost.placed, lost.lost) == (0, 1)
        assert used(fleet) == {1: 1}
        # of the gang nothing stays on the node that it could have had
        assert fleet.execute("select count(*) from booking where reservation_id = %s", gang) == [(0,)]
        assert fleet.execute("select count(*) from allocation where reservation_id = %s", gang) == [(0,)]
        fleet.assert_sound()
        # its nodes have been read again, so the next batch knows better
        blind.end_pass(fleet.pool_id)
        assert (await fleet.run(place_batch, tools, fleet.pool_id, ids=[single, gang])).placed == 1
        assert await states(fleet, [gang, single]) == ["queued", "binding"]
        assert used(fleet) == {1: 5}
        fleet.assert_sound()


async def test_a_node_that_was_cordoned_meanwhile_is_not_placed_on(dsn: Dsn, monkeypatch: Any) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        reservation_id = await queue(fleet, 1)
        await fleet.run(fleet.tools.indexes.nodes, fleet.pool_id, (await fleet.load(reservation_id)).created_at)
        with monkeypatch.context() as patch:
            patch.setattr(fleet.tools.indexes, "_read_changes", lambda *_: False)
            fleet.execute("update node set cordoned = true")
            made = await place(fleet)
        assert (made.placed, made.lost) == (0, 1)
        assert (await place(fleet)).lost == 0
        assert (await fleet.load(reservation_id)).pending_reason == "no node of this pool is schedulable: 1 cordoned"


@pytest.mark.parametrize("placer", ["inline", "batch"])
async def test_a_gpu_that_has_failed_meanwhile_is_not_sold(dsn: Dsn, monkeypatch: Any, placer: str) -> None:
    """The index has not heard of it: the node is placeable as before, and the generation alone has changed."""
    async with open_fleet(dsn, nodes=1) as fleet:
        indexes = fleet.tools.indexes
        reservation_id = await (fleet.draft(1) if placer == "inline" else queue(fleet, 1))
        await fleet.run(indexes.nodes, fleet.pool_id, (await fleet.load(reservation_id)).created_at)
        monkeypatch.setattr(indexes, "_read_changes", lambda *_: False)
        fleet.execute("update device set health = 'unhealthy' where slot = 0")
        if placer == "inline":
            await fleet.try_place(reservation_id)
        else:
            made = await place(fleet)
            assert (made.placed, made.lost) == (0, 1)
            # the node was read anew for that
            assert (await place(fleet)).placed == 1
        (hold,) = await fleet.holds(await fleet.load(reservation_id))
        assert hold.device_uuids == [fleet.nodes[0].uuids[1]]
        fleet.assert_sound()


@pytest.mark.parametrize("placer", ["inline", "batch"])
@pytest.mark.parametrize("changed", ["links", "labels", "MIG mode"])
async def test_a_node_that_changed_meanwhile_is_planned_on_anew(
    dsn: Dsn, monkeypatch: Any, changed: str, placer: str
) -> None:
    """Of that neither the constraints nor the counters know: the node's generation tells alone."""
    asked: dict[str, Any] = {
        "links": {"gpus": 8, "topology": "nvlink-all"},
        "labels": {"gpus": 1, "selector": ["zone=a"]},
        "MIG mode": {"gpus": 8},
    }[changed]
    async with open_fleet(dsn, nodes=1) as fleet:
        fleet.execute('update node set labels = \'{"zone": "a"}\'')
        reservation_id = await (fleet.draft(**asked) if placer == "inline" else queue(fleet, **asked))
        await fleet.run(fleet.tools.indexes.nodes, fleet.pool_id, (await fleet.load(reservation_id)).created_at)
        monkeypatch.setattr(fleet.tools.indexes, "_read_changes", lambda *_: False)
        match changed:
            case "links":
                fleet.execute("update device set nvlink_group = slot / 4")
            case "labels":
                fleet.execute("update node set labels = '{}'")
            case _:
                fleet.execute("update device set mig = true where slot = 0")
        if placer == "inline":
            assert isinstance(await fleet.try_place(reservation_id), NoPlan)
        else:
            made = await place(fleet)
            assert (made.placed, made.lost) == (0, 1)
            made = await place(fleet)
            assert (made.placed, made.lost) == (0, 0), "the node was read anew for that"
        assert fleet.execute("select count(*) from booking") == [(0,)]


@pytest.mark.parametrize("placer", ["inline", "pool-lease"])
async def test_how_long_nodes_are_locked_is_told_by_placer(dsn: Dsn, monkeypatch: Any, placer: str) -> None:
    """Each time that they are: also by an attempt that finds them changed, and not by one that plans nothing."""
    told: list[tuple[str, float]] = []
    async with open_fleet(dsn, nodes=1) as fleet:
        fleet.tools = replace(fleet.tools, locks_held=lambda *held: told.append(held))
        indexes = fleet.tools.indexes

        async def make(gpus: int) -> int:
            if placer == "inline":
                reservation_id = await fleet.draft(gpus)
                await fleet.try_place(reservation_id)
            else:
                reservation_id = await queue(fleet, gpus)
                await place(fleet)
            return reservation_id

        assert await states(fleet, [await make(4)]) == ["binding"]
        assert len(told) == 1
        await make(8)
        assert len(told) == 1, "there is no room, so nothing was locked"
        monkeypatch.setattr(indexes, "_read_changes", lambda *_: False)
        fleet.execute("update device set health = 'unhealthy' where slot = 7")
        await make(1)
        assert len(told) > 1
        assert {name for name, _ in told} == {placer}
        assert all(seconds > 0 for _, seconds in told)


async def test_vcpus_that_were_taken_meanwhile_are_planned_again_in_a_new_transaction(
    dsn: Dsn, monkeypatch: Any
) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        ids = [await queue(fleet, 0, vcpus=40), await queue(fleet, 0, vcpus=40)]
        await fleet.run(fleet.tools.indexes.nodes, fleet.pool_id, (await fleet.load(ids[0])).created_at)
        monkeypatch.setattr(fleet.tools.indexes, "_read_changes", lambda *_: False)
        await fleet.run(place_batch, elsewhere(fleet), fleet.pool_id, ids=ids[:1])
        await place(fleet)
        assert await states(fleet, ids) == ["binding", "binding"]
        fleet.assert_sound()


async def test_only_the_holder_of_the_pools_lease_places(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        reservation_id = await queue(fleet, 1)
        epoch = await fleet.run(leases.acquire, "placer:1", "one", 60)
        assert epoch is not None
        fleet.advance(61)
        assert await fleet.run(leases.acquire, "placer:1", "two", 60) is not None
        with pytest.raises(StaleEpoch):
            await fleet.run(place_batch, fleet.tools, 1, ids=[1], fence=Fence("placer:1", "one", epoch))
        assert await states(fleet, [reservation_id]) == ["queued"]
        reconciler = placement_reconciler(fleet.db, fleet.tools, worker_id="three", max_batch=10)
        await reconciler.reconcile("1")
        assert await states(fleet, [reservation_id]) == ["queued"]
        fleet.advance(61)
        await reconciler.reconcile("1")
        assert await states(fleet, [reservation_id]) == ["binding"]


@pytest.mark.parametrize("max_batch", [1, 3, 100])
async def test_a_pass_goes_through_the_whole_queue(dsn: Dsn, max_batch: int) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        ids = [await queue(fleet, gpus) for gpus in (16, 8, 9, 4, 4, 1)]
        reconciler = placement_reconciler(fleet.db, fleet.tools, worker_id="one", max_batch=max_batch)
        await reconciler.reconcile(str(fleet.pool_id))
        assert await states(fleet, ids) == ["queued", "binding", "queued", "binding", "binding", "queued"]
        fleet.assert_sound()


async def test_a_batch_is_planned_while_the_one_before_it_is_written(dsn: Dsn, monkeypatch: Any) -> None:
    """The first batch waits in the middle of its transaction until the second has its plans: on the same node."""
    async with open_fleet(dsn, nodes=2) as fleet:
        ids = [await queue(fleet, 4) for _ in range(4)]
        second_planned = threading.Event()
        commit_all, begun = batch.commit_all, list[int]()

        def commit_slowly(
            tx: Tx, tools: LedgerTools, pool_id: int, planned: Sequence[Commitment], *args: Any, **named: Any
        ) -> Any:
            begun.extend(one.reservation_id for one in planned)
            if begun == ids:
                second_planned.set()
            assert second_planned.wait(30)
            return commit_all(tx, tools, pool_id, planned, *args, **named)

        monkeypatch.setattr(batch, "commit_all", commit_slowly)
        await placement_reconciler(fleet.db, fleet.tools, worker_id="one", max_batch=2).reconcile("1")
        assert await states(fleet, ids) == ["binding"] * 4
        assert fleet.execute("select node_id, count(*) from allocation group by 1 order by 1") == [(1, 2), (2, 2)]
        fleet.assert_sound()


@pytest.mark.parametrize("failure", [LockTimeout("a lock"), StaleEpoch()])
async def test_a_batch_that_fails_ends_the_pass(dsn: Dsn, monkeypatch: Any, failure: Exception) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        ids = [await queue(fleet, 8) for _ in range(4)]
        reconciler = placement_reconciler(fleet.db, fleet.tools, worker_id="one", max_batch=1)
        with monkeypatch.context() as patch:
            commit_all = batch.commit_all

            def fail_second(
                tx: Tx, tools: LedgerTools, pool_id: int, planned: Sequence[Commitment], *args: Any, **named: Any
            ) -> Any:
                if planned[0].reservation_id == ids[1]:
                    raise failure
                return commit_all(tx, tools, pool_id, planned, *args, **named)

            patch.setattr(batch, "commit_all", fail_second)
            if isinstance(failure, LockTimeout):
                with pytest.raises(LockTimeout):
                    await reconciler.reconcile("1")
            else:
                assert await reconciler.reconcile("1") == Again(HELD_S)
        left = await states(fleet, ids)
        assert left[1] == "queued"
        assert left[3] == "queued"
        await reconciler.reconcile("1")
        assert await states(fleet, ids) == ["binding"] * 4
        fleet.assert_sound()


async def test_what_is_being_cancelled_is_passed_by(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        ids = [await queue(fleet, 1), await queue(fleet, 1)]

        with psycopg.connect(fleet.owner_dsn) as other:
            other.execute("select from reservation where reservation_id = %s for update", (ids[0],))
            made = await place(fleet)
        assert (made.claimed, made.placed) == (1, 1)
        assert await states(fleet, ids) == ["queued", "binding"]
