"""What operators do to nodes, tokens, commands and holds over the API; what others may not even see."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controlplane.api.groups.commands import ARGUMENTS_BYTES_MAX
from controlplane.db import places
from controlplane.fleet.join_service import JoinRefused
from controlplane.fleet.lifecycle import step
from controlplane.model.labels import InvalidLabel, parse_selector, selects
from shared.joining import parse_token
from shared.signing import KeyClass, Verifier
from tests.support.api import Api, Reply, open_api
from tests.support.ledgers import LedgerFleet
from tests.support.ledgers import open_fleet as open_ledger_fleet
from tests.support.lifecycles import adopt, begin, pass_checks, reserve, run_step, state_of
from tests.support.machines import Fleet, make_machine, open_fleet
from tests.support.stack import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.support.postgres import Dsn


@asynccontextmanager
async def open_ledger(dsn: Dsn, *, nodes: int = 1) -> AsyncGenerator[tuple[LedgerFleet, Api]]:
    """Adopted nodes, and the API over them."""
    async with open_ledger_fleet(dsn, nodes=nodes) as fleet:
        # the API makes the root tenant first; the ledger's goes below it under the key that it had
        fleet.execute("delete from iam.tenant")
        async with open_api(dsn) as api:
            fleet.execute(
                """
                insert into iam.tenant (tenant_id, public_id, parent_id, slug, name) overriding system value
                select %s, 'ten_test', tenant_id, 'test', 'Test' from iam.tenant
                """,
                fleet.tenant_id,
            )
            # the API orders releases with a key of its own
            fleet.verifier = Verifier(
                {KeyClass.INTENT: [fleet.tools.signer.public_key, api.context.tools.signer.public_key]}
            )
            yield fleet, api


@asynccontextmanager
async def open_machines(dsn: Dsn, directory: Path) -> AsyncGenerator[tuple[Fleet, Api]]:
    """A pool that machines can join, and the API over it."""
    async with open_fleet(dsn, directory) as fleet, open_api(dsn) as api:
        yield fleet, api


def queued(fleet: LedgerFleet | Fleet) -> set[tuple[str, str]]:
    return set(fleet.execute("select queue, key from work_queue"))


def events(fleet: LedgerFleet | Fleet, prefix: str) -> list[str]:
    rows = fleet.execute("select kind from outbox where starts_with(kind, %s) order by xid, seq", prefix)
    return [kind for (kind,) in rows]


def unreachable(fleet: LedgerFleet) -> None:
    fleet.execute("update node set connectivity = 'unreachable'")


# --- nodes


async def test_nodes_are_listed_with_what_they_have(dsn: Dsn) -> None:
    async with open_ledger(dsn, nodes=3) as (fleet, api):
        held = await fleet.reserve(8)
        page = await api.ok("nodes/list", limit=2)
        assert [node["name"] for node in page["items"]] == ["node-0", "node-1"]
        rest = await api.ok("nodes/list", cursor=page["next_cursor"])
        assert [node["name"] for node in rest["items"]] == ["node-2"]
        node = next(n for n in page["items"] + rest["items"] if n["gpus_held"])
        assert (node["gpus"], node["gpus_held"], node["vcpus"], node["placeable"]) == (8, 8, 64, True)
        assert (node["provision_state"], node["connectivity"], node["authorized"]) == ("adopted", "connected", True)
        assert node["revoke_reason"] is None
        assert (await api.ok("nodes/get", node=node["name"]))["id"] == node["id"]
        devices = await api.ok("devices/list", node=node["id"])
        assert [device["held_by"] for device in devices["items"]] == [[held.public_id]] * 8
        device = devices["items"][3]
        assert await api.ok("devices/get", device=device["uuid"]) == device
        assert (await api.ok("devices/list", health="missing"))["items"] == []
        wrong = await api.call("nodes/get", node="node-7")
        assert (wrong.code, wrong.field) == ("NOT_FOUND", "node")
        assert "node-" in wrong.message


async def test_nodes_are_listed_by_the_selectors_that_reservations_have(dsn: Dsn) -> None:
    labels = [{}, {"zone": "a"}, {"zone": "b"}, {"zone": "a", "disk": "nvme"}, {"zone": "", "spot": "yes"}]
    terms = ["zone=a", "zone=", "zone!=a", "zone", "!zone", "disk", "!disk", "disk=nvme", "spot!=yes"]
    async with open_ledger(dsn, nodes=len(labels)) as (_, api):
        for number, put in enumerate(labels):
            if put:
                await api.ok("nodes/label", node=f"node-{number}", put=put)
        for asked in [[], *([term] for term in terms), *map(list, itertools.combinations(terms, 2))]:
            try:
                selector = parse_selector(asked)
            except InvalidLabel:
                continue
            matching = [f"node-{n}" for n, has in enumerate(labels) if selects(selector, tuple(has.items()))]
            found = await api.ok("nodes/list", selector=asked)
            assert [node["name"] for node in found["items"]] == matching, asked
        page = await api.ok("nodes/list", selector=["zone"], limit=3)
        assert [node["name"] for node in page["items"]] == ["node-1", "node-2", "node-3"]
        rest = await api.ok("nodes/list", selector=["zone"], cursor=page["next_cursor"])
        assert [node["name"] for node in rest["items"]] == ["node-4"]
        wrong = await api.call("nodes/list", selector=["zone in (a,b)"])
        assert (wrong.code, wrong.field) == ("INVALID", "selector")
        assert wrong.message.endswith("write zone=a, zone!=a, zone or !zone")


async def test_a_member_knows_of_no_node(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        member = await api.make_tenant("acme", role="member")
        node = fleet.nodes[0].public_id
        reads: list[tuple[str, dict[str, Any]]] = [
            ("nodes/list", {}),
            ("nodes/get", {"node": node}),
            ("devices/list", {}),
            ("joinTokens/list", {}),
            ("commands/list", {}),
        ]
        for path, given in reads:
            assert (await api.call(path, key=member, **given)).code == "DENIED", path
        # an act on a node that exists is answered like one on a node that does not
        acts = [await api.call("nodes/cordon", key=member, node=ref) for ref in (node, "node_nowhere")]
        assert {act.code for act in acts} == {"NOT_FOUND"}
        assert (await api.call("joinTokens/create", key=member, pool="h100")).code == "DENIED"
        assert fleet.execute("select count(*) from join_token") == [(0,)]


async def test_cordon_and_drain(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        later = await fleet.reserve(4, start_s=3600)
        fleet.execute("delete from work_queue")
        node = await api.ok("nodes/cordon", node="node-0", reason="new firmware")
        assert (node["cordoned"], node["placeable"], node["cordon_reason"]) == (True, False, "new firmware")
        assert queued(fleet) == {("reservation", str(later.reservation_id))}
        await api.ok("nodes/cordon", node="node-0")
        node = await api.ok("nodes/uncordon", node="node-0")
        assert (node["cordoned"], node["placeable"], node["cordon_reason"]) == (False, True, "")
        assert ("pool", "1") in queued(fleet)
        node = await api.ok("nodes/drain", node="node-0", reason="move")
        assert (node["draining"], node["placeable"]) == (True, False)
        node = await api.ok("nodes/undrain", node="node-0")
        assert (node["draining"], node["placeable"]) == (False, True)
        assert events(fleet, "node.") == ["node.cordoned", "node.uncordoned", "node.draining", "node.undrained"]
        assert api.decisions == 5


async def test_the_release_of_the_last_hold_wakes_a_draining_node(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        held = await fleet.reserve(4)
        await fleet.bound(held)
        await api.ok("nodes/drain", node="node-0")
        await fleet.release(held)
        fleet.execute("delete from work_queue")
        node_id = fleet.nodes[0].node_id
        await fleet.run(step, fleet.tools, node_id)
        assert "node.drained" not in events(fleet, "node."), "the hold ends when the node says so"
        await fleet.released(held)
        assert ("node", str(node_id)) in queued(fleet)
        for _ in range(2):
            await fleet.run(step, fleet.tools, node_id)
        assert events(fleet, "node.") == ["node.draining", "node.drained"]
        node = await api.ok("nodes/get", node="node-0")
        assert [found["kind"] for found in node["conditions"]] == ["drained"]
        await api.ok("nodes/undrain", node="node-0")
        assert (await api.ok("nodes/get", node="node-0"))["conditions"] == []


async def test_quarantine_and_back(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        held = await fleet.reserve(4)
        node = await api.ok("nodes/quarantine", node="node-0", reason="smells burnt")
        assert (node["provision_state"], node["quarantine_reason"]) == ("quarantined", "smells burnt")
        assert (await fleet.load(held.reservation_id)).state == "binding"
        # said again it keeps the reason, or takes a better one, which the holders read; and it is no other event
        assert (await api.ok("nodes/quarantine", node="node-0"))["quarantine_reason"] == "smells burnt"
        fleet.execute("delete from work_queue")
        node = await api.ok("nodes/quarantine", node="node-0", reason="the fan")
        assert node["quarantine_reason"] == "the fan"
        assert ("reservation", str(held.reservation_id)) in queued(fleet)
        assert events(fleet, "node.") == ["node.quarantined"]
        node = await api.ok("nodes/unquarantine", node="node-0")
        assert node["provision_state"] == "adopting"
        assert ("node", str(fleet.nodes[0].node_id)) in queued(fleet)
        fleet.execute("update node set provision_state = 'adopted'")
        assert (await api.call("nodes/unquarantine", node="node-0")).code == "CONFLICT"


async def test_revoked_certificates_speak_no_more(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fleet.hello(machine)
        node = await api.ok("nodes/revoke", node=machine.public_id, reason="stolen")
        assert (node["authorized"], node["session_open"], node["revoke_reason"]) == (False, False, "stolen")
        assert [row["revoke_reason"] for row in (await api.ok("fleet/board"))["items"]] == ["stolen"]
        assert fleet.execute("select count(*) from certificate where revoked_at is null") == [(0,)]
        assert fleet.execute("select placeable from node where public_id = %s", machine.public_id) == [(False,)]
        assert "bc_gateway" in api.rings.rung


# --- how nodes leave


async def test_an_idle_node_is_decommissioned(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        first = await api.ok("commands/create", node=machine.name, kind="diag.echo")
        second = await api.ok("commands/create", node=machine.name, kind="diag.echo")
        fleet.execute(
            "insert into command_delivery (command_id, node_id, epoch, journal_id) "
            "select command_id, node_id, 1, 'j' from command where public_id = %s",
            second["id"],
        )
        gone = await api.ok("nodes/decommission", node=machine.name, reason="sold")
        assert gone == {"id": machine.public_id, "name": machine.name, "released": [], "to_move": []}
        states = [(await api.ok("commands/get", id=made["id"]))["state"] for made in (first, second)]
        assert states == ["cancelled", "indeterminate"]
        assert (await api.ok("nodes/list"))["items"] == []
        (node,) = (await api.ok("nodes/list", provision_state="decommissioned"))["items"]
        assert (node["authorized"], node["decommissioned_at"] is None) == (False, False)
        assert (await api.call("nodes/cordon", node=machine.public_id)).code == "CONFLICT"
        # name and machine are free again
        await fleet.join(machine, await fleet.token())


async def test_a_node_with_holds_stays(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        held = await fleet.reserve(4)
        refused = await api.call("nodes/decommission", node="node-0")
        assert refused.code == "CONFLICT"
        assert held.public_id in refused.message
        assert "drain" in refused.message
        # one that can speak for itself is not forced either
        assert (await api.call("nodes/forceDecommission", node="node-0", reason="x")).code == "CONFLICT"
        assert (await fleet.load(held.reservation_id)).state == "binding"
        assert fleet.execute("select provision_state from node") == [("adopted",)]
        unreachable(fleet)
        refused = await api.call("nodes/decommission", node="node-0")
        assert "forceDecommission" in refused.message
        # somebody says why
        silent = await api.call("nodes/forceDecommission", node="node-0")
        empty = await api.call("nodes/forceDecommission", node="node-0", reason="")
        assert [(refused.code, refused.field) for refused in (silent, empty)] == [("INVALID", "reason")] * 2
        assert (await fleet.load(held.reservation_id)).state == "binding"


async def test_a_node_that_will_not_come_back(dsn: Dsn) -> None:
    """Running, releasing and future reservations, one of them over two nodes; only this node's parts are forced."""
    async with open_ledger(dsn, nodes=2) as (fleet, api):
        gang = await fleet.reserve(2, nodes=2)
        await fleet.bound(gang)
        future = await fleet.reserve(2, nodes=2, start_s=3600)
        ending = await fleet.reserve(6)
        await fleet.bound(ending)
        await fleet.release(ending)
        (hold,) = await fleet.holds(ending)
        dead = next(node for node in fleet.nodes if node.node_id == hold.node_id)
        other = next(node for node in fleet.nodes if node.node_id != hold.node_id)
        fleet.execute("update node set connectivity = 'unreachable' where node_id = %s", dead.node_id)
        gone = await api.ok("nodes/forceDecommission", node=dead.public_id, reason="burnt down")
        assert sorted(gone["released"]) == sorted([gang.public_id, ending.public_id])
        assert gone["to_move"] == [future.public_id]
        states = [(await fleet.load(each.reservation_id)).state for each in (gang, future, ending)]
        # what was to begin keeps its other node, and is moved as soon as there is one for this part
        assert states == ["releasing", "placed", "released"]
        assert ("reservation", str(future.reservation_id)) in queued(fleet)
        assert "the node is decommissioned" in (await fleet.step(future)).impaired_reason
        ended = await fleet.load(gang.reservation_id)
        assert (ended.end_cause, ended.end_detail) == ("node_decommissioned", "burnt down")
        holds = {held.node_id: held for held in await fleet.holds(gang)}
        assert (holds[dead.node_id].release_evidence, holds[dead.node_id].forced_by is None) == ("forced", False)
        assert holds[other.node_id].released_at is None
        assert fleet.execute("select count(*) from device where node_id = %s and retired_at is null", dead.node_id) == [
            (0,)
        ]
        # the part of the gang on the other node ends by that node's own word
        await fleet.released(gang)
        assert (await fleet.load(gang.reservation_id)).state == "released"
        fleet.assert_sound()
        (audited,) = (await api.ok("audit/list", action="node.force_decommission"))["items"]
        assert (audited["reason"], audited["detail"]["released"]) == ("burnt down", gone["released"])


