"""GPU-hours on PostgreSQL: charged by the booking, to the period they fall into, and settled by the end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.capacity import end as ending
from controlplane.capacity import windows
from controlplane.capacity.place import Placed
from controlplane.capacity.quota import open_due_periods
from controlplane.db import checks, reservations
from controlplane.db.quota_records import Key, Terms, find_quota, insert_quota, update_quota
from controlplane.db.time import load_now
from controlplane.db.tx import CheckConflict, Tx
from controlplane.errors import QuotaExceeded
from controlplane.model.periods import GPU_HOUR
from controlplane.model.quotas import QuotaShort
from tests.support import referee
from tests.support.ledgers import START, open_fleet
from tests.support.quotas import LAB, TEAM, plant

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from controlplane.model.periods import Period
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

HOUR_S, DAY_S = 3600, 86_400


async def set_hours(fleet: LedgerFleet, tenant_id: int, most: int, period: Period = "month") -> None:
    terms = Terms(
        gpus_max=None,
        vcpus_max=None,
        memory_mib_max=None,
        gpus_borrow_max=0,
        gpu_hours_max=most,
        hours_period=period,
    )
    key = Key(tenant_id, project_id=None, pool_id=None, gpu_model=None)
    await fleet.run(insert_quota, key, public_id=f"quo_{tenant_id}", terms=terms)


def charged(fleet: LedgerFleet, tenant_id: int = 1) -> dict[str, float]:
    """GPU-hours by the start of their period."""
    rows = fleet.execute(
        """
        select to_char(starts_at at time zone 'UTC', 'MM-DD'), gpu_us from quota_hours join quota using (quota_id)
        where tenant_id = %s and gpu_us > 0 order by starts_at
        """,
        tenant_id,
    )
    return {day: gpu_us / GPU_HOUR for day, gpu_us in rows}


async def assert_no_drift(fleet: LedgerFleet) -> None:
    fleet.assert_sound()
    referee.assert_sound(fleet.owner_dsn)
    for find in (checks.find_quota_drift, checks.find_quota_hours_drift, checks.find_quota_claims_drift):
        assert await fleet.run(find) == checks.NONE_FOUND


async def move_end(fleet: LedgerFleet, row: Reservation, end: datetime) -> None:
    def run(tx: Tx) -> None:
        locked = reservations.lock_reservation(tx, row.reservation_id)
        assert locked is not None
        assert locked.window_end is None or locked.window_end != end
        move = windows.extend if locked.window_end is not None and end > locked.window_end else windows.shrink
        move(tx, fleet.tools, locked, end, load_now(tx))

    await fleet.run(run)


async def test_a_booking_charges_every_period_and_every_quota_above(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        plant(fleet)
        await set_hours(fleet, 1, 100, "day")
        await set_hours(fleet, LAB, 120)
        await set_hours(fleet, TEAM, 50, "day")
        # 2 GPUs from 22:00 to 02:00
        row = await fleet.reserve(2, tenant_id=TEAM, start_s=22 * HOUR_S, duration_s=4 * HOUR_S)
        assert row.state == "placed"
        assert charged(fleet, 1) == charged(fleet, TEAM) == {"01-01": 4, "01-02": 4}
        assert charged(fleet, LAB) == {"01-01": 8}
        short = await fleet.try_place(await fleet.draft(2, tenant_id=TEAM, start_s=DAY_S, duration_s=DAY_S))
        assert short == QuotaShort(
            "quota quo_3 of team: gpu_hours: 48 asked of the day from 2030-01-02, 4 of 50 in use, 2 short",
            False,
            "gpu_hours",
        )
        assert isinstance(short, QuotaShort)
        assert short.field == "duration_s"
        never = await fleet.try_place(await fleet.draft(3, tenant_id=TEAM, start_s=3 * DAY_S, duration_s=DAY_S))
        assert isinstance(never, QuotaShort)
        assert never.never
        await assert_no_drift(fleet)


async def test_a_day_is_a_day_in_utc_where_clocks_are_put_forward(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 24, "day")
        # Europe puts its clocks forward on 2030-03-31 at 01:00 UTC
        start = (datetime(2030, 3, 30, 12, tzinfo=UTC) - START).total_seconds()
        assert (await fleet.reserve(1, start_s=start, duration_s=2 * DAY_S)).state == "placed"
        assert charged(fleet) == {"03-30": 12, "03-31": 24, "04-01": 12}
        await assert_no_drift(fleet)


async def test_an_end_leaves_what_was_used(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 100)
        row = await fleet.reserve(4, duration_s=10 * HOUR_S)
        assert charged(fleet) == {"01-01": 40}
        fleet.advance(60)
        await fleet.bound(row)
        fleet.advance(2 * HOUR_S)
        await fleet.release(row)
        assert charged(fleet) == {"01-01": 8}, "billed from active, so is the budget"
        await assert_no_drift(fleet)
        fleet.advance(3 * DAY_S)
        await fleet.released(row)
        assert charged(fleet) == {"01-01": 8}, "a node that lets go late costs the holder nothing"
        await assert_no_drift(fleet)


async def test_what_never_ran_costs_nothing(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 100)
        placed = await fleet.reserve(4, start_s=HOUR_S, duration_s=10 * HOUR_S)

        def cancel(tx: Tx) -> None:
            locked = reservations.lock_reservation(tx, placed.reservation_id)
            assert locked is not None
            ending.cancel(tx, locked, load_now(tx))

        await fleet.run(cancel)
        assert charged(fleet) == {}
        failed = await fleet.reserve(4, duration_s=10 * HOUR_S)
        await fleet.failed(failed)
        assert charged(fleet) == {}
        await fleet.released(failed)
        failed = await fleet.retry_queue(failed.reservation_id)
        assert failed.state == "binding"
        assert charged(fleet) == {"01-01": 40}
        await assert_no_drift(fleet)


async def test_another_end_is_charged_refused_or_refunded(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 48, "day")
        row = await fleet.reserve(2, duration_s=12 * HOUR_S)
        await fleet.bound(row)
        await move_end(fleet, row, START + timedelta(hours=30))
        assert charged(fleet) == {"01-01": 48, "01-02": 12}
        other = await fleet.reserve(2, start_s=30 * HOUR_S, duration_s=17 * HOUR_S)
        assert other.state == "placed"
        with pytest.raises(QuotaExceeded) as refused:
            await move_end(fleet, row, START + timedelta(hours=32))
        assert refused.value.field == "end"
        assert str(refused.value).endswith("gpu_hours: 4 asked of the day from 2030-01-02, 46 of 48 in use, 2 short")
        assert charged(fleet) == {"01-01": 48, "01-02": 46}
        await move_end(fleet, row, START + timedelta(hours=12))
        assert charged(fleet) == {"01-01": 24, "01-02": 34}
        await assert_no_drift(fleet)


async def test_what_is_open_ended_is_charged_as_periods_open(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 30, "day")
        fleet.advance(12 * HOUR_S)
        row = await fleet.reserve(2, duration_s=None)
        await fleet.bound(row)
        assert charged(fleet) == {"01-01": 24}
        assert (await fleet.reserve(7, duration_s=HOUR_S)).state == "queued", "7 of 30 are 1 too many"
        await assert_no_drift(fleet)
        # nobody looks for two and a half days; 48 a day are more than the budget, and it runs on
        fleet.advance(2 * DAY_S + 13 * HOUR_S)
        assert await fleet.run(open_due_periods) == 1
        assert await fleet.run(open_due_periods) == 0
        assert charged(fleet) == {"01-01": 24, "01-02": 48, "01-03": 48, "01-04": 48}
        short = await fleet.try_place(await fleet.draft(1, duration_s=HOUR_S))
        assert isinstance(short, QuotaShort)
        assert short.detail.endswith("1 asked of the day from 2030-01-04, 48 of 30 in use, 19 short")
        await assert_no_drift(fleet)
        await fleet.release(row)
        assert charged(fleet) == {"01-01": 24, "01-02": 48, "01-03": 48, "01-04": 2}
        await assert_no_drift(fleet)


async def test_a_period_is_opened_by_the_first_booking_of_it(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 30, "day")
        row = await fleet.reserve(1, duration_s=None)
        await fleet.bound(row)
        fleet.advance(DAY_S)
        # 24 of the 30 are the open one's already
        assert (await fleet.reserve(7, duration_s=HOUR_S)).state == "queued"
        assert (await fleet.reserve(6, duration_s=HOUR_S)).state == "binding"
        assert charged(fleet) == {"01-01": 24, "01-02": 30}
        await assert_no_drift(fleet)


async def test_an_end_for_what_had_none_gives_back_the_rest(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 48, "day")
        row = await fleet.reserve(2, duration_s=None)
        await fleet.bound(row)
        fleet.advance(25 * HOUR_S)
        await move_end(fleet, row, START + timedelta(hours=26))
        assert charged(fleet) == {"01-01": 48, "01-02": 4}
        await assert_no_drift(fleet)


async def test_a_new_budget_counts_what_there_is(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        fleet.advance(40 * DAY_S)
        ended = await fleet.reserve(1, duration_s=DAY_S)
        await fleet.bound(ended)
        fleet.advance(3 * HOUR_S)
        await fleet.release(ended)
        await fleet.released(ended)
        running = await fleet.reserve(2, duration_s=10 * HOUR_S)
        await fleet.bound(running)
        await fleet.reserve(1, duration_s=None)
        await set_hours(fleet, 1, 10)
        # 2030-02-10 03:00: 3 used, 20 to come, and 18 days and 21 hours to the end of the month
        assert charged(fleet) == {"02-01": 3 + 20 + 18 * 24 + 21}
        await assert_no_drift(fleet)

        def by_the_day(tx: Tx) -> None:
            row = find_quota(tx, "quo_1", within=None)
            assert row is not None
            assert update_quota(tx, row, Terms(None, None, None, 0, 50, "day"))

        await fleet.run(by_the_day)
        assert charged(fleet) == {"02-10": 3 + 20 + 21}
        await assert_no_drift(fleet)


async def test_racing_bookings_never_pass_the_budget(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        plant(fleet)
        await set_hours(fleet, 1, 25)
        await set_hours(fleet, LAB, 15)
        drafts = [await fleet.draft(1 + n % 3, tenant_id=1 + n % 2, duration_s=2 * HOUR_S) for n in range(16)]
        outcomes: list[object] = []

        async def attempt(reservation_id: int) -> None:
            outcomes.append(await fleet.try_place(reservation_id))

        async with trio.open_nursery() as nursery:
            for reservation_id in drafts:
                nursery.start_soon(attempt, reservation_id)
        assert 0 < sum(isinstance(outcome, Placed) for outcome in outcomes) < 16
        assert charged(fleet, 1)["01-01"] <= 25
        assert charged(fleet, LAB)["01-01"] <= 15
        await assert_no_drift(fleet)


async def test_the_database_refuses_to_charge_beyond_the_budget(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 1)

        def charge(tx: Tx, gpu_us: int) -> None:
            tx.execute(
                """
                insert into quota_hours values (1, '2030-01-01Z', %s)
                on conflict (quota_id, starts_at) do update set gpu_us = quota_hours.gpu_us + excluded.gpu_us
                """,
                (gpu_us,),
            )

        with pytest.raises(CheckConflict) as refused:
            await fleet.run(charge, GPU_HOUR + 1)
        assert refused.value.constraint == "quota_hours_max"
        await fleet.run(charge, GPU_HOUR)
        with pytest.raises(CheckConflict):
            await fleet.run(charge, 1)


async def test_a_drift_of_one_microsecond_is_found(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await set_hours(fleet, 1, 100)
        await fleet.bound(await fleet.reserve(2))
        fleet.execute("update quota_hours set gpu_us = gpu_us - 1")
        found = await fleet.run(checks.find_quota_hours_drift)
        assert found == checks.Found(1, ("quo_1 from 2030-01-01: counts 2.000 GPU-hours; used are 2.000",))
        fleet.execute("delete from quota_hours")
        found = await fleet.run(checks.find_quota_hours_drift)
        assert found == checks.Found(1, ("quo_1 from 2030-01-01: counts 0.000 GPU-hours; used are 2.000",))
