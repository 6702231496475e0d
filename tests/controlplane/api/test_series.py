"""Series: every window a reservation of its own, all or none, under every guard that a single one is under."""

from __future__ import annotations

import zoneinfo
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controlplane.api.zones import UnknownZone, load_zone, zone_names
from controlplane.capacity.series import EXPLAINED_MAX
from controlplane.model.recurrence import OCCURRENCES_MAX
from tests.support.api import open_api, run_pass
from tests.support.ledgers import FROZEN_TIME, OVERLAPPING_BOOKINGS, WRONG_QUOTAS, insert_node

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.api import Api
    from tests.support.postgres import Dsn

DAY = 86_400


@asynccontextmanager
async def open_pool(dsn: Dsn, *, nodes: int = 1, gpus: int = 8, **pool: Any) -> AsyncGenerator[Api]:
    """A pool of equal nodes on New Year's Day of 2030, a Tuesday, at 00:00 UTC; the time stands still."""
    async with open_api(dsn) as api:
        await api.ok("sites/create", slug="berlin")
        await api.ok("pools/create", site="berlin", slug="h100", gpu_model="H100", **pool)
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            conn.execute(FROZEN_TIME)
            row = conn.execute("select pool_id from pool").fetchone()
            assert row is not None
            for number in range(nodes):
                insert_node(conn, row[0], number, gpus)
        yield api


def look(dsn: Dsn, sql: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn.admin, autocommit=True) as conn:
        return conn.execute(sql).fetchall()


def assert_sound(dsn: Dsn) -> None:
    assert look(dsn, OVERLAPPING_BOOKINGS) == [(0,)]
    assert look(dsn, WRONG_QUOTAS) == []


def office(**changed: Any) -> dict[str, Any]:
    """Four GPUs from nine to five in Berlin, five times."""
    return {
        "pool": "h100",
        "gpus": 4,
        "time_zone": "Europe/Berlin",
        "from_time": "09:00",
        "to_time": "17:00",
        "count": 5,
        **changed,
    }


