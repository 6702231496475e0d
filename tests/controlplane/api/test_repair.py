"""Repair over the API: the holder's word moves what is broken, nobody else's, and the answers differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.controlplane.api.test_fleet_groups import open_ledger, queued
from tests.controlplane.capacity.test_repair import active, break_gpus
from tests.support import referee

if TYPE_CHECKING:
    from tests.support.postgres import Dsn


async def test_the_holder_repairs_and_nobody_else(dsn: Dsn) -> None:
    async with open_ledger(dsn, nodes=2) as (fleet, api):
        held = await active(fleet, 8)
        mine = await api.make_key("test", role="member")
        other = await api.make_tenant("acme")
        whole = await api.call("reservations/repair", key=mine, id=held.public_id)
        assert (whole.code, "nothing of it is broken" in whole.message) == ("CONFLICT", True)
        break_gpus(fleet, fleet.nodes[0].uuids[2])
        await fleet.step(held)
        shown = await api.ok("reservations/get", key=mine, id=held.public_id)
        assert (shown["conditions"], fleet.nodes[0].uuids[2] in shown["impaired_reason"]) == (["impaired"], True)
        assert (await api.call("reservations/repair", key=other, id=held.public_id)).code == "NOT_FOUND"
        # somebody has the other node: nothing changes, and the answer says so
        rival = await active(fleet, 8, duration_s=60)
        full = await api.call("reservations/repair", key=mine, id=held.public_id)
        assert (full.code, (await fleet.load(held.reservation_id)).state) == ("SOLD_OUT", "active")
        await fleet.release(rival)
        await fleet.released(rival)
        done = await api.ok("reservations/repair", key=mine, id=held.public_id, idempotency_key="k")
        assert (done["state"], done["conditions"], done["impaired_reason"]) == ("binding", [], "")
        assert [(part["node_name"], part["state"]) for part in done["parts"]] == [
            ("node-0", "releasing"),
            ("node-1", "binding"),
        ]
        again = await api.ok("reservations/repair", key=mine, id=held.public_id, idempotency_key="k")
        assert again["parts"] == done["parts"]
        fleet.assert_sound()
        referee.assert_sound(fleet.owner_dsn)


async def test_quarantine_wakes_those_who_run_and_those_who_are_to_begin(dsn: Dsn) -> None:
    async with open_ledger(dsn) as (fleet, api):
        running, later = await active(fleet, 2), await fleet.reserve(2, start_s=7200)
        keys = {("reservation", str(each.reservation_id)) for each in (running, later)}
        for act in ("nodes/quarantine", "nodes/revoke"):
            fleet.execute("delete from work_queue")
            await api.ok(act, node="node-0", reason="smoke")
            assert queued(fleet) >= keys, act
