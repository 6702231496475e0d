"""A reservation's life on the ledger: place, bind, activate, end, release, on evidence alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from controlplane.capacity.lifecycle import find_unsettled, step
from controlplane.capacity.place import Contended, Placed
from controlplane.model.evidence import Applied, Refused
from controlplane.model.planner import NoPlan
from controlplane.model.quotas import QuotaShort
from shared.identity import make_key
from shared.signing import NodeSigner
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn


async def test_start_now_is_held_at_once_and_active_on_the_nodes_word(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(4)
        assert reservation.state == "binding"
        (hold,) = await fleet.holds(reservation)
        assert hold.device_uuids == list(fleet.nodes[0].uuids[:4])
        spec = await fleet.spec(fleet.nodes[0])
        assert [a.allocation_id for a in spec.assignments] == [hold.public_id]
        assert spec.assignments[0].device_uuids == hold.device_uuids
        assert await fleet.bound(reservation) == [Applied(news=True)]
        reservation = await fleet.load(reservation.reservation_id)
        assert reservation.state == "active"
        assert await fleet.bound(reservation) == [Applied(news=False)]
        fleet.assert_sound()


async def test_release_waits_for_the_signature_and_returns_everything(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 8)")
        reservation = await fleet.reserve(8)
        await fleet.bound(reservation)
        fleet.advance(60)
        reservation = await fleet.release(reservation)
        assert reservation.state == "releasing"
        spec = await fleet.spec(fleet.nodes[0])
        assert spec.assignments == []
        assert len(spec.tombstones) == 1
        # the plan is free, the hardware is not
        queued = await fleet.reserve(8)
        assert queued.state == "queued"
        assert await fleet.released(reservation) == [Applied(news=True)]
        reservation = await fleet.load(reservation.reservation_id)
        assert (reservation.state, reservation.end_cause) == ("released", "released_by_holder")
        assert (await fleet.spec(fleet.nodes[0])).tombstones == []
        assert fleet.execute("select meter, quantity, upper(during) - lower(during) from usage_window")[0][:2] == (
            "gpu.h100.hours",
            8,
        )
        assert (await fleet.retry_queue(queued.reservation_id)).state == "binding"
        fleet.assert_sound()


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ({"signer": NodeSigner(make_key())}, "unknown_key"),
        ({"node_id": "node_other"}, "names another node"),
        ({"device_uuids": ["GPU-0000-7"]}, "other devices"),
        ({"generation": 0}, "signed for generation"),
        ({"incarnation": 0}, "signed for generation"),
        ({"reservation_id": "rsv_other"}, "names another reservation"),
        ({"allocation_id": "alloc_other"}, "no such allocation"),
    ],
)
async def test_a_forged_binding_changes_nothing(dsn: Dsn, forged: dict[str, object], reason: str) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(1)
        (result,) = await fleet.bound(reservation, **forged)
        assert isinstance(result, Refused)
        assert reason in result.reason
        assert (await fleet.load(reservation.reservation_id)).state == "binding"
        ((decision, why),) = fleet.execute("select decision, reason from audit_event")
        assert decision == "refuse"
        assert reason in why


async def test_another_nodes_key_does_not_bind(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        reservation = await fleet.reserve(1)
        (hold,) = await fleet.holds(reservation)
        other = next(node for node in fleet.nodes if node.node_id != hold.node_id)
        (result,) = await fleet.bound(reservation, signer=other.signer)
        assert isinstance(result, Refused)
        # and the other node saying it in its own name is about its own node
        envelope = await fleet.sign(hold, "allocation_bound", signer=other.signer, node_id=other.public_id)
        assert isinstance(await fleet.deliver(other.node_id, "allocation_bound", envelope), Refused)
        assert (await fleet.load(reservation.reservation_id)).state == "binding"


async def test_a_replayed_envelope_of_an_earlier_hold_binds_nothing(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        first = await fleet.reserve(8)
        (hold,) = await fleet.holds(first)
        old_bound = await fleet.sign(hold, "allocation_bound")
        await fleet.bound(first)
        first = await fleet.release(first)
        old_released = await fleet.sign(hold, "allocation_released")
        await fleet.released(first)
        second = await fleet.reserve(8)
        assert await fleet.deliver(hold.node_id, "allocation_bound", old_bound) == Applied(news=False)
        assert await fleet.deliver(hold.node_id, "allocation_released", old_released) == Applied(news=False)
        assert (await fleet.load(second.reservation_id)).state == "binding"
        fleet.assert_sound()


async def test_nobody_is_believed_about_a_release_that_was_not_asked_for(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(1)
        (early,) = await fleet.released(reservation)
        assert isinstance(early, Refused)
        (hold,) = await fleet.holds(reservation)
        before = await fleet.sign(hold, "allocation_released")
        await fleet.bound(reservation)
        await fleet.release(reservation)
        # signed before the tombstone existed: about something else
        assert isinstance(await fleet.deliver(hold.node_id, "allocation_released", before), Refused)
        assert (await fleet.load(reservation.reservation_id)).state == "releasing"


async def test_a_revoked_node_is_not_believed(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(1)
        fleet.execute("update node_authorization set revoked_at = compute_now()")
        (result,) = await fleet.bound(reservation)
        assert isinstance(result, Refused)
        assert (await fleet.load(reservation.reservation_id)).state == "binding"


async def test_ten_at_once_for_the_last_gpu(dsn: Dsn) -> None:
    async with open_fleet(dsn, gpus=8) as fleet:
        await fleet.reserve(7)
        drafts = [await fleet.draft(1) for _ in range(10)]
        results: list[object] = []

        async def attempt(reservation_id: int) -> None:
            results.append(await fleet.try_place(reservation_id))

        async with trio.open_nursery() as nursery:
            for reservation_id in drafts:
                nursery.start_soon(attempt, reservation_id)
        assert sum(isinstance(result, Placed) for result in results) == 1
        assert sum(isinstance(result, NoPlan) for result in results) == 9
        fleet.assert_sound()


async def test_two_gangs_never_hold_half_each(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        drafts = [await fleet.draft(8, nodes=4) for _ in range(2)]
        results: list[object] = []

        async def attempt(reservation_id: int) -> None:
            results.append(await fleet.try_place(reservation_id))

        async with trio.open_nursery() as nursery:
            for reservation_id in drafts:
                nursery.start_soon(attempt, reservation_id)
        assert sorted(type(result).__name__ for result in results) == ["NoPlan", "Placed"]
        assert fleet.execute("select count(*), count(distinct reservation_id) from allocation") == [(4, 1)]


async def test_a_gang_is_active_only_when_every_node_has_said_so(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        reservation = await fleet.reserve(8, nodes=2)
        first, second = await fleet.holds(reservation)
        await fleet.deliver(first.node_id, "allocation_bound", await fleet.sign(first, "allocation_bound"))
        assert (await fleet.load(reservation.reservation_id)).state == "binding"
        await fleet.deliver(second.node_id, "allocation_bound", await fleet.sign(second, "allocation_bound"))
        assert (await fleet.load(reservation.reservation_id)).state == "active"
        fleet.assert_sound()


async def test_quota_is_taken_by_the_booking_and_says_so(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 4)")
        never = await fleet.try_place(await fleet.draft(5))
        assert never == QuotaShort("quota quo_a of test: gpus: 5 asked, 0 of 4 in use, 1 short", never=True)
        assert (await fleet.reserve(3)).state == "binding"
        full = await fleet.try_place(await fleet.draft(2))
        assert full == QuotaShort("quota quo_a of test: gpus: 2 asked, 3 of 4 in use, 1 short", never=False)
        fleet.assert_sound()


async def test_racing_requests_never_pass_the_quota(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 5)")
        drafts = [await fleet.draft(2) for _ in range(6)]
        async with trio.open_nursery() as nursery:
            for reservation_id in drafts:
                nursery.start_soon(fleet.try_place, reservation_id)
        assert fleet.execute("select gpus_used from quota") == [(4,)]
        fleet.assert_sound()


async def test_a_failed_bind_is_placed_once_more_and_then_ends(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        reservation = await fleet.reserve(8)
        await fleet.failed(reservation)
        reservation = await fleet.load(reservation.reservation_id)
        assert (reservation.state, reservation.end_cause) == ("releasing", "bind_failed")
        await fleet.released(reservation)
        reservation = await fleet.load(reservation.reservation_id)
        assert reservation.state == "queued"
        assert "CDI_WRITE" in reservation.pending_reason
        reservation = await fleet.retry_queue(reservation.reservation_id)
        assert reservation.state == "binding"
        await fleet.failed(reservation)
        await fleet.released(reservation)
        reservation = await fleet.load(reservation.reservation_id)
        assert (reservation.state, reservation.end_cause) == ("released", "bind_failed")
        fleet.assert_sound()


async def test_a_bind_that_is_not_confirmed_ends_by_tombstone(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(1)
        fleet.advance(299)
        assert (await fleet.step(reservation)).state == "binding"
        fleet.advance(2)
        reservation = await fleet.step(reservation)
        assert (reservation.state, reservation.end_cause) == ("releasing", "bind_failed")
        assert len((await fleet.spec(fleet.nodes[0])).tombstones) == 1


@pytest.mark.parametrize(("start_s", "duration_s", "looks_after_s"), [(0, 60, 60), (0, 3600, 300), (60, 45, 45)])
async def test_a_window_shorter_than_the_bind_timeout_ends_in_time(
    dsn: Dsn, start_s: int, duration_s: int, looks_after_s: int
) -> None:
    """Its becoming active wakes nobody, so the look from before must be early enough."""
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(1, start_s=start_s or None, duration_s=duration_s)
        fleet.advance(start_s)
        due = await fleet.run(step, fleet.tools, reservation.reservation_id)
        assert due is not None
        assert (await fleet.load(reservation.reservation_id)).state == "binding"
        assert looks_after_s - 5 < due.total_seconds() <= looks_after_s


async def _outlive(fleet: LedgerFleet, seconds: float) -> None:
    fleet.execute("update node set connectivity = 'unreachable'")
    fleet.advance(seconds)


async def test_an_overrun_keeps_the_next_one_waiting_until_the_node_lets_go(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        first = await fleet.reserve(8, duration_s=3600)
        await fleet.bound(first)
        later = await fleet.reserve(8, start_s=3600, duration_s=3600)
        assert later.state == "placed"
        await _outlive(fleet, 3601)
        first = await fleet.step(first)
        assert (first.state, first.end_cause) == ("releasing", "window_ended")
        fleet.execute("update node set connectivity = 'connected'")
        later = await fleet.step(later)
        assert (later.state, later.conditions) == ("placed", ["waiting_for_release"])
        assert isinstance(await fleet.try_place(await fleet.draft(1)), NoPlan)
        told = fleet.execute(
            "select subject, data->>'condition' from outbox where kind = 'reservation.condition' order by seq"
        )
        assert told == [(later.public_id, "waiting_for_release"), (first.public_id, "overrun")]
        fleet.advance(60)
        assert "overrun" in (await fleet.step(first)).conditions
        await fleet.released(first)
        later = await fleet.step(later)
        assert (later.state, later.conditions) == ("binding", [])
        fleet.assert_sound()


async def test_who_is_in_the_way_is_told_of_it_only_while_nobody_changes_it(dsn: Dsn) -> None:
    """It might be told of an overrun after it was told that it is released."""
    async with open_fleet(dsn) as fleet:
        first = await fleet.reserve(8, duration_s=3600)
        await fleet.bound(first)
        later = await fleet.reserve(8, start_s=3600, duration_s=3600)
        fleet.advance(3601)
        await fleet.step(first)
        with psycopg.connect(dsn.worker) as conn:
            conn.execute("select from reservation where reservation_id = %s for update", (first.reservation_id,))
            with pytest.raises(Contended):
                await fleet.step(later)
        assert (await fleet.load(later.reservation_id)).conditions == []
        later = await fleet.step(later)
        assert later.conditions == ["waiting_for_release"]
        told = fleet.execute(
            "select data->>'in_the_way_of' from outbox where kind = 'reservation.condition' and subject = %s",
            first.public_id,
        )
        assert told == [(later.public_id,)]


async def test_who_is_in_the_way_of_another_tenant_is_not_told_of_whose_reservation(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("insert into iam.tenant (public_id, slug, name) values ('ten_rival', 'rival', 'Rival')")
        first = await fleet.reserve(8, duration_s=3600)
        await fleet.bound(first)
        later = await fleet.reserve(8, start_s=3600, duration_s=3600, tenant_id=2)
        fleet.advance(3601)
        await fleet.step(first)
        assert (await fleet.step(later)).conditions == ["waiting_for_release"]
        (told,) = fleet.execute(
            "select data from outbox where kind = 'reservation.condition' and subject = %s", first.public_id
        )
        assert (told[0]["condition"], told[0]["in_the_way_of"]) == ("overrun", None)
        assert later.public_id not in str(told)


async def test_a_waiting_reservation_moves_where_there_is_room(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        first = await fleet.reserve(8, duration_s=3600)
        await fleet.bound(first)
        later = await fleet.reserve(8, start_s=3600, duration_s=3600)
        fleet.advance(3601)
        await fleet.step(first)
        later = await fleet.step(later)
        assert later.conditions == ["waiting_for_release"]
        fleet.advance(15)
        node = fleet.add_node()
        later = await fleet.step(later)
        later = await fleet.step(later)
        assert later.state == "binding"
        (hold,) = await fleet.holds(later)
        assert hold.node_id == node.node_id
        fleet.assert_sound()


async def test_a_placed_reservation_leaves_a_node_that_is_gone(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        later = await fleet.reserve(8, start_s=3600)
        ((node_id,),) = fleet.execute("select node_id from booking")
        fleet.execute("update node set cordoned = true where node_id = %s", node_id)
        await fleet.step(later)
        ((moved_to,),) = fleet.execute("select node_id from booking")
        assert moved_to != node_id
        fleet.execute("update node set cordoned = true")
        later = await fleet.step(later)
        assert later.conditions == ["impaired"]
        fleet.assert_sound()


async def test_the_end_and_the_next_start_may_be_the_same_instant(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(8, start_s=3600, duration_s=3600)
        assert (await fleet.reserve(8, start_s=7200, duration_s=3600)).state == "placed"
        assert (await fleet.reserve(8, start_s=7199, duration_s=3600)).state == "queued"
        assert (await fleet.reserve(8, duration_s=3600)).state == "binding"
        fleet.assert_sound()


async def test_a_queued_reservation_expires(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(8)
        waiting = await fleet.reserve(8, queue_s=60)
        assert waiting.pending_reason == "needs 8 GPUs on one node; most free on one node: 0"
        fleet.advance(61)
        waiting = await fleet.step(waiting)
        assert waiting.state == "expired"
        assert "most free on one node: 0" in waiting.end_detail


async def test_scalars_are_refused_beyond_what_the_node_has(dsn: Dsn) -> None:
    async with open_fleet(dsn, gpus=0) as fleet:
        assert (await fleet.reserve(0, vcpus=48)).state == "binding"
        full = await fleet.try_place(await fleet.draft(0, vcpus=32))
        assert isinstance(full, NoPlan)
        assert (await fleet.reserve(0, vcpus=16)).state == "binding"
        fleet.assert_sound()


async def test_a_resync_looks_at_what_is_due_forgotten_or_not_well_and_at_nothing_else(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        held = await fleet.reserve(8)
        await fleet.bound(held)
        later = await fleet.reserve(8, start_s=1800, duration_s=None)
        whole = await fleet.reserve(8)
        await fleet.bound(whole)
        waiting = await fleet.reserve(8)
        assert (later.state, waiting.state) == ("placed", "queued")

        async def unsettled() -> list[int]:
            found, more = await fleet.run(find_unsettled, 0, 100)
            assert more is None
            return found

        # later than all of it, but it is there
        fleet.execute("update work_queue set due_at = due_at + interval '1 hour'")
        assert await unsettled() == []
        fleet.execute("delete from work_queue where key = %s", str(held.reservation_id))
        assert await unsettled() == [held.reservation_id]
        fleet.execute("update node set connectivity = 'unreachable' where name = 'node-1'")
        fleet.execute("update device set health = 'missing' where slot = 7 and node_id = 3")
        assert await unsettled() == [held.reservation_id, later.reservation_id, whole.reservation_id]
        assert await fleet.run(find_unsettled, 0, 2) == (
            [held.reservation_id, later.reservation_id],
            later.reservation_id,
        )
        assert (await fleet.step(whole)).conditions == ["impaired"]
        fleet.execute("update node set connectivity = 'connected'")
        fleet.execute("update device set health = 'healthy'")
        assert await unsettled() == [held.reservation_id, whole.reservation_id], "it is well, and said not to be"
        assert (await fleet.step(whole)).conditions == []
        fleet.advance(1800)
        assert await unsettled() == [held.reservation_id, later.reservation_id]
