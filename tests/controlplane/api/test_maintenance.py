"""Maintenance over the API: what is refused by name, and who may not even know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.api import open_api
from tests.support.world import make_world

if TYPE_CHECKING:
    from tests.support.postgres import Dsn


async def test_a_pools_nodes_in_one_request_after_one_decision(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        await api.ok("maintenance/cancel", id=world.maintenance)
        before = api.decisions
        made = await api.ok("maintenance/create", pool="h100", duration_s=3600, earliest=True, reason="fans")
        assert api.decisions == before + 1
        assert {item["node"] for item in made["items"]} == {world.node, world.idle_node}
        busy, idle = (next(i for i in made["items"] if i["node"] == node) for node in (world.node, world.idle_node))
        assert busy["start"] > idle["start"], "acme holds a GPU for an hour"
        held = await api.ok("reservations/get", id=world.reservation, key=world.acme)
        assert held["conditions"] == ["maintenance_planned"]
        told = await api.ok("events/list", key=world.acme)
        assert "reservation.maintenance_planned" in {event["kind"] for event in told["items"]}
        assert (await api.ok("maintenance/list", node=world.node))["items"] == [busy]


async def test_what_is_no_window_is_refused_by_name(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"nodes": [world.node], "pool": "h100"}, "nodes"),
            ({}, "nodes"),
            ({"nodes": []}, "nodes"),
            ({"nodes": ["nod"]}, "node"),
            ({"pool": "empty"}, "nodes"),
            ({"nodes": [world.node], "start": "2001-01-01T00:00:00Z"}, "start"),
            ({"nodes": [world.node], "start": "2030-01-01T00:00:00"}, "start"),
            ({"nodes": [world.node], "start": "2999-01-01T00:00:00Z"}, "start"),
            ({"nodes": [world.node], "duration_s": 0}, "duration_s"),
            ({"nodes": [world.node], "reason": ""}, "reason"),
            ({"nodes": [world.node], "at_once": 0}, "at_once"),
        ]
        for changed, field in wrong:
            reply = await api.call("maintenance/create", **{"duration_s": 60, "reason": "fans", **changed})
            assert reply.code in ("INVALID", "NOT_FOUND"), changed
            assert reply.field == field, changed


@pytest.mark.parametrize("who", ["acme", "member"])
async def test_tenants_do_not_know_of_it(dsn: Dsn, who: str) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        key = getattr(world, who)
        assert (await api.call("maintenance/get", key=key, id=world.maintenance)).code in ("DENIED", "NOT_FOUND")
        assert (await api.call("maintenance/list", key=key)).code == "DENIED"
        for path in ("maintenance/cancel", "maintenance/extend"):
            asked: dict[str, Any] = {"id": world.maintenance}
            if path == "maintenance/extend":
                asked["end"] = world.in_minutes(99)
            assert (await api.call(path, key=key, **asked)).code in ("DENIED", "NOT_FOUND")
