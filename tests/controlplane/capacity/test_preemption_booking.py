"""Owners get what they are guaranteed: borrowers go whole and few, nodes say when, and nothing is counted twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.capacity import end as ending
from controlplane.capacity.place import Placed
from controlplane.capacity.preempt import preempt_for
from controlplane.db import checks, preemption, reservations
from controlplane.db.time import load_now
from controlplane.model.planner import NoPlan
from controlplane.model.quotas import QuotaShort
from controlplane.queue.outcome import Again, Done
from controlplane.reconcilers.placement import placement_reconciler
from tests.support import referee
from tests.support.ledgers import open_fleet
from tests.support.quotas import LAB, SIBLING, plant, set_quota, used

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

HOUR_S = 3600


def lend(fleet: LedgerFleet, *, root: int = 8, lab: int = 4, sibling: int = 4) -> None:
    """Two tenants below one: the lab is guaranteed its part, and the sibling may have all that is idle."""
    plant(fleet)
    fleet.execute("update pool set preemption = true")
    set_quota(fleet, 1, root)
    set_quota(fleet, LAB, lab)
    set_quota(fleet, SIBLING, sibling, gpus_borrow_max=None)


async def borrow(fleet: LedgerFleet, gpus: int, *, bound: bool = True, **request: int) -> Reservation:
    row = await fleet.reserve(gpus, tenant_id=SIBLING, **request)
    assert row.state in ("binding", "placed")
    if bound and row.state == "binding":
        await fleet.bound(row)
    return await fleet.load(row.reservation_id)


async def preempt(fleet: LedgerFleet, owner: Reservation) -> Sequence[int]:
    return await fleet.run(preempt_for, fleet.tools, owner.reservation_id)


def claims(fleet: LedgerFleet) -> dict[int, int]:
    return dict(fleet.execute("select tenant_id, claims from quota order by quota_id"))


async def assert_no_drift(fleet: LedgerFleet) -> None:
    fleet.assert_sound()
    referee.assert_sound(fleet.owner_dsn)
    for find in (checks.find_quota_drift, checks.find_quota_claims_drift):
        assert await fleet.run(find) == checks.NONE_FOUND


async def test_what_goes_beyond_the_guarantee_is_marked(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        assert (await borrow(fleet, 3)).borrows == 0
        assert (await borrow(fleet, 3)).borrows == 2
        assert (await borrow(fleet, 2)).borrows == 2
        short = await fleet.try_place(await fleet.draft(1, tenant_id=SIBLING))
        assert short == QuotaShort("quota quo_1_all of test: gpus: 1 asked, 8 of 8 in use, 1 short", never=False)
        await assert_no_drift(fleet)


async def test_an_owner_gets_its_guarantee_when_the_node_has_let_go(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        kept, borrowed = await borrow(fleet, 4), await borrow(fleet, 4)
        owner = await fleet.reserve(4, tenant_id=LAB)
        assert owner.pending_reason == "quota quo_1_all of test: gpus: 4 asked, 8 of 8 in use, 4 short"
        assert await fleet.run(preemption.load_waiting_owners, 1, limit=5) == [owner.reservation_id]

        assert await preempt(fleet, owner) == (borrowed.reservation_id,)
        borrowed = await fleet.load(borrowed.reservation_id)
        assert (borrowed.state, borrowed.end_cause) == ("releasing", "preempted")
        # neither may know of the other's reservation
        assert borrowed.end_detail == "borrowed GPUs were asked back by their owner"
        assert borrowed.preempted_for == owner.reservation_id
        assert (await fleet.load(kept.reservation_id)).state == "active"
        owner = await fleet.load(owner.reservation_id)
        reason = "waits for 1 reservation of other tenants to let go"
        assert (owner.state, owner.preempting, owner.pending_reason) == ("queued", True, reason)
        assert claims(fleet) == {1: 1, LAB: 1, SIBLING: 0}
        told = fleet.execute(
            "select tenant_id, subject, kind, data->>'cause', data->>'reason' from outbox order by seq desc limit 3"
        )
        assert set(told) == {
            (SIBLING, borrowed.public_id, "reservation.releasing", "preempted", None),
            (LAB, owner.public_id, "reservation.queued", None, reason),
            (None, owner.public_id, "reservation.preempting", None, None),
        }
        by_tenant = "select string_agg(data::text, ' ') from outbox where tenant_id is not distinct from %s"
        assert borrowed.public_id not in fleet.execute(by_tenant, LAB)[0][0]
        assert owner.public_id not in fleet.execute(by_tenant, SIBLING)[0][0]
        assert borrowed.public_id in fleet.execute(by_tenant, None)[0][0]
        await assert_no_drift(fleet)

        # the machine has not said that it let go: the owner waits, and what it waits for is not lent again
        assert await preempt(fleet, owner) == ()
        owner = await fleet.retry_queue(owner.reservation_id)
        assert (owner.state, owner.pending_reason) == ("queued", reason)
        fleet.execute("update quota set gpus_max = 9 where tenant_id = 1")
        short = await fleet.try_place(await fleet.draft(1, tenant_id=SIBLING))
        assert isinstance(short, QuotaShort)
        assert short.detail.endswith("lends nothing while one of its owners waits for what was borrowed")
        fleet.execute("update quota set gpus_max = 8 where tenant_id = 1")

        await fleet.released(borrowed)
        owner = await fleet.retry_queue(owner.reservation_id)
        assert (owner.state, owner.preempting, owner.borrows) == ("binding", False, 0)
        assert used(fleet) == {1: 8, LAB: 4, SIBLING: 4}
        assert claims(fleet) == {1: 0, LAB: 0, SIBLING: 0}
        await assert_no_drift(fleet)


async def test_a_pass_over_the_queue_makes_room_and_the_next_one_takes_it(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        borrowed = await borrow(fleet, 8)
        owner = await fleet.reserve(4, tenant_id=LAB)
        placement = placement_reconciler(fleet.db, fleet.tools, worker_id="w", max_batch=50)
        assert isinstance(await placement.reconcile("1"), Again)
        assert (await fleet.load(borrowed.reservation_id)).end_cause == "preempted"
        await fleet.released(borrowed)
        assert await placement.reconcile("1") == Done()
        assert (await fleet.load(owner.reservation_id)).state == "binding"
        await assert_no_drift(fleet)


async def test_nobody_goes_where_the_pool_does_not_allow_it(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        await borrow(fleet, 8)
        owner = await fleet.reserve(4, tenant_id=LAB)
        fleet.execute("update pool set preemption = false")
        assert await fleet.run(preemption.load_waiting_owners, 1, limit=5) == []
        assert await preempt(fleet, owner) == ()
        assert not (await fleet.load(owner.reservation_id)).preempting


async def test_nobody_goes_for_more_than_the_guarantee(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        fleet.execute("update quota set gpus_borrow_max = null")
        await borrow(fleet, 4)
        await borrow(fleet, 4)
        owner = await fleet.reserve(5, tenant_id=LAB)
        assert owner.state == "queued"
        assert await preempt(fleet, owner) == ()
        assert claims(fleet) == {1: 0, LAB: 0, SIBLING: 0}


async def test_a_reason_names_those_of_the_owners_own_tenant_alone(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet, lab=9)
        # one project of the lab has borrowed what another is guaranteed
        (guaranteed,), (greedy,) = fleet.execute(
            "insert into project (public_id, tenant_id, slug, name) values"
            " ('prj_a', %s, 'a', 'A'), ('prj_b', %s, 'b', 'B') returning project_id",
            LAB,
            LAB,
        )
        set_quota(fleet, LAB, 7, project_id=guaranteed)
        set_quota(fleet, LAB, 0, project_id=greedy, gpus_borrow_max=None)
        own = [await fleet.reserve(1, tenant_id=LAB, project_id=greedy) for _ in range(2)]
        sibling = await borrow(fleet, 6)
        owner = await fleet.reserve(7, tenant_id=LAB, project_id=guaranteed)
        # six of the sibling's are not enough
        assert set(await preempt(fleet, owner)) == {sibling.reservation_id, own[1].reservation_id}
        reason = (await fleet.load(owner.reservation_id)).pending_reason
        assert reason == f"waits for 2 reservations to let go: {own[1].public_id}, and 1 of other tenants"
        details = {row.tenant_id: (await fleet.load(row.reservation_id)).end_detail for row in (own[1], sibling)}
        assert details[LAB].endswith(f", for {owner.public_id}")
        assert owner.public_id not in details[SIBLING]


async def test_gangs_go_whole_and_only_as_many_as_it_takes(dsn: Dsn) -> None:
    """A member of each would free as much: one gang goes, with all of its members."""
    async with open_fleet(dsn, nodes=4) as fleet:
        lend(fleet, root=32, lab=8, sibling=0)
        gangs = [await borrow(fleet, 2, nodes=4) for _ in range(4)]
        owner = await fleet.reserve(2, tenant_id=LAB, nodes=4)
        assert await preempt(fleet, owner) == (gangs[-1].reservation_id,)
        assert fleet.execute("select state, count(*) from reservation group by 1 order by 1") == [
            ("active", 3),
            ("queued", 1),
            ("releasing", 1),
        ]
        assert fleet.execute("select state, count(*) from allocation group by 1 order by 1") == [
            ("bound", 12),
            ("releasing", 4),
        ]
        await fleet.released(gangs[-1])
        assert (await fleet.retry_queue(owner.reservation_id)).state == "binding"
        await assert_no_drift(fleet)


async def test_the_pools_gpus_are_made_room_in_too(dsn: Dsn) -> None:
    """The quotas have room and the pool has not; only one borrower is on the node that is needed."""
    async with open_fleet(dsn, nodes=2) as fleet:
        lend(fleet, root=100, lab=8, sibling=1)
        small = [await borrow(fleet, 5), await borrow(fleet, 5)]
        assert len({hold.node_id for row in small for hold in await fleet.holds(row)}) == 2
        mixed = await fleet.reserve(3, tenant_id=LAB)
        ((mixed_on,),) = fleet.execute("select node_id from booking where reservation_id = %s", mixed.reservation_id)
        assert isinstance(await fleet.try_place(await fleet.draft(4, tenant_id=LAB)), NoPlan)
        owner = await fleet.reserve(4, tenant_id=LAB)
        (gone,) = await preempt(fleet, owner)
        # 5 GPUs of either are enough: the younger one goes
        assert gone == small[1].reservation_id
        await fleet.released(small[1])
        assert (await fleet.retry_queue(owner.reservation_id)).state == "binding"
        # and for a whole node only the one that is not beside something else
        await fleet.release(owner)
        await fleet.released(owner)
        again = await borrow(fleet, 5)
        ((again_on,),) = fleet.execute("select node_id from booking where reservation_id = %s", again.reservation_id)
        fleet.execute("update quota set gpus_max = 11 where tenant_id = %s", LAB)
        whole = await fleet.reserve(8, tenant_id=LAB)
        assert whole.state == "queued"
        (gone,) = await preempt(fleet, whole)
        alone = again if again_on != mixed_on else small[0]
        assert gone == alone.reservation_id
        await fleet.released(await fleet.load(gone))
        assert (await fleet.retry_queue(whole.reservation_id)).state == "binding"
        await assert_no_drift(fleet)


async def test_one_that_has_not_begun_goes_at_once(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        later = await borrow(fleet, 8, start_s=HOUR_S)
        assert (later.state, later.borrows) == ("placed", 4)
        owner = await fleet.reserve(4, tenant_id=LAB)
        assert await preempt(fleet, owner) == (later.reservation_id,)
        later = await fleet.load(later.reservation_id)
        assert (later.state, later.end_cause) == ("cancelled", "preempted")
        assert (await fleet.retry_queue(owner.reservation_id)).state == "binding"
        await assert_no_drift(fleet)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_an_owner_that_stops_waiting_lets_others_borrow_again(dsn: Dsn, end: str) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        await borrow(fleet, 4)
        borrowed = await borrow(fleet, 4)
        owner = await fleet.reserve(4, tenant_id=LAB, queue_s=60)
        await preempt(fleet, owner)
        await fleet.released(borrowed)
        if end == "expired":
            fleet.advance(61)
            owner = await fleet.step(owner)
        else:

            def cancel(tx: Tx) -> None:
                locked = reservations.lock_reservation(tx, owner.reservation_id)
                assert locked is not None
                assert ending.cancel(tx, locked, load_now(tx))

            await fleet.run(cancel)
            owner = await fleet.load(owner.reservation_id)
        assert (owner.state, owner.preempting) == (end, False)
        assert claims(fleet) == {1: 0, LAB: 0, SIBLING: 0}
        assert (await borrow(fleet, 4)).borrows == 4
        await assert_no_drift(fleet)


async def test_an_owner_that_cannot_be_helped_any_more_gives_up_its_claim(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        borrowed = await borrow(fleet, 8)
        owner = await fleet.reserve(4, tenant_id=LAB)
        await preempt(fleet, owner)
        await fleet.released(borrowed)
        # its GPUs fail before it gets them
        fleet.execute("update device set health = 'unhealthy'")
        assert (await fleet.retry_queue(owner.reservation_id)).state == "queued"
        assert await preempt(fleet, owner) == ()
        owner = await fleet.load(owner.reservation_id)
        assert (owner.state, owner.preempting) == ("queued", False)
        assert claims(fleet) == {1: 0, LAB: 0, SIBLING: 0}
        await assert_no_drift(fleet)


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("rival", [True, False])
async def test_racing_preemptors_never_pass_the_quota(dsn: Dsn, *, bound: bool, rival: bool) -> None:
    """Two owners at once in one tree: whatever interleaves, the sum stays, and both get theirs in the end."""
    async with open_fleet(dsn) as fleet:
        lend(fleet, root=8, lab=4, sibling=2)
        for _ in range(4):
            await borrow(fleet, 2, bound=bound)
        owners = [await fleet.reserve(2, tenant_id=LAB) for _ in range(2)]
        assert [owner.state for owner in owners] == ["queued", "queued"]

        async def insist(owner: Reservation) -> None:
            await preempt(fleet, owner)
            await fleet.retry_queue(owner.reservation_id)

        # a pass passes by what another is changing, so it may take some, and more while a rival comes each time
        for turn in range(20):
            async with trio.open_nursery() as nursery:
                for owner in owners:
                    nursery.start_soon(insist, owner)
                if rival and turn < 10:
                    # may borrow again what is not claimed yet, and is a borrower like the others then
                    nursery.start_soon(fleet.try_place, await fleet.draft(1, tenant_id=SIBLING))
            assert used(fleet)[1] <= 8
            assert used(fleet)[LAB] <= 4
            await assert_no_drift(fleet)
            for (going,) in fleet.execute("select reservation_id from reservation where state = 'releasing'"):
                await fleet.released(await fleet.load(going))
        assert [(await fleet.load(owner.reservation_id)).state for owner in owners] == ["binding", "binding"]
        ((victims,),) = fleet.execute("select count(*) from reservation where end_cause = 'preempted'")
        assert victims == 2 or rival, "one for each of them"
        await assert_no_drift(fleet)


async def test_whoever_is_being_changed_now_is_not_waited_for(dsn: Dsn) -> None:
    """A borrower that its holder is about to release is passed by, so nobody waits for anybody in a circle."""
    async with open_fleet(dsn) as fleet:
        lend(fleet)
        older, younger = await borrow(fleet, 4), await borrow(fleet, 4)
        owner = await fleet.reserve(2, tenant_id=LAB)
        fleet.execute("update quota set gpus_max = 0 where tenant_id = %s", SIBLING)
        fleet.execute("update reservation set borrows = 4 where reservation_id = %s", older.reservation_id)
        locked = trio.Event()
        done = trio.Event()

        def hold(tx: Tx) -> None:
            assert reservations.lock_reservation(tx, younger.reservation_id) is not None
            trio.from_thread.run_sync(locked.set)
            trio.from_thread.run(done.wait)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.run, hold)
            await locked.wait()
            try:
                assert await preempt(fleet, owner) == (older.reservation_id,)
            finally:
                done.set()
        assert isinstance(await fleet.try_place(await fleet.draft(1, tenant_id=SIBLING)), QuotaShort)
        await fleet.released(older)
        assert (await fleet.retry_queue(owner.reservation_id)).state == "binding"
        assert isinstance(await fleet.try_place(await fleet.draft(1, tenant_id=LAB)), Placed)
        await assert_no_drift(fleet)