async def test_every_window_is_a_reservation_with_bookings_of_its_own(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        before = api.decisions
        made = await api.ok("series/create", name="training", **office(first_date="2030-03-29"))
        assert api.decisions == before + 1, "one decision for all of them"
        starts = [window["start"] for window in made["windows"]]
        assert starts == [
            "2030-03-29T08:00:00Z",
            "2030-03-30T08:00:00Z",
            "2030-03-31T07:00:00Z",  # the clocks have gone forward that night
            "2030-04-01T07:00:00Z",
            "2030-04-02T07:00:00Z",
        ]
        assert {window["state"] for window in made["windows"]} == {"placed"}
        for window in made["windows"]:
            one = await api.ok("reservations/get", id=window["reservation"])
            assert (one["start"], one["end"], one["name"]) == (window["start"], window["end"], "training")
            assert (one["gpus"], one["duration_s"], len(one["parts"])) == (4, 8 * 3600, 1)
        assert look(dsn, "select count(*), count(distinct reservation_id) from booking") == [(5, 5)]
        # each is woken at its own start
        due = look(dsn, "select due_at from work_queue where queue = 'reservation' order by due_at")
        assert [at.strftime("%Y-%m-%dT%H:%M:%SZ") for (at,) in due] == starts
        assert_sound(dsn)


async def test_a_night_shift_across_the_change_is_seven_hours(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        night = office(from_time="22:00", to_time="06:00", first_date="2030-03-29", count=3)
        made = await api.ok("series/create", **night)
        lengths = [
            (await api.ok("reservations/get", id=window["reservation"]))["duration_s"] // 3600
            for window in made["windows"]
        ]
        assert lengths == [8, 7, 8]
        assert made["rule"]["from_time"] == "22:00"
        assert made["time_zone"] == "Europe/Berlin"


async def test_windows_stay_on_the_same_node_while_it_has_room(dsn: Dsn) -> None:
    async with open_pool(dsn, nodes=3) as api:
        # best fit for one day alone would be the node that is half taken then
        await api.ok("reservations/create", pool="h100", gpus=4, start="2030-01-04T00:00:00Z", duration_s=DAY)
        planned = await api.ok("series/preview", **office(first_date="2030-01-03"))
        assert planned["fits"]
        assert len({node for window in planned["windows"] for node in window["nodes"]}) == 1
        assert look(dsn, "select count(*) from series") == [(0,)]


async def test_all_or_nothing_leaves_nothing(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("reservations/create", pool="h100", gpus=8, start="2030-01-04T00:00:00Z", duration_s=DAY)
        refused = await api.call("series/create", **office(first_date="2030-01-03"))
        assert refused.code == "SOLD_OUT"
        assert refused.message.startswith(
            "1 of 5 windows cannot be placed: 2030-01-04T08:00Z: needs 4 GPUs on one node; most free on one node: 0"
        )
        assert refused.message.endswith("all_or_nothing=false places the others")
        assert look(dsn, "select count(*) from booking") == [(1,)]
        assert look(dsn, "select count(*) from series") == [(0,)]
        made = await api.ok("series/create", **office(first_date="2030-01-03"), all_or_nothing=False)
        states = [(window["state"], bool(window["refused"])) for window in made["windows"]]
        assert states == [("placed", False), (None, True), ("placed", False), ("placed", False), ("placed", False)]
        assert (made["windows_total"], made["windows_open"]) == (5, 4)
        assert_sound(dsn)


async def test_a_series_of_which_nothing_fits_is_refused_either_way(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("reservations/create", pool="h100", gpus=8)
        for all_or_nothing in (True, False):
            refused = await api.call("series/create", **office(), all_or_nothing=all_or_nothing)
            assert refused.code == "SOLD_OUT"
            assert "5 of 5 windows" in refused.message
        never = await api.call("series/create", **office(gpus=None, vcpus=65))
        assert never.code == "IMPOSSIBLE"


async def test_quota_counts_each_window_and_is_given_back(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("quotas/create", gpus_max=12)
        refused = await api.call("series/create", **office())
        assert refused.code == "QUOTA_EXCEEDED"
        assert "2 of 5 windows" in refused.message
        assert look(dsn, "select gpus_used from quota") == [(0,)]
        made = await api.ok("series/create", **office(), all_or_nothing=False)
        assert [window["state"] for window in made["windows"]] == ["placed"] * 3 + [None] * 2
        assert look(dsn, "select gpus_used from quota") == [(12,)]
        await api.ok("series/cancel", id=made["id"])
        assert look(dsn, "select gpus_used from quota") == [(0,)]
        assert_sound(dsn)


async def test_the_pools_limits_hold_for_each_window(dsn: Dsn) -> None:
    async with open_pool(dsn, max_duration_s=8 * 3600, max_horizon_s=3 * DAY) as api:
        assert (await api.ok("series/create", **office(count=3)))["windows_open"] == 3
        too_far = await api.call("series/create", **office(count=4))
        assert too_far.code == "SOLD_OUT"
        assert "1 of 4 windows cannot be placed: 2030-01-04T08:00Z: start: 2030-01-04T08:00:00Z is further" in (
            too_far.message
        )
        too_long = await api.call("series/create", **office(to_time="17:01", count=1))
        assert (too_long.code, too_long.field) == ("INVALID", "duration_s")


async def test_cancelling_ends_what_has_not_begun(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        made = await api.ok("series/create", **office(count=3))
        first, second, third = (window["reservation"] for window in made["windows"])
        await api.ok("reservations/release", id=second)
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            conn.execute(
                "update reservation set state = 'binding', bind_deadline = compute_now() where public_id = %s", (first,)
            )
        left = await api.ok("series/cancel", id=made["id"])
        assert [window["state"] for window in left["windows"]] == ["binding", "cancelled", "cancelled"]
        assert left["cancelled_at"] is not None
        detail = (await api.ok("reservations/get", id=third))["end_detail"]
        assert detail == f"series {made['id']} was cancelled"
        again = await api.ok("series/cancel", id=made["id"])
        assert again["cancelled_at"] == left["cancelled_at"]
        kinds = look(dsn, "select kind from outbox where kind like 'series.%' order by seq")
        assert kinds == [("series.created",), ("series.cancelled",)]


async def test_repeating_the_request_makes_one_series(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        first = await api.ok("series/create", **office(), idempotency_key="k")
        again = await api.ok("series/create", **office(), idempotency_key="k")
        assert again["id"] == first["id"]
        assert look(dsn, "select count(*) from reservation") == [(5,)]


async def test_two_series_at_once_for_the_same_gpus(dsn: Dsn) -> None:
    async with open_pool(dsn, nodes=2) as api:
        codes: list[str] = []

        async def create() -> None:
            codes.append((await api.call("series/create", **office(gpus=8))).code)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(create)
        assert sorted(codes) == ["OK", "OK", "SOLD_OUT", "SOLD_OUT", "SOLD_OUT"]
        assert look(dsn, "select count(*) from booking") == [(10,)]
        assert_sound(dsn)


HOURS = 3600


async def test_a_window_that_would_delay_somebody_who_waits_is_refused(dsn: Dsn, monkeypatch: Any) -> None:
    async with open_pool(dsn) as api:
        await api.ok("reservations/create", pool="h100", gpus=4, duration_s=10 * HOURS)
        waiting = await api.ok("reservations/create", pool="h100", gpus=8, duration_s=HOURS)
        await run_pass(api)
        assert (await api.ok("reservations/get", id=waiting["id"]))["estimated_start"] == "2030-01-01T10:00:00Z"
        asked = office(first_date="2030-01-01")
        why = ["another waits for this pool, and this one could delay it", "", "", "", ""]
        assert [window["refused"] for window in (await api.ok("series/preview", **asked))["windows"]] == why
        assert (await api.call("series/create", **asked)).code == "SOLD_OUT"
        # one that is over by then, and one that begins after
        for first, last in ("02:00", "10:00"), ("12:00", "18:00"):
            hours = {"time_zone": "UTC", "from_time": first, "to_time": last, "count": 1}
            await api.ok("series/create", **{**asked, **hours})
        await run_pass(api)
        assert (await api.ok("reservations/get", id=waiting["id"]))["estimated_start"] == "2030-01-01T10:00:00Z"
        # nobody knows the places of so many: what ends after the first of them could start is refused
        monkeypatch.setattr("controlplane.model.behind.SEARCHES_MAX", 0)
        assert all(window["refused"] for window in (await api.ok("series/preview", **asked))["windows"])
        assert_sound(dsn)


async def test_a_window_takes_a_node_that_nobody_waits_for(dsn: Dsn) -> None:
    async with open_pool(dsn, nodes=2) as api:
        for hours in 10, 20:
            # spread, so that each node has one
            await api.ok("reservations/create", pool="h100", gpus=4, duration_s=hours * HOURS, strategy="spread")
        waiting = await api.ok("reservations/create", pool="h100", gpus=8, duration_s=HOURS)
        await run_pass(api)
        made = await api.ok("series/create", **office(first_date="2030-01-01", count=1))
        beside = (
            "select upper(during) = '2030-01-01 20:00Z' from booking where node_id = (%s) order by booking_id limit 1"
        )
        assert look(dsn, beside % "select node_id from booking order by booking_id desc limit 1") == [(True,)]
        assert made["windows"][0]["refused"] == ""
        await run_pass(api)
        assert (await api.ok("reservations/get", id=waiting["id"]))["estimated_start"] == "2030-01-01T10:00:00Z"


async def test_what_a_series_has_booked_is_known_at_once_where_it_was_booked(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("reservations/create", pool="h100", gpus=1, duration_s=60)
        await api.ok("series/create", **office(first_date="2030-01-01"))
        asked = {"pool": "h100", "gpus": 8, "start": "2030-01-01T09:00:00Z", "duration_s": HOURS}
        told = await api.ok("reservations/preview", **asked)
        assert (told["fits"], told["reason"]) == (False, "needs 8 GPUs on one node; most free on one node: 4")


async def test_of_many_windows_without_room_the_first_say_what_is_short(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("reservations/create", pool="h100", gpus=8, duration_s=30 * DAY)
        made = await api.ok("series/create", **office(count=40), all_or_nothing=False)
        why = [window["refused"] for window in made["windows"]]
        assert why[:EXPLAINED_MAX] == ["needs 4 GPUs on one node; most free on one node: 0"] * EXPLAINED_MAX
        assert why[EXPLAINED_MAX:] == ["no room"] * 10 + [""] * 10
        assert_sound(dsn)


async def test_as_many_windows_as_there_may_be(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        made = await api.ok("series/create", **office(count=OCCURRENCES_MAX))
        assert made["windows_open"] == OCCURRENCES_MAX
        assert_sound(dsn)


@pytest.mark.parametrize(
    ("changed", "field", "said"),
    [
        ({"time_zone": "Europe/Berlim"}, "time_zone", "did you mean Europe/Berlin?"),
        ({"time_zone": "localtime"}, "time_zone", "no zone localtime"),
        ({"time_zone": "../../etc/passwd"}, "time_zone", "no zone"),
        ({"from_time": "9 Uhr"}, "from_time", ""),
        ({"first_date": "2029-12-31"}, "first_date", "is in the past"),
        ({"to_time": None, "to_days": 1, "duration_s": 60}, "to_days", "says on which day to_time is"),
        ({"count": None}, "until", "the series has no end"),
        ({"to_days": 1}, "to_time", "is not over when"),
        ({"to_time": None, "duration_s": 25 * 3600}, "duration_s", "is not over when"),
        ({"every": "week", "days": ["monday"]}, "days[0]", ""),
        ({"gpus": 9}, "gpus", "does not fit one node"),
    ],
)
async def test_what_is_no_series_is_refused_by_name(dsn: Dsn, changed: dict[str, Any], field: str, said: str) -> None:
    async with open_pool(dsn) as api:
        asked = {name: value for name, value in office(**changed).items() if value is not None}
        refused = await api.call("series/create", **asked)
        assert refused.code in ("INVALID", "NOT_FOUND")
        assert refused.field == field
        assert said in refused.message


async def test_another_tenant_knows_nothing_of_it(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        acme, rival = await api.make_tenant("acme"), await api.make_tenant("rival")
        made = await api.ok("series/create", key=acme, **office())
        for path in ("series/get", "series/cancel"):
            assert (await api.call(path, key=rival, id=made["id"])).code == "NOT_FOUND"
        assert (await api.ok("series/list", key=rival))["items"] == []
        (listed,) = (await api.ok("series/list", key=acme, pool="h100"))["items"]
        assert (listed["id"], listed["windows_open"]) == (made["id"], 5)
        refused = await api.call("series/create", key=rival, tenant="acme", **office())
        assert refused.code in ("DENIED", "NOT_FOUND")


def test_zones_are_known_without_the_systems_own() -> None:
    zoneinfo.reset_tzpath(to=[])
    try:
        zoneinfo.ZoneInfo.clear_cache()
        assert str(load_zone("America/New_York")) == "America/New_York"
        assert "Europe/Berlin" in zone_names()
    finally:
        zoneinfo.reset_tzpath()
    with pytest.raises(UnknownZone):
        load_zone("Factory/Berlin")
