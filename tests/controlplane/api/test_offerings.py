"""Offerings: every shape that can be asked for has a name, and who reserves by the name gets just that shape."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.support.api import open_api, run_pass
from tests.support.ledgers import insert_node

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.api import Api, Reply
    from tests.support.postgres import Dsn

# Node 0: one GPU in MIG mode as two halves, one shared in four slots. Nodes 1 to 4: eight whole GPUs in two NVLink
# sets of four; node 1 is in zone a, nodes 3 and 4 in zone b.
_FLEET = (
    "update device set mig = true where node_id = 1 and slot = 7",
    """
    insert into mig_instance (device_id, node_id, uuid, gpu_instance, compute_instance, profile, start_slice, slices,
                              span, memory_mib)
    select device_id, node_id, 'MIG-' || gi, gi, 0, '3g.40gb', 4 * gi, 4, int4range(336 + 24 * gi, 360 + 24 * gi), 40320
    from device cross join generate_series(0, 1) gi where node_id = 1 and slot = 7
    """,
    "update device set time_slots = 4 where node_id = 1 and slot = 6",
    "update device set nvlink_group = slot / 4 where node_id > 1",
    """update node set labels = '{"zone": "a"}' where node_id = 2""",
    """update node set labels = '{"zone": "b"}' where node_id in (4, 5)""",
)
HOUR: dict[str, Any] = {"duration_s": 3600}
ASKED = (
    *("nodes", "gpus", "gpus_per_node", "vcpus", "memory_mib", "devices", "topology", "whole_node", "selector"),
    "strategy",
)


@asynccontextmanager
async def open_pool(dsn: Dsn) -> AsyncGenerator[Api]:
    """The fleet above in a pool `h100`, an empty pool `new`, one of CPUs, and a quota for each of two tenants."""
    async with open_api(dsn) as api:
        await api.ok("sites/create", slug="berlin")
        await api.ok("pools/create", site="berlin", slug="h100", gpu_model="NVIDIA H100")
        await api.ok("pools/create", site="berlin", slug="new", gpu_model="B200")
        await api.ok("pools/create", site="berlin", slug="cpus", kind="cpu")
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            for number in range(5):
                insert_node(conn, 1, number, 8)
            insert_node(conn, 3, 5, 0)
            for statement in _FLEET:
                conn.execute(statement.encode())
        for tenant in ("acme", "rival"):
            await api.make_tenant(tenant)
            await api.ok("quotas/create", tenant=tenant, gpus_max=64, vcpus_max=64, memory_mib_max=2**20)
        yield api


async def reserve(api: Api, **asked: Any) -> dict[str, Any]:
    """What a reservation is once its pool's scheduler has looked at it, if that is who places it."""
    made = await api.ok("reservations/create", **asked, **HOUR)
    if api.context.placer == "pool-lease":
        for pool in ("1", "3"):
            await run_pass(api, pool)
    return await api.ok("reservations/get", id=made["id"])


def booked(dsn: Dsn, reservation: dict[str, Any]) -> list[str]:
    with psycopg.connect(dsn.admin) as conn:
        rows = conn.execute(
            "select spans::text from booking b join reservation r using (reservation_id) where r.public_id = %s"
            " order by b.node_id",
            (reservation["id"],),
        ).fetchall()
    return [row[0] for row in rows]


def units(spans: str) -> int:
    """Of a GPU 48."""
    return sum(int(high) - int(low) for low, high in (part.split(",") for part in spans.strip("{[)}").split("),[")))


async def used(api: Api, tenant: str) -> list[int]:
    (quota,) = (await api.ok("quotas/list", tenant=tenant))["items"]
    return [quota["gpus_used"], quota["vcpus_used"], quota["memory_mib_used"]]


# By name: the shape, the units of GPUs that each node then has booked, and the meters.
SHAPES: dict[str, tuple[dict[str, Any], list[int], dict[str, int]]] = {
    "slots": (
        {"devices": [{"class": "slot.1/4", "count": 2}], "vcpus": 4},
        [24],
        {"gpu.nvidia-h100.slot.1-4.hours": 2, "vcpu.hours": 4},
    ),
    "mig": (
        {"devices": [{"class": "mig.3g.40gb", "count": 1}, {"class": "gpu", "count": 1}]},
        [72],
        {"gpu.nvidia-h100.hours": 1, "gpu.nvidia-h100.mig.3g.40gb.hours": 1},
    ),
    "nvlink": ({"gpus": 4, "topology": "nvlink-all"}, [192], {"gpu.nvidia-h100.hours": 4}),
    "two sets": ({"gpus": 8, "nodes": 2, "topology": "nvlink-all"}, [192, 192], {"gpu.nvidia-h100.hours": 8}),
    "gang": ({"gpus": 16, "strategy": "spread"}, [384, 384], {"gpu.nvidia-h100.hours": 16}),
    "zone": (
        {"gpus": 2, "memory_mib": 1024, "selector": ["zone=b"], "strategy": "spread"},
        [96],
        {"gpu.nvidia-h100.hours": 2},
    ),
    "cores": ({"vcpus": 8}, [0], {"vcpu.hours": 8}),
}


