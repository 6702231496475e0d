"""Capacity is summed over counters, and the counters equal their rows after any history of devices, nodes and holds."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.db import rollups
from controlplane.db.fleet import page_board
from controlplane.db.node_views import find_nodes
from controlplane.db.rollups import Amount, Capacity, Standing
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

FREE = "select gpu_total, gpu_healthy, gpu_held, gpu_free from node_capacity where node_id = 1"


def set_health(fleet: LedgerFleet, health: str, *slots: int, node_id: int = 1) -> None:
    fleet.execute("update device set health = %s where node_id = %s and slot = any(%s)", health, node_id, list(slots))


async def test_pools_are_summed_up_by_what_their_nodes_are_good_for(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=7) as fleet:
        fleet.execute("update node_capacity set vcpu_total = 64 + node_id, memory_mib_total = 100")
        await fleet.reserve(3, vcpus=60, memory_mib=70)
        set_health(fleet, "suspect", 6, 7, node_id=2)
        fleet.execute("update node set cordoned = true where node_id in (3, 4, 5)")
        fleet.execute("update node set draining = true where node_id in (4, 5)")
        fleet.execute("update node set connectivity = 'unreachable' where node_id in (5, 6)")
        fleet.execute("update node set provision_state = 'quarantined' where node_id = 6")
        fleet.execute("update node set provision_state = 'decommissioned' where node_id = 7")
        fleet.execute(
            "insert into node (public_id, site_id, pool_id, name, provision_state) "
            "values ('node_new', 1, 1, 'new', 'adopting')"
        )
        whole = await fleet.run(rollups.load_capacity, None)
        assert whole == Capacity(
            nodes=Counter[Standing](
                {"open": 2, "cordoned": 1, "draining": 1, "unreachable": 1, "quarantined": 1, "joining": 1}
            ),
            gpus=Amount(total=48, placeable=14, held=3, free=11, free_max=6),
            gpus_healthy=46,
            vcpus=Amount(total=65 + 66 + 67 + 68 + 69 + 70, placeable=65 + 66, held=60, free=5 + 66, free_max=66),
            memory_mib=Amount(total=600, placeable=200, held=70, free=130, free_max=100),
            free_sets=Counter({5: 1, 6: 1}),
        )
        assert await fleet.run(rollups.load_capacity, 1) == whole
        assert await fleet.run(rollups.load_pool_capacities, [1, 2]) == {1: whole, 2: Capacity()}
        fleet.assert_sound()


async def test_a_read_sums_up_counters_and_looks_at_nothing_else(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("update device set time_slots = 4 where slot = 0")
        # without gpu_recount, or the counters would be right again at once
        fleet.execute("update node_capacity set gpu_total = 80, gpu_healthy = 70, gpu_held = 20, gpu_recount = false")
        fleet.execute("update node_part set total = 40, healthy = 30, free = 20, held = 15")
        for found in (
            await fleet.run(rollups.load_capacity, None),
            (await fleet.run(rollups.load_pool_capacities, [1]))[1],
        ):
            assert (found.gpus.total, found.gpus_healthy, found.gpus.held) == (80, 70, 20)
            assert found.parts == {"slot.1/4": Amount(total=40, placeable=30, held=15, free=20, free_max=20)}
        assert (await fleet.run(rollups.load_node_parts, [1]))[1]["slot.1/4"].free == 20
        (row,) = await fleet.run(page_board, pool_id=1, after=0, limit=10)
        assert (row.gpus, row.gpus_held, row.gpus_unhealthy) == (80, 20, 10)
        (node,) = await fleet.run(find_nodes, "node-0")
        assert (node.gpus_total, node.gpus_held) == (80, 20)


async def test_an_inventory_that_shrank_below_what_is_held_leaves_nothing_free(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(1, vcpus=60, memory_mib=70)
        fleet.execute("update node_capacity set vcpu_total = 50, memory_mib_total = 50")
        found = await fleet.run(rollups.load_capacity, 1)
        assert found.vcpus == Amount(total=50, placeable=50, held=60, free=0, free_max=0)
        assert found.memory_mib == Amount(total=50, placeable=50, held=70, free=0, free_max=0)


async def test_a_gpu_that_is_held_and_sick_is_counted_once(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(2)
        await fleet.bound(reservation)
        assert fleet.execute(FREE) == [(8, 8, 2, 6)]
        held = fleet.execute("select slot from device, allocation where uuid = any(device_uuids) order by slot")
        set_health(fleet, "missing", held[0][0])
        assert fleet.execute(FREE) == [(8, 7, 2, 6)]
        # its slot has nothing in it any more, and its holder still has it on paper
        fleet.execute("update device set retired_at = compute_now() where health = 'missing'")
        assert fleet.execute(FREE) == [(7, 7, 2, 6)]
        other = await fleet.reserve(3)
        await fleet.bound(other)
        assert fleet.execute(FREE) == [(7, 7, 5, 3)]
        await fleet.release(reservation)
        await fleet.released(reservation)
        assert fleet.execute(FREE) == [(7, 7, 3, 4)]
        await fleet.release(other)
        await fleet.released(other)
        assert fleet.execute(FREE) == [(7, 7, 0, 7)]
        assert fleet.execute("select gpu_recount from node_capacity") == [(False,)]
        fleet.assert_sound()


async def test_a_gpu_that_comes_under_a_hold_is_not_free(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        set_health(fleet, "missing", 7)
        fleet.execute("update device set retired_at = compute_now() where slot = 7")
        whole = await fleet.reserve(7, whole_node=True)
        fleet.execute("update allocation set spans = '{[0,)}'")
        fleet.execute(
            """
            insert into device (public_id, node_id, slot, uuid, model, pci_bus_id)
            values ('dev_new', 1, 7, 'GPU-new', 'H100', '7')
            """
        )
        assert fleet.execute(FREE) == [(8, 8, 7, 0)]
        await fleet.release(whole)
        await fleet.released(whole)
        assert fleet.execute(FREE) == [(8, 8, 0, 8)]


async def test_a_change_of_devices_waits_for_the_node_and_sees_what_was_held_meanwhile(dsn: Dsn) -> None:
    """Both change the same GPU's part in the sum at the same time; neither may count it as it was before."""

    def set_first_missing(conn: psycopg.Connection) -> None:
        conn.execute("update device set health = 'missing' where node_id = 1 and slot = 0")

    async with open_fleet(dsn) as fleet:
        with psycopg.connect(dsn.admin) as placer, psycopg.connect(dsn.admin) as inventory:
            placer.execute("select from node where node_id = 1 for no key update")
            placer.execute(
                """
                insert into allocation
                  (public_id, reservation_id, node_id, spans, gpus, device_uuids, incarnation, generation)
                values ('alloc_a', 1, 1, '{[0,48)}', 1, '{GPU-0000-0}', 1, 1)
                """
            )
            placer.execute("update node_capacity set gpu_held = 1 where node_id = 1")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, partial(set_first_missing, inventory))
                await _wait_until_blocked(fleet, inventory.info.backend_pid)
                placer.commit()
            inventory.commit()
        assert fleet.execute(FREE) == [(8, 7, 1, 7)]
        fleet.assert_sound()


