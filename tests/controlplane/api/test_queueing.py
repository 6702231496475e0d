"""The queue over the API: turns, priorities, and those who do not want to wait."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from tests.support.api import Api, Reply, open_api, run_pass
from tests.support.ledgers import FROZEN_TIME, insert_node

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.postgres import Dsn

HOUR = 3600


@asynccontextmanager
async def open_pool(dsn: Dsn) -> AsyncGenerator[Api]:
    """One node of eight GPUs."""
    async with open_api(dsn) as api:
        await api.ok("sites/create", slug="berlin")
        await api.ok("pools/create", site="berlin", slug="h100", gpu_model="H100")
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            conn.execute(FROZEN_TIME)
            insert_node(conn, 1, 0, 8)
        yield api


@asynccontextmanager
async def open_busy(dsn: Dsn) -> AsyncGenerator[Api]:
    """Four GPUs of the node are held for two hours, and one request waits for all of them."""
    async with open_pool(dsn) as api:
        await api.ok("reservations/create", pool="h100", gpus=4, duration_s=2 * HOUR)
        assert (await reserve(api, 8, duration_s=HOUR)).data["state"] == "queued"
        await run_pass(api)
        yield api


async def reserve(api: Api, gpus: int, **asked: Any) -> Reply:
    return await api.call("reservations/create", pool="h100", gpus=gpus, **asked)


async def test_who_waits_is_told_when_it_could_start(dsn: Dsn) -> None:
    async with open_busy(dsn) as api:
        (waiting,) = (await api.ok("reservations/list", states=["queued"]))["items"]
        assert waiting["estimated_start"] == "2030-01-01T02:00:00Z"
        assert waiting["pending_reason"] == "needs 8 GPUs on one node; most free on one node: 4"


async def test_a_tenants_part_of_the_queue_and_the_queue_have_an_end(dsn: Dsn, monkeypatch: Any) -> None:
    monkeypatch.setattr("controlplane.api.groups.reservations.QUEUE_OF_ONE_MAX", 2)
    monkeypatch.setattr("controlplane.api.groups.reservations.QUEUE_MAX", 3)
    async with open_busy(dsn) as api:
        second = (await reserve(api, 8)).data
        assert second["state"] == "queued"
        refused = await reserve(api, 8)
        assert refused.code == "SOLD_OUT"
        assert "2 requests of this tenant wait for this pool already" in refused.message
        # what fits waits for nobody
        assert (await reserve(api, 1, duration_s=HOUR)).data["state"] == "binding"
        acme, emca = await api.make_tenant("acme"), await api.make_tenant("emca")
        assert (await api.ok("reservations/create", key=acme, pool="h100", gpus=8))["state"] == "queued"
        full = await api.call("reservations/create", key=emca, pool="h100", gpus=8)
        assert full.code == "SOLD_OUT"
        assert full.message.endswith("3 requests wait for this pool already, which is the most that may")
        await api.ok("reservations/release", id=second["id"])
        assert (await reserve(api, 8)).data["state"] == "queued"


async def preview(api: Api, gpus: int, **asked: Any) -> dict[str, Any]:
    before = (await api.ok("reservations/list"))["items"]
    plan = await api.ok("reservations/preview", pool="h100", gpus=gpus, **asked)
    assert (await api.ok("reservations/list"))["items"] == before
    return plan


async def test_a_plan_is_made_behind_those_who_wait(dsn: Dsn) -> None:
    """What it says is what becomes of the request when it is made."""
    async with open_busy(dsn) as api:
        for gpus, hours, start in ((8, 1, "03"), (4, 3, "03"), (4, 2, "00")):
            plan = await preview(api, gpus, duration_s=hours * HOUR)
            assert plan["start"] == f"2030-01-01T{start}:00:00Z"
            assert (plan["fits"], plan["nodes"], plan["waiting"]) == (start == "00", ["node-0"], 1)
        plan = await preview(api, 4, duration_s=3 * HOUR)
        assert plan["reason"] == "another waits for this pool, and this one could delay it"
        assert plan["end"] == "2030-01-01T06:00:00Z"
        assert (await preview(api, 8, duration_s=HOUR))[
            "reason"
        ] == "needs 8 GPUs on one node; most free on one node: 4"
        # and so it is
        large = (await reserve(api, 8, duration_s=HOUR)).data
        long = (await reserve(api, 4, duration_s=3 * HOUR)).data
        await run_pass(api)
        for one, start in ((large, "03"), (long, "04")):
            shown = await api.ok("reservations/get", id=one["id"])
            assert (shown["state"], shown["estimated_start"]) == ("queued", f"2030-01-01T{start}:00:00Z")
        endless = await preview(api, 4)
        assert (endless["fits"], endless["start"], endless["end"]) == (False, "2030-01-01T04:00:00Z", None)
        # twice the same: nothing of the first look is left
        assert await preview(api, 4) == endless
        assert (await reserve(api, 4, duration_s=2 * HOUR)).data["state"] == "binding"


async def test_a_plan_keeps_to_the_turns_of_tenants(dsn: Dsn) -> None:
    async with open_busy(dsn) as api:
        await reserve(api, 8, duration_s=HOUR)
        await run_pass(api)
        acme = await api.make_tenant("acme")
        # who holds nothing goes before those of a tenant that does
        assert (await preview(api, 8, duration_s=HOUR))["start"] == "2030-01-01T04:00:00Z"
        theirs = await api.ok("reservations/preview", key=acme, pool="h100", gpus=8, duration_s=HOUR)
        assert (theirs["fits"], theirs["start"], theirs["waiting"]) == (False, "2030-01-01T02:00:00Z", 2)


async def test_a_plan_behind_too_many_has_no_start(dsn: Dsn, monkeypatch: Any) -> None:
    async with open_busy(dsn) as api:
        monkeypatch.setattr("controlplane.capacity.outlook.AHEAD_MAX", 0)
        plan = await preview(api, 4, duration_s=3 * HOUR)
        assert (plan["fits"], plan["start"], plan["nodes"]) == (False, None, [])
        monkeypatch.undo()
        monkeypatch.setattr("controlplane.model.behind.SEARCHES_MAX", 1)
        assert (await preview(api, 8, duration_s=HOUR))["start"] == "2030-01-01T03:00:00Z", "its equal was looked for"
        assert (await preview(api, 7, duration_s=HOUR))["start"] is None
        monkeypatch.undo()
        assert (await preview(api, 7, duration_s=HOUR))["start"] == "2030-01-01T03:00:00Z"


async def test_a_new_request_that_could_be_in_the_way_takes_its_turn(dsn: Dsn) -> None:
    async with open_busy(dsn) as api:
        long = (await reserve(api, 4, duration_s=3 * HOUR)).data
        assert (long["state"], long["pending_reason"]) == ("queued", "new in the queue, 1 ahead")
        impatient = await reserve(api, 4, duration_s=3 * HOUR, queue=False)
        assert impatient.code == "SOLD_OUT"
        assert impatient.message.startswith("2 others wait for this pool, and this one could delay them")
        await run_pass(api)
        assert (await api.ok("reservations/get", id=long["id"]))["estimated_start"] == "2030-01-01T03:00:00Z"


async def test_nobody_slips_in_between_a_request_that_waits_and_the_first_look_at_it(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("reservations/create", pool="h100", gpus=4, duration_s=2 * HOUR)
        large = (await reserve(api, 8, duration_s=HOUR)).data
        assert (large["state"], large["estimated_start"]) == ("queued", "2030-01-01T02:00:00Z")
        # no pass has been made
        impatient = await reserve(api, 4, duration_s=3 * HOUR, queue=False)
        assert impatient.code == "SOLD_OUT"
        long = (await reserve(api, 4, duration_s=3 * HOUR)).data
        assert (long["state"], long["pending_reason"]) == ("queued", "new in the queue, 1 ahead")
        assert (await reserve(api, 4, duration_s=2 * HOUR)).data["state"] == "binding"


async def test_a_new_request_that_is_over_before_any_of_them_starts_is_placed_at_once(dsn: Dsn) -> None:
    async with open_busy(dsn) as api:
        assert (await reserve(api, 2, duration_s=2 * HOUR, queue=False)).data["state"] == "binding"
        assert (await reserve(api, 2, duration_s=2 * HOUR)).data["state"] == "binding"


async def test_an_operator_gives_a_priority_and_others_may_only_stand_behind(dsn: Dsn) -> None:
    async with open_busy(dsn) as api:
        refused = await reserve(api, 8, duration_s=HOUR, priority=1)
        assert (refused.code, refused.field) == ("INVALID", "priority")
        patient = (await reserve(api, 8, duration_s=HOUR, priority=-5)).data
        assert patient["priority"] == -5
        urgent = await api.ok("reservations/prioritize", id=patient["id"], priority=50)
        assert urgent["priority"] == 50
        await run_pass(api)
        assert (await api.ok("reservations/get", id=patient["id"]))["estimated_start"] == "2030-01-01T02:00:00Z"
        (held,) = (await api.ok("reservations/list", states=["binding"]))["items"]
        started = await api.call("reservations/prioritize", id=held["id"], priority=1)
        assert (started.code, started.message) == (
            "CONFLICT",
            f"reservation {held['id']} is binding: only what waits has a turn",
        )


async def test_with_pool_lease_every_request_waits_for_the_scheduler(dsn: Dsn) -> None:
    async with open_busy(dsn) as api:
        await api.ok(
            "reservations/release", id=(await api.ok("reservations/list", states=["queued"]))["items"][0]["id"]
        )
        object.__setattr__(api.context, "placer", "pool-lease")
        made = (await reserve(api, 1, duration_s=HOUR)).data
        assert (made["state"], made["pending_reason"]) == ("queued", "new in the queue")
        assert (await reserve(api, 1, duration_s=HOUR, queue=False)).data["state"] == "binding"
        assert (await reserve(api, 9, duration_s=HOUR)).code == "INVALID"
        await run_pass(api)
        assert (await api.ok("reservations/get", id=made["id"]))["state"] == "binding"


async def test_with_pool_lease_gangs_and_repairs_are_placed_in_the_request(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        object.__setattr__(api.context, "placer", "pool-lease")
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            for number in (1, 2):
                insert_node(conn, 1, number, 8)
            gang = (await reserve(api, 16, nodes=2, duration_s=HOUR)).data
            assert (gang["state"], len(gang["parts"])) == ("binding", 2)
            broken, well = gang["parts"]
            conn.execute("update device set health = 'missing' where uuid = %s", (broken["gpu_uuids"][0],))
        repaired = await api.ok("reservations/repair", id=gang["id"])
        bound = {part["node_name"] for part in repaired["parts"] if part["state"] == "binding"}
        assert bound == {"node-0", "node-1", "node-2"} - {broken["node_name"]}
        assert well["node_name"] in bound


async def test_the_answer_to_a_request_is_what_everybody_sees_of_it(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        later = "2031-01-01T00:00:00Z"
        made = [
            (await reserve(api, 1, duration_s=HOUR)).data,
            (await reserve(api, 2, duration_s=HOUR, start=later)).data,
            (await reserve(api, 8, duration_s=HOUR)).data,
        ]
        assert [one["state"] for one in made] == ["binding", "placed", "queued"]
        assert [len(one["parts"]) for one in made] == [1, 1, 0]
        assert [len(part["gpu_uuids"]) for one in made for part in one["parts"]] == [1, 2]
        assert [await api.ok("reservations/get", id=one["id"]) for one in made] == made
        listed = {one["id"]: one for one in (await api.ok("reservations/list"))["items"]}
        assert [listed[one["id"]] for one in made] == made