@pytest.mark.parametrize("placer", ["inline", "pool-lease"])
@pytest.mark.parametrize("name", SHAPES)
async def test_a_name_books_what_the_shape_would(dsn: Dsn, name: str, placer: str) -> None:
    shape, expected, meters = SHAPES[name]
    async with open_pool(dsn) as api:
        object.__setattr__(api.context, "placer", placer)
        offering = await api.ok("offerings/create", tenant="acme", pool="h100", slug="x", **shape)
        assert offering["meters"] == meters
        named = await reserve(api, tenant="acme", offering="x")
        plain = await reserve(api, tenant="rival", pool="h100", **shape)
        assert (named["state"], named["offering"], plain["state"]) == ("binding", "x", "binding")
        assert {field: named[field] for field in ASKED} == {field: plain[field] for field in ASKED}
        assert [units(spans) if expected != [0] else 0 for spans in booked(dsn, named)] == expected
        assert await used(api, "acme") == await used(api, "rival")
        assert (await used(api, "acme"))[0] == offering["gpus_charged"]


@pytest.mark.parametrize("placer", ["inline", "pool-lease"])
async def test_a_whole_node_by_its_name(dsn: Dsn, placer: str) -> None:
    async with open_pool(dsn) as api:
        object.__setattr__(api.context, "placer", placer)
        node = await api.ok("offerings/create", pool="h100", slug="node", whole_node=True)
        assert (node["nodes"], node["gpus"], node["gpus_charged"]) == (1, 8, 8)
        assert node["meters"] == {"gpu.nvidia-h100.hours": 8}
        held = await reserve(api, tenant="acme", offering="node")
        assert (held["state"], held["whole_node"], held["gpus"], booked(dsn, held)) == ("binding", True, 8, ["{[0,)}"])
        assert (await used(api, "acme"))[0] == 8
        # how many is how much, and the offering has said it
        more = await api.call("reservations/create", offering="node", nodes=2)
        assert (more.code, more.message) == ("INVALID", "nodes: the offering node says that; leave it out")
        pair = await api.ok("offerings/create", pool="h100", slug="pair", gpus=16, whole_node=True)
        assert pair["nodes"] == 2
        assert booked(dsn, await reserve(api, tenant="rival", offering="pair")) == ["{[0,)}", "{[0,)}"]
        # of CPU nodes there is nothing to count but that they are whole
        bare = await api.ok("offerings/create", pool="cpus", slug="bare", whole_node=True)
        assert (bare["gpus"], bare["gpus_charged"], bare["meters"]) == (0, 0, {})
        assert booked(dsn, await reserve(api, tenant="acme", offering="bare")) == ["{[0,)}"]


