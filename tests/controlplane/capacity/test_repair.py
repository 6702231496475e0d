"""Hardware that fails under a reservation: its holder is told, who has not begun is moved, nothing is sold on top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controlplane.capacity.end import RELEASE_PATIENCE
from controlplane.capacity.lifecycle import step
from controlplane.capacity.repair import FAULTS_TOLD, RECHECK
from controlplane.model.backing import PATIENCE
from controlplane.model.planner import NoPlan
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from tests.support.ledgers import FleetNode, LedgerFleet
    from tests.support.postgres import Dsn

PATIENCE_S = PATIENCE.total_seconds()


def break_gpus(fleet: LedgerFleet, *uuids: str, health: str = "missing", reason: str = "gone from the bus") -> None:
    fleet.execute("update device set health = %s, health_reason = %s where uuid = any(%s)", health, reason, list(uuids))


def heal_gpus(fleet: LedgerFleet) -> None:
    fleet.execute("update device set health = 'healthy', health_reason = ''")


def swap_gpu(fleet: LedgerFleet, node: FleetNode, slot: int, uuid: str) -> None:
    """Somebody put another GPU into the slot, and it has been accepted."""
    fleet.execute(
        "update device set retired_at = compute_now() where node_id = %s and slot = %s and retired_at is null",
        node.node_id,
        slot,
    )
    fleet.execute(
        """
        insert into device (public_id, node_id, slot, uuid, model, pci_bus_id, nvlink_group)
        values (%s, %s, %s, %s, 'H100', '', 0)
        """,
        f"dev_{uuid}",
        node.node_id,
        slot,
        uuid,
    )


def set_node(fleet: LedgerFleet, node: FleetNode, **columns: object) -> None:
    for name, value in columns.items():
        fleet.execute(f"update node set {name} = %s where node_id = %s", value, node.node_id)


def go_silent(fleet: LedgerFleet, node: FleetNode) -> None:
    fleet.execute(
        "update node set connectivity = 'unreachable', connectivity_at = compute_now() where node_id = %s",
        node.node_id,
    )


def told(fleet: LedgerFleet, reservation: Reservation, kind: str = "condition") -> list[dict[str, Any]]:
    rows = fleet.execute(
        "select data from outbox where kind = %s and subject = %s order by xid, seq",
        f"reservation.{kind}",
        reservation.public_id,
    )
    return [data for (data,) in rows]


def booked_on(fleet: LedgerFleet, reservation: Reservation) -> list[str]:
    rows = fleet.execute(
        "select n.name from booking b join node n using (node_id) where b.reservation_id = %s order by n.node_id",
        reservation.reservation_id,
    )
    return [name for (name,) in rows]


async def active(fleet: LedgerFleet, gpus: int, **request: Any) -> Reservation:
    reservation = await fleet.reserve(gpus, **request)
    await fleet.bound(reservation)
    reservation = await fleet.load(reservation.reservation_id)
    assert reservation.state == "active"
    return reservation


# --- what is held


@pytest.mark.parametrize("bound", [True, False])
async def test_a_lost_gpu_impairs_its_holder_and_the_other_seven_stay_bookable(dsn: Dsn, *, bound: bool) -> None:
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        held = await (active(fleet, 3) if bound else fleet.reserve(3))
        state = held.state
        break_gpus(fleet, node.uuids[1], node.uuids[7])
        held = await fleet.step(held)
        reason = f"node-0: {node.uuids[1]} is missing: gone from the bus"
        assert (held.state, held.conditions, held.impaired_reason) == (state, ["impaired"], reason)
        (event,) = told(fleet, held)
        assert (event["condition"], event["present"], event["reason"]) == ("impaired", True, reason)
        assert event["faults"] == [
            {"node": "node-0", "reason": reason.removeprefix("node-0: "), "gpu_uuids": [node.uuids[1]]}
        ]
        # said once
        await fleet.step(held)
        assert len(told(fleet, held)) == 1
        # neither what is lost nor what is held is sold
        assert isinstance(await fleet.try_place(await fleet.draft(5)), NoPlan)
        other = await fleet.reserve(4)
        assert (await fleet.holds(other))[0].device_uuids == list(node.uuids[3:7])
        fleet.assert_sound()
        heal_gpus(fleet)
        held = await fleet.step(held)
        assert (held.state, held.conditions, held.impaired_reason) == (state, [], "")
        assert told(fleet, held)[-1]["present"] is False
        fleet.assert_sound()


async def test_a_second_loss_is_told_too(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        held = await active(fleet, 8)
        break_gpus(fleet, node.uuids[1], health="unhealthy", reason="Xid 79")
        await fleet.step(held)
        break_gpus(fleet, node.uuids[2], health="suspect", reason="")
        held = await fleet.step(held)
        assert [event["reason"] for event in told(fleet, held)] == [
            f"node-0: {node.uuids[1]} is unhealthy: Xid 79",
            f"node-0: {node.uuids[1]} is unhealthy: Xid 79; node-0: {node.uuids[2]} is suspect",
        ]


async def test_a_long_list_is_cut(dsn: Dsn) -> None:
    async with open_fleet(dsn, gpus=20) as fleet:
        held = await active(fleet, 20)
        break_gpus(fleet, *fleet.nodes[0].uuids)
        held = await fleet.step(held)
        assert held.impaired_reason.endswith("; and 4 more")
        assert len(told(fleet, held)[0]["faults"]) == FAULTS_TOLD


async def test_inventory_that_shrinks_below_what_is_held_sells_nothing(dsn: Dsn) -> None:
    """peers.md 19: 8 to 6 while 8 are in use, then any update of the node."""
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        held = await active(fleet, 8)
        break_gpus(fleet, *node.uuids[6:])
        fleet.execute("update node set placement_gen = placement_gen + 1")
        for gpus in (1, 2, 6, 8):
            assert isinstance(await fleet.try_place(await fleet.draft(gpus)), NoPlan)
        held = await fleet.step(held)
        assert held.conditions == ["impaired"]
        assert all(uuid in held.impaired_reason for uuid in node.uuids[6:])
        fleet.assert_sound()


@pytest.mark.parametrize("forced", [False, True])
async def test_an_heir_is_not_sold_before_the_old_hold_is_gone(dsn: Dsn, *, forced: bool) -> None:
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        held = await active(fleet, 8)
        swap_gpu(fleet, node, 3, "GPU-heir")
        held = await fleet.step(held)
        assert held.impaired_reason == f"node-0: {node.uuids[3]} is gone, GPU-heir is in its place"
        assert isinstance(await fleet.try_place(await fleet.draft(1)), NoPlan)
        later = await fleet.reserve(8, start_s=7200)
        assert later.state == "placed"
        await fleet.release(held)
        # the plan is free, the slot is not
        assert isinstance(await fleet.try_place(await fleet.draft(1)), NoPlan)
        fleet.assert_sound()
        if forced:
            fleet.execute(
                "update allocation set state = 'released', released_at = compute_now(), release_evidence = 'forced',"
                " forced_by = 'usr_test'; update node_capacity set gpu_held = 0"
            )
        else:
            await fleet.released(held)
        one = await fleet.reserve(8, duration_s=60)
        assert (await fleet.holds(one))[0].device_uuids[3] == "GPU-heir"
        # a booking is of the slot: it is not broken by a new GPU in it
        assert (await fleet.step(later)).conditions == []


async def test_less_vcpus_than_are_held(dsn: Dsn) -> None:
    async with open_fleet(dsn, gpus=0) as fleet:
        held = await active(fleet, 0, vcpus=40)
        fleet.execute("update node_capacity set vcpu_total = 32")
        held = await fleet.step(held)
        assert held.impaired_reason == "node-0: 40 vCPUs are held and the node has 32"
        assert isinstance(await fleet.try_place(await fleet.draft(0, vcpus=1)), NoPlan)
        fleet.execute("update node_capacity set vcpu_total = 64")
        assert (await fleet.step(held)).conditions == []
        fleet.assert_sound()


async def test_quarantine_impairs_and_takes_nothing_away(dsn: Dsn) -> None:
    """peers.md 43: what is quarantined is not bookable, whatever is free on it."""
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        held = await active(fleet, 2)
        set_node(fleet, node, provision_state="quarantined", quarantine_reason="scrub failed")
        held = await fleet.step(held)
        assert (held.state, held.impaired_reason) == ("active", "node-0: the node is quarantined: scrub failed")
        assert isinstance(await fleet.try_place(await fleet.draft(1)), NoPlan)
        assert (await fleet.holds(held))[0].state == "bound"
        set_node(fleet, node, provision_state="adopting")
        set_node(fleet, node, provision_state="adopted")
        assert (await fleet.step(held)).conditions == []
        fleet.assert_sound()


async def test_cordon_and_drain_are_no_faults_of_what_runs(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        held = await active(fleet, 2)
        set_node(fleet, fleet.nodes[0], cordoned=True, draining=True)
        held = await fleet.step(held)
        assert (held.state, held.conditions) == ("active", [])


async def test_a_silent_node_impairs_after_a_while_and_keeps_its_holder(dsn: Dsn) -> None:
    """peers.md 3: a lost heartbeat changes what is said, never who holds."""
    async with open_fleet(dsn, nodes=2) as fleet:
        held = await active(fleet, 8, duration_s=86_400)
        (hold,) = await fleet.holds(held)
        node = await fleet.node_of(hold)
        go_silent(fleet, node)
        due = await fleet.run(step, fleet.tools, held.reservation_id)
        assert due == PATIENCE
        assert (await fleet.load(held.reservation_id)).conditions == []
        fleet.advance(PATIENCE_S)
        held = await fleet.step(held)
        assert "unreachable since 2030-01-01 00:00Z" in held.impaired_reason
        assert (held.state, (await fleet.holds(held))[0].state) == ("active", "bound")
        assert booked_on(fleet, held) == ["node-0"]
        set_node(fleet, node, connectivity="connected")
        held = await fleet.step(held)
        assert (held.state, held.conditions) == ("active", [])
        fleet.assert_sound()


# --- what is to begin


async def test_only_the_broken_part_of_a_gang_moves(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 24)")
        gang = await fleet.reserve(8, nodes=3, start_s=3600)
        assert booked_on(fleet, gang) == ["node-0", "node-1", "node-2"]
        break_gpus(fleet, fleet.nodes[1].uuids[5])
        due = await fleet.run(step, fleet.tools, gang.reservation_id)
        assert due is not None
        assert due.total_seconds() == 0
        gang = await fleet.load(gang.reservation_id)
        assert booked_on(fleet, gang) == ["node-0", "node-2", "node-3"]
        assert (gang.state, gang.conditions) == ("placed", [])
        (moved,) = told(fleet, gang, "moved")
        assert (moved["moved_from"], moved["moved_to"]) == (["node-1"], ["node-3"])
        assert moved["reason"] == f"node-1: {fleet.nodes[1].uuids[5]} is missing: gone from the bus"
        assert moved["nodes"] == ["node-0", "node-2", "node-3"]
        assert gang.window_start == (await fleet.load(gang.reservation_id)).window_start
        fleet.assert_sound()
        # it begins where it is now
        fleet.advance(3600)
        await fleet.step(gang)
        assert [hold.node_id for hold in await fleet.holds(gang)] == [fleet.nodes[index].node_id for index in (0, 2, 3)]
        fleet.assert_sound()


async def test_the_rest_of_a_node_takes_what_its_lost_gpu_cannot(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        later = await fleet.reserve(4, start_s=3600)
        break_gpus(fleet, node.uuids[0])
        later = await fleet.step(later)
        assert later.conditions == []
        fleet.advance(3600)
        await fleet.step(later)
        (hold,) = await fleet.holds(later)
        assert node.uuids[0] not in hold.device_uuids
        assert len(hold.device_uuids) == 4
        fleet.assert_sound()


async def test_every_dead_node_is_tried_and_one_spare_is_not_wasted(dsn: Dsn) -> None:
    """peers.md 11 and 13: a replacement is never empty, and what a gang has stays the gang's."""
    async with open_fleet(dsn, nodes=4) as fleet:
        gang = await fleet.reserve(8, nodes=3, start_s=3600)
        set_node(fleet, fleet.nodes[0], draining=True)
        set_node(fleet, fleet.nodes[1], draining=True)
        gang = await fleet.step(gang)
        # one of the two went to the only spare
        assert booked_on(fleet, gang) == ["node-1", "node-2", "node-3"]
        assert gang.impaired_reason == "node-1: the node is draining"
        due = await fleet.run(step, fleet.tools, gang.reservation_id)
        assert due == RECHECK
        assert len(told(fleet, gang, "moved")) == 1
        assert isinstance(await fleet.try_place(await fleet.draft(8, start_s=3600)), NoPlan)
        fleet.add_node()
        gang = await fleet.step(gang)
        assert booked_on(fleet, gang) == ["node-2", "node-3", "node-4"]
        assert gang.conditions == []
        fleet.assert_sound()


