"""A pool's longest duration and furthest start, at the limit and one second past it, by every way that leads past."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from controlplane.capacity.batch import place_batch
from tests.support.api import open_api
from tests.support.ledgers import FROZEN_TIME, START, insert_node

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.api import Api, Reply
    from tests.support.postgres import Dsn

HOUR = 3600
DAY = 24 * HOUR


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


@asynccontextmanager
async def open_limited(dsn: Dsn, **limits: Any) -> AsyncGenerator[Api]:
    """A pool with limits and one node of eight GPUs, at START; the time stands still."""
    async with open_api(dsn) as api:
        await api.ok("sites/create", slug="berlin")
        await api.ok("pools/create", site="berlin", slug="h100", gpu_model="H100", **limits)
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            conn.execute(FROZEN_TIME)
            row = conn.execute("select pool_id from pool").fetchone()
            assert row is not None
            insert_node(conn, row[0], 0, 8)
        yield api


async def reserve(api: Api, gpus: int = 1, **when: Any) -> Reply:
    return await api.call("reservations/create", pool="h100", gpus=gpus, **when)


async def test_the_longest_duration(dsn: Dsn) -> None:
    async with open_limited(dsn, max_duration_s=8 * HOUR) as api:
        assert (await reserve(api, duration_s=8 * HOUR)).data["state"] == "binding"
        for refused in (
            await reserve(api, duration_s=8 * HOUR + 1),
            await api.call("reservations/preview", pool="h100", gpus=1, duration_s=8 * HOUR + 1),
        ):
            assert (refused.code, refused.field) == ("INVALID", "duration_s")
            assert refused.message == "duration_s: 8h1s are longer than this pool allows; ask for at most 8h (28800 s)"
        endless = await reserve(api)
        assert (endless.code, endless.field) == ("INVALID", "duration_s")
        assert "open-ended" in endless.message


async def test_the_furthest_start(dsn: Dsn) -> None:
    async with open_limited(dsn, max_horizon_s=7 * DAY) as api:
        assert (await reserve(api, start=at(7 * DAY), duration_s=90 * DAY)).data["state"] == "placed"
        for refused in (
            await reserve(api, start=at(7 * DAY + 1), duration_s=HOUR),
            await api.call("reservations/preview", pool="h100", gpus=1, start=at(7 * DAY + 1), duration_s=HOUR),
        ):
            assert (refused.code, refused.field) == ("INVALID", "start")
            assert refused.message.endswith("allows, 7d; start by 2030-01-08T00:00:00Z")
        assert (await reserve(api)).data["end"] is None, "a horizon says nothing about the length"


async def test_extending_reaches_the_limit_and_not_past_it(dsn: Dsn) -> None:
    async with open_limited(dsn, max_duration_s=8 * HOUR) as api:
        made = (await reserve(api, duration_s=HOUR)).data
        past = await api.call("reservations/extend", id=made["id"], end=at(8 * HOUR + 1))
        assert (past.code, past.field) == ("INVALID", "end")
        assert past.message.endswith("ask for 2030-01-01T08:00:00Z at the latest")
        # in two steps, the second counting from the first start
        assert (await api.ok("reservations/extend", id=made["id"], end=at(6 * HOUR)))["duration_s"] == 6 * HOUR
        past = await api.call("reservations/extend", id=made["id"], end=at(8 * HOUR + 1))
        assert past.code == "INVALID"
        assert (await api.ok("reservations/extend", id=made["id"], end=at(8 * HOUR)))["end"].startswith("2030-01-01T08")
        past = await api.call("reservations/extend", id=made["id"], end=at(8 * HOUR + 1))
        assert past.code == "INVALID"


async def test_where_a_pool_has_no_limit_nothing_lasts_for_ever_by_its_end(dsn: Dsn) -> None:
    """Every way to an end is under the bound that a new reservation is under; beyond it dates cannot be written."""
    async with open_limited(dsn) as api:
        most = 3650 * DAY
        assert (await reserve(api, duration_s=most + 1)).code == "INVALID"
        made, endless = (await reserve(api, duration_s=HOUR)).data, (await reserve(api)).data
        for path, id_ in (("extend", made["id"]), ("shrink", endless["id"])):
            for end in (at(most + 1), "9999-12-31T23:59:59Z"):
                past = await api.call(f"reservations/{path}", id=id_, end=end)
                assert (past.code, past.field) == ("INVALID", "end"), path
                assert past.message.endswith(
                    "longer than any may be, 3650 days; ask for 2039-12-30T00:00:00Z at the latest"
                )
            moved = await api.ok(f"reservations/{path}", id=id_, end=at(most))
            assert moved["duration_s"] == most


async def test_time_that_has_passed_counts_too(dsn: Dsn) -> None:
    async with open_limited(dsn, max_duration_s=8 * HOUR) as api:
        made = (await reserve(api, duration_s=8 * HOUR)).data
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            conn.execute("update test_clock set at = at + interval '4 hours'")
        past = await api.call("reservations/extend", id=made["id"], end=at(8 * HOUR + 1))
        assert past.code == "INVALID"
        # shrinking and extending again gains nothing
        await api.ok("reservations/shrink", id=made["id"], end=at(5 * HOUR))
        past = await api.call("reservations/extend", id=made["id"], end=at(8 * HOUR + 1))
        assert past.code == "INVALID"
        await api.ok("reservations/extend", id=made["id"], end=at(8 * HOUR))


@pytest.mark.parametrize(
    ("limit", "request_", "said"),
    [
        ({"max_duration_s": HOUR}, {"duration_s": 2 * HOUR}, "duration: 2h are longer"),
        ({"max_duration_s": HOUR}, {}, "duration: an open-ended one is longer"),
        (
            {"max_horizon_s": HOUR},
            {"start": at(2 * HOUR), "duration_s": HOUR},
            "start: 2030-01-01T02:00:00Z is further",
        ),
    ],
)
async def test_a_limit_that_comes_while_it_waits_keeps_it_waiting(
    dsn: Dsn, limit: dict[str, Any], request_: dict[str, Any], said: str
) -> None:
    async with open_limited(dsn) as api:
        await api.ok("nodes/cordon", node="node-0")
        waiting = (await reserve(api, **request_)).data
        assert waiting["state"] == "queued"
        await api.ok("pools/update", pool="h100", **limit)
        await api.ok("nodes/uncordon", node="node-0")
        await api.context.db.run_tx(place_batch, api.context.tools, 1, ids=[1])
        still = await api.ok("reservations/get", id=waiting["id"])
        assert still["state"] == "queued"
        assert still["pending_reason"].startswith(said)
        await api.ok("pools/update", pool="h100", **dict.fromkeys(limit, None))
        await api.context.db.run_tx(place_batch, api.context.tools, 1, ids=[1])
        assert (await api.ok("reservations/get", id=waiting["id"]))["state"] in ("binding", "placed")


async def test_a_limit_is_set_changed_and_lifted(dsn: Dsn) -> None:
    async with open_limited(dsn, max_duration_s=HOUR) as api:
        kept = await api.ok("pools/update", pool="h100", name="The H100s", max_horizon_s=0)
        assert (kept["max_duration_s"], kept["max_horizon_s"]) == (HOUR, 0)
        assert (await reserve(api, start=at(1), duration_s=1)).message.endswith("leave it out to start now")
        assert (await reserve(api, duration_s=1)).data["state"] == "binding"
        lifted = await api.ok("pools/update", pool="h100", max_duration_s=None, max_horizon_s=None)
        assert (lifted["max_duration_s"], lifted["max_horizon_s"]) == (None, None)
        assert (await reserve(api, start=at(1))).data["state"] == "placed"
        assert (await api.call("pools/update", pool="h100", max_duration_s=0)).field == "max_duration_s"
