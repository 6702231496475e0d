"""The queue of a pool: turns, places that are kept, and who may go before."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from controlplane.capacity import batch
from controlplane.db import reservations, waiting
from controlplane.db.tx import Contention
from controlplane.queue.outcome import Again, Done
from controlplane.reconcilers.placement import placement_reconciler
from tests.support.ledgers import START, LedgerFleet, open_fleet

if TYPE_CHECKING:
    from typing import Any

    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn

HOUR = 3600


async def queue(fleet: LedgerFleet, gpus: int, *, priority: int = 0, **request: Any) -> int:
    reservation_id = await fleet.draft(gpus, **request)
    assert await fleet.run(reservations.mark_queued, reservation_id, "draft", reason="")
    assert await fleet.run(waiting.set_priority, reservation_id, priority)
    return reservation_id


async def run_pass(fleet: LedgerFleet, max_batch: int = 100) -> None:
    await placement_reconciler(fleet.db, fleet.tools, worker_id="one", max_batch=max_batch).reconcile("1")


async def states(fleet: LedgerFleet, *ids: int) -> list[str]:
    return [(await fleet.load(reservation_id)).state for reservation_id in ids]


def hours(number: float) -> timedelta:
    return timedelta(hours=number)


async def test_a_pass_that_ends_before_the_queue_is_followed_by_another(dsn: Dsn, monkeypatch: Any) -> None:
    """Everybody that it looked at was placed, so nothing but the pass itself can tell that others wait."""
    async with open_fleet(dsn, nodes=2) as fleet:
        ids = [await queue(fleet, 4) for _ in range(4)]
        reconciler = placement_reconciler(fleet.db, fleet.tools, worker_id="one", max_batch=1)
        with monkeypatch.context() as patch:
            patch.setattr("controlplane.reconcilers.placement.PASS_S", -1.0)
            assert await reconciler.reconcile("1") == Again(0.0)
        with monkeypatch.context() as patch:
            patch.setattr("controlplane.reconcilers.placement.LOOKED_AT_MAX", 2)
            assert await reconciler.reconcile("1") == Again(0.0)
        assert await states(fleet, *ids) == ["binding"] * 3 + ["queued"]
        assert await reconciler.reconcile("1") == Done()
        assert await states(fleet, *ids) == ["binding"] * 4


async def test_a_small_one_goes_before_if_it_delays_nobody_ahead(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await fleet.reserve(4, duration_s=2 * HOUR)
        large = await queue(fleet, 8, duration_s=HOUR)
        long, short = await queue(fleet, 4, duration_s=3 * HOUR), await queue(fleet, 4, duration_s=2 * HOUR)
        await run_pass(fleet)
        assert await states(fleet, large, long, short) == ["queued", "queued", "binding"]
        assert (await fleet.load(large)).estimated_start == START + hours(2)
        waiting = await fleet.load(long)
        assert waiting.estimated_start == START + hours(3), "when the large one is over"
        assert waiting.pending_reason.endswith("; 1 ahead in the queue")
        fleet.assert_sound()


async def test_an_open_ended_one_never_goes_before(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await fleet.reserve(4, duration_s=2 * HOUR)
        large, endless = await queue(fleet, 8, duration_s=HOUR), await queue(fleet, 4, duration_s=None)
        await run_pass(fleet)
        assert await states(fleet, large, endless) == ["queued", "queued"]


async def test_several_holes_are_filled_once_each(dsn: Dsn) -> None:
    """oar-team/oar3#61: with several holes to fill, one was filled twice."""
    async with open_fleet(dsn, nodes=3) as fleet:
        for gpus in (6, 5, 4):
            await fleet.reserve(gpus, duration_s=2 * HOUR)
        large = await queue(fleet, 8, nodes=3, duration_s=HOUR)
        small = [await queue(fleet, gpus, duration_s=HOUR) for gpus in (4, 3, 2, 2, 3, 1)]
        await run_pass(fleet)
        assert await states(fleet, large, *small) == ["queued", *["binding"] * 3, "queued", "queued", "queued"]
        assert (await fleet.load(large)).estimated_start == START + hours(2)
        fleet.assert_sound()