async def test_an_nvlink_set_is_waited_for_where_any_gpus_would_do(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        zone: dict[str, Any] = {"selector": ["zone=a"]}
        await api.ok("offerings/create", pool="h100", slug="set", gpus=4, topology="nvlink-all", **zone)
        await api.ok("offerings/create", pool="h100", slug="some", gpus=4, **zone)
        with psycopg.connect(dsn.admin) as conn:  # one of each set of the only node there
            conn.execute("update device set health = 'unhealthy' where node_id = 2 and slot in (0, 4)")
        waiting = await reserve(api, offering="set")
        assert (waiting["state"], waiting["topology"]) == ("queued", "nvlink-all")
        held = await reserve(api, offering="some")
        assert (held["state"], held["topology"]) == ("binding", "any")
        slots = {int(uuid[-1]) for uuid in held["parts"][0]["gpu_uuids"]}
        assert slots & {1, 2, 3}
        assert slots & {5, 6, 7}


# --- what an offering says, and what it leaves ---------------------------------------------------


async def test_what_an_offering_says_is_not_said_again(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        pinned = {"nodes": 1, "topology": "any", "selector": ["zone=b"], "strategy": "pack"}
        await api.ok("offerings/create", pool="h100", slug="pinned", gpus=4, **pinned)
        await api.ok("offerings/create", pool="h100", slug="open", gpus=4)
        left: dict[str, Any] = {"nodes": 2, "topology": "nvlink-all", "selector": ["!zone"], "strategy": "spread"}
        amounts: dict[str, Any] = {
            "pool": "h100",
            "gpus": 4,
            "devices": [{"class": "slot.1/4", "count": 1}],
            "whole_node": True,
            "vcpus": 1,
            "memory_mib": 1,
        }
        for slug, refused in (("pinned", amounts | left), ("open", amounts)):
            for field, value in refused.items():
                for path in ("reservations/create", "reservations/preview"):
                    reply = await api.call(path, offering=slug, **{field: value}, **HOUR)
                    assert (reply.code, reply.field) == ("INVALID", field)
                    assert reply.message == f"{field}: the offering {slug} says that; leave it out"
        held = await reserve(api, offering="open", **left)
        assert {field: held[field] for field in left} == left
        assert (held["gpus"], held["gpus_per_node"], len(held["parts"])) == (4, 2, 2)
        # together they are a request like any other
        reply = await api.call("reservations/create", offering="open", nodes=3, **HOUR)
        assert (reply.code, reply.field) == ("INVALID", "gpus")
        assert "does not divide over 3 nodes" in reply.message


async def test_a_series_by_the_name_of_a_shape(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("offerings/create", pool="h100", slug="x", devices=[{"class": "mig.3g.40gb", "count": 2}])
        made = await api.ok("series/create", offering="x", time_zone="UTC", from_time="10:00", to_time="12:00", count=2)
        assert [window["state"] for window in made["windows"]] == ["placed", "placed"]
        first = await api.ok("reservations/get", id=made["windows"][0]["reservation"])
        assert (first["offering"], first["devices"]) == ("x", [{"class": "mig.3g.40gb", "count": 2}])


# --- refusals ------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "INVALID", "gpus"),
    ({"memory_mib": 1024}, "INVALID", "gpus"),
    ({"gpus": -1}, "INVALID", "gpus"),
    ({"gpus": 12}, "INVALID", "gpus"),
    ({"gpus": 5, "nodes": 2}, "INVALID", "gpus"),
    ({"gpus": 20, "nodes": 2}, "INVALID", "gpus"),
    ({"gpus": 2, "nodes": 0}, "INVALID", "nodes"),
    ({"gpus": 1024, "nodes": 1024}, "INVALID", "nodes"),
    ({"gpus": 4, "vcpus": 3, "nodes": 2}, "INVALID", "vcpus"),
    ({"gpus": 2, "topology": "ring"}, "INVALID", "topology"),
    ({"gpus": 2, "topology": ""}, "INVALID", "topology"),
    ({"vcpus": 2, "topology": "nvlink-all"}, "INVALID", "topology"),
    ({"gpus": 16, "topology": "nvlink-all"}, "INVALID", "topology"),
    ({"gpus": 1, "strategy": "best"}, "INVALID", "strategy"),
    ({"gpus": 1, "selector": ["zone in (a)"]}, "INVALID", "selector"),
    ({"whole_node": True, "vcpus": 1}, "INVALID", "vcpus"),
    ({"whole_node": True, "memory_mib": 1}, "INVALID", "memory_mib"),
    ({"whole_node": True, "devices": [{"class": "slot.1/4", "count": 1}]}, "INVALID", "devices"),
    ({"gpus": 1, "devices": [{"class": "gpu", "count": 1}]}, "INVALID", "devices"),
    ({"devices": [{"class": "slot.1/4", "count": 1}, {"class": "slot.1/4", "count": 1}]}, "INVALID", "devices"),
    ({"devices": [{"class": "slot.1/4", "count": 3}], "nodes": 2}, "INVALID", "devices"),
    ({"devices": [{"class": "slot.1/5", "count": 1}]}, "INVALID", "devices"),
    ({"devices": [{"class": "slot.1/4", "count": 0}]}, "INVALID", "devices[0].count"),
    ({"devices": [{"class": "mig.7g.80gb", "count": 1}]}, "IMPOSSIBLE", "devices"),
    ({"pool": "cpus", "gpus": 1}, "INVALID", "gpus"),
    ({"pool": "cpus"}, "INVALID", "vcpus"),
    ({"pool": "cpus", "devices": [{"class": "slot.1/4", "count": 1}]}, "IMPOSSIBLE", "devices"),
    ({"pool": "cpus", "devices": [{"class": "mig.3g.40gb", "count": 1}]}, "IMPOSSIBLE", "devices"),
    ({"pool": "none", "gpus": 1}, "NOT_FOUND", "pool"),
]


async def test_no_offering_names_what_no_request_can_ask(dsn: Dsn, subtests: pytest.Subtests) -> None:
    async with open_pool(dsn) as api:

        def told(reply: Reply) -> tuple[str, str | None, str]:
            return reply.code, reply.field, reply.message

        for shape, code, field in REFUSED:
            typed = {"pool": "h100", **shape}
            with subtests.test(str(shape)):
                refused = await api.call("offerings/create", slug="x", **typed)
                assert (refused.code, refused.field) == (code, field)
                assert told(refused) == told(await api.call("reservations/create", **typed, **HOUR))
        assert (await api.ok("offerings/list"))["items"] == []


async def test_a_pools_limits_are_those_of_the_window_that_is_asked_for(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        await api.ok("pools/update", pool="h100", max_duration_s=60)
        await api.ok("offerings/create", pool="h100", slug="one", gpus=1)
        reply = await api.call("reservations/create", offering="one", **HOUR)
        assert (reply.code, reply.field) == ("INVALID", "duration_s")


async def test_a_pool_without_nodes_does_not_say_how_large_a_whole_one_is(dsn: Dsn) -> None:
    async with open_pool(dsn) as api:
        reply = await api.call("offerings/create", pool="new", slug="node", whole_node=True)
        assert (reply.code, reply.field) == ("IMPOSSIBLE", "gpus")
        made = await api.ok("offerings/create", pool="new", slug="node", whole_node=True, gpus=8)
        assert (made["nodes"], made["gpus"]) == (1, 8)