async def _wait_until_blocked(fleet: LedgerFleet, pid: int) -> None:
    with trio.fail_after(10):
        await trio.lowlevel.checkpoint()
        while fleet.execute("select cardinality(pg_blocking_pids(%s))", pid) == [(0,)]:  # noqa: ASYNC110 - another process
            await trio.lowlevel.checkpoint()


async def test_a_plan_made_before_the_devices_changed_is_told_by_the_generation(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:

        def generation_after(change: str) -> int:
            fleet.execute(change)
            return fleet.execute("select placement_gen from node")[0][0]

        before = generation_after("update device set serial = 'x', health_reason = 'y', memory_mib = 1")
        assert generation_after("update device set health = 'suspect' where slot < 4") == before + 1
        assert generation_after("update device set nvlink_group = null") == before + 2
        assert generation_after("update device set retired_at = compute_now()") == before + 3
        assert generation_after("update device set slot = slot + 8 where slot = 0") == before + 4
        assert generation_after("delete from device where slot = 8") == before + 5


async def test_counters_can_be_updated_in_place(dsn: Dsn) -> None:
    """No index on a counter, and room in the page: a placement leaves no index entry behind."""
    async with open_fleet(dsn) as fleet:
        where = "indrelid = 'node_capacity'::regclass"
        assert fleet.execute(f"select indrelid::regclass::text, indkey::text from pg_index where {where}") == [
            ("node_capacity", "1")
        ]
        assert fleet.execute("select reloptions from pg_class where relname = 'node_capacity'") == [
            (["fillfactor=50"],)
        ]


# --- any history ---------------------------------------------------------------------------------

NODES = st.integers(1, 2)
SLOTS = st.sets(st.integers(0, 8), min_size=1, max_size=4)
HOLDS = st.one_of(
    st.tuples(st.just("reserve"), st.integers(1, 5), st.sampled_from([0, 7, 40])),
    st.tuples(st.just("whole")),
    st.tuples(st.just("slots"), st.integers(1, 3), st.sampled_from([2, 4])),
    st.tuples(st.just("later"), st.integers(1, 5)),
    st.tuples(st.just("end"), st.integers(0, 3), st.booleans()),
)
DEVICES = st.one_of(
    st.tuples(st.just("health"), NODES, SLOTS, st.sampled_from(["healthy", "missing"])),
    st.tuples(st.just("retire"), NODES, SLOTS),
    st.tuples(st.just("share"), NODES, SLOTS, st.sampled_from([1, 2, 4])),
    st.tuples(st.just("insert"), NODES, SLOTS),
    st.tuples(st.just("delete"), SLOTS),
    st.tuples(st.just("swap"), SLOTS),
)
STANDINGS = st.one_of(
    st.tuples(st.just("node"), NODES, st.sampled_from(["cordoned", "draining"]), st.booleans()),
    st.tuples(st.just("away"), NODES, st.sampled_from(["connected", "unreachable"])),
)
STEPS = st.lists(st.one_of(HOLDS, DEVICES, HOLDS, DEVICES, STANDINGS), min_size=5, max_size=25)
INSERT = """
insert into device (public_id, node_id, slot, uuid, model, pci_bus_id)
select format('dev_%%s_%%s_%%s', n, %(round)s, s), n, s, format('GPU-%%s-%%s-%%s', n, %(round)s, s), 'H100', s::text
from unnest(%(nodes)s::int4[]) n, unnest(%(slots)s::int2[]) s
where not exists (select from device d where d.node_id = n and d.slot = s and d.retired_at is null)
"""


async def _take(fleet: LedgerFleet, made: list[int], number: int, step: tuple[object, ...]) -> None:
    match step:
        case ("reserve", int(gpus), int(vcpus)):
            made.append((await fleet.reserve(gpus, vcpus=vcpus, memory_mib=vcpus)).reservation_id)
        case ("whole",):
            made.append((await fleet.reserve(1, whole_node=True)).reservation_id)
        case ("slots", int(count), int(time_slots)):
            made.append((await fleet.reserve(0, parts=[f"slot.1/{time_slots}={count}"])).reservation_id)
        case ("later", int(gpus)):
            made.append((await fleet.reserve(gpus, start_s=600)).reservation_id)
            fleet.advance(300)
        case ("end", int(which), bool(lets_go)) if made:
            reservation = await fleet.step(await fleet.load(made[-1 - which % len(made)]))
            if reservation.state in ("binding", "active"):
                await fleet.release(reservation)
            if lets_go:
                await fleet.released(reservation)
        case ("node", int(node_id), ("cordoned" | "draining") as column, bool(value)):
            fleet.execute(f"update node set {column} = %s where node_id = %s", value, node_id)
        case ("away", int(node_id), str(connectivity)):
            fleet.execute("update node set connectivity = %s where node_id = %s", connectivity, node_id)
        case (str(what), *parameters):
            _change_devices(fleet, number, what, *parameters)
        case _:
            pass


def _change_devices(fleet: LedgerFleet, number: int, what: str, *parameters: object) -> None:
    match (what, *parameters):
        case ("health", int(node_id), set(slots), str(health)):
            set_health(fleet, health, *slots, node_id=node_id)
        case ("retire", int(node_id), set(slots)):
            where = "node_id = %s and slot = any(%s) and retired_at is null"
            fleet.execute(f"update device set retired_at = compute_now() where {where}", node_id, list(slots))
        case ("share", int(node_id), set(slots), int(time_slots)):
            where = "node_id = %s and slot = any(%s)"
            fleet.execute(f"update device set time_slots = %s where {where}", time_slots, node_id, list(slots))
        case ("insert", int(node_id), set(slots)):
            with psycopg.connect(fleet.owner_dsn) as conn:
                conn.execute(INSERT, {"nodes": [node_id], "round": number, "slots": list(slots)})
        case ("delete", set(slots)):
            fleet.execute("delete from device where slot = any(%s)", list(slots))
        case ("swap", set(slots)):  # the GPUs of both nodes in one statement
            fleet.execute(
                """
                update device d set node_id = 3 - node_id, health = 'healthy'
                where slot = any(%s) and retired_at is null and not exists (
                  select from device o where o.node_id = 3 - d.node_id and o.slot = d.slot and o.retired_at is null)
                """,
                list(slots),
            )
        case _:
            pass


@given(STEPS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_after_any_history_every_counter_is_what_its_rows_say(dsn: Dsn, steps: list[tuple[object, ...]]) -> None:
    with trio.fail_after(120):
        async with open_fleet(dsn, nodes=2) as fleet:
            made: list[int] = []
            for number, step in enumerate(steps):
                await _take(fleet, made, number, step)
                fleet.assert_sound()
            await _assert_summed_up(fleet)


async def _assert_summed_up(fleet: LedgerFleet) -> None:
    """The pool's figures again, from the rows."""
    capacity = await fleet.run(rollups.load_capacity, 1)
    free = dict(fleet.execute(FREE_OF_PLACEABLE))
    assert capacity.free_sets == Counter(free.values())
    assert capacity.gpus == Amount(
        total=fleet.execute("select count(*) from device where retired_at is null")[0][0],
        placeable=fleet.execute(HEALTHY_OF_PLACEABLE)[0][0],
        held=fleet.execute("select coalesce(sum(gpu_held), 0)::int from node_capacity")[0][0],
        free=sum(free.values()),
        free_max=max(free.values(), default=0),
    )


FREE_OF_PLACEABLE = """
select n.node_id, count(d.device_id) filter (where d.health = 'healthy' and d.time_slots = 1 and not exists (
  select from allocation a where a.node_id = n.node_id and a.released_at is null
    and a.spans && int4range(d.slot * 48, d.slot * 48 + 48)))
from node n left join device d on d.node_id = n.node_id and d.retired_at is null
where n.provision_state = 'adopted' and n.connectivity = 'connected' and not n.cordoned and not n.draining
group by n.node_id
"""
HEALTHY_OF_PLACEABLE = """
select count(*) from device d join node n using (node_id)
where d.retired_at is null and d.health = 'healthy' and d.time_slots = 1 and n.provision_state = 'adopted'
  and n.connectivity = 'connected' and not n.cordoned and not n.draining
"""
