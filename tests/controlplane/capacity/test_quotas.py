"""Quotas in booking transactions, on PostgreSQL: the tree, the batch, the race, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from controlplane.capacity import end as ending
from controlplane.capacity.place import Placed
from controlplane.capacity.quota import open_quotas, window_of
from controlplane.db import reservations
from controlplane.db.time import load_now
from controlplane.db.tx import CheckConflict, Tx
from controlplane.model.quotas import QuotaShort
from tests.support import referee
from tests.support.ledgers import open_fleet
from tests.support.quotas import LAB, SIBLING, TEAM, plant, set_quota, used

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controlplane.db.reservations import Reservation
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn


async def test_a_childs_use_counts_in_every_quota_above_it(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        plant(fleet)
        for tenant_id, gpus in ((1, 10), (LAB, 6), (TEAM, 4), (SIBLING, 10)):
            set_quota(fleet, tenant_id, gpus)
        assert (await fleet.reserve(3, tenant_id=TEAM)).state == "binding"
        assert used(fleet) == {1: 3, LAB: 3, TEAM: 3, SIBLING: 0}
        assert (await fleet.reserve(3, tenant_id=LAB)).state == "binding"
        assert used(fleet) == {1: 6, LAB: 6, TEAM: 3, SIBLING: 0}
        # the team has one left of its own, and the lab above it none
        short = await fleet.try_place(await fleet.draft(1, tenant_id=TEAM))
        assert short == QuotaShort("quota quo_2_all of lab: gpus: 1 asked, 6 of 6 in use, 1 short", never=False)
        assert (await fleet.reserve(4, tenant_id=SIBLING)).state == "binding"
        short = await fleet.try_place(await fleet.draft(1, tenant_id=SIBLING))
        assert short == QuotaShort("quota quo_1_all of test: gpus: 1 asked, 10 of 10 in use, 1 short", never=False)
        assert used(fleet) == {1: 10, LAB: 6, TEAM: 3, SIBLING: 4}
        fleet.assert_sound()


async def test_a_projects_quota_counts_that_project_alone(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        plant(fleet)
        fleet.execute("insert into project (public_id, tenant_id, slug, name) values ('prj_a', 2, 'a', '')")
        fleet.execute("insert into project (public_id, tenant_id, slug, name) values ('prj_b', 2, 'b', '')")
        set_quota(fleet, LAB, 4, project_id=1)
        set_quota(fleet, 1, 6)
        assert (await fleet.reserve(3, tenant_id=LAB, project_id=1)).state == "binding"
        assert (await fleet.reserve(2, tenant_id=LAB, project_id=1)).state == "queued"
        assert (await fleet.reserve(2, tenant_id=LAB, project_id=2)).state == "binding"
        assert (await fleet.reserve(1, tenant_id=LAB)).state == "binding"
        assert used(fleet) == {LAB: 3, 1: 6}
        fleet.assert_sound()


async def test_a_quota_of_a_pool_or_of_a_gpu_model_counts_that_alone(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        plant(fleet)
        fleet.execute(
            """
            insert into pool (public_id, site_id, slug, name, kind, gpu_model)
            values ('pool_b200', 1, 'b200', 'B200', 'gpu', 'B200'), ('pool_more', 1, 'more', 'More', 'gpu', 'H100')
            """
        )
        h100, b200, more = 1, 2, 3
        for pool_id in (b200, more):
            fleet.pool_id = pool_id
            fleet.add_node()
        set_quota(fleet, 1, 16)
        set_quota(fleet, LAB, 4, gpu_model="H100")
        set_quota(fleet, TEAM, 4, pool_id=b200)
        for pool_id, gpus, counted in (
            (b200, 3, {1: 3, LAB: 0, TEAM: 3}),
            (h100, 3, {1: 6, LAB: 3, TEAM: 3}),
            (more, 1, {1: 7, LAB: 4, TEAM: 3}),
            (b200, 1, {1: 8, LAB: 4, TEAM: 4}),
        ):
            fleet.pool_id = pool_id
            assert (await fleet.reserve(gpus, tenant_id=TEAM)).state == "binding"
            assert used(fleet) == counted
        for pool_id, short in ((h100, "lab"), (b200, "team"), (more, "lab")):
            fleet.pool_id = pool_id
            refused = await fleet.try_place(await fleet.draft(1, tenant_id=TEAM))
            assert isinstance(refused, QuotaShort)
            assert f"of {short}: gpus: 1 asked, 4 of 4 in use" in refused.detail
        referee.assert_sound(dsn.admin)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that transactions run."""
    sent: list[str] = []
    for name in ("execute", "rows"):
        run = getattr(Tx, name)

        def spy(self: Tx, *args: Any, run: Any = run, **kwargs: Any) -> Any:
            sent.append(str(args))
            return run(self, *args, **kwargs)

        monkeypatch.setattr(Tx, name, spy)
    return sent


async def test_a_batch_of_a_hundred_costs_two_statements(dsn: Dsn, statements: list[str]) -> None:
    async with open_fleet(dsn) as fleet:
        plant(fleet)
        fleet.execute(
            "insert into iam.tenant (public_id, parent_id, slug, name) values ('ten_fifth', 3, 'fifth', 'Fifth')"
        )
        drafts = [await fleet.draft(1, tenant_id=1 + n % 5) for n in range(100)]

        def take_all(tx: Tx) -> int:
            asked = [reservations.lock_reservation(tx, id_) for id_ in drafts]
            rows = [row for row in asked if row is not None]
            now = load_now(tx)
            statements.clear()
            book = open_quotas(tx, rows)
            refused = sum(book.take(row, window_of(row, now)) is not None for row in rows)
            book.write(tx)
            return refused

        assert await fleet.run(take_all) == 0
        assert len(statements) == 1
        for tenant_id, gpus in ((1, 90), (LAB, 40), (TEAM, 30), (SIBLING, None), (5, 15)):
            set_quota(fleet, tenant_id, gpus)
        # the lab is full after 13 rounds of three and one more; the other two tenants get all of theirs
        assert await fleet.run(take_all) == 100 - used(fleet)[1]
        assert len(statements) == 2
        assert used(fleet) == {1: 80, LAB: 40, TEAM: 26, SIBLING: 20, 5: 13}


