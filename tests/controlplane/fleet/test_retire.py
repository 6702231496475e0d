"""A node that leaves: whom it concerns, in which order, and what is counted afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db import nodes
from controlplane.db.time import load_now
from controlplane.fleet import retire
from controlplane.model.planner import NoPlan
from tests.controlplane.capacity.test_repair import active, booked_on, break_gpus, go_silent, set_node, told
from tests.support import referee
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from controlplane.db.tx import Tx
    from tests.support.ledgers import FleetNode, LedgerFleet
    from tests.support.postgres import Dsn


def check(fleet: LedgerFleet) -> None:
    fleet.assert_sound()
    referee.assert_sound(fleet.owner_dsn)


async def force_out(fleet: LedgerFleet, node: FleetNode) -> None:
    def run(tx: Tx) -> None:
        now = load_now(tx)
        retire.clear_node(tx, fleet.tools, node.node_id, principal="usr_op", reason="burnt", now=now)
        locked = nodes.lock_lifecycle(tx, node.node_id)
        assert locked is not None
        retire.decommission(tx, locked, reason="burnt", now=now)

    await fleet.run(run)


async def test_by_force_everything_is_counted_right(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 100)")
        dead, other, spare = fleet.nodes
        gang = await active(fleet, 4, nodes=2)
        single = await active(fleet, 4)
        assert booked_on(fleet, single) == ["node-0"]
        set_node(fleet, spare, cordoned=True)
        later = await fleet.reserve(8, nodes=2, start_s=7200)
        assert booked_on(fleet, later) == ["node-0", "node-1"]
        waiting = await fleet.reserve(8)
        assert waiting.state == "queued"
        set_node(fleet, spare, cordoned=False)
        go_silent(fleet, dead)
        fleet.execute("delete from work_queue")
        await force_out(fleet, dead)
        check(fleet)
        # who runs there ends, by a cause that is allowed and with an operator's name
        single = await fleet.load(single.reservation_id)
        assert (single.state, single.end_cause) == ("released", "node_decommissioned")
        gang = await fleet.load(gang.reservation_id)
        assert (gang.state, gang.end_cause) == ("releasing", "node_decommissioned")
        by_node = {hold.node_id: hold for hold in await fleet.holds(gang)}
        assert (by_node[dead.node_id].release_evidence, by_node[dead.node_id].forced_by) == ("forced", "usr_op")
        assert by_node[other.node_id].released_at is None
        # who was to begin there is woken, keeps its other node, and moves
        assert fleet.execute(
            "select 1 from work_queue where queue = 'reservation' and key = %s", str(later.reservation_id)
        )
        later = await fleet.step(later)
        assert (later.state, later.conditions) == ("placed", [])
        assert booked_on(fleet, later) == ["node-1", "node-2"]
        assert told(fleet, later, "moved")[0]["reason"].startswith("node-0: the node is decommissioned")
        # who waited gets what there is
        assert (await fleet.retry_queue(waiting.reservation_id)).state == "binding"
        check(fleet)
        await fleet.released(gang)
        assert (await fleet.load(gang.reservation_id)).state == "released"
        assert fleet.execute("select gpus_used from quota") == [(8 + 16,)]
        assert fleet.execute("select gpu_total, gpu_held from node_capacity where node_id = %s", dead.node_id) == [
            (0, 0)
        ]
        check(fleet)


async def test_a_drained_node_is_left_by_what_was_to_begin_and_then_goes(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        leaving = fleet.nodes[0]
        running = await active(fleet, 2)
        later = await fleet.reserve(8, start_s=7200)
        assert booked_on(fleet, later) == ["node-0"]
        set_node(fleet, leaving, draining=True)
        assert [holder.public_id for holder in await fleet.run(nodes.load_holders, leaving.node_id)] == [
            running.public_id,
            later.public_id,
        ]
        later = await fleet.step(later)
        running = await fleet.step(running)
        assert (booked_on(fleet, later), running.conditions) == (["node-1"], [])
        await fleet.release(running)
        await fleet.released(running)
        assert await fleet.run(nodes.load_holders, leaving.node_id) == []
        check(fleet)
        await force_out(fleet, leaving)
        check(fleet)


async def test_quarantine_concerns_all_three(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        running = await active(fleet, 8)
        later = await fleet.reserve(8, start_s=7200)
        await active(fleet, 8, duration_s=60)
        waiting = await fleet.reserve(8)
        assert booked_on(fleet, running) == booked_on(fleet, later) == ["node-0"]
        set_node(fleet, fleet.nodes[0], provision_state="quarantined")
        assert (await fleet.step(running)).conditions == ["impaired"]
        assert booked_on(fleet, await fleet.step(later)) == ["node-1"]
        assert (await fleet.retry_queue(waiting.reservation_id)).state == "queued"
        # what ends on it frees nothing that could be sold
        await fleet.release(running)
        await fleet.released(running)
        assert (await fleet.retry_queue(waiting.reservation_id)).state == "queued"
        assert isinstance(await fleet.try_place(await fleet.draft(1)), NoPlan)
        check(fleet)


async def test_a_gang_that_binds_on_one_node_only_is_taken_back_whole(dsn: Dsn) -> None:
    """peers.md 31: a start that fails half-way leaves nothing behind, and the second attempt finds all of it."""
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 16)")
        gang = await fleet.reserve(8, nodes=2, vcpus=16)
        first, second = await fleet.holds(gang)
        await fleet.deliver(first.node_id, "allocation_bound", await fleet.sign(first, "allocation_bound"))
        await fleet.deliver(second.node_id, "allocation_failed", await fleet.sign(second, "allocation_failed"))
        gang = await fleet.load(gang.reservation_id)
        assert (gang.state, gang.end_cause) == ("releasing", "bind_failed")
        check(fleet)
        # the node that had bound lets go last
        await fleet.deliver(second.node_id, "allocation_released", await fleet.sign(second, "allocation_released"))
        assert (await fleet.load(gang.reservation_id)).state == "releasing"
        check(fleet)
        await fleet.deliver(first.node_id, "allocation_released", await fleet.sign(first, "allocation_released"))
        gang = await fleet.load(gang.reservation_id)
        assert gang.state == "queued"
        assert fleet.execute("select gpu_held, vcpu_held from node_capacity") == [(0, 0), (0, 0)]
        assert fleet.execute("select gpus_used from quota") == [(0,)]
        assert fleet.execute("select count(*) from usage_window") == [(0,)]
        check(fleet)
        gang = await fleet.retry_queue(gang.reservation_id)
        await fleet.bound(gang)
        assert (await fleet.load(gang.reservation_id)).state == "active"
        check(fleet)


async def test_a_gang_whose_node_dies_before_it_has_signed(dsn: Dsn) -> None:
    """The others let go by their word, the dead one by an operator's; until then all is held by name."""
    async with open_fleet(dsn, nodes=3) as fleet:
        gang = await fleet.reserve(8, nodes=2)
        first, dead = await fleet.holds(gang)
        await fleet.deliver(first.node_id, "allocation_bound", await fleet.sign(first, "allocation_bound"))
        go_silent(fleet, await fleet.node_of(dead))
        fleet.advance(301)
        gang = await fleet.step(gang)
        assert (gang.state, gang.end_cause) == ("releasing", "bind_failed")
        await fleet.deliver(first.node_id, "allocation_released", await fleet.sign(first, "allocation_released"))
        assert (await fleet.load(gang.reservation_id)).state == "releasing"
        check(fleet)
        await force_out(fleet, await fleet.node_of(dead))
        gang = await fleet.retry_queue(gang.reservation_id)
        assert (gang.state, booked_on(fleet, gang)) == ("binding", ["node-0", "node-2"])
        check(fleet)


async def test_lost_devices_of_a_removed_node_are_nobodys(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        held = await active(fleet, 8)
        break_gpus(fleet, *fleet.nodes[0].uuids)
        go_silent(fleet, fleet.nodes[0])
        await force_out(fleet, fleet.nodes[0])
        assert (await fleet.load(held.reservation_id)).state == "released"
        assert fleet.execute("select count(*) from device where retired_at is null") == [(0,)]
        referee.assert_at_rest(fleet.owner_dsn)
