"""A small world made through the API, and a valid request to every method in it.

`examples` has one request per method of the table; a test fails when a new method has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg

from tests.support.ledgers import insert_node

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Dsn


WEEKEND: dict[str, Any] = {
    "pool": "h100",
    "gpus": 1,
    "time_zone": "Europe/Berlin",
    "every": "week",
    "days": ["sat"],
    "from_time": "10:00",
    "to_time": "12:00",
    "count": 2,
}


@dataclass
class World:
    """Ids of what there is. `acme` and `rival` are keys of the two tenants' administrators."""

    api: Api
    acme: str
    rival: str
    member: str
    node: str
    idle_node: str
    device: str
    idle_device: str
    token: str
    command: str
    allocation: str
    project: str
    quota: str
    offering: str
    key: str
    reservation: str
    waiting: str
    series: str
    maintenance: str

    def in_minutes(self, minutes: int) -> str:
        """Write a time; acme's reservation ends in 60 minutes."""
        return (self.api.context.clock.now() + timedelta(minutes=minutes)).isoformat()

    @property
    def of_acme(self) -> list[str]:
        """What nobody of another tenant may see in any answer."""
        return [
            self.project,
            self.quota,
            self.offering,
            self.key,
            self.reservation,
            self.waiting,
            self.allocation,
            self.series,
        ]


async def make_world(api: Api, dsn: Dsn) -> World:
    """Make two tenants with something of everything in one of them, and a pool with a node of eight GPUs."""
    await api.ok("sites/create", slug="berlin")
    await api.ok("sites/create", slug="bonn")
    await api.ok("pools/create", site="berlin", slug="h100", gpu_model="H100")
    await api.ok("pools/create", site="berlin", slug="empty", kind="cpu")
    with psycopg.connect(dsn.owner, autocommit=True) as conn:
        row = conn.execute("select pool_id from pool where slug = 'h100'").fetchone()
        assert row is not None
        insert_node(conn, row[0], 0, 8)
    acme = await api.make_tenant("acme")
    rival = await api.make_tenant("rival")
    await api.ok("tenants/create", slug="nobody", parent="acme")
    member = await api.make_key("acme", role="member")
    project = await api.ok("projects/create", tenant="acme", slug="vision")
    quota = await api.ok("quotas/create", tenant="acme", gpus_max=8)
    offering = await api.ok("offerings/create", tenant="acme", pool="h100", slug="half", gpus=4)
    key = await api.ok("apiKeys/create", tenant="acme", name="ci", kind="service")
    reservation = await api.ok("reservations/create", tenant="acme", pool="h100", gpus=1, duration_s=3600, key=acme)
    # the quota has no room for it
    waiting = await api.ok("reservations/create", tenant="acme", pool="h100", gpus=8, duration_s=3600, key=acme)
    series = await api.ok("series/create", tenant="acme", key=acme, **WEEKEND)
    allocation = (await api.ok("allocations/list", reservation=reservation["id"]))["items"][0]
    with psycopg.connect(dsn.owner, autocommit=True) as conn:
        idle_node = insert_node(conn, row[0], 1, 8)
    start = (api.context.clock.now() + timedelta(days=14)).isoformat()
    maintenance = await api.ok(
        "maintenance/create", nodes=[idle_node.public_id], start=start, duration_s=3600, reason="fans"
    )
    device = (await api.ok("devices/list", pool="h100"))["items"][0]
    idle_device = (await api.ok("devices/list", node=idle_node.public_id))["items"][0]
    token = await api.ok("joinTokens/create", pool="h100")
    command = await api.ok("commands/create", node=allocation["node"], kind="diag.nvml")
    return World(
        api=api,
        acme=acme,
        rival=rival,
        member=member,
        node=allocation["node"],
        idle_node=idle_node.public_id,
        device=device["id"],
        idle_device=idle_device["id"],
        token=token["id"],
        command=command["id"],
        allocation=allocation["id"],
        project=project["id"],
        quota=quota["id"],
        offering=offering["id"],
        key=key["id"],
        reservation=reservation["id"],
        waiting=waiting["id"],
        series=series["id"],
        maintenance=maintenance["items"][0]["id"],
    )


def examples(w: World) -> dict[str, dict[str, Any]]:
    """Return one valid request per method of the table.

    Each is for an administrator of the root tenant, names the tenant *acme* where it can, and is about
    something of acme's (or of the fleet's) that exists. `prepare` does what must be done first for some.
    """
    return {**_examples_of_tenants(w), **_examples_of_the_fleet(w)}