async def test_a_hole_in_a_gang_stays_the_gangs(dsn: Dsn) -> None:
    """peers.md 13: the node is repaired, and its slots are still the gang's."""
    async with open_fleet(dsn, nodes=2) as fleet:
        gang = await fleet.reserve(8, nodes=2, start_s=3600)
        break_gpus(fleet, *fleet.nodes[1].uuids)
        gang = await fleet.step(gang)
        assert gang.conditions == ["impaired"]
        heal_gpus(fleet)
        assert isinstance(await fleet.try_place(await fleet.draft(1, start_s=3600)), NoPlan)
        gang = await fleet.step(gang)
        assert (gang.conditions, booked_on(fleet, gang)) == ([], ["node-0", "node-1"])
        fleet.advance(3600)
        assert (await fleet.step(gang)).state == "binding"
        fleet.assert_sound()


async def test_what_is_broken_is_not_bound_and_begins_when_it_can(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        later = await fleet.reserve(8, start_s=600, duration_s=3600)
        break_gpus(fleet, node.uuids[0])
        fleet.advance(900)
        later = await fleet.step(later)
        assert (later.state, later.conditions) == ("placed", ["impaired"])
        assert await fleet.holds(later) == []
        heal_gpus(fleet)
        later = await fleet.step(later)
        assert (later.state, later.conditions) == ("binding", [])
        fleet.assert_sound()


async def test_what_stays_broken_expires_with_its_window(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 8)")
        later = await fleet.reserve(8, start_s=600, duration_s=3600)
        break_gpus(fleet, fleet.nodes[0].uuids[0])
        fleet.advance(600)
        due = await fleet.run(step, fleet.tools, later.reservation_id)
        assert due == RECHECK
        fleet.advance(3600)
        later = await fleet.step(later)
        assert later.state == "expired"
        assert "is missing" in later.end_detail
        assert fleet.execute("select gpus_used from quota") == [(0,)]
        fleet.assert_sound()


async def test_a_short_silence_moves_nobody(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        later = await fleet.reserve(8, start_s=7200)
        assert booked_on(fleet, later) == ["node-0"]
        go_silent(fleet, fleet.nodes[0])
        assert await fleet.run(step, fleet.tools, later.reservation_id) == PATIENCE
        assert booked_on(fleet, later) == ["node-0"]
        fleet.advance(PATIENCE_S)
        later = await fleet.step(later)
        assert booked_on(fleet, later) == ["node-1"]


async def test_silence_at_the_start_moves_at_once(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        later = await fleet.reserve(8, start_s=60)
        fleet.advance(60)
        go_silent(fleet, fleet.nodes[0])
        later = await fleet.step(later)
        assert booked_on(fleet, later) == ["node-1"]
        assert (await fleet.step(later)).state == "binding"
        fleet.assert_sound()


async def test_less_vcpus_than_are_booked_moves_as_many_as_must(dsn: Dsn) -> None:
    async with open_fleet(dsn, gpus=0) as fleet:
        first = await fleet.reserve(0, vcpus=40, start_s=3600)
        second = await fleet.reserve(0, vcpus=24, start_s=5400)
        fleet.execute("update node_capacity set vcpu_total = 48")
        first = await fleet.step(first)
        assert first.impaired_reason == "node-0: 64 vCPUs are booked and the node has 48"
        fleet.add_node(gpus=0)
        second = await fleet.step(second)
        assert booked_on(fleet, second) == ["node-1"]
        first = await fleet.step(first)
        assert (first.conditions, booked_on(fleet, first)) == ([], ["node-0"])
        fleet.assert_sound()


async def test_only_the_part_in_whose_way_a_hold_is_moves(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        first = await active(fleet, 8, duration_s=3600)
        gang = await fleet.reserve(8, nodes=2, start_s=3600)
        assert booked_on(fleet, gang) == ["node-0", "node-1"]
        fleet.advance(3600)
        await fleet.step(first)
        gang = await fleet.step(gang)
        assert gang.conditions == ["waiting_for_release"]
        fleet.add_node()
        # letting go in the usual time is no reason to go elsewhere
        assert booked_on(fleet, await fleet.step(gang)) == ["node-0", "node-1"]
        fleet.advance(RELEASE_PATIENCE.total_seconds())
        gang = await fleet.step(gang)
        assert booked_on(fleet, gang) == ["node-1", "node-2"]
        (moved,) = told(fleet, gang, "moved")
        assert moved["reason"] == "a hold that should have ended was in the way"
        gang = await fleet.step(gang)
        assert (gang.state, gang.conditions) == ("binding", [])
        fleet.assert_sound()
