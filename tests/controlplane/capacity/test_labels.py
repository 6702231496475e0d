"""Selectors and strategies in the ledger: where a reservation may go, kept to while it waits or is moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db import nodes, views
from tests.support.ledgers import LedgerFleet, open_fleet

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from tests.support.ledgers import FleetNode
    from tests.support.postgres import Dsn


async def label(fleet: LedgerFleet, node: FleetNode, **labels: str) -> None:
    await fleet.run(nodes.set_labels, node.node_id, labels)


def node_of(fleet: LedgerFleet, reservation: Reservation) -> list[int]:
    rows = fleet.execute(
        "select node_id from booking where reservation_id = %s order by node_id", reservation.reservation_id
    )
    return [row[0] for row in rows]


async def test_a_reservation_goes_where_its_selector_says(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=4) as fleet:
        for node, zone in zip(fleet.nodes, "abba", strict=True):
            await label(fleet, node, zone=zone, **({"spot": ""} if node is fleet.nodes[1] else {}))
        first, second, third, fourth = (node.node_id for node in fleet.nodes)
        assert node_of(fleet, await fleet.reserve(8, selector=["zone=b", "!spot"])) == [third]
        assert node_of(fleet, await fleet.reserve(4, nodes=2, selector=["zone=a"])) == [first, fourth]
        # the other zone is empty, and is not what was asked for
        waiting = await fleet.reserve(8, selector=["zone=a"])
        assert waiting.state == "queued"
        assert (
            waiting.pending_reason == "needs 8 GPUs on one node; most free on one node: 4, of those that match zone=a"
        )
        assert node_of(fleet, await fleet.reserve(8)) == [second]
        fleet.assert_sound()


async def test_one_that_waits_is_placed_when_a_node_gets_the_label(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        waiting = await fleet.reserve(1, selector=["zone=a"])
        assert (waiting.state, waiting.pending_reason) == ("queued", "no node of this pool matches zone=a")
        assert (await fleet.retry_queue(waiting.reservation_id)).state == "queued"
        await label(fleet, fleet.nodes[1], zone="a")
        placed = await fleet.retry_queue(waiting.reservation_id)
        assert placed.state == "binding"
        assert node_of(fleet, placed) == [fleet.nodes[1].node_id]


async def test_one_that_is_moved_stays_inside_its_selector(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        for node in fleet.nodes[1:]:
            await label(fleet, node, zone="a")
        later = await fleet.reserve(8, start_s=3600, selector=["zone=a"])
        (booked,) = node_of(fleet, later)
        fleet.execute("update node set cordoned = true where node_id = %s", booked)
        await fleet.step(later)
        (moved,) = node_of(fleet, later)
        assert {booked, moved} == {node.node_id for node in fleet.nodes[1:]}
        # other labels end nothing that is booked, and there is nowhere else to go
        fleet.execute("update node set cordoned = true where node_id = %s", moved)
        impaired = await fleet.step(later)
        assert impaired.conditions == ["impaired"]
        assert node_of(fleet, later) == [moved]


async def test_labels_are_part_of_what_a_planner_must_have_seen(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        (before,) = await fleet.run(views.load_node_views, fleet.pool_id)
        await label(fleet, fleet.nodes[0], zone="a", disk="nvme")
        (after,) = await fleet.run(views.load_node_views, fleet.pool_id)
        assert after.labels == (("disk", "nvme"), ("zone", "a"))
        assert after.placement_gen > before.placement_gen
        await label(fleet, fleet.nodes[0], disk="nvme", zone="a")
        assert await fleet.run(views.load_node_views, fleet.pool_id) == [after]


async def test_what_is_to_be_spread_stays_so_while_it_waits(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        first = await fleet.reserve(7)
        assert node_of(fleet, await fleet.reserve(1)) == node_of(fleet, first)
        (other,) = node_of(fleet, await fleet.reserve(1, strategy="spread"))
        assert [other] != node_of(fleet, first)
        waiting = await fleet.reserve(8, strategy="spread")
        assert (waiting.state, waiting.strategy) == ("queued", "spread")
        fleet.add_node()
        assert node_of(fleet, await fleet.retry_queue(waiting.reservation_id)) == [fleet.nodes[2].node_id]