async def test_racing_tenants_never_pass_the_quota_above_them(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        plant(fleet)
        for tenant_id, gpus in ((1, 11), (LAB, 7), (TEAM, 5), (SIBLING, 9)):
            set_quota(fleet, tenant_id, gpus)
        drafts = [await fleet.draft(1 + n % 3, tenant_id=(LAB, TEAM, SIBLING)[n % 3]) for n in range(18)]
        async with trio.open_nursery() as nursery:
            for reservation_id in drafts:
                nursery.start_soon(fleet.try_place, reservation_id)
        left = {1: 11, LAB: 7, TEAM: 5, SIBLING: 9}
        for tenant_id, gpus in used(fleet).items():
            assert gpus <= left[tenant_id]
        waiting = [id_ for id_ in drafts if (await fleet.load(id_)).state == "draft"]
        assert waiting
        again = [await fleet.try_place(id_) for id_ in waiting]
        assert all(isinstance(outcome, QuotaShort) for outcome in again), "nothing was left unused"
        fleet.assert_sound()


async def _cancelled_while_placed(fleet: LedgerFleet) -> None:
    row = await fleet.reserve(2, tenant_id=TEAM, start_s=3600)
    await cancel(fleet, row)


async def _ended_and_signed(fleet: LedgerFleet) -> None:
    row = await fleet.reserve(2, tenant_id=TEAM)
    await fleet.bound(row)
    await fleet.release(row)
    assert used(fleet) == {1: 2, LAB: 2, TEAM: 2}, "the node has not let go yet"
    await fleet.released(row)


async def _failed_twice(fleet: LedgerFleet) -> None:
    row = await fleet.reserve(2, tenant_id=TEAM)
    await fleet.failed(row)
    await fleet.released(row)
    assert used(fleet) == {1: 0, LAB: 0, TEAM: 0}, "it waits again, and holds no quota"
    row = await fleet.retry_queue(row.reservation_id)
    assert used(fleet) == {1: 2, LAB: 2, TEAM: 2}
    await fleet.failed(row)
    await fleet.released(row)


async def _window_passed(fleet: LedgerFleet) -> None:
    row = await fleet.reserve(2, tenant_id=TEAM, duration_s=60)
    await fleet.bound(row)
    fleet.advance(61)
    row = await fleet.step(row)
    assert row.state == "releasing"
    await fleet.released(row)


async def _lost_its_plan(fleet: LedgerFleet) -> None:
    """The server died between quota and booking: the transaction is gone as a whole."""
    reservation_id = await fleet.draft(2, tenant_id=TEAM)

    def crash(tx: Tx) -> None:
        row = reservations.lock_reservation(tx, reservation_id)
        assert row is not None
        book = open_quotas(tx, [row])
        assert book.take(row, window_of(row, load_now(tx))) is None
        book.write(tx)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await fleet.run(crash)


async def cancel(fleet: LedgerFleet, row: Reservation) -> None:
    def run(tx: Tx) -> None:
        locked = reservations.lock_reservation(tx, row.reservation_id)
        assert locked is not None
        assert ending.cancel(tx, locked, load_now(tx))

    await fleet.run(run)


@pytest.mark.parametrize(
    "end", [_cancelled_while_placed, _ended_and_signed, _failed_twice, _window_passed, _lost_its_plan]
)
async def test_after_any_end_the_counters_are_back(dsn: Dsn, end: Callable[[LedgerFleet], Awaitable[None]]) -> None:
    async with open_fleet(dsn) as fleet:
        plant(fleet)
        for tenant_id in (1, LAB, TEAM):
            set_quota(fleet, tenant_id, 2)
        await end(fleet)
        assert used(fleet) == {1: 0, LAB: 0, TEAM: 0}
        assert fleet.execute("select sum(gpus_used), sum(vcpus_used), sum(memory_mib_used) from quota") == [(0, 0, 0)]
        fleet.assert_sound()
        assert isinstance(await fleet.try_place(await fleet.draft(2, tenant_id=TEAM)), Placed)


async def test_the_database_refuses_growth_beyond_a_maximum_and_nothing_else(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        set_quota(fleet, 1, 4, vcpus_max=8, memory_mib_max=100)
        grow = "update quota set {0}_used = {0}_used + {1}"

        def run(tx: Tx, change: Any) -> None:
            tx.execute(change)

        for name, most in (("gpus", 4), ("vcpus", 8), ("memory_mib", 100)):
            await fleet.run(run, grow.format(name, most))
            with pytest.raises(CheckConflict) as refused:
                await fleet.run(run, grow.format(name, 1))
            assert refused.value.constraint == "quota_used_max"
        await fleet.run(run, "update quota set gpus_max = 1, vcpus_max = 1, memory_mib_max = 1")
        await fleet.run(run, grow.format("gpus", -2))
        with pytest.raises(CheckConflict):
            await fleet.run(run, grow.format("gpus", 1))
