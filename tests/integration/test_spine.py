"""The way of a user, on real parts: two agents join, a reservation becomes active, its end is signed."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from controlplane.cli.client import ApiFailure
from tests.support.stack import GPU_UUID, eventually, open_stack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn


async def test_from_join_to_released(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        for name in ("one", "two"):
            await stack.add_node(name)
        reservation = await stack.reserve(4)
        active = await stack.wait_state(reservation, "active")
        (part,) = active["parts"]
        cdi = stack.cdi_dir(part["node_name"])
        (file,) = cdi.glob("*.json")
        spec = json.loads(file.read_text())
        assert f"{spec['kind']}={spec['devices'][0]['name']}" == part["cdi_device"]
        env = spec["devices"][0]["containerEdits"]["env"] + spec.get("containerEdits", {}).get("env", [])
        assert f"BCD_GPU_UUIDS={','.join(part['gpu_uuids'])}" in env
        assert f"BCD_RESERVATION={active['id']}" in env
        assert len(GPU_UUID.findall(file.read_text())) >= 4
        # the same through the operator's own tool
        assert (await stack.bcctl("reservations", "get", active["id"], "--query", "state")).strip() == "active"
        await stack.client.change("reservations/release", {"id": active["id"]})
        released = await stack.wait_state(active, "released")
        assert released["end_cause"] == "released_by_holder"
        assert released["parts"][0]["release_evidence"] == "signed"
        assert list(cdi.glob("*.json")) == []
        kinds = [row[0] for row in stack.sql("select kind from outbox where subject = %s order by seq", active["id"])]
        assert [k.removeprefix("reservation.") for k in kinds] == [
            "placed",
            "binding",
            "active",
            "releasing",
            "released",
        ]
        stack.assert_sound()


async def test_an_answered_reservation_outlives_kill_9_of_the_server(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        await stack.add_node("one")
        reservation = await stack.reserve(4)
        stack.server.kill()
        await stack.server.wait()
        await stack.start_server()
        await stack.wait_state(reservation, "active")
        stack.assert_sound()


async def test_a_silent_node_keeps_what_it_holds(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        agent = await stack.add_node("one")
        active = await stack.wait_state(await stack.reserve(8), "active")
        agent.kill()
        # what the lease's end does, without waiting for it: the last sign of life was long ago
        stack.sql("update node_liveness set last_seen_at = compute_now() - interval '1 hour'")
        stack.sql("update node_session set opened_at = compute_now() - interval '1 hour'")
        node = await stack.wait_node("one", lambda node: node["connectivity"] == "unreachable")
        assert not node["placeable"]
        assert (await stack.get(active))["state"] == "active"
        with pytest.raises(ApiFailure) as refused:
            await stack.reserve(8, queue=False)
        assert refused.value.code == "SOLD_OUT"
        # a window that ends meanwhile only waits
        await stack.client.change("reservations/release", {"id": active["id"]})
        assert (await stack.get(active))["state"] == "releasing"
        stack.start_bcd("one")
        await stack.wait_node("one", lambda node: node["connectivity"] == "connected")
        released = await stack.wait_state(active, "released")
        assert released["parts"][0]["release_evidence"] == "signed"
        stack.assert_sound()


async def test_back_again_it_is_the_same_holder(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        agent = await stack.add_node("one")
        active = await stack.wait_state(await stack.reserve(4), "active")
        agent.kill()
        stack.sql("update node_liveness set last_seen_at = compute_now() - interval '1 hour'")
        stack.sql("update node_session set opened_at = compute_now() - interval '1 hour'")
        await stack.wait_node("one", lambda node: node["connectivity"] == "unreachable")
        stack.start_bcd("one")
        await stack.wait_node("one", lambda node: node["placeable"])
        assert await stack.get(active) == active | {"parts": (await stack.get(active))["parts"]}
        assert (await stack.get(active))["parts"][0]["gpu_uuids"] == active["parts"][0]["gpu_uuids"]
        assert list(stack.cdi_dir("one").glob("*.json"))
        stack.assert_sound()


@pytest.mark.parametrize("journal", ["kept", "deleted"])
async def test_a_node_that_slept_through_it_all_signs_the_tombstone(dsn: Dsn, tmp_path: Path, journal: str) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        agent = await stack.add_node("one")
        agent.process.send_signal(signal.SIGSTOP)
        reservation = await stack.reserve(4)
        assert reservation["state"] == "binding"
        await stack.client.change("reservations/release", {"id": reservation["id"]})
        assert (await stack.get(reservation))["state"] == "releasing"
        agent.kill()
        await agent.wait()
        if journal == "deleted":
            for file in (tmp_path / "one").glob("journal.db*"):
                file.unlink()
        stack.start_bcd("one")
        released = await stack.wait_state(reservation, "released")
        assert released["parts"][0]["release_evidence"] == "signed"
        stack.assert_sound()


async def test_a_command_is_neither_lost_nor_run_twice(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        agent = await stack.add_node("one")
        node = await stack.node("one")
        agent.process.send_signal(signal.SIGSTOP)
        command = await stack.client.change(
            "commands/create", {"node": node["id"], "kind": "diag.echo", "deadline_s": 120}
        )
        agent.kill()
        await agent.wait()
        stack.start_bcd("one")

        async def state() -> str:
            return str((await stack.client.read("commands/get", {"id": command["id"]}))["state"])

        async def ended() -> bool:
            return await state() not in ("queued", "dispatched", "accepted", "running")

        await eventually(ended, what="the command has ended")
        assert await state() in ("succeeded", "indeterminate")
        assert stack.sql("select count(*) from command where public_id = %s", command["id"]) == [(1,)]
