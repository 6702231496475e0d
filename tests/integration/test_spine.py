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


async def test_silence_releases_nothing(dsn: Dsn, tmp_path: Path) -> None:
    """Two agents die. One holder keeps its reservation, the other's ends meanwhile; both wait for their node."""
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        agents = [await stack.add_node(name) for name in ("one", "two")]
        kept = await stack.wait_state(await stack.reserve(8), "active")
        ended = await stack.wait_state(await stack.reserve(8), "active")
        for agent in agents:
            agent.kill()
        for name in ("one", "two"):
            assert not (await stack.let_lease_lapse(name))["placeable"]
        assert (await stack.get(kept))["state"] == "active"
        with pytest.raises(ApiFailure) as refused:
            await stack.reserve(1, queue=False)
        assert refused.value.code == "SOLD_OUT"
        assert "2 unreachable" in str(refused.value)
        await stack.client.change("reservations/release", {"id": ended["id"]})
        assert (await stack.get(ended))["state"] == "releasing"
        # nobody else can hold its GPUs until the node has signed
        waiting = await stack.reserve(8)
        assert waiting["state"] == "queued"
        for name in ("one", "two"):
            stack.start_bcd(name)
        released = await stack.wait_state(ended, "released")
        assert released["parts"][0]["release_evidence"] == "signed"
        taken_over = await stack.wait_state(waiting, "active")
        assert taken_over["parts"][0]["node"] == ended["parts"][0]["node"]
        same = await stack.get(kept)
        assert same["state"] == "active"
        assert same["parts"][0]["gpu_uuids"] == kept["parts"][0]["gpu_uuids"]
        assert list(stack.cdi_dir(kept["parts"][0]["node_name"]).glob("*.json"))
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


async def test_a_bind_that_fails_is_tried_elsewhere_and_then_ends(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        await stack.add_node("one")
        cdi = stack.cdi_dir("one")
        cdi.write_text("no directory any more")
        failed = await stack.wait_state(await stack.reserve(4), "released")
        assert failed["end_cause"] == "bind_failed"
        assert "WRITE_FAILED" in failed["end_detail"]
        assert failed["active_at"] is None
        assert stack.sql("select count(*) from allocation") == [(2,)]
        assert stack.sql("select count(*) from usage_window") == [(0,)]
        stack.assert_sound()