def _examples_of_tenants(w: World) -> dict[str, dict[str, Any]]:
    return {
        "sites/create": {"slug": "munich"},
        "sites/get": {"site": "berlin"},
        "sites/list": {},
        "sites/update": {"site": "berlin", "name": "Berlin 1"},
        "sites/delete": {"site": "bonn"},
        "pools/create": {"site": "berlin", "slug": "a100", "gpu_model": "A100"},
        "pools/get": {"pool": "h100"},
        "pools/list": {"site": "berlin"},
        "pools/capacity": {"pool": "h100"},
        "pools/update": {"pool": "h100", "name": "H100s"},
        "pools/delete": {"pool": "empty"},
        "tenants/create": {"slug": "acme-labs", "parent": "acme"},
        "tenants/get": {"tenant": "acme"},
        "tenants/list": {},
        "tenants/update": {"tenant": "acme", "name": "Acme Corp"},
        "tenants/delete": {"tenant": "nobody"},
        "projects/create": {"slug": "speech", "tenant": "acme"},
        "projects/get": {"project": w.project},
        "projects/list": {},
        "projects/update": {"project": w.project, "name": "Vision"},
        "projects/delete": {"project": w.project},
        "quotas/create": {"tenant": "acme", "pool": "h100", "gpus_max": 4},
        "quotas/get": {"quota": w.quota},
        "quotas/list": {},
        "quotas/update": {"quota": w.quota, "gpus_max": 16},
        "quotas/delete": {"quota": w.quota},
        "offerings/create": {"tenant": "acme", "pool": "h100", "slug": "whole", "gpus": 8},
        "offerings/get": {"offering": w.offering},
        "offerings/list": {},
        "offerings/update": {"offering": w.offering, "name": "Half a node"},
        "offerings/delete": {"offering": w.offering},
        "apiKeys/create": {"name": "alice", "tenant": "acme", "role": "member"},
        "apiKeys/get": {"id": w.key},
        "apiKeys/list": {},
        "apiKeys/revoke": {"id": w.key},
        "events/list": {},
        "audit/list": {},
        "reservations/create": {"tenant": "acme", "pool": "h100", "gpus": 1, "duration_s": 60},
        "reservations/preview": {"pool": "h100", "gpus": 1, "duration_s": 60},
        "reservations/get": {"id": w.reservation},
        "reservations/list": {},
        "reservations/release": {"id": w.reservation},
        "reservations/extend": {"id": w.reservation, "end": w.in_minutes(120)},
        "reservations/shrink": {"id": w.reservation, "end": w.in_minutes(30)},
        "reservations/evict": {"id": w.reservation, "reason": "maintenance"},
        "reservations/prioritize": {"id": w.waiting, "priority": 10},
        "reservations/repair": {"id": w.reservation},
        "series/create": {"tenant": "acme", **WEEKEND, "days": ["sun"]},
        "series/preview": {**WEEKEND, "days": ["sun"]},
        "series/get": {"id": w.series},
        "series/list": {},
        "series/cancel": {"id": w.series},
    }


def _examples_of_the_fleet(w: World) -> dict[str, dict[str, Any]]:
    return {
        "fleet/board": {},
        "fleet/doctor": {},
        "nodes/get": {"node": w.node},
        "nodes/list": {"pool": "h100"},
        "nodes/update": {"node": w.idle_node, "name": "spare"},
        "nodes/label": {"node": w.node, "put": {"zone": "a"}, "remove": ["old"]},
        "nodes/cordon": {"node": w.node, "reason": "noise"},
        "nodes/uncordon": {"node": w.node},
        "nodes/drain": {"node": w.node, "reason": "noise"},
        "nodes/undrain": {"node": w.node},
        "nodes/quarantine": {"node": w.idle_node, "reason": "smoke"},
        "nodes/unquarantine": {"node": w.idle_node},
        "nodes/revoke": {"node": w.idle_node, "reason": "stolen"},
        "nodes/decommission": {"node": w.idle_node, "reason": "old"},
        "nodes/forceDecommission": {"node": w.idle_node, "reason": "burnt"},
        "maintenance/create": {"nodes": [w.node], "duration_s": 60, "earliest": True, "reason": "fans"},
        "maintenance/get": {"id": w.maintenance},
        "maintenance/list": {},
        "maintenance/extend": {"id": w.maintenance, "end": w.in_minutes(60 * 24 * 30)},
        "maintenance/cancel": {"id": w.maintenance},
        "devices/get": {"device": w.device},
        "devices/list": {"pool": "h100"},
        "devices/share": {"device": w.idle_device, "time_slots": 4},
        "joinTokens/create": {"pool": "h100"},
        "joinTokens/get": {"id": w.token},
        "joinTokens/list": {},
        "joinTokens/revoke": {"id": w.token},
        "commands/create": {"node": w.node, "kind": "diag.nvml"},
        "commands/get": {"id": w.command},
        "commands/list": {},
        "commands/cancel": {"id": w.command},
        "allocations/get": {"id": w.allocation},
        "allocations/list": {},
        "allocations/forceRelease": {"id": w.allocation, "reason": "burnt"},
    }


_BEFORE = {
    "nodes/uncordon": "nodes/cordon",
    "nodes/undrain": "nodes/drain",
    "nodes/unquarantine": "nodes/quarantine",
}


async def prepare(w: World, dsn: Dsn, path: str) -> None:
    """Do what must be done first for the example of a method to be accepted."""
    if path in _BEFORE:
        await w.api.ok(_BEFORE[path], **examples(w)[_BEFORE[path]])
    if path == "devices/share":
        await w.api.ok("maintenance/cancel", id=w.maintenance)
    if path == "reservations/repair":
        with psycopg.connect(dsn.owner) as conn:
            conn.execute("update device set health = 'unhealthy' where public_id = %s", (w.device,))
    if path == "allocations/forceRelease":  # nobody lets go for a node that can do so itself
        with psycopg.connect(dsn.owner) as conn:
            conn.execute("update node set connectivity = 'unreachable'")
