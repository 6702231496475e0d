"""Maintenance: nobody is placed over it, nobody is cut by it, holders are told, the cordon comes and goes with it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controlplane.capacity import windows
from controlplane.capacity.place import Placed
from controlplane.db import maintenance as db
from controlplane.db import nodes, reservations
from controlplane.db.time import load_now
from controlplane.errors import Conflict, Invalid, SoldOut
from controlplane.fleet import maintenance, retire
from tests.controlplane.capacity.test_repair import active, booked_on, break_gpus
from tests.controlplane.capacity.test_replace import repair
from tests.support.ledgers import START, open_fleet

if TYPE_CHECKING:
    from controlplane.db.maintenance import Maintenance
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

HOUR = 3600


async def plan(
    fleet: LedgerFleet,
    *,
    on: list[int] | None = None,
    start_s: float = 0,
    hours: float = 1,
    at_once: int | None = None,
    earliest: bool = False,
) -> list[Maintenance]:
    """Plan on nodes by their number in the fleet, all if not given; `start_s` counts from its now."""
    chosen = fleet.nodes if on is None else [fleet.nodes[number] for number in on]

    def run(tx: Tx) -> list[Maintenance | None]:
        asked = maintenance.Asked(
            nodes=[(node.node_id, f"node-{fleet.nodes.index(node)}") for node in chosen],
            start=load_now(tx) + timedelta(seconds=start_s),
            length=timedelta(hours=hours),
            at_once=at_once,
            earliest=earliest,
            reason="new fans",
            created_by="usr_op",
        )
        return [db.load_maintenance(tx, made) for made in maintenance.plan(tx, fleet.tools.ids, asked)]

    return [row for row in await fleet.run(run) if row is not None]


async def step(fleet: LedgerFleet, row: Maintenance) -> Maintenance:
    def run(tx: Tx) -> Maintenance | None:
        maintenance.step(tx, row.maintenance_id, load_now(tx))
        return db.load_maintenance(tx, row.maintenance_id)

    found = await fleet.run(run)
    assert found is not None
    return found


async def cancel(fleet: LedgerFleet, row: Maintenance) -> None:
    await fleet.run(lambda tx: maintenance.cancel(tx, row, load_now(tx)))


def cordon_of(fleet: LedgerFleet, number: int = 0) -> tuple[bool, str]:
    ((cordoned, reason),) = fleet.execute(
        "select cordoned, cordon_reason from node where node_id = %s", fleet.nodes[number].node_id
    )
    return cordoned, reason


def kinds(fleet: LedgerFleet, like: str) -> list[str]:
    return [kind for (kind,) in fleet.execute("select kind from outbox where kind like %s order by seq", like)]


def after(hours: float) -> Any:
    return START + timedelta(hours=hours)


async def conditions(fleet: LedgerFleet, reservation: Reservation) -> list[str]:
    return (await fleet.load(reservation.reservation_id)).conditions


@pytest.mark.parametrize("gpus", [8, 0])
async def test_nothing_is_placed_over_a_window_and_everything_beside_it(dsn: Dsn, gpus: int) -> None:
    async with open_fleet(dsn, gpus=gpus) as fleet:
        amount: dict[str, Any] = {} if gpus else {"vcpus": 1}
        one = min(gpus, 1)
        (row,) = await plan(fleet, start_s=2 * HOUR)
        assert (row.state, row.start, row.end) == ("planned", after(2), after(3))
        for start_s, duration_s in (
            (2 * HOUR, HOUR),
            (HOUR, HOUR + 1),
            (3 * HOUR - 1, HOUR),
            (None, None),
            (None, 2 * HOUR + 1),
        ):
            taken = await fleet.reserve(one, start_s=start_s, duration_s=duration_s, **amount)
            assert taken.state == "queued", (start_s, duration_s)
        assert (await fleet.reserve(one, start_s=HOUR, duration_s=HOUR, **amount)).state == "placed"
        assert (await fleet.reserve(one, start_s=3 * HOUR, duration_s=HOUR, **amount)).state == "placed"
        assert (await fleet.reserve(one, duration_s=2 * HOUR, **amount)).state == "binding"
        fleet.assert_sound()


async def test_who_is_placed_after_the_plan_ends_before_the_window_and_has_nothing_to_be_told(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (row,) = await plan(fleet, start_s=2 * HOUR)
        waits = await fleet.reserve(4, duration_s=2 * HOUR + 1)
        until = await fleet.reserve(4, duration_s=2 * HOUR)
        assert (until.state, until.window_end, until.conditions) == ("binding", row.start, [])
        # nor is the one before it placed over it from the queue
        waits = await fleet.retry_queue(waits.reservation_id)
        assert (waits.state, waits.estimated_start) == ("queued", row.end)


async def test_a_replacement_is_not_placed_over_a_window(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        (row,) = await plan(fleet, on=[0], start_s=2 * HOUR)
        over = await active(fleet, 4, duration_s=3 * HOUR)
        assert booked_on(fleet, over) == ["node-1"]
        break_gpus(fleet, *fleet.nodes[1].uuids)
        with pytest.raises(SoldOut):
            await repair(fleet, over)
        await cancel(fleet, row)
        await repair(fleet, over)
        assert "node-0" in booked_on(fleet, over)


async def test_a_time_that_is_booked_is_refused_with_the_first_that_is_free(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        running = await fleet.reserve(8, duration_s=2 * HOUR)
        await fleet.reserve(1, start_s=3 * HOUR, duration_s=HOUR)
        with pytest.raises(Conflict) as refused:
            await plan(fleet, start_s=HOUR, hours=2)
        assert refused.value.field == "start"
        assert refused.value.message == (
            f"start: node-0 is booked by {running.public_id} then; it is free from 2030-01-01T04:00:00Z on,"
            " which `earliest` takes"
        )
        assert fleet.execute("select count(*) from maintenance") == [(0,)]
        (row,) = await plan(fleet, start_s=HOUR, hours=2, earliest=True)
        assert row.start == after(4)
        (short,) = await plan(fleet, start_s=HOUR, hours=1, earliest=True)
        assert short.start == after(2), "an hour fits between the two"
        fleet.assert_sound()


async def test_a_holder_without_an_end_has_to_be_asked_first(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        endless = await fleet.reserve(1, duration_s=None)
        with pytest.raises(Conflict, match=f"without an end by {endless.public_id}; shrink or evict that first"):
            await plan(fleet, start_s=HOUR, earliest=True)


async def test_holders_are_told_and_cannot_extend_into_it(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        gang = await fleet.reserve(8, nodes=2, duration_s=HOUR)
        after_it = await fleet.reserve(1, start_s=4 * HOUR, duration_s=HOUR)
        ((on,),) = fleet.execute("select node_id from booking where reservation_id = %s", after_it.reservation_id)
        number = next(i for i, node in enumerate(fleet.nodes) if node.node_id == on)
        (row,) = await plan(fleet, on=[number], start_s=2 * HOUR, hours=2)
        assert await conditions(fleet, gang) == ["maintenance_planned"]
        assert await conditions(fleet, after_it) == []
        ((data,),) = fleet.execute(
            "select data from outbox where kind = 'reservation.maintenance_planned' and tenant_id = 1"
        )
        assert data["maintenance"] == row.public_id
        assert (data["node"], data["reason"]) == (f"node-{number}", "new fans")
        assert data["maintenance_start"] == after(2).isoformat()

        def extend(tx: Tx) -> None:
            held = reservations.lock_reservation(tx, gang.reservation_id)
            assert held is not None
            windows.extend(tx, fleet.tools, held, after(2.5), load_now(tx))

        with pytest.raises(Conflict, match="others' from 2030-01-01T02:00:00Z on"):
            await fleet.run(extend)
        await cancel(fleet, row)
        assert await conditions(fleet, gang) == []
        await fleet.run(extend)
        fleet.assert_sound()


async def test_one_of_two_windows_goes_and_the_holder_still_knows_of_the_other(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        held = await fleet.reserve(1, duration_s=HOUR)
        (first,) = await plan(fleet, start_s=2 * HOUR)
        (second,) = await plan(fleet, start_s=5 * HOUR)
        assert await conditions(fleet, held) == ["maintenance_planned"]
        await cancel(fleet, first)
        assert await conditions(fleet, held) == ["maintenance_planned"]
        await cancel(fleet, second)
        assert await conditions(fleet, held) == []
        assert fleet.execute("select count(*) from booking where purpose = 'maintenance'") == [(0,)]
        assert fleet.execute("select state, booking_id from maintenance") == [("cancelled", None)] * 2


async def test_the_node_is_cordoned_from_the_start_to_the_end(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (row,) = await plan(fleet, start_s=HOUR, hours=2)
        fleet.advance(HOUR - 1)
        assert (await step(fleet, row)).state == "planned"
        assert cordon_of(fleet) == (False, "")
        fleet.advance(1)
        assert (await step(fleet, row)).state == "open"
        assert cordon_of(fleet) == (True, "maintenance: new fans")
        fleet.advance(2 * HOUR - 1)
        assert (await step(fleet, row)).state == "open"
        fleet.advance(1)
        assert (await step(fleet, row)).state == "done"
        assert cordon_of(fleet) == (False, "")
        assert kinds(fleet, "node.%") == [
            "node.cordoned",
            "node.maintenance_started",
            "node.maintenance_ended",
            "node.uncordoned",
        ]
        history = fleet.execute("select purpose, lower(during), upper(during) from booking_history")
        assert history == [("maintenance", after(1), after(3))]
        assert fleet.execute("select key from work_queue where queue = 'pool'") == [("1",)]
        assert (await step(fleet, row)).state == "done"


async def test_who_begins_after_the_window_is_neither_moved_nor_impaired(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        later = await fleet.reserve(8, start_s=3 * HOUR, duration_s=HOUR)
        fleet.add_node()
        (row,) = await plan(fleet, on=[0], start_s=HOUR, hours=2)
        fleet.advance(HOUR)
        await step(fleet, row)
        # it is rebooted, and a GPU is out
        fleet.execute("update node set connectivity = 'unreachable' where node_id = %s", fleet.nodes[0].node_id)
        fleet.execute("update device set health = 'missing' where slot = 3 and node_id = %s", fleet.nodes[0].node_id)
        later = await fleet.step(later)
        assert later.conditions == []
        where = "select node_id from booking where reservation_id = %s"
        assert fleet.execute(where, later.reservation_id) == [(fleet.nodes[0].node_id,)]
        # what takes longer than until then is a reason to move
        fleet.advance(2 * HOUR)
        await step(fleet, row)
        await fleet.step(later)
        assert fleet.execute(where, later.reservation_id) == [(fleet.nodes[1].node_id,)]


async def test_a_cordon_of_somebody_else_stays(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.execute("update node set cordoned = true, cordon_reason = 'noise'")
        (row,) = await plan(fleet)
        await step(fleet, row)
        fleet.advance(HOUR)
        assert (await step(fleet, row)).state == "done"
        assert cordon_of(fleet) == (True, "noise")


@pytest.mark.parametrize("first_ends_first", [True, False])
async def test_windows_that_touch_keep_the_node_cordoned_in_between(dsn: Dsn, first_ends_first: bool) -> None:  # noqa: FBT001
    async with open_fleet(dsn) as fleet:
        (first,) = await plan(fleet)
        (second,) = await plan(fleet, start_s=HOUR)
        await step(fleet, first)
        fleet.advance(HOUR)
        for row in (first, second) if first_ends_first else (second, first):
            await step(fleet, row)
        assert cordon_of(fleet)[0]
        fleet.advance(HOUR)
        await step(fleet, second)
        assert not cordon_of(fleet)[0]


async def test_one_that_has_begun_can_end_early_or_late(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (row,) = await plan(fleet, hours=2)
        next_one = await fleet.reserve(8, start_s=4 * HOUR, duration_s=HOUR)
        await step(fleet, row)
        with pytest.raises(Conflict, match=f"by {next_one.public_id} from 2030-01-01T04:00:00Z on"):
            await fleet.run(lambda tx: maintenance.extend(tx, row, after(4.5), load_now(tx)))
        with pytest.raises(Conflict, match="is not later"):
            await fleet.run(lambda tx: maintenance.extend(tx, row, after(2), load_now(tx)))
        with pytest.raises(Invalid, match=r"end: 9999-12-31T00:00:00Z makes it .* longer than any may be, 3650 days"):
            await fleet.run(lambda tx: maintenance.extend(tx, row, START.replace(year=9999, month=12, day=31), START))
        await fleet.run(lambda tx: maintenance.extend(tx, row, after(4), load_now(tx)))
        fleet.advance(2 * HOUR)
        assert (await step(fleet, row)).state == "open", "it was to end now"
        fleet.advance(HOUR)
        await cancel(fleet, row)
        row = await step(fleet, row)
        assert (row.state, cordon_of(fleet)[0]) == ("done", False)
        assert fleet.execute("select upper(during) from booking_history") == [(after(3),)]
        with pytest.raises(Conflict, match="is over"):
            await fleet.run(lambda tx: maintenance.extend(tx, row, after(9), load_now(tx)))
        assert (await fleet.reserve(8, duration_s=HOUR)).state == "binding"
        fleet.assert_sound()


async def test_a_rack_two_at_a_time_each_when_it_is_free(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        await fleet.reserve(8, duration_s=5 * HOUR)  # on the first node
        with pytest.raises(Conflict, match="node-0 is booked by"):
            await plan(fleet, at_once=2)
        assert fleet.execute("select count(*) from maintenance") == [(0,)], "all or none"
        rows = await plan(fleet, at_once=2, earliest=True)
        assert [row.start for row in rows] == [after(5), after(0), after(1), after(2)]
        fleet.assert_sound()


async def test_a_node_that_is_removed_needs_no_maintenance(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (row,) = await plan(fleet, start_s=HOUR)

        def remove(tx: Tx) -> None:
            node = nodes.lock_lifecycle(tx, row.node_id)
            assert node is not None
            retire.decommission(tx, node, reason="old", now=load_now(tx))

        await fleet.run(remove)
        assert ("maintenance", str(row.maintenance_id)) in fleet.execute("select queue, key from work_queue")
        assert (await step(fleet, row)).state == "cancelled"
        assert fleet.execute("select count(*) from booking") == [(0,)]


async def test_a_window_against_a_booking_at_once_and_one_wins(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        for number in range(8):
            start_s = (number + 1) * 10 * HOUR
            draft = await fleet.draft(1, start_s=start_s, duration_s=HOUR)
            outcome: dict[str, bool] = {}

            async def maintain(start_s: float, outcome: dict[str, bool]) -> None:
                try:
                    await plan(fleet, start_s=start_s)
                    outcome["planned"] = True
                except Conflict:
                    outcome["planned"] = False

            async def book(draft: int, outcome: dict[str, bool]) -> None:
                outcome["booked"] = isinstance(await fleet.try_place(draft), Placed)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(maintain, start_s, outcome)
                nursery.start_soon(book, draft, outcome)
            assert outcome["planned"] != outcome["booked"]
        fleet.assert_sound()
