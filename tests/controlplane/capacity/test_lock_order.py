"""Whatever books or releases takes quotas before nodes, and nodes by their ids, so that two never wait for one another.

Somebody else holds the row that comes first. The step under test comes as far as that and waits; it may not have
locked a later one by then, or the one it waits for could be waiting for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controlplane.capacity.batch import place_batch
from controlplane.capacity.place import place
from controlplane.db import reservations
from controlplane.db.time import load_now
from controlplane.fleet import retire
from tests.support.ledgers import open_fleet
from tests.support.referee import assert_sound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controlplane.db.tx import Tx
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn


def _place(tx: Tx, fleet: LedgerFleet, reservation_id: int) -> object:
    reservation = reservations.lock_reservation(tx, reservation_id)
    assert reservation is not None
    return place(tx, fleet.tools, reservation, load_now(tx))


def _force(tx: Tx, fleet: LedgerFleet, reservation_id: int, node_id: int) -> object:
    reservation = reservations.lock_reservation(tx, reservation_id)
    assert reservation is not None
    return retire.force_release(
        tx, fleet.tools, reservation, node_id, principal="usr_test", reason="burnt", now=load_now(tx)
    )


def _clear(tx: Tx, fleet: LedgerFleet, node_id: int) -> object:
    return retire.clear_node(tx, fleet.tools, node_id, principal="usr_test", reason="burnt", now=load_now(tx))


async def _prepare(fleet: LedgerFleet, what: str) -> Callable[[], Awaitable[object]]:
    """Bring the fleet to where the step is due; returns the step."""
    if what == "place":
        draft = await fleet.draft(4)
        return lambda: fleet.run(_place, fleet, draft)
    first, second = await fleet.reserve(4), await fleet.reserve(4)
    if what == "place a queued one":
        queued = await fleet.reserve(4)
        for reservation in (first, second):
            await fleet.release(reservation)
            await fleet.released(reservation)
        assert queued.state == "queued"
        return lambda: fleet.run(place_batch, fleet.tools, fleet.pool_id, ids=[queued.reservation_id])
    node_id = fleet.nodes[0].node_id
    if what == "take the last release":
        await fleet.release(first)
        return lambda: fleet.released(first)
    if what == "force a release":
        return lambda: fleet.run(_force, fleet, first.reservation_id, node_id)
    return lambda: fleet.run(_clear, fleet, node_id)


async def _wait_blocked(dsn: Dsn) -> None:
    with psycopg.connect(dsn.admin, autocommit=True) as conn, trio.fail_after(10):
        await trio.lowlevel.checkpoint()
        while not conn.execute(  # noqa: ASYNC110 - it is in another process
            """
            select 1 from pg_stat_activity
            where datname = current_database() and usename = 'bc_worker' and wait_event_type = 'Lock'
            """
        ).fetchone():
            await trio.sleep(0.005)  # sleeps: until another session is seen waiting


@pytest.mark.parametrize(
    "what", ["place", "place a queued one", "take the last release", "force a release", "clear a node"]
)
async def test_quotas_come_before_nodes(dsn: Dsn, what: str) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 64)")
        step: Callable[[], Awaitable[Any]] = await _prepare(fleet, what)
        with psycopg.connect(dsn.admin) as other:
            other.execute("select 1 from quota for update")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(step)
                await _wait_blocked(dsn)
                # raises LockNotAvailable if the step has it
                other.execute("select 1 from node for update nowait")
                other.rollback()
        assert_sound(dsn.admin)


async def _prepare_both(fleet: LedgerFleet, what: str) -> Callable[[], Awaitable[object]]:
    """As `_prepare`, for a step that takes both nodes; the plans of a batch name the second one first."""
    if what == "place":
        draft = await fleet.draft(4, nodes=2)
        return lambda: fleet.run(_place, fleet, draft)
    if what == "place queued ones":
        turns = [(await fleet.draft(4, selector=[f"place={place}"])) for place in ("second", "first")]
        for reservation_id in turns:
            assert await fleet.run(reservations.mark_queued, reservation_id, "draft", reason="")
        return lambda: fleet.run(place_batch, fleet.tools, fleet.pool_id, ids=turns)
    gang = await fleet.reserve(4, nodes=2)
    return lambda: fleet.release(gang)


@pytest.mark.parametrize("what", ["place", "place queued ones", "release"])
async def test_nodes_are_locked_and_their_rows_written_in_the_order_of_their_ids(dsn: Dsn, what: str) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        # the row of the first one is behind that of the second: a scan finds them the other way round
        for node_id, place in ((2, "second"), (1, "first")):
            fleet.execute(
                "update node set labels = jsonb_build_object('place', %s::text) where node_id = %s", place, node_id
            )
        step = await _prepare_both(fleet, what)
        with psycopg.connect(dsn.admin) as other:
            other.execute("select 1 from node where node_id = 1 for update")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(step)
                await _wait_blocked(dsn)
                # raises LockNotAvailable if the step has it
                other.execute("select 1 from node where node_id = 2 for update nowait")
                other.rollback()
        for rows in ("booking", "allocation") if what != "release" else ():
            assert fleet.execute(f"select node_id from {rows} order by {rows}_id") == [(1,), (2,)]
        assert_sound(dsn.admin)
