"""Silence makes a node unreachable and nothing else; it is judged only by who has been listening."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db import leases
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.fleet.lifecycle import step
from controlplane.reconcilers.liveness import (
    GAP_S,
    WATCHED_BEFORE_S,
    Watch,
    judge_silence,
    wake_back_in_touch,
)
from shared.wire import SESSION_LEASE_S
from tests.support.ledgers import open_fleet as open_ledger_fleet
from tests.support.machines import make_machine, open_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.ledgers import LedgerFleet
    from tests.support.machines import Fleet
    from tests.support.postgres import Dsn


SETTLED = WATCHED_BEFORE_S


async def take_lease(fleet: Fleet | LedgerFleet) -> Fence:
    epoch = await fleet.run(leases.acquire, "singleton:liveness", "wrk_1", 3600.0)
    assert epoch is not None
    return Fence("singleton:liveness", "wrk_1", epoch)


def events(fleet: Fleet | LedgerFleet) -> list[str]:
    return [kind for (kind,) in fleet.execute("select kind from outbox where kind like 'node.%%' order by xid, seq")]


async def test_a_node_is_unreachable_when_its_lease_has_run_out(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fence = await take_lease(fleet)
        # joined and never seen: not unreachable, whatever the time
        fleet.advance(3600)
        assert await fleet.run(judge_silence, await take_lease(fleet), SETTLED) == 0
        fleet.hello(machine)
        await fleet.run(step, fleet.tools, machine.node_id)
        fleet.advance(SESSION_LEASE_S - 1)
        fence = await take_lease(fleet)
        assert await fleet.run(judge_silence, fence, SETTLED) == 0
        fleet.beat(machine)
        # the gateway has closed the session; the lease runs on from the last sign of life
        fleet.execute("update node_session set open = false, closed_at = compute_now()")
        fleet.advance(SESSION_LEASE_S - 1)
        assert await fleet.run(judge_silence, fence, SETTLED) == 0
        fleet.advance(1)
        assert await fleet.run(judge_silence, fence, SETTLED) == 1
        assert await fleet.run(judge_silence, fence, SETTLED) == 0
        assert fleet.execute("select connectivity, provision_state from node") == [("unreachable", "adopting")]
        assert events(fleet) == ["node.joined", "node.connected", "node.unreachable"]


async def test_liveness_of_an_earlier_session_says_nothing(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fleet.hello(machine)
        await fleet.run(step, fleet.tools, machine.node_id)
        fleet.advance(SESSION_LEASE_S + 1)
        # late, for an epoch that is over
        fleet.execute("update node_liveness set epoch = 0, last_seen_at = compute_now()")
        assert await fleet.run(judge_silence, await take_lease(fleet), SETTLED) == 1


async def test_back_again_without_a_wake_up(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fleet.hello(machine)
        assert await fleet.run(wake_back_in_touch) == 1
        assert fleet.execute("select queue, key from work_queue") == [("node", str(machine.node_id))]
        await fleet.run(step, fleet.tools, machine.node_id)
        assert await fleet.run(wake_back_in_touch) == 0
        assert fleet.execute("select connectivity from node") == [("connected",)]


async def test_unreachable_and_back_the_holder_is_the_same(dsn: Dsn) -> None:
    """Nothing is released because a cable was pulled: not the hold, not when the window is over."""
    async with open_ledger_fleet(dsn) as fleet:
        held = await fleet.reserve(8, duration_s=60)
        await fleet.bound(held)
        fleet.execute("update node_session set opened_at = compute_now()")
        fleet.advance(SESSION_LEASE_S + 1)
        assert await fleet.run(judge_silence, await take_lease(fleet), SETTLED) == 1
        assert (await fleet.load(held.reservation_id)).state == "active"
        assert fleet.execute("select connectivity, placeable from node") == [("unreachable", False)]
        # the window ends meanwhile: it lets go when the node says so
        fleet.advance(60)
        assert (await fleet.step(held)).state == "releasing"
        assert fleet.execute("select count(*) from allocation where released_at is null") == [(1,)]
        fleet.execute("update node_session set opened_at = compute_now()")
        await fleet.run(step, fleet.tools, fleet.nodes[0].node_id)
        assert fleet.execute("select connectivity, placeable from node") == [("connected", True)]
        assert (await fleet.load(held.reservation_id)).state == "releasing"
        await fleet.released(held)
        assert (await fleet.load(held.reservation_id)).state == "released"
        fleet.assert_sound()


async def test_what_was_to_start_on_a_silent_node_is_looked_at(dsn: Dsn) -> None:
    async with open_ledger_fleet(dsn) as fleet:
        placed = await fleet.reserve(4, start_s=3600)
        fleet.execute("delete from work_queue")
        fleet.execute("update node_session set opened_at = compute_now()")
        fleet.advance(SESSION_LEASE_S + 1)
        assert await fleet.run(judge_silence, await take_lease(fleet), SETTLED) == 1
        assert fleet.execute("select queue, key from work_queue") == [("reservation", str(placed.reservation_id))]


async def test_a_job_that_lost_its_lease_marks_nobody(dsn: Dsn) -> None:
    async with open_ledger_fleet(dsn) as fleet:
        fleet.execute("update node_session set opened_at = compute_now()")
        fence = await take_lease(fleet)
        fleet.advance(7200)
        with pytest.raises(StaleEpoch):
            await fleet.run(judge_silence, fence, SETTLED)
        assert fleet.execute("select connectivity from node") == [("connected",)]


async def test_a_node_that_somebody_works_on_is_left_for_the_next_time(dsn: Dsn) -> None:
    async with open_ledger_fleet(dsn, nodes=2) as fleet:
        fleet.execute("update node_session set opened_at = compute_now()")
        fleet.advance(SESSION_LEASE_S + 1)
        fence = await take_lease(fleet)
        with psycopg.connect(fleet.owner_dsn) as conn:
            conn.execute("select from node where node_id = %s for update", (fleet.nodes[0].node_id,))
            assert await fleet.run(judge_silence, fence, SETTLED) == 1
        assert await fleet.run(judge_silence, fence, SETTLED) == 1


async def test_before_the_fleet_could_dial_in_only_who_came_is_judged(dsn: Dsn) -> None:
    """A cold start: one node was connected before it and is late, the other came and fell silent again."""
    async with open_ledger_fleet(dsn, nodes=2) as fleet:
        late, came = fleet.nodes
        fleet.execute("update node_session set opened_at = compute_now()")
        fleet.advance(3600)
        watched_s = SESSION_LEASE_S + 10
        fleet.execute(
            "update node_session set opened_at = compute_now() - make_interval(secs => %s) where node_id = %s",
            watched_s,
            came.node_id,
        )
        fence = await take_lease(fleet)
        assert await fleet.run(judge_silence, fence, watched_s) == 1
        assert fleet.execute("select node_id, connectivity from node order by node_id") == [
            (late.node_id, "connected"),
            (came.node_id, "unreachable"),
        ]
        assert await fleet.run(judge_silence, fence, WATCHED_BEFORE_S) == 1


def test_a_gap_begins_the_watch_anew() -> None:
    watch = Watch()
    assert [watch.look(now) for now in (1000.0, 1005.0, 1010.0, 1010.0 + GAP_S)] == [0.0, 5.0, 10.0, 10.0 + GAP_S]
    # whoever was away while the database was, was away for everybody
    assert watch.look(1010.0 + GAP_S + GAP_S + 0.1) == 0.0
