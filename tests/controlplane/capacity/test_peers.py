"""What users of other systems complained about, as stories that must end well here: placing and holding.

Each test says the complaint in a sentence, with its tracker id; `docs/explanation/elsewhere.md` has them all, and
which test is whose.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controlplane.capacity import end as ending
from controlplane.capacity.place import Placed, place
from controlplane.db import inbox, reservations
from controlplane.db.time import load_now
from controlplane.db.tx import DatabaseUnavailable, run_transaction
from controlplane.reconcilers.inbox import process_report
from shared.ids import new_id
from tests.support.ledgers import open_fleet
from tests.support.referee import assert_at_rest, assert_sound
from tests.support.witnesses import open_arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.tx import Tx
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn
    from tests.support.witnesses import Arena

H100 = {"pool": "h100", "duration_s": 3600}


async def _ask(arena: Arena, tenant: str = "acme", **wish: Any) -> dict[str, Any]:
    return await arena.api.ok("reservations/create", key=arena.keys[tenant], **{**H100, **wish})


async def _get(arena: Arena, reservation: dict[str, Any]) -> dict[str, Any]:
    return await arena.api.ok("reservations/get", id=reservation["id"])


def _uuids(reservation: dict[str, Any]) -> list[str]:
    return [uuid for part in reservation["parts"] for uuid in part["gpu_uuids"]]


# --- all or nothing ----------------------------------------------------------------------------


async def test_two_gangs_of_a_hundred_on_a_hundred_nodes(dsn: Dsn) -> None:
    """Two jobs of 100 nodes came to a cluster of 100; each got half and waited for ever (volcano-sh/volcano#3373)."""
    async with open_arena(dsn, nodes=100, gpus=8) as arena:
        made: dict[str, dict[str, Any]] = {}

        async def ask(tenant: str) -> None:
            made[tenant] = await _ask(arena, tenant, gpus=800, nodes=100)

        async with trio.open_nursery() as nursery:
            for tenant in arena.keys:
                nursery.start_soon(ask, tenant)
        placed, waiting = sorted(made.values(), key=lambda reservation: reservation["state"])
        assert (placed["state"], waiting["state"]) == ("binding", "queued")
        assert waiting["parts"] == []
        assert "100 nodes" in waiting["pending_reason"], "it says what it waits for"
        held = arena.sql("select count(*), count(distinct reservation_id) from allocation where released_at is null")
        assert held == [(100, 1)]
        assert arena.sql("select count(distinct reservation_id) from booking") == [(1,)]
        assert_sound(dsn.admin)
        # and it was only early, not lost
        await arena.api.ok("reservations/release", id=placed["id"])
        await arena.settle()
        assert (await _get(arena, waiting))["state"] == "active"
        assert_sound(dsn.admin)


async def test_never_fewer_than_asked(dsn: Dsn) -> None:
    """Asked for GPUs that were busy, the scheduler started the job without any (hashicorp/nomad#18364)."""
    async with open_arena(dsn) as arena:
        arena.sql("update device set health = 'missing' where slot = 5")
        refused = await arena.api.call("reservations/create", **H100, gpus=8, queue=False)
        assert refused.code == "SOLD_OUT"
        waiting = await _ask(arena, gpus=8)
        assert (waiting["state"], waiting["parts"]) == ("queued", [])
        whole = await _ask(arena, whole_node=True)
        assert whole["state"] == "queued"
        seven = await _ask(arena, gpus=7)
        await arena.settle()
        seven = await _get(arena, seven)
        assert seven["state"] == "active"
        assert len(set(_uuids(seven))) == 7
        assert_sound(dsn.admin)


async def test_a_gang_of_which_one_node_fails_leaves_nothing_on_the_others(dsn: Dsn) -> None:
    """The start of a lease failed on one of its hosts; the others stayed taken (Blazar LP#1791733, LP#1847821)."""
    async with open_arena(dsn, nodes=3) as arena:
        arena.nodes[1].fails_one_in = 1
        gang = await _ask(arena, gpus=24, nodes=3)
        # the others have bound before it says that it cannot
        for witness in (arena.nodes[0], arena.nodes[2]):
            await trio.to_thread.run_sync(witness.converge, arena.rng)
        await arena.sweep()
        assert sorted(part["state"] for part in (await _get(arena, gang))["parts"]) == ["binding", "bound", "bound"]
        for _ in range(4):
            await arena.settle()
        gang = await _get(arena, gang)
        assert (gang["state"], gang["end_cause"]) == ("released", "bind_failed")
        assert_at_rest(dsn.admin)
        assert all(not witness.held for witness in arena.nodes)
        # all of it can be had again
        arena.nodes[1].fails_one_in = 0
        again = await _ask(arena, gpus=24, nodes=3)
        await arena.settle()
        assert (await _get(arena, again))["state"] == "active"


async def test_a_gang_that_finds_one_node_in_use_holds_none_of_the_others(dsn: Dsn) -> None:
    """A partial activation is rolled back and comes again (the same complaint, at the start of a booked window)."""
    async with open_arena(dsn, nodes=2) as arena:
        first = await _ask(arena, gpus=8, duration_s=600)
        await arena.settle()
        gang = await _ask(arena, gpus=16, nodes=2, start=await arena.at(600), duration_s=600)
        assert gang["state"] == "placed"
        # the first one's node does not let go at the end of its window
        holder = next(node for node in arena.nodes if node.held)
        holder.silent = True
        await arena.leap(601)
        await arena.sweep()
        gang = await _get(arena, gang)
        assert (gang["state"], gang["conditions"]) == ("placed", ["waiting_for_release"])
        assert arena.sql("select distinct reservation_id from allocation where released_at is null") == [(1,)]
        holder.silent = False
        await arena.leap(1)
        await arena.settle()
        assert (await _get(arena, gang))["state"] == "active"
        assert (await _get(arena, first))["state"] == "released"
        assert_sound(dsn.admin)
        assert [breach for node in arena.nodes for breach in node.breaches] == []


# --- many at once ------------------------------------------------------------------------------


async def test_several_pending_ones_confirmed_at_once(dsn: Dsn) -> None:
    """Several reservations were confirmed in one cycle, on the same nodes (openpbs/openpbs PR #2398)."""
    async with open_arena(dsn) as arena:
        first = await _ask(arena, gpus=8)
        pending = [await _ask(arena, gpus=1 + n % 2) for n in range(12)]
        assert {reservation["state"] for reservation in pending} == {"queued"}
        await arena.settle()
        await arena.api.ok("reservations/release", id=first["id"])
        # its node lets go, and nobody has looked at the queue yet
        witness = arena.nodes[0]
        for _ in range(2):
            await trio.to_thread.run_sync(witness.converge, arena.rng)
            for reconciler in arena.reconcilers():
                if reconciler.name == "inbox":
                    await reconciler.reconcile(str(witness.node.node_id))
        # four workers take the queue at once, and others come at the same moment and do not want to wait
        async with trio.open_nursery() as nursery:
            for number in range(4):
                for reconciler in arena.reconcilers(f"worker-{number}"):
                    if reconciler.queue == "pool":
                        nursery.start_soon(reconciler.reconcile, "1")
                nursery.start_soon(partial(arena.api.call, "reservations/create", **H100, gpus=1, queue=False))
        await arena.sweep()
        states = [(await _get(arena, reservation))["state"] for reservation in pending]
        assert set(states) == {"binding", "queued"}
        assert arena.sql("select sum(cardinality(device_uuids)) from allocation where released_at is null") == [(8,)]
        assert_sound(dsn.admin)


# --- linked GPUs -------------------------------------------------------------------------------


def _pair_up(arena: Arena) -> None:
    """GPUs 0-1, 2-3, 4-5 and 6-7 are linked, as the inventory reports it."""
    arena.sql("update device set nvlink_group = slot / 2")


async def test_singles_leave_the_pairs_alone(dsn: Dsn) -> None:
    """Four single GPUs broke all four pairs; a pair was asked for next (NVIDIA/k8s-device-plugin#1193)."""
    async with open_arena(dsn) as arena:
        _pair_up(arena)
        singles = [await _ask(arena, gpus=1) for _ in range(4)]
        assert {single["state"] for single in singles} == {"binding"}
        pair = await _ask(arena, gpus=2)
        groups = arena.sql("select nvlink_group from device where uuid = any(%s)", _uuids(pair))
        assert len(groups) == 2
        assert len(set(groups)) == 1, "the pair is linked though it did not insist"


async def test_what_is_not_linked_is_refused_with_the_reason(dsn: Dsn) -> None:
    """Two GPUs were asked for, two came that have no link (NVIDIA/k8s-device-plugin#546).

    Sets are those of the inventory: 1 and 2 are neighbours and no pair (NVIDIA/kubevirt-gpu-device-plugin PR #195).
    """
    async with open_arena(dsn) as arena:
        _pair_up(arena)
        impossible = await arena.api.call("reservations/create", **H100, gpus=4, topology="nvlink-all")
        assert (impossible.code, impossible.field) == ("IMPOSSIBLE", "topology")
        linked = await _ask(arena, gpus=2, topology="nvlink-all")
        assert len(set(arena.sql("select nvlink_group from device where uuid = any(%s)", _uuids(linked)))) == 1
        # now only one GPU of each pair is healthy: six are free of which no two are linked
        arena.sql("update device set health = 'unhealthy' where slot %% 2 = 0")
        short = await arena.api.call("reservations/create", **H100, gpus=2, topology="nvlink-all", queue=False)
        assert short.code == "SOLD_OUT"
        assert "one NVLink set" in short.message
        assert (await _ask(arena, gpus=2))["state"] == "binding", "who does not insist is served"
        assert_sound(dsn.admin)


# --- the end of things -------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["queued", "placed", "binding", "active", "releasing"])
async def test_a_cancel_at_every_step_ends_free(dsn: Dsn, state: str) -> None:
    """Ctrl-C while it was being provisioned left an instance busy for ever (dstackai/dstack#2068)."""
    async with open_arena(dsn) as arena:
        await arena.api.ok("quotas/create", tenant="acme", gpus_max=16)
        in_the_way = [await _ask(arena, "rival", gpus=8)] if state == "queued" else []
        start = {"start": await arena.at(600)} if state == "placed" else {}
        reservation = await _ask(arena, gpus=8, **start)
        if state in ("active", "releasing"):
            await arena.settle()
        if state == "releasing":
            await arena.api.ok("reservations/release", id=reservation["id"])
        assert (await _get(arena, reservation))["state"] == state
        await arena.api.ok("reservations/release", id=reservation["id"])
        for blocker in in_the_way:
            await arena.api.ok("reservations/release", id=blocker["id"])
        await arena.settle()
        ended = await _get(arena, reservation)
        assert (ended["state"], ended["end_cause"]) == (
            ("cancelled", "cancelled") if state in ("queued", "placed") else ("released", "released_by_holder")
        )
        assert_at_rest(dsn.admin)
        assert (await _ask(arena, gpus=8))["state"] == "binding"


# --- cut off at every statement ----------------------------------------------------------------


def _run_cut_at(dsn: Dsn, statement: int, fn: Callable[[Tx], object]) -> bool:
    """Run a transaction whose session is ended before its n-th statement; whether it had so many."""
    seen = 0
    with psycopg.connect(dsn.worker, autocommit=True) as conn, psycopg.connect(dsn.admin, autocommit=True) as admin:

        def check() -> None:
            nonlocal seen
            seen += 1
            if seen == statement:
                admin.execute("select pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))

        try:
            run_transaction(conn, fn, check=check, rng=None, on_retry=lambda: None)  # pyright: ignore[reportArgumentType] - nothing is retried
        except DatabaseUnavailable:
            return True
    return False


def _counts(fleet: LedgerFleet) -> list[tuple[Any, ...]]:
    return fleet.execute(
        """
        select (select count(*) from booking), (select count(*) from booking_history), (select count(*) from outbox),
               (select count(*) from allocation), (select jsonb_agg(r order by reservation_id) from reservation r),
               (select jsonb_agg(q) from quota q), (select jsonb_agg(c order by node_id) from node_capacity c),
               (select jsonb_agg(generation order by node_id) from node_spec),
               (select jsonb_agg(state order by allocation_id) from allocation)
        """
    )


async def test_a_crash_at_any_statement_leaves_nothing_behind(dsn: Dsn) -> None:
    """A crash between reserving and using left rows behind until the quota was full (apache/cloudstack PR #9169).

    (And a terminal job with no time of its freeing: lablup/backend.ai PR #10867.)
    """
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 64)")
        reservation_id = await fleet.draft(8, nodes=2, vcpus=4)

        def admit(tx: Tx) -> None:
            reservation = reservations.lock_reservation(tx, reservation_id)
            assert reservation is not None
            assert isinstance(place(tx, fleet.tools, reservation, load_now(tx)), Placed)

        def end(tx: Tx) -> None:
            reservation = reservations.lock_reservation(tx, reservation_id)
            assert reservation is not None
            assert ending.end(tx, fleet.tools, reservation, load_now(tx), cause="released_by_holder")

        await _cut_everywhere(dsn, fleet, admit)
        reservation = await fleet.load(reservation_id)
        for hold in await fleet.holds(reservation):
            await _cut_everywhere(dsn, fleet, await _report(fleet, hold, "allocation_bound"))
        assert (await fleet.load(reservation_id)).state == "active"
        fleet.advance(60)
        await _cut_everywhere(dsn, fleet, end)
        for hold in await fleet.holds(reservation):
            await _cut_everywhere(dsn, fleet, await _report(fleet, hold, "allocation_released"))
        assert (await fleet.load(reservation_id)).state == "released"
        assert_at_rest(dsn.admin)


async def _report(fleet: LedgerFleet, hold: Any, kind: str) -> Callable[[Tx], object]:
    envelope = await fleet.sign(hold, kind)
    await fleet.run(inbox.insert_reports, [inbox.NewReport(hold.node_id, 1, kind, new_id("req"), envelope)])
    (stored,) = await fleet.run(inbox.load_reports, hold.node_id, limit=2)

    def process(tx: Tx) -> object:
        return process_report(tx, fleet.tools, stored)

    return process


async def _cut_everywhere(dsn: Dsn, fleet: LedgerFleet, fn: Callable[[Tx], object]) -> None:
    """Cut a transaction at its first statement, its second, and so on, until one gets through."""
    before = _counts(fleet)
    statement = 1
    while await trio.to_thread.run_sync(_run_cut_at, dsn, statement, fn):
        assert _counts(fleet) == before, f"cut at statement {statement}"
        statement += 1
    assert statement > 5, "it was cut, and more than once"
    assert _counts(fleet) != before
    assert_sound(dsn.admin)
