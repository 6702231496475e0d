"""Time slots of shared GPUs through the ledger: booked, held, counted, refused by the constraints, repaired."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db import checks, devices, views
from controlplane.model.shares import charged_gpus, parse_parts
from tests.support.ledgers import LedgerFleet, open_fleet

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from tests.support.postgres import Dsn


async def share(fleet: LedgerFleet, slot: int, time_slots: int, *, node: int = 0) -> str:
    ((device_id, uuid),) = fleet.execute(
        "select device_id, uuid from device where node_id = %s and slot = %s", fleet.nodes[node].node_id, slot
    )
    await fleet.run(devices.set_time_slots, device_id, time_slots)
    return uuid


def spans_of(fleet: LedgerFleet, reservation: Reservation) -> list[str]:
    rows = fleet.execute("select spans::text from booking where reservation_id = %s", reservation.reservation_id)
    return [row[0] for row in rows]


async def test_four_hold_a_quarter_each_and_a_fifth_waits(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        uuid = await share(fleet, 7, 4)
        holders = [await fleet.reserve(0, parts=["slot.1/4=1"]) for _ in range(4)]
        assert [spans_of(fleet, one) for one in holders] == [[f"{{[{336 + 12 * i},{348 + 12 * i})}}"] for i in range(4)]
        for one in holders:
            (hold,) = await fleet.holds(one)
            assert hold.device_uuids == [uuid]
            await fleet.bound(one)
            assert (await fleet.load(one.reservation_id)).state == "active"
        fifth = await fleet.reserve(0, parts=["slot.1/4=1"])
        assert fifth.pending_reason == "needs 1 x slot.1/4 on one node; most free on one node: 0"
        assert (await fleet.reserve(8)).state == "queued"
        assert (await fleet.reserve(7)).state == "binding"
        fleet.assert_sound()
        await fleet.release(holders[2])
        assert (await fleet.retry_queue(fifth.reservation_id)).state == "queued"
        await fleet.released(holders[2])
        placed = await fleet.retry_queue(fifth.reservation_id)
        assert (placed.state, spans_of(fleet, placed)) == ("binding", ["{[360,372)}"])
        fleet.assert_sound()


async def test_a_mix_is_on_one_node_and_is_metered_and_charged(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_test', %s, 4)", fleet.tenant_id)
        uuid = await share(fleet, 0, 2, node=1)
        mixed = await fleet.reserve(2, parts=["slot.1/2=1"], vcpus=4)
        (hold,) = await fleet.holds(mixed)
        assert hold.node_id == fleet.nodes[1].node_id
        assert len(hold.device_uuids) == 3
        assert uuid in hold.device_uuids
        assert fleet.execute("select gpus_used from quota") == [(3,)]
        for find in (checks.find_quota_drift, checks.find_held_drift, checks.find_free_drift):
            assert (await fleet.run(find)).count == 0
        fleet.assert_sound()
        await fleet.bound(mixed)
        fleet.advance(60)
        await fleet.release(await fleet.load(mixed.reservation_id))
        await fleet.released(mixed)
        assert fleet.execute("select gpus_used from quota") == [(0,)]
        meters = fleet.execute("select meter, quantity from usage_window order by meter")
        assert meters == [("gpu.h100.hours", 2), ("gpu.h100.slot.1-2.hours", 1), ("vcpu.hours", 4)]
        fleet.assert_sound()


@pytest.mark.parametrize(
    ("nodes", "gpus", "parts"),
    [(1, 0, []), (3, 2, []), (1, 0, ["slot.1/3=2"]), (3, 1, ["slot.1/3=2", "slot.1/48=1"]), (2, 0, ["slot.1/4=2"])],
)
async def test_the_database_charges_what_the_model_does(dsn: Dsn, nodes: int, gpus: int, parts: list[str]) -> None:
    with psycopg.connect(dsn.worker) as conn:
        found = conn.execute("select charged_gpus(%s::int2, %s::int2, %s::text[])", (nodes, gpus, parts)).fetchone()
    assert found == (charged_gpus(nodes, gpus, parse_parts(parts)),)


async def test_the_constraints_refuse_a_whole_gpu_beside_its_part(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await share(fleet, 0, 4)
        held = await fleet.reserve(0, parts=["slot.1/4=1"])
        assert spans_of(fleet, held) == ["{[0,12)}"]
        booking = (
            "insert into booking (reservation_id, pool_id, node_id, spans, during)"
            " values (99, 1, 1, %s, '[2030-01-01,)')"
        )
        hold = (
            "insert into allocation (public_id, reservation_id, node_id, spans, incarnation, generation)"
            " values ('alloc_x', 99, 1, %s, 1, 1)"
        )
        for sql in (booking, hold):
            for spans in ("{[0,48)}", "{[0,)}", "{[11,13)}"):
                with pytest.raises(psycopg.errors.ExclusionViolation):
                    fleet.execute(sql, spans)
            fleet.execute(sql, "{[12,24)}")


async def test_sharing_is_what_a_planner_must_have_seen(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (before,) = await fleet.run(views.load_node_views, fleet.pool_id)
        await share(fleet, 3, 4)
        await fleet.reserve(0, parts=["slot.1/4=2"])
        (after,) = await fleet.run(views.load_node_views, fleet.pool_id)
        assert after.placement_gen > before.placement_gen
        assert (after.present, after.healthy, after.gpus) == (0b11110111, 0b11110111, 7)
        assert after.shared is not None
        assert [part.slot for part in after.shared.parts] == [3] * 4
        assert after.shared.held == (1 << 168) - (1 << 144) == after.shared.booked[0].units
        await share(fleet, 3, 1, node=0)
        (again,) = await fleet.run(views.load_node_views, fleet.pool_id)
        assert (again.shared, again.gpus) == (None, 8)


async def test_free_gpus_are_counted_where_several_share_one(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await share(fleet, 0, 4)
        free = "select gpu_free from node_capacity"
        first = await fleet.reserve(0, parts=["slot.1/4=1"])
        second = await fleet.reserve(1, parts=["slot.1/4=2"])
        assert fleet.execute(free) == [(6,)]
        for one in (first, second):
            await fleet.bound(one)
            await fleet.release(await fleet.load(one.reservation_id))
            await fleet.released(one)
        assert fleet.execute(free) == [(7,)]
        fleet.assert_sound()


async def test_a_booking_of_a_part_leaves_a_gpu_that_is_not_healthy(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        for node in (0, 1):
            await share(fleet, 0, 4, node=node)
        later = await fleet.reserve(0, parts=["slot.1/4=1"], start_s=3600)
        ((booked,),) = fleet.execute("select node_id from booking")
        fleet.execute("update device set health = 'unhealthy' where node_id = %s and slot = 0", booked)
        await fleet.step(later)
        ((moved,),) = fleet.execute("select node_id from booking")
        assert moved != booked


async def test_a_gpu_that_is_replaced_is_shared_as_the_old_one_was(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await share(fleet, 2, 6)
        node_id = fleet.nodes[0].node_id
        known = await fleet.run(devices.load_known, node_id)
        new = [replace(device.facts, uuid=f"GPU-new-{device.slot}") for device in known[2:4]]
        await fleet.run(devices.retire_devices, node_id, [device.device_id for device in known[2:4]])
        await fleet.run(devices.insert_devices, node_id, ["dev_new2", "dev_new3"], new)
        rows = fleet.execute("select uuid, time_slots from device where public_id like 'dev_new%%' order by slot")
        assert rows == [("GPU-new-2", 6), ("GPU-new-3", 1)]