async def test_a_forced_release_of_one_hold(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        held = await fleet.reserve(4)
        await fleet.bound(held)
        (hold,) = await fleet.holds(held)
        assert (await api.ok("allocations/get", id=hold.public_id))["state"] == "bound"
        assert (await api.call("allocations/forceRelease", id=hold.public_id, reason="x")).code == "CONFLICT"
        assert (await fleet.load(held.reservation_id)).state == "active"
        unreachable(fleet)
        released = await api.ok("allocations/forceRelease", id=hold.public_id, reason="node is on fire")
        assert (released["state"], released["release_evidence"]) == ("released", "forced")
        after = await fleet.load(held.reservation_id)
        assert (after.state, after.end_cause) == ("released", "evicted_by_operator")
        assert after.end_detail == "node is on fire"
        (audited,) = (await api.ok("audit/list", action="allocation.force_release", decision="allow"))["items"]
        assert audited["reason"] == "node is on fire"
        assert (await api.call("allocations/forceRelease", id=hold.public_id, reason="x")).code == "CONFLICT"
        assert (await api.ok("allocations/list", held=True))["items"] == []
        assert len((await api.ok("allocations/list", reservation=held.public_id))["items"]) == 1
        fleet.assert_sound()


async def test_a_tenant_sees_its_own_holds(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        held = await fleet.reserve(4)
        (hold,) = await fleet.holds(held)
        mine = await api.make_key("test", role="member")
        other = await api.make_tenant("acme")
        assert len((await api.ok("allocations/list", key=mine))["items"]) == 1
        assert (await api.ok("allocations/list", key=other))["items"] == []
        assert (await api.call("allocations/get", key=other, id=hold.public_id)).code == "NOT_FOUND"
        # a tenant's admin does not force: that is the operators'
        unreachable(fleet)
        refused = await api.call("allocations/forceRelease", key=mine, id=hold.public_id, reason="now")
        assert refused.code == "DENIED"


# --- tokens


async def test_a_token_is_shown_once_and_joins(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        made = await api.ok("joinTokens/create", pool="h100", node_name="rack1-1", idempotency_key="k")
        join = f"bcd join https://gateway.test:7443 --pin sha256:{'0' * 64} --token-file -"
        assert made["command"] == f"echo {made['token']} | {join}"
        assert (made["uses"], made["uses_left"], made["expired"]) == (1, 1, False)
        again = await api.call("joinTokens/create", pool="h100", node_name="rack1-1", idempotency_key="k")
        assert (again.data["id"], again.data["token"], again.data["command"]) == (made["id"], None, None)
        secret = made["token"].partition(".")[2]
        assert fleet.execute("select count(*) from audit_event where detail::text like %s", f"%{secret}%") == [(0,)]
        await fleet.join(make_machine(), parse_token(made["token"]))
        (listed,) = (await api.ok("joinTokens/list", pool="h100"))["items"]
        assert (listed["id"], listed["uses_left"], listed["token"]) == (made["id"], 0, None)


async def test_a_revoked_token_joins_nobody(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        made = await api.ok("joinTokens/create", pool="h100", uses=10)
        await fleet.join(make_machine("a"), parse_token(made["token"]))
        # a use between the look and the revocation is no conflict
        revoked = await api.ok("joinTokens/revoke", id=made["token"])
        assert revoked["revoked_at"] is not None
        with pytest.raises(JoinRefused):
            await fleet.join(make_machine("b"), parse_token(made["token"]))
        assert (await api.call("joinTokens/revoke", id=made["id"])).code == "CONFLICT"


async def test_a_token_for_a_known_node(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        made = await api.ok("joinTokens/create", expect=machine.name)
        assert (made["pool"], made["expect"]) == ("h100", machine.public_id)
        await fleet.join(make_machine(), parse_token(made["token"]))
        assert fleet.execute("select count(*) from node") == [(1,)]
        await fleet.add_pool("other", gpu_model="H100")
        bad: list[tuple[dict[str, Any], str]] = [
            ({"expect": machine.name, "uses": 2}, "uses"),
            ({"expect": machine.name, "node_name": "x"}, "node_name"),
            ({"expect": machine.name, "pool": "other"}, "pool"),
            ({"pool": "h100", "uses": 2, "node_name": "x"}, "node_name"),
            ({"pool": "h100", "node_name": "-x"}, "node_name"),
            ({"pool": "h100", "uses": 0}, "uses"),
            ({"pool": "h100", "expires_in_s": 1}, "expires_in_s"),
            ({}, "pool"),
        ]
        for given, field in bad:
            refused = await api.call("joinTokens/create", **given)
            assert (refused.code, refused.field) == ("INVALID", field), given
        assert (await api.call("joinTokens/create", pool="h1000")).message.endswith("did you mean h100?")


# --- commands


async def test_a_command_from_order_to_cancel(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        made = await api.ok("commands/create", node=machine.name, kind="diag.echo", arguments={"a": [1]})
        assert (made["state"], made["arguments"], made["node"]) == ("queued", {"a": [1]}, machine.public_id)
        assert "bc_gateway" in api.rings.rung
        assert [c["id"] for c in (await api.ok("commands/list", node=machine.name, state="queued"))["items"]] == [
            made["id"]
        ]
        assert (await api.ok("commands/list", state="dispatched"))["items"] == []
        assert (await api.ok("commands/cancel", id=made["id"]))["state"] == "cancelled"
        refused = await api.call("commands/cancel", id=made["id"])
        assert (refused.code, "cancelled" in refused.message) == ("CONFLICT", True)
        bad: list[tuple[dict[str, Any], str]] = [
            ({"kind": "Diag"}, "kind"),
            ({"kind": "diag.echo", "deadline_s": 0}, "deadline_s"),
            ({"kind": "diag.echo", "lane": "fast"}, "lane"),
            ({"kind": "diag.echo", "arguments": {"x": "y" * ARGUMENTS_BYTES_MAX}}, "arguments"),
        ]
        for given, field in bad:
            refused = await api.call("commands/create", node=machine.name, **given)
            assert (refused.code, refused.field) == ("INVALID", field)


async def test_one_name_in_two_sites(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        await fleet.join(make_machine("a"), await fleet.token())
        await fleet.run(places.insert_site, public_id="site_there", slug="there", name="There")
        fleet.execute(
            """
            insert into node (public_id, site_id, pool_id, name, provision_state)
            select 'node_twin', s.site_id, %s, 'a', 'adopting' from site s where s.slug = 'there'
            """,
            fleet.pool_id,
        )
        refused = await api.call("nodes/get", node="a")
        assert (refused.code, refused.field) == ("INVALID", "node")
        assert (await api.ok("nodes/get", node="node_twin"))["site"] == "there"


# --- another name, another pool


async def test_a_node_gets_another_name(dsn: Dsn) -> None:
    async with open_ledger(dsn, nodes=2) as (fleet, api):
        held = await fleet.reserve(4)
        node = await api.ok("nodes/update", node="node-0", name="rack-7.gpu-3")
        assert (node["name"], node["placeable"]) == ("rack-7.gpu-3", True)
        taken = await api.call("nodes/update", node="rack-7.gpu-3", name="node-1")
        assert (taken.code, taken.field) == ("CONFLICT", "name")
        assert (await api.call("nodes/update", node="node-1", name="-x")).code == "INVALID"
        await api.ok("nodes/update", node="node-1", name="node-1")
        (data,) = fleet.execute("select data from outbox where kind = 'node.updated'")[0]
        assert data == {"name": "rack-7.gpu-3", "pool": "h100", "was_name": "node-0"}
        assert events(fleet, "node.") == ["node.updated"]
        await fleet.bound(held)
        (said,) = fleet.execute("select data -> 'nodes' from outbox where kind = 'reservation.active'")[0]
        assert said == ["rack-7.gpu-3"]


async def test_a_node_goes_to_another_pool_and_passes_its_acceptance(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        machine = await adopt(fleet, make_machine())
        await fleet.add_pool("sxm", gpu_model="NVIDIA H100 80GB HBM3")
        fleet.advance(60)
        before = fleet.value("select placement_gen from node")
        node = await api.ok("nodes/update", node=machine.name, pool="sxm", name="moved")
        assert (node["pool"], node["name"], node["provision_state"]) == ("sxm", "moved", "adopting")
        assert fleet.value("select placement_gen from node") > before
        assert events(fleet, "node.")[-3:] == ["node.updated", "node.adopting", "node.updated"]
        await run_step(fleet, machine)
        await pass_checks(fleet, machine)
        assert (await api.ok("nodes/get", node="moved"))["placeable"]
        assert (await api.ok("pools/get", pool="sxm"))["gpus"] == 8
        assert (await api.ok("pools/get", pool="h100"))["gpus"] == 0
        # where it is already it stays, and nothing is checked again
        node = await api.ok("nodes/update", node="moved", pool="sxm")
        assert node["provision_state"] == "adopted"


async def test_what_joined_into_the_wrong_pool_is_put_right(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        wrong = await fleet.add_pool("a100", gpu_model="A100")
        machine = await begin(fleet, make_machine(), pool_id=wrong)
        assert state_of(fleet, machine)[0] == "quarantined"
        node = await api.ok("nodes/update", node=machine.name, pool="h100")
        assert (node["pool"], node["provision_state"]) == ("h100", "quarantined")
        await api.ok("nodes/unquarantine", node=machine.name)
        await run_step(fleet, machine)
        await pass_checks(fleet, machine)
        assert state_of(fleet, machine) == ("adopted", "")


async def test_a_node_stays_where_it_is_needed_or_fits(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        machine = await adopt(fleet, make_machine())
        await fleet.add_pool("a100", gpu_model="A100")
        await fleet.add_pool("cpu", gpu_model=None)
        await fleet.add_pool("other", gpu_model="H100")
        await api.ok("sites/create", slug="there")
        await api.ok("pools/create", site="there", slug="far", gpu_model="H100")

        async def refused(pool: str) -> str:
            reply = await api.call("nodes/update", node=machine.name, pool=pool)
            assert (reply.code, reply.field) == ("CONFLICT", "pool")
            return reply.message

        assert await refused("a100") == "pool: the pool is for A100, this machine has 8 x NVIDIA H100 80GB HBM3"
        assert "without GPUs" in await refused("cpu")
        assert "is in site there" in await refused("far")
        assert (await api.call("nodes/update", node=machine.name, pool="h1000")).code == "NOT_FOUND"
        fleet.execute(
            """
            insert into booking (pool_id, node_id, purpose, spans, during)
            select pool_id, node_id, 'maintenance', '{[0,)}', tstzrange(compute_now() + '1 day', null) from node
            """
        )
        assert "maintenance" in await refused("other")
        fleet.execute("delete from booking")
        held = await reserve(fleet, 1)
        assert held.public_id in await refused("other")
        assert fleet.execute("select p.slug, n.provision_state from node n join pool p using (pool_id)") == [
            ("h100", "adopted")
        ]


async def test_a_pool_that_is_deleted_at_the_same_moment_gets_no_node(dsn: Dsn, tmp_path: Path) -> None:
    async with open_machines(dsn, tmp_path) as (fleet, api):
        machine = await adopt(fleet, make_machine())
        await fleet.add_pool("other", gpu_model="H100")
        with psycopg.connect(dsn.owner) as deleting:
            deleting.execute("select from pool where slug = 'other' for update")
            deleting.execute("update pool set deleted_at = compute_now() where slug = 'other'")

            async def waits() -> bool:
                return fleet.value("select count(*) from pg_locks where not granted") > 0

            async def move(replies: list[Reply]) -> None:
                replies.append(await api.call("nodes/update", node=machine.name, pool="other"))

            replies: list[Reply] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(move, replies)
                await eventually(waits, what="the move waits for the pool")
                deleting.commit()
        assert [reply.code for reply in replies] == ["CONFLICT"]
        assert fleet.value("select p.slug from node n join pool p using (pool_id)") == "h100"
