"""Each check of `bcctl doctor` finds what it is for, and a sound ledger passes them all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.api import doctor
from controlplane.db import checks, fleet
from controlplane.db.tx import run_reading
from controlplane.queue.membership import SHARD_TIMING
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from controlplane.db.tx import Tx
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

LEDGER_RULES = {rule.name: rule for rule in doctor._RULES}
# Most faults are impossible until a constraint or trigger is taken away: what is looked for is that the guards fail.


async def live_ledger(fleet: LedgerFleet) -> None:
    """One reservation in each state that holds something, one queued, and a quota over them."""
    fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 32)")
    await fleet.bound(await fleet.reserve(2))
    await fleet.reserve(1)
    await fleet.reserve(4, start_s=3600)
    ending = await fleet.reserve(2)
    await fleet.bound(ending)
    await fleet.release(ending)
    assert (await fleet.reserve(8)).state == "queued"


async def findings(fleet: LedgerFleet) -> dict[str, checks.Found]:
    found = {name: await fleet.run(rule.find) for name, rule in LEDGER_RULES.items()}
    return {name: one for name, one in found.items() if one.count}


async def test_a_sound_ledger_has_no_findings(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await live_ledger(fleet)
        assert await findings(fleet) == {}


@pytest.mark.parametrize(
    ("name", "faults", "example"),
    [
        (
            "ledger.bookings.overlap",
            (
                "alter table booking drop constraint booking_no_overlap",
                """
                insert into booking (pool_id, node_id, purpose, spans, during)
                values (1, 1, 'maintenance', '{[0,)}', '[2030-01-01 00:30Z,2030-01-01 00:40Z)')
                """,
            ),
            "node node-0: bookings 1 and",
        ),
        (
            "ledger.holds.overlap",
            (
                "alter table allocation drop constraint allocation_one_hold",
                "update allocation set spans = '{[0,48)}' where allocation_id in (1, 2)",
            ),
            "node node-0: alloc_",
        ),
        (
            "ledger.active.evidence",
            ("update allocation set state = 'binding', bound_envelope = null where allocation_id = 1",),
            "0 of 1 nodes have signed",
        ),
        ("ledger.bookings.missing", ("delete from booking where booking_id = 1",), "is active: 0 of 1 nodes booked"),
        (
            "ledger.orphans",
            (
                "alter table reservation disable trigger reservation_transition",
                "update reservation set state = 'cancelled', ended_at = compute_now() where reservation_id = 1",
            ),
            "booking 1 of rsv_",
        ),
        (
            "ledger.orphans.blocking",
            (
                """
                insert into booking (pool_id, node_id, purpose, spans, during)
                values (1, 1, 'orphan', '{[336,384)}', '[2030-01-01 00:00Z,)')
                """,
            ),
            "node node-0: booking",
        ),
        (
            "capacity.device_counts.drift",
            ("update node_capacity set gpu_total = 9 where node_id = 1",),
            "node node-0: counts 9 GPUs, 8 healthy, 0 in parts; has 8, 8, 0",
        ),
        (
            "capacity.mig.drift",
            (
                "insert into mig_instance (device_id, node_id, uuid, gpu_instance, compute_instance, profile,"
                " start_slice, slices, span) select device_id, node_id, 'MIG-a', 1, 0, '3g.40gb', 0, 4, '[0,24)'"
                " from device where node_id = 1 and slot = 0",
            ),
            "node node-0: MIG-a at [0,24) of GPU-0000-0 in slot 0",
        ),
        (
            "capacity.device_counts.drift",
            ("update node_capacity set gpu_healthy = 7 where node_id = 1",),
            "node node-0: counts 8 GPUs, 7 healthy, 0 in parts; has 8, 8, 0",
        ),
        (
            "capacity.parts.drift",
            (
                "update device set time_slots = 4 where node_id = 1 and slot = 7",
                "update node_part set free = 3, held = 1",
            ),
            "node node-0: counts 4 of slot.1/4, 4 healthy, 3 free, 1 held; are 4, 4, 4, 0",
        ),
        (
            "capacity.parts.drift",
            ("insert into node_part values (1, 'mig.3g.40gb', 2, 2, 2, 0)",),
            "node node-0: counts 2 of mig.3g.40gb, 2 healthy, 2 free, 0 held; are 0, 0, 0, 0",
        ),
        (
            "capacity.free.drift",
            ("update node_capacity set gpu_held_unfit = 2 where node_id = 1",),
            "node node-0: counts 5 GPUs free, has 3",
        ),
        (
            "capacity.held.drift",
            ("update node_capacity set gpu_held = gpu_held + 1 where node_id = 1",),
            "node node-0: counts 6 GPUs, 0 vCPUs, 0 MiB; held are 5, 0, 0",
        ),
        (
            "capacity.held.drift",
            ("update node_capacity set vcpu_held = 1, memory_mib_held = 2 where node_id = 1",),
            "node node-0: counts 5 GPUs, 1 vCPUs, 2 MiB; held are 5, 0, 0",
        ),
        (
            "quota.hours.drift",
            (
                "insert into quota (public_id, tenant_id, pool_id, gpu_hours_max, hours_from)"
                " values ('quo_b', 1, 1, 100, '2030-01-01Z')",
            ),
            "quo_b from 2030-01-01: counts 0.000 GPU-hours; used are 7.000",
        ),
        ("quota.claims.drift", ("update quota set claims = 1",), "quo_a: counts 1 that wait; there are 0"),
        ("quota.used.drift", ("update quota set gpus_used = 8",), "quo_a: counts 8 GPUs, 0 vCPUs, 0 MiB; used are 9"),
        (
            "queue.late",
            (
                """
                insert into work_queue (queue, key, shard, due_at)
                values ('node', '1', 0, compute_now() - interval '61 s')
                """,
            ),
            "queue node: 1 keys, the oldest for 61 s",
        ),
        (
            "queue.failing",
            (
                """
                insert into work_queue (queue, key, shard, due_at, attempts, last_error)
                values ('node', '1', 0, compute_now() + interval '60 s', 5, 'no route')
                """,
            ),
            "node 1, 5 times: no route",
        ),
    ],
)
async def test_a_fault_is_found_and_named(dsn: Dsn, name: str, faults: tuple[str, ...], example: str) -> None:
    async with open_fleet(dsn) as fleet:
        await live_ledger(fleet)
        fleet.execute("delete from work_queue")
        for fault in faults:
            fleet.execute(fault)
        found = await findings(fleet)
        assert name in found
        assert example in "; ".join(found[name].examples)
        check = doctor._apply(LEDGER_RULES[name], found[name])
        assert not check.ok
        assert check.fix


def test_doctor_leaves_no_check_out() -> None:
    run = {rule.find.func if isinstance(rule.find, partial) else rule.find for rule in doctor._RULES}
    assert run == {find for name, find in vars(checks).items() if name.startswith("find_")}


async def test_a_hold_is_stuck_after_a_quarter_of_an_hour(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(8)
        await fleet.bound(reservation)
        await fleet.release(reservation)
        fleet.execute("update node set connectivity = 'unreachable'")
        fleet.advance(doctor.HOLD_STUCK_S)
        assert "ledger.holds.stuck" not in await findings(fleet)
        fleet.advance(1)
        found = (await findings(fleet))["ledger.holds.stuck"]
        assert (
            f"of {reservation.public_id} on node node-0 (unreachable), releasing since 2030-01-01 00:00Z"
            in (found.examples[0])
        )


async def test_nodes_of_a_gateway_without_its_lease_are_found(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("update node_session set gateway_id = 'gw_a', gateway_epoch = 3, opened_at = compute_now()")
        fleet.execute("insert into lease values ('gateway:gw_a', 'p1', 3, compute_now() + interval '20 s')")
        fleet.advance(20 + doctor.GATEWAY_GRACE_S)
        assert "leases.gateways" not in await findings(fleet)
        fleet.advance(1)
        assert (await findings(fleet))["leases.gateways"].examples == ("gateway gw_a, epoch 3: 1 nodes",)
        # somebody else holds it under a newer epoch: the old owner's sessions are still nobody's
        fleet.execute("update lease set epoch = 4, expires_at = compute_now() + interval '20 s'")
        assert (await findings(fleet))["leases.gateways"].count == 1
        fleet.execute("update node set connectivity = 'unreachable'")
        assert "leases.gateways" not in await findings(fleet)


async def test_examples_are_few_and_the_count_is_whole(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=7) as fleet:
        fleet.execute("update node_capacity set gpu_total = 9")
        found = await fleet.run(checks.find_device_count_drift)
        assert (found.count, len(found.examples)) == (7, checks.EXAMPLES_MAX)
        check = doctor._apply(LEDGER_RULES["capacity.device_counts.drift"], found)
        assert check.detail.startswith("7: node node-0: counts 9 GPUs, 8 healthy, 0 in parts; has 8, 8, 0; ")
        assert check.detail.endswith("; and 2 more")


async def test_migrations_clock_and_workers_are_checked(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute(
            "insert into worker (worker_id, roles, heartbeat_at) values ('w', '{controllers}', compute_now())"
        )
        before = {check.name: check for check in await fleet.run(doctor.run_checks, clock_s=-1.9)}
        assert before["database.migrations"].ok
        assert before["database.clock"].detail == "the server's clock is 1.9 s behind the database's"
        assert before["database.clock"].ok
        assert before["workers.controllers"].ok
        assert not before["workers.scheduler"].ok
        assert before["workers.scheduler"].fix == "start one: `bcctl serve --roles scheduler`"
        fleet.advance(doctor.WORKER_SILENT_S + SHARD_TIMING.ttl_s)
        fleet.execute("delete from schema_migration")
        after = {check.name: check for check in await fleet.run(doctor.run_checks, clock_s=2.1)}
        assert after.keys() == before.keys()
        assert not after["database.migrations"].ok
        assert not after["database.clock"].ok
        assert not after["workers.controllers"].ok


def _sleep(tx: Tx) -> checks.Found:
    tx.execute("select pg_sleep(60)")
    raise AssertionError("it was stopped")


def test_a_check_that_takes_too_long_is_said_not_to_be_made_and_the_others_are(
    dsn: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = doctor._RULES[0], doctor._RULES[-1]
    monkeypatch.setattr(doctor, "_RULES", (replace(first, find=_sleep), last))
    with psycopg.connect(dsn.api, autocommit=True) as conn:
        conn.execute("set statement_timeout = 100")
        made = run_reading(conn, partial(doctor.run_checks, clock_s=0.0), check=lambda: None)
    slow, other = made[-2:]
    assert (slow.name, slow.ok, slow.detail) == (first.name, False, "not checked: there was no time for it")
    assert "vacuum analyze" in slow.fix
    assert (other.name, other.ok) == (last.name, True)


# --- the board -----------------------------------------------------------------------------------


async def test_the_board_shows_what_is_held_and_counts_the_rest(dsn: Dsn) -> None:
    async with open_fleet(dsn) as ledger:
        await live_ledger(ledger)
        ledger.add_node()
        ledger.execute("update node set cordoned = true, connectivity = 'unreachable' where node_id = 2")
        ledger.execute("update device set health = 'missing' where node_id = 2 and slot < 2")
        rows = await ledger.run(fleet.page_board, pool_id=None, after=0, limit=10)
        assert [(row.name, row.gpus, row.gpus_unhealthy, row.cordoned) for row in rows] == [
            ("node-0", 8, 0, False),
            ("node-1", 8, 2, True),
        ]
        assert [row.gpus_held for row in rows] == [2 + 1 + 2, 0]
        assert [row.name for row in await ledger.run(fleet.page_board, pool_id=1, after=1, limit=10)] == ["node-1"]
        assert await ledger.run(fleet.page_board, pool_id=2, after=0, limit=10) == []
        assert [row.gpus_free for row in rows] == [3, 6]
        states = await ledger.run(fleet.count_states, 1)
        assert states == {"active": 1, "binding": 1, "placed": 1, "queued": 1, "releasing": 1}
        assert await ledger.run(fleet.count_overlaps) == 0
        ledger.execute("alter table allocation drop constraint allocation_one_hold")
        ledger.execute("update allocation set spans = '{[0,)}' where node_id = 1")
        held = ledger.execute("select count(*) from allocation where node_id = 1 and released_at is null")[0][0]
        assert await ledger.run(fleet.count_overlaps) == held * (held - 1) / 2
