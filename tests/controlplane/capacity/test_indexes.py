"""The indexes of a process: kept up with the ledger, ahead of it by what is being placed, never in its stead."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from controlplane.capacity.batch import place_batch
from controlplane.capacity.indexes import FORGET_AFTER, PoolIndexes
from controlplane.capacity.place import Placed, place
from controlplane.db import reservations, views
from controlplane.db.placements import load_changes
from controlplane.db.time import load_now
from controlplane.db.tx import run_transaction
from controlplane.db.views import load_node_views
from controlplane.model.planner import NoPlan, Plan
from tests.support.fleets import make_request
from tests.support.ledgers import LedgerFleet, open_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from tests.support.postgres import Dsn


class Undone(Exception):
    pass


async def same_as_rows(fleet: LedgerFleet, indexes: PoolIndexes) -> None:
    """The index has what a fresh read has, whatever the order of bookings."""

    def compare(tx: Tx) -> None:
        fresh = {view.node_id: _sorted(view) for view in load_node_views(tx, fleet.pool_id)}
        known = {view.node_id: _sorted(view) for view in indexes.nodes(tx, fleet.pool_id, load_now(tx))}
        assert known == fresh

    await fleet.run(compare)


def _sorted(view: NodeView) -> NodeView:
    return replace(
        view, booked=tuple(sorted(view.booked)), scalars_booked=tuple(sorted(view.scalars_booked)), placement_gen=0
    )


CHANGES = {
    "a cordon": "update node set cordoned = true where node_id = 1",
    "a device that fails": "update device set health = 'unhealthy' where node_id = 1 and slot = 3",
    "a device that is gone": "update device set retired_at = compute_now() where node_id = 1 and slot = 3",
    "less memory": "update node_capacity set memory_mib_total = 5 where node_id = 1",
    "another pool": "update node set pool_id = 2 where node_id = 1",
    "a booking": """
        insert into booking (pool_id, node_id, purpose, spans, during)
        values (1, 1, 'maintenance', '{[0,)}', '[2031-01-01,2031-01-02)')
    """,
    "a booking that moves": "update booking set during = '[2030-01-01,2030-06-01)' where reservation_id = 1",
    "a booking that ends": "delete from booking where reservation_id = 1",
    "the end of a node": "update node set provision_state = 'decommissioned' where node_id = 1",
}


@pytest.mark.parametrize("sql", CHANGES.values(), ids=CHANGES)
async def test_what_anybody_changes_is_seen(dsn: Dsn, sql: str) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute(
            """
            insert into pool (public_id, site_id, slug, name, kind, gpu_model)
            values ('pool_other', 1, 'other', 'Other', 'gpu', 'H100')
            """
        )
        await fleet.reserve(4)
        indexes = PoolIndexes()
        await same_as_rows(fleet, indexes)
        fleet.execute(sql)
        await same_as_rows(fleet, indexes)


async def test_a_whole_life_is_followed(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        indexes = PoolIndexes()
        await same_as_rows(fleet, indexes)
        now, later = await fleet.reserve(3, vcpus=5), await fleet.reserve(8, start_s=7200)
        await same_as_rows(fleet, indexes)
        await fleet.bound(now)
        await same_as_rows(fleet, indexes)
        await fleet.release(now)
        await same_as_rows(fleet, indexes)
        await fleet.released(now)
        fleet.advance(7200)
        await fleet.step(later)
        await same_as_rows(fleet, indexes)


async def test_what_this_process_places_is_in_its_index_without_being_read(
    dsn: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        indexes = fleet.tools.indexes
        await same_as_rows(fleet, indexes)
        reads: list[int] = []

        def load_and_count(tx: Tx, pool_id: int, *args: Any, **kwargs: Any) -> list[NodeView]:
            reads.append(pool_id)
            return load_node_views(tx, pool_id, *args, **kwargs)

        monkeypatch.setattr("controlplane.capacity.indexes.load_node_views", load_and_count)
        await fleet.reserve(3, vcpus=5)
        await fleet.reserve(8, start_s=7200)
        fleet.advance(1)
        gone = await fleet.reserve(2)
        await same_as_rows(fleet, indexes)
        assert reads == []
        await fleet.bound(gone)
        await fleet.release(gone)
        await fleet.released(gone)
        await same_as_rows(fleet, indexes)
        assert reads == [fleet.pool_id]


async def test_devices_are_read_again_only_where_they_may_have_changed(
    dsn: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        indexes = PoolIndexes()
        await same_as_rows(fleet, indexes)
        asked: list[Sequence[int]] = []
        load = views._load_devices

        def load_and_note(tx: Tx, of: Any) -> Any:
            if "nodes" in of.params:
                asked.append([int(node_id) for node_id in of.params["nodes"].split(";")])
            return load(tx, of)

        monkeypatch.setattr(views, "_load_devices", load_and_note)
        fleet.execute("update node_capacity set memory_mib_total = 5 where node_id = 1")
        await fleet.reserve(4)
        await same_as_rows(fleet, indexes)
        assert asked == []
        fleet.execute("update node_capacity set memory_mib_total = 6")
        fleet.execute("update device set health = 'unhealthy' where node_id = 2 and slot = 3")
        await same_as_rows(fleet, indexes)
        assert asked == [[2]]
        asked.clear()
        indexes.doubt(fleet.pool_id, [3])
        fleet.execute("update node_capacity set memory_mib_total = 7 where node_id = 1")
        await same_as_rows(fleet, indexes)
        assert asked == [[3]]


async def test_devices_that_a_transaction_changed_and_took_back_are_read_again(dsn: Dsn) -> None:
    """The next change of the node has the same generation."""
    async with open_fleet(dsn, nodes=1) as fleet:
        indexes = PoolIndexes()
        await same_as_rows(fleet, indexes)
        fleet.execute("grant update on device, node to bc_worker")

        def change_and_look(tx: Tx) -> None:
            tx.execute("update device set health = 'unhealthy' where slot = 3")
            (node,) = indexes.nodes(tx, fleet.pool_id, load_now(tx))
            assert node.healthy == 0b11110111
            raise Undone

        with pytest.raises(Undone):
            await fleet.run(change_and_look)
        fleet.execute("update device set health = 'unhealthy' where slot = 5")
        await same_as_rows(fleet, indexes)


async def test_a_node_that_joins_and_an_index_that_slept(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        indexes = PoolIndexes()
        await same_as_rows(fleet, indexes)
        fleet.add_node()
        await same_as_rows(fleet, indexes)
        fleet.advance(FORGET_AFTER.total_seconds() + 1)
        fleet.execute("delete from placement_change")
        fleet.add_node()
        fleet.execute("delete from placement_change")
        await same_as_rows(fleet, indexes)


async def test_what_a_transaction_is_placing_is_not_given_to_another(dsn: Dsn) -> None:
    """Also when its nodes are read again meanwhile, as they stand without it."""
    async with open_fleet(dsn, nodes=1) as fleet:
        indexes = fleet.tools.indexes

        def plan(tx: Tx) -> Plan | NoPlan:
            return indexes.plan(tx, fleet.pool_id, make_request(4), load_now(tx))

        def both(tx: Tx) -> None:
            first = plan(tx)
            indexes.doubt(fleet.pool_id, [1])
            second, third = plan(tx), plan(tx)
            assert isinstance(first, Plan)
            assert isinstance(second, Plan)
            assert not set(first.parts[0].slots) & set(second.parts[0].slots)
            assert isinstance(third, NoPlan)
            raise Undone

        with pytest.raises(Undone):
            await fleet.run(both)
        # nothing was committed
        await same_as_rows(fleet, indexes)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_node_that_is_read_around_a_commit_counts_its_plan_once(dsn: Dsn, when: str) -> None:
    """Its vCPUs and memory were counted as planned and as written, and were short until something else changed."""
    async with open_fleet(dsn, nodes=1) as fleet:
        indexes = fleet.tools.indexes
        await same_as_rows(fleet, indexes)
        reservation_id = await fleet.draft(1, vcpus=40, memory_mib=1000)

        def read_again() -> None:
            """Another thread's placement, on a connection of its own."""
            indexes.doubt(fleet.pool_id, [1])
            with psycopg.connect(dsn.worker, autocommit=True) as conn:
                run_transaction(
                    conn,
                    lambda tx: indexes.nodes(tx, fleet.pool_id, load_now(tx)),
                    check=lambda: None,
                    rng=Random(0),
                    on_retry=lambda: None,
                )

        def admit(tx: Tx) -> None:
            if when == "after":
                # the database has it, and the index has not heard yet
                tx.on_end(lambda _: read_again())
            row = reservations.lock_reservation(tx, reservation_id)
            assert row is not None
            assert isinstance(place(tx, fleet.tools, row, load_now(tx)), Placed)
            if when == "before":
                read_again()

        await fleet.run(admit)
        await same_as_rows(fleet, indexes)


