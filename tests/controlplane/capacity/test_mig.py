"""MIG instances through the ledger: booked, held, counted, refused by the constraints, repaired on another layout."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.capacity.place import bind
from controlplane.capacity.replace import replace_broken
from controlplane.db import checks, devices, ledger, reservations, rollups, views
from controlplane.db.reservation_views import load_parts
from controlplane.db.rollups import Amount
from controlplane.db.time import load_now
from controlplane.model.mig import plan_instances
from controlplane.model.shares import charged_gpus, parse_parts
from shared.inventory import GpuFacts, MigInstance
from tests.support.ledgers import LedgerFleet, open_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn

Layout = list[tuple[str, int, int]]
THREES: Layout = [("3g.40gb", 0, 4), ("3g.40gb", 4, 4)]
MIXED: Layout = [("3g.40gb", 0, 4), ("2g.20gb", 4, 2), ("1g.10gb", 6, 1)]
WHOLE: Layout = [("7g.80gb", 0, 8)]
COUNTERS = "select gpu_total, gpu_healthy, gpu_parted, gpu_held, gpu_free from node_capacity order by node_id"


async def partition(fleet: LedgerFleet, slot: int, layout: Layout | None, *, node: int = 0) -> list[str]:
    """Put a GPU into MIG mode with these instances, or out of it; returns their UUIDs, which come again by number."""
    node_id, gpu_uuid = fleet.nodes[node].node_id, fleet.nodes[node].uuids[slot]
    uuids = [f"MIG-{node}-{slot}-{i}" for i in range(len(layout or ()))]

    def write(tx: Tx) -> None:
        tx.execute(
            "update device set mig = %(mig)s where node_id = %(node)s and slot = %(slot)s and retired_at is null",
            {"mig": layout is not None, "node": node_id, "slot": slot},
        )
        instances = tuple(
            MigInstance(
                uuid=uuid, gpu_instance=i, compute_instance=0, profile=profile, start=start, size=size, whole=True
            )
            for i, (uuid, (profile, start, size)) in enumerate(zip(uuids, layout or (), strict=True))
        )
        gpu = GpuFacts(
            uuid=gpu_uuid,
            serial="",
            model="H100",
            pci_bus_id=f"0000:{slot:02x}:00.0",
            minor=slot,
            memory_mib=81559,
            mig=layout is not None,
            mig_slices=None if layout is None else 8,
            mig_instances=instances,
        )
        known = [device.facts for device in devices.load_known(tx, node_id) if device.slot == slot]
        here = [row for row in devices.load_instances(tx, node_id) if row.facts.slot == slot]
        plan = plan_instances(here, known, [gpu])
        devices.retire_instances(tx, plan.retired)
        devices.insert_instances(tx, node_id, plan.added)

    await fleet.run(write)
    return uuids


def spans_of(fleet: LedgerFleet, reservation: Reservation) -> list[str]:
    rows = fleet.execute("select spans::text from booking where reservation_id = %s", reservation.reservation_id)
    return [row[0] for row in rows]


async def parts_of(fleet: LedgerFleet) -> dict[str, tuple[int, int, int, int]]:
    found = (await fleet.run(rollups.load_capacity, fleet.pool_id)).parts
    return {name: (part.total, part.placeable, part.held, part.free) for name, part in found.items()}


async def test_two_hold_an_instance_each_and_a_third_waits(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        uuids = await partition(fleet, 7, THREES)
        holders = [await fleet.reserve(0, parts=["mig.3g.40gb/24=1"]) for _ in range(2)]
        assert [spans_of(fleet, one) for one in holders] == [["{[336,360)}"], ["{[360,384)}"]]
        for one, uuid in zip(holders, uuids, strict=True):
            (hold,) = await fleet.holds(one)
            assert (hold.device_uuids, hold.gpus) == ([uuid], 0)
            await fleet.bound(one)
            assert (await fleet.load(one.reservation_id)).state == "active"
        third = await fleet.reserve(0, parts=["mig.3g.40gb/24=1"])
        assert third.pending_reason == "needs 1 x mig.3g.40gb on one node; most free on one node: 0"
        assert (await fleet.reserve(8)).pending_reason == "needs 8 GPUs on one node; most free on one node: 7"
        assert (await fleet.reserve(7)).state == "binding"
        assert await parts_of(fleet) == {"mig.3g.40gb": (2, 2, 2, 0)}
        assert fleet.execute(COUNTERS) == [(8, 8, 1, 7, 0)]
        fleet.assert_sound()
        spec = await fleet.spec(fleet.nodes[0])
        assert sorted(uuid for item in spec.assignments for uuid in item.device_uuids if "MIG" in uuid) == uuids
        await fleet.release(await fleet.load(holders[0].reservation_id))
        assert (await fleet.retry_queue(third.reservation_id)).state == "queued"
        await fleet.released(holders[0])
        placed = await fleet.retry_queue(third.reservation_id)
        assert (placed.state, spans_of(fleet, placed)) == ("binding", ["{[336,360)}"])
        fleet.assert_sound()


async def test_a_mix_is_on_one_node_and_is_metered_and_charged(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_test', %s, 4)", fleet.tenant_id)
        uuids = await partition(fleet, 0, MIXED, node=1)
        parts = ["mig.1g.10gb/6=1", "mig.3g.40gb/24=1"]
        mixed = await fleet.reserve(2, parts=parts, vcpus=4)
        (hold,) = await fleet.holds(mixed)
        assert hold.node_id == fleet.nodes[1].node_id
        assert hold.device_uuids == [uuids[0], uuids[2], *fleet.nodes[1].uuids[1:3]]
        assert (hold.gpus, hold.spans) == (2, "{[0,24),[36,42),[48,144)}")
        assert fleet.execute("select gpus_used from quota") == [(3,)]
        assert fleet.execute(COUNTERS) == [(8, 8, 0, 0, 8), (8, 8, 1, 2, 5)]
        for find in (checks.find_quota_drift, checks.find_held_drift, checks.find_free_drift, checks.find_mig_drift):
            assert (await fleet.run(find)).count == 0
        fleet.assert_sound()
        await fleet.bound(mixed)
        fleet.advance(60)
        await fleet.release(await fleet.load(mixed.reservation_id))
        await fleet.released(mixed)
        assert fleet.execute("select gpus_used from quota") == [(0,)]
        assert fleet.execute(COUNTERS) == [(8, 8, 0, 0, 8), (8, 8, 1, 0, 7)]
        meters = [meter for (meter,) in fleet.execute("select meter from usage_window order by meter")]
        assert meters == ["gpu.h100.hours", "gpu.h100.mig.1g.10gb.hours", "gpu.h100.mig.3g.40gb.hours", "vcpu.hours"]


async def test_a_gang_has_as_many_instances_on_each_node(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        await partition(fleet, 3, THREES, node=0)
        await partition(fleet, 5, THREES, node=2)
        gang = await fleet.reserve(0, nodes=2, parts=["mig.3g.40gb/24=2"])
        holds = {hold.node_id: hold.device_uuids for hold in await fleet.holds(gang)}
        assert holds == {
            fleet.nodes[0].node_id: ["MIG-0-3-0", "MIG-0-3-1"],
            fleet.nodes[2].node_id: ["MIG-2-5-0", "MIG-2-5-1"],
        }
        fleet.assert_sound()


@pytest.mark.parametrize(
    ("nodes", "gpus", "parts"),
    [(1, 0, ["mig.3g.40gb/24=1"]), (3, 1, ["mig.1g.10gb+me/6=7", "slot.1/4=3"]), (2, 2, ["mig.7g.80gb/48=1"])],
)
async def test_the_database_charges_what_the_model_does(dsn: Dsn, nodes: int, gpus: int, parts: list[str]) -> None:
    with psycopg.connect(dsn.worker) as conn:
        found = conn.execute("select charged_gpus(%s::int2, %s::int2, %s::text[])", (nodes, gpus, parts)).fetchone()
    assert found == (charged_gpus(nodes, gpus, parse_parts(parts)),)


async def test_the_constraints_alone_refuse_what_overlaps_an_instance(dsn: Dsn) -> None:
    """Whatever a planner believes: a whole GPU, the whole node, half of an instance, the instance again."""
    booking = (
        "insert into booking (reservation_id, pool_id, node_id, spans, during) values (99, 1, 1, %s, '[2030-01-01,)')"
    )
    hold = (
        "insert into allocation (public_id, reservation_id, node_id, spans, incarnation, generation)"
        " values ('alloc_x', 99, 1, %s, 1, 1)"
    )
    instance = (
        "insert into mig_instance (device_id, node_id, uuid, gpu_instance, compute_instance, profile, start_slice,"
        " slices, span) select device_id, node_id, 'MIG-x', 9, 0, '2g.20gb', 2, 2, %s from device where slot = 0"
    )
    async with open_fleet(dsn) as fleet:
        await partition(fleet, 0, THREES)
        held = await fleet.reserve(0, parts=["mig.3g.40gb/24=1"])
        assert spans_of(fleet, held) == ["{[0,24)}"]
        for sql in (booking, hold):
            for spans in ("{[0,48)}", "{[0,)}", "{[12,36)}", "{[0,24)}", "{[23,24),[96,144)}"):
                with pytest.raises(psycopg.errors.ExclusionViolation):
                    fleet.execute(sql, spans)
            fleet.execute(sql, "{[24,48)}")
        # nor can two instances be for sale at one place, whatever a node reports
        with pytest.raises(psycopg.errors.ExclusionViolation):
            fleet.execute(instance, "[12,24)")


async def test_a_layout_is_what_a_planner_must_have_seen(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        generations = []
        for layout in (THREES, THREES, MIXED, [], None):
            await partition(fleet, 3, layout)
            (view,) = await fleet.run(views.load_node_views, fleet.pool_id)
            generations.append(view.placement_gen)
            parts = None if view.shared is None else [part.device_class for part in view.shared.parts]
            assert parts == (None if layout is None else [f"mig.{profile}" for profile, *_ in layout])
            assert view.gpus == (8 if layout is None else 7)
        first, again, *later = generations
        assert again == first, "the same layout is no news"
        assert all(before < after for before, after in pairwise([again, *later]))
        # retired rows stay, for what was booked of them
        assert fleet.execute("select count(*), count(*) filter (where retired_at is null) from mig_instance") == [
            (4, 0)
        ]


async def test_a_shared_gpu_in_mig_mode_is_its_instances(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("update device set time_slots = 4 where slot = 2")
        assert list(await parts_of(fleet)) == ["slot.1/4"]
        await partition(fleet, 2, MIXED)
        assert list(await parts_of(fleet)) == ["mig.1g.10gb", "mig.2g.20gb", "mig.3g.40gb"]
        waits = await fleet.reserve(0, parts=["slot.1/4=1"])
        assert waits.state == "queued"
        await partition(fleet, 2, None)
        assert (await fleet.retry_queue(waits.reservation_id)).state == "binding"
        fleet.assert_sound()


async def test_instances_of_a_sick_gpu_are_counted_and_not_given_out(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        await partition(fleet, 0, THREES)
        await partition(fleet, 0, THREES, node=1)
        fleet.execute("update device set health = 'unhealthy' where node_id = 1 and slot = 0")
        fleet.execute("update node set cordoned = true where node_id = 2")
        capacity = await fleet.run(rollups.load_capacity, fleet.pool_id)
        assert capacity.parts == {"mig.3g.40gb": Amount(total=4, placeable=0, held=0, free=0, free_max=0)}
        assert (capacity.gpus.total, capacity.gpus_parted, capacity.gpus.placeable) == (16, 1, 7)
        assert (await fleet.reserve(0, parts=["mig.3g.40gb/24=1"])).state == "queued"
        by_node = await fleet.run(rollups.load_node_parts, [1, 2])
        assert [by_node[node]["mig.3g.40gb"].total for node in (1, 2)] == [2, 2]


# --- a layout that changes ------------------------------------------------------------------------


async def test_a_later_booking_is_shown_with_its_instance_and_bound_to_it(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        uuids = await partition(fleet, 7, MIXED)
        later = await fleet.reserve(0, parts=["mig.2g.20gb/12=1"], start_s=600)
        ((shown,),) = (await fleet.run(load_parts, [later.reservation_id])).values()
        assert shown.device_uuids == [uuids[1]]
        fleet.advance(600)
        bound = await fleet.step(later)
        (hold,) = await fleet.holds(bound)
        assert (bound.state, hold.device_uuids, hold.gpus) == ("binding", [uuids[1]], 0)
        fleet.assert_sound()


@pytest.mark.parametrize(
    ("booked", "gpus", "becomes", "reason"),
    [
        (THREES, 0, MIXED[1:], "GPU-0000-0 is in MIG mode, and not as it was booked"),
        (THREES, 0, [("1g.20gb", 0, 2), ("4g.40gb", 4, 4)], "GPU-0000-0 is in MIG mode, and not as it was booked"),
        (THREES, 0, None, "it has 0 of 1 x mig.3g.40gb"),
        (None, 8, THREES, "GPU-0000-0 is in MIG mode, and not as it was booked"),
        (None, 8, WHOLE, "GPU-0000-0 is in MIG mode, and not as it was booked"),
    ],
    ids=["other", "halved", "off", "on", "on-in-one-piece"],
)
async def test_a_later_booking_leaves_a_gpu_whose_layout_changed_or_waits_broken(
    dsn: Dsn, booked: Layout | None, gpus: int, becomes: Layout | None, reason: str
) -> None:
    async with open_fleet(dsn) as fleet:
        await partition(fleet, 0, booked)
        parts = [] if gpus else ["mig.3g.40gb/24=1"]
        later = await fleet.reserve(gpus, parts=parts, start_s=600)
        assert later.state == "placed"
        await partition(fleet, 0, becomes)
        broken = await fleet.step(later)
        assert (broken.state, broken.conditions, broken.impaired_reason) == (
            "placed",
            ["impaired"],
            f"node-0: {reason}",
        )
        fleet.advance(600)
        assert (await fleet.step(later)).state == "placed", "what is not there is not bound"
        assert await fleet.holds(later) == []
        spare = fleet.add_node()
        if booked is not None:
            await partition(fleet, 4, booked, node=1)
        await fleet.step(later)
        assert fleet.execute("select node_id from booking") == [(spare.node_id,)]
        fleet.assert_sound()


@pytest.mark.parametrize(
    ("gpus", "parts", "layouts"),
    [
        (7, [], {0: WHOLE}),
        (7, [], {0: []}),
        (0, ["mig.3g.40gb/24=1"], {7: WHOLE}),
        (0, ["mig.3g.40gb/24=1"], {7: [("4g.40gb", 0, 4)]}),
        (0, ["mig.3g.40gb/24=1"], {7: None}),
        # one turned on and the other off: there are still one whole GPU and one instance, and not as booked
        (1, ["mig.3g.40gb/24=1"], {0: THREES[:1], 7: None}),
    ],
    ids=["on", "empty", "other", "profile", "off", "swapped"],
)
async def test_a_layout_that_changes_between_the_look_and_the_bind_is_not_bound(
    dsn: Dsn, gpus: int, parts: list[str], layouts: dict[int, Layout | None]
) -> None:
    async with open_fleet(dsn) as fleet:
        await partition(fleet, 7, THREES)
        later = await fleet.reserve(gpus, parts=parts, start_s=60)
        for slot, layout in layouts.items():
            await partition(fleet, slot, layout)

        def try_bind(tx: Tx) -> str:
            locked = reservations.lock_reservation(tx, later.reservation_id)
            assert locked is not None
            return bind(tx, fleet.tools, locked, load_now(tx))

        assert await fleet.run(try_bind) == "waiting_for_release"
        assert await fleet.holds(later) == []
        fleet.assert_sound()


@pytest.mark.parametrize(
    ("becomes", "reason"),
    [
        ([], "MIG-0-0-0 is gone"),
        (None, "MIG-0-0-0 is gone"),
        ([("3g.40gb", 4, 4)], "MIG-0-0-0 is at another place of GPU-0000-0"),
        ([("4g.40gb", 0, 4)], "MIG-0-0-0 is a mig.4g.40gb"),
    ],
    ids=["gone", "off", "moved", "other"],
)
async def test_a_holder_is_told_and_keeps_what_it_has(dsn: Dsn, becomes: Layout | None, reason: str) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        await partition(fleet, 0, [("3g.40gb", 0, 4)])
        holder = await fleet.reserve(0, parts=["mig.3g.40gb/24=1"])
        await fleet.bound(holder)
        await partition(fleet, 0, becomes)
        told = await fleet.step(holder)
        assert (told.state, told.impaired_reason) == ("active", f"node-0: {reason}")
        # nothing is sold on top of what it holds, whatever is there now
        waits = await fleet.reserve(0, parts=["mig.4g.40gb/24=1"])
        (view, _) = await fleet.run(views.load_node_views, fleet.pool_id)
        taken = 0 if view.shared is None else view.shared.held
        assert waits.state == "queued"
        assert taken in (0, (1 << 24) - 1)
        eight = await fleet.reserve(16, nodes=1)
        assert eight.state == "queued"
        fleet.assert_sound()
        events = [kind for (kind,) in fleet.execute("select kind from outbox order by seq")]
        assert "reservation.condition" in events
        # with its holder's word it goes elsewhere
        await partition(fleet, 5, THREES, node=1)

        def repair(tx: Tx) -> None:
            locked = reservations.lock_reservation(tx, holder.reservation_id)
            assert locked is not None
            assert replace_broken(tx, fleet.tools, locked, load_now(tx)) is None

        await fleet.run(repair)
        new = [hold for hold in await fleet.holds(holder) if hold.state == "binding"]
        assert [hold.device_uuids for hold in new] == [["MIG-1-5-0"]]
        await fleet.released(holder)
        fleet.assert_sound()


async def test_a_holder_of_a_gpu_that_goes_into_mig_mode_is_told(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        holder = await fleet.reserve(1)
        await fleet.bound(holder)
        await partition(fleet, 0, THREES)
        told = await fleet.step(holder)
        assert (told.state, told.impaired_reason) == ("active", "node-0: GPU-0000-0 is in MIG mode")
        assert fleet.execute(COUNTERS) == [(8, 8, 1, 1, 7)]
        assert (await fleet.reserve(0, parts=["mig.3g.40gb/24=1"])).state == "queued", "it is held"
        await fleet.release(told)
        await fleet.released(holder)
        assert fleet.execute(COUNTERS) == [(8, 8, 1, 0, 7)]
        assert (await fleet.reserve(0, parts=["mig.3g.40gb/24=1"])).state == "binding"
        fleet.assert_sound()


async def test_an_instance_whose_uuid_somebody_holds_elsewhere_is_nobody_elses(dsn: Dsn) -> None:
    """The driver gives a UUID again, and the holder's containers still open what has it."""
    async with open_fleet(dsn) as fleet:
        await partition(fleet, 0, [("3g.40gb", 0, 4)])
        later = await fleet.reserve(0, parts=["mig.3g.40gb/24=1"], start_s=3600, duration_s=60)
        holder = await fleet.reserve(0, parts=["mig.3g.40gb/24=1"], duration_s=1800)
        await fleet.bound(holder)
        await partition(fleet, 0, [("3g.40gb", 4, 4)])
        assert await parts_of(fleet) == {"mig.3g.40gb": (1, 1, 1, 0)}
        waits = await fleet.reserve(0, parts=["mig.3g.40gb/24=1"])
        assert waits.state == "queued"
        # the guard, and not only the planner
        fleet.execute("update booking set spans = '{[24,48)}' where reservation_id = %s", later.reservation_id)
        fleet.advance(3600)
        assert (await fleet.step(later)).conditions == ["waiting_for_release"]
        await fleet.step(holder)
        await fleet.released(holder)
        assert await parts_of(fleet) == {"mig.3g.40gb": (1, 1, 0, 1)}
        assert (await fleet.step(later)).state == "binding"
        fleet.assert_sound()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("layout"), st.integers(0, 1), st.sampled_from([None, [], THREES, MIXED, WHOLE])),
        st.tuples(
            st.just("reserve"), st.integers(0, 2), st.sampled_from([None, "mig.3g.40gb/24=1", "mig.2g.20gb/12=1"])
        ),
        st.tuples(st.just("end"), st.integers(0, 5), st.none()),
    ),
    max_size=10,
)


@given(steps)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_after_any_history_nothing_is_held_twice_and_every_counter_is_right(
    dsn: Dsn, history: Sequence[tuple[str, int, Any]]
) -> None:
    async with open_fleet(dsn, gpus=2) as fleet:
        made: list[Reservation] = []
        for what, number, how in history:
            if what == "layout":
                await partition(fleet, number, how)
            elif what == "end" and number < len(made):
                await fleet.bound(made[number])
                if (await fleet.load(made[number].reservation_id)).state in ("active", "binding"):
                    await fleet.release(await fleet.load(made[number].reservation_id))
                    await fleet.released(made[number])
            elif what == "reserve" and (number or how):
                made.append(await fleet.reserve(number, parts=[] if how is None else [how]))
            fleet.assert_sound()
            assert (await fleet.run(checks.find_mig_drift)).count == 0
        for hold in await fleet.run(ledger.load_open_on_node, fleet.nodes[0].node_id):
            parts = (await fleet.load(hold.reservation_id)).parts
            expected = sum(ask.count for ask in parse_parts(parts)) + hold.gpus
            assert len(hold.device_uuids) == expected
