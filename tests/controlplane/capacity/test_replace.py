"""The holder of a broken reservation asks: what is broken is replaced elsewhere, or nothing happens; the rest stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from controlplane.capacity.replace import replace_broken
from controlplane.db import nodes, reservations
from controlplane.db.time import load_now
from controlplane.errors import ApiError, Conflict, SoldOut
from controlplane.fleet import retire
from controlplane.model.planner import NoPlan
from tests.controlplane.capacity.test_repair import (
    active,
    booked_on,
    break_gpus,
    go_silent,
    heal_gpus,
    set_node,
    swap_gpu,
    told,
)
from tests.support import referee
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from controlplane.db.ledger import Allocation
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn


async def repair(fleet: LedgerFleet, reservation: Reservation) -> Reservation:
    """As the API does: a refusal is raised, and nothing is kept of its transaction."""

    def run(tx: Tx) -> None:
        locked = reservations.lock_reservation(tx, reservation.reservation_id)
        assert locked is not None
        refused = replace_broken(tx, fleet.tools, locked, load_now(tx))
        if refused is not None:
            raise refused

    await fleet.run(run)
    return await fleet.load(reservation.reservation_id)


def check(fleet: LedgerFleet) -> None:
    fleet.assert_sound()
    referee.assert_sound(fleet.owner_dsn)


async def standing(fleet: LedgerFleet, reservation: Reservation) -> list[tuple[str, str]]:
    """Each open hold as (node's name, state)."""
    return fleet.execute(
        """
        select n.name, a.state from allocation a join node n using (node_id)
        where a.reservation_id = %s and a.released_at is null order by a.node_id, a.allocation_id
        """,
        reservation.reservation_id,
    )


async def say(fleet: LedgerFleet, reservation: Reservation, kind: str, *, state: str) -> None:
    """The nodes of holds in this state speak."""
    for hold in await fleet.holds(reservation):
        if hold.state == state:
            await fleet.deliver(hold.node_id, kind, await fleet.sign(hold, kind))


async def only(fleet: LedgerFleet, reservation: Reservation, state: str) -> Allocation:
    (hold,) = [hold for hold in await fleet.holds(reservation) if hold.state == state]
    return hold


async def test_a_broken_part_of_a_gang_is_replaced_and_the_others_stay(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 16)")
        gang = await active(fleet, 8, nodes=2)
        kept, lost = await fleet.holds(gang)
        break_gpus(fleet, fleet.nodes[1].uuids[3])
        fleet.advance(600)
        gang = await fleet.step(gang)
        # without the holder's word it stays where it is
        assert await standing(fleet, gang) == [("node-0", "bound"), ("node-1", "bound")]
        gang = await repair(fleet, gang)
        assert (gang.state, gang.conditions, gang.billed_from) == ("binding", [], None)
        assert await standing(fleet, gang) == [("node-0", "bound"), ("node-1", "releasing"), ("node-2", "binding")]
        assert booked_on(fleet, gang) == ["node-0", "node-2"]
        (moved,) = told(fleet, gang, "moved")
        assert (moved["moved_from"], moved["moved_to"]) == (["node-1"], ["node-2"])
        assert fleet.nodes[1].uuids[3] in moved["reason"]
        check(fleet)
        # the old node is told to let go, and nothing on it is sold before it has
        spec = await fleet.spec(fleet.nodes[1])
        assert ([a.allocation_id for a in spec.assignments], [t.allocation_id for t in spec.tombstones]) == (
            [],
            [lost.public_id],
        )
        assert isinstance(await fleet.try_place(await fleet.draft(1, tenant_id=2)), NoPlan)
        fleet.advance(60)
        await say(fleet, gang, "allocation_bound", state="binding")
        gang = await fleet.load(gang.reservation_id)
        assert gang.state == "active"
        assert (await fleet.holds(gang))[0] == kept
        check(fleet)
        await say(fleet, gang, "allocation_released", state="releasing")
        gang = await fleet.load(gang.reservation_id)
        assert gang.state == "active"
        assert await standing(fleet, gang) == [("node-0", "bound"), ("node-2", "bound")]
        # seven of eight can be had again
        assert (await fleet.reserve(7, tenant_id=2)).state == "binding"
        check(fleet)
        fleet.advance(600)
        await fleet.release(gang)
        await say(fleet, gang, "allocation_released", state="releasing")
        gang = await fleet.load(gang.reservation_id)
        assert (gang.state, gang.end_cause) == ("released", "released_by_holder")
        # the minute in which not all of it was there is nobody's to pay
        assert fleet.execute(
            "select extract(epoch from upper(during) - lower(during))::int4, quantity from usage_window order by during"
        ) == [(600, 16), (600, 16)]
        assert fleet.execute("select gpus_used from quota") == [(0,)]
        check(fleet)


async def test_the_holder_may_leave_a_node_that_is_being_drained(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        first, second, spare = fleet.nodes
        gang = await active(fleet, 8, nodes=2)
        set_node(fleet, second, draining=True)
        fleet.advance(600)
        gang = await fleet.step(gang)
        # it is well, and stays until its holder says so
        assert (gang.conditions, booked_on(fleet, gang)) == ([], ["node-0", "node-1"])
        set_node(fleet, spare, cordoned=True)
        with pytest.raises(SoldOut, match="for 1 of 2 parts"):
            await repair(fleet, gang)
        set_node(fleet, spare, cordoned=False)
        gang = await repair(fleet, gang)
        assert await standing(fleet, gang) == [("node-0", "bound"), ("node-1", "releasing"), ("node-2", "binding")]
        (moved,) = told(fleet, gang, "moved")
        assert (moved["moved_from"], moved["moved_to"]) == (["node-1"], ["node-2"])
        assert moved["reason"] == "node-1: the node is draining"
        check(fleet)
        await say(fleet, gang, "allocation_bound", state="binding")
        await say(fleet, gang, "allocation_released", state="releasing")
        gang = await fleet.load(gang.reservation_id)
        assert (gang.state, gang.conditions) == ("active", [])
        assert await fleet.run(nodes.load_holders, second.node_id) == []
        # what is broken has the room first, and what is only to be left stays
        set_node(fleet, spare, draining=True)
        set_node(fleet, second, draining=False)
        break_gpus(fleet, first.uuids[0])
        gang = await repair(fleet, gang)
        assert await standing(fleet, gang) == [("node-0", "releasing"), ("node-1", "binding"), ("node-2", "bound")]
        check(fleet)


async def test_without_room_nothing_changes(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        gang = await active(fleet, 8, nodes=2)
        await active(fleet, 2)
        break_gpus(fleet, fleet.nodes[0].uuids[0])
        gang = await fleet.step(gang)
        before = (await fleet.holds(gang), booked_on(fleet, gang), gang)
        with pytest.raises(SoldOut, match="for 1 of 2 parts: needs 8 GPUs on one node"):
            await repair(fleet, gang)
        assert before == (await fleet.holds(gang), booked_on(fleet, gang), await fleet.load(gang.reservation_id))
        # two broken and room for one: still nothing
        fleet.add_node()
        break_gpus(fleet, fleet.nodes[1].uuids[0])
        with pytest.raises(SoldOut, match="for 2 of 2 parts"):
            await repair(fleet, gang)
        assert await standing(fleet, gang) == [("node-0", "bound"), ("node-1", "bound")]
        check(fleet)


@pytest.mark.parametrize("state", ["placed", "queued", "released", "whole", "over"])
async def test_what_cannot_be_repaired_says_why(dsn: Dsn, state: str) -> None:
    async with open_fleet(dsn) as fleet:
        held = await active(fleet, 8)
        match state:
            case "placed":
                held = await fleet.reserve(8, start_s=7200)
            case "queued":
                held = await fleet.reserve(8)
            case "released":
                await fleet.release(held)
                await fleet.released(held)
            case "over":
                break_gpus(fleet, fleet.nodes[0].uuids[0])
                fleet.advance(3600)
            case _:
                pass
        expected = {
            "placed": "has not begun",
            "queued": "is queued; there is nothing to repair",
            "released": "is released; there is nothing to repair",
            "whole": "nothing of it is broken, and no node of it is draining",
            "over": "has reached its end",
        }
        with pytest.raises(Conflict, match=expected[state]):
            await repair(fleet, held)


async def test_other_gpus_of_the_same_node_will_do(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        held = await active(fleet, 2)
        break_gpus(fleet, node.uuids[0])
        held = await repair(fleet, held)
        assert await standing(fleet, held) == [("node-0", "releasing"), ("node-0", "binding")]
        new = await only(fleet, held, "binding")
        assert not set(new.device_uuids) & set(node.uuids[:2])
        check(fleet)
        spec = await fleet.spec(node)
        assert (len(spec.assignments), len(spec.tombstones)) == (1, 1)
        await say(fleet, held, "allocation_bound", state="binding")
        await say(fleet, held, "allocation_released", state="releasing")
        assert (await fleet.load(held.reservation_id)).state == "active"
        # what was well of the old part can be had
        assert (await fleet.reserve(5)).state == "binding"
        check(fleet)


async def test_a_replacement_that_fails_leaves_the_rest_running(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        gang = await active(fleet, 8, nodes=2)
        set_node(fleet, fleet.nodes[1], provision_state="quarantined")
        gang = await repair(fleet, gang)
        assert booked_on(fleet, gang) == ["node-0", "node-2"]
        await say(fleet, gang, "allocation_failed", state="binding")
        gang = await fleet.load(gang.reservation_id)
        assert (gang.state, gang.bind_deadline, gang.end_cause) == ("binding", None, None)
        assert gang.impaired_reason == "node-2: the node did not bind it"
        assert told(fleet, gang, "replacement_failed")[0]["detail"] == "CDI_WRITE: no space"
        assert (await standing(fleet, gang))[0] == ("node-0", "bound")
        check(fleet)
        # the clock does not end it either
        fleet.advance(900)
        gang = await fleet.step(gang)
        assert gang.state == "binding"
        # asked again, it goes where it has not failed yet
        gang = await repair(fleet, gang)
        assert booked_on(fleet, gang) == ["node-0", "node-3"]
        await say(fleet, gang, "allocation_bound", state="binding")
        gang = await fleet.load(gang.reservation_id)
        assert (gang.state, gang.conditions) == ("active", [])
        await say(fleet, gang, "allocation_released", state="releasing")
        check(fleet)


async def test_a_replacement_that_says_nothing_is_dropped_in_time(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        gang = await active(fleet, 8, nodes=2, duration_s=86_400)
        break_gpus(fleet, *fleet.nodes[0].uuids)
        gang = await repair(fleet, gang)
        fleet.advance(301)
        gang = await fleet.step(gang)
        assert (gang.state, gang.impaired_reason) == ("binding", "node-2: the node did not bind it")
        late = await only(fleet, gang, "bound")
        assert late.node_id == fleet.nodes[1].node_id
        check(fleet)
        # its word that it has bound comes too late to matter
        fleet_hold = next(hold for hold in await fleet.holds(gang) if hold.node_id == fleet.nodes[2].node_id)
        await fleet.deliver(fleet_hold.node_id, "allocation_bound", await fleet.sign(fleet_hold, "allocation_bound"))
        assert (await fleet.load(gang.reservation_id)).state == "binding"
        # with nothing else free, the node that failed is tried once more when it has let go
        with pytest.raises(SoldOut):
            await repair(fleet, gang)
        await say(fleet, gang, "allocation_released", state="releasing")
        gang = await repair(fleet, gang)
        assert booked_on(fleet, gang) == ["node-1", "node-2"]
        await say(fleet, gang, "allocation_bound", state="binding")
        assert (await fleet.load(gang.reservation_id)).state == "active"
        check(fleet)


async def test_one_that_lost_all_it_had_ends_at_once_when_it_is_released(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        fleet.execute("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 8)")
        held = await active(fleet, 8)
        break_gpus(fleet, *fleet.nodes[0].uuids)
        fleet.advance(60)
        held = await repair(fleet, held)
        await say(fleet, held, "allocation_released", state="releasing")
        await say(fleet, held, "allocation_failed", state="binding")
        await say(fleet, held, "allocation_released", state="releasing")
        held = await fleet.load(held.reservation_id)
        assert (held.state, await standing(fleet, held)) == ("binding", [])
        assert fleet.execute("select gpus_used from quota") == [(8,)]
        check(fleet)
        held = await fleet.release(held)
        assert (held.state, held.end_cause) == ("released", "released_by_holder")
        assert fleet.execute("select gpus_used from quota") == [(0,)]
        referee.assert_at_rest(fleet.owner_dsn)


async def test_its_window_ends_while_a_replacement_binds(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        gang = await active(fleet, 8, nodes=2, duration_s=600)
        fleet.advance(500)
        break_gpus(fleet, *fleet.nodes[0].uuids)
        gang = await repair(fleet, gang)
        fleet.advance(100)
        gang = await fleet.step(gang)
        assert (gang.state, gang.end_cause) == ("releasing", "window_ended")
        # the end is not there before the node of the broken part has let go too
        node = fleet.nodes[0]
        for hold in await fleet.holds(gang):
            if hold.node_id != node.node_id:
                await fleet.deliver(hold.node_id, "allocation_released", await fleet.sign(hold, "allocation_released"))
        assert (await fleet.load(gang.reservation_id)).state == "releasing"
        check(fleet)
        await say(fleet, gang, "allocation_released", state="releasing")
        assert (await fleet.load(gang.reservation_id)).state == "released"
        referee.assert_at_rest(fleet.owner_dsn)


async def test_a_dead_node_is_removed_under_what_was_replaced(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        gang = await active(fleet, 8, nodes=2, duration_s=86_400)
        dead = fleet.nodes[1]
        go_silent(fleet, dead)
        fleet.advance(1000)
        gang = await fleet.step(gang)
        gang = await repair(fleet, gang)
        await say(fleet, gang, "allocation_bound", state="binding")
        await fleet.run(
            retire.clear_node,
            fleet.tools,
            dead.node_id,
            principal="usr_op",
            reason="burnt",
            now=await fleet.run(load_now),
        )
        gang = await fleet.load(gang.reservation_id)
        # it goes on where it is: nothing of it was there any more
        assert (gang.state, gang.end_cause) == ("active", None)
        assert fleet.execute("select release_evidence, forced_by from allocation where node_id = %s", dead.node_id) == [
            ("forced", "usr_op")
        ]
        assert await standing(fleet, gang) == [("node-0", "bound"), ("node-2", "bound")]
        check(fleet)


async def test_one_that_is_still_binding_can_be_repaired(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        gang = await fleet.reserve(8, nodes=2)
        first, _ = await fleet.holds(gang)
        await fleet.deliver(first.node_id, "allocation_bound", await fleet.sign(first, "allocation_bound"))
        set_node(fleet, fleet.nodes[1], provision_state="quarantined")
        gang = await fleet.step(gang)
        assert (gang.state, gang.conditions) == ("binding", ["impaired"])
        gang = await repair(fleet, gang)
        check(fleet)
        await say(fleet, gang, "allocation_bound", state="binding")
        gang = await fleet.load(gang.reservation_id)
        assert gang.state == "active"
        assert await standing(fleet, gang) == [("node-0", "bound"), ("node-1", "releasing"), ("node-2", "bound")]
        check(fleet)


async def test_an_heir_can_be_taken_when_the_old_hold_is_gone(dsn: Dsn) -> None:
    """The only node: its GPU was replaced, so the holder gives up the old part and gets the slots again."""
    async with open_fleet(dsn) as fleet:
        (node,) = fleet.nodes
        held = await active(fleet, 8)
        swap_gpu(fleet, node, 2, "GPU-heir")
        with pytest.raises(SoldOut):
            await repair(fleet, held)
        fleet.add_node()
        held = await repair(fleet, held)
        assert booked_on(fleet, held) == ["node-1"]
        await say(fleet, held, "allocation_released", state="releasing")
        other = await fleet.reserve(8)
        assert "GPU-heir" in (await fleet.holds(other))[0].device_uuids
        check(fleet)


async def test_what_heals_while_it_is_asked_for_stays(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        held = await active(fleet, 8)
        break_gpus(fleet, fleet.nodes[0].uuids[0])
        held = await fleet.step(held)
        heal_gpus(fleet)
        with pytest.raises(ApiError, match="nothing of it is broken"):
            await repair(fleet, held)
        assert (await fleet.step(held)).conditions == []