async def test_a_transaction_that_may_still_change_a_node_is_looked_at_again(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        indexes = PoolIndexes()

        def change_twice(tx: Tx) -> None:
            indexes.nodes(tx, fleet.pool_id, load_now(tx))
            tx.execute("update node set cordoned = true")
            indexes.nodes(tx, fleet.pool_id, load_now(tx))
            tx.execute("update node set cordoned = false")

        fleet.execute("grant update on node to bc_worker")
        await fleet.run(change_twice)
        await same_as_rows(fleet, indexes)


async def test_changes_are_kept_by_transaction(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        begin = (await fleet.run(load_changes, fleet.pool_id, None)).position
        await fleet.reserve(1)
        changes = await fleet.run(load_changes, fleet.pool_id, begin)
        assert {node_id for _, node_id in changes.nodes} == {1}
        assert (await fleet.run(load_changes, fleet.pool_id, changes.position)).nodes == frozenset()


async def test_a_position_is_a_change_that_is_on_disk(dsn: Dsn) -> None:
    """After a crash, transactions get the numbers of those of which nothing had been written yet."""
    async with open_fleet(dsn, nodes=1) as fleet:
        begin = (await fleet.run(load_changes, fleet.pool_id, None)).position
        (numbers,) = [fleet.execute("select pg_current_xact_id()::text::int8") for _ in range(3)][-1]
        assert (await fleet.run(load_changes, fleet.pool_id, begin)).position == begin < numbers[0]
        await fleet.reserve(1)
        changes = await fleet.run(load_changes, fleet.pool_id, begin)
        assert changes.position == max(xid for xid, _ in changes.nodes)
        assert (await fleet.run(load_changes, fleet.pool_id, None)).position == changes.position


async def test_what_a_transaction_noted_as_its_own_is_forgotten_if_it_did_not_happen(dsn: Dsn) -> None:
    """Its number may be another's after a crash."""
    async with open_fleet(dsn, nodes=1) as fleet:
        indexes = PoolIndexes()
        await same_as_rows(fleet, indexes)

        def note(tx: Tx, xid: int) -> None:
            indexes.note_own(tx, fleet.pool_id, xid, [1])
            raise Undone

        (now,) = fleet.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::int8")[0]
        for xid in range(now, now + 100):
            with pytest.raises(Undone):
                await fleet.run(note, xid)
        await fleet.reserve(8)
        await same_as_rows(fleet, indexes)


async def test_a_pool_that_is_far_behind_is_caught_up_at_its_next_placement(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        indexes = PoolIndexes()
        await same_as_rows(fleet, indexes)
        await fleet.reserve(8)
        fleet.advance(timedelta(seconds=1).total_seconds())

        def plan(tx: Tx) -> Plan | NoPlan:
            return indexes.plan(tx, fleet.pool_id, make_request(8), load_now(tx))

        made = await fleet.run(plan)
        assert isinstance(made, Plan)
        assert made.parts[0].node_id == 2


def put_wrong(indexes: PoolIndexes, pool_id: int, node: NodeView) -> None:
    index = indexes._pool(pool_id).index
    assert index is not None
    index.put(node)


WRONG = {
    "a GPU that is not healthy": "update device set health = 'unhealthy' where slot = 0",
    "a GPU that is not there": "update device set retired_at = compute_now() where slot = 0",
}


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("sql", WRONG.values(), ids=WRONG)
async def test_an_index_that_is_wrong_sells_nothing_that_is_not_there(
    dsn: Dsn, monkeypatch: Any, sql: str, *, later: bool
) -> None:
    """It has the node's generation right, so nothing but the GPUs themselves can tell."""
    async with open_fleet(dsn, nodes=1) as fleet:
        fleet.execute(sql)
        indexes = fleet.tools.indexes
        asked: dict[str, Any] = {"start_s": 7200} if later else {}
        reservation_id = await fleet.draft(1, **asked)

        def corrupt(tx: Tx) -> None:
            (node,) = indexes.nodes(tx, fleet.pool_id, load_now(tx))
            put_wrong(indexes, fleet.pool_id, replace(node, present=0b11111111, healthy=0b11111111))

        await fleet.run(corrupt)
        monkeypatch.setattr(indexes, "_read_changes", lambda *_: False)
        await fleet.try_place(reservation_id)
        assert fleet.execute("select spans::text from booking") == [("{[48,96)}",)]
        fleet.assert_sound()


async def test_a_batch_from_an_index_that_is_wrong_loses_what_is_not_there_alone(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("update device set health = 'unhealthy' where node_id = 1")
        indexes = fleet.tools.indexes
        ids = [await fleet.draft(8), await fleet.draft(8)]
        for reservation_id in ids:
            await fleet.run(reservations.mark_queued, reservation_id, "draft", reason="")

        def corrupt(tx: Tx) -> None:
            for node in indexes.nodes(tx, fleet.pool_id, load_now(tx)):
                put_wrong(indexes, fleet.pool_id, replace(node, healthy=0b11111111))

        await fleet.run(corrupt)
        made = await fleet.run(place_batch, fleet.tools, fleet.pool_id, ids=ids)
        assert (made.placed, made.lost) == (1, 1)
        assert fleet.execute("select node_id from booking") == [(2,)]
        fleet.assert_sound()