async def test_places_are_kept_from_one_batch_of_a_pass_to_the_next(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await fleet.reserve(4, duration_s=2 * HOUR)
        large, long = await queue(fleet, 8, duration_s=HOUR), await queue(fleet, 4, duration_s=3 * HOUR)
        await run_pass(fleet, max_batch=1)
        assert await states(fleet, large, long) == ["queued", "queued"]


async def test_a_place_is_kept_once_however_often_its_batch_is_tried(dsn: Dsn, monkeypatch: Any) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await fleet.reserve(4, duration_s=2 * HOUR)
        large = await queue(fleet, 8, duration_s=HOUR)
        commit_all, attempts = batch.commit_all, list[int]()

        def lose_twice(tx: Tx, *args: Any, **named: Any) -> Any:
            attempts.append(1)
            if len(attempts) < 3:
                raise Contention("somebody was faster")
            return commit_all(tx, *args, **named)

        monkeypatch.setattr(batch, "commit_all", lose_twice)
        await run_pass(fleet)
        assert len(attempts) == 3
        waiting = await fleet.load(large)
        assert waiting.estimated_start == START + hours(2)
        assert "ahead" not in waiting.pending_reason


async def test_a_kept_place_is_gone_with_the_pass(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await fleet.reserve(4, duration_s=2 * HOUR)
        large = await queue(fleet, 8, duration_s=HOUR)
        await run_pass(fleet)
        fleet.execute("update reservation set state = 'cancelled', ended_at = compute_now() where state = 'queued'")
        assert (await fleet.reserve(4, duration_s=None)).state == "binding"
        assert await states(fleet, large) == ["cancelled"]


async def test_priority_decides_who_is_looked_at_first(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        low, high = await queue(fleet, 8, priority=-1), await queue(fleet, 8, priority=10)
        await run_pass(fleet)
        assert await states(fleet, low, high) == ["queued", "binding"]


async def test_a_tenant_that_holds_nothing_goes_before_one_that_holds_half(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("insert into iam.tenant (public_id, slug, name) values ('ten_other', 'other', 'Other')")
        await fleet.reserve(8)
        mine = [await queue(fleet, 8), await queue(fleet, 8)]
        theirs = await queue(fleet, 8, tenant_id=2)
        await run_pass(fleet)
        assert await states(fleet, *mine, theirs) == ["queued", "queued", "binding"]


async def test_a_tenant_with_more_than_a_pass_looks_at_keeps_nobody_out(dsn: Dsn, monkeypatch: Any) -> None:
    monkeypatch.setattr("controlplane.reconcilers.placement.LOOKED_AT_MAX", 3)
    async with open_fleet(dsn, nodes=1) as fleet:
        fleet.execute("insert into iam.tenant (public_id, slug, name) values ('ten_other', 'other', 'Other')")
        await fleet.reserve(6)
        mine = [await queue(fleet, 4) for _ in range(4)]
        theirs = [await queue(fleet, 2, tenant_id=2), await queue(fleet, 2, tenant_id=2)]
        urgent = await queue(fleet, 4, priority=1)
        await run_pass(fleet)
        assert await states(fleet, *mine, urgent, *theirs) == ["queued"] * 5 + ["binding", "queued"]
        # the urgent one, the first of each tenant, and nobody else
        looked_at = [id_ for id_ in (*mine, urgent) if (await fleet.load(id_)).estimated_start is not None]
        assert looked_at == [mine[0], urgent]


async def test_nobody_passes_gangs_whose_places_are_not_looked_for(dsn: Dsn, monkeypatch: Any) -> None:
    monkeypatch.setattr("controlplane.model.queueing.GANGS_LOOKED_FOR_MAX", 2)
    async with open_fleet(dsn, nodes=2) as fleet:
        await fleet.reserve(4, duration_s=2 * HOUR)
        ids = [await queue(fleet, 8, nodes=2, duration_s=HOUR) for _ in range(3)]
        small = await queue(fleet, 1, duration_s=HOUR)
        await run_pass(fleet)
        assert await states(fleet, *ids, small) == ["queued"] * 4
        assert (await fleet.load(small)).pending_reason == (
            "waits behind the first 2 gangs of its tenant that cannot start yet"
        )


async def test_whoever_is_behind_the_last_gang_that_keeps_a_place_may_start(dsn: Dsn, monkeypatch: Any) -> None:
    monkeypatch.setattr("controlplane.model.queueing.GANGS_LOOKED_FOR_MAX", 2)
    async with open_fleet(dsn, nodes=2) as fleet:
        await fleet.reserve(4, duration_s=2 * HOUR)
        gangs = [await queue(fleet, 8, nodes=2, duration_s=HOUR) for _ in range(2)]
        short, long = await queue(fleet, 1, duration_s=HOUR), await queue(fleet, 1, duration_s=3 * HOUR)
        await run_pass(fleet)
        assert await states(fleet, *gangs, short, long) == ["queued", "queued", "binding", "queued"]


async def open_crowd(fleet: LedgerFleet) -> list[int]:
    """A tenant that holds all but one node, which is free, and one with less: 17 gangs of two nodes, all before it.

    One node is free again in two hours. Then eight of the gangs fit on the two of them, and in three hours the next.
    """
    fleet.execute("insert into iam.tenant (public_id, slug, name) values ('ten_other', 'other', 'Other')")
    for duration_s in (2 * HOUR, *[None] * 5):
        assert (await fleet.reserve(8, duration_s=duration_s, tenant_id=2)).state == "binding"
    return [await queue(fleet, 1, nodes=2, duration_s=HOUR) for _ in range(17)]


async def test_the_gangs_of_one_tenant_do_not_keep_those_of_others_from_what_is_free(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=7) as fleet:
        gangs = await open_crowd(fleet)
        long, short = [await queue(fleet, 1, duration_s=hours * HOUR, tenant_id=2) for hours in (3, 2)]
        behind = await queue(fleet, 1, duration_s=HOUR, tenant_id=2, priority=-1)
        own = await queue(fleet, 1, duration_s=HOUR)
        # also from one batch of the pass to the next
        await run_pass(fleet, max_batch=7)
        starts = [(await fleet.load(gang)).estimated_start for gang in gangs]
        assert starts == [*[START + hours(2)] * 8, *[START + hours(3)] * 8, None]
        assert await states(fleet, *gangs) == ["queued"] * 17
        # the long one would be in the way of the first eight, and the others would pass a gang that has no place
        assert await states(fleet, long, short, behind, own) == ["queued", "binding", "queued", "queued"]
        assert (await fleet.load(long)).estimated_start == START + hours(4)
        assert (await fleet.load(own)).pending_reason.startswith("waits behind the first 16 gangs of its tenant")
        assert (await fleet.load(behind)).pending_reason.startswith("waits behind gangs that cannot start yet")
        fleet.assert_sound()


async def test_tenants_share_the_gangs_that_keep_places(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=7) as fleet:
        gangs = await open_crowd(fleet)
        theirs = await queue(fleet, 1, nodes=2, duration_s=HOUR, tenant_id=2)
        await run_pass(fleet)
        starts = [(await fleet.load(gang)).estimated_start for gang in (*gangs, theirs)]
        assert starts == [*[START + hours(2)] * 8, *[None] * 9, START + hours(3)]
        fleet.assert_sound()


async def test_a_tenant_is_passed_over_only_until_its_batch_is_tried_again(dsn: Dsn, monkeypatch: Any) -> None:
    commit_all, attempts = batch.commit_all, list[int]()

    def lose_once(tx: Tx, *args: Any, **named: Any) -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise Contention("somebody was faster")
        return commit_all(tx, *args, **named)

    async with open_fleet(dsn, nodes=7) as fleet:
        gangs = await open_crowd(fleet)
        monkeypatch.setattr(batch, "commit_all", lose_once)
        await run_pass(fleet)
        assert len(attempts) == 2
        assert (await fleet.load(gangs[15])).estimated_start == START + hours(3)


async def test_a_flood_of_shapes_costs_a_pass_no_more_than_some_looks(dsn: Dsn, monkeypatch: Any) -> None:
    """A tenant queued 150 shapes on 10,000 nodes, and every batch took longer than its transaction may."""
    monkeypatch.setattr("controlplane.capacity.indexes.NODES_LOOKED_AT_MAX", 4)
    async with open_fleet(dsn, nodes=2) as fleet:
        await fleet.reserve(8, duration_s=HOUR)
        await fleet.reserve(7, duration_s=HOUR)
        flood = [await queue(fleet, 8, vcpus=vcpus, duration_s=HOUR) for vcpus in (1, 1, 2, 3, 4)]
        small = await queue(fleet, 1, duration_s=10 * HOUR)
        await run_pass(fleet)
        starts = [(await fleet.load(reservation_id)).estimated_start for reservation_id in flood]
        assert starts == [START + hours(1), START + hours(1), START + hours(2), None, None]
        # as it might for whoever waits for an end that is not known
        assert await states(fleet, small) == ["queued"]
        assert (await fleet.load(small)).estimated_start is None
        fleet.assert_sound()


async def test_planning_ends_in_time_and_nobody_passes_who_had_no_turn(dsn: Dsn, monkeypatch: Any) -> None:
    monkeypatch.setattr("controlplane.capacity.indexes.PLANNING_S", -1.0)
    async with open_fleet(dsn, nodes=1) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 8)")
        ids = [await queue(fleet, 1, vcpus=vcpus, duration_s=HOUR) for vcpus in (1, 2, 3, 4, 5)]
        placed: list[list[str]] = []
        for _ in range(3):
            await run_pass(fleet, max_batch=2)
            placed.append(await states(fleet, *ids))
            fleet.assert_sound()
        for number, seen in enumerate(placed):
            # in their order, at least one in a pass
            count = seen.count("binding")
            assert count > number
            assert seen == ["binding"] * count + ["queued"] * (5 - count)


async def test_many_places_are_kept_one_after_another(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        for gpus in (8, 8):
            await fleet.reserve(gpus, duration_s=HOUR)
        ids = [await queue(fleet, 8, duration_s=HOUR) for _ in range(6)]
        await run_pass(fleet, max_batch=4)
        starts = [(await fleet.load(reservation_id)).estimated_start for reservation_id in ids]
        assert starts == [START + hours(number) for number in (1, 1, 2, 2, 3, 3)]
        # let go of, and found again
        fleet.tools.indexes.end_pass(fleet.pool_id)
        await run_pass(fleet)
        assert [(await fleet.load(reservation_id)).estimated_start for reservation_id in ids] == starts


async def test_what_has_no_known_start_keeps_nobody_waiting(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await fleet.reserve(4, duration_s=None)
        large, small = await queue(fleet, 8, duration_s=HOUR), await queue(fleet, 2, duration_s=None)
        await run_pass(fleet)
        assert await states(fleet, large, small) == ["queued", "binding"]
        assert (await fleet.load(large)).estimated_start is None
