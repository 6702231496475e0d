"""A reservation's events say what it is and where, from what the rows say at that moment."""

from __future__ import annotations

import threading
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controlplane.capacity import end as ending
from controlplane.db import idempotency, outbox, reservation_events, reservations
from controlplane.db.time import load_now
from tests.support.ledgers import LedgerFleet, open_fleet

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn


def told(fleet: LedgerFleet, reservation: Reservation) -> list[tuple[str, dict[str, Any]]]:
    rows = fleet.execute(
        "select kind, data, tenant_id from outbox where subject = %s order by xid, seq", reservation.public_id
    )
    assert {tenant_id for _, _, tenant_id in rows} == {reservation.tenant_id}
    return [(kind.removeprefix("reservation."), data) for kind, data, _ in rows]


def places(fleet: LedgerFleet, reservation: Reservation) -> list[tuple[str, list[str]]]:
    return [(what, data["nodes"]) for what, data in told(fleet, reservation)]


async def test_from_placed_to_released_a_gang_names_its_nodes(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        await fleet.reserve(5)  # so that the first node is none of theirs
        held = await fleet.reserve(8, nodes=2, vcpus=16)
        await fleet.bound(held)
        fleet.advance(60)
        await fleet.release(held)
        await fleet.released(held)
        names = ["node-1", "node-2"]
        assert places(fleet, held) == [
            (what, names) for what in ("placed", "binding", "active", "releasing", "released")
        ]
        said = dict(told(fleet, held))
        assert said["active"].pop("cdi_name").startswith("bettercompute.dev/")
        assert said["active"] == {
            "pool": "h100",
            "gpu_model": "H100",
            "nodes": names,
            "node_count": 2,
            "whole_node": False,
            "gpus": 16,
            "gpus_per_node": 8,
            "vcpus": 32,
            "memory_mib": 0,
        }
        assert said["released"]["cause"] == "released_by_holder"
        assert said["placed"]["start"].startswith("2030-01-01T00:00:00")


async def test_what_ends_in_the_instant_it_began_names_its_node_too(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        held = await fleet.reserve(2)
        await fleet.bound(held)
        await fleet.release(held)
        await fleet.released(held)
        assert places(fleet, held)[-2:] == [("releasing", ["node-0"]), ("released", ["node-0"])]


async def test_what_holds_nothing_names_no_node(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(8)
        waiting = await fleet.reserve(4)
        ((what, data),) = told(fleet, waiting)
        assert (what, data["nodes"], data["node_count"], data["gpus"]) == ("queued", [], 1, 4)
        assert data["reason"] == "needs 4 GPUs on one node; most free on one node: 0"


async def test_a_second_attempt_elsewhere_is_not_mistaken_for_the_first(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        held = await fleet.reserve(8)
        fleet.advance(1)
        await fleet.failed(held)
        await fleet.released(held)
        fleet.execute("update node set cordoned = true where name = 'node-0'")
        fleet.advance(1)
        await fleet.retry_queue(held.reservation_id)
        await fleet.bound(held)
        fleet.advance(1)
        await fleet.release(held)
        await fleet.released(held)
        assert places(fleet, held) == [
            ("placed", ["node-0"]),
            ("binding", ["node-0"]),
            ("releasing", ["node-0"]),
            ("queued", []),
            ("placed", ["node-1"]),
            ("binding", ["node-1"]),
            ("active", ["node-1"]),
            ("releasing", ["node-1"]),
            ("released", ["node-1"]),
        ]


async def test_without_gpus_there_is_no_model(dsn: Dsn) -> None:
    async with open_fleet(dsn, gpus=0) as fleet:
        held = await fleet.reserve(0, vcpus=6)
        data = dict(told(fleet, held))["binding"]
        assert (data["gpu_model"], data["gpus"], data["vcpus"], data["nodes"]) == (None, 0, 6, ["node-0"])


@pytest.mark.parametrize("placer", ["inline", "batch"])
@pytest.mark.parametrize(
    "asked",
    [
        {"gpus": 3, "vcpus": 5, "memory_mib": 700, "nodes": 2},
        {"gpus": 8, "nodes": 2, "whole_node": True},
        {"gpus": 2, "start_s": 600, "vcpus": 1},
        {"gpus": 1, "nodes": 3, "start_s": 600, "duration_s": None},
        {"gpus": 0, "vcpus": 7},
        {"gpus": 0, "nodes": 2, "parts": ["slot.1/4=2"]},
    ],
    ids=str,
)
async def test_placers_say_what_the_rows_say(dsn: Dsn, placer: str, asked: dict[str, Any]) -> None:
    """They know it all already, and describe placements themselves."""
    async with open_fleet(dsn, nodes=3) as fleet:
        if "parts" in asked:
            fleet.execute("update device set time_slots = 4 where slot = 0")
        if placer == "inline":
            held = await fleet.reserve(**asked)
        else:
            draft = await fleet.draft(**asked)
            await fleet.run(reservations.mark_queued, draft, "draft", reason="")
            held = await fleet.retry_queue(draft)
        begun = [] if "start_s" in asked else ["binding"]
        assert [what for what, _ in told(fleet, held)] == ["placed", *begun]
        said = dict(told(fleet, held))
        assert datetime.fromisoformat(said["placed"].pop("start")) == held.window_start
        await fleet.run(reservation_events.publish, "condition", held.reservation_id, {})
        expected = dict(told(fleet, held))["condition"]
        assert expected["nodes"]
        assert all(data == expected for data in said.values())


async def test_events_of_one_reservation_come_in_the_order_of_its_changes(dsn: Dsn) -> None:
    """The request that releases has claimed its idempotency key when the node's word makes the reservation active."""
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(1)
        begin = await fleet.run(outbox.tail)
        claimed, active = threading.Event(), threading.Event()

        def release(tx: Tx) -> None:
            idempotency.claim(tx, idempotency.Key("usr_test", "reservations/release", "key", bytes(32)))
            claimed.set()
            assert active.wait(10)
            locked = reservations.lock_reservation(tx, reservation.reservation_id)
            assert locked is not None
            assert ending.end(tx, fleet.tools, locked, load_now(tx), cause="released_by_holder")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.run, release)
            await trio.to_thread.run_sync(claimed.wait, 10)
            await fleet.bound(reservation)
            active.set()
        assert (await fleet.load(reservation.reservation_id)).state == "releasing"
        events = await fleet.run(partial(outbox.read_after, limit=10, tenant_ids=None), begin)
        assert [event.kind for event in events] == ["reservation.active", "reservation.releasing"]
